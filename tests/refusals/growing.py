"""Errors of ``gas.growing``."""

import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE

import gas
from gas.growing import GrowingGraph
from gas.history import Store
from gas.history.store import MemoryStore
from refusals import ring

EDGE = torch.tensor([[0], [2]])


def live(data=None, model=None, **options):
    data = ring() if data is None else data
    return GrowingGraph(data, 2, model=model, method="random", log=False, **options)


def converted(**options):
    return gas.to_scalable(GraphSAGE(2, 2, num_layers=2), ring(), **options)


class Rigid(MemoryStore):
    resize = Store.resize


def of_ranks():
    model = converted()
    model.ranks = object()
    return model


def edges_replaced(t):
    graph = live()
    graph.graph.adj_t = graph.graph.adj_t.to_dense().to_sparse_csr()
    graph.update(edge_index=EDGE)


CASES = {
    "GrowingGraph, shards": lambda t: live(shards=2),
    "GrowingGraph, a typed graph": lambda t: live(HeteroData()),
    "GrowingGraph, a model of PyG": lambda t: live(model=GraphSAGE(2, 2, num_layers=2)),
    "GrowingGraph, a model of ranks": lambda t: live(model=of_ranks()),
    "GrowingGraph, a store that can't grow": lambda t: live(model=converted(store=Rigid)),
    "GrowingGraph, a model of another graph": lambda t: live(model=converted().for_graph(5)),
    "GrowingGraph, sparse features": lambda t: live(ring(x=torch.eye(4).to_sparse_csr())),
    "GrowingGraph.update, a node without features": lambda t: live().update({"y": EDGE[0]}),
    "GrowingGraph.update, wide features": lambda t: live().update(
        {"x": torch.ones(1, 3), "y": EDGE[0]}
    ),
    "GrowingGraph.update, half a node": lambda t: live().update(0.5),
    "GrowingGraph.update, attributes of edges": lambda t: live().update(
        None, EDGE, {"edge_attr": EDGE[0]}
    ),
    "GrowingGraph.update, edges of a node": lambda t: live().update(edge_index=EDGE[0]),
    "GrowingGraph.update, edges of another graph": lambda t: live().update(edge_index=EDGE + 2),
    "GrowingGraph.update, an edge that isn't there": lambda t: live().update(remove=EDGE),
    "GrowingGraph.refresh, no model": lambda t: live().refresh(),
    "GrowingGraph.update, labels of another type": lambda t: live().update(
        {"x": torch.ones(1, 2), "y": torch.ones(1)}
    ),
    "GrowingGraph.update, edges that were replaced": edges_replaced,
    "GrowingGraph.update, as many nodes as something else": lambda t: live(
        ring(centres=torch.ones(5, 2))
    ).update({"x": torch.ones(1, 2), "y": EDGE[0]}),
    "Store.resize, of one that can't": lambda t: gas.History(2, 2, store=Rigid).resize(3),
    "History.resize, half a row": lambda t: gas.History(2, 2).resize(1.5),
}
