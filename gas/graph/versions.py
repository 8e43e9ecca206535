"""Version counters of tensors and graphs: detect changes in place, find the original graph."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data

from gas.graph.attributes import PERM
from gas.graph.layout import layout_of

# Attributes of a clustered graph and its original, by ``perm`` of the former, which its copies
# share. Tensors are not kept alive.
_ORIGINALS: Any = WeakIdKeyDictionary()


def version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


class Versions:
    """Version counters of some tensors; changes by ``.data`` or NumPy aren't counted."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [(tensor, version(tensor)) for tensor in tensors]

    def has_changed(self) -> bool:
        """Return whether any of them was changed in place since."""
        return any(version(tensor) != before for tensor, before in self._tensors)

    def __reduce__(self) -> tuple[type[Versions], tuple[list[Tensor]]]:
        return Versions, ([tensor for tensor, _ in self._tensors],)  # Copies have new counters.


class GraphVersions:
    """Version counters of the tensors of a graph, or of named values, by their names."""

    def __init__(self, data: Iterable[tuple[str, Any]]) -> None:
        self._seen = {key: (value, Versions(_tensors(value))) for key, value in _attributes(data)}

    def find_changes(self, data: Iterable[tuple[str, Any]]) -> set[str]:
        """Return the attributes that were added, removed, replaced or changed in place since."""
        now, seen = dict(_attributes(data)), self._seen
        same = {key for key in now.keys() & seen.keys() if now[key] is seen[key][0]}
        same = {key for key in same if not seen[key][1].has_changed()}
        return (now.keys() | seen.keys()) - same


def _attributes(data: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in data if key == "adj_t" or isinstance(value, Tensor))


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else layout_of(value).tensors(value)


def remember_original(graph: Data, data: Data) -> None:
    """Remember the original graph of a clustered one."""
    _ORIGINALS[graph[PERM]] = _note(graph), _note(data)


def find_original_graph(graph: Data, names: Collection[str]) -> Data | None:
    """Return edges and selected attributes of the graph that was passed to :func:`gas.cluster`.

    Returns:
        The original graph; ``None`` if it was clustered in another process, or if one of these
        attributes was deleted, replaced or changed in either graph.
    """
    noted = _ORIGINALS.get(graph[PERM]) if PERM in graph else None
    if noted is None:
        return None
    wanted = {*names, "edge_index", "adj_t", "edge_weight"}
    now = {key: value for key, value in noted[0].items() if key in wanted}
    before = {key: value for key, value in noted[1].items() if key in (*wanted, "num_nodes")}
    if any(value is None or graph.get(key) is not value for key, value in _resolve_references(now)):
        return None
    found = dict(_resolve_references(before))
    return None if any(value is None for value in found.values()) else Data.from_dict(found)


def _note(data: Data) -> dict[str, Any]:
    """Return the attributes of a graph, with references to tensors and their version counters."""
    noted = {key: (weakref.ref(value), _versions(value)) for key, value in _attributes(data)}
    return {
        key: noted.get(key, value) for key, value in data
        if key in noted or isinstance(value, int | float | str)
    }  # fmt: skip


def _versions(value: Any) -> list[int]:
    return list(map(version, _tensors(value)))


def _resolve_references(noted: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the remembered attributes, with ``None`` for deleted or changed tensors."""
    out = []
    for key, value in noted.items():
        if isinstance(value, tuple):
            reference, before = value
            value = reference()
            value = None if value is None or _versions(value) != before else value
        out.append((key, value))
    return out
