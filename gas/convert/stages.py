"""The graphs of a converted model's layers, for layer-wise inference."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gas.convert.scope import pull, read_history


def make_stages(net: GraphModule) -> list[GraphModule]:
    """Make the graphs that compute each history, and the output, from features and earlier ones.

    The stages have the inputs, modules and parameters of ``net``.
    """
    pulls = {node.args[1]: node for node in net.graph.nodes if node.target is pull}
    (output,) = [node for node in net.graph.nodes if node.op == "output"]
    targets = [pulls[position].args[2] for position in range(len(pulls))] + [output.args[0]]
    stages = []
    for layer, target in enumerate(targets):
        known = {position: pulls[position] for position in range(layer)}
        stage = GraphModule(net, _make_stage(net.graph, target, known))
        for shared in ("_modules", "_parameters", "_buffers"):
            stage.__dict__[shared] = net.__dict__[shared]
        stages.append(stage)
    return stages


def _make_stage(graph: Graph, target: Node, known: dict[int, Node]) -> Graph:
    """Make the graph of one stage, which reads rows of earlier histories."""
    reads: dict[Any, tuple[int, bool]] = {}
    for position, node in known.items():
        reads[node], reads[node.args[2]] = (position, False), (position, True)
    needed = _find_needed(target, reads)
    out = Graph()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = out.node_copy(node)
        elif node in reads and node in needed:
            scope = made[next(iter(graph.nodes))]
            made[node] = out.call_function(read_history, (scope, *reads[node]))
        elif node in needed:
            made[node] = out.node_copy(node, made.__getitem__)
    out.output(map_arg(target, made.__getitem__))
    out.lint()
    return out


def _find_needed(target: Node, reads: dict[Any, tuple[int, bool]]) -> set[Node]:
    """Find the nodes to compute, or to read, for a value."""
    needed: set[Node] = set()
    left = [target]
    while left:
        node = left.pop()
        if node in needed:
            continue
        needed.add(node)
        if node not in reads:
            left += node.all_input_nodes
    return needed
