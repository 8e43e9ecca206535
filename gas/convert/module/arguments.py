"""Parameters of a module's method, and the graph, or its attributes, that they are given."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data

from gas.convert.module.caches import find_rows
from gas.convert.module.followed import find_read
from gas.convert.module.state import ATTRIBUTES_OF_TORCH, find_namespaces
from gas.convert.values.known import is_edge_list
from gas.graph import MAPPED, WEIGHT, find_mark, is_row_per_node, with_csr_features

ADJACENCY = ("edge_index", "adj_t", "adj")
# Parameters of graph batches and of neighbour samplers.
UNSUPPORTED = ("batch", "batch_size", "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop")


def find_method(net: Module) -> str:
    """Return the name of the method that is converted."""
    has_forward = type(net).forward is not Module.forward or "forward" in vars(net)
    return "forward" if has_forward else "encode"


def parameters(net: Module, method: str) -> dict[str, Any]:
    """Return a method's parameters and defaults; ``inspect.Parameter.empty`` without one."""
    if isinstance(net, pyg.Sequential):
        return dict.fromkeys(net.signature.param_dict, inspect.Parameter.empty)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    encoder = getattr(net, "encoder", None)
    for function in (getattr(net, method), getattr(encoder, "forward", None)):
        named = [] if function is None else inspect.signature(function).parameters.values()
        if found := {p.name: p.default for p in named if p.kind not in kinds}:
            return found
    return {}  # Nor has what it passes its arguments to, as torch_geometric.nn.GAE does.


def is_list(name: str, value: Any) -> bool:
    """Return whether an attribute is a list of edges, but not of pairs to predict."""
    return is_edge_list(value) and "edge" in name and "label" not in name


def adjacency_name(names: Sequence[str], data: Data) -> str:
    """Return the name of the parameter for the adjacency.

    Raises:
        ValueError: If there is none, or a graph has several.
    """
    several = [name for name in names if "edge_index" in name or name.endswith("_dict")]
    is_one = sum(name in ADJACENCY or name in data for name in several) < 2
    for name in ADJACENCY if is_one else ():
        if name in names:
            return name
    if not names:
        raise ValueError(
            "the model's forward names no parameters, by which attributes of the graph would be "
            "given: write one that does, such as forward(self, x, edge_index), or convert the "
            "module inside"
        )
    if len(several) > 1:
        raise ValueError(
            f"the model takes {', '.join(names)}: give each list of edges to the graph under its "
            f"name, data.{several[0]} and so on, of int64 and shape [2, E]; or give a HeteroData"
        )
    raise ValueError(
        f"the model takes {', '.join(names)}, and none of them is the adjacency: name it "
        "'edge_index' or 'adj_t', or take the graph as the only argument, forward(data)"
    )


def takes_rows_alone(wanted: dict[str, Any], data: Data) -> bool:
    """Return whether all parameters are for rows of nodes, so that a module has no layers.

    One that may be for an adjacency under another name, such as ``adjs=None``, is none of these;
    those of :class:`torch_geometric.nn.MLP` are known.
    """
    known = [name for name in wanted if name in data and name not in UNSUPPORTED]
    rows = [name for name in known if is_row_per_node(data, name)]
    others = [wanted[n] for n in wanted if n not in (*rows, *UNSUPPORTED, "return_emb")]
    empty = (inspect.Parameter.empty, None)
    return bool(rows) and not any(default is each for default in others for each in empty)


def features_parameter(wanted: dict[str, Any], data: Data, edges: str) -> str:
    """Return the first parameter, if it is for ``x`` under another name; "" otherwise."""
    first, default = next(iter(wanted.items()))
    is_known = first == edges or first in data or default is not inspect.Parameter.empty
    return "" if is_known or "x" in wanted or "x" not in data or first in UNSUPPORTED else first


def missing_error(method: str, name: str, edges: str | None, data: Data) -> ValueError:
    """Return the error of a parameter for which a model has no attribute of the graph."""
    if name in data:  # Edges beside edges.
        return ValueError(
            f"{method} takes {edges!r} and {name!r}, and a model has one of them: multiply by the "
            "matrix of the edges, torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, "
            "(num_nodes, num_nodes)), or give layers the matrix"
        )
    return ValueError(
        f"{method} takes {name!r}, which the graph doesn't have "
        f"({', '.join(sorted(data.keys()))}): name it as the attribute, or set the attribute"
    )


def refuse_ambiguous_weights(net: Module, wanted: dict[str, Any], data: Data) -> None:
    """Refuse a graph with a number for each edge that a module might be given as its weight."""
    if WEIGHT not in wanted or WEIGHT in data or "edge_attr" in wanted or "edge_attr" not in data:
        return
    value = data.edge_attr
    if isinstance(value, Tensor) and value.is_floating_point() and value.squeeze(-1).dim() == 1:
        raise ValueError(
            f"{type(net).__name__} takes 'edge_weight', which the graph doesn't have, and has a "
            "number for each edge in 'edge_attr': if these are the weights, set data.edge_weight = "
            "data.edge_attr; otherwise leave them out, del data.edge_attr"
        )


def graph_parameter(wanted: dict[str, Any], data: Data) -> str:
    """Return the parameter for the graph itself, such as ``data``; "" if there is none."""
    if any(name in ADJACENCY for name in wanted):
        return ""
    needed = [name for name, default in wanted.items() if default is inspect.Parameter.empty]
    unknown = [name for name in needed if name not in data or name in UNSUPPORTED]
    return unknown[0] if len(unknown) == 1 and len(needed) == 1 else ""


def _refuse_repeated_entries(adj_t: Any) -> None:
    """Refuse a matrix that PyTorch would change, as its edges would be others then."""
    if not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_coo or adj_t.is_coalesced():
        return
    if adj_t.coalesce().values().size(0) < adj_t._nnz():
        raise ValueError(
            "'adj_t' is a torch.sparse_coo matrix with entries that are there more than once: "
            "PyTorch adds them up, and edges of a graph stay apart: set data.adj_t = "
            "data.adj_t.coalesce(), or data.edge_index in its place"
        )


def make_sample_graph(net: Module, data: Data | None, num_nodes: int | None) -> Data:
    """Return the graph to trace a module with: ``data``, or ``num_nodes`` nodes without edges."""
    if data is not None and num_nodes is None:
        _refuse_repeated_entries(data.get("adj_t"))
        return _with_list(net, with_csr_features(data))
    if data is not None or num_nodes is None:
        raise ValueError("expected either 'data' or 'num_nodes'")
    width = getattr(net, "in_channels", None)
    if not isinstance(width, int) or width < 1:
        raise ValueError(
            f"{type(net).__name__}.in_channels is {width!r}, expected the width of 'x': pass "
            "'data' instead of 'num_nodes'"
        )
    edge_index = torch.empty(2, 0, dtype=torch.int64)
    return Data(x=torch.empty(1, width).expand(num_nodes, width), edge_index=edge_index)


def _with_list(net: Module, data: Data) -> Data:
    """Give a graph folder's graph a list of edges in place of its rows, unless ``adj_t`` is read.

    The list has the size of the graph's, and takes no memory.
    """
    adj_t = data.get("adj_t")
    if not hasattr(adj_t, MAPPED) or "edge_index" in data or find_mark(data) is not None:
        return data
    wanted = parameters(net, find_method(net))
    if "adj_t" in (find_read(net) if graph_parameter(wanted, data) else wanted):
        return data
    out = copy.copy(data)
    del out.adj_t
    out.num_nodes = data.num_nodes
    out.edge_index = torch.zeros(1, 1, dtype=torch.int64).expand(2, adj_t.values().numel())
    if bool((adj_t.values() != 1).any()):
        out.edge_weight = adj_t.values()
    return out


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

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute, or ``default`` if the graph doesn't have it."""
        self.read.add(key)
        return self._store.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes by their names."""
        return {key: self[key] for key in self.keys()}  # A graph iterates pairs.

    @property
    def batch(self) -> Any:
        """Return which of many graphs a node is in: ``None``, as there is one."""
        self.read.add("batch")
        return self._store.get("batch")

    @property
    def num_nodes(self) -> Any:
        """Return the number of nodes, in a mini-batch with its halo."""
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

    # Those of a mapping call __getitem__.
    get, items, values = Mapping.get, Mapping.items, Mapping.values  # type: ignore[assignment]


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


def node_table_error(
    net: Module, data: Data, error: ValueError, emptied: Collection[str] = ()
) -> ValueError | None:
    """Return the error of a module that has a table of all nodes; ``None`` if it has none.

    It quotes the ``error`` that the module raises. Attributes that it computes of the graph itself
    are ``emptied``.
    """
    size, matrices = data.num_nodes, dict[int, str]()
    for name, weight in net.named_parameters():
        if "node_id" in data or is_lazy(weight) or weight.dim() != 2 or size not in weight.shape:
            continue
        what = "row" if weight.size(0) == size else "column"
        return ValueError(
            f"'{name}' has a {what} for each node, and a mini-batch has some of the nodes: set "
            "data.node_id = torch.arange(data.num_nodes), and give layers embedding(node_id), or "
            f"table[node_id], instead of all rows, or of None. Now, {error}"
        )
    tables: list[tuple[str, str, bool]] = []  # And whether it is the value itself.
    own = {f"{kind.__qualname__}:" for each in net.modules() for kind in type(each).__mro__}
    methods = [value for each in net.modules() for value in vars(type(each)).values()]
    called = [each.__code__ for each in methods if isinstance(each, FunctionType)]
    read = {name for code in called for name in code.co_names}
    for prefix, values in find_namespaces(net):
        is_shared = prefix.endswith(":")
        for name, value in dict(values).items():
            if name in ATTRIBUTES_OF_TORCH or prefix + name in emptied:
                continue
            if is_shared and prefix not in own and (name not in read or isinstance(value, Data)):
                continue  # Such as globals, and the graph's own.
            is_kept = any(
                each.shape[0] == size or (is_shared and is_list("edge", each))
                for each in find_rows(value)
            )
            if is_edge_list(value) and not is_shared:
                return ValueError(
                    f"'{prefix + name}' keeps other edges than the graph's, and a mini-batch has "
                    "some of them: set data.edge_index to them, and data.edge_weight to their "
                    "weights; or take 'edge_index' as an argument of forward, and compute others "
                    f"from it there. Now, {error}"
                )
            if is_kept or _size_of(value)[:1] == (size,):
                is_table = not prefix.endswith(":") and not isinstance(value, dict | list | tuple)
                tables.append((prefix + name, name, is_table))
                if _size_of(value) == (size, size):
                    matrices[id(value)] = name  # A script may have it as a variable, too.
    if not tables:
        return None
    name, attribute, is_table = min(tables, key=lambda table: not table[2])
    cure = _find_cure(attribute, is_table, matrices.values())
    return ValueError(
        f"'{name}' keeps rows of all nodes of a graph, and a mini-batch has some of the nodes: "
        f"{cure}. Now, {error}"
    )


def _find_cure(attribute: str, is_table: bool, matrices: Collection[str]) -> str:
    """Return what to do about an attribute with rows of all nodes; ``matrices`` are square."""
    cure = "convert the module before its first call, or reset what forward computes"
    if is_table:
        cure = (
            f"set data.{attribute} to it, and take '{attribute}' as an argument of forward; or, if "
            f"forward computes it, {cure}"
        )
    if attribute in matrices:
        cure = "set data.adj_t to it instead of data.edge_index, and take 'adj_t' in forward"
    if len(matrices) > 1:
        cure = (
            "put the entries of all matrices into one data.edge_index, with a column of values for "
            "each matrix in data.edge_attr, and multiply by torch.sparse_coo_tensor("
            "edge_index.flip(0), edge_attr[:, 0], (num_nodes, num_nodes)), and by that of column 1"
        )
    return cure


def _size_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or sparse matrix, and ``()`` for anything else."""
    if isinstance(value, type):
        return ()
    sizes = getattr(value, "sparse_sizes", None)
    found = getattr(value, "shape", ()) if sizes is None else sizes()
    return tuple(found) if isinstance(found, tuple) else ()  # numpy.shape is a function.
