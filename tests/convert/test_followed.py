"""Tensors that are replaced in a module after its conversion."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import random_graph
from torch import nn

import gas

WIDTH = 8


class Scaling(pyg.MessagePassing):
    """A layer that reads a tensor which is neither a parameter nor a buffer."""

    def __init__(self, in_channels):
        super().__init__(aggr="add")
        self.lin, self.inside = nn.Linear(in_channels, WIDTH), torch.randn(WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x) * self.inside)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.sage = Scaling(5), pyg.SAGEConv(WIDTH, 3)
        self.plain, self.weight = torch.randn(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("buffer", torch.randn(WIDTH))
        self.unread = torch.randn(3)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index).relu() * self.plain + self.buffer * self.weight
        self.last = x.detach()
        return self.sage(x, edge_index)


REPLACED = {
    "of the module": lambda net, new: setattr(net, "plain", new),
    "of a layer": lambda net, new: setattr(net.conv, "inside", new),
    "a buffer": lambda net, new: setattr(net, "buffer", new),
    "a parameter": lambda net, new: setattr(net, "weight", nn.Parameter(new)),
    "in place": lambda net, new: net.plain.copy_(new),
    "a buffer in place": lambda net, new: net.buffer.copy_(new),
}


def converted():
    net, data = Net().eval(), random_graph()
    model = gas.to_scalable(net, data)
    return net, data, model, gas.cluster(data, 4, model=model, log=False)


@pytest.mark.parametrize("kind", REPLACED)
def test_the_model_takes_what_replaces_a_tensor(kind):
    net, data, model, graph = converted()
    copied, expected = copy.deepcopy(model), net(data.x, data.edge_index)
    for _ in range(2):
        before = net(data.x, data.edge_index)
        REPLACED[kind](net, torch.randn(WIDTH))
        after = net(data.x, data.edge_index)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(model.predict(graph, log=False), after)
        assert gas.verify(model, graph)
    if "in place" not in kind:
        torch.testing.assert_close(copied.predict(graph, log=False), expected)


@pytest.mark.parametrize("kind", ["of the module", "a buffer", "in place", "a buffer in place"])
def test_a_model_that_was_moved_takes_it_too(kind):
    net, data, model, graph = converted()
    model.double()
    graph.x = graph.x.double()
    REPLACED[kind](net, torch.full((WIDTH,), 2.0))
    for each in ("plain", "buffer"):
        setattr(net, each, getattr(net, each).double())
    net.conv.inside = net.conv.inside.double()
    expected = net.double()(data.x.double(), data.edge_index)
    torch.testing.assert_close(model.predict(graph, log=False), expected)


@pytest.mark.parametrize("other", [2.0, None, torch.ones(3), torch.ones(WIDTH, dtype=torch.long)])
def test_what_is_no_such_tensor_is_refused(other):
    net, _, model, graph = converted()
    net.plain = other
    with pytest.raises(ValueError, match="'plain' of the module is .* now, and was floating-point"):
        model.predict(graph, log=False)
