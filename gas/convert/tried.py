"""Trial of a conversion: layers on mini-batches of a graph, and on the graph itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.convert.kinds import EDGES, OTHER, Values, check_rows
from gas.convert.layers import (
    WEIGHT,
    LayerCall,
    inexact_error,
    is_close,
    is_exact,
    move_normalisation,
)
from gas.convert.sample import eval_mode, record, subsample
from gas.convert.scope import Scope
from gas.convert.trace import TRAINING, UNROLLED, add_hop
from gas.convert.trial import Inputs, matrix, trial_of
from gas.graph import with_edge_index
from gas.history import Rows
from gas.loader import SubgraphLoader
from gas.nn import fuse, twin

MOST = 2048, 2**15  # Nodes and edges of the sample of a graph.


def twin_like(net: Module, constants: Mapping[str, Any]) -> Module:
    """Return the module's own parameters, in layers like those that were tried."""
    out = twin(net)
    for layer in out.modules():
        if isinstance(layer, UNROLLED):
            add_hop(layer)
        move_normalisation(layer)
    for name, value in constants.items():
        object.__setattr__(out, name, value)
    return fuse(out)


def try_on_batches(
    calls: Sequence[LayerCall],
    kinds: Mapping[Node, str],
    values: Values,
    graph: Data,
    cuts: Iterable[int],
) -> Iterator[tuple[LayerCall, Tensor, Callable[[Node], Any], list[Scope]]]:
    """Cut a small graph into mini-batches, and try every layer on each.

    Args:
        calls: The calls of the layers.
        kinds: What each node of the traced graph gives.
        values: What they gave on the small graph.
        graph: The small graph.
        cuts: The first node of each mini-batch but the first.

    Returns:
        The call, what it gives for the in-batch nodes on the graph, a function for the value of a
        node in the mini-batch, and the mini-batch in several layouts.

    Raises:
        ValueError: If a layer gives anything but one tensor.
    """
    small = Data(edge_index=graph.edge_index.cpu(), num_nodes=graph.num_nodes)
    if WEIGHT in graph:
        small.edge_weight = graph.edge_weight.cpu()
    device = graph.edge_index.device
    ptr = torch.tensor([0, *cuts, small.num_nodes])
    for call in calls:
        if not isinstance(values[call.node], Tensor):
            raise ValueError(
                f"'{call.name}' ({type(call.layer).__name__}) returns a "
                f"{type(values[call.node]).__name__}, expected one tensor with a row for each node"
            )
    for batch in SubgraphLoader(small, ptr, layout="fused", log=False):
        batch = batch.to(device)
        adj_t = batch.data.adj_t
        scopes = [
            Scope(adj, weight, batch.batch_size, _no_history)
            for adj, weight in ((adj_t, None), adj_t.to_edge_index())
        ]

        def cut(node: Node, batch: Any = batch) -> Any:
            value = values[node]
            if kinds[node] == OTHER or not isinstance(value, Tensor):
                return value
            ids = batch.data.e_id if kinds[node] == EDGES else batch.n_id
            return value[ids.to(value.device)]

        for call in calls:
            yield call, values[call.node][batch.n_id[: batch.batch_size]], cut, scopes


def _no_history(position: int, x: Tensor, rows: bool) -> Tensor | Rows:
    raise AssertionError("a single layer reads no history")


@dataclass(frozen=True)
class Tried:
    """Conversion that can be tried on further graphs.

    * ``net``: the module as it was given; ``inputs``: what it takes.
    * ``graph``, ``kinds``, ``calls``: its traced graph, and what is in it.
    * ``weighted``: the layers that are given the weights of edges.
    * ``transform``: what the whole graph goes through; ``constants``: tensors of the traced graph.
    * ``numbers``: the numbers that its nodes gave on the small graph, ``None`` of other nodes.
    """

    net: Module
    inputs: Inputs
    graph: Graph
    kinds: dict[Node, str]
    calls: Sequence[LayerCall]
    weighted: Sequence[str]
    transform: BaseTransform | None
    constants: dict[str, Any]
    numbers: Values

    def check(self, data: Data) -> None:
        """Try the layers on a sample of a graph, as they were tried on a small random one.

        Raises:
            ValueError: If a layer isn't exact on mini-batches of it, naming it, or the module
                returns other values on it.
        """
        device = next((p.device for p in self.net.parameters()), torch.device("cpu"))
        sample = self._sample(data)
        if sample is None:
            return
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(0)  # Those of other devices stay as they are.
            try:
                mine, sample = trial_of(self.net), sample.to(device)
                expected = self.inputs.run_as_given(mine, sample)
            except Exception:  # A module may raise anything: the trial on a small graph has to do.
                return
            try:
                self._check(mine, sample, expected)
            except ValueError:
                if not self._is_exact_in_double(mine, sample):
                    raise

    def _sample(self, data: Data) -> Data | None:
        """Return a sample in the graph's layout; ``None`` if it can't be taken."""
        listed = with_edge_index(data)
        names = {*self.inputs.names, *(name for name in ("x", WEIGHT) if name in listed)}
        tensors = [listed.get(name) for name in (*names, "edge_index")]
        if not all(isinstance(value, Tensor) for value in tensors) or listed.num_nodes < 4:
            return None
        out = subsample(listed, sorted(names), *MOST)
        if "edge_index" not in data:
            if WEIGHT not in out:
                out.edge_weight = torch.ones(out.num_edges)
            out.adj_t = matrix(out)
            del out.edge_index, out.edge_weight
        return out

    def _is_exact_in_double(self, mine: Module, sample: Data) -> bool:
        """Return whether the differences are due to rounding."""
        try:
            mine = mine.double()
            sample = sample.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
            self._check(mine, sample, self.inputs.run_as_given(mine, sample))
        except Exception:  # A module may raise anything in float64: then the first error stands.
            return False
        return True

    def _check(self, mine: Module, sample: Data, expected: Tensor) -> None:
        name = type(self.net).__name__
        layers = twin_like(mine, self.constants)
        listed = with_edge_index(sample)
        if self.transform is not None:
            listed = self.transform(copy.copy(sample))
        given = {**self.inputs.of(listed), TRAINING: False}
        values = record(layers, self.graph, given, listed.get(WEIGHT), self.weighted)
        output = next(node for node in self.graph.nodes if node.op == "output").args[0]
        if not is_close(values[output], expected):
            layout = "edge_index" if "edge_index" in sample else "adj_t"
            raise ValueError(
                f"{name} returns other values on {sample.num_nodes} nodes of 'data', with their "
                f"'{layout}', than its layers do, called one by one with an 'edge_index': it "
                "depends on the layout, on how large the graph is, or on large numbers; give the "
                "graph in the layout of edge_index, or use other layers"
            )
        with eval_mode(layers):
            counts = listed.num_nodes, listed.num_edges
            check_rows(layers, self.graph, self.kinds, [values, self.numbers], counts)
            calls = [replace(call, layer=layers.get_submodule(call.name)) for call in self.calls]
            cuts = sorted({max(listed.num_nodes // 32, 1), listed.num_nodes // 2})
            for call, rows, cut, scopes in try_on_batches(calls, self.kinds, values, listed, cuts):
                if not is_exact(call, call.form, rows, cut, scopes):
                    raise inexact_error(call)
