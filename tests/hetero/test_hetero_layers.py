"""Layers that docs/heterogeneous.md lists as converted are exact; the example runs."""

import pytest
import torch
from conftest import ROOT
from hetero.graphs import SIZES, WIDTHS, bibliography
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GINConv,
    GINEConv,
    GraphConv,
    HANConv,
    HeteroConv,
    Linear,
    NNConv,
    ResGatedGraphConv,
    RGATConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)

import gas

LAYERS = {
    "SAGE": lambda: SAGEConv((-1, -1), 8),
    "SAGE, maxima": lambda: SAGEConv((-1, -1), 8, aggr="max"),
    "GAT": lambda: GATConv((-1, -1), 4, heads=2, add_self_loops=False),
    "GATv2": lambda: GATv2Conv((-1, -1), 8, add_self_loops=False),
    "Graph": lambda: GraphConv((-1, -1), 8),
    "GIN": lambda: GINConv(nn.Sequential(Linear(-1, 8), nn.ReLU(), Linear(8, 8))),
    "Transformer": lambda: TransformerConv((-1, -1), 8),
    "ResGated": lambda: ResGatedGraphConv((-1, -1), 8),
    "GINE": lambda: GINEConv(Linear(8, 8), edge_dim=2),
    "NN": lambda: NNConv((8, 8), 8, Linear(2, 64)),
}
WITH_ATTRIBUTES = ("GINE", "NN")


class Stack(nn.Module):
    """Encoders and two layers of all relations."""

    def __init__(self, data, make, with_attributes):
        super().__init__()
        self.encoders = nn.ModuleDict({kind: Linear(-1, 8) for kind in data.node_types})
        self.convs = nn.ModuleList(
            HeteroConv({kind: make() for kind in data.edge_types}) for _ in range(2)
        )
        self.with_attributes = with_attributes

    def forward(self, x_dict, edge_index_dict, edge_attr_dict=None):
        x_dict = {kind: self.encoders[kind](x) for kind, x in x_dict.items()}
        more = {"edge_attr_dict": edge_attr_dict} if self.with_attributes else {}
        for conv in self.convs:
            x_dict = {k: x.tanh() for k, x in conv(x_dict, edge_index_dict, **more).items()}
        return x_dict


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_exact(name):
    data = bibliography(dtype=torch.double)
    for kind in data.edge_types:
        data[kind].edge_attr = torch.randn(data[kind].num_edges, 2, dtype=torch.double)
    torch.manual_seed(0)
    net = Stack(data, LAYERS[name], name in WITH_ATTRIBUTES).double()
    model = gas.to_scalable(net, data, dtype=torch.double)
    graph = gas.cluster(data, 5, log=False, method="random")
    found = gas.verify(model, graph)
    assert found
    assert max(found.errors) < 1e-12
    pred = model.predict(graph)
    expected = net.eval()(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    for kind, rows in expected.items():
        torch.testing.assert_close(pred[kind], rows)


class Relational(nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.convs = nn.ModuleList([layer(8, 8, 5, **options), layer(8, 4, 5, **options)])

    def forward(self, x, edge_index, edge_type):
        x = self.convs[0](x, edge_index, edge_type).relu()
        return self.convs[1](x, edge_index, edge_type)


@pytest.mark.parametrize("layer", [RGCNConv, RGATConv])
def test_relations_of_one_type_of_nodes(layer):
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(90, 8, generator=generator),
        edge_index=torch.randint(90, (2, 400), generator=generator),
        edge_type=torch.randint(5, (400,), generator=generator),
    )
    model = gas.to_scalable(Relational(layer), data)
    assert gas.verify(model, gas.cluster(data, 4, model=model, log=False, method="random"))


class Attended(nn.Module):
    def __init__(self, data):
        super().__init__()
        metadata = list(SIZES), [("author", "writes", "paper"), ("paper", "appears_in", "venue")]
        self.conv = HANConv(WIDTHS, 8, metadata)
        self.kinds = metadata[1]

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, {kind: edge_index_dict[kind] for kind in self.kinds})


def test_han_with_one_relation_into_each_type():
    data = bibliography()
    torch.manual_seed(0)
    model = gas.to_scalable(Attended(data), data)
    assert gas.verify(model, gas.cluster(data, 4, log=False, method="random"))


@pytest.mark.parametrize("model", ["hgt", "sage"])
def test_the_example(run_script, tmp_path, model):
    options = ["--model", model, "--num-papers", "300", "--num-parts", "4", "--epochs", "10"]
    done = run_script(ROOT / "examples" / "train_hetero.py", *options)
    lines = [line for line in done.out.splitlines() if "epoch" in line]
    scores = [float(line.split("train ")[1].split(" ")[0]) for line in lines]
    assert len(scores) == 2
    assert scores[-1] > 30  # Of eight topics.
