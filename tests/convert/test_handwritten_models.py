"""A converted model and the same layers in a model written by hand: equal, batch by batch."""

import copy

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gas

CONVS = {
    "gcn": lambda i, o: GCNConv(i, o, normalize=False),
    "sage": SAGEConv,
    "gat": lambda i, o: GATConv(i, o, add_self_loops=False),
    "gin": lambda i, o: GINConv(torch.nn.Linear(i, o)),
}


class Net(torch.nn.Module):
    """A module for whole graphs."""

    def __init__(self, conv):
        super().__init__()
        self.convs = torch.nn.ModuleList([conv(5, 8), conv(8, 8), conv(8, 3)])

    def forward(self, x, edge_index, edge_weight=None):
        weight = () if edge_weight is None else (edge_weight,)
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, *weight).relu()
        return self.convs[-1](x, edge_index, *weight)


class ByHand(gas.ScalableGNN):
    """The same, as a user writes it."""

    def __init__(self, net):
        super().__init__(60, 8, num_layers=3)
        self.convs = net.convs

    def forward(self, x, adj_t, *args, edge_weight=None):
        weight = () if edge_weight is None else (edge_weight,)
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = self.push_and_pull(history, self.one(conv, x, adj_t, weight).relu(), *args)
        return self.one(self.convs[-1], x, adj_t, weight)

    def one(self, conv, x, adj_t, weight):
        is_bipartite = not (isinstance(adj_t, torch.Tensor) and adj_t.layout == torch.strided)
        if is_bipartite and not isinstance(conv, GCNConv):
            return conv((x, x[: adj_t.size(0)]), adj_t)
        return conv(x, adj_t, *weight)


@pytest.mark.parametrize("layout", ["csr", "fused", "edge_index"])
@pytest.mark.parametrize("name", CONVS)
def test_outputs_gradients_and_histories_are_equal(name, layout):
    data = random_graph()
    if name == "gcn":
        data = T.GCNNorm()(data)
    net = Net(CONVS[name])
    converted = gas.to_scalable(copy.deepcopy(net), data)
    by_hand = ByHand(copy.deepcopy(net))
    graph = gas.cluster(data, 6, log=False)
    options = {"layout": layout, "edge_weight": name == "gcn", "log": False}
    # Without sums of features, which the hand-written model doesn't read: both round alike.
    loader = gas.SubgraphLoader(graph, batch_size=2, precompute=False, **options)
    for model in (converted, by_hand):
        model(
            loader=gas.EvalSubgraphLoader(
                graph, layout=layout, edge_weight=name == "gcn", log=False
            )
        )
        model.train()
    for batch in loader:
        outs = [model(batch) for model in (converted, by_hand)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.square().sum().backward()
    theirs = dict(by_hand.named_parameters())
    for key, parameter in converted.net.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key].grad)
    for mine, other in zip(converted.histories, by_hand.histories, strict=True):
        torch.testing.assert_close(mine.emb, other.emb)
        assert torch.equal(mine.age, other.age)
