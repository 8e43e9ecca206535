"""``save``: all that a training needs to go on, in a folder of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Module

import gas.checkpoint.generators as generators
from gas.checkpoint import histories as stored
from gas.checkpoint.files import next_number, prune, sweep, writing
from gas.checkpoint.tensors import write_tensors
from gas.checkpoint.values import to_json
from gas.native.checks import check_integer
from gas.scalable.model import ScalableGNN

MODEL, STATE = "model.safetensors", "state.safetensors"
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
    """Writes a checkpoint: what a training needs to go on as if nothing had happened.

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
    model = bare(model)
    folder = Path(folder).absolute()
    if isinstance(model, ScalableGNN) and model.ranks is not None:
        from gas.checkpoint.ranks import save_on_ranks  # Which needs this.

        if background:
            raise ValueError(
                "'background' is True, but the model is one of many ranks, which wait for each "
                "other when they write a checkpoint: leave it out"
            )
        return save_on_ranks(folder, model, optimizer, loader, keep, histories, state)
    content = Content(folder, model, optimizer, loader, state)
    finish(folder)
    if background:
        content.copy()
    parts = histories_of(model, not background) if histories else {}

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


class Content:
    """What a checkpoint holds beside histories, before it is written.

    Raises:
        ValueError: If a checkpoint can't hold it.
    """

    def __init__(
        self, folder: Path, model: Module, optimizer: Any, loader: Any, state: Mapping[str, Any]
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"'folder' is {str(folder)!r}, which is a file: name a folder")
        if isinstance(loader, Module):
            raise ValueError("'loader' is a model: expected what loads its mini-batches")
        self.tensors: dict[str, Tensor] = {}
        self.manifest: dict[str, Any] = {"torch": torch.__version__}
        self.add("optimizer", _state_of("optimizer", optimizer))
        self.add("loader", _state_of("loader", loader))
        self.add("random", generators.states())
        objects = {k: _state_of(k, v) for k, v in state.items() if _is_object(v)}
        values = {k: v for k, v in state.items() if not _is_object(v)}
        for key, each in (("objects", objects), ("state", values)):
            self.manifest[key] = {k: to_json(v, k, self.tensors) for k, v in each.items()}
        self.weights = {key: value.detach().cpu() for key, value in weights_of(model).items()}

    def add(self, name: str, value: Any) -> None:
        """Adds an entry to the manifest, whose tensors go to their file."""
        self.manifest[name] = to_json(value, name, self.tensors)

    def copy(self) -> None:
        """Copies all tensors, so that they are written as they are now."""
        self.tensors = {key: value.cpu().clone() for key, value in self.tensors.items()}
        self.weights = {key: value.clone() for key, value in self.weights.items()}

    def write(self, folder: Path, number: int, parts: Mapping[str, stored.Saving]) -> Path:
        """Writes a checkpoint, with what writes its histories."""
        with writing(folder, number) as writer:
            written = {name: part(writer) for name, part in parts.items()}
            writer.write(
                MODEL, lambda stream: write_tensors(stream, self.weights, {"format": "pt"})
            )
            writer.write(STATE, lambda stream: write_tensors(stream, self.tensors, {}))
            writer.write_manifest({"number": number, "histories": written, **self.manifest})
        return folder / f"checkpoint_{number:06}"


def histories_of(model: Module, at_once: bool) -> dict[str, stored.Saving]:
    """What writes the histories of a model, by their names; see :func:`.histories.saving`."""
    if not isinstance(model, stored.MODELS):
        return {}
    return {k: stored.saving(k, history, at_once) for k, history in stored.named(model).items()}


def bare(model: Any) -> Any:
    """A model as it was before ``torch.compile`` and DistributedDataParallel took it."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), Module):
            model = model._orig_mod
        else:
            return model


def weights_of(model: Module) -> Mapping[str, Tensor]:
    """The ``state_dict`` of a model; of a converted one, that of the module that it was made of."""
    found = (model.plain if isinstance(model, stored.MODELS) else model).state_dict()
    others = [key for key, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"'model' has {others[0]!r} in its state_dict, a {type(found[others[0]]).__name__}: "
            "expected tensors; pass other things by names of their own"
        )
    return found


def _settle(future: Future[Path], write: Callable[[], Path]) -> None:
    try:
        future.set_result(write())
    except BaseException as error:  # Raised by who asks for the result.
        future.set_exception(error)


def finish(folder: str | Path) -> None:
    """Waits for what is being written there, and raises what went wrong."""
    future = _under_way.pop(Path(folder).absolute(), None)
    if future is not None:
        future.result()


def finish_quietly(folder: Path) -> None:
    """Waits for what is being written there; what went wrong is for who saves."""
    future = _under_way.get(folder)
    if future is not None:
        with contextlib.suppress(Exception):
            future.result()


def _is_object(value: Any) -> bool:
    return isinstance(value, torch.Generator) or hasattr(value, "state_dict")


def _state_of(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if not hasattr(value, "state_dict"):
        raise ValueError(
            f"'{name}' is a {type(value).__name__}, which has no state_dict(): leave it out, and "
            "pass what is to be kept of it by names of its own"
        )
    return value.state_dict()
