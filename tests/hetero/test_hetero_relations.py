"""In mini-batches, relations that start at one type are multiplied at once, where layers allow."""

import dataclasses

import pytest
import torch
from hetero.graphs import SIZES, Convs, bibliography, flat, net_of, sage
from torch import nn
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv

import gas
from gas.nn.hetero import _Multiply


def counted(monkeypatch):
    """Record the number of rows of each product of several relations."""
    calls = []
    forward = _Multiply.forward

    def count(*args):
        calls.append(args[2].num_rows)
        return forward(*args)

    monkeypatch.setattr(_Multiply, "forward", staticmethod(count))
    return calls


def cut(data, num_parts):
    return gas.cluster(data, num_parts, log=False, method="random")


def grads_of(model, batch):
    model.zero_grad()
    out = flat(model(batch, push=False))
    out.square().sum().backward()
    return out, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", ["to_hetero", "HeteroConv-SAGE", "HeteroConv-added"])
@pytest.mark.parametrize("num_parts", [1, 4, 15])
def test_at_once_is_one_by_one(name, num_parts, monkeypatch):
    data = bibliography(dtype=torch.double)
    model = gas.to_scalable(net_of(name, data), data, dtype=torch.double).eval()
    graph = cut(data, num_parts)
    model.predict(graph)
    calls, plan = counted(monkeypatch), model.plan
    for batch in gas.SubgraphLoader(graph, log=False):
        model.plan = plan
        calls.clear()
        out, mine = grads_of(model, batch)
        sizes = {
            kind: batch[kind].batch_size if model.is_narrow else batch[kind].num_nodes
            for kind in SIZES
        }
        rows = {  # Papers cite and appear; authors write and review; venues have one relation.
            "paper": 2 * sizes["author"] + sizes["venue"] + sizes["paper"],
            "author": 2 * sizes["paper"],
        }
        assert sorted(set(calls)) == sorted(set(rows.values()))
        assert len(calls) == 2 * len({name.split(".")[1] for name in plan.layers})
        model.plan = dataclasses.replace(plan, shared_relations={})
        calls.clear()
        expected, true = grads_of(model, batch)
        assert not calls
        assert torch.equal(out, expected)
        for g, h in zip(mine, true, strict=True):
            assert (g is None) == (h is None)
            if g is not None:
                torch.testing.assert_close(g, h)


def test_what_is_shared_are_sums_of_the_same_rows():
    data = bibliography()
    plan = gas.to_scalable(Convs(data, sage, 2), data).plan
    kinds = {call: set(together) for call, together in plan.shared_relations.items()}
    of_papers = {kind for kind in data.edge_types if kind[0] == "paper"}
    of_authors = {kind for kind in data.edge_types if kind[0] == "author"}
    assert sorted(map(len, kinds.values())) == [2] * 4 + [4] * 8
    assert all(each in (of_papers, of_authors) for each in kinds.values())
    for make in (
        lambda: SAGEConv((16, 16), 16, project=True),  # Each projects its own.
        lambda: SAGEConv((-1, -1), 16, aggr="max"),
    ):
        assert not gas.to_scalable(Convs(data, make, 2), data).plan.shared_relations


class Mixed(nn.Module):
    """Some relations are averaged, others summed; a further layer has the first's rows, too."""

    def __init__(self, data):
        super().__init__()
        sums = {k: SAGEConv((-1, -1), 6, aggr="sum" if k[2] == "paper" else "mean") for k in kinds}
        self.first, self.second = HeteroConv(sums), HeteroConv({k: sage() for k in kinds})

    def forward(self, x_dict, edge_index_dict):
        edges = {kind: edge_index_dict[kind] for kind in kinds}
        a, b = self.first(x_dict, edges), self.second(x_dict, edges)
        return {kind: torch.cat([a[kind], b[kind]], dim=1) for kind in a}


kinds = [
    ("paper", "cites", "paper"),
    ("paper", "appears_in", "venue"),
    ("paper", "rev_writes", "author"),
    ("author", "writes", "paper"),
]


def test_sums_and_means_and_two_layers_of_the_same_rows(monkeypatch):
    data = bibliography()
    model = gas.to_scalable(Mixed(data), data)
    graph = cut(data, 3)
    assert gas.verify(model, graph)
    calls = counted(monkeypatch)
    batch = gas.SubgraphLoader(graph, log=False).cut([0])
    model(batch)
    means = [batch[kind].batch_size for kind in ("venue", "author")]
    # The second layer's sums are means over papers that the first layer hasn't asked for.
    assert len(calls) == 2
    assert all(rows >= sum(means) for rows in calls)


def test_layers_of_the_first_level_compute_the_batchs_own_rows_alone():
    data = bibliography()
    net = Convs(data, sage, 2)
    model = gas.to_scalable(net, data).eval()
    graph = cut(data, 4)
    model.predict(graph)
    seen = []
    conv = model.net.convs[0].convs["paper", "cites", "paper"]
    conv.lin_r.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    batch = gas.SubgraphLoader(graph, log=False).cut([0])
    model(batch)
    assert seen == [batch["paper"].batch_size]
    assert batch["paper"].num_nodes > batch["paper"].batch_size


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(8, 8, normalize=False) for _ in range(2))

    def forward(self, x_dict, edge_index_dict):
        x, edges = x_dict["paper"], edge_index_dict["paper", "cites", "paper"]
        return {"paper": self.convs[1](self.convs[0](x, edges).relu(), edges)}


def test_a_layer_that_takes_no_pairs():
    data = bibliography()
    model = gas.to_scalable(Normalised(), data)
    assert gas.verify(model, cut(data, 4))
    assert model.net.convs[0].path == "fused"
