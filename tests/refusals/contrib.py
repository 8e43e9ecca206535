"""Errors of ``gas.contrib``."""

import numpy as np
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE

import gas
from gas.contrib.dynamic import DynamicGraph
from gas.history import Store
from gas.history.store import MemoryStore
from refusals import ring

EDGE = torch.tensor([[0], [2]])


def live(data=None, model=None, **options):
    data = ring() if data is None else data
    return DynamicGraph(data, 2, model=model, method="random", log=False, **options)


def converted(**options):
    return gas.to_scalable(GraphSAGE(2, 2, num_layers=2), ring(), **options)


def named():
    """Return the ring, whose nodes have ids."""
    return ring(node_id=np.array(["a", "b", "c", "d"]))


class Rigid(MemoryStore):
    resize = Store.resize


def no_lightning(t):
    t.patch.setattr("gas.contrib.lightning.LightningDataModule", object)
    return gas.lightning.PartitionData(ring())


def of_ranks():
    model = converted()
    model.ranks = object()
    return model


def edges_replaced(t):
    graph = live()
    graph.graph.adj_t = graph.graph.adj_t.to_dense().to_sparse_csr()
    graph.update(edge_index=EDGE)


CASES = {
    "gas.simulate, the name before it moved": lambda t: gas.simulate,
    "gas.simulat, a name that is unknown": lambda t: gas.simulat,
    "DynamicGraph.refresh, the name before": lambda t: live(model=converted()).refresh(),
    "DynamicGraph, shards": lambda t: live(shards=2),
    "DynamicGraph, a typed graph": lambda t: live(HeteroData()),
    "DynamicGraph, a model of PyG": lambda t: live(model=GraphSAGE(2, 2, num_layers=2)),
    "DynamicGraph, a model of ranks": lambda t: live(model=of_ranks()),
    "DynamicGraph, a store that can't grow": lambda t: live(model=converted(store=Rigid)),
    "DynamicGraph, a model of another graph": lambda t: live(model=converted().for_graph(5)),
    "DynamicGraph, encoded features": lambda t: live(ring(x=gas.quantize(torch.eye(4), "int8"))),
    "DynamicGraph.update, a training node without a label": lambda t: live().update(
        {"x": torch.ones(1, 2), "train_mask": torch.ones(1, dtype=torch.bool)}
    ),
    "DynamicGraph.update, features that aren't finite": lambda t: live().update(
        {"x": torch.full((1, 2), torch.nan)}
    ),
    "DynamicGraph.update, a node without an id": lambda t: live(named()).update(
        {"x": torch.ones(1, 2)}
    ),
    "DynamicGraph.update, the id of another node": lambda t: live(named()).update(
        {"x": torch.ones(1, 2), "node_id": ["b"]}
    ),
    "DynamicGraph.update, numbers for ids": lambda t: live(named()).update(
        {"x": torch.ones(1, 2), "node_id": [5]}
    ),
    "DynamicGraph.update, a node without features": lambda t: live().update({"y": EDGE[0]}),
    "DynamicGraph.update, wide features": lambda t: live().update(
        {"x": torch.ones(1, 3), "y": EDGE[0]}
    ),
    "DynamicGraph.update, half a node": lambda t: live().update(0.5),
    "DynamicGraph.update, attributes of edges": lambda t: live().update(
        None, EDGE, {"edge_attr": EDGE[0]}
    ),
    "DynamicGraph.update, a list of attributes": lambda t: live().update(None, EDGE, [1]),
    "DynamicGraph.update, an edge to remove of another graph": lambda t: live().update(
        remove=EDGE + 3
    ),
    "DynamicGraph.update, a class too many": lambda t: live().update(
        {"x": torch.ones(1, 2), "y": torch.tensor([77])}
    ),
    "DynamicGraph.update, edges of a node": lambda t: live().update(edge_index=EDGE[0]),
    "DynamicGraph.update, edges of another graph": lambda t: live().update(edge_index=EDGE + 2),
    "DynamicGraph.update, an edge that isn't there": lambda t: live().update(remove=EDGE),
    "DynamicGraph.update_histories, no model": lambda t: live().update_histories(),
    "DynamicGraph.update, labels of another type": lambda t: live().update(
        {"x": torch.ones(1, 2), "y": torch.ones(1)}
    ),
    "DynamicGraph.update, edges that were replaced": edges_replaced,
    "DynamicGraph.update, as many nodes as something else": lambda t: live(
        ring(centres=torch.ones(5, 2))
    ).update({"x": torch.ones(1, 2), "y": EDGE[0]}),
    "Store.resize, of one that can't": lambda t: gas.History(2, 2, store=Rigid).resize(3),
    "PartitionData, without lightning": no_lightning,
    "History.resize, half a row": lambda t: gas.History(2, 2).resize(1.5),
}
