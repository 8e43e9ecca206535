"""Arguments of a module that a graph provides, and runs of the module with them."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import DeepGCNLayer
from torch_geometric.transforms import BaseTransform

from gas.convert.module.arguments import (
    ADJACENCY,
    UNSUPPORTED,
    GraphArgument,
    adjacency_name,
    features_parameter,
    find_dictionaries,
    find_method,
    graph_parameter,
    missing_error,
    node_table_error,
    parameters,
    refuse_ambiguous_weights,
    takes_rows_alone,
)
from gas.convert.module.caches import copy_module, set_attributes
from gas.convert.module.changes import add_noise
from gas.convert.module.lists_and_tables import EdgeLists, EdgeListsWrapper, Tables, find_tables
from gas.convert.module.preparation import NODE_ID, read_mark
from gas.convert.module.state import eval_mode, keep_attributes
from gas.convert.values.failures import (
    describe_error,
    describe_values,
    explain_missing_attribute,
    find_differing_type,
    is_own,
)
from gas.convert.values.known import is_edge_list
from gas.convert.values.modes import TRAINING
from gas.convert.values.traced_matrix import TRACED, make_matrix, matrix_error
from gas.graph import (
    MAPPED,
    PAIRS,
    WEIGHT,
    is_row_per_node,
    layout_of,
    with_edge_index,
)

# Parameters of a call with a mini-batch, and of the graph that is made here.
CALL = ("n_id", "offset", "count", "loader", "fill", "push", "views")
RESERVED = frozenset((*CALL, "call", "scope", "self", TRAINING))


@dataclass
class Inputs:
    """Arguments of a method that a graph provides.

    * ``names``: attributes; ``edges``: the parameter for a list of edges.
    * ``matrix``: the parameter for a matrix instead, which is made of ``edge_index`` and weights in
      the call, so that they are followed; ``layout``: its layout.
    * ``graph``: the parameter for the graph itself, whose attributes are then ``names`` and
      ``edges``, besides ``plain`` ones that are no tensors; ``counted``: one with a row per node;
      ``nested``: dictionaries of these attributes, by their names.
    * ``features``: the parameter for ``x``, if it has another name.
    * ``has_edges``: whether the module takes the adjacency.
    * ``keeps``: the attributes of the module that a call changes.
    * ``tables``: parameters that have a row for each node.
    * ``lists``: the lists of edges that are joined before.
    * ``defaults``: those of all parameters, ``inspect.Parameter.empty`` for none.
    * ``made``: attributes that the transform of the graph makes; ``had``: those of the graph.
    """

    method: str
    names: Sequence[str]
    edges: str
    graph: str = ""
    plain: Mapping[str, Any] = field(default_factory=dict)
    counted: str = ""
    made: Sequence[str] = ()
    had: Collection[str] = ()
    layout: str = ""
    nested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    features: str = ""
    matrix: str = ""
    keeps: Collection[str] = ()
    tables: Tables = field(default_factory=Tables)
    lists: EdgeLists = field(default_factory=EdgeLists)
    has_edges: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attributes(self) -> list[str]:
        """Return the names of the attributes that the module is given besides the edges."""
        return [name for name in self.names if not self.matrix or name != WEIGHT]

    @property
    def given(self) -> list[str]:
        """Return the names of the attributes of the user's graph that are needed."""
        return [*self.attributes, *self.lists.names, *dict(self.lists.rows)]

    def before(self, transform: BaseTransform | None) -> BaseTransform | None:
        """Return all that is done to a graph before it is cut."""
        return self.lists.before(self.tables.before(transform))

    def arrange(self) -> tuple[list[str], dict[str, Any]]:
        """Return the names of all values in order, and the defaults of other parameters."""
        given = [*self.names, self.edges]
        named = ["x" if key == self.features else key for key in self.defaults]
        is_named = not self.graph and not self.matrix
        order = [key for key in (*named, NODE_ID) if key in given] if is_named else given
        order += [] if self.edges in order else [self.edges]  # The model is given them anyway.
        known = (*order, self.graph, self.features, self.matrix)
        return order, {key: value for key, value in self.defaults.items() if key not in known}

    def arguments(self, data: Data) -> dict[str, Any]:
        """Return the values that a graph provides, with the adjacency as ``edge_index``."""
        names = [name for name in (*self.names, *self.made) if name in data]
        return {**{name: data[name] for name in names}, self.edges: data.edge_index}

    def find_new(self, names: Iterable[str]) -> list[str]:
        """Find the names of attributes that the module may read, and that its graph lacked."""
        known = {*self.had, *ADJACENCY, *UNSUPPORTED, *RESERVED, "x"}
        known |= {WEIGHT} if self.matrix else set()
        return [n for n in names if n not in known and (self.graph or n in self.defaults)]

    def takes_matrix(self, layout: str, is_weighted: bool) -> Inputs:
        """Return the inputs of a module that takes a matrix for its edges, of a layout."""
        names = [name for name in self.names if name != WEIGHT] + [WEIGHT] * is_weighted
        return replace(self, names=names, edges="edge_index", matrix=self.edges, layout=layout)

    def _with_matrix(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with a matrix of the edges and weights among them."""
        out = dict(values)
        adj_t, weight = out.pop(self.edges), out.pop(WEIGHT, None)
        sizes: Any = (out[self.counted].size(0),) * 2 if self.counted else None
        if issubclass(type(adj_t), Proxy):
            adj_t = TRACED[self.layout](adj_t[1], adj_t[0], weight, sizes)
        elif is_edge_list(adj_t):
            rows = out.get(self.counted)
            if weight is None and self.layout == "csr" and isinstance(rows, Tensor):
                dtype = rows.dtype if rows.is_floating_point() else None
                weight = torch.ones(adj_t.size(1), dtype=dtype, device=adj_t.device)
            adj_t = make_matrix(adj_t, weight, sizes, self.layout)
        return {**out, self.matrix: adj_t}

    def make_kwargs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the method: values of a graph, or a graph of them."""
        if self.matrix and self.edges in values:
            values = self._with_matrix(values)
        if not self.graph:
            unused = (NODE_ID,) if self.has_edges else (NODE_ID, self.edges)
            named = {key: self.features or key if key == "x" else key for key in values}
            return {named[key]: values[key] for key in values if key not in unused}
        return {self.graph: GraphArgument({**self.plain, **values}, self.counted, self.nested)}

    def reads_adj_t(self, data: Data) -> bool:
        """Return whether the module is given a graph's ``adj_t``, which may have a list, too.

        The rows of a graph folder are a matrix to modules that take an ``adj_t`` alone.
        """
        if (self.matrix or self.edges) == "adj_t" and "adj_t" in data:
            return True
        return "edge_index" not in data and not hasattr(data.get("adj_t"), MAPPED)

    def call(
        self, net: Module, values: Mapping[str, Any], method: Callable[..., Any] | None = None
    ) -> Any:
        """Call the module's method, or another, with values of a graph."""
        with self.tables.select_rows(net, values):
            return (method or getattr(net, self.method))(**self.make_kwargs(values))

    def with_tables(self, net: Module, data: Data) -> tuple[Inputs, Data]:
        """Return the inputs of a module whose tables are read by node, and the graph with ids.

        The inputs are these, if the module has no tables.
        """
        tables = find_tables(net, int(data.num_nodes or 0))
        if not tables:
            return self, data
        made = replace(
            self, names=[*self.names, NODE_ID], counted=self.counted or NODE_ID, tables=tables
        )
        return made, tables(data)

    def run_in_layout(self, net: Module, data: Data, keeps: bool = False) -> Any:
        """Run the module on a graph in the graph's own layout; it may keep what it computes."""
        values = {name: copy_value(data[name]) for name in self.attributes if name in data}
        if self.reads_adj_t(data):
            edges = data.adj_t
        else:
            is_matrix = self.matrix not in ("", "edge_index") and WEIGHT in data
            listed = with_edge_index(data)
            edges = self.to_matrix(listed) if is_matrix else listed.edge_index
        values[self.matrix or self.edges] = edges
        with eval_mode(net), contextlib.nullcontext() if keeps else keep_attributes(net):
            return self.call(net, values)

    def values(self, data: Data) -> dict[str, Any]:
        """Return copies of :meth:`arguments`, so that the module can't change the graph."""
        return {name: copy_value(value) for name, value in self.arguments(data).items()}

    def to_matrix(self, data: Data, layout: str = "") -> Any:
        """Return the weighted adjacency of a graph in a layout, by default that of the inputs."""
        size = int(data.num_nodes or 0)
        layout = layout or self.layout
        return make_matrix(data.edge_index, data.get(WEIGHT), (size, size), layout)

    def run(self, net: Module, data: Data) -> tuple[Any, Inputs]:
        """Run the module, which initialises lazy parameters.

        Returns:
            The outputs of the module, and the inputs without attributes that it hasn't read.
        """
        values, changed = self.values(data), dict[str, Any]()
        given = self.make_kwargs(values)
        shown = values if self.graph or self.matrix else given
        try:
            with (
                eval_mode(net),
                keep_attributes(net) as changed,
                self.tables.select_rows(net, values),
            ):
                out = getattr(net, self.method)(**given)
        except Exception as error:
            method = re.search(r"Could not run 'aten::(\w+)'", str(error))
            if method and self.matrix:  # Of matrices in another layout.
                raise ValueError(matrix_error(method[1])) from error
            how = f" as {self.graph!r}" if self.graph else ""
            if lacking := [
                key for key in UNSUPPORTED if self.graph and key in given[self.graph].read
            ]:
                how += f", which has no {lacking[0]!r}, of many graphs or samples of one"
            cure = (
                explain_missing_attribute(error, given.get(self.graph))
                or find_differing_type(error, net, values, self.matrix)
                or (f"forward must run on graphs of any size, here {describe_values(shown)}")
            )
            how += f": {describe_error(error)}" + ("" if is_own(error) else f"; {cure}")
            raise ValueError(
                f"{type(net).__name__} can't be run on a small graph like this one, with "
                f"{', '.join(shown)}{how}"
            ) from error
        if not self.graph:
            return out, replace(self, keeps=[*changed])
        read = given[self.graph].read | ({WEIGHT} if self.matrix else set()) | {NODE_ID}
        names = [name for name in self.names if name in read]
        return out, replace(self, names=names, keeps=[*changed])


def find_inputs(net: Module, data: Data) -> Inputs:
    """Find the arguments that a graph gives to a module.

    Raises:
        ValueError: If the graph lacks one, or a name can't be used.
    """
    method = find_method(net)
    wanted = parameters(net, method)
    features, has_edges, graph = "", True, ""
    if [*wanted] == ["input"] and type(net).__module__.startswith("torch.nn.") and "x" in data:
        names, edges, has_edges, features = ["x"], ADJACENCY[0], False, "input"
    elif graph := graph_parameter(wanted, data):
        edges = next((name for name in ADJACENCY if name in data), ADJACENCY[0])
        unused = (*ADJACENCY, *UNSUPPORTED, *RESERVED)
        names = [name for name, value in data.to_dict().items() if isinstance(value, Tensor)]
        names = [name for name in names if name not in unused]
    else:
        try:
            edges = adjacency_name(list(wanted), data)
        except ValueError as error:
            if not takes_rows_alone(wanted, data):
                raise node_table_error(net, data, error) or error from None
            edges, has_edges = ADJACENCY[0], False
        names = [n for n in wanted if n in data and n not in (*ADJACENCY, *UNSUPPORTED)]
        features = features_parameter(wanted, data, edges)
        names = ["x", *names] if features else names
        refuse_ambiguous_weights(net, wanted, data)
    _check_names(f"{type(net).__name__}.{method}", [*names, edges], takes_pairs=bool(graph))
    missing = [
        name for name, default in wanted.items()
        if name not in (*names, edges, graph, features) and default is inspect.Parameter.empty
    ]  # fmt: skip
    if missing:
        if missing[0] in UNSUPPORTED:
            raise ValueError(
                f"{type(net).__name__}.{method} takes {missing[0]!r}, which is for many graphs or "
                "samples of one: here nodes of one whole graph are trained on"
            )
        raise missing_error(f"{type(net).__name__}.{method}", missing[0], edges, data)
    given = Inputs(
        method, names, edges, graph, features=features, has_edges=has_edges, defaults=wanted,
        lists=net.lists if isinstance(net, EdgeListsWrapper) else EdgeLists(),
        counted=next((name for name in names if is_row_per_node(data, name)), ""),
        had=frozenset(data.keys()),
    )  # fmt: skip
    layout = layout_of(data.adj_t, "adj_t").name if "adj_t" in data else "edge_index"
    if (before := read_mark(data)) is not None:
        layout, is_weighted = before
        names = [name for name in names if name != WEIGHT] + [WEIGHT] * is_weighted
        given = given.takes_matrix(layout, is_weighted) if layout else replace(given, names=names)
    elif has_edges and given.reads_adj_t(data) and layout != "edge_index":
        layout = layout if layout in TRACED else "csr"
        given = given.takes_matrix(layout, _has_weights(data.adj_t))
    elif has_edges and edges != "edge_index" and WEIGHT in data and WEIGHT not in wanted:
        given = given.takes_matrix("csr", True)
    if not graph:
        return given
    plain = {
        key: value for key, value in data.to_dict().items()
        if isinstance(value, bool | int | float | str) and key != "num_nodes"
    }  # fmt: skip
    return replace(given, plain=plain, nested=find_dictionaries(data, [*names, edges]))


def _check_names(function: str, names: Sequence[str], takes_pairs: bool) -> None:
    """Refuse parameters whose names have another meaning in a call with a mini-batch."""
    if PAIRS in names and not takes_pairs:
        raise ValueError(
            f"{function} takes {PAIRS!r}, pairs of nodes, of which each mini-batch has others: "
            "have it return the embeddings of all nodes, and score the pairs of a gas.LinkLoader "
            "outside, by gas.training.link_loss or your own decoder"
        )
    for name in names:
        if name in RESERVED:
            raise ValueError(
                f"{function} takes {name!r}, a word that a call with a mini-batch uses itself: "
                "rename the parameter and the attribute"
            )


def _has_weights(adj_t: Any) -> bool:
    """Return whether a matrix has weights: a tensor without weights stores ones."""
    value = layout_of(adj_t, "adj_t").value(adj_t)
    return value is not None and (not isinstance(adj_t, Tensor) or bool((value != 1).any()))


def copy_with_noise(net: Module, emptied: dict[str, Any], computed: Collection[str]) -> Module:
    """Copy a module, and add noise to its tensors, for runs on small graphs.

    The copy lacks the attributes ``emptied``, see :func:`gas.convert.module.caches.find_filled`.
    Tensors of which the model has what is ``computed`` stay as they are.
    """
    copied = copy_module(net)
    disable_caching(copied)
    set_attributes(copied, emptied)
    add_noise(copied, computed)
    return copied


def disable_caching(net: Module) -> None:
    """Turn off ``cached=True``, so that layers normalise the edges of every call.

    Also turn off the checkpointing of activations in ``DeepGCNLayer``, which needs gradients.
    """
    for layer in net.modules():
        if isinstance(layer, DeepGCNLayer):
            layer.ckpt_grad = 0
        if not getattr(layer, "cached", False):
            continue
        object.__setattr__(layer, "cached", False)
        for name in [name for name in vars(layer) if name.startswith("_cached_")]:
            object.__setattr__(layer, name, None)


def copy_value(value: Any) -> Any:
    """Copy values, so that they can't be changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return (
        like_tuple(value, list(map(copy_value, value)))
        if isinstance(value, tuple | list)
        else value
    )


def like_tuple(value: Any, items: Sequence[Any]) -> Any:
    """Return items in the type of a tuple or list, such as the named one of ``x.max(dim=1)``."""
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value)(*items) if is_named else type(value)(items)
