"""Values of the nodes of a traced graph on small graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.nn import Module
from torch_geometric.data import Data

from gas.convert.edge_layers import bind
from gas.convert.inputs import Inputs, copy_value, eval_mode
from gas.convert.known import is_close
from gas.convert.modes import TRAINING
from gas.convert.normalise import DifferentEdgesError, Normalise
from gas.convert.outputs import Outputs, find_outputs, flatten
from gas.graph import WEIGHT


class _Recorder(Interpreter):
    """Interpreter that runs a graph and records the value of each node."""

    def __init__(self, net: Module, graph: Graph, weight: Tensor | None, weighted: Any) -> None:
        super().__init__(net, graph=graph)
        self._weight, self._weighted = weight, weighted
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = copy_value(value)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self._weighted:
            return super().call_module(target, args, kwargs)
        layer = self.fetch_attr(target)
        given = bind(layer, args, kwargs)
        return layer(**{**given, "edge_weight": self._weight})


def record(
    net: Module,
    graph: Graph,
    inputs: dict[str, Any],
    weight: Tensor | None = None,
    weighted: Collection[str] = (),
) -> dict[Node, Any]:
    """Return the value of each node of a graph, in evaluation mode.

    Args:
        net: The module that was traced.
        graph: The graph.
        inputs: Its inputs by name.
        weight: The weight of each edge. (default: none)
        weighted: The names of the layers that take it. (default: none)
    """
    recorder = _Recorder(net, graph, weight, weighted)
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    with eval_mode(net):
        recorder.run(*[copy_value(inputs[name]) for name in names])
    return recorder.values


def record_values(
    net: Module,
    graph: Graph,
    inputs: Inputs,
    graphs: Sequence[Data],
    weighted: Sequence[str],
    transform: Normalise | None,
) -> list[dict[Node, Any]]:
    """Record the values of the traced graph's nodes on each of the small graphs."""
    try:
        return [
            record(
                net, graph, {**inputs.arguments(each), TRAINING: False}, each.get(WEIGHT), weighted
            )
            for each in graphs
        ]
    except Exception as error:
        how = f" after {transform}, which attributes of edges don't follow" if transform else ""
        kind = DifferentEdgesError if transform else ValueError
        raise kind(
            f"{type(net).__name__} can't be run on a small graph{how}: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def record_checked(
    net: Module,
    graph: Graph,
    expected: Any,
    inputs: Inputs,
    graphs: Sequence[Data],
    transform: Normalise | None,
    weighted: Sequence[str],
) -> tuple[Outputs, list[dict[Node, Any]]]:
    """Record values as above, and check that the graph returns what the module does."""
    outputs = find_outputs(graph, expected, type(net).__name__)
    records = record_values(net, graph, inputs, graphs, weighted, transform)
    if not is_close(outputs.values(records[0]), flatten(expected)):
        raise MismatchError(type(net).__name__, transform, inputs)
    return outputs, records


class MismatchError(DifferentEdgesError):
    """Error of a module whose result changes when it is run again, normalised, or on a list."""

    def __init__(self, name: str, transform: Normalise | None, inputs: Inputs) -> None:
        self.may_read_values = inputs.by_value and inputs.layout == "csr"
        how = "a weighted adj_t" if transform is None else f"{transform} of the whole graph"
        text = f"with {how}, because its layers take different graphs: use layers that all take "
        if transform is None and not inputs.by_value:
            text = "when it is run again: it mustn't be random in evaluation, nor change views of "
        end = "the same one"
        if text.endswith("of "):
            end = (
                "tensors in place, nor read an attribute of the edges beside two lists of them, "
                "such as edge_index and edge_index.flip(0): give the second a copy under another "
                "name"
            )
        super().__init__(f"{name} returns other values {text}{end}")
