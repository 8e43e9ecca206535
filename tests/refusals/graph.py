"""Errors of ``gas.graph``: adjacencies, edges, parts."""

import itertools
import json

import numpy as np
import torch
import torch_geometric.nn as pyg
from scipy import sparse
from torch_geometric.data import Data, HeteroData

import gas
from gas.graph.adjacency import Adjacency
from gas.graph.cluster import to_original_order
from gas.graph.layout import find_layout
from gas.graph.shards import shard_of
from refusals import HALVES, Model, load, ring, sharded

RING = ring().edge_index
ROWPTR, COL = torch.tensor([0, 1, 2]), torch.tensor([0, 1])


def metis(adj=RING, num_parts=2, **options):
    return gas.metis(adj, num_parts, log=False, **options)


def negative_weights():
    data = ring(edge_weight=-2 * torch.ones(8))
    model = gas.to_scalable(pyg.GCN(2, 2, 2), data)
    gas.cluster(data, 2, model=model, log=False)


def csr(rows=4, cols=4):
    edges = torch.stack([torch.arange(rows), torch.arange(rows) % cols])
    return torch.sparse_coo_tensor(edges, torch.ones(rows), (rows, cols)).to_sparse_csr()


def features(x):
    gas.cluster(ring(x=x), 2, log=False)


def sparse_features(rowptr, col, cols=2):
    value = torch.ones(len(col))
    ids = torch.tensor(rowptr), torch.tensor(col)
    features(torch.sparse_csr_tensor(*ids, value, (4, cols), check_invariants=False))


def no_cache(t):
    (t.path / "file").touch()
    t.patch.setenv("GAS_CACHE_DIR", str(t.path / "file"))
    metis()


def too_many_entries(t):
    t.patch.setattr("gas.graph.structure.MOST_INT32", 2)
    Adjacency(torch.tensor([0, 3]), torch.tensor([0, 1, 2]), num_cols=3)


def too_many_in_a_batch(t):
    t.patch.setattr("gas.graph.structure.MOST_INT32", 3)
    list(load(layout="fused"))


def kaminpar(t):
    t.without_package("kaminpar")
    metis(method="kaminpar")


def without_torch_sparse(t):
    t.patch.setattr("gas.graph.layout.WITH_TORCH_SPARSE", False)
    find_layout("sparse_tensor")


def permute(perm, data=None):
    return gas.permute(data or ring(), perm, log=False)


def lopsided(t, num_parts):
    """METIS leaves one shard with less than its share."""
    data = ring(x=None, y=None, train_mask=None, num_nodes=7)
    t.patch.setattr(
        "gas.graph.partition.random_parts", lambda nodes, parts, _: torch.arange(nodes) // 5
    )
    gas.cluster(data, num_parts, 2, method="random", log=False)


def without_memory(t):
    """No partitioner fits the free memory."""
    t.patch.setattr("gas.graph.partitioners.free_memory", lambda: 100)
    t.patch.setattr("importlib.util.find_spec", lambda name: None)
    gas.cluster(ring(), 2, cache=False, log=False)


def with_bounds(bounds):
    data = sharded()
    data.shards = torch.tensor(bounds)
    return data


def three_processes(t):
    t.patch.setattr("torch.distributed.is_initialized", lambda: True)
    t.patch.setattr("torch.distributed.get_world_size", lambda: 3)
    t.patch.setattr("torch.distributed.get_rank", lambda: 0)
    gas.SubgraphLoader(sharded(), log=False)


def cluster(data=None, num_parts=2):
    return gas.cluster(data or ring(), num_parts, log=False)


def folder(t, **changes):
    return gas.cluster(ring(**changes), 2, log=False, out=t.path / "graph")


def changed_folder(t):
    folder(t)
    (t.path / "graph" / "graph.json").write_text("[]")
    gas.open_graph(t.path / "graph")


def unfinished_folder(t, by="gas.cluster"):
    (t.path / "graph").mkdir()
    mark = {"format": "unfinished gas graph", "by": by, "files": []}
    (t.path / "graph" / "unfinished.json").write_text(json.dumps(mark))


def taken_up(t):
    unfinished_folder(t, "somebody else")
    folder(t)


def opened_unfinished(t):
    unfinished_folder(t)
    gas.open_graph(t.path / "graph")


def folder_that_is_a_file(t):
    (t.path / "graph").touch()
    folder(t)


def folder_on_a_full_disk(t):
    t.patch.setattr("gas.graph.folder.new.free_disk", lambda _: 10)
    folder(t)


def other_weights(t):
    adj_t = torch.eye(4).to_sparse_csr()
    folder(t, edge_index=None, adj_t=adj_t, edge_weight=torch.rand(4))


def twice_in_json(t):
    folder(t)
    (t.path / "graph" / "graph.json").write_text('{"a": 1, "a": 2}')
    gas.open_graph(t.path / "graph")


def nan_in_json(t):
    folder(t)
    (t.path / "graph" / "graph.json").write_text("NaN")
    gas.open_graph(t.path / "graph")


NOT_A_NUMBER = torch.tensor([[1.0], [float("nan")], [1.0], [1.0]])


def contradictory_classes():
    pairs = torch.arange(5).repeat(10, 1)
    for column, (one, other) in zip(pairs, itertools.combinations(range(5), 2), strict=True):
        column[other] = one
    path = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    metis(path, 4, num_nodes=5, method="random", balance=pairs.T)


CASES = {
    "cluster, node ids in a list": lambda t: gas.cluster(ring(train_idx=[0, 1]), 2, log=False),
    "cluster, node ids in an array": lambda t: gas.cluster(
        ring(val_index=np.arange(2)), 2, log=False
    ),
    "cluster, node ids that are real numbers": lambda t: gas.cluster(
        ring(test_nodes=torch.ones(2)), 2, log=False
    ),
    "cluster, rows of edges in an array": lambda t: gas.cluster(
        ring(edge_attr=np.arange(8)), 2, log=False
    ),
    "cluster, weights in an array": lambda t: gas.cluster(
        ring(edge_weight=np.ones(8)), 2, log=False
    ),
    "cluster, fewer ids than nodes": lambda t: gas.cluster(ring(node_id=list("abc")), 2, log=False),
    "Adjacency.of, a size in place of the number of nodes": lambda t: Adjacency.of(RING, (4, 4)),
    "Adjacency.of, more weights than edges": lambda t: Adjacency.of(RING, 4, torch.ones(9)),
    "Adjacency.of, a matrix and weights": lambda t: Adjacency.of(csr(), None, torch.ones(4)),
    "Adjacency.of, a matrix of another size": lambda t: Adjacency.of(csr(), 9),
    "cluster, arguments in another order": lambda t: gas.cluster(2, ring()),
    "cluster, balanced by what isn't there": lambda t: gas.cluster(
        ring(), 2, log=False, balance="val_mask"
    ),
    "cluster, balanced by numbers": lambda t: gas.cluster(ring(), 2, log=False, balance="x"),
    "metis, balanced by a list": lambda t: metis(balance=[0, 1, 0, 1]),
    "metis, balanced by too few": lambda t: metis(balance=torch.ones(3, dtype=torch.bool)),
    "metis, balanced by what contradicts itself": lambda t: contradictory_classes(),
    "a graph folder, damaged": changed_folder,
    "a graph folder, a name twice": twice_in_json,
    "a graph folder, not a number": nan_in_json,
    "a graph folder, unfinished": opened_unfinished,
    "cluster, out= and in_place=": lambda t: gas.cluster(
        ring(), 2, log=False, out=t.path / "graph", in_place=True
    ),
    "cluster, out= is a file": folder_that_is_a_file,
    "cluster, out= holds a graph": lambda t: [folder(t), folder(t)],
    "cluster, out= is another graph's folder": taken_up,
    "cluster, out= on a full disk": folder_on_a_full_disk,
    "cluster, out= of a name": lambda t: folder(t, col=torch.ones(1)),
    "cluster, out= of an object": lambda t: folder(t, odd=object()),
    "cluster, out= of infinity": lambda t: folder(t, odd=float("inf")),
    "cluster, out= of an array of objects": lambda t: folder(t, odd=np.array([None])),
    "cluster, out= of another layout": lambda t: folder(t, odd=torch.eye(4).to_sparse_csc()),
    "cluster, out= of two kinds of weights": other_weights,
    "cluster, sparse features by another word": lambda t: gas.cluster(
        ring(), 2, sparse_features="yes"
    ),
    "cluster, sparse features of numbers": lambda t: gas.cluster(
        ring(x=torch.arange(4)), 2, sparse_features=True
    ),
    "cluster, sparse features in three dimensions": lambda t: features(
        torch.ones(4, 2, 2).to_sparse()
    ),
    "cluster, complex sparse features": lambda t: features(
        sparse.csr_matrix(np.ones((4, 2), complex))
    ),
    "cluster, sparse features of other nodes": lambda t: features(torch.ones(3, 2).to_sparse()),
    "cluster, a feature that isn't there": lambda t: sparse_features([0, 1, 1, 1, 2], [0, 2]),
    "cluster, pointers that fall": lambda t: sparse_features([0, 2, 1, 2, 2], [0, 1]),
    "cluster, auto without a model": lambda t: gas.cluster(ring(), "auto", log=False),
    "cluster, auto of shards": lambda t: gas.cluster(
        ring(), "auto", shards=2, model=Model(), log=False
    ),
    "cluster, memory without auto": lambda t: gas.cluster(ring(), 2, memory=10, log=False),
    "cluster, bytes in other words": lambda t: gas.cluster(
        ring(), "auto", memory="6 gigabytes", model=Model(), log=False
    ),
    "cluster, no bytes": lambda t: gas.cluster(ring(), "auto", memory=0, model=Model(), log=False),
    "gas.cluster, a clustered graph": lambda t: cluster(cluster()),
    "gas.cluster, an attribute of its own": lambda t: cluster(ring(parts=torch.arange(3))),
    "gas.cluster, for a module without histories": lambda t: gas.cluster(
        ring(), 2, model=torch.nn.Linear(2, 2)
    ),
    "gas.cluster, for a class": lambda t: gas.cluster(ring(), 2, model=gas.models.GCN),
    "gas.cluster, tensors": lambda t: gas.cluster((ring().x, ring().edge_index), 2),
    "gas.cluster, shards": lambda t: cluster(sharded()),
    "gas.cluster, a shard": lambda t: cluster(shard_of(sharded(), 0)),
    "gas.cluster, no shard": lambda t: gas.cluster(ring(), 2, 0, log=False),
    "gas.cluster, parts that shards can't share": lambda t: gas.cluster(ring(), 3, 2, log=False),
    "gas.cluster, more parts than nodes in a shard": lambda t: lopsided(t, 6),
    "gas.permute, a shard": lambda t: permute(torch.arange(4), shard_of(sharded(), 0)),
    "shard_of, a graph without shards": lambda t: shard_of(cluster(), 0),
    "shard_of, a shard too many": lambda t: shard_of(sharded(), 2),
    "shard_of, a negative shard": lambda t: shard_of(sharded(), -1),
    "shard_of, another shard": lambda t: shard_of(shard_of(sharded(), 0), 1),
    "shard_of, bounds of other parts": lambda t: shard_of(with_bounds([0, 1, 4]), 0),
    "shard_of, bounds that end early": lambda t: shard_of(with_bounds([0, 2]), 0),
    "cluster, pairs of nodes with negative ids": lambda t: gas.cluster(
        ring(edge_label_index=torch.tensor([[0], [-1]])), 2, log=False
    ),
    "cluster, pairs of nodes that are real numbers": lambda t: gas.cluster(
        ring(edge_label_index=torch.rand(2, 3)), 2, log=False
    ),
    "shard_of, pairs of nodes": lambda t: shard_of(sharded(edge_label_index=RING), 0),
    "to_original_order, a shard": lambda t: to_original_order(
        shard_of(sharded(), 0), torch.ones(4, 2)
    ),
    "a local graph, for another number of processes": three_processes,
    "gas.cluster, a list of other nodes": lambda t: cluster(ring(train_idx=torch.tensor([4]))),
    "gas.metis, an unknown method": lambda t: metis(method="scotch"),
    "gas.metis, no parts": lambda t: metis(num_parts=0),
    "gas.cluster, a dense matrix of edges": lambda t: gas.cluster(
        Data(x=torch.ones(4, 2), adj_t=torch.eye(4)), 2, log=False
    ),
    "gas.cluster, weights that can't be normalised": lambda t: negative_weights(),
    "gas.cluster, a seed in words": lambda t: gas.cluster(ring(), 2, seed="one", log=False),
    "gas.cluster, a cache that is a number": lambda t: gas.cluster(ring(), 2, cache=3, log=False),
    "gas.cluster, out= is a number": lambda t: gas.cluster(ring(), 2, out=3, log=False),
    "gas.metis, half a part": lambda t: metis(num_parts=2.5),
    "gas.metis, more parts than nodes": lambda t: metis(num_parts=5),
    "gas.metis, kaminpar is missing": kaminpar,
    "gas.metis, weights as a list": lambda t: metis(edge_weight=[1] * 8),
    "gas.metis, weights of other edges": lambda t: metis(edge_weight=torch.ones(3)),
    "gas.metis, a negative weight": lambda t: metis(edge_weight=torch.tensor([1, 2, -1, 2] * 2)),
    "gas.metis, a weight that is no number": lambda t: metis(
        edge_weight=torch.tensor([1.0, 2.0, float("nan"), 2.0] * 2)
    ),
    "gas.metis, weights of nothing": lambda t: metis(edge_weight=torch.zeros(8)),
    "gas.metis, weights and random parts": lambda t: metis(
        edge_weight=torch.ones(8), method="random"
    ),
    "gas.metis, no room for the cache": no_cache,
    "gas.metis, the Data instead of its edges": lambda t: metis(ring()),
    "gas.metis, numpy's edges": lambda t: metis(RING.numpy()),
    "gas.metis, a matrix that isn't square": lambda t: metis(csr(4, 3)),
    "gas.metis, a matrix and another num_nodes": lambda t: metis(csr(), num_nodes=5),
    "gas.metis, edges as real numbers": lambda t: metis(RING.float()),
    "gas.metis, edges lying down": lambda t: metis(RING.t()),
    "gas.metis, edges in one row": lambda t: metis(RING[0]),
    "gas.metis, a negative node": lambda t: metis(RING - 1, num_nodes=4),
    "gas.metis, a node too many": lambda t: metis(RING, num_nodes=3),
    "gas.metis, num_nodes is negative": lambda t: metis(RING, num_nodes=-4),
    "gas.cluster, memory for no partitioner": without_memory,
    "gas.permute, a list": lambda t: permute([0, 1, 2, 3]),
    "gas.permute, a list of graphs": lambda t: permute(torch.arange(4), [ring()]),
    "gas.permute, for another graph": lambda t: permute(torch.arange(5)),
    "gas.permute, a node twice": lambda t: permute(torch.tensor([0, 1, 1, 3])),
    "gas.permute, no edges": lambda t: permute(torch.arange(4), Data(x=torch.ones(4, 2))),
    "gas.partition_report, a graph of types": lambda t: gas.partition_report(HeteroData()),
    "gas.partition_report, nothing": lambda t: gas.partition_report(None),
    "gas.partition_report, parts as a list": lambda t: gas.partition_report(ring(), [0, 4]),
    "gas.partition_report, parts of another graph": lambda t: gas.partition_report(
        ring(), torch.tensor([0, 2, 5])
    ),
    "gas.partition_report, parts that fall": lambda t: gas.partition_report(
        ring(), torch.tensor([0, 3, 2, 4])
    ),
    "SubgraphLoader, features of other nodes, edge_index": lambda t: load(
        ring(x=torch.ones(5, 2), y=None, num_nodes=4)
    ),
    "SubgraphLoader, features of other nodes, adj_t": lambda t: load(
        ring(x=torch.ones(5, 2), edge_index=None, adj_t=csr())
    ),
    "cluster, labels in a list": lambda t: gas.cluster(
        ring(y=[0, 1, 0, 1]), 2, method="random", log=False
    ),
    "SubgraphLoader, a mask of other nodes": lambda t: load(
        ring(train_mask=torch.ones(3, dtype=torch.bool))
    ),
    "SubgraphLoader, weights of other edges": lambda t: load(ring(edge_weight=torch.ones(3))),
    "gas.cluster, attributes of other edges": lambda t: gas.cluster(
        ring(edge_attr=torch.ones(7, 2)), 2, log=False
    ),
    "gas.cluster, a weight that is NaN": lambda t: gas.cluster(
        ring(edge_weight=torch.tensor([1.0, float("nan")] * 4)), 2, log=False
    ),
    "gas.cluster, features that are NaN": lambda t: gas.cluster(ring(x=NOT_A_NUMBER), 2, log=False),
    "SubgraphLoader, edge_index and adj_t differ": lambda t: load(ring(adj_t=csr())),
    "SubgraphLoader, features that are NaN": lambda t: load(ring(x=NOT_A_NUMBER), check=True),
    "SubgraphLoader, an unknown layout": lambda t: load(layout="coo"),
    "SubgraphLoader, torch-sparse is missing": without_torch_sparse,
    "SubgraphLoader, parts of another graph": lambda t: load(ptr=HALVES + 1),
    "Adjacency, too many entries": too_many_entries,
    "Adjacency, too many entries, cut by a loader": too_many_in_a_batch,
    "Adjacency, rows that aren't integers": lambda t: Adjacency(ROWPTR.float(), COL),
    "Adjacency, rows on another device": lambda t: Adjacency(ROWPTR.to("meta"), COL),
    "Adjacency, no rows at all": lambda t: Adjacency(ROWPTR[:0], COL),
    "Adjacency, rows that don't reach the end": lambda t: Adjacency(ROWPTR[:2], COL),
    "Adjacency, a source too many": lambda t: Adjacency(ROWPTR, COL + 1),
    "Adjacency, complex values": lambda t: Adjacency(ROWPTR, COL, torch.ones(2) * 1j),
    "Adjacency, values on another device": lambda t: Adjacency(
        ROWPTR, COL, torch.ones(2, device="meta")
    ),
    "Adjacency.to, integers": lambda t: Adjacency(ROWPTR, COL).to(torch.int32),
    "Adjacency, values of other edges": lambda t: Adjacency(
        torch.tensor([0, 1]), torch.tensor([0]), torch.ones(2)
    ),
    "Adjacency.of, no adjacency": lambda t: Adjacency.of("edges"),
    "gas.drop_edges, an edge_index": lambda t: gas.drop_edges(RING, 0.5),
    "gas.drop_edges, every edge": lambda t: gas.drop_edges(csr(), 1.0),
    "gas.drop_edges, a matrix in coordinates": lambda t: gas.drop_edges(
        torch.eye(4).to_sparse(), 0.5
    ),
}
