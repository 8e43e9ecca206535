"""Notices that tensors were changed in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from gas.graph.layout import layout_of


def version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


class Versions:
    """Some tensors as they are now; changes by ``.data`` or numpy aren't counted.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [(tensor, version(tensor)) for tensor in tensors]

    def changed(self) -> bool:
        """Return whether any of them was changed in place since."""
        return any(version(tensor) != before for tensor, before in self._tensors)

    def __reduce__(self) -> tuple[type[Versions], tuple[list[Tensor]]]:
        return Versions, ([tensor for tensor, _ in self._tensors],)  # Copies count anew.


class GraphVersions:
    """The tensors of a graph as they are now, by the names of its attributes.

    Args:
        data: The graph.
    """

    def __init__(self, data: Data) -> None:
        self._seen = {key: (value, Versions(_tensors(value))) for key, value in _attributes(data)}

    def changed(self, data: Data) -> set[str]:
        """Return the attributes that came, went, were replaced, or changed in place since."""
        now, seen = dict(_attributes(data)), self._seen
        same = {key for key in now.keys() & seen.keys() if now[key] is seen[key][0]}
        same = {key for key in same if not seen[key][1].changed()}
        return (now.keys() | seen.keys()) - same


def _attributes(data: Data) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in data if key == "adj_t" or isinstance(value, Tensor))


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else layout_of(value).tensors(value)
