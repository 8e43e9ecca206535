"""Numerical checks that layers are exact on mini-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.convert.module.inputs import Inputs, copy_with_noise, disable_caching
from gas.convert.module.state import eval_mode, keep_generators
from gas.convert.rewriting.layers import LayerCall, MaskedEdgeLayer
from gas.convert.rewriting.messages import MessageLayer
from gas.convert.rewriting.normalise import disable_normalisation
from gas.convert.sample import subsample
from gas.convert.tracing.outputs import Outputs, flatten
from gas.convert.tracing.scope import FUSED, PAIR, SQUARE, LayerScope, select_edges
from gas.convert.tracing.traced import EDGES, OTHER, ROWS, Traced, row_dim
from gas.convert.values.edge_layers import (
    UNROLLED,
    InexactLayerError,
    LayerTypes,
    add_hop,
    set_forward_flow,
    several_values_error,
)
from gas.convert.values.failures import new_error
from gas.convert.values.known import is_close
from gas.convert.values.traced_matrix import PRODUCTS, TRACED, add_product, add_products
from gas.graph import WEIGHT, find_mark, layout_of, with_edge_index
from gas.loader import SubgraphLoader
from gas.nn import FusedConv, fuse, reason_inexact, twin

EDGES_OF = "edge_weight", "edge_attr"  # The attributes of edges that modules usually take.
MOST_NODES, MOST_EDGES = 2048, 2**15  # Limits of the sample of a graph.


def make_layers(
    net: Module,
    graph: Graph,
    constants: Mapping[str, Any],
    traced_types: LayerTypes,
    added: Mapping[str, Callable[[Module], Module]],
) -> Module:
    """Return a twin of a module, with its parameters and with fused layers."""
    out = twin(net)
    disable_caching(out)
    set_forward_flow(out, traced_types)
    add_products(out, graph)
    for name in PRODUCTS if added else ():  # Layers that are added may call them.
        add_product(out, name)
    for layer in out.modules():
        if isinstance(layer, (*UNROLLED, *traced_types)):
            add_hop(layer)
        disable_normalisation(layer)
    for name, make in added.items():
        out.add_module(name, make(out))
    for name, value in constants.items():
        object.__setattr__(out, name, value)
    return fuse(out)


def describe_layer(call: LayerCall) -> tuple[str, Any]:
    """Return the layer of a call, and before it its name in the user's module."""
    layer: Any = call.layer
    is_wrapped = isinstance(layer, MaskedEdgeLayer)
    return (layer.target, layer.layer) if is_wrapped else (call.name, layer)


class LayerTest(NamedTuple):
    """Comparison of a layer's outputs on a mini-batch with those on the graph.

    * ``call``: the call of the layer; ``expected``: its outputs on the graph, of in-batch nodes.
    * ``value_of``: the value in the mini-batch of a node of the traced graph.
    * ``scopes``: the mini-batch in several layouts; the layer must be exact in all of them.
    * ``dim``: the dimension of the rows in the outputs; ``pairs``: whether all rows that the layer
      takes are in the first.
    """

    call: LayerCall
    expected: Tensor
    value_of: Callable[[Node], Any]
    scopes: Sequence[LayerScope]
    dim: int
    pairs: bool

    def find_form(self) -> str:
        """Find the form of the call that is exact.

        Raises:
            ValueError: If there is none, with the reason.
        """
        for form in (FUSED, PAIR, SQUARE):
            if form == FUSED and not isinstance(self.call.layer, FusedConv):
                continue
            if form == PAIR and (isinstance(self.call.layer, MessageLayer) or not self.pairs):
                continue  # A function of one tensor of rows.
            if self.is_exact(form):
                return form
        raise self.error()

    def is_exact(self, form: str) -> bool:
        """Return whether the layer is exact in all layouts of the batch, called in this form.

        Layers that a model would refuse aren't, even if their outputs are equal by chance, such as
        those of a convolution of zeros.
        """
        if any(map(reason_inexact, self.call.layer.modules())):
            return False
        return all(self._is_exact(form, scope) for scope in self.scopes)

    def _is_exact(self, form: str, scope: LayerScope) -> bool:
        if self.call.selected is not None:
            scope = select_edges(scope, self.value_of(self.call.selected))
        given = self.call.arguments(
            form,
            lambda function, *args: function(scope, *args),
            lambda a: self.value_of(a) if isinstance(a, Node) else a,
        )
        try:
            out = self.call.layer(**given)
        except Exception:  # A layer may raise anything for arguments that it doesn't support.
            return False
        size = self.expected.size(self.dim)
        has_rows = isinstance(out, Tensor) and out.dim() > self.dim and out.size(self.dim) >= size
        return has_rows and is_close(out.narrow(self.dim, 0, size), self.expected)

    def error(self, mode: str = "") -> InexactLayerError:
        """Return the error of a layer that isn't exact, in a mode such as " in training"."""
        layer: Any = self.call.layer
        reason = next(filter(None, map(reason_inexact, layer.modules())), "") or (
            "needs more of the graph than a node's own edges and their other ends, or the numbers "
            "of nodes: compute the weights of edges before, as T.GCNNorm does, call it once for "
            "each hop, and turn edges round by edge_index.flip(0), or take another layer"
            if not mode
            else "depends on other nodes in training mode, or raises an error there: compute each "
            "node's row from its own edges and their other ends"
        )
        name, kind = describe_layer(self.call)
        what = f"'{name}' ({type(kind).__name__})"
        if isinstance(layer, MessageLayer):
            what = f"'{layer.output}' is computed of messages along edges, and"
        text = f"{what} isn't exact on mini-batches{mode}: it {reason}"
        return InexactLayerError(text, getattr(layer, "layer", layer))


def make_layer_tests(
    traced: Traced, calls: Sequence[LayerCall], cuts: Iterable[int]
) -> Iterator[LayerTest]:
    """Cut the first small graph into mini-batches, and yield a test of each layer on each of them.

    ``cuts`` are the first nodes of all mini-batches but the first.

    Raises:
        ValueError: If a layer gives anything but one tensor.
    """
    kinds, values, graph = traced.kinds, traced.values, traced.graphs[0]
    small = Data(edge_index=graph.edge_index.cpu(), num_nodes=graph.num_nodes)
    if WEIGHT in graph:
        small.edge_weight = graph.edge_weight.cpu()
    device = graph.edge_index.device
    counts = dict(zip((ROWS, EDGES), traced.counts[0], strict=True))
    dims = {
        node: row_dim(value, counts[kinds[node]]) or 0
        for node, value in values.items() if kinds.get(node) in counts
    }  # fmt: skip
    ptr = torch.tensor([0, *cuts, small.num_nodes])
    for call in calls:
        if not isinstance(values[call.node], Tensor):
            raise several_values_error(call.name, call.layer, values[call.node])
    for batch in SubgraphLoader(small, ptr, layout="fused", log=False):
        batch = batch.to(device)
        adj_t = batch.data.adj_t
        scopes = [
            LayerScope(adj, weight, batch.batch_size)
            for adj, weight in ((adj_t, None), adj_t.to_edge_index())
        ]

        def cut(node: Node, batch: Any = batch) -> Any:
            value = values[node]
            if kinds[node] == OTHER or not isinstance(value, Tensor):
                return value
            ids = batch.data.e_id if kinds[node] == EDGES else batch.n_id
            return value.index_select(dims[node], ids.to(value.device))

        for call in calls:
            expected = cut(call.node)
            dim = dims[call.node]
            if kinds[call.node] != EDGES:
                expected = expected.narrow(dim, 0, batch.batch_size)
            pairs = all(dims[node] == 0 for node in call.rows())
            yield LayerTest(call, expected, cut, scopes, dim, pairs)


def check_layers(
    traced: Traced, calls: Sequence[LayerCall], cuts: Iterable[int], mode: str = ""
) -> None:
    """Check functions and layers in the mode that a module is in, which errors name.

    Raises:
        ValueError: If one isn't exact on mini-batches of the first small graph.
    """
    traced.check_rows(mode)
    for test in make_layer_tests(traced, calls, cuts):
        is_fused = isinstance(test.call.layer, FusedConv)  # In training, it draws by itself.
        if not (mode and is_fused) and not test.is_exact(test.call.form):
            error = test.error(mode)
            raise error if mode else ValueError(str(error))


def check_edges(traced: Traced, calls: Sequence[LayerCall], num_dropped: int) -> None:
    """Refuse a model whose edges go to anything but its layers."""
    name = type(traced.net).__name__
    if sum(call.dropped is not None for call in calls) != num_dropped:
        raise ValueError(
            f"{name} drops edges of layers that take some of the edges alone, edge_index[:, mask]: "
            "drop edges of the whole 'edge_index'"
        )
    for user in traced.edges.users:
        if isinstance(traced.values[user], torch.device):
            raise ValueError(
                f"'{user.name}' reads the device of the edges, which models don't have as a list: "
                "read that of the nodes, x.device"
            )
        if not any(user is call.node for call in calls):
            raise ValueError(
                f"'{user.name}' takes the edges, and isn't a message passing layer: what changes "
                "edges belongs to the graph, before it is cut into parts"
            )


@dataclass(frozen=True)
class Conversion:
    """Conversion of a module, which can be checked on further graphs.

    * ``traced``: the original module, with the graph of its copy that was traced.
    * ``calls``: the calls of its layers; ``outputs``: what it returns.
    * ``transform``: that of the whole graph; ``constants``: tensors of the traced graph.
    * ``traced_types``: types of layers that were followed.
    * ``emptied``: attributes to empty in copies of the module, as they are of its graph.
    * ``computed``: tensors of the module, of which the graph has what was computed of them.
    """

    traced: Traced
    calls: Sequence[LayerCall]
    outputs: Outputs
    transform: BaseTransform | None
    traced_types: LayerTypes
    emptied: dict[str, Any]
    computed: Collection[str]
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def net(self) -> Module:
        """Return the original module."""
        return self.traced.net

    @property
    def inputs(self) -> Inputs:
        """Return its arguments."""
        return self.traced.inputs

    def check_on(self, data: Data) -> None:
        """Check on a sample of the user's graph that the layers are exact on mini-batches.

        Raises:
            ValueError: If a layer isn't exact on mini-batches of it, naming it, or the module
                returns other values on it.
        """
        device = next((p.device for p in self.net.parameters()), torch.device("cpu"))
        data = self.inputs.tables(self.inputs.lists(data))
        listed = with_edge_index(data)
        dense = [k for k, v in listed.to_dict().items() if getattr(v, "layout", 0) == torch.strided]
        new = [] if find_mark(data) is not None else self.inputs.find_new(dense)
        sample = self._sample(data, listed, new)
        if sample is None:
            return
        with keep_generators(self.net):
            torch.default_generator.manual_seed(1)  # Generators of other devices don't change.
            try:
                mine = copy_with_noise(self.net, self.emptied, self.computed)
                sample = sample.to(device)
                expected = self._run(mine, sample)
            except Exception:  # A module may raise anything; only the small graph is checked then.
                return
            self._refuse_new(mine, sample, expected, new)
            try:
                self._check(mine, sample, expected)
            except ValueError:
                if not self._is_exact_in_double(mine, sample):
                    raise

    def _refuse_new(self, mine: Module, sample: Data, expected: Any, new: Sequence[str]) -> None:
        """Refuse attributes that would change the module's outputs, if it was given them."""
        for name in new:
            try:
                found = self._run(mine, sample, name)
            except Exception:  # A module may raise anything.
                continue
            if not is_close(flatten(found), flatten(expected)):
                raise new_error(type(self.net).__name__, name)

    def find_missing_attributes(self) -> set[str]:
        """Find the attributes of edges that outputs depend on, and that the graph lacked."""
        names = self.inputs.find_new(EDGES_OF)
        names += [WEIGHT] * bool(self.inputs.matrix and WEIGHT not in self.inputs.names)
        if not names:
            return set()
        sample, lacked = copy.copy(self.traced.graphs[0]), set()
        with keep_generators(self.net):
            mine = copy_with_noise(self.net, self.emptied, self.computed)
            device = next((p.device for p in mine.parameters()), torch.device("cpu"))
            try:
                expected = self._run(mine, sample.to(device))
            except Exception:  # A module may raise anything; gas.cluster tries the user's graph.
                return set()
            for name in names:
                sample[name] = torch.rand(sample.num_edges, *[1] * (name != WEIGHT)) + 0.5
                try:
                    found = self._run(mine, sample.to(device), name)
                    lacked |= set() if is_close(flatten(found), flatten(expected)) else {name}
                except Exception:  # Such as for another width of edge_attr: it is read.
                    lacked.add(name)
        return lacked

    def _run(self, mine: Module, sample: Data, *more: str) -> Any:
        """Run a copy of the module with further attributes, with the same random numbers."""
        inputs = replace(self.inputs, names=[*self.inputs.names, *more])
        torch.default_generator.manual_seed(1)
        return inputs.run_in_layout(mine, sample)

    def _sample(self, data: Data, listed: Data, new: Sequence[str]) -> Data | None:
        """Return a sample of a list of edges in the graph's layout; ``None`` if there is none."""
        names = {*self.inputs.names, *(name for name in ("x", WEIGHT) if name in listed), *new}
        tensors = [listed.get(name) for name in (*names, "edge_index")]
        if not all(isinstance(value, Tensor) for value in tensors) or listed.num_nodes < 4:
            return None
        out = subsample(listed, sorted(names), MOST_NODES, MOST_EDGES)
        if self.inputs.has_edges and self.inputs.reads_adj_t(data):
            layout = layout_of(data.adj_t, "adj_t").name
            out.adj_t = self.inputs.to_matrix(out, layout if layout in TRACED else "csr")
            del out.edge_index, out.edge_weight
        return out

    def _is_exact_in_double(self, mine: Module, sample: Data) -> bool:
        """Return whether the layers are exact in float64: then differences are due to rounding."""
        try:
            mine = mine.double()
            sample = sample.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
            self._check(mine, sample, self.inputs.run_in_layout(mine, sample))
        except Exception:  # A module may raise anything in float64; the first error is raised then.
            return False
        return True

    def _check(self, mine: Module, sample: Data, expected: Any) -> None:
        name = type(self.net).__name__
        graph = self.traced.graph
        layers = make_layers(mine, graph, self.constants, self.traced_types, self.traced.added)
        listed = with_edge_index(sample)
        if self.transform is not None:
            listed = self.transform(copy.copy(sample))
        traced = replace(self.traced, net=layers, graphs=[listed], records=[])
        values = traced.run()
        if not is_close(self.outputs.values(values), flatten(expected)):
            layout = "edge_index" if "edge_index" in sample else "adj_t"
            raise ValueError(
                f"{name} returns other values on {sample.num_nodes} nodes of 'data', with their "
                f"'{layout}', than its layers do, called one by one with an 'edge_index': it "
                "depends on the layout, on how large the graph is, or on large numbers; give the "
                "graph in the layout of edge_index, or use other layers"
            )
        traced.records = [values, *self.traced.records]
        calls = [replace(call, layer=layers.get_submodule(call.name)) for call in self.calls]
        cuts = sorted({max(listed.num_nodes // 32, 1), listed.num_nodes // 2})
        with eval_mode(layers):
            check_layers(traced, calls, cuts)
