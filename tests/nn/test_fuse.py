"""Models of PyG whose layers are replaced."""

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import random_graph
from convs import CONVS, pair

import gas
from gas import nn
from gas.nn import Adjacency


def test_fusing_a_model_of_pyg():
    data = random_graph(directed=False)
    for model in (
        pyg.GCN(5, 8, 3, 4),
        pyg.GAT(5, 8, 3, 4, heads=2),
        pyg.GraphSAGE(5, 8, 3, 4),
        pyg.GIN(5, 8, 3, 4),
        pyg.GAT(5, 8, 3, 4, heads=2, v2=True),
    ):
        model.eval()
        wanted = model(data.x, data.edge_index)
        state = list(model.state_dict())
        assert gas.fuse(model) is model
        assert list(model.state_dict()) == state
        assert torch.allclose(model(data.x, Adjacency.of(data.edge_index, 60)), wanted, atol=1e-5)
        assert {conv.path for conv in model.convs} == {"fused"}
        assert torch.allclose(model(data.x, data.edge_index), wanted, atol=1e-6)


@pytest.mark.parametrize("name", CONVS)
def test_every_layer_is_fused_in_a_model(name):
    theirs, _ = pair(name)
    model = gas.fuse(torch.nn.ModuleList([theirs]))
    assert type(model[0]) is getattr(nn, name.split()[0])


def test_a_compiled_model():
    data = random_graph(directed=False)
    adj = Adjacency.of(data.edge_index, 60)
    model = gas.fuse(pyg.GCN(5, 8, 2, 4)).eval()
    wanted = model(data.x, adj)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(compiled(data.x, adj), wanted, atol=1e-5)
