"""Plan the histories of a heterogeneous module by running it on a small graph."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import HeteroData

from gas.graph import PERM, WEIGHT, EdgeType, to_dense
from gas.nn import SumConv
from gas.scalable.hetero.layers import FusedCall, LayerCall, Visitor, visit_layers

EDGES = "edge_index"
DICT = "_dict"


class HistorySpec(NamedTuple):
    """The node type, width and level of a history.

    Histories of a level depend on those of lower levels alone. ``layer`` is the first layer that
    reads the history, or the one that reads its mean.
    """

    kind: str
    width: int
    level: int
    layer: str


@dataclass(frozen=True)
class Plan:
    """Layers and histories of a module for heterogeneous graphs.

    * ``inputs``: the graph's attribute for each parameter of ``forward``.
    * ``kinds``: the types that have each attribute, by parameter, with its number of columns if it
      is a floating-point matrix.
    * ``places``: the histories.
    * ``reads``: the history that a call of a layer reads, by the call's number and node type.
    * ``layers``: the layers in the order of their calls.
    * ``output``: the node type of the output's rows; ``None`` if it is a dictionary by type.
    * ``shared_relations``: the relations for which several calls of layers sum the same rows in the
      same way, by the numbers of these calls.
    * ``means``: the history whose mean a call of a layer reads, by the call's number and node type.
    * ``lacked``: attributes that the module takes, and that its graph lacked.
    """

    inputs: Mapping[str, str]
    kinds: Mapping[str, Mapping[Any, int | None]]
    places: tuple[HistorySpec, ...]
    reads: Mapping[tuple[int, str], int]
    layers: tuple[str, ...]
    output: str | None
    shared_relations: Mapping[int, tuple[EdgeType, ...]]
    means: Mapping[tuple[int, str], int]
    lacked: tuple[str, ...] = ()

    @property
    def num_levels(self) -> int:
        """Number of sweeps until histories are exact."""
        return max((place.level for place in self.places), default=-1) + 1


OF_BATCHES = ("batch", "batch_size", "num_nodes", "offset", "count", "ptr")  # Not of the graph.


def match_inputs(net: Module, data: HeteroData) -> dict[str, str]:
    """Return the attribute for each parameter of ``forward``: ``x`` for ``x_dict`` or ``x``.

    Raises:
        ValueError: If the graph lacks the attribute of a parameter without a default.
    """
    found = {}
    parameters = inspect.signature(net.forward).parameters
    cure = "name it as the attribute, or set the attribute"
    if not {EDGES, EDGES + DICT} & {*parameters}:
        cure = "take dictionaries by type, x_dict and edge_index_dict, instead of the graph"
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        key = name.removesuffix(DICT)
        known = key in ("n_id", "e_id", EDGES) or any(key in store for store in data.stores)
        if known:
            found[name] = key
        elif parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(net).__name__}.forward takes {name!r}, but no type of the graph has "
                f"{key!r}: {cure}"
            )
    if EDGES not in found.values():
        raise ValueError(
            f"{type(net).__name__}.forward has no parameter 'edge_index_dict', or 'edge_index', "
            "for the edges by type"
        )
    return found


def collect_inputs(data: HeteroData, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``forward``: dictionaries by type, and attributes of the graph.

    ``n_id`` are ids in the graph before clustering. Sparse features are made dense.
    """
    return {
        name: data[key]
        if key in data._global_store
        else {
            kind: to_dense(store[PERM if key == "n_id" and PERM in store else key])
            for kind, store in zip(data.node_types + data.edge_types, data.stores[1:], strict=True)
            if key in store
        }
        for name, key in inputs.items()
    }


def add_ids(data: HeteroData) -> HeteroData:
    """Return a whole graph with ``n_id`` and ``e_id``, which mini-batches have."""
    out = copy.copy(data)
    for kind in data.node_types:
        size = out[kind].num_nodes = int(data[kind].num_nodes or 0)
        out[kind].n_id = torch.arange(size)
    for kind in data.edge_types:
        out[kind].e_id = torch.arange(data[kind].edge_index.size(1))
    return out


class _MarkLevel(torch.autograd.Function):
    """The identity, which notes the level of a layer's output in the graph of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, level: int) -> Tensor:
        ctx.level = level
        return x.clone()  # The module may change it in place.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _level(x: Tensor) -> int:
    """Return the number of successive layers before a tensor."""
    level, seen, todo = 0, set(), [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        level = max(level, getattr(node, "level", 0))
        todo.extend(each for each, _ in node.next_functions)
    return level


class _HistoryFinder(Visitor):
    """A visitor that finds the inputs of layers which other layers have computed."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._known: dict[int, tuple[Tensor, int]] = {}  # By id, which the tensor keeps valid.
        self._levels: dict[int, int] = {}  # Of each call.
        self.places: list[HistorySpec] = []
        self.reads: dict[tuple[int, str], int] = {}
        self.means: dict[tuple[int, str], int] = {}
        self.layers: list[str] = []
        self.rows: list[Tensor] = []
        self._summed: dict[tuple[int, str], tuple[Any, dict[int, EdgeType]]] = {}

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        self._note(layer)
        level = _level(x)
        if level == 0:
            return x
        self._levels[layer.number] = max(level, self._levels[layer.number])
        if id(x) not in self._known:
            if x.dim() != 2 or x.size(0) != self._sizes[kind] or not x.is_floating_point():
                raise ValueError(
                    f"'{layer.name}' is given {x.dtype} of shape {list(x.shape)} for nodes of type "
                    f"'{kind}', and a history takes rows of floating-point numbers, "
                    "[num_nodes, width]"
                )
            self._known[id(x)] = x, len(self.places)
            self.places.append(HistorySpec(kind, x.size(1), level - 1, layer.name))
            self.rows.append(x)
        self.reads[layer.number, kind] = self._known[id(x)][1]
        return x

    def fused_inputs(self, call: FusedCall) -> tuple[Any, Any]:
        if isinstance(call.layer, SumConv) and call.layer.sums_input_rows:
            key = id(call.source), call.layer._reduce
            _, calls = self._summed.setdefault(key, (call.source, {}))
            calls[call.number] = call.kind
        return super().fused_inputs(call)

    @property
    def shared_relations(self) -> dict[int, tuple[EdgeType, ...]]:
        """See :class:`Plan`."""
        groups = [
            (calls, tuple(dict.fromkeys(calls.values()))) for _, calls in self._summed.values()
        ]
        return {call: kinds for calls, kinds in groups for call in calls if len(kinds) > 1}

    def mean(self, layer: LayerCall, kind: str, rows: Tensor) -> Tensor:
        """Note a history for the rows of a node type, and return their mean."""
        level = _level(rows)
        self.means[layer.number, kind] = len(self.places)
        self.places.append(HistorySpec(kind, rows.size(1), level, layer.name))
        self.rows.append(rows)
        # Its users are a level higher.
        return _MarkLevel.apply(super().mean(layer, kind, rows), level + 2)

    def output(self, layer: LayerCall, kind: str, out: Tensor) -> Tensor:
        self._note(layer)
        if out.dim() == 0 or out.size(0) != self._sizes[kind]:
            raise ValueError(
                f"'{layer.name}' returns a tensor of shape {list(out.shape)} for nodes of type "
                f"'{kind}', expected a row for each node: index tables with a row for each node, "
                f"such as embeddings, by n_id_dict[{kind!r}], an argument of forward"
            )
        return _MarkLevel.apply(out, self._levels[layer.number] + 1)

    def _note(self, layer: LayerCall) -> None:
        """Record a call of a layer."""
        self._levels.setdefault(layer.number, 0)
        if layer.number == len(self.layers):
            self.layers.append(layer.name)


def make_plan(net: Module, data: HeteroData, inputs: Mapping[str, str]) -> tuple[Plan, Any, Any]:
    """Run a module on a small graph, and find where it needs histories.

    Args:
        net: The module, in evaluation mode.
        data: The graph, with ``n_id`` and ``e_id``; its types should have different numbers of
            nodes.
        inputs: The attribute for each parameter of ``forward``.

    Returns:
        The plan, the output, and the rows that each history would hold.

    Raises:
        ValueError: If the module isn't supported.
    """
    arguments = collect_inputs(data, inputs)
    sizes = {kind: data[kind].num_nodes for kind in data.node_types}
    with torch.enable_grad():
        for values in arguments.values():
            for kind, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point():
                    values[kind] = value.detach().clone().requires_grad_()
        finder = _HistoryFinder(sizes)
        edges = next(arguments[name] for name, key in inputs.items() if key == EDGES)
        with visit_layers(net, edges, finder):
            try:
                out = net(**arguments)
            except (ValueError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise ValueError(
                    f"{type(net).__name__} can't be run on a small random graph of the same types: "
                    f"{type(error).__name__}: {error}{_explain_optional_attribute(net, arguments)}"
                ) from error
    if not finder.layers:
        raise ValueError(f"{type(net).__name__} calls no message passing layer")
    layers, places = tuple(finder.layers), tuple(finder.places)
    kind = _output_type(net, out, sizes)
    kinds = {
        name: {each: _count_columns(value) for each, value in values.items()}
        for name, values in arguments.items()
        if isinstance(values, dict)
    }
    plan = Plan(
        inputs, kinds, places, finder.reads, layers, kind, finder.shared_relations, finder.means,
        _find_missing_attributes(net, data, inputs, out),
    )  # fmt: skip
    return plan, out, finder.rows


def _explain_optional_attribute(net: Module, arguments: Mapping[str, Any]) -> str:
    """Return the cure if a module can be run without one of its optional attributes; else ""."""
    for name, parameter in inspect.signature(net.forward).parameters.items():
        if name in arguments and parameter.default is not inspect.Parameter.empty:
            with contextlib.suppress(Exception), torch.no_grad():  # The module may raise any.
                net(**{other: value for other, value in arguments.items() if other != name})
                return (
                    f"; without {name!r} it can: give it as the layers take it, or leave it out of "
                    "the graph"
                )
    return ""


def _count_columns(value: Any) -> int | None:
    """Return the number of columns of a floating-point matrix, or ``None``."""
    is_matrix = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2
    return value.size(1) if is_matrix else None


def _find_missing_attributes(
    net: Module, data: HeteroData, inputs: Mapping[str, str], out: Any
) -> tuple[str, ...]:
    """Return the attributes that ``forward`` takes and that the graph of the conversion lacked.

    Modules of ``to_hetero`` have parameters that no layer takes. Weights that don't change their
    output ``out`` are left out.
    """
    names = inspect.signature(net.forward).parameters.keys() - inputs.keys()
    lacked = {name.removesuffix(DICT): name for name in sorted(names)}
    weight = lacked.get(WEIGHT)
    if weight is not None:
        weighted = copy.copy(data)
        for store in weighted.edge_stores:
            store[WEIGHT] = torch.rand(store.edge_index.size(1), dtype=torch.double)
        with contextlib.suppress(Exception), torch.no_grad():  # The module may raise any.
            found = net(**collect_inputs(weighted, {**inputs, weight: WEIGHT}))
            pairs = zip(tree_leaves(out), tree_leaves(found), strict=True)
            if all(a is b is None or torch.allclose(a, b) for a, b in pairs):
                del lacked[WEIGHT]
    return tuple(sorted(lacked.keys() - {*OF_BATCHES}))


def _output_type(net: Module, out: Any, sizes: Mapping[str, int]) -> str | None:
    """Return the node type of the output's rows; ``None`` if it is a dictionary by type."""
    name = type(net).__name__
    if isinstance(out, Mapping):
        for kind, value in out.items():
            rows = value.size(0) if isinstance(value, Tensor) and value.dim() else None
            if value is not None and (kind not in sizes or rows != sizes[kind]):
                raise ValueError(
                    f"{name} returns a {type(value).__name__} for {kind!r}, expected a dictionary "
                    "of tensors by type of nodes, each with a row for each node"
                )
        return None
    if not isinstance(out, Tensor) or out.dim() == 0:
        raise ValueError(
            f"{name} returns a {type(out).__name__}, expected a tensor, or a dictionary of tensors "
            "by type of nodes"
        )
    kinds = [kind for kind, size in sizes.items() if size == out.size(0)]
    if len(kinds) != 1:
        raise ValueError(
            f"{name} returns {out.size(0)} rows, which is not the number of nodes of one type: "
            "return a dictionary by type"
        )
    return kinds[0]
