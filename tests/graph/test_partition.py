import importlib.util
import re
import warnings

import numpy as np
import pytest
import torch
from conftest import random_graph
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor, to_undirected

import gas
from gas.graph import partition, partitioners
from gas.graph.edges import Edges
from gas.native import cache_dir

METHODS = ["metis", "random", pytest.param("kaminpar", marks=pytest.mark.requires("kaminpar"))]


def cliques(num_cliques, size):
    """Cliques without a single edge between them; nodes are interleaved."""
    pairs = torch.combinations(torch.arange(size)).t()
    edges = [pairs * num_cliques + i for i in range(num_cliques)]
    return torch.cat(edges, dim=1)


def check(perm, ptr, num_nodes, num_parts):
    assert torch.equal(perm.sort().values, torch.arange(num_nodes))
    assert ptr.shape == (num_parts + 1,)
    assert ptr[0] == 0
    assert ptr[-1] == num_nodes
    assert (ptr.diff() > 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_parts", [1, 2, 7, 60])
def test_parts_cover_the_nodes(method, num_parts):
    data = random_graph()
    for _ in range(2):  # Computed, then from the cache.
        perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=60, method=method, log=False)
        check(perm, ptr, 60, num_parts)


@pytest.mark.parametrize("method", METHODS)
def test_parts_find_communities(method):
    edge_index = cliques(4, 20)
    perm, ptr = gas.metis(edge_index, 4, num_nodes=80, method=method, log=False)
    data = gas.permute(Data(edge_index=edge_index, num_nodes=80), perm, log=False)
    report = gas.partition_report(data, ptr)
    assert report.edge_cut == 0 if method != "random" else report.edge_cut > 0.5


@pytest.mark.parametrize("recursive", [False, True])
def test_directions_duplicates_and_loops_do_not_matter(recursive):
    edge_index = cliques(3, 15)
    noisy = torch.cat([edge_index, edge_index, edge_index[:, :9].flip(0)], dim=1)
    noisy = torch.cat([noisy, torch.arange(45).repeat(2, 1)], dim=1)
    for edges in (edge_index, noisy):
        perm, ptr = gas.metis(edges, 3, recursive, log=False, num_nodes=45)
        assert all(len(set((part % 3).tolist())) == 1 for part in perm.split(ptr.diff().tolist()))


def test_graphs_without_edges():
    perm, ptr = gas.metis(torch.empty(2, 0, dtype=torch.long), 3, num_nodes=10, log=False)
    check(perm, ptr, 10, 3)


def test_adjacency_matrices():
    edge_index = cliques(2, 10)
    adj_t = to_torch_csr_tensor(edge_index.flip(0), size=(20, 20))
    for adj in (adj_t, adj_t.to_sparse_coo(), adj_t.to_sparse_csc()):
        perm, ptr = gas.metis(adj, 2, log=False)
        check(perm, ptr, 20, 2)
        assert len(set((perm[:10] % 2).tolist())) == 1


def test_results_are_cached(tmp_path, monkeypatch, capsys):
    edge_index = cliques(3, 10)
    calls = []
    original = partition._PARTITIONERS["metis"]
    monkeypatch.setitem(
        partition._PARTITIONERS, "metis", lambda *args: calls.append(1) or original(*args)
    )
    first = gas.metis(edge_index, 3, num_nodes=30, cache=tmp_path)
    again = gas.metis(edge_index, 3, num_nodes=30, cache=tmp_path)
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    said = capsys.readouterr().err
    assert "Computing 3 parts with metis" in said
    assert "Found 3 parts in" in said

    gas.metis(edge_index, 2, num_nodes=30, cache=tmp_path, log=False)
    gas.metis(edge_index, 3, num_nodes=31, cache=tmp_path, log=False)
    gas.metis(edge_index[:, 1:], 3, num_nodes=30, cache=tmp_path, log=False)
    gas.metis(edge_index, 3, num_nodes=30, cache=tmp_path, log=False, seed=1)
    gas.metis(edge_index, 3, num_nodes=30, cache=False, log=False)
    assert len(calls) == 6

    for file in (tmp_path / "partitions").iterdir():  # Damaged entries count as absent.
        file.write_bytes(file.read_bytes()[:-7])
    gas.metis(edge_index, 3, num_nodes=30, cache=tmp_path, log=False)
    assert len(calls) == 7
    for number, content in enumerate([np.full(30, 99), np.zeros(30), np.full(30, -1), {"a": 1}]):
        for file in (tmp_path / "partitions").iterdir():
            with file.open("wb") as stream:
                np.savez(stream, **content) if number == 3 else np.save(stream, content)
        _, ptr = gas.metis(edge_index, 3, num_nodes=30, cache=tmp_path, log=False)
        assert (ptr.diff() > 0).all()
        assert len(calls) == 8 + number


def test_the_cache_needs_no_home(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(partition.Path, "home", homeless)
    monkeypatch.setenv("GAS_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path


def test_sizes_of_edge_index_and_numpy_integers():
    edge_index = EdgeIndex([[0, 1], [1, 0]], sparse_size=(10, 10))
    perm, ptr = gas.metis(edge_index, np.int64(3), log=False)
    check(perm, ptr, 10, 3)


def test_an_unwritable_cache_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be cached .* set GAS_CACHE_DIR"):
        perm, ptr = gas.metis(
            cliques(2, 9), 2, num_nodes=18, cache=tmp_path / "file" / "below", log=False
        )
    check(perm, ptr, 18, 2)


# Weights ------------------------------------------------------------------------------------------


def heavy_pairs(method, weights, **options):
    """Partition a grid of 6 x 20 whose edge weights favour a cut in one of two directions."""
    node = torch.arange(120).view(6, 20)
    along = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    across = torch.stack([node[:-1].flatten(), node[1:].flatten()])
    edge_index = torch.cat([along, across], dim=1)
    light, heavy = weights
    weight = torch.tensor([heavy] * along.size(1) + [light] * across.size(1))
    perm, ptr = gas.metis(
        edge_index, 2, num_nodes=120, edge_weight=weight, method=method, log=False, **options
    )
    part = torch.empty(120, dtype=torch.long)
    part[perm] = torch.arange(2).repeat_interleave(ptr.diff())
    cut = part[edge_index[0]] != part[edge_index[1]]
    return int(cut[: along.size(1)].sum()), int(cut[along.size(1) :].sum())


CUTTERS = [METHODS[0], METHODS[2]]


@pytest.mark.parametrize("method", CUTTERS)
@pytest.mark.parametrize("weights", [(1, 1000), (0.001, 1.0), (1e-30, 1e-20), (0, 1), (1, 2**40)])
def test_weights_say_where_to_cut(method, weights):
    along, across = heavy_pairs(method, weights)
    assert along == 0
    assert across > 0


@pytest.mark.parametrize("method", CUTTERS)
@pytest.mark.parametrize("weights", [(1, 1), (7, 7), (0.3, 0.3)])
def test_constant_weights_are_as_none(method, weights):
    along, across = heavy_pairs(method, weights)
    assert along + across <= 8  # The short way across, or nearly.


@pytest.mark.parametrize("recursive", [False, True])
def test_weights_of_both_directions_and_duplicates_add_up(recursive):
    # Two nodes each are tied by four light edges, or by one that is heavier than any of them.
    edge_index = torch.tensor([[0, 1, 0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 1, 0, 2, 1, 3, 2, 0, 3]])
    weight = torch.tensor([3, 3, 3, 3, 5, 0, 6, 6, 5, 0])
    perm, _ = gas.metis(edge_index, 2, recursive, log=False, edge_weight=weight)
    assert {frozenset(part.tolist()) for part in perm.split(2)} == {
        frozenset({0, 1}), frozenset({2, 3})
    }  # fmt: skip


def test_weights_are_part_of_the_cache_s_key(tmp_path):
    for weights in ((1, 9), (9, 1), (1, 9)):
        heavy_pairs("metis", weights, cache=tmp_path)
    assert len(list((tmp_path / "partitions").iterdir())) == 2


@pytest.mark.parametrize(
    ("num_nodes", "dtype"), [(2**31 - 1, torch.int32), (2**31 + 1, torch.int64)]
)
def test_ids_of_nodes_are_int64_where_int32_is_too_small(monkeypatch, num_nodes, dtype):
    """Rows aren't made: they would take 16 GiB."""
    types = []
    none = torch.empty(0, dtype=torch.int64)
    monkeypatch.setattr(
        partitioners, "symmetrize_edges", lambda *args: types.append(args[-1]) or (none, none, None)
    )
    partitioners.undirected_graph(Edges(none, none, None, num_nodes))
    assert types == [dtype]


def test_whole_weights():
    for given, expected in [
        (torch.tensor([0, 3, 2**20]), [0, 3, 2**20]),
        (torch.tensor([1, 2**40]), [1, 2**20]),
        (torch.tensor([0.5, 0.0, 1e-9]), [2**20, 0, 1]),
        (torch.tensor([[2.0], [2.0]], dtype=torch.half), [2**20] * 2),
        (torch.tensor([5], dtype=torch.uint8), [5]),
        (torch.tensor([]), []),
    ]:
        found = partitioners.to_integer_weights(given, given.size(0))
        assert found.dtype == torch.int32
        assert found.tolist() == expected


def test_clusters_of_weights():
    """The weights are those of the graph as it was given, whatever a model makes of it."""
    node = torch.arange(40).view(2, 20)
    along = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    across = torch.stack([node[0], node[1]])
    data = Data(
        x=torch.randn(40, 2),
        edge_index=to_undirected(torch.cat([along, across], dim=1)),
        edge_weight=torch.rand(116),
    )
    same_column = data.edge_index[0] % 20 == data.edge_index[1] % 20
    model = gas.models.GCN(40, 2, 4, 2, 2)
    graph = gas.cluster(data, 2, model=model, edge_weight=1 + 999 * ~same_column, log=False)
    assert graph.num_edges == 116 + 40  # With self-loops.
    assert {frozenset(part.tolist()) for part in graph.perm.split(20)} == {
        frozenset(range(20)), frozenset(range(20, 40))
    }  # fmt: skip


# method='auto' ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "most", "installed", "expected", "why"),
    [
        (2**40, 10**6, False, "metis", "^Computing"),
        (2**40, 10, True, "kaminpar", "takes kaminpar: METIS takes minutes for 760 entries"),
        (
            2**40,
            10,
            False,
            "metis",
            "takes metis: KaMinPar isn't installed, which would be faster: pip",
        ),
        (
            760 * 60,
            10**6,
            True,
            "kaminpar",
            "takes kaminpar: METIS needs about 81.64 KiB of memory, 44.53 KiB",
        ),
        (
            760 * 60,
            10**6,
            False,
            "random",
            "44.53 KiB are free, and KaMinPar .*: free some, or pip",
        ),
        (
            99,
            10**6,
            True,
            "random",
            "METIS needs .* 99 bytes are free, and KaMinPar 22.27 KiB: free some$",
        ),
    ],
)
def test_auto(free, most, installed, expected, why, monkeypatch, capsys, tmp_path):
    made = []

    def stand_in(name):
        return lambda graph, *_: made.append(name) or torch.arange(graph.num_nodes) % 4

    for name in ("metis", "kaminpar"):
        monkeypatch.setitem(partition._PARTITIONERS, name, stand_in(name))
    monkeypatch.setattr(partitioners, "free_memory", lambda: free)
    monkeypatch.setattr(partitioners, "MOST_METIS_ENTRIES", most)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    data = Data(edge_index=cliques(4, 20)[:, :380], num_nodes=80)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        graph = gas.cluster(data, 4, cache=tmp_path)
    assert graph.parts.tolist() == [0, 20, 40, 60, 80]
    said = capsys.readouterr().err
    assert re.search(why, "".join([said, *(str(each.message) for each in warned)]))
    assert len(warned) == (expected == "random")
    assert f"Computing 4 parts with {expected} ..." in said
    assert made == [expected] * (expected != "random")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gas.cluster(data, 4, cache=tmp_path, log=False)  # From the cache, but for ...
    assert len(warned) == (expected == "random")
    assert made == [expected] * (expected != "random")
    assert len(list(tmp_path.rglob("*.npy"))) == (expected != "random")  # ... the last resort.
    assert not capsys.readouterr().err


def test_auto_finds_what_metis_left_in_the_cache(tmp_path, capsys):
    first = gas.metis(cliques(3, 10), 3, cache=tmp_path, log=False)
    again = gas.metis(cliques(3, 10), 3, cache=tmp_path, method="auto")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert "Found 3 parts in" in capsys.readouterr().err


@pytest.mark.requires("kaminpar")
@pytest.mark.parametrize("weights", [None, (1, 1000)])
def test_kaminpar_of_a_compressed_graph(weights, monkeypatch):
    monkeypatch.setattr(partitioners, "MOST_PLAIN_ENTRIES", 0)
    if weights is None:
        test_parts_find_communities("kaminpar")
    else:
        test_weights_say_where_to_cut("kaminpar", weights)


def test_empty_parts_are_filled():
    part = partition._fill_empty(torch.tensor([3, 3, 3, 3, 1, 1, 1]), 4)
    assert set(part.tolist()) == {0, 1, 2, 3}
    assert set(partition._fill_empty(torch.zeros(5, dtype=torch.long), 5).tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_parts": 0}, "'num_parts' is 0, expected an integer of at least 1"),
        ({"num_parts": 2.0}, "'num_parts' is 2.0, expected an integer"),
        ({"num_parts": 21}, "'num_parts' is 21, but the graph has 20 nodes: ask for at most one"),
        ({"method": "magic"}, "'method' is 'magic', expected one of 'metis', 'kaminpar', 'random'"),
        ({"edge_weight": torch.ones(7)}, r"'edge_weight' has shape \[7\], .* per edge: \[90\]"),
        (
            {"edge_weight": -torch.ones(90)},
            "'edge_weight' holds -1.0 at the edge 0: expected finite",
        ),
        ({"edge_weight": torch.ones(90) / 0}, "'edge_weight' holds inf at the edge 0"),
        ({"edge_weight": torch.zeros(90) / 0}, "'edge_weight' holds nan at the edge 0"),
        ({"edge_weight": torch.zeros(90)}, "'edge_weight' is 0 for every edge"),
        ({"edge_weight": [1] * 90}, "'edge_weight' is a list, expected a tensor"),
        ({"edge_weight": torch.ones(90) > 0}, "'edge_weight' is torch.bool, expected a tensor"),
        ({"edge_weight": torch.ones(90), "method": "random"}, "method='random' ignores"),
        ({"num_nodes": 19}, "holds the node id 19, but 'num_nodes' is 19.*set num_nodes=20"),
        ({"edge_index": torch.tensor([[0], [-3]])}, "holds the node id -3"),
        ({"edge_index": torch.rand(2, 5)}, "has dtype torch.float32, expected integers"),
        ({"edge_index": torch.ones(2, 5).bool()}, "has dtype torch.bool, expected integers"),
        ({"edge_index": torch.ones(5, 2).long()}, r"has shape \[5, 2\], expected \[2, E\]: pass"),
        ({"edge_index": [[0], [1]]}, "is a list, expected an integer tensor"),
        ({"edge_index": torch.ones(3, 4).to_sparse(), "num_nodes": None}, "expected a square"),
        ({"edge_index": torch.ones(3, 3).to_sparse()}, "'num_nodes' is 20, but .* has 3 rows"),
    ],
)
def test_bad_input(kwargs, message):
    arguments = {"edge_index": cliques(2, 10), "num_parts": 2, "num_nodes": 20, **kwargs}
    with pytest.raises(ValueError, match=message):
        gas.metis(**arguments, log=False)


# permute ------------------------------------------------------------------------------------------


def test_permute():
    data = random_graph(features=1)
    data.x = torch.arange(60.0).view(-1, 1)
    data.edge_attr = torch.stack([data.edge_index[0] * 100 + data.edge_index[1]], dim=1)
    data.edge_label_index = data.edge_index[:, :5]
    data.splits = torch.rand(60, 4) < 0.5
    data.graph_level = torch.tensor([3.0])
    before = data.clone()
    perm = torch.randperm(60)
    out = gas.permute(data, perm, log=False)

    assert torch.equal(out.x.view(-1).long(), perm)
    for key in ("y", "train_mask", "splits"):
        assert torch.equal(out[key], data[key][perm])
    old = perm[out.edge_index]
    assert torch.equal(old, data.edge_index)  # Columns keep their order ...
    assert torch.equal(old[0] * 100 + old[1], out.edge_attr.view(-1))  # ... and their attributes.
    assert torch.equal(perm[out.edge_label_index], data.edge_label_index)
    assert torch.equal(out.graph_level, data.graph_level)
    for key, value in before:  # The input is untouched.
        assert torch.equal(data[key], value)


def test_permute_as_many_edges_as_nodes():
    data = Data(
        x=torch.arange(4.0).view(-1, 1), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    )
    data.edge_attr = torch.arange(4.0)
    out = gas.permute(data, torch.tensor([3, 2, 1, 0]), log=False)
    assert out.x.view(-1).tolist() == [3, 2, 1, 0]
    assert out.edge_attr.tolist() == [0, 1, 2, 3]


def test_permute_csr():
    dense = torch.rand(6, 6).round(decimals=2)
    perm = torch.randperm(6)
    data = Data(x=torch.randn(6, 2), adj_t=dense.to_sparse_csr())
    out = gas.permute(data, perm, log=False)
    assert torch.equal(out.adj_t.to_dense(), dense[perm][:, perm])
    assert torch.equal(data.adj_t.to_dense(), dense)


@pytest.mark.requires("torch_sparse")
def test_permute_sparse_tensor():
    from torch_sparse import SparseTensor

    dense = (torch.rand(6, 6) < 0.4).float()
    perm = torch.randperm(6)
    data = Data(x=torch.randn(6, 2), adj_t=SparseTensor.from_dense(dense))
    out = gas.permute(data, perm, log=False)
    assert torch.equal(out.adj_t.to_dense(), dense[perm][:, perm])


@pytest.mark.parametrize(
    ("perm", "message"),
    [
        (torch.arange(59), r"shape \[59\], expected an int64 tensor of shape \[60\]"),
        (torch.zeros(60, dtype=torch.long), "'perm' lacks the node 1"),
        (torch.arange(60) + 1, "'perm' lacks the node 0"),
        (torch.arange(60) + 7, "'perm' lacks the node 0"),
        (torch.arange(60) - 7, "'perm' lacks the node 53"),
        (torch.arange(60).float(), "'perm' is torch.float32"),
        ([0, 1], "'perm' is"),
    ],
)
def test_permute_needs_a_permutation(perm, message):
    with pytest.raises(ValueError, match=message):
        gas.permute(random_graph(), perm, log=False)


# Report -------------------------------------------------------------------------------------------


def test_report_by_hand():
    #      parts {0, 1}, {2, 3, 4}; edges 0->1, 2->0, 3->0, 3->1, 1->4, 2->2
    edge_index = torch.tensor([[0, 2, 3, 3, 1, 2], [1, 0, 0, 1, 4, 2]])
    report = gas.partition_report(Data(edge_index=edge_index, num_nodes=5), torch.tensor([0, 2, 5]))
    assert report.size.tolist() == [2, 3]
    assert report.halo.tolist() == [2, 1]
    assert report.cut.tolist() == [3, 1]
    assert report.edge_cut == pytest.approx(4 / 6)
    assert report.balance == pytest.approx(3 / 2.5)
    assert report.halo_ratio == pytest.approx(3 / 5)
    assert repr(report) == "PartitionReport(num_nodes=5, num_edges=6)"
    assert str(report).splitlines() == [
        "parts                    2",
        "nodes per part           2.5 (2 to 3)",
        "balance (largest / mean) 1.200",
        "edges between parts      4 (66.7 %)",
        "halo nodes per part      1.5 (1 to 2)",
        "halo nodes per node      0.60",
    ]


@pytest.mark.parametrize(
    "ptr", [[0, 4], [1, 5], [0, 3, 2, 5], [0, 6], [5], [0.0, 5.0], [[0, 5]], [[0.0, 5.0]], 5]
)
def test_report_needs_fitting_parts(ptr):
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=5)
    with pytest.raises(ValueError, match="'ptr'"):
        gas.partition_report(data, torch.tensor(ptr))


def test_report_takes_the_parts_of_the_graph():
    graph = gas.cluster(gas.get_data("unused", "planted:200")[0], 4, method="random", log=False)
    mine, given = gas.partition_report(graph), gas.partition_report(graph, graph.parts)
    assert torch.equal(mine.cut, given.cut)
    assert mine.num_edges == graph.num_edges
    with pytest.raises(ValueError, match="'ptr' is None.*data.parts after data = gas.cluster"):
        gas.partition_report(gas.get_data("unused", "planted:200")[0])
    with pytest.raises(ValueError, match="'ptr' is 4.*pass batch_size=4"):
        gas.SubgraphLoader(graph, 4)
