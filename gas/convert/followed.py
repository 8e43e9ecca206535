"""Tensors that are attributes of a module, which its model takes when they are replaced."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from gas.graph import version


@dataclass
class Followed:
    """A tensor that is an attribute of a module, and of its model.

    * ``owner``, ``place``: the attributes of the module, and of the model; ``key``: the name.
    * ``seen``, ``version``: the tensor that was there last, and its version.
    """

    owner: dict[str, Any]
    place: dict[str, Any]
    key: str
    seen: Tensor
    version: int

    def follow(self) -> None:
        """Take the tensor by which it was replaced, or its values where the model has a copy.

        Raises:
            ValueError: If it was replaced by something else.
        """
        now, mine = self.owner.get(self.key), self.place[self.key]
        if now is self.seen and (mine is now or version(self.seen) == self.version):
            return
        before = _describe(self.seen)
        if not isinstance(now, Tensor) or _describe(now) != before:
            raise ValueError(
                f"{self.key!r} of the module is {_describe(now)} now, and was {before} when it was "
                "converted: convert the module again"
            )
        self.place[self.key] = now.to(mine)
        self.seen, self.version = now, version(now)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    kind = "floating-point numbers" if value.is_floating_point() else value.dtype
    return f"{kind} of {list(value.shape)}"


def find_tensors(net: Module, model: Module, unknown: Collection[str]) -> list[Followed]:
    """Find tensors of a module that its model reads, and wouldn't see if they were replaced.

    Args:
        net: The module. Buffers of its parts are those of the model, and are found there.
        model: What is made of it, with parts of the same names.
        unknown: The names of attributes that are left out.
    """
    found = []
    for prefix, module in net.named_modules():
        mine = model.get_submodule(prefix)
        for owner in (vars(module), *([] if prefix else [module._buffers])):
            for key, value in owner.items():
                place: Any = mine._buffers if key in mine._buffers else vars(mine)
                is_read = isinstance(value, Tensor) and isinstance(place.get(key), Tensor)
                if is_read and f"{prefix}.{key}".lstrip(".") not in unknown:
                    found.append(Followed(owner, place, key, value, version(value)))
    return found
