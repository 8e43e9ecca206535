"""``save`` and ``load``: write a checkpoint of a training, and resume from it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, overload

from torch.nn import Module

from gas.checkpoint.files import (
    checkpoints,
    find_source,
    next_number,
    prune,
    read_manifest,
    sweep,
)
from gas.checkpoint.histories import MODELS
from gas.checkpoint.ranks import load_on_ranks, save_on_ranks
from gas.checkpoint.reader import CheckpointReader
from gas.checkpoint.target import LoadTarget
from gas.checkpoint.tensors import CheckpointError
from gas.checkpoint.values import from_json
from gas.checkpoint.writer import CheckpointWriter, history_writers, unwrap_model
from gas.native import check_flags, check_integer, check_path
from gas.scalable import ScalableGNN

_under_way: dict[Path, Future[Path]] = {}  # Background saves, by folder.


@overload
def save(
    folder: str | Path, model: Module, optimizer: Any = ..., loader: Any = ..., *,
    keep: int = ..., histories: bool = ..., background: Literal[False] = ..., **state: Any,
) -> Path: ...  # fmt: skip


@overload
def save(
    folder: str | Path, model: Module, optimizer: Any = ..., loader: Any = ..., *,
    keep: int = ..., histories: bool = ..., background: Literal[True], **state: Any,
) -> Future[Path]: ...  # fmt: skip


@overload
def save(
    folder: str | Path, model: Module, optimizer: Any = ..., loader: Any = ..., *,
    keep: int = ..., histories: bool = ..., background: bool, **state: Any,
) -> Path | Future[Path]: ...  # fmt: skip


@check_flags
def save(
    folder: str | Path,
    model: Module,
    optimizer: Any = None,
    loader: Any = None,
    *,
    keep: int = 3,
    histories: bool = True,
    background: bool = False,
    **state: Any,
) -> Path | Future[Path]:
    """Write a checkpoint, from which a training can resume exactly.

    It has the weights, the histories with their ages, the optimizer, the random states of Python,
    NumPy and PyTorch, and the order and progress of the epoch of a loader, with its augmentation::

        for epoch in range(epochs):
            train_epoch(model, loader, optimizer)
            gas.save("checkpoints", model, optimizer, loader, epoch=epoch)

    The folder gets ``checkpoint_000001``, then ``checkpoint_000002``, and so on: tensors in the
    format of safetensors, ``model.safetensors`` with the names that the model's ``state_dict``
    has (for a model of :func:`gas.to_scalable`, those of the module that it wraps), and the rest
    in ``manifest.json``. Checkpoints are written atomically, also if the process is killed or
    power fails. They contain no code. :func:`gas.load` reads them.

    In distributed training, with :func:`gas.distribute`, every rank calls it, and writes its state
    into ``ranks_2/0/checkpoint_000001`` and so on; ``newest.json``, which is written last, names
    the checkpoint that all ranks have completed. All ranks must have access to the folder.

    Args:
        folder: The folder for the checkpoints of the training, which is made.
        model: The model.
        optimizer: The optimizer, or anything else with ``state_dict()``. (default: none)
        loader: The loader of the training, during or between epochs: a
            :class:`gas.SubgraphLoader`, a :class:`gas.PrefetchLoader`, or anything else with
            ``state_dict()``. (default: none)
        keep: The number of checkpoints to keep: older ones are removed once the new one is
            complete. (default: ``3``)
        histories: Write the histories; otherwise they have to be initialised again.
            (default: ``True``)
        background: Copy the state into memory, write it in a thread, and return a
            ``concurrent.futures.Future`` of the path. The next checkpoint of the folder waits for
            it, and raises its error. Not for distributed training. (default: ``False``)
        **state: Further values, which :func:`gas.load` returns: numbers, text, tensors, and lists
            and dictionaries of these. For objects with ``state_dict()``, such as a scheduler, and
            for a ``torch.Generator``, their state is saved.

    Returns:
        The folder of the new checkpoint; with ``background``, a ``Future`` of it.

    Raises:
        ValueError: If a value can't be saved, naming it; nothing was written.
        OSError: If the disk is full or the folder isn't writable; earlier checkpoints are
            unchanged. An error on one rank is raised on all, and names the rank.
        RankError: A ``RuntimeError``, if a rank has ended or doesn't answer in time.
    """
    check_path("folder", folder, "a folder of checkpoints")
    check_integer("keep", keep, 1)
    model = unwrap_model(model)
    folder = Path(folder).absolute()
    if isinstance(model, ScalableGNN) and model.ranks is not None:
        if background:
            raise ValueError(
                "'background' is True, but the model is one of many ranks, which wait for each "
                "other when they write a checkpoint: leave it out"
            )
        return save_on_ranks(folder, model, optimizer, loader, keep, histories, state)
    content = CheckpointWriter(folder, model, optimizer, loader, state)
    finish(folder)
    if background:
        content.copy()
    parts = history_writers(model, not background) if histories else {}

    def write() -> Path:
        sweep(folder)  # It may be what fills the disk.
        path = content.write(folder, next_number(folder), parts)
        prune(folder, keep)
        return path

    if not background:
        return write()
    future: Future[Path] = Future()
    future.set_running_or_notify_cancel()  # Nothing cancels it from here on.

    def settle() -> None:
        try:
            future.set_result(write())
        except BaseException as error:  # future.result() raises it.
            future.set_exception(error)

    # No executor: it takes no work once the main thread has ended, as other threads train on.
    threading.Thread(target=settle, name="gas-checkpoint").start()
    _under_way[folder] = future
    return future


def finish(folder: str | Path) -> None:
    """Wait for a background save into the folder, and raise its error."""
    future = _under_way.pop(Path(folder).absolute(), None)
    if future is not None:
        future.result()


@check_flags
def load(
    folder: str | Path,
    model: Module | None = None,
    optimizer: Any = None,
    loader: Any = None,
    *,
    histories: bool = True,
    random_state: bool = True,
    **objects: Any,
) -> dict[str, Any]:
    """Resume from a checkpoint of :func:`gas.save`.

    Everything is read and checked before anything is changed::

        state = gas.load("checkpoints", model, optimizer, loader)
        for epoch in range(state["epoch"] + 1, epochs):
            ...

    A loader continues an epoch that had begun with its next mini-batch. With a ``prefetch=1``
    model, the first mini-batch then pulls rows that are one step newer than without interruption;
    everything else is bitwise the same.

    In distributed training, with :func:`gas.distribute`, every rank calls it, and resumes from its
    own state, including rows in transit between ranks. If the number of ranks or the partition of
    the graph has changed, histories and their ages are redistributed by the nodes of the original
    graph; the loader then begins an epoch, random states aren't restored, and a warning is given.
    A single process with the whole graph loads checkpoints of many ranks in the same way, and vice
    versa. Without a model, the state is that of rank 0.

    Args:
        folder: The folder of the checkpoints, of which the newest complete one is read; or one
            checkpoint; that of a rank stands for those of all ranks.
        model: Its weights and histories are restored. A plain module gets the weights of the model
            that :func:`gas.to_scalable` has made of it, and vice versa. (default: none)
        optimizer: The optimizer of ``model``, of the same class as before. (default: none)
        loader: A loader of the same graph and the same parts; for many ranks, the parts may differ,
            and histories need it, unless :func:`gas.distribute` was given the graph.
            (default: none)
        histories: Load the histories. (default: ``True``)
        random_state: Set the random numbers of Python, NumPy and PyTorch. (default: ``True``)
        **objects: What was saved by ``state_dict()``, under the same names.

    Returns:
        What else was saved, by its names.

    Raises:
        CheckpointError: A ``ValueError``: if there is no checkpoint, or it is damaged, of something
            else, or of a newer version; it gives the reason, and names an earlier checkpoint that
            is intact.
        ValueError: If it is that of another model, optimizer, graph or partition. Nothing was
            changed in either case. An error on one rank is raised on all, and names the rank.
        RankError: A ``RuntimeError``, if a rank has ended or doesn't answer in time.
    """
    check_path("folder", folder, "a folder of checkpoints")
    folder = Path(folder).absolute()
    if folder in _under_way:
        with contextlib.suppress(Exception):  # Its future raises the error.
            _under_way[folder].result()
    model = None if model is None else unwrap_model(model)
    histories = histories and isinstance(model, MODELS)
    into = LoadTarget(model, optimizer, loader, histories, random_state, objects)
    source = find_source(folder) if into.ranks is None else None
    if source is None or source.world_size:
        return load_on_ranks(folder, into)
    try:
        found = CheckpointReader(source.path(0))
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_suggest_checkpoint(folder)}") from error
    return found.prepare(into)()


def peek(folder: str | Path, *names: str) -> dict[str, Any]:
    """Read only some names of the newest checkpoint, of rank 0.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    folder = Path(folder).absolute()
    source = find_source(folder)
    try:
        state = read_manifest(source.path(0)).get("state")
    except CheckpointError as error:
        cure = "" if source.world_size else _suggest_checkpoint(folder)
        raise CheckpointError(f"{error}{cure}") from error
    state = state if isinstance(state, dict) else {}
    try:
        return {name: from_json(state[name], {}) for name in names if name in state}
    except CheckpointError:  # Tensors are in another file.
        state = CheckpointReader(source.path(0)).values["state"]
        return {name: state[name] for name in names if name in state}


def _suggest_checkpoint(folder: Path) -> str:
    """Name an earlier checkpoint of a folder that can be loaded instead."""
    for path in reversed(checkpoints(folder)[:-1]):
        try:
            CheckpointReader(path)
        except CheckpointError:
            continue
        return f". The one before is sound: load {str(path)!r}, or remove what is newer"
    return ""
