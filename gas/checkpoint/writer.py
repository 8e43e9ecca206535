"""``CheckpointWriter``: collects the contents of a checkpoint and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gas.checkpoint import histories as stored
from gas.checkpoint.files import write_checkpoint
from gas.checkpoint.tensors import write_tensors
from gas.checkpoint.values import rng_states, to_json

MODEL, STATE = "model.safetensors", "state.safetensors"


class CheckpointWriter:
    """Collect everything but the histories, as one consistent state, and write it."""

    def __init__(
        self, folder: Path, model: Module, optimizer: Any, loader: Any, state: Mapping[str, Any]
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"'folder' is {str(folder)!r}, which is a file: name a folder")
        if isinstance(loader, Module):
            raise ValueError("'loader' is a model: expected what loads its mini-batches")
        self.tensors: dict[str, Tensor] = {}
        order = model._calls.order if isinstance(model, stored.MODELS) else None
        self.manifest: dict[str, Any] = {"torch": torch.__version__, "node_order": order}
        self.add("optimizer", state_of("optimizer", optimizer))
        self.add("loader", state_of("loader", loader))
        self.add("random", rng_states())
        given = {k: v for k, v in state.items() if _is_object(v)}
        self.manifest["classes"] = classes_of_torch({**given, "optimizer": optimizer})
        objects = {k: state_of(k, v) for k, v in given.items()}
        values = {k: v for k, v in state.items() if not _is_object(v)}
        for key, each in (("objects", objects), ("state", values)):
            self.manifest[key] = {k: to_json(v, k, self.tensors) for k, v in each.items()}
        self.weights = {key: value.detach().cpu() for key, value in weights_of(model).items()}

    def add(self, name: str, value: Any) -> None:
        """Add an entry to the manifest, and its tensors to the file of tensors."""
        self.manifest[name] = to_json(value, name, self.tensors)

    def copy(self) -> None:
        """Copy all tensors, so that they can be written in the background."""
        self.tensors = {key: value.cpu().clone() for key, value in self.tensors.items()}
        self.weights = {key: value.clone() for key, value in self.weights.items()}

    def write(self, folder: Path, number: int, parts: Mapping[str, stored.HistoryWriter]) -> Path:
        """Write a checkpoint; ``parts`` write its histories."""
        with write_checkpoint(folder, number) as writer:
            written = {name: part(writer) for name, part in parts.items()}
            writer.write(
                MODEL, lambda stream: write_tensors(stream, self.weights, {"format": "pt"})
            )
            writer.write(STATE, lambda stream: write_tensors(stream, self.tensors, {}))
            writer.write_manifest({"number": number, "histories": written, **self.manifest})
        return folder / f"checkpoint_{number:06}"


def history_writers(model: Module, at_once: bool) -> dict[str, stored.HistoryWriter]:
    """Return a function for each history, by its name, that writes it."""
    if not isinstance(model, stored.MODELS):
        return {}
    return {
        k: stored.history_writer(k, history, at_once)
        for k, history in stored.name_histories(model).items()
    }


def classes_of_torch(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the classes of optimizers and schedulers of PyTorch, by their names."""
    classes = {name: type(each) for name, each in objects.items()}
    return {
        name: each.__name__ for name, each in classes.items()
        if issubclass(each, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
    }  # fmt: skip


def unwrap_model(model: Any) -> Any:
    """Return the module inside ``torch.compile`` and DistributedDataParallel.

    Raises:
        ValueError: If it is no module.
    """
    if not isinstance(model, Module):
        raise ValueError(f"'model' is a {type(model).__name__}, expected a module")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), Module):
            model = model._orig_mod
        else:
            return model


def weights_of(model: Module) -> Mapping[str, Tensor]:
    """Return the ``state_dict`` of a model, or of the module that a converted model wraps."""
    found = (model._checkpoint_module if isinstance(model, stored.MODELS) else model).state_dict()
    others = [key for key, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"'model' has {others[0]!r} in its state_dict, a {type(found[others[0]]).__name__}: "
            "expected tensors; pass other things by names of their own"
        )
    return found


def _is_object(value: Any) -> bool:
    return isinstance(value, torch.Generator) or hasattr(value, "state_dict")


def state_of(name: str, value: Any) -> Any:
    """Return the state of an object, with ``state_dict()`` or a generator."""
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
