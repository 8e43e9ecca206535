"""Parts of published models: encoders, parts that aren't called, checkpoints, SparseTensors."""

import pytest
import torch
import torch_geometric.nn as pyg
from comparisons import check, of_x
from conftest import random_graph
from torch import nn

import gas


@pytest.mark.parametrize("make", [pyg.GAE, pyg.VGAE])
def test_encoders_behind_arguments_without_names(make):
    check(make(pyg.GCN(5, 8, 2, 3)), random_graph(), of_x)


class Deep(nn.Module):
    """Residual layers that PyG checkpoints, or reversible ones."""

    def __init__(self, *parts):
        super().__init__()
        self.lin, self.parts = nn.Linear(5, 8), nn.ModuleList(parts)

    def forward(self, x, edge_index):
        x = self.lin(x)
        for part in self.parts:
            x = part(x, edge_index)
        return x


def residual():
    norm, act = nn.LayerNorm(8), nn.ReLU()
    return pyg.DeepGCNLayer(pyg.GENConv(8, 8), norm, act, dropout=0.1, ckpt_grad=True)


def reversible():
    return pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2)


@pytest.mark.parametrize("part", [residual, reversible])
def test_layers_that_save_memory(part):
    model, _, _ = check(Deep(part(), part()), random_graph(), of_x)
    assert len(model.histories) >= 1


class Switched(nn.Module):
    def __init__(self, attends):
        super().__init__()
        self.conv, self.attends = pyg.SAGEConv(5, 8), attends
        self.attention = pyg.GPSConv(8, pyg.SAGEConv(8, 8), heads=2)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return self.attention(x, edge_index) if self.attends else x


def test_parts_that_are_not_called_do_no_harm():
    check(Switched(attends=False), random_graph(), of_x)
    with pytest.raises(ValueError, match=r"'attention' \(GPSConv\) isn't exact"):
        gas.to_scalable(Switched(attends=True), random_graph())


class OfMatrix(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x, adj_t):
        for conv in self.convs:
            x = conv(x, adj_t).tanh()
        return x


LAYERS = {
    "GCN": lambda: (pyg.GCNConv(5, 8), pyg.GCNConv(8, 3)),
    "GCN, improved": lambda: (pyg.GCNConv(5, 8, improved=True),),
    "SAGE": lambda: (pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)),
    "GIN and GAT": lambda: (pyg.GINConv(nn.Linear(5, 8)), pyg.GATConv(8, 3)),
    "GCN and APPNP": lambda: (pyg.GCNConv(5, 8), pyg.APPNP(2, 0.1)),
}


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_tensors(name, is_weighted):
    from torch_sparse import SparseTensor

    data = random_graph()
    src, dst = torch.unique(torch.cat([data.edge_index, torch.arange(5).expand(2, -1)], 1), dim=1)
    value = torch.rand(src.numel(), dtype=torch.float64) if is_weighted else None
    data.edge_index = None
    data.adj_t = SparseTensor(row=dst, col=src, value=value, sparse_sizes=(60, 60))
    check(OfMatrix(*LAYERS[name]()), data, lambda net, data: net(data.x, data.adj_t))
