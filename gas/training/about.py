"""What a training has to have in common with its checkpoints to go on from them."""

from __future__ import annotations

import dataclasses
import json
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gas.history import Codec

if TYPE_CHECKING:
    from gas.training.experiment import Experiment


def about_of(experiment: Experiment, seed: int, split: int) -> dict[str, Any]:
    """A run of an experiment in words: its options, but for how long it trains, and its graph."""
    settings = {**dataclasses.asdict(experiment.settings), "epochs": None}
    histories = experiment.histories
    return {
        "model": experiment.cls.__name__,
        "settings": json.loads(json.dumps(settings)),
        "histories": {
            "dtype": str(Codec.of(histories.get("dtype") or torch.float32)),
            "store": str(histories.get("store")),
        },
        "micro_batches": experiment.micro_batches,
        "full_batch": experiment.full_batch,
        "evaluation": experiment.evaluation,
        "refresh": experiment.refresh,
        "augmented": _plainly(experiment.augment),
        "training": _plainly(experiment.training),
        "prefetch": experiment.prefetch,
        "memory_budget": experiment.memory_budget,
        "graph": _graph_in_words(experiment),
        "seed": seed,
        "split": split,
    }


def _graph_in_words(experiment: Experiment) -> str:
    """Tells graphs from each other, by their sizes, labels and masks."""
    crc = 0
    for key in ("y", "train_mask", "val_mask", "test_mask"):
        values = experiment.data[key].cpu().contiguous()
        crc = zlib.crc32(values.view(-1).view(torch.uint8).numpy().data, crc)
    return f"{experiment.graph.shown}, labels and masks {crc:08x}"


def _plainly(value: Any) -> Any:
    """What an option is, in words that are the same in every process."""
    if isinstance(value, partial):
        return [_plainly(value.func), _plainly(value.keywords)]
    if isinstance(value, dict):
        return {key: _plainly(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
