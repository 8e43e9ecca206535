"""Errors of ``gas.scalable``: calls of a model, and what its forward does."""

import errno
import os
import sys
import threading

import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.utils import get_embeddings

import gas
from gas.augment import DropEdge
from refusals import HALVES, Model, first_batch, load, raising, ring, without_cuda

X = torch.ones(4, 2)


def call(model=None, batch=None, **changes):
    """Call a model on a mini-batch, with other arguments than the loader's."""
    batch = first_batch() if batch is None else batch
    given = dict(
        x=batch.data.x, adj_t=batch.data.get("adj_t"), batch_size=batch.batch_size, n_id=batch.n_id,
        offset=batch.offset, count=batch.count,
    )  # fmt: skip
    return (Model() if model is None else model)(**{**given, **changes})


def filled():
    """Return a model whose histories are filled by a clustered graph."""
    model = Model()
    model.refresh(ring(parts=HALVES, perm=torch.arange(4)), log=False)
    return model


def predict(graph, **options):
    return Model().predict(graph, **options)


def of_features(x):
    model = gas.to_scalable(pyg.GraphSAGE(2, 2, num_layers=1), ring())
    model.predict(ring(x=x, parts=HALVES, perm=torch.arange(4)), log=False)


def one_row():
    data = ring(parts=torch.arange(5), perm=torch.arange(4))
    model = gas.to_scalable(pyg.GraphSAGE(2, 2, num_layers=2, norm="batch_norm"), ring())
    model.train()(next(iter(gas.SubgraphLoader(data, log=False))))


def attention(layout):
    """Of a graph with two self-loops, one in each half."""
    loops = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 0, 3, 2, 0, 2]])
    data = ring(edge_index=loops, parts=HALVES, perm=torch.arange(4))
    model = gas.to_scalable(pyg.GAT(2, 2, num_layers=1), data)
    batch = next(iter(gas.SubgraphLoader(data, layout=layout, log=False)))
    config = dict(mode="regression", task_level="node", return_type="raw")
    explain = Explainer(
        model.at(batch), AttentionExplainer(), "model", config, edge_mask_type="object"
    )
    explain(batch.x, batch.edge_index if layout == "edge_index" else batch.adj_t)


def embeddings_of_one_layer():
    data = ring(parts=HALVES, perm=torch.arange(4))
    model = gas.to_scalable(pyg.GraphSAGE(2, 2, num_layers=1), data)
    batch = next(iter(gas.SubgraphLoader(data, layout="edge_index", log=False)))
    get_embeddings(model.at(batch), batch.x, batch.edge_index)


def mask_of_sparse_features():
    graph = ring(x=torch.ones(4, 2).to_sparse_csr(), parts=HALVES, perm=torch.arange(4))
    model = gas.to_scalable(pyg.GraphSAGE(2, 2, num_layers=1), graph)
    batch = next(iter(gas.SubgraphLoader(graph, layout="edge_index", log=False)))
    x = batch.x
    model.at(batch)(x.detach().requires_grad_(), batch.edge_index)


def learn_later():
    loader = load(ring())
    loader.data.x = torch.nn.Parameter(torch.ones(4, 2))
    list(gas.PrefetchLoader(loader, Model()))


class Several(Model):
    """Returns two values."""

    def forward(self, *args):
        out = super().forward(*args)
        return out, out


def replaced_layer():
    graph = ring(parts=HALVES, perm=torch.arange(4))
    model = gas.models.GraphSAGE(4, 2, 2, 2, 2)
    model.predict(graph, log=False)
    model.convs[1] = pyg.SAGEConv(2, 2)
    model.predict(graph, log=False)


def norms(call, ptr=HALVES):
    """Refresh a model that calls two norms in a way of its own."""

    def push(model, h, *args):
        call(model, h)
        return model.push_and_pull(model.histories[0], h, *args)

    model = Model(push=push)
    model.one, model.other = (torch.nn.BatchNorm1d(2) for _ in range(2))
    model.refresh(load(ring(x=torch.tensor([[9.0, 9.0], [9, 9], [0, 0], [0, 0]])), ptr))


class Doubled(torch.nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def norm_of_its_own(norm, mode=True):
    model = Model()
    model.one = norm
    model.train(mode).refresh(load(ring()))


def stale_prediction():
    graph = ring(parts=HALVES, perm=torch.arange(4))
    model = Model()
    model.predict(graph)
    for batch in load(graph):
        model(batch)
    model.predict(graph, nodes=torch.tensor([1]))


def plain_dropout(t):
    """Raise PyTorch's message, in every version."""
    t.patch.setattr("torch.nn.functional.dropout", raising(NotImplementedError("no SparseCsr")))

    class Dropping(Model):
        def forward(self, x, adj_t, *args):
            return super().forward(torch.nn.functional.dropout(x), adj_t, *args)

    Dropping()(first_batch(ring(x=torch.ones(4, 2).to_sparse())))


def packed_on_a_full_disk(t):
    model = Model(store="disk", path=t.path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    t.patch.setattr("os.posix_fallocate", raising(full), raising=False)
    model.pack(load())


def packed_without_memory(t):
    t.patch.setattr("gas.scalable.pack.free_memory", lambda: 10)
    Model(store="disk").pack(load(), "1GB")


def pushed_by_another_process(t):
    model = Model(store="disk", io="serial")
    model.pack(load())
    t.patch.setattr("gas.history.packed.os.getpid", lambda: 0)
    model.histories[0].push(X)


def twice(model, h, *args):
    model.push_and_pull(model.histories[0], h, *args)
    return model.push_and_pull(model.histories[0], h, *args)


def never(model, h, *args):
    return h


def untold(model, h, *args):
    return model.push_and_pull(model.histories[0], h)


def doubled(model, h, *args):
    return model.push_and_pull(model.histories[0], torch.cat([h, h], dim=1), *args)


def checkpointed(model, h, *args):
    def block(h):
        return model.push_and_pull(model.histories[0], h, *args) ** 2

    return checkpoint(block, h, use_reentrant=False)


def rows(model, h, *args):
    return model.push_and_pull(model.histories[0], h, *args, rows=True)


def rows_to_pytorch(model, h, *args):
    return torch.relu(rows(model, h, *args))


def too_late():
    kept = []

    def keep(model, h, *args):
        kept.append(rows(model, h, *args))
        return h

    model = Model(push=keep, io="serial")
    model.histories[0].push(torch.ones(4, 2))
    call(model)  # A first call copies: forward may yet turn out wrong.
    call(model)
    model.histories[0].push(torch.zeros(4, 2))
    kept[1].tensor()


def forgetful(times):
    """Return a model that pushes in its first calls alone."""
    calls = iter(range(times + 1))

    def push(model, h, *args):
        if next(calls, times) == times:
            return h
        return model.push_and_pull(model.histories[0], h, *args)

    model = Model()
    call(model)
    model.push = push
    return model


def predict_ring(model):
    model.predict(gas.cluster(ring(), 2, method="random", log=False))


def from_two_threads(second=None):
    errors = []

    def nested(model, h, *args):
        def other():
            try:
                (second or call)(model)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise errors[0]

    call(Model(push=nested))


class WithLayer(gas.ScalableGNN):
    """A model of one layer of PyG."""

    def __init__(self, layer):
        super().__init__(4, 2, 1)
        self.layer = layer

    def forward(self, x, adj_t, batch_size=None, *args):
        if isinstance(self.layer, pyg.MessagePassing):
            return self.layer(x, adj_t)[:batch_size]
        return self.layer(x)[:batch_size]


class OfEdges(gas.ScalableGNN):
    """A model of one layer that takes attributes of edges beside a matrix."""

    def __init__(self):
        super().__init__(4, 2, 1)
        self.layer = pyg.TransformerConv(2, 2, edge_dim=2)

    def forward(self, x, adj_t, *args):
        return self.layer(x, adj_t, torch.ones(adj_t.values().numel(), 2))


class EdgesByPosition(OfEdges):
    """Takes an attribute before the ids of a mini-batch."""

    def forward(self, x, edge_index, edge_attr, *args):
        return self.layer(x, edge_index, edge_attr)


def layer(module, layout="edge_index"):
    batch = first_batch(layout=layout)
    adj = batch.data.get("adj_t", batch.data.get("edge_index"))
    call(WithLayer(module), batch, adj_t=adj)


class AlongNodes(torch.nn.Module):
    """Attention from each node to every other."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(2, 1)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Halves(gas.ScalableGNN):
    """A product in 16 bits."""

    def forward(self, x, adj_t, *args):
        raise RuntimeError("\"addmm_sparse_csr\" not implemented for 'Half'")


def inference(loader, model=None):
    return (Model() if model is None else model)(loader=loader)


def evaluation(data=None, ptr=HALVES):
    return gas.EvalSubgraphLoader(ring() if data is None else data, ptr, log=False)


def larger():
    node = torch.arange(6)
    return ring(
        x=torch.ones(6, 2), y=None, train_mask=None, edge_index=torch.stack([node, (node + 1) % 6])
    )


def with_views():
    return first_batch(epoch_transform=DropEdge(ring()))


def parts():
    return ring(parts=HALVES, perm=torch.arange(4))


def nothing_free(t):
    t.patch.setattr(sys.modules["gas.scalable.verify"], "free_memory", lambda device: 0)


def named(ids=("a", "b", "c", "d")):
    return ring(parts=HALVES, perm=torch.arange(4), node_id=list(ids))


def untracked_norm():
    model = Model()
    model.norm = torch.nn.BatchNorm1d(2, track_running_stats=False)
    model.predict(named(), ids=["b"])


def fewer_ids():
    graph, model = named(), Model()
    model.predict(graph, ids=["b"])
    graph.node_id = ["a", "b"]
    model.predict(graph, ids=["b"])


CASES = {
    "model(), without anything": lambda t: Model()(),
    "model.to, no CUDA": lambda t: without_cuda(
        t, "torch.nn.Module._apply", lambda: Model().to("cuda")
    ),
    "ScalableGNN, a device that isn't there": lambda t: without_cuda(
        t, "gas.history.store.free_memory", lambda: Model(device="cuda")
    ),
    "model.pack, histories in memory": lambda t: Model().pack(load()),
    "model.pack, another graph": lambda t: Model(5, store="disk").pack(load()),
    "model.pack, the graph itself": lambda t: Model(store="disk").pack(ring()),
    "model.pack, memory": lambda t: Model(store="disk").pack(load(), "much"),
    "model.pack, a full disk": packed_on_a_full_disk,
    "model.pack, more memory than there is": packed_without_memory,
    "model.pack, path": lambda t: Model(store="disk").pack(load(), path=t.path / "nowhere"),
    "model.pack, nothing on disk": lambda t: gas.models.GraphSAGE(4, 2, 2, 2, 1).pack(load()),
    "model.pack, pushed by a forked process": pushed_by_another_process,
    "model, what PyTorch can't do with sparse features": plain_dropout,
    "model.at, no batch": lambda t: Model().at(5),
    "model.at, AttentionExplainer of a matrix": lambda t: attention("fused"),
    "model.at, AttentionExplainer of self-loops": lambda t: attention("edge_index"),
    "model.at, PGExplainer without histories": lambda t: embeddings_of_one_layer(),
    "model.at, a gradient of sparse features": lambda t: mask_of_sparse_features(),
    "gas.verify, a model of PyG": lambda t: gas.verify(torch.nn.Linear(2, 2), ring()),
    "cluster, memory for less than a node": lambda t: gas.cluster(
        ring(), "auto", memory=8, model=Model(), log=False
    ),
    "a mini-batch and an adjacency": lambda t: Model()(first_batch(), first_batch().adj_t),
    "predict, a graph that isn't clustered": lambda t: predict(ring(parts=HALVES)),
    "predict, features of another width": lambda t: of_features(torch.ones(4, 3)),
    "predict, features of another type": lambda t: of_features(torch.ones(4, 2).double()),
    "predict, a norm of one node": lambda t: one_row(),
    "predict, several outputs": lambda t: Several().predict(
        ring(parts=HALVES, perm=torch.arange(4)), log=False
    ),
    "predict, a layer that was replaced": lambda t: replaced_layer(),
    "predict, chosen nodes and a layout": lambda t: predict(
        ring(parts=HALVES, perm=torch.arange(4)), nodes=torch.tensor([1]), layout="csr"
    ),
    "predict, chosen nodes and a norm without statistics": lambda t: untracked_norm(),
    "predict, chosen nodes of a graph that isn't clustered": lambda t: predict(
        ring(parts=HALVES), nodes=torch.tensor([1])
    ),
    "predict, chosen nodes by rows of other weights": lambda t: stale_prediction(),
    "predict, ids of a graph without them": lambda t: predict(
        ring(parts=HALVES, perm=torch.arange(4)), ids=["a"]
    ),
    "predict, an id that isn't there": lambda t: predict(named(), ids=["b", "e", "f"]),
    "predict, no ids": lambda t: predict(named(), ids=[]),
    "predict, fewer ids than nodes": lambda t: fewer_ids(),
    "predict, one id": lambda t: predict(named(), ids="b"),
    "predict, ids that several nodes have": lambda t: predict(named(list("abca")), ids=["b"]),
    "predict, ids and rows": lambda t: predict(named(), ids=["b"], nodes=torch.tensor([1])),
    "predict, chosen nodes in a list": lambda t: predict(
        ring(parts=HALVES, perm=torch.arange(4)), nodes=[1, 2]
    ),
    "predict, a matrix of nodes": lambda t: predict(named(), nodes=torch.tensor([[1, 2]])),
    "predict, a mask of fewer nodes": lambda t: predict(named(), nodes=torch.ones(3) > 0),
    "predict, features": lambda t: predict(ring().x),
    "prepare, weights that are integers": lambda t: gas.models.GCN(4, 2, 2, 2, 2).prepare(
        ring(edge_weight=torch.ones(8).long())
    ),
    "call, weights of another precision with csr": lambda t: gas.models.GCN(4, 2, 2, 2, 2).double()(
        first_batch(ring(x=torch.ones(4, 2).double(), edge_weight=torch.full((8,), 0.5)))
    ),
    "calling, a graph as a loader": lambda t: Model()(loader=ring()),
    "calling, a graph": lambda t: Model()(ring()),
    "calling, a mini-batch without ids": lambda t: Model()(
        first_batch().x, first_batch().data.adj_t
    ),
    "calling, a square mini-batch without ids": lambda t: Model()(
        first_batch().x, first_batch(layout="edge_index").data.edge_index
    ),
    "calling, a loader": lambda t: Model()(load(ring(parts=HALVES))),
    "predict, a loader and a batch size": lambda t: predict(load(), batch_size=2),
    "model, a loader and ids": lambda t: Model()(loader=load(), n_id=torch.tensor([0])),
    "model, views without pushes": lambda t: Model()(
        first_batch(epoch_transform=DropEdge(ring(), p=0.5)), views="original", push=False
    ),
    "predict, a loader and a layout": lambda t: predict(load(), layout="csr"),
    "refresh, a loader and a layout": lambda t: Model().refresh(load(), layout="csr"),
    "refresh, a norm with a forward of its own": lambda t: norm_of_its_own(Doubled(2)),
    "refresh, in evaluation mode": lambda t: norm_of_its_own(torch.nn.BatchNorm1d(2), mode=False),
    "refresh, a norm of types": lambda t: norm_of_its_own(pyg.HeteroBatchNorm(2, 2)),
    "refresh, a norm of one row": lambda t: norms(
        lambda model, h: model.one(h[:1]), torch.tensor([0, 4])
    ),
    "refresh, norms in another order": lambda t: norms(
        lambda model, h: model.other(model.one(h)) if h[0, 0] > 2 else model.one(model.other(h))
    ),
    "verify, a list of batches": lambda t: gas.verify(Model(), list(load())),
    "verify, a loader and its options": lambda t: gas.verify(Model(), load(), 2, layout="csr"),
    "verify, more nodes than there are": lambda t: gas.verify(Model(), parts(), num_nodes=5),
    "verify, no room for a neighbourhood": lambda t: (
        nothing_free(t),
        gas.verify(Model(), parts(), num_nodes=2),
    ),
    "ScalableGNN, no nodes": lambda t: Model(num_nodes=0),
    "ScalableGNN, a buffer of no rows": lambda t: Model(buffer_size=0),
    "ScalableGNN, a width too many": lambda t: Model(hidden_channels=[2, 2]),
    "ScalableGNN, two batches ahead": lambda t: Model(prefetch=2),
    "for_graph, no nodes": lambda t: Model().for_graph(0),
    "call, rows of the batch and of its halo": lambda t: layer(pyg.SAGEConv(2, 2), "csr"),
    "call, attributes of edges beside a matrix": lambda t: call(OfEdges()),
    "call, attributes of edges before the ids": lambda t: EdgesByPosition()(
        first_batch(ring(edge_attr=torch.ones(8, 2)), layout="edge_index")
    ),
    "call, batch_size without n_id": lambda t: call(n_id=None),
    "call, arguments of a mini-batch in another order": lambda t: call(
        batch_size=torch.arange(4), n_id=2
    ),
    "call, batch_size above n_id": lambda t: call(batch_size=9),
    "call, fill on a mini-batch": lambda t: call(fill=True),
    "call, a batch of a larger graph": lambda t: call(
        batch=first_batch(larger(), torch.tensor([0, 3, 6]))
    ),
    "call, a batch of another clustering": lambda t: call(
        filled(), first_batch(ring(perm=torch.tensor([1, 0, 2, 3])), HALVES)
    ),
    "call, features of the own rows alone": lambda t: call(x=X[:2]),
    "call, fill with features of other nodes": lambda t: Model()(
        X[:3], ring().edge_index, fill=True
    ),
    "call, a halo above buffer_size": lambda t: call(Model(buffer_size=1)),
    "call, before any history was filled": lambda t: call(Model(io="serial")),
    "call, a loader and features": lambda t: Model()(X, loader=evaluation()),
    "call, from two threads": lambda t: from_two_threads(),
    "predict, during a call of another thread": lambda t: from_two_threads(predict_ring),
    "call, 16 bits with csr": lambda t: call(Halves(4, 2, 1)),
    "forward, the same history twice": lambda t: call(Model(push=twice)),
    "forward, no push_and_pull": lambda t: call(Model(push=never)),
    "forward, push_and_pull without *args": lambda t: call(Model(push=untold)),
    "forward, another width than the history's": lambda t: call(Model(push=doubled)),
    "forward, checkpointed": lambda t: call(Model(push=checkpointed)).sum().backward(),
    "a layer that normalises by degrees": lambda t: layer(pyg.GCNConv(2, 2)),
    "a layer of several hops": lambda t: layer(pyg.APPNP(3, 0.1, normalize=False)),
    "a layer that propagates at once, SGConv": lambda t: layer(pyg.SGConv(2, 2)),
    "a layer that needs the Laplacian": lambda t: layer(pyg.ChebConv(2, 2, 2)),
    "a norm of the whole graph": lambda t: layer(pyg.PairNorm()),
    "a layer that attends to all nodes": lambda t: layer(pyg.GPSConv(2, pyg.SAGEConv(2, 2))),
    "a layer of hops with weights between": lambda t: layer(pyg.GatedGraphConv(2, 2)),
    "a layer of edges both ways": lambda t: layer(pyg.DirGNNConv(pyg.SAGEConv(2, 2))),
    "a layer of edges backwards": lambda t: layer(pyg.SAGEConv(2, 2, flow="target_to_source")),
    "a layer of edges in their order": lambda t: layer(
        pyg.SAGEConv(2, 2, pyg.aggr.GRUAggregation(2, 2))
    ),
    "nodes as a sequence": lambda t: layer(AlongNodes()),
    "inference, a loader of another graph": lambda t: inference(
        evaluation(larger(), torch.tensor([0, 3, 6]))
    ),
    "inference, a loader of some nodes": lambda t: inference([first_batch()]),
    "inference, a loader that is spent": lambda t: inference(iter(evaluation())),
    "inference, no push_and_pull": lambda t: inference(evaluation(), Model(push=never)),
    "inference, no push_and_pull since the last call": lambda t: inference(
        evaluation(), forgetful(0)
    ),
    "inference, no push_and_pull in the last sweep": lambda t: inference(
        evaluation(), forgetful(2)
    ),
    "views, an unknown bank": lambda t: Model().views(with_views(), "both"),
    "views, a batch without": lambda t: Model().views(first_batch()),
    "PrefetchLoader, a graph": lambda t: gas.PrefetchLoader(ring(), Model()),
    "PrefetchLoader, features learned later": lambda t: learn_later(),
    "PrefetchLoader, learned features": lambda t: list(
        gas.PrefetchLoader(load(ring(x=torch.nn.Parameter(torch.ones(4, 2)))), Model())
    ),
    "PrefetchLoader, a halo above buffer_size": lambda t: list(
        gas.PrefetchLoader(load(), Model(buffer_size=1, prefetch=1))
    ),
    "push_and_pull, rows=True, given to PyTorch": lambda t: call(Model(push=rows_to_pytorch)),
    "push_and_pull, rows=True, a method of tensors": lambda t: call(
        Model(push=lambda model, h, *args: rows(model, h, *args).relu())
    ),
    "push_and_pull, the number of a history": lambda t: call(
        Model(push=lambda model, h, *args: model.push_and_pull(0, h, *args))
    ),
    "push_and_pull, rows=True, an operation": lambda t: call(
        Model(push=lambda model, h, *args: rows(model, h, *args) + 1)
    ),
    "push_and_pull, rows=True, read after another push": lambda t: too_late(),
}
