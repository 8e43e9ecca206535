"""Models of PyG's examples for node classification: converted, or refused for the right reason."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import gas

N, W, C = 120, 12, 5


def graph():
    torch.manual_seed(0)
    return Data(x=torch.rand(N, W), edge_index=torch.randint(N, (2, 600)))


class Gcn(nn.Module):
    def __init__(self, cached=False):
        super().__init__()
        self.conv1 = pyg.GCNConv(W, 16, cached=cached)
        self.conv2 = pyg.GCNConv(16, C, cached=cached)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = pyg.GATConv(W, 8, heads=4, dropout=0.6)
        self.conv2 = pyg.GATConv(32, C, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(F.dropout(x, p=0.6, training=self.training), edge_index))
        return self.conv2(F.dropout(x, p=0.6, training=self.training), edge_index)


class Gcn2(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(W, 16), nn.Linear(16, C)])
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(16, 0.1, 0.5, layer + 1, True, normalize=True) for layer in range(6)
        )

    def forward(self, x, adj_t):
        x = x_0 = self.lins[0](F.dropout(x, 0.6, training=self.training)).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.6, training=self.training), x_0, adj_t).relu()
        x = self.lins[1](F.dropout(x, 0.6, training=self.training))
        return x.log_softmax(dim=-1)


class Sgc(nn.Module):
    def __init__(self, cached=False):
        super().__init__()
        self.conv1 = pyg.SGConv(W, C, K=2, cached=cached)

    def forward(self, x, edge_index):
        return F.log_softmax(self.conv1(x, edge_index), dim=1)


class Arma(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = pyg.ARMAConv(W, 16, num_stacks=3, num_layers=2, shared_weights=True)
        self.conv2 = pyg.ARMAConv(16, C, num_stacks=3, num_layers=2, shared_weights=True)

    def forward(self, x, edge_index):
        x = F.dropout(F.relu(self.conv1(x, edge_index)), training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class Tagcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = pyg.TAGConv(W, 16), pyg.TAGConv(16, C)

    def forward(self, x, edge_index):
        x = F.dropout(F.relu(self.conv1(x, edge_index)), training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class ClusterGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(W, 16), pyg.SAGEConv(16, C)])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i != len(self.convs) - 1:
                x = F.dropout(F.relu(x), p=0.5, training=self.training)
        return F.log_softmax(x, dim=-1)


class Unimp(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for layer in range(3):
            last = layer == 2
            self.convs.append(
                pyg.TransformerConv(
                    W if layer == 0 else 16, C if last else 8, heads=2, concat=not last, beta=True
                )
            )
            if not last:
                self.norms.append(nn.LayerNorm(16))

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


@pytest.mark.parametrize("make", [Gcn, Gat, Gcn2, Sgc, Tagcn, Arma, ClusterGcn, Unimp])
def test_converted(make):
    data, net = graph(), make().eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 6, model=model, log=False)
    assert torch.allclose(model.predict(clustered), net(data.x, data.edge_index), atol=1e-5)
    assert gas.verify(model, clustered, 2)


@pytest.mark.parametrize("make", [Gcn, Sgc])
def test_what_layers_have_cached_is_left_to_the_module(make):
    data, net = graph(), make(cached=True).eval()
    expected = net(data.x, data.edge_index)  # Its layers have the edges cached.
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 6, model=model, log=False)
    assert torch.allclose(model.predict(clustered, log=False), expected, atol=1e-5)
    assert gas.verify(model, clustered, 2)
    assert torch.equal(net(data.x, data.edge_index), expected)
