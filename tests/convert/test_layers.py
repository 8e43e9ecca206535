"""Every convolution and normalisation that PyG exports: exact on mini-batches, or refused."""

import inspect

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import gas

N, E = 150, 700
W = 8

mlp = nn.Linear


def graph():
    torch.manual_seed(0)
    return Data(
        x=torch.randn(N, W),
        edge_index=torch.randint(N, (2, E)),
        pos=torch.randn(N, 3),
        normal=nn.functional.normalize(torch.randn(N, 3), dim=1),
        node_type=torch.randint(2, (N,)),
        edge_type=torch.randint(3, (E,)),
        edge_attr=torch.rand(E, 2),
        edge_weight=torch.rand(E) + 0.1,
    )


DEGREES = torch.bincount(torch.bincount(graph().edge_index[1], minlength=N))

# What each layer gives is compared with what PyG gives on the whole graph: exact.
EXACT = {
    "SimpleConv": lambda: pyg.SimpleConv("mean", "self_loop"),
    "GCNConv": lambda: pyg.GCNConv(W, W),
    "SAGEConv": lambda: pyg.SAGEConv(W, W, aggr="max"),
    "GraphConv": lambda: pyg.GraphConv(W, W),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(W, W, edge_dim=2),
    "GATConv": lambda: pyg.GATConv(W, W, heads=2, concat=False, edge_dim=2),
    "GATv2Conv": lambda: pyg.GATv2Conv(W, W, heads=2, concat=False, edge_dim=2),
    "TransformerConv": lambda: pyg.TransformerConv(W, W, edge_dim=2, beta=True),
    "AGNNConv": lambda: pyg.AGNNConv(),
    "TAGConv": lambda: pyg.TAGConv(W, W),
    "GINConv": lambda: pyg.GINConv(mlp(W, W), train_eps=True),
    "GINEConv": lambda: pyg.GINEConv(mlp(W, W), edge_dim=2),
    "SGConv": lambda: pyg.SGConv(W, W, K=2),
    "SSGConv": lambda: pyg.SSGConv(W, W, 0.1, K=2),
    "APPNP": lambda: pyg.APPNP(3, 0.1),
    "MFConv": lambda: pyg.MFConv(W, W),
    "RGCNConv": lambda: pyg.RGCNConv(W, W, 3, num_bases=2),
    "FastRGCNConv": lambda: pyg.FastRGCNConv(W, W, 3),
    "RGATConv": lambda: pyg.RGATConv(W, W, 3, edge_dim=2),
    "PointNetConv": lambda: pyg.PointNetConv(mlp(W + 3, W)),
    "GMMConv": lambda: pyg.GMMConv(W, W, 2, 3),
    "NNConv": lambda: pyg.NNConv(W, W, mlp(2, W * W)),
    "CGConv": lambda: pyg.CGConv(W, 2),
    "EdgeConv": lambda: pyg.EdgeConv(mlp(2 * W, W)),
    "PPFConv": lambda: pyg.PPFConv(mlp(W + 4, W)),
    "FeaStConv": lambda: pyg.FeaStConv(W, W, heads=2),
    "PointTransformerConv": lambda: pyg.PointTransformerConv(W, W),
    "LEConv": lambda: pyg.LEConv(W, W),
    "PNAConv": lambda: pyg.PNAConv(W, W, ["mean", "std"], ["attenuation"], DEGREES, edge_dim=2),
    "ClusterGCNConv": lambda: pyg.ClusterGCNConv(W, W, diag_lambda=0.5),
    "GENConv": lambda: pyg.GENConv(W, W, edge_dim=2),
    "GCN2Conv": lambda: pyg.GCN2Conv(W, 0.1, 0.5, 1),
    "WLConvContinuous": lambda: pyg.WLConvContinuous(),
    "FiLMConv": lambda: pyg.FiLMConv(W, W, 3),
    "SuperGATConv": lambda: pyg.SuperGATConv(W, W),
    "FAConv": lambda: pyg.FAConv(W),
    "GeneralConv": lambda: pyg.GeneralConv(W, W, 2, attention=True),
    "HEATConv": lambda: pyg.HEATConv(W, W, 2, 3, 2, 2, 2, concat=False),
    "LGConv": lambda: pyg.LGConv(),
    "PointGNNConv": lambda: pyg.PointGNNConv(mlp(W, 3), mlp(W + 3, W), mlp(W, W)),
    "EGConv": lambda: pyg.EGConv(W, W, ["mean", "max"], num_heads=2),
    "EGConv-symnorm": lambda: pyg.EGConv(W, W, num_heads=2),
    "DirGNNConv": lambda: pyg.DirGNNConv(pyg.SAGEConv(W, W)),
    "DirGNNConv-GCN": lambda: pyg.DirGNNConv(pyg.GCNConv(W, W)),
    "ChebConv": lambda: pyg.ChebConv(W, W, 2),
    "MixHopConv": lambda: pyg.MixHopConv(W, W // 2, [1, 2]),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(W, 1),
    "GatedGraphConv-hops": lambda: pyg.GatedGraphConv(W, 3),
    "AntiSymmetricConv": lambda: pyg.AntiSymmetricConv(W),
    "ARMAConv": lambda: pyg.ARMAConv(W, W),
    "SAGEConv-reversed": lambda: pyg.SAGEConv(W, W, flow="target_to_source"),
    "GCNConv-reversed": lambda: pyg.GCNConv(W, W, flow="target_to_source"),
    "GATConv-reversed": lambda: pyg.GATConv(W, W, flow="target_to_source"),
    "ChebConv-reversed": lambda: pyg.ChebConv(W, W, 3, flow="target_to_source"),
    "ChebConv-no-hop": lambda: pyg.ChebConv(W, W, 1),
}
REFUSED = {
    "PDNConv": (lambda: pyg.PDNConv(W, W, 2, 4), "degrees of the batch"),
    "HypergraphConv": (lambda: pyg.HypergraphConv(W, W), "to hyperedges and back"),
    "PANConv": (lambda: pyg.PANConv(W, W, 2), "."),
    "DNAConv": (lambda: pyg.DNAConv(W), "."),
    "MeshCNNConv": (lambda: pyg.MeshCNNConv(W, W), "."),
    "GPSConv": (lambda: pyg.GPSConv(W, pyg.SAGEConv(W, W)), r"'layer' \(GPSConv\).* all nodes"),
    "GPSConv-performer": (
        lambda: pyg.GPSConv(W, pyg.GINEConv(mlp(W, W)), attn_type="performer"),
        r"'layer' \(GPSConv\).* all nodes",
    ),
    "GPSConv-global": (lambda: pyg.GPSConv(W, None), r"'layer' \(GPSConv\).* all nodes"),
}
# Of point clouds, which have no edges; of typed graphs; of packages that aren't installed.
ELSEWHERE = [
    "MessagePassing",
    "CuGraphSAGEConv",
    "CuGraphGATConv",
    "CuGraphRGCNConv",
    "FusedGATConv",
    "GravNetConv",
    "SplineConv",
    "DynamicEdgeConv",
    "XConv",
    "SignedConv",
    "WLConv",
    "HGTConv",
    "HeteroConv",
    "HANConv",
]


class Net(nn.Module):
    """A layer between two of SAGE, given what it takes."""

    def __init__(self, layer, takes):
        super().__init__()
        self.a, self.layer, self.b = pyg.SAGEConv(W, W), layer, pyg.SAGEConv(W, W)
        self.takes = takes

    def forward(self, x, edge_index, pos, normal, node_type, edge_type, edge_attr, edge_weight):
        given = dict(
            edge_index=edge_index, hyperedge_index=edge_index, pos=pos, normal=normal,
            node_type=node_type, edge_type=edge_type, edge_attr=edge_attr, edge_weight=edge_weight,
        )  # fmt: skip
        first = x
        x = self.a(x, edge_index).relu()
        given.update(x=x, x_0=first)
        x = self.layer(*[given[name] for name in self.takes])
        return self.b(x, edge_index)


def net_of(layer):
    """Make a model with a layer that is given weights, if it takes them and doesn't normalise."""
    known = "x x_0 edge_index hyperedge_index pos normal node_type edge_type edge_attr edge_weight"
    names = [name for name in inspect.signature(layer.forward).parameters if name in known.split()]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():  # Some begin with zeros.
            parameter.normal_(0, 0.5)
    return Net(layer, names)


class Alone(nn.Module):
    """A layer in front of one that takes the same graph, normalised."""

    def __init__(self, layer, takes):
        super().__init__()
        self.a, self.layer = nn.Linear(W, W), layer
        self.takes = takes

    def forward(self, x, edge_index, edge_weight):
        first = self.a(x).relu()
        x = first
        for _ in range(2):
            given = dict(x=x, x_0=first, edge_index=edge_index, edge_weight=edge_weight)
            x = self.layer(*[given[name] for name in self.takes])
        return x


NORMALISING = ("GCNConv", "GCN2Conv", "FAConv", "LGConv", "TAGConv", "SGConv", "SSGConv", "APPNP",
               "AntiSymmetricConv")  # fmt: skip


def test_every_layer_of_pyg_is_here():
    covered = {name.partition("-")[0] for name in (*EXACT, *REFUSED)}
    missing = set(pyg.conv.__all__) - covered - set(ELSEWHERE)
    assert not missing


@pytest.mark.parametrize("name", EXACT)
def test_exact_layers(name):
    data, layer = graph(), EXACT[name]()
    net = net_of(layer)
    if name in NORMALISING:
        unweighted = name in ("AntiSymmetricConv", "FAConv")  # They take none.
        net = Alone(layer, [n for n in net.takes if n != "edge_weight" or not unweighted])
    net.eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 6, model=model, log=False)
    names = [n for n in inspect.signature(net.forward).parameters if n != "edge_index"]
    with torch.no_grad():
        whole = net(edge_index=data.edge_index, **{name: data[name] for name in names})
    for layout in ("fused", "edge_index"):
        out = model.predict(clustered, 2, layout=layout)
        assert float((out - whole).norm() / whole.norm()) < 2e-5, layout


@pytest.mark.parametrize("name", REFUSED)
def test_refused_layers(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(net_of(make()), graph())


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.a, self.norm, self.b = pyg.SAGEConv(W, W), norm, pyg.SAGEConv(W, W)

    def forward(self, x, edge_index):
        return self.b(self.norm(self.a(x, edge_index)), edge_index)


NORMS = {
    "BatchNorm": (lambda: pyg.BatchNorm(W), True),
    "InstanceNorm": (lambda: pyg.InstanceNorm(W), False),
    "LayerNorm": (lambda: pyg.LayerNorm(W), False),
    "LayerNorm-node": (lambda: pyg.LayerNorm(W, mode="node"), True),
    "GraphNorm": (lambda: pyg.GraphNorm(W), False),
    "GraphSizeNorm": (lambda: pyg.GraphSizeNorm(), False),
    "PairNorm": (lambda: pyg.PairNorm(), False),
    "MeanSubtractionNorm": (lambda: pyg.MeanSubtractionNorm(), False),
    "DiffGroupNorm": (lambda: pyg.DiffGroupNorm(W, 2), False),
}


def test_every_norm_of_pyg_is_here():
    typed = {"HeteroBatchNorm", "HeteroLayerNorm", "MessageNorm"}  # Of other inputs.
    assert set(pyg.norm.__all__) - {name.partition("-")[0] for name in NORMS} == typed


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    make, exact = NORMS[name]
    net, data = Normed(make()), Data(x=graph().x, edge_index=graph().edge_index)
    if not exact:
        with pytest.raises(ValueError, match="isn't exact on mini-batches: it normalises by"):
            gas.to_scalable(net, data)
        return
    model = gas.to_scalable(net.eval(), data)
    out = model.predict(gas.cluster(data, 6, model=model, log=False))
    assert torch.allclose(out, net(data.x, data.edge_index), atol=1e-5)
