"""Description of a run: only a run with the same description resumes a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import zlib
from functools import partial
from typing import Any

import torch

from gas.cli.setup import Setup
from gas.history import Codec


def describe_run(experiment: Setup, seed: int, split: int) -> dict[str, Any]:
    """Describe a run of an experiment: its options except ``epochs``, and its graph."""
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
        "augmented": _to_json(experiment.augment),
        "training": _to_json(experiment.training),
        "prefetch": experiment.prefetch,
        "memory_budget": experiment.memory_budget,
        "graph": _describe_graph(experiment),
        "seed": seed,
        "split": split,
    }


def _describe_graph(experiment: Setup) -> str:
    """Describe a graph by its sizes, and by a checksum of labels and masks."""
    crc = 0
    for key in ("y", "train_mask", "val_mask", "test_mask"):
        values = experiment.data[key].cpu().contiguous()
        crc = zlib.crc32(values.view(-1).view(torch.uint8).numpy().data, crc)
    return f"{experiment.graph.shown}, labels and masks {crc:08x}"


def _to_json(value: Any) -> Any:
    """Convert an option to JSON values, equal in every process."""
    if isinstance(value, partial):
        return [_to_json(value.func), _to_json(value.keywords)]
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
