"""The graph that ``forward(data)`` is called with while a module is tried and traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch_geometric.data import Data


class GraphArgument(Data):
    """The graph that ``forward(data)`` is called with, of tensors or of the proxies of a trace.

    Args:
        values: The attributes.
        counted: An attribute with a row for each node, by which they are counted.
        nested: Attributes that are dictionaries, see :func:`find_dictionaries`.
    """

    def __init__(
        self, values: Mapping[str, Any], counted: str, nested: Mapping[str, Mapping[str, Any]]
    ) -> None:
        super().__init__()
        self.__dict__["_counted"], self.__dict__["read"] = counted, set[str]()
        for key, value in values.items():
            self[key] = value
        for key, items in nested.items():
            self[key] = _Dictionary(key, items, self)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getattr__(key)

    @property
    def batch(self) -> Any:
        """Return which of many graphs a node is in: ``None``, as there is one."""
        self.read.add("batch")
        return self._store.get("batch")

    @property
    def num_nodes(self) -> Any:
        """Return the number of nodes: of a mini-batch, those of its halo included."""
        if not self._counted:
            raise ValueError("the graph has no rows, such as 'x', by which its nodes are counted")
        return self[self._counted].size(0)

    @property
    def num_node_features(self) -> Any:
        """Return the width of ``x``."""
        return self.x.size(-1)


class _Dictionary(dict[str, Any]):
    """A dictionary of a graph, ``data.graph["node_feat"]``, whose tensors are its attributes."""

    def __init__(self, name: str, items: Mapping[str, Any], graph: GraphArgument) -> None:
        super().__init__(items)
        self._name, self._graph = name, graph

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Attribute) and not value:
            raise ValueError(
                f"data.{self._name}[{key!r}] isn't an attribute of the graph, which is cut into "
                f"parts: set data.{key} = data.{self._name}[{key!r}]"
            )
        return getattr(self._graph, value) if isinstance(value, Attribute) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())  # So that dict(...) and ** call __getitem__.

    def items(self) -> Any:
        """Return names and values."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """Return the values."""
        return [self[key] for key in self]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or a default."""
        try:
            return self[key]
        except KeyError:
            return default


class Attribute(str):
    """The name of an attribute of the graph."""

    __slots__ = ()


def find_dictionaries(data: Data, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a graph's dictionaries, in which the names of attributes replace their tensors.

    The name of a tensor that is no attribute is empty; the number of nodes is ``num_nodes``.
    """
    out: dict[str, dict[str, Any]] = {}
    for key, items in data.to_dict().items():
        if not isinstance(items, dict) or not any(isinstance(v, Tensor) for v in items.values()):
            continue
        out[key] = dict(items)
        for inner, value in items.items():
            name = next((name for name in names if data[name] is value), "")
            if inner == "num_nodes" and value == data.num_nodes:
                out[key][inner] = Attribute("num_nodes")
            elif name or isinstance(value, Tensor):
                out[key][inner] = Attribute(name)
    return out
