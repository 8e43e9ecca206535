"""Parts that have about equally many nodes of each class."""

import pytest
import torch

from gas.graph.balance import SPARE, balanced
from gas.graph.edges import Edges
from gas.graph.partition import find_parts


def blocks(num_nodes, num_blocks, seed=0, inside=8, across=1):
    """A graph of dense blocks with a few edges between them, and the block of each node."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.arange(num_nodes) * num_blocks // num_nodes
    src = torch.arange(num_nodes).repeat(inside + across)
    size = num_nodes // num_blocks
    near = block.repeat(inside) * size + torch.randint(
        size, (inside * num_nodes,), generator=generator
    )
    far = torch.randint(num_nodes, (across * num_nodes,), generator=generator)
    return Edges(src, torch.cat([near, far]), None, num_nodes), block


def counts(part, classes, num_parts):
    num_classes = int(classes.max()) + 1
    found = torch.bincount(part * num_classes + classes, minlength=num_parts * num_classes)
    return found.view(num_parts, num_classes)


def cut(part, edges):
    return int((part[edges.src] != part[edges.dst]).sum())


@pytest.mark.parametrize("num_parts", [2, 5, 16])
@pytest.mark.parametrize("seed", range(5))
def test_no_part_has_too_many_of_a_class(num_parts, seed):
    generator = torch.Generator().manual_seed(seed)
    edges, _ = blocks(320, 8, seed)
    part = torch.randint(num_parts, (320,), generator=generator)
    classes = torch.randint(4, (320,), generator=generator) ** 2 // 3
    found = balanced(part, num_parts, classes, edges)
    most = (torch.bincount(classes).double() / num_parts * (1 + SPARE)).ceil()
    assert bool((counts(found, classes, num_parts) <= most).all())
    assert torch.equal(found, balanced(part, num_parts, classes, edges))


def test_what_is_balanced_stays():
    edges, block = blocks(320, 8)
    classes = torch.arange(320) % 5
    assert torch.equal(balanced(block, 8, classes, edges), block)
    assert balanced(block[:0], 1, classes[:0], Edges(*(block[:0],) * 2, None, 0)).numel() == 0


def test_a_class_that_lies_in_one_part_is_spread():
    edges, block = blocks(320, 8)
    classes = (block == 0).long()
    found = balanced(block, 8, classes, edges)
    assert int(counts(found, classes, 8)[:, 1].max()) <= 6
    assert int(counts(found, classes, 8)[:, 0].max()) <= 39


def test_without_edges_nodes_go_anywhere():
    none, zeros = torch.empty(0, dtype=torch.long), torch.zeros(12, dtype=torch.long)
    found = balanced(zeros, 4, zeros, Edges(none, none, None, 12))
    assert int(torch.bincount(found, minlength=4).max()) == 4


def test_it_cuts_fewer_edges_than_chance_would():
    edges, _block = blocks(3200, 16)
    classes = torch.arange(3200) % 7 // 3
    perm, ptr = find_parts(edges, 16, False, False, None, "metis", 0, False)
    part = torch.empty_like(perm)
    part[perm] = torch.repeat_interleave(ptr.diff())
    shifted = torch.where(torch.arange(3200) % 4 == 0, (part + 1) % 16, part)
    few = classes == 1
    shifted[few.nonzero()[:600, 0]] = 3
    found = balanced(shifted, 16, classes, edges)
    moved = found != shifted
    assert 0 < int(moved.sum()) < 800
    assert cut(found, edges) < cut(shifted, edges)
