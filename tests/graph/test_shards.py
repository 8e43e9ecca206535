"""Shards: a graph is cut for several processes, and each gets a local graph of its own."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data

import gas
from gas.graph.shards import SHARD, SHARDS, Shard, local_graph, shard_of
from gas.history.encoded import Encoded
from gas.native.rows import is_sparse


def make(num_parts=6, shards=3, out=None, features="dense", adj_t=None, **options):
    torch.manual_seed(0)
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    data.edge_attr = torch.arange(data.num_edges * 2.0).view(-1, 2)
    data.val_mask = torch.ones(60, 2, dtype=torch.bool)
    data.train_idx = torch.tensor([3, 0, 59, 7, 33])
    data.classes = ["a", "b", "c"]
    data.scale = torch.ones(4)
    if features == "sparse":
        data.x = data.x.relu().to_sparse_csr()
    if features == "encoded":
        data.x = gas.quantize(data.x, "int8", store="disk")
    if adj_t is not None:
        src, dst = data.edge_index
        order = torch.argsort(dst * 60 + src, stable=True)
        rowptr = torch.cat([torch.zeros(1).long(), torch.bincount(dst, minlength=60).cumsum(0)])
        data.adj_t = torch.sparse_csr_tensor(
            rowptr, src[order], data.edge_weight[order], (60, 60), check_invariants=False
        )
        if adj_t == "sparse_coo":
            data.adj_t = data.adj_t.to_sparse_coo()
        data.edge_attr = data.edge_attr[order]
        del data.edge_index, data.edge_weight
    options = {"method": "random", "log": False, **options}
    return gas.cluster(data, num_parts, shards, out=out, **options)


def edges_of(data):
    """Source, destination, weight and attribute of every edge, by the order of ``e_id``."""
    edges = gas.graph.read_graph(data)
    return torch.cat(
        [torch.stack([edges.src, edges.dst, edges.weight]).t(), data.edge_attr.float()], dim=1
    )


@pytest.mark.parametrize("method", ["metis", "random"])
def test_it_is_cut_twice(method):
    graph = make(12, 3, method=method)
    parts, shards = graph.parts.tolist(), graph.shards.tolist()
    assert len(parts) == 13
    assert len(shards) == 4
    assert (shards[0], shards[-1]) == (0, 60)
    assert shards == parts[::4]  # As many parts for each.
    assert parts == sorted(set(parts))  # And none empty.
    assert torch.equal(graph.perm.sort().values, torch.arange(60))
    whole = make(3, 1, method=method)
    assert SHARDS not in whole
    assert whole.parts.tolist() == shards
    for begin, end in itertools.pairwise(shards):
        assert set(whole.perm[begin:end].tolist()) == set(graph.perm[begin:end].tolist())


def test_parts_of_a_shard_have_few_edges_between_them():
    torch.manual_seed(0)
    blocks = torch.arange(8).repeat_interleave(20)
    src = torch.randint(160, (2000,))
    dst = blocks[src] * 20 + torch.randint(20, (2000,))
    mixed = torch.randperm(160)
    graph = gas.cluster(
        Data(x=torch.ones(160, 1), edge_index=mixed[torch.stack([src, dst])]), 8, 2, log=False
    )
    report = gas.partition_report(graph, graph.parts)
    assert report.edge_cut == 0
    assert gas.partition_report(graph, graph.shards).edge_cut == 0


def test_weights_say_what_is_cut_in_shards_too():
    torch.manual_seed(0)
    data = random_graph(directed=False)
    weight = torch.zeros(data.num_edges)
    weight[:1] = 1  # Nearly all shards have edges of no weight alone.
    graph = gas.cluster(data, 6, 3, edge_weight=weight, log=False)
    assert graph.parts.numel() == 7


def test_auto_is_a_multiple_of_shards():
    data = random_graph(600, 3000)
    model = gas.models.GCN(600, 5, 8, 3, 2)
    plain = gas.cluster(data, "auto", memory=20_000, model=model, log=False)
    graph = gas.cluster(data, "auto", 4, memory=20_000, model=model, log=False)
    num_parts = graph.parts.numel() - 1
    assert num_parts % 4 == 0
    assert num_parts >= 0.8 * (plain.parts.numel() - 1)
    assert graph.shards.numel() == 5


def test_permute_drops_them():
    graph = make()
    assert SHARDS not in gas.permute(graph, torch.randperm(60), log=False)


def test_a_folder_has_them(tmp_path):
    graph = make()
    folder = make(out=tmp_path / "graph")
    assert torch.equal(folder.shards, graph.shards)
    assert torch.equal(folder.parts, graph.parts)
    assert torch.equal(folder.perm, graph.perm)
    again = gas.open_graph(tmp_path / "graph", log=False)
    assert torch.equal(again.shards, graph.shards)


@pytest.mark.parametrize("adj_t", [None, "sparse_csr", "sparse_coo"])
@pytest.mark.parametrize("features", ["dense", "sparse", "encoded"])
def test_every_row_and_edge_is_somebodys(features, adj_t):
    graph = make(features=features, adj_t=adj_t)
    x = graph.x.to_dense() if is_sparse(graph.x) else graph.x[:]
    whole, seen, rows, train = edges_of(graph), [], [], []
    for rank in range(3):
        local = shard_of(graph, rank)
        shard = local.shard
        assert isinstance(shard, Shard)
        assert SHARDS not in local
        assert set(local.keys()) - {SHARD, "num_nodes"} == set(graph.keys()) - {SHARDS, "num_nodes"}
        assert local.num_nodes == shard.num_own + shard.replicas.numel() == shard.nodes.numel()
        assert (shard.begin, shard.end) == tuple(graph.shards[rank : rank + 2].tolist())
        assert (shard.num_ranks, shard.num_nodes) == (3, 60)
        # Rows.
        assert torch.equal(shard.nodes[: shard.num_own], torch.arange(shard.begin, shard.end))
        assert type(local.x) is type(graph.x)
        assert is_sparse(local.x) == is_sparse(graph.x)
        assert torch.equal(local.x.to_dense() if is_sparse(local.x) else local.x[:], x[shard.nodes])
        for key in ("y", "perm"):
            assert torch.equal(local[key], graph[key][shard.nodes])
        for key in ("train_mask", "val_mask"):
            assert torch.equal(local[key][: shard.num_own], graph[key][shard.begin : shard.end])
            assert not local[key][shard.num_own :].any()
        assert local.classes == graph.classes
        assert torch.equal(local.scale, graph.scale)
        # Edges: these, in order, and none other.
        mine = edges_of(local)
        assert (mine[:, 1] < shard.num_own).all()
        ends = shard.nodes[mine[:, :2].long()]
        assert torch.equal(ends.float(), whole[shard.edges][:, :2])
        assert torch.equal(mine[:, 2:], whole[shard.edges][:, 2:])
        if adj_t is None:
            assert (shard.edges.diff() > 0).all()
        else:
            assert local.adj_t.size() == (local.num_nodes, local.num_nodes)
        # Replicas are who is needed, by their owners.
        others = whole[shard.edges][:, 0].long().unique()
        others = others[(others < shard.begin) | (others >= shard.end)]
        assert torch.equal(shard.replicas, others)
        for owner in range(3):
            first, last = shard.replica_ptr[owner : owner + 2].tolist()
            owned = shard.replicas[first:last]
            assert ((owned >= graph.shards[owner]) & (owned < graph.shards[owner + 1])).all()
        assert local.parts.tolist() == [
            part - shard.begin for part in graph.parts.tolist() if shard.begin <= part <= shard.end
        ]
        seen.append(shard.edges)
        rows.append(shard.nodes[: shard.num_own])
        train.append(shard.nodes[local.train_idx])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(whole)))
    assert torch.equal(torch.cat(rows), torch.arange(60))
    assert torch.equal(torch.cat(train).sort().values, graph.train_idx.sort().values)


def test_both_kinds_of_edges_stay_in_one_order():
    graph = make()
    edges = gas.graph.read_graph(graph)
    csr = gas.graph.to_csr(edges)
    graph.edge_index = graph.edge_index[:, csr.e_id]
    graph.edge_attr, graph.edge_weight = graph.edge_attr[csr.e_id], edges.weight[csr.e_id]
    graph.adj_t = gas.nn.Adjacency(csr.rowptr, csr.col, graph.edge_weight, 60)
    whole = edges_of(graph)
    for rank in range(3):
        local = shard_of(graph, rank)
        assert isinstance(local.adj_t, gas.nn.Adjacency)
        assert torch.equal(edges_of(local)[:, 2:], whole[local.shard.edges][:, 2:])


@pytest.mark.parametrize("features", ["dense", "sparse", "encoded"])
def test_a_folder_gives_what_memory_gives(tmp_path, features):
    graph = make(features=features, adj_t="sparse_csr")
    make(features=features, adj_t="sparse_csr", out=tmp_path / "graph")
    for rank in range(3):
        local = shard_of(graph, rank)
        opened = gas.open_graph(tmp_path / "graph", shard=rank, log=False)
        assert opened.shard.fingerprint == local.shard.fingerprint
        assert torch.equal(opened.shard.edges, local.shard.edges)
        assert torch.equal(opened.shard.replicas, local.shard.replicas)
        assert set(opened.keys()) == set(local.keys())
        for key in ("y", "train_mask", "perm", "parts", "edge_attr", "train_idx"):
            assert torch.equal(opened[key], local[key]), key
        assert torch.equal(edges_of(opened), edges_of(local))
        dense = [g.x.to_dense() if is_sparse(g.x) else g.x[:] for g in (opened, local)]
        assert torch.equal(*dense)
        if features == "encoded":
            assert isinstance(opened.x, Encoded)
            assert opened.x.store.tier == "host"


def test_a_folder_without_weights_has_none(tmp_path):
    data = random_graph()
    gas.cluster(data, 4, 2, log=False, out=tmp_path / "graph")
    local = gas.open_graph(tmp_path / "graph", shard=0, log=False)
    assert local.adj_t.values().stride() == (0,)
    assert local.adj_t.col_indices().dtype == torch.int32
    batch = next(iter(gas.SubgraphLoader(local, log=False)))
    assert batch.adj_t.value is None
    assert "edge_weight" not in batch.data


def test_other_attributes_of_that_name_are_the_users():
    data = random_graph()
    data.shard = "north"
    perm, ptr = gas.metis(data.edge_index, 3, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    assert next(iter(gas.SubgraphLoader(data, ptr, log=False))).shard == "north"


def test_one_process_infers_for_the_whole_graph():
    torch.manual_seed(0)
    data, model = random_graph(), gas.models.GCN(60, 5, 8, 3, 2).eval()
    expected = model.predict(gas.cluster(data, 6, model=model, log=False))
    graph = gas.cluster(data, 6, 3, model=model, log=False)
    assert torch.allclose(model.predict(graph), expected, atol=1e-6)


def test_a_damaged_folder_is_refused(tmp_path):
    make(adj_t="sparse_csr", out=tmp_path / "graph")
    local = gas.open_graph(tmp_path / "graph", shard=1, log=False)
    edge = int(local.shard.edges[5])
    col = np.load(tmp_path / "graph" / "col.npy", mmap_mode="r+")
    before, col[edge] = col[edge], 60
    col.flush()
    with pytest.raises(ValueError, match="'adj_t' holds the node id 60"):
        gas.open_graph(tmp_path / "graph", shard=1, log=False)
    gas.open_graph(tmp_path / "graph", shard=0, log=False)  # Which doesn't read that.
    col[edge] = before
    col.flush()
    shards = np.load(tmp_path / "graph" / "shards.npy", mmap_mode="r+")
    shards[2] = shards[1] - 1
    shards.flush()
    with pytest.raises(ValueError, match=r"shards\.npy.*'shards' is from 0 to 60"):
        gas.open_graph(tmp_path / "graph", log=False)


def test_a_folder_is_the_graph_that_it_was(tmp_path):
    torch.manual_seed(0)
    data = random_graph()
    data.val_mask = data.test_mask = ~data.train_mask
    gas.cluster(data, 6, 3, log=False, out=tmp_path / "graph")
    again, _, _ = gas.get_data(tmp_path, str(tmp_path / "graph"))
    assert SHARDS not in again
    assert torch.equal(again.x, data.x)


def test_of_a_folder_only_its_own_rows_are_read(tmp_path, monkeypatch):
    make(adj_t="sparse_csr", out=tmp_path / "graph")
    whole = gas.open_graph(tmp_path / "graph", log=False)
    read = []
    for module, name in (("gas.graph.shards", "select_rows"),):
        original = shard_of.__globals__[name]

        def noted(value, index, original=original):
            read.append(index.numel())
            return original(value, index)

        monkeypatch.setattr(f"{module}.{name}", noted)
    local = shard_of(whole, 1)
    assert set(read) <= {local.num_nodes, local.shard.edges.numel()}
    assert max(read) < 240
    spaces = {t.untyped_storage().data_ptr() for t in (local.x, local.y, local.edge_attr)}
    assert spaces.isdisjoint(t.untyped_storage().data_ptr() for t in (whole.x, whole.y))


def test_ranks_know_whether_they_cut_the_same():
    prints = {shard_of(make(), rank).shard.fingerprint for rank in range(3)}
    assert len(prints) == 1
    assert shard_of(make(seed=1), 0).shard.fingerprint not in prints
    assert shard_of(make(3), 0).shard.fingerprint not in prints


def test_a_local_graph_is_one():
    local = shard_of(make(), 1)
    assert shard_of(local, 1) is local
    assert str(local.shard).startswith("Shard(1 of 3, nodes=20, replicas=")
    assert "Shard(1 of 3" in str(local)
    for twin in (copy.copy(local), local.clone(), local.to("cpu"), copy.deepcopy(local)):
        assert torch.equal(twin.shard.edges, local.shard.edges)
    again = pickle.loads(pickle.dumps(local))
    assert again.shard.fingerprint == local.shard.fingerprint
    assert torch.equal(again.shard.nodes, local.shard.nodes)
    again = pickle.loads(pickle.dumps(make()))
    assert again.shards.numel() == 4


def test_one_shard_without_replicas():
    data = Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0, 1], [1, 0]]))
    graph = gas.cluster(data, 4, 4, log=False, method="random")
    locals_ = [shard_of(graph, rank) for rank in range(4)]
    assert sum(local.num_edges for local in locals_) == 2
    assert sorted(local.num_nodes for local in locals_) == [1, 1, 2, 2]


def test_every_rank_of_a_process_gets_its_own(monkeypatch):
    graph, other = make(), make(seed=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: rank)
    for rank in (0, 1, 2):
        local = local_graph(graph)
        assert local.shard.rank == rank
        assert local_graph(graph) is local
    assert local_graph(other).shard.fingerprint != local.shard.fingerprint
    local = local_graph(graph)
    graph.x = graph.x + 1
    assert torch.equal(local_graph(graph).x, local.x + 1)
