"""Schedule of checkpoints: every few epochs or minutes, and before a signal ends the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import gas
from gas.checkpoint import checkpoints, finish, peek, prune
from gas.cli.setup import Setup
from gas.graph import MASKS
from gas.history import Codec
from gas.native import check_integer
from gas.training import AveragedWeights, Progress, Run, find_nonfinite_tensor

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Checkpoints:
    """Folder and schedule of the checkpoints of a run of :class:`gas.cli.Experiment`.

    During a run, SIGTERM and Ctrl-C wait for the end of the current step (of the epoch, in full
    batch and with ``prefetch``), write one more checkpoint, and then act as usual; a second signal
    acts at once. The last checkpoint of a finished run is kept.

    Args:
        folder: The folder, of this run alone.
        every: The interval: a number of epochs, or a time such as ``"30s"``, ``"10min"`` or
            ``"2h"``, after which one is written even within an epoch. (default: ``1``)
        resume: Continue from the newest checkpoint, if there is one. (default: ``False``)
        keep: How many checkpoints to keep. (default: ``3``)
        background: Write while training continues; see :func:`gas.save`. (default: ``False``)
        epochs: The epochs of the run, of which its checkpoints mayn't have more. (default: any)

    Raises:
        ValueError: If an argument is unusable, or there are checkpoints already and ``resume`` is
            ``False``.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int | str = 1,
        resume: bool = False,
        keep: int = 3,
        background: bool = False,
        epochs: int | None = None,
    ) -> None:
        self.folder, self.epochs = Path(folder), epochs
        self.every, self.seconds = parse_interval(every)
        check_integer("keep", keep, 1)
        self.keep, self.background = keep, background
        there = checkpoints(self.folder)
        if there and not resume:
            raise ValueError(
                f"'folder' is {str(folder)!r}, which has {there[-1].name} of an earlier run: pass "
                "resume=True to go on, or name another folder"
            )
        self.resumes = bool(there)
        self.received: int | None = None  # The signal that ends the run.
        self._frame: FrameType | None = None
        self._handlers: dict[int, Any] = {}
        self._last = time.monotonic()
        self._saved: tuple[int, int] | None = None  # Epochs and steps of the last checkpoint.

    def start(
        self,
        model: gas.ScalableGNN,
        optimizer: Any,
        loader: Any,
        run: Run,
        progress: Progress,
        about: dict[str, Any],
        perm: Tensor | None = None,
        average: AveragedWeights | None = None,
    ) -> None:
        """Register the parts of the training, and load the newest checkpoint to resume from it.

        Raises:
            ValueError: If the checkpoint is of another training, naming what differs.
        """
        self._parts = (model, optimizer, loader if hasattr(loader, "state_dict") else None)
        self._run, self._progress, self._about, self._perm = run, progress, about, perm
        self._objects: dict[str, Any] = {"run": run, "progress": progress}
        if average is not None and average.is_on:
            self._objects["average"] = average
        if not self.resumes:
            return
        found = peek(self.folder, "about").get("about")
        found = found if isinstance(found, dict) else {}
        before, now = _flatten_options(found), _flatten_options(about)
        # Older checkpoints lack these, and have the number of runs.
        missing = {"warm_up": 0, "evaluate_every": 1, "feature_dtype": now["feature_dtype"]}
        before = missing | before | {"runs": None}
        for key in [*now, *before]:
            old, new = before.get(key), now.get(key)
            is_off = all(value is None or value is False for value in (old, new))
            if old != new and not is_off:  # An option that is off may be left out.
                raise ValueError(
                    f"'resume' goes on with {str(self.folder)!r}, where {key!r} is {old!r}, but "
                    f"now it is {new!r}: choose as before, or name another folder"
                )
        gas.load(self.folder, *self._parts, **self._objects)
        if self.epochs is not None and len(run) > self.epochs:
            raise ValueError(
                f"'epochs' is {self.epochs}, but the run in {str(self.folder)!r} has {len(run)}: "
                "choose as many or more, or name another folder"
            )
        self._saved = (len(run), progress.steps)

    def after_step(self) -> None:
        """Write a checkpoint within an epoch, if one is due and training can resume from it.

        Training can't resume within an epoch if the whole graph is one step, or if the rows of the
        next batch have been prefetched.
        """
        model, _, loader = self._parts
        if loader is None or model.prefetch:
            return
        if self.received is not None or self._is_due:
            self.write()
        self._stop_if_signalled()

    def after_epoch(self) -> None:
        """Write a checkpoint between two epochs, if one is due."""
        due = self.every is not None and len(self._run) % self.every == 0
        if due or self.received is not None or self._is_due:
            self.write()
        self._stop_if_signalled()

    def end(self) -> None:
        """Write the last checkpoint of a run, and remove the others."""
        self.write(background=False)
        finish(self.folder)
        prune(self.folder.absolute(), 1)

    def write(self, background: bool | None = None) -> None:
        """Write a checkpoint, unless nothing has changed since the last or training has diverged.

        It has diverged if a loss or a weight isn't finite. The error follows at the end of the
        epoch.
        """
        if background is None:
            background = self.background and self.received is None
        now = (len(self._run), self._progress.steps)
        if now == self._saved or not self._is_finite:
            return
        gas.save(
            self.folder,
            *self._parts,
            keep=self.keep,
            background=background,
            **self._objects,
            about=self._about,
            perm=self._perm,  # The original row of every node.
        )
        self._saved, self._last = now, time.monotonic()

    @property
    def _is_finite(self) -> bool:
        is_finite = math.isfinite(float(self._progress.loss))
        return is_finite and find_nonfinite_tensor(dict(self._parts[0].named_parameters())) is None

    @property
    def _is_due(self) -> bool:
        return self.seconds is not None and time.monotonic() - self._last >= self.seconds

    # Signals --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def delay_signals(self) -> Iterator[None]:
        """Delay SIGTERM and Ctrl-C in this context until the next checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._stop_if_signalled()  # A signal that came while the last checkpoint was written.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal for later; let a second one act at once."""
        if self.received is None:
            self.received, self._frame = number, frame
        else:
            self._call_handler(number, frame)

    def _stop_if_signalled(self) -> None:
        """Let a signal act that came earlier."""
        if self.received is not None:
            self._call_handler(self.received, self._frame)

    def _call_handler(self, number: int, frame: FrameType | None) -> None:
        """Call the previous handler of a signal, and end the program if it returns."""
        handler = self._handlers.get(number)
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)


# Description of a run, by which a checkpoint is known ---------------------------------------------


def describe_run(experiment: Setup, seed: int, split: int) -> dict[str, Any]:
    """Describe a run of an experiment: its graph, and its options but ``epochs`` and ``runs``."""
    settings = {**dataclasses.asdict(experiment.settings), "epochs": None, "runs": None}
    histories, x = experiment.histories, experiment.data.x
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
        "evaluate_every": experiment.evaluate_every,
        "refresh": experiment.refresh,
        "augmented": _to_json(experiment.augment),
        "training": _to_json(experiment.training),
        "prefetch": experiment.prefetch,
        "memory_budget": experiment.memory_budget,
        "graph": _describe_graph(experiment),
        "feature_dtype": str(getattr(x, "codec", x.dtype)).removeprefix("torch."),
        "seed": seed,
        "split": split,
    }


def _describe_graph(experiment: Setup) -> str:
    """Describe a graph by its sizes, and by a checksum of labels and masks."""
    crc = 0
    for key in ("y", *MASKS):
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


def _flatten_options(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of nested groups such as ``settings`` in one dictionary."""
    options: dict[str, Any] = {}
    for key, value in about.items():
        options |= _flatten_options(value) if isinstance(value, dict) else {key: value}
    return options


def parse_interval(every: int | str) -> tuple[int | None, float | None]:
    """Return the epochs and the seconds of an interval, one of which is ``None``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", str(every).strip())
    if found and float(found[1]) > 0:
        return None, float(found[1]) * SECONDS[found[2]]
    try:
        epochs = int(every) if isinstance(every, str) else every
        check_integer("every", epochs, 1)
    except ValueError as error:
        raise ValueError(
            f"'every' is {every!r}, expected a number of epochs, or a time such as '10min'"
        ) from error
    return epochs, None
