"""Errors of typed graphs: their parts, mini-batches and models."""

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv, GraphConv, GraphSAGE, HANConv, SAGEConv

import gas

CITES, WRITES = ("p", "cites", "p"), ("a", "writes", "p")


def typed(change=None):
    """Eight papers in a ring, and four authors."""
    data, paper = HeteroData(), torch.arange(8)
    data["p"].x, data["a"].x = torch.ones(8, 3), torch.ones(4, 2)
    data[CITES].edge_index = torch.stack([paper, (paper + 1) % 8])
    data[WRITES].edge_index = torch.stack([paper % 4, paper])
    if change is not None:
        change(data)
    return data


def cut(data=None, num_parts=2, **options):
    data = typed() if data is None else data
    return gas.cluster(data, num_parts, log=False, cache=False, method="random", **options)


def load(data=None, **options):
    return gas.SubgraphLoader(cut() if data is None else data, log=False, **options)


def changed(kind, key, value):
    """Cut a graph of which something was set."""
    cut(typed(lambda data: setattr(data[kind], key, value)))


class Net(nn.Module):
    """Model with a given step for papers, between two layers or instead of them."""

    def __init__(self, between=lambda x: x, instead=None, layer=SAGEConv, **options):
        super().__init__()
        self.first, self.second = layer(3, 3, **options), layer(3, 3, **options)
        self.norm = nn.BatchNorm1d(3)
        self.between, self.instead = between, instead

    def forward(self, x_dict, edge_index_dict):
        x, edges = x_dict["p"], edge_index_dict[CITES]
        if self.instead is not None:
            return self.instead(self, x, edges)
        return {"p": self.second(self.between(self.first(x, edges)), edges)}


class Attended(nn.Module):
    """By some of the relations, which a test chooses."""

    def __init__(self):
        super().__init__()
        self.conv = HANConv({"p": 3, "a": 2}, 4, (["p", "a"], [CITES, WRITES]))
        self.kinds = [CITES]

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, {kind: edge_index_dict[kind] for kind in self.kinds})


class Wants(nn.Module):
    def forward(self, x_dict, edge_index_dict, pos_dict):
        return x_dict


class Edgeless(nn.Module):
    def forward(self, x_dict):
        return x_dict


def make(net=None, data=None, **options):
    return gas.to_scalable(Net() if net is None else net, data or typed(), **options)


def instead(function):
    make(Net(instead=function))


def call(change=None, **options):
    """Call a model with a batch that was changed."""
    batch = load().cut([0])
    if change is not None:
        change(batch)
    make(**options).eval()(batch)


def weights_later():
    class Weighted(Net):
        def forward(self, x_dict, edge_index_dict, edge_weight_dict=None):
            weight = (edge_weight_dict or {}).get(CITES)
            return {"p": self.first(x_dict["p"], edge_index_dict[CITES], weight)}

    data = cut(typed(lambda data: data[CITES].update({"edge_weight": torch.ones(8)})))
    gas.to_scalable(Weighted(layer=GraphConv), typed())(next(iter(load(data))))


def later(instead):
    """Return a module that does something else after it was converted."""
    model = make()
    model.predict(cut())
    model.net.instead = instead
    model.eval()(load().cut([0]))


def twice(net, x, edges):
    h = net.first(x, edges)
    return {"p": net.second(h, edges) + net.second(h * 2 if net.training is None else h, edges)}


def reads_others():
    model = make(Net(instead=twice))
    model.predict(cut())
    model.net.instead = lambda net, x, edges: {
        "p": net.second(h := net.first(x, edges), edges) + net.second(h * 2, edges)
    }
    model.eval()(load().cut([0]))


def weighs_more():
    model = make(Attended())
    model.net.kinds = [CITES, WRITES]
    model.eval()(load().cut([0]))


def sizes_differ():
    graph = cut()
    graph["a"].parts = torch.tensor([0, 4])
    load(graph)


def shrinks(net, x, edges):
    return {"p": net.second(net.first(x, edges)[1:], edges)}


def fails(net, x, edges):
    if x.size(0) != 23:  # Of the small graph.
        raise RuntimeError("of another size")
    return {"p": net.second(net.first(x, edges), edges)}


class Larger(SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)[:-1]


def normed(net, x, edges):
    return {"p": net.second(net.first(net.norm(x), edges), edges)}


def of_another_clustering():
    model = make()
    model.predict(cut())
    model(load(cut(num_parts=3)).cut([0]))


def norm_of_the_halo():
    net = Net(instead=normed)
    make(net).train()(load().cut([0]))


def without_ids(data):
    del data[CITES].edge_index


def first_alone(net, x, edges):
    return {"p": net.first(x, edges)}


LARGER = torch.arange(9)[None].repeat(2, 1)

CASES = {
    "cluster, unknown number of nodes": lambda t: cut(typed(lambda d: d["a"].__delattr__("x"))),
    "cluster, a label too few": lambda t: changed("p", "y", torch.zeros(7)),
    "cluster, a mask too short": lambda t: changed("p", "train_mask", torch.ones(7) > 0),
    "cluster, node ids in a list": lambda t: changed("p", "train_idx", [0, 1]),
    "cluster, labels in a list": lambda t: changed("p", "y", [0] * 8),
    "cluster, a weight too few": lambda t: changed(CITES, "edge_weight", torch.ones(7)),
    "cluster, edges of no type of nodes": lambda t: changed(
        ("p", "in", "v"), "edge_index", torch.zeros(2, 1).long()
    ),
    "cluster, edges without ids": lambda t: cut(
        typed(lambda d: d[CITES].__delattr__("edge_index"))
    ),
    "cluster, sparse features of a third dimension": lambda t: changed(
        "p", "x", torch.ones(8, 2, 2).to_sparse()
    ),
    "cluster, an id too large": lambda t: changed(CITES, "edge_index", LARGER),
    "cluster, twice": lambda t: cut(cut()),
    "cluster, auto": lambda t: cut(num_parts="auto", model=make()),
    "cluster, shards": lambda t: cut(shards=2),
    "cluster, into a folder": lambda t: cut(out=t.path / "graph"),
    "SubgraphLoader, not cut": lambda t: load(typed()),
    "SubgraphLoader, parts of one type": lambda t: sizes_differ(),
    "SubgraphLoader, layout": lambda t: load(layout="csr"),
    "SubgraphLoader, an augmentation": lambda t: load(epoch_transform=object()),
    "SubgraphLoader, ptr": lambda t: load(ptr=torch.tensor([0, 12])),
    "SubgraphLoader.cut_nodes": lambda t: load().cut_nodes(torch.tensor([0])),
    "to_scalable, a layer that normalises": lambda t: make(Net(layer=GCNConv)),
    "to_scalable, a layer that caches": lambda t: make(
        Net(layer=GCNConv, normalize=False, cached=True)
    ),
    "to_scalable, a model already": lambda t: make(make()),
    "to_scalable, an unknown attribute": lambda t: make(Wants()),
    "to_scalable, no rows are moved": lambda t: make(io="none"),
    "to_scalable, no edges": lambda t: make(Edgeless()),
    "to_scalable, no layer": lambda t: instead(lambda net, x, edges: {"p": x}),
    "to_scalable, other edges": lambda t: instead(
        lambda net, x, edges: {"p": net.first(x, edges[:, 1:])}
    ),
    "to_scalable, attention weights": lambda t: make(
        Net(
            layer=GATConv,
            instead=lambda net, x, edges: net.first(x, edges, return_attention_weights=True),
        )
    ),
    "to_scalable, a layer of fewer rows": lambda t: make(Net(layer=Larger)),
    "to_scalable, rows that are cut": lambda t: instead(shrinks),
    "to_scalable, a mean of all nodes": lambda t: make(Net(lambda x: x - x.mean(0))),
    "to_scalable, only of one size": lambda t: instead(fails),
    "to_scalable, for one type of nodes": lambda t: make(GraphSAGE(3, 3, 2)),
    "to_scalable, never": lambda t: instead(lambda net, x, edges: x.nothing),
    "to_scalable, returns a list": lambda t: instead(lambda net, x, edges: [net.first(x, edges)]),
    "to_scalable, returns a sum": lambda t: instead(
        lambda net, x, edges: net.first(x, edges).sum(0)
    ),
    "to_scalable, returns another dictionary": lambda t: instead(
        lambda net, x, edges: {"q": net.first(x, edges)}
    ),
    "model, a graph of one type": lambda t: make()(Data()),
    "model, no mini-batch": lambda t: make()(typed()),
    "model, a batch of another graph": lambda t: call(lambda b: setattr(b["p"], "n_id", LARGER[0])),
    "model, weights that the module was converted without": lambda t: weights_later(),
    "model, a batch without features": lambda t: call(lambda b: b["p"].pop("x")),
    "model, features of another width": lambda t: call(
        lambda b: setattr(b["p"], "x", b["p"].x[:, :2])
    ),
    "model, a layer more": lambda t: later(
        instead=lambda net, x, edges: {
            "p": net.first(net.second(net.first(x, edges), edges), edges)
        }
    ),
    "model, a layer less": lambda t: later(
        instead=lambda net, x, edges: {"p": net.first(x, edges)}
    ),
    "model, a relation more to weigh": lambda t: weighs_more(),
    "model, other rows": lambda t: reads_others(),
    "model, a norm before the first layer": lambda t: norm_of_the_halo(),
    "model, a batch of another clustering": lambda t: of_another_clustering(),
    "predict, another graph": lambda t: make().predict(
        cut(typed(lambda d: setattr(d["a"], "x", torch.ones(5, 2))))
    ),
    "predict, a loader and a batch size": lambda t: make().predict(load(), batch_size=2),
    "predict, some nodes": lambda t: make().predict(cut(), nodes=[0]),
    "predict, a path": lambda t: make().predict("graph"),
    "EvalSubgraphLoader": lambda t: gas.EvalSubgraphLoader(cut()),
    "PrefetchLoader": lambda t: list(gas.PrefetchLoader(load(), make())),
    "plan": lambda t: gas.plan(typed(), make(), "1GB"),
    "verify, some nodes": lambda t: gas.verify(make(), cut(), num_nodes=2),
    "verify, an option of a loader": lambda t: gas.verify(make(), cut(), layout="csr"),
}
