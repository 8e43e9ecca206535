"""Loaders of shards: together they yield the mini-batches of the whole graph."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_geometric.transforms as T
from conftest import random_graph

import gas
from gas.augment import DropEdge
from gas.graph import shards
from gas.graph.shards import shard_of
from gas.loader.batch import GRAPH_SIZE
from gas.native.rows import is_sparse


def make(features="dense", out=None, shards=3, **changes):
    torch.manual_seed(0)
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    data.edge_attr = torch.arange(data.num_edges).view(-1, 1) * 10
    if features == "sparse":
        data.x = data.x.relu().to_sparse_csr()
    for key, value in changes.items():
        data[key] = value
    return gas.cluster(data, 6, shards, method="random", log=False, out=out)


def loads(data, **options):
    return gas.SubgraphLoader(data, log=False, **options)


def in_processes(monkeypatch, rank, num_ranks=3):
    """As if this were one of several processes."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: num_ranks)
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)


def entries(batch):
    """Row, column and weight of every edge of a batch, in its order."""
    data, graph = batch.data, batch.data.get("adj_t")
    if graph is None:
        return data.edge_index[1], data.edge_index[0], data.edge_weight
    if not isinstance(graph, torch.Tensor):
        graph = graph.to_torch_sparse()
    rowptr, col, value = graph.crow_indices(), graph.col_indices(), graph.values()
    return torch.arange(rowptr.numel() - 1).repeat_interleave(rowptr.diff()), col, value


def everything(batch, shard=None):
    """Return the contents of a batch by global ids, in an order given by these alone."""
    n_id, e_id = batch.n_id, batch.data.e_id
    nodes, edges = (n_id, e_id) if shard is None else (shard.nodes[n_id], shard.edges[e_id])
    row, col, value = entries(batch)
    x = batch.data.x.to_dense() if is_sparse(batch.data.x) else batch.data.x
    node, edge = nodes.argsort(), edges.argsort()
    return {
        "size": torch.tensor(batch.batch_size),
        "in batch": nodes[: batch.batch_size],
        "nodes": nodes[node],
        "edges": edges[edge],
        "rows": nodes[row][edge],
        "columns": nodes[col][edge],
        "weights": value[edge],
        "attributes": batch.data.edge_attr[edge],
        "features": x[node],
        "labels": batch.data.y[node],
        "count": batch.count,
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


def assert_batches_of(loader, whole, rank, parts=2):
    """They are those of the parts of a rank."""
    shard, seen = loader.shard, 0
    for batch in loader:
        part = rank * parts + seen
        assert_same(everything(batch, shard), everything(whole.cut([part])))
        assert batch.n_id.shard is shard
        assert getattr(batch.n_id, GRAPH_SIZE) == loader.num_nodes == shard.nodes.numel()
        assert not {"shard", "shards", "parts"} & set(batch.data.keys())
        in_batch = batch.n_id[: batch.batch_size]
        own = whole.data.train_mask[shard.nodes[in_batch]]
        assert torch.equal(batch.data.train_mask[: batch.batch_size], own)
        assert not batch.data.train_mask[batch.n_id >= shard.num_own].any()
        seen += 1
    assert seen == parts


@pytest.mark.parametrize("features", ["dense", "sparse"])
@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_they_yield_the_batches_of_the_whole_graph(layout, features):
    graph = make(features)
    whole = loads(graph, layout=layout)
    assert whole.shard is None
    assert len(whole) == 6
    assert not hasattr(next(iter(whole)).n_id, "shard")
    assert not {"shard", "shards"} & set(next(iter(whole)).data.keys())
    for rank in range(3):
        assert_batches_of(loads(shard_of(graph, rank), layout=layout), whole, rank)


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_of_a_folder(layout, tmp_path):
    whole = loads(make(out=tmp_path / "graph"), layout=layout)
    for rank in range(3):
        local = gas.open_graph(tmp_path / "graph", shard=rank, log=False)
        assert_batches_of(loads(local, layout=layout), whole, rank)


def test_evaluation_joins_parts_of_a_shard():
    graph = make()
    loader = gas.EvalSubgraphLoader(shard_of(graph, 1), batch_size=2, log=False)
    (batch,) = loader
    assert_same(
        {**everything(batch, loader.shard), "count": torch.tensor([])},
        {**everything(loads(graph).cut([2, 3])), "count": torch.tensor([])},
    )


def test_several_parts_shuffled_by_workers():
    local = shard_of(make(), 2)
    loader = loads(local, batch_size=2, shuffle=True, num_workers=1)
    (batch,) = loader
    assert batch.n_id.shard is loader.shard
    assert batch.batch_size == loader.shard.num_own


@pytest.mark.parametrize("cls", [gas.SubgraphLoader, gas.EvalSubgraphLoader])
def test_a_process_has_its_own(cls, monkeypatch):
    graph = make()
    whole = loads(graph)
    in_processes(monkeypatch, 1)
    loader = cls(graph, log=False)
    assert loader.shard.rank == 1
    assert_batches_of(loader, whole, 1)
    other = cls(graph, log=False, like=loader)  # One copy for both, cut once.
    assert other.data is loader.data
    assert "shards" in graph
    # Another shape of the graph is cut anew.
    graph.x = graph.x + 1
    assert torch.equal(cls(graph, log=False).data.x, graph.x[loader.shard.nodes])
    # Local graphs are, in every process.
    assert loads(shard_of(graph, 2)).shard.rank == 2


def test_a_single_process_has_the_whole_graph(monkeypatch):
    in_processes(monkeypatch, 0, num_ranks=1)
    assert loads(make()).shard is None


def test_the_whole_graph_may_go(monkeypatch):
    graph = make()
    in_processes(monkeypatch, 0)
    loader, gone = loads(graph), weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None
    assert not len(shards._LAST)
    assert len(list(loader)) == 2


def process(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loader = gas.SubgraphLoader(folder / "graph", log=False)
    torch.save([everything(batch, loader.shard) for batch in loader], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_with_processes(tmp_path):
    whole = loads(make(out=tmp_path / "graph", shards=2))
    mp.spawn(process, (tmp_path,), nprocs=2)
    for rank in range(2):
        batches = torch.load(tmp_path / f"{rank}.pt")
        assert len(batches) == 3
        for part, batch in enumerate(batches, 3 * rank):
            assert_same(batch, everything(whole.cut([part])))


# Transforms ---------------------------------------------------------------------------------------


def test_a_transform_is_of_the_whole_graph(monkeypatch):
    graph = make()
    whole = loads(graph, graph_transform=T.GCNNorm())
    in_processes(monkeypatch, 2)
    del graph.edge_attr  # Self-loops have none.
    for data in (whole.data, graph):
        data.edge_attr = torch.zeros(data.num_edges, 1)
    loader = loads(graph, graph_transform=T.GCNNorm())
    loader.data.edge_attr = torch.zeros(loader.data.num_edges, 1)
    assert loader.shard.edges.numel() == loader.data.num_edges
    assert_batches_of(loader, whole, 2)
    loader = gas.EvalSubgraphLoader(graph, log=False, graph_transform=T.GCNNorm())
    loader.data.edge_attr = torch.zeros(loader.data.num_edges, 1)
    assert_batches_of(loader, whole, 2)


@pytest.mark.parametrize("transform", [None, T.GCNNorm()])
@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_views_are_those_of_the_whole_graph(layout, transform, monkeypatch):
    torch.manual_seed(0)
    graph = gas.cluster(random_graph(), 6, 3, method="random", log=False)
    options = {"layout": layout, "graph_transform": transform}

    def augmentation():
        return DropEdge(graph, 0.4, generator=torch.Generator().manual_seed(3))

    def views(batch, shard=None):
        nodes = batch.n_id if shard is None else shard.nodes[batch.n_id]
        found = []
        for view in batch.data.views:
            e_id = view.e_id if shard is None else shard.edges[view.e_id]
            row, col, value = entries(batch._replace(data=view))
            order, by_node = e_id.argsort(), nodes.argsort()
            found += [e_id[order], nodes[row][order], nodes[col][order], view.x[by_node]]
            found += [] if value is None else [value[order]]
        return found

    if layout == "edge_index" and transform is None:
        graph.edge_weight = torch.rand(graph.num_edges)
    loader = loads(graph, epoch_transform=augmentation(), **options)
    whole = [list(loader) for _ in range(2)]
    for rank in range(3):
        in_processes(monkeypatch, rank)
        loader = loads(graph, epoch_transform=augmentation(), **options)
        for batches in whole:
            for batch, other in zip(loader, batches[2 * rank : 2 * rank + 2], strict=True):
                expected = views(other)
                assert all(map(torch.equal, views(batch, loader.shard), expected))
                assert len(expected) in (8, 10)
                assert batch.data.views[1].num_edges < batch.data.e_id.numel()
