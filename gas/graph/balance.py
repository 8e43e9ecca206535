"""Balance the numbers of nodes of each class among parts: of each type, or labelled, or of a label.

``pymetis`` takes a single weight per node. Here nodes are moved after partitioning, from parts with
too many nodes of a class to parts with room, so that few more edges are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.edges import Edges, expand_ranges
from gas.graph.partitioners import undirected_graph
from gas.native import warn

SPARE = 0.1  # How much more than the mean of a class a part may have, as a fraction.
ROUNDS = 8


def find_classes(data: Data, balance: object) -> Tensor:
    """Return the classes that :func:`gas.cluster` is to balance, of shape ``[N, K]``.

    A mask gives two columns: whether a node is in it, and the labels of those that are.
    """
    if not isinstance(balance, str):
        return check_classes(balance, int(data.num_nodes or 0))
    value = data.get(balance)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"'balance' is {balance!r}, which the graph doesn't have: expected the name of a mask "
            "or of classes, such as 'train_mask', or a tensor of them"
        )
    classes = check_classes(value, int(data.num_nodes or 0))
    if value.dtype != torch.bool:
        return classes
    mask, y = value.cpu().view(value.size(0), -1).any(dim=1), data.get("y")
    if not isinstance(y, Tensor) or y.is_floating_point() or y.numel() != mask.numel():
        return mask.long()[:, None]  # Nodes have no single label.
    labels = y.cpu().view(-1).unique(return_inverse=True)[1]
    return torch.stack([mask.long(), torch.where(mask, labels + 1, 0)], dim=1)


def check_classes(classes: object, num_nodes: int) -> Tensor:
    """Return classes of nodes as whole numbers from 0, of shape ``[N, K]``."""
    if not isinstance(classes, Tensor) or classes.is_floating_point() or classes.is_complex():
        what = classes.dtype if isinstance(classes, Tensor) else f"a {type(classes).__name__}"
        raise ValueError(
            f"'balance' is {what}, expected a tensor of whole numbers, the class of each node, or "
            "of booleans"
        )
    if classes.dim() not in (1, 2) or classes.size(0) != num_nodes or not classes[:1].numel():
        raise ValueError(
            f"'balance' has shape {list(classes.shape)}, expected a class for each node, "
            f"[{num_nodes}], or several, [{num_nodes}, K]"
        )
    columns = classes.cpu().view(num_nodes, -1).unbind(1)
    return torch.stack([each.unique(return_inverse=True)[1] for each in columns], dim=1)


def balance_parts(part: Tensor, num_parts: int, classes: Tensor, edges: Edges) -> Tensor:
    """Move nodes until no part has more of a class than ``1 + SPARE`` times the mean, rounded up.

    In every round, nodes of parts with too many move to the part with room that has most of their
    neighbours, first those that add the fewest cut edges. The rest moves to any part with room.

    Args:
        part: The part of each node, of shape ``[N]``.
        num_parts: The number of parts.
        classes: The class of each node, from 0, of shape ``[N]``, or ``[N, K]`` for ``K``
            classifications. If each refines another, all can be balanced; otherwise they may
            contradict each other, and a warning is given.
        edges: The graph.
    """
    part = part.clone()
    if num_parts == 1 or classes.numel() == 0:
        return part
    columns = classes.view(part.numel(), -1)
    sizes = columns.amax(0) + 1
    order = sizes.argsort(stable=True)  # The finest classification is last.
    columns, sizes = columns[:, order], sizes[order]
    columns = columns + (sizes.cumsum(0) - sizes)  # No two columns have a class in common.
    num_classes = int(sizes.sum())
    mean = torch.bincount(columns.reshape(-1), minlength=num_classes).double() / num_parts
    most = (mean * (1 + SPARE)).ceil().long()
    graph = undirected_graph(edges._replace(weight=None))

    def room() -> Tensor:
        cell = part[:, None] * num_classes + columns
        found = torch.bincount(cell.view(-1), minlength=num_parts * num_classes)
        return most - found.view(num_parts, num_classes)

    for _ in range(ROUNDS):
        left = room()
        nodes = (left[part[:, None], columns] < 0).any(dim=1).nonzero().view(-1)
        if nodes.numel() == 0:
            return part
        nodes, target, gain = _find_best_parts(graph.rowptr, graph.col, part, nodes, left, columns)
        wanted = torch.zeros_like(nodes, dtype=torch.bool)
        for kind in columns[nodes].unbind(1):
            leaves = _rank_in_group(part[nodes] * num_classes + kind, gain)
            wanted |= leaves < -left[part[nodes], kind]
        nodes, target, gain = nodes[wanted], target[wanted], gain[wanted]
        fits = torch.ones_like(nodes, dtype=torch.bool)
        for kind in columns[nodes].unbind(1):
            enters = _rank_in_group(target * num_classes + kind, gain)
            fits &= enters < left[target, kind]
        if not bool(fits.any()):
            break
        part[nodes[fits]] = target[fits]
    part = _spread(part, columns, room(), graph.rowptr.diff())
    over = -int(room().min())
    if over > 0:
        warn(
            f"no way was found to balance all classes at once: a part has {over} too many of one; "
            "give fewer columns of 'balance', or fewer parts",
        )
    return part


def _find_best_parts(
    rowptr: Tensor, col: Tensor, part: Tensor, nodes: Tensor, room: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes with a neighbour in a part that has room, the best such part, and the gain."""
    num_parts = room.size(0)
    count = rowptr[nodes + 1] - rowptr[nodes]
    row = torch.repeat_interleave(count)
    near = part[col[expand_ranges(rowptr[nodes], count)].long()]
    own = torch.bincount(row[near == part[nodes][row]], minlength=nodes.numel())
    fits = torch.ones_like(row, dtype=torch.bool)
    for kind in columns[nodes].unbind(1):
        fits &= room[near, kind[row]] > 0
    row, near = row[fits], near[fits]
    pairs, edges = torch.unique(row * num_parts + near, return_counts=True)
    row, near = pairs // num_parts, pairs % num_parts
    order = (row * (int(edges.max()) + 1) - edges).argsort() if edges.numel() else row
    row, near, edges = row[order], near[order], edges[order]
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = row[1:] != row[:-1]
    row, near, edges = row[is_first], near[is_first], edges[is_first]
    return nodes[row], near, edges - own[row]


def _rank_in_group(group: Tensor, gain: Tensor) -> Tensor:
    """Return the rank of each node within its group, by decreasing gain."""
    order = gain.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    group = group[order]
    rank = torch.arange(group.numel()) - torch.searchsorted(group, group)
    return torch.empty_like(rank).index_copy_(0, order, rank)


def _spread(part: Tensor, columns: Tensor, room: Tensor, degree: Tensor) -> Tensor:
    """Move excess nodes to any part with room, nodes with few edges first.

    The finest classification is balanced first. A part with too many nodes of a coarse class also
    has more of one of its finer classes, so that moving these keeps the finer ones balanced.
    """
    kinds, kind = columns.unique(dim=0, return_inverse=True)
    num_parts, num_columns = room.size(0), columns.size(1)
    cell = part * kinds.size(0) + kind
    count = torch.bincount(cell, minlength=num_parts * kinds.size(0)).view(num_parts, -1)
    for column in reversed(range(num_columns)):
        for mine in kinds[:, column].unique().tolist():
            own = (kinds[:, column] == mine).nonzero().view(-1)
            while int(room[:, mine].min()) < 0:
                src = int(room[:, mine].argmin())
                # How many of each kind every part can take.
                takes = room[:, kinds[own][:, column:]].amin(dim=2)
                takes = torch.minimum(takes, count[src, own])
                best = int(takes.argmax())
                dst, which = best // own.numel(), int(own[best % own.numel()])
                size = min(int(takes.max()), -int(room[src, mine]))
                if size <= 0:
                    break
                there = ((part == src) & (kind == which)).nonzero().view(-1)
                moved = there[degree[there].argsort(stable=True)[:size]]
                part[moved] = dst
                count[src, which] -= size
                count[dst, which] += size
                room[src, kinds[which]] += size
                room[dst, kinds[which]] -= size
    return part
