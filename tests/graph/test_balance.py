"""Parts that have about equally many nodes of each class."""

import itertools

import pytest
import torch

import gas
from gas.datasets.planted import planted_partition
from gas.graph.balance import SPARE, balance_parts, classes_in
from gas.graph.edges import Edges
from gas.graph.partition import PartitionOptions, find_parts


def blocks(num_nodes, num_blocks, seed=0, inside=8, across=1):
    """Return a graph of dense blocks with a few edges between them, and the block of each node."""
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
    found = balance_parts(part, num_parts, classes, edges)
    most = (torch.bincount(classes).double() / num_parts * (1 + SPARE)).ceil()
    assert bool((counts(found, classes, num_parts) <= most).all())
    assert torch.equal(found, balance_parts(part, num_parts, classes, edges))


def test_what_is_balanced_stays():
    edges, block = blocks(320, 8)
    classes = torch.arange(320) % 5
    assert torch.equal(balance_parts(block, 8, classes, edges), block)
    assert balance_parts(block[:0], 1, classes[:0], Edges(*(block[:0],) * 2, None, 0)).numel() == 0


def test_a_class_that_lies_in_one_part_is_spread():
    edges, block = blocks(320, 8)
    classes = (block == 0).long()
    found = balance_parts(block, 8, classes, edges)
    assert int(counts(found, classes, 8)[:, 1].max()) <= 6
    assert int(counts(found, classes, 8)[:, 0].max()) <= 39


def test_without_edges_nodes_go_anywhere():
    none, zeros = torch.empty(0, dtype=torch.long), torch.zeros(12, dtype=torch.long)
    found = balance_parts(zeros, 4, zeros, Edges(none, none, None, 12))
    assert int(torch.bincount(found, minlength=4).max()) == 4


@pytest.mark.parametrize(
    ("outer", "leaves", "to"), [([(0, 5), (0, 7), (0, 8)], 0, 2), ([], 4, None), ([(2, 6)], 2, 1)]
)
def test_who_leaves_and_where_to(outer, leaves, to):
    """One of five nodes, four of which are joined: where most of its neighbours are, if anywhere.

    Where no part has a neighbour, the one with fewest edges leaves.
    """
    part, zeros = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2]), torch.zeros(9, dtype=torch.long)
    pairs = torch.tensor([*itertools.combinations(range(4), 2), *outer]).T
    found = balance_parts(part, 3, zeros, Edges(*pairs, None, 9))
    assert (found != part).nonzero().view(-1).tolist() == [leaves]
    assert to is None or int(found[leaves]) == to


def test_it_cuts_fewer_edges_than_chance_would():
    edges, _block = blocks(3200, 16)
    classes = torch.arange(3200) % 7 // 3
    perm, ptr = find_parts(edges, 16, PartitionOptions(cache=False, log=False))
    part = torch.empty_like(perm)
    part[perm] = torch.repeat_interleave(ptr.diff())
    shifted = torch.where(torch.arange(3200) % 4 == 0, (part + 1) % 16, part)
    few = classes == 1
    shifted[few.nonzero()[:600, 0]] = 3
    found = balance_parts(shifted, 16, classes, edges)
    moved = found != shifted
    assert 0 < int(moved.sum()) < 800
    assert cut(found, edges) < cut(shifted, edges)


# Several classes of a node, graphs of one type ----------------------------------------------------


def most(classes, num_parts):
    return (torch.bincount(classes).double() / num_parts * (1 + SPARE)).ceil()


@pytest.mark.parametrize("num_parts", [2, 7, 32])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_edges", [True, False])
def test_classes_that_divide_each_other_are_all_met(num_parts, seed, with_edges):
    """Nodes, labelled ones, and their labels, of which there may be fewer than parts."""
    generator = torch.Generator().manual_seed(seed)
    edges, block = blocks(320, 8, seed)
    if not with_edges:
        edges = Edges(edges.src[:0], edges.dst[:0], None, 320)
    part = (torch.rand(320, generator=generator) ** 3 * num_parts).long()
    labelled = (torch.rand(320, generator=generator) < 0.05 + 0.1 * seed) | (block == 2)
    label = torch.where(labelled, 1 + (torch.rand(320, generator=generator) ** 2 * 12).long(), 0)
    columns = torch.stack([label, torch.zeros(320, dtype=torch.long), labelled.long()], dim=1)
    found = balance_parts(part, num_parts, columns, edges)
    for classes in columns.unbind(1):
        assert bool((counts(found, classes, num_parts) <= most(classes, num_parts)).all())
    assert torch.equal(found, balance_parts(part, num_parts, columns, edges))
    assert torch.equal(
        found, balance_parts(found, num_parts, columns, edges)
    )  # Nothing is left to do.


def test_classes_that_contradict_each_other_are_told():
    """No two of five nodes may share a part, in as many ways as there are pairs; of four parts."""
    columns = torch.arange(5).repeat(10, 1)
    for column, (one, other) in zip(columns, itertools.combinations(range(5), 2), strict=True):
        column[other] = one
    none, zeros = torch.empty(0, dtype=torch.long), torch.zeros(5, dtype=torch.long)
    edges = Edges(none, none, None, 5)
    with pytest.warns(UserWarning, match="no way was found to balance all classes at once"):
        balance_parts(zeros, 4, columns.T, edges)
    assert balance_parts(zeros, 5, columns.T, edges).unique().numel() == 5


@pytest.fixture(scope="module")
def data():
    data = planted_partition(4000, avg_degree=8, num_classes=5, community_size=100, seed=2)
    generator = torch.Generator().manual_seed(0)
    data.train_mask = torch.rand(4000, generator=generator) < 0.004 * (1 + data.y) ** 2
    return data


def made(data, num_parts=16, **options):
    graph = gas.cluster(data, num_parts, log=False, **options)
    part = torch.repeat_interleave(graph.parts.diff())
    return graph, part, gas.partition_report(graph, graph.parts)


@pytest.mark.parametrize("method", ["metis", "random"])
@pytest.mark.parametrize("shards", [1, 2])
def test_cluster_balances_labelled_nodes_and_their_classes(data, method, shards):
    graph, part, report = made(data, balance="train_mask", method=method, shards=shards)
    classes = classes_in(graph, "train_mask")
    over = counts(part, classes[:, 1], 16) - most(classes[:, 1], 16)
    # Of two cuts, each rounds up; and the second shares out what the first has left too many of.
    assert int(over.max()) <= (0 if shards == 1 else 2)
    assert bool((counts(part, classes[:, 0], 16) <= most(classes[:, 0], 16) + shards - 1).all())
    plain = made(data, method=method, shards=shards)
    labels = graph.train_mask.long()
    if method == "metis":
        assert int(counts(plain[1], plain[0].train_mask.long(), 16)[:, 1].max()) > int(
            counts(part, labels, 16)[:, 1].max()
        )
        assert report.edge_cut < 1.1 * plain[2].edge_cut
    assert report.balance < 1.15 * shards
    assert torch.equal(graph.x, data.x[graph.perm])
    assert torch.equal(graph.train_mask, data.train_mask[graph.perm])


def test_what_is_cached_is_not_balanced(data, tmp_path):
    options = {"cache": tmp_path}
    first = made(data, balance="train_mask", **options)[0]
    files = list(tmp_path.rglob("*.npy"))
    assert len(files) == 1
    assert torch.equal(made(data, **options)[0].perm, made(data, cache=False)[0].perm)
    assert torch.equal(made(data, balance="train_mask", **options)[0].perm, first.perm)
    assert not torch.equal(made(data, **options)[0].perm, first.perm)
    assert list(tmp_path.rglob("*.npy")) == files


def test_by_name_or_by_tensor(data):
    by_name = made(data, balance="y")[0]
    assert torch.equal(by_name.perm, made(data, balance=data.y)[0].perm)
    assert torch.equal(by_name.perm, made(data, balance=data.y * 1000 - 7)[0].perm)
    perm, ptr = gas.metis(data.edge_index, 16, log=False, num_nodes=4000, balance=data.y)
    assert torch.equal(perm, by_name.perm)
    assert torch.equal(ptr, by_name.parts)
    part = torch.repeat_interleave(ptr.diff())
    assert bool((counts(part, data.y[perm], 16) <= most(data.y, 16)).all())

    columns = classes_in(data, "train_mask")
    by_columns = made(data, balance=columns)[0]
    assert torch.equal(by_columns.perm, made(data, balance="train_mask")[0].perm)
    assert torch.equal(columns[:, 0], data.train_mask.long())
    labelled = columns[data.train_mask, 1]
    assert torch.equal(labelled, data.y[data.train_mask] + 1)
    assert not columns[~data.train_mask].any()


def test_masks_of_several_splits_and_labels_that_are_no_classes(data):
    several = data.clone()
    several.train_mask = torch.stack([data.train_mask, torch.zeros(4000, dtype=torch.bool)], dim=1)
    assert torch.equal(classes_in(several, "train_mask"), classes_in(data, "train_mask"))
    for y in (torch.rand(4000), torch.ones(4000, 3, dtype=torch.long), None):
        several.y = y
        assert torch.equal(classes_in(several, "train_mask")[:, 0], data.train_mask.long())
        assert classes_in(several, "train_mask").size(1) == 1
