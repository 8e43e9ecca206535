"""Schedule of checkpoints: every few epochs or minutes, and before a signal ends the run."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

import gas
from gas.checkpoint import checkpoints, finish, peek, prune
from gas.native import check_integer
from gas.training import Progress, Run, find_nonfinite_tensor

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Checkpoints:
    """Folder and schedule of the checkpoints of a run of :class:`gas.cli.Experiment`.

    While it runs, SIGTERM and Ctrl-C wait for the step that is under way (for the epoch, in full
    batch and with ``prefetch``), write one more, and do then what they did before; a second one
    does so at once. When the run has ended, the last
    checkpoint stays.

    Args:
        folder: The folder of this run alone.
        every: After how many epochs, or, in the middle of one if need be, after what time: like
            ``"30s"``, ``"10min"`` or ``"2h"``. (default: ``1``)
        resume: Go on from the newest that is there, if there is one. (default: ``False``)
        keep: How many stay. (default: ``3``)
        background: Write beside the training; see :func:`gas.save`. (default: ``False``)

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
    ) -> None:
        self.folder = Path(folder)
        self.seconds = seconds_of(every)
        self.every = None if self.seconds else int(every)  # Which was checked.
        check_integer("keep", keep, 1)
        self.keep, self.background = keep, background
        there = checkpoints(self.folder)
        if there and not resume:
            raise ValueError(
                f"'folder' is {str(folder)!r}, which has {there[-1].name} of an earlier run: pass "
                "resume=True to go on, or name another folder"
            )
        self.resumes = bool(there)
        self.came: int | None = None  # The signal that ends the run.
        self._frame: FrameType | None = None
        self._handlers: dict[int, Any] = {}
        self._last = time.monotonic()
        self._saved: tuple[int, int] | None = None  # Epochs, and steps, at the last one.

    def start(
        self,
        model: gas.ScalableGNN,
        optimizer: Any,
        loader: Any,
        run: Run,
        progress: Progress,
        about: dict[str, Any],
        perm: Tensor | None = None,
    ) -> None:
        """Register the parts of the training, and load the newest checkpoint, if it is to resume.

        Raises:
            ValueError: If what had begun was another training, naming what differs.
        """
        self._parts = (model, optimizer, loader if hasattr(loader, "state_dict") else None)
        self._run, self._progress, self._about, self._perm = run, progress, about, perm
        if not self.resumes:
            return
        found = peek(self.folder, "about").get("about")
        found = found if isinstance(found, dict) else {}
        before, now = _options_of(found), _options_of(about)
        for key in [*now, *before]:
            old, new = before.get(key), now.get(key)
            is_off = all(value is None or value is False for value in (old, new))
            if old != new and not is_off:  # An option that is off may be left out.
                raise ValueError(
                    f"'resume' goes on with {str(self.folder)!r}, where {key!r} is {old!r}, but "
                    f"now it is {new!r}: choose as before, or name another folder"
                )
        gas.load(self.folder, *self._parts, run=run, progress=progress)
        self._saved = (len(run), progress.steps)

    def after_step(self) -> None:
        """Write one in the middle of an epoch, if it is time and the training can resume there.

        It can't where the whole graph is one step, and where the next batch has read rows already.
        """
        model, _, loader = self._parts
        if loader is None or model.prefetch:
            return
        if self.came is not None or self._is_late:
            self.write()
        self._leave()

    def after_epoch(self) -> None:
        """Write one between two epochs, if it is time."""
        due = self.every is not None and len(self._run) % self.every == 0
        if due or self.came is not None or self._is_late:
            self.write()
        self._leave()

    def end(self) -> None:
        """Write the last one of a run, and remove the others."""
        self.write(background=False)
        finish(self.folder)
        prune(self.folder.absolute(), 1)

    def write(self, background: bool | None = None) -> None:
        """Write one, unless nothing has happened since the last, or the training has diverged.

        A loss or a weight that isn't finite says so, of which a GPU's are looked at here for the
        first time; the epoch ends with the error.
        """
        if background is None:
            background = self.background and self.came is None
        now = (len(self._run), self._progress.steps)
        if now == self._saved or not self._is_finite:
            return
        gas.save(
            self.folder,
            *self._parts,
            keep=self.keep,
            background=background,
            run=self._run,
            progress=self._progress,
            about=self._about,
            perm=self._perm,  # Which rows of the graph as it was given the parts have.
        )
        self._saved, self._last = now, time.monotonic()

    @property
    def _is_finite(self) -> bool:
        is_finite = math.isfinite(float(self._progress.loss))
        return is_finite and find_nonfinite_tensor(dict(self._parts[0].named_parameters())) is None

    @property
    def _is_late(self) -> bool:
        return self.seconds is not None and time.monotonic() - self._last >= self.seconds

    # Signals --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Delay SIGTERM and Ctrl-C in this context until the next checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._handlers = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._leave()  # It came while the last one was written.

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.came is None:
            self.came, self._frame = number, frame
        else:
            self._pass_on(number, frame)

    def _leave(self) -> None:
        if self.came is not None:
            self._pass_on(self.came, self._frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal would have done."""
        handler = self._handlers.get(number)
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)


def _options_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of groups such as ``settings`` by their own names."""
    options: dict[str, Any] = {}
    for key, value in about.items():
        options |= _options_of(value) if isinstance(value, dict) else {key: value}
    return options


def seconds_of(every: int | str) -> float | None:
    """Convert a time to seconds, and a number of epochs to ``None``.

    Raises:
        ValueError: If it is neither.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", str(every).strip())
    if found and float(found[1]) > 0:
        return float(found[1]) * UNITS[found[2]]
    try:
        check_integer("every", int(every) if isinstance(every, str) else every, 1)
    except ValueError as error:
        raise ValueError(
            f"'every' is {every!r}, expected a number of epochs, or a time such as '10min'"
        ) from error
    return None
