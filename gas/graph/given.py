"""The graph that a clustered one was made of, as long as both are as they were then."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data

from gas.graph.folder.writing import PERM
from gas.graph.versions import version

# By ``perm`` of the clustered graph, which copies of it share: what both graphs had. Tensors are
# not kept alive by it.
_GIVEN: Any = WeakIdKeyDictionary()


def remember(graph: Data, data: Data) -> None:
    """Note which graph a clustered one was made of."""
    _GIVEN[graph[PERM]] = _note(graph), _note(data)


def find_original_graph(graph: Data, names: Collection[str]) -> Data | None:
    """Return edges and selected attributes of the graph that :func:`gas.cluster` was given.

    Args:
        graph: What it has returned.
        names: The attributes.

    Returns:
        ``None`` if that was in another process, or one of them, or of those of ``graph``, is gone,
        was replaced, or was written to.
    """
    noted = _GIVEN.get(graph[PERM]) if PERM in graph else None
    if noted is None:
        return None
    wanted = {*names, "edge_index", "adj_t", "edge_weight"}
    now = {key: value for key, value in noted[0].items() if key in wanted}
    before = {key: value for key, value in noted[1].items() if key in (*wanted, "num_nodes")}
    if any(value is None or graph.get(key) is not value for key, value in _look_up(now)):
        return None
    found = dict(_look_up(before))
    return None if any(value is None for value in found.values()) else Data.from_dict(found)


def _note(data: Data) -> dict[str, Any]:
    """Return the attributes of a graph, with references to tensors and their version counters."""
    return {
        key: (weakref.ref(value), version(value)) if isinstance(value, Tensor) else value
        for key, value in data
        if isinstance(value, Tensor | int | float | str)
    }


def _look_up(noted: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the attributes as they are now, ``None`` for tensors that aren't as they were."""
    out = []
    for key, value in noted.items():
        if isinstance(value, tuple):
            reference, before = value
            value = reference()
            value = None if value is None or version(value) != before else value
        out.append((key, value))
    return out
