"""``save`` and ``load``: write a checkpoint of a training, and go on from it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, cast, overload

from torch.nn import Module

from gas.checkpoint.files import (
    MANIFEST,
    Source,
    checkpoints,
    find_source,
    next_number,
    prune,
    read_manifest,
    sweep,
)
from gas.checkpoint.ranks import load_on_ranks, save_on_ranks
from gas.checkpoint.reader import CheckpointReader, no_checkpoint_error
from gas.checkpoint.tensors import CheckpointError
from gas.checkpoint.values import from_json
from gas.checkpoint.writer import CheckpointWriter, history_writers, unwrap_model
from gas.native import check_integer
from gas.scalable import ScalableGNN

_under_way: dict[Path, Future[Path]] = {}  # Of each folder.


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
    """Write a checkpoint: what a training needs to go on as if nothing had happened.

    That is the weights, the histories with their ages, the optimizer, the random numbers of Python,
    NumPy and PyTorch, and of a loader the order of the epoch, how much of it is done, and its
    augmentation::

        for epoch in range(epochs):
            train_epoch(model, loader, optimizer)
            gas.save("checkpoints", model, optimizer, loader, epoch=epoch)

    The folder gets ``checkpoint_000001``, then ``checkpoint_000002``, and so on: tensors in the
    format of safetensors, ``model.safetensors`` with the names that the model's ``state_dict``
    has (of a model of :func:`gas.to_scalable`, those of the module that it was made of), the rest
    in ``manifest.json``. A checkpoint is complete or not there, whenever the process is killed or
    the power fails. Nothing in it is code. :func:`gas.load` reads it.

    Of a model that :func:`gas.distribute` has connected, every rank calls it. Each writes what it
    has, into ``ranks_2/0/checkpoint_000001`` and so on; ``newest.json`` names the one that all have
    completed, and is written last. The folder is one that all ranks see.

    Args:
        folder: The folder of a training's checkpoints, which is made.
        model: The model.
        optimizer: The optimizer, or anything else with ``state_dict()``. (default: none)
        loader: What the training iterates, in a loop over it or between two: a
            :class:`gas.SubgraphLoader`, a :class:`gas.PrefetchLoader`, or anything else with
            ``state_dict()``. (default: none)
        keep: How many checkpoints stay: older ones are removed once the new one is complete.
            (default: ``3``)
        histories: Write the histories; without, they have to be filled again. (default: ``True``)
        background: Copy what is to be written into memory, write it beside the training, and return
            a ``concurrent.futures.Future`` of the path. The next checkpoint of the folder waits for
            it, and raises what went wrong. Not for many ranks. (default: ``False``)
        **state: Anything else, under names of its own, which :func:`gas.load` returns: numbers,
            text, tensors, and lists and dictionaries of these. Of what has ``state_dict()``, such
            as a scheduler, that; of a ``torch.Generator``, its state.

    Returns:
        The checkpoint's own folder.

    Raises:
        ValueError: If something can't be held by a checkpoint, naming it; nothing was written.
        OSError: If the disk is full or the folder can't be written; what was there stays. Where
            that is so on one rank, all raise it, and it names the rank.
        RankError: A ``RuntimeError``: if a rank has gone, or doesn't come in time.
    """
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
    _under_way[folder] = future
    threading.Thread(target=_settle, args=(future, write), name="gas-checkpoint").start()
    return future


def _settle(future: Future[Path], write: Callable[[], Path]) -> None:
    try:
        future.set_result(write())
    except BaseException as error:  # Raised by who asks for the result.
        future.set_exception(error)


def finish(folder: str | Path) -> None:
    """Wait for what is being written there, and raise what went wrong."""
    future = _under_way.pop(Path(folder).absolute(), None)
    if future is not None:
        future.result()


def finish_quietly(folder: Path) -> None:
    """Wait for what is being written there; what went wrong is for who saves."""
    future = _under_way.get(folder)
    if future is not None:
        with contextlib.suppress(Exception):
            future.result()


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
    """Go on from a checkpoint that :func:`gas.save` has written.

    Everything is read and checked before anything is changed::

        state = gas.load("checkpoints", model, optimizer, loader)
        for epoch in range(state["epoch"] + 1, epochs):
            ...

    A loader whose epoch had begun goes on with its next mini-batch when it is iterated next. With a
    ``prefetch=1`` model, the first one then reads rows that are one step newer than they would have
    been; everything else goes on bit by bit.

    Of a model that :func:`gas.distribute` has connected, every rank calls it, and goes on with what
    it has written itself, rows that were on their way included. Where there is another number of
    ranks, or the graph is cut otherwise, histories are found by the nodes' ids in the graph that
    :func:`gas.cluster` was given, with their ages; the loader begins an epoch, and random numbers
    go on as they are, with a warning. So does a model of one process on the whole graph go on with
    what many have written, and the other way round. Without a model, it is rank 0's.

    Args:
        folder: The folder of a training's checkpoints, of which the newest complete one is read; or
            one checkpoint, such as that of a rank, which stands for those of all.
        model: Gets the weights, and the histories. A plain module gets the weights of the model
            that was made of it by :func:`gas.to_scalable`, and the other way round.
            (default: none)
        optimizer: Made for ``model``, of the same class as before. (default: none)
        loader: Of the same graph, cut in the same way, or, by many ranks, otherwise. These need it
            for histories, unless :func:`gas.distribute` was given the graph. (default: none)
        histories: Load the histories. (default: ``True``)
        random_state: Set the random numbers of Python, NumPy and PyTorch. (default: ``True``)
        **objects: What was saved by ``state_dict()``, under the same names.

    Returns:
        What else was saved, by its names.

    Raises:
        CheckpointError: A ``ValueError``: if there is no checkpoint, or it is damaged, of something
            else, or of a newer version; it says why, and which one before it is sound.
        ValueError: If it is that of another model, optimizer, graph or partition. Nothing was
            changed in either case. Where that is so on one rank, all raise it, and it names the
            rank.
        RankError: A ``RuntimeError``: if a rank has gone, or doesn't come in time.
    """
    folder = Path(folder).absolute()
    finish_quietly(folder)
    model = None if model is None else unwrap_model(model)
    is_rank = isinstance(model, ScalableGNN) and model.ranks is not None
    source = None if is_rank else find_source(folder)
    if is_rank or (source is not None and source.world_size):
        return load_on_ranks(folder, model, optimizer, loader, histories, random_state, objects)
    paths = [folder] if (folder / MANIFEST).exists() else checkpoints(folder)
    if not paths:
        raise no_checkpoint_error(folder)
    try:
        found = CheckpointReader(paths[-1])
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_advice(paths)}") from error
    return found.prepare(model, optimizer, loader, histories, random_state, objects)()


def peek(folder: str | Path, *names: str) -> dict[str, Any]:
    """Read only some names of the newest checkpoint, of rank 0.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    folder = Path(folder).absolute()
    source = find_source(folder)
    of_ranks = source is not None and source.world_size
    paths = [cast(Source, source).path(0)] if of_ranks else checkpoints(folder)
    if not paths:
        raise no_checkpoint_error(folder)
    try:
        state = read_manifest(paths[-1]).get("state")
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_advice(paths)}") from error
    state = state if isinstance(state, dict) else {}
    return {name: from_json(state[name], {}) for name in names if name in state}


def _advice(paths: list[Path]) -> str:
    """Name an earlier checkpoint that can be loaded instead."""
    for path in reversed(paths[:-1]):
        try:
            CheckpointReader(path)
        except CheckpointError:
            continue
        return f". The one before is sound: load {str(path)!r}, or remove what is newer"
    return ""
