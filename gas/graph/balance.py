"""Parts with about equally many nodes of each class, such as of each type.

The METIS that Python has takes one weight per node; this moves nodes from parts that have too many
of a class to those that have room, along the edges that keep the cut small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gas.graph.edges import Edges
from gas.graph.partitioners import undirected_graph

SPARE = 0.1  # A part may have so much more of a class than the mean.
ROUNDS = 8


def balanced(part: Tensor, num_parts: int, classes: Tensor, edges: Edges) -> Tensor:
    """Moves nodes until no part has more of a class than ``1 + SPARE`` times the mean, rounded up.

    In every round the nodes of parts with too many go where most of their neighbours are and there
    is room, those first by which fewest edges more are cut. What is left over goes anywhere.

    Args:
        part: The part of each node, of shape ``[N]``.
        num_parts: The number of parts.
        classes: The class of each node, from 0, of shape ``[N]``.
        edges: The graph.

    Returns:
        The part of each node, of shape ``[N]``.
    """
    part, num_classes = part.clone(), int(classes.max()) + 1 if classes.numel() else 0
    if num_parts == 1 or num_classes == 0:
        return part
    mean = torch.bincount(classes, minlength=num_classes).double() / num_parts
    most = (mean * (1 + SPARE)).ceil().long()
    graph = undirected_graph(edges._replace(weight=None))

    def room() -> Tensor:
        found = torch.bincount(part * num_classes + classes, minlength=num_parts * num_classes)
        return most - found.view(num_parts, num_classes)

    for _ in range(ROUNDS):
        left = room()
        nodes = (left[part, classes] < 0).nonzero().view(-1)
        if nodes.numel() == 0:
            return part
        nodes, target, gain = _best(graph.rowptr, graph.col, part, nodes, left, classes)
        leaves = _ranked(part[nodes] * num_classes + classes[nodes], gain)
        wanted = leaves < -left[part[nodes], classes[nodes]]
        nodes, target, gain = nodes[wanted], target[wanted], gain[wanted]
        enters = _ranked(target * num_classes + classes[nodes], gain)
        fits = enters < left[target, classes[nodes]]
        if not bool(fits.any()):
            break
        part[nodes[fits]] = target[fits]
    return _spread(part, classes, room())


def _best(
    rowptr: Tensor, col: Tensor, part: Tensor, nodes: Tensor, room: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that have a neighbour where there is room, the best such part, and the gain."""
    num_parts = room.size(0)
    count = rowptr[nodes + 1] - rowptr[nodes]
    row = torch.repeat_interleave(count)
    first = torch.repeat_interleave(rowptr[nodes] - (count.cumsum(0) - count), count)
    near = part[col[torch.arange(row.numel()) + first].long()]
    own = torch.bincount(row[near == part[nodes][row]], minlength=nodes.numel())
    row, near = (each[room[near, classes[nodes][row]] > 0] for each in (row, near))
    pairs, edges = torch.unique(row * num_parts + near, return_counts=True)
    row, near = pairs // num_parts, pairs % num_parts
    order = (row * (math.ceil(int(edges.max())) + 1) - edges).argsort() if edges.numel() else row
    row, near, edges = row[order], near[order], edges[order]
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = row[1:] != row[:-1]
    row, near, edges = row[is_first], near[is_first], edges[is_first]
    return nodes[row], near, edges - own[row]


def _ranked(group: Tensor, gain: Tensor) -> Tensor:
    """The place of each among those of its group, those that gain most first."""
    order = gain.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    of = group[order]
    place = torch.arange(of.numel())
    starts = torch.ones_like(of, dtype=torch.bool)
    starts[1:] = of[1:] != of[:-1]
    first = torch.where(starts, place, place.new_zeros(())).cummax(0).values if of.numel() else of
    return torch.empty_like(place).index_copy_(0, order, place - first)


def _spread(part: Tensor, classes: Tensor, room: Tensor) -> Tensor:
    """Moves what parts have too many of to wherever there is room."""
    for kind in range(room.size(1)):
        mine = room[:, kind]
        nodes = ((classes == kind) & (mine[part] < 0)).nonzero().view(-1)
        gain = torch.zeros_like(nodes)
        over = nodes[_ranked(part[nodes], gain) < -mine[part[nodes]]]
        places = torch.repeat_interleave(mine.clamp(min=0))
        chosen = torch.linspace(0, max(0, places.numel() - 1), over.numel()).long()
        part[over] = places[chosen]
    return part
