"""Positions of the histories of a converted model, and the values stored in them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import gas

N, W = 80, 6
pytestmark = pytest.mark.filterwarnings("ignore:A history was read before it was filled")


def graph(**attributes):
    torch.manual_seed(0)
    return Data(x=torch.randn(N, W), edge_index=torch.randint(N, (2, 400))).update(attributes)


class Dropped(nn.Module):
    """Model whose dropped-out rows go into a layer and around it."""

    def __init__(self, functional=True):
        super().__init__()
        self.a, self.hop = pyg.SAGEConv(W, W), pyg.SimpleConv()
        self.drop = nn.Dropout(0.5)
        self.functional = functional

    def forward(self, x, edge_index):
        h = self.a(x, edge_index).exp()  # Zero nowhere.
        d = F.dropout(h, 0.5, training=self.training) if self.functional else self.drop(h)
        return torch.cat([h, d, self.hop(d, edge_index)], dim=-1)


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
def test_histories_stand_before_dropout_and_one_mask_serves_every_use(functional, layout):
    """Of a graph of self-loops alone, in which a hop changes nothing."""
    data = graph(edge_index=torch.arange(N).repeat(2, 1))
    model = gas.to_scalable(Dropped(functional), data)
    clustered = gas.cluster(data, 4, model=model, method="random", log=False)
    assert len(model.histories) == 1
    for batch in gas.SubgraphLoader(clustered, layout=layout, log=False):
        out = model(batch)
        h, d, hop = out.detach().split(W, dim=1)
        stored = model.histories[0].emb[batch.n_id[: batch.batch_size]]
        assert torch.equal(stored, h)
        assert 0.3 < float((d == 0).float().mean()) < 0.7
        assert torch.allclose(hop, d)
        assert torch.allclose(d[d != 0], 2 * h[d != 0])
    model.eval()
    batch = next(iter(gas.SubgraphLoader(clustered, layout=layout, log=False)))
    h, d, _ = model(batch).split(W, dim=1)
    assert torch.equal(h, d)


def test_dropout_is_ours():
    code = gas.to_scalable(Dropped(), graph()).net.code
    assert "gas_convert_tracing_scope_dropout" in code
    assert "functional" not in code
    model = gas.to_scalable(Dropped(functional=False), graph())
    assert isinstance(model.net.drop, gas.nn.Dropout)


def test_halo_rows_are_the_histories_own():
    """They are dropped where a layer reads tensors, and spared where it reads Rows."""
    data = graph()
    model = gas.to_scalable(Dropped(), data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    model.histories[0].push(torch.ones(N, W))
    batch = next(iter(gas.SubgraphLoader(clustered, layout="fused", log=False)))
    model.eval()
    out = model(batch, push=False)
    h, _, hop = out.split(W, dim=1)
    dense = batch.adj_t.to_torch_sparse().to_dense()
    rows = torch.cat([h, torch.ones(batch.num_nodes - batch.batch_size, W)])
    assert torch.allclose(hop, dense @ rows, rtol=1e-5)


def test_one_history_for_layers_that_read_the_same():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (pyg.SAGEConv(W, W) for _ in range(3))

        def forward(self, x, edge_index):
            h = self.a(x, edge_index).relu()
            return self.b(h, edge_index) + self.c(h, edge_index)

    assert len(gas.to_scalable(Two(), graph()).histories) == 1


def test_what_follows_from_the_features_needs_no_history():
    class Start(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.conv = nn.Linear(W, W), pyg.SAGEConv(W, W)

        def forward(self, x, edge_index):
            h = F.dropout(self.lin(x).relu(), 0.5, self.training)
            return self.conv(h, edge_index) + h

    model = gas.to_scalable(Start(), graph())
    assert len(model.histories) == 0
    assert model.num_layers == 1


def test_widths_are_those_of_the_layers():
    class Widths(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = pyg.SAGEConv(W, 9), pyg.SAGEConv(9, 5), pyg.SAGEConv(5, 2)

        def forward(self, x, edge_index):
            return self.c(self.b(self.a(x, edge_index), edge_index), edge_index)

    model = gas.to_scalable(Widths(), graph())
    assert [history.embedding_dim for history in model.histories] == [9, 5]


def test_print_draws_histories_and_layers():
    data = graph()
    text = repr(gas.to_scalable(pyg.GCN(W, 8, 2, 3), data))
    assert text == (
        f"GCN: 1 history of {N} nodes, of a graph after Preparation(gcn_norm)\n"
        "  convs.0: GCNConv(6, 8)  [fused]\n"
        "    history 0: 'act', 8 wide\n"
        "  convs.1: GCNConv(8, 3)  [fused]"
    )
    text = repr(gas.to_scalable(pyg.Sequential("x, edge_index", [
        (pyg.GENConv(W, W), "x, edge_index -> x"), (pyg.CGConv(W), "x, edge_index -> x"),
    ]), data))  # fmt: skip
    assert "module_0: GENConv(6, 6, aggr=softmax)  [pair]" in text


def test_options_go_to_the_model(tmp_path):
    model = gas.to_scalable(
        pyg.GraphSAGE(W, 8, 3), graph(), store="disk", path=tmp_path, dtype=torch.bfloat16
    )
    assert all(history.codec.name == "bfloat16" for history in model.histories)
    model.close()


def test_without_data():
    data, net = graph(), pyg.GraphSAGE(W, 8, 2, 3).eval()
    model = gas.to_scalable(net, num_nodes=N)
    out = model.predict(gas.cluster(data, 4, log=False))
    assert torch.allclose(out, net(data.x, data.edge_index), atol=1e-5)


def test_the_module_is_as_it_was():
    data, net = graph(), pyg.GCN(W, 8, 2, 3, dropout=0.5, norm="batch_norm")
    net.convs[0].eval()
    before = copy.deepcopy(net.state_dict())
    modes = [module.training for module in net.modules()]
    state, model = torch.get_rng_state(), gas.to_scalable(net, data)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert [type(conv) for conv in net.convs] == [pyg.GCNConv, pyg.GCNConv]
    assert all(conv.normalize for conv in net.convs)
    assert [m.training for m in model.net.convs] == [False, True]


def test_copies_and_pickles():
    data = graph()
    model = gas.to_scalable(pyg.GCN(W, 8, 2, 3), data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    out = model.predict(clustered)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.predict(clustered), out)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}


def test_another_graph_and_full_batch():
    data, other = graph(), graph()
    other.x = torch.randn(N, W)
    net = pyg.GraphSAGE(W, 8, 3, 4, jk="cat").eval()
    model = gas.to_scalable(net, data)
    twin = model.for_graph(N)
    out = twin.predict(gas.cluster(other, 4, model=twin, log=False))
    assert torch.allclose(out, net(other.x, other.edge_index), atol=1e-5)
    assert torch.allclose(model(data.x, data.edge_index), net(data.x, data.edge_index), atol=1e-5)
    assert not model.histories[0].written.any()


def test_a_batch_taken_apart():
    data = graph(edge_attr=torch.randn(400, 2))
    net = pyg.Sequential("x, edge_index, edge_attr", [
        (pyg.GINEConv(nn.Linear(W, W), edge_dim=2), "x, edge_index, edge_attr -> x"),
        (pyg.TransformerConv(W, 3, edge_dim=2), "x, edge_index, edge_attr -> x"),
    ])  # fmt: skip
    model = gas.to_scalable(net, data)
    for layout in ("fused", "edge_index"):
        batch = next(
            iter(gas.SubgraphLoader(gas.cluster(data, 4, log=False), layout=layout, log=False))
        )
        adj_t = batch.data.edge_index if layout == "edge_index" else batch.adj_t
        whole = model(batch, push=False)
        apart = model(batch.x, adj_t, *batch[1:], edge_attr=batch.edge_attr, push=False)
        assert torch.equal(whole, apart)


def test_reset_parameters_are_the_modules():
    net = pyg.GraphSAGE(W, 8, 2, 3)
    model, before = gas.to_scalable(net, graph()), net.convs[0].lin_l.weight.clone()
    model.reset_parameters()
    assert not torch.equal(net.convs[0].lin_l.weight, before)


def test_attributes_that_the_layers_cannot_take_are_left_out():
    """PyG's models name edge_attr whether or not their layers were built for any."""
    data = graph(edge_attr=torch.randn(400, 2))
    for net in (pyg.GAT(W, 8, 2, 3), pyg.PNA(W, 8, 2, 3, aggregators=["mean"], scalers=["identity"],
                                             deg=torch.tensor([1, 2, 3]))):  # fmt: skip
        model = gas.to_scalable(net.eval(), data)
        out = model.predict(gas.cluster(data, 4, model=model, log=False))
        assert torch.allclose(out, net(data.x, data.edge_index), atol=1e-5)
    net = pyg.GAT(W, 8, 2, 3, edge_dim=2).eval()
    model = gas.to_scalable(net, data)
    out = model.predict(gas.cluster(data, 4, model=model, log=False))
    expected = net(data.x, data.edge_index, edge_attr=data.edge_attr)
    assert torch.allclose(out, expected, atol=1e-5)


class Optional(nn.Module):
    """Takes weights and features of edges, if there are some."""

    def __init__(self):
        super().__init__()
        self.a, self.b = pyg.GraphConv(W, 8), pyg.GATv2Conv(8, 3, edge_dim=2)

    def forward(self, x, edge_index, edge_weight=None, edge_attr=None):
        return self.b(self.a(x, edge_index, edge_weight), edge_index, edge_attr)


@pytest.mark.parametrize(("net", "attributes", "name"), [
    (pyg.GCN(W, 8, 2, 3), dict(edge_weight=torch.rand(400).double()), "edge_weight"),
    (pyg.GAT(W, 8, 2, 3, edge_dim=2), dict(edge_attr=torch.rand(400, 2).double()), "edge_attr"),
    (pyg.GAT(W, 8, 2, 3, edge_dim=2), dict(edge_attr=torch.rand(400, 3)), "edge_attr"),
    (Optional(), dict(edge_weight=torch.rand(400), edge_attr=torch.rand(400, 3)), "edge_attr"),
])  # fmt: skip
def test_attributes_that_do_not_fit_the_layers_are_not_left_out(net, attributes, name):
    """Refuse edges that the model ignores; it used to ignore their weights silently."""
    with pytest.raises(ValueError, match=f"without '{name}' it can: .*, del data.{name}"):
        gas.to_scalable(net, graph(**attributes))


def test_inference_is_linear_in_layers():
    """Each layer is computed once for every batch, not again for each history after it."""
    data, layers = graph(), 12
    net = pyg.GraphSAGE(W, 8, layers, 3, jk="cat").eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    model.predict(clustered)  # Whether it fills every history is looked at once, by forward.
    calls = []
    for conv in model.net.convs:
        conv.register_forward_hook(lambda *_: calls.append(1))
    out = model.predict(clustered)
    assert len(calls) == 4 * layers
    assert torch.allclose(out, net(data.x, data.edge_index), atol=1e-5)


def test_inference_after_moving_and_replacing_weights():
    data = graph()
    layers = [(pyg.AntiSymmetricConv(W), "x, edge_index -> x") for _ in range(2)]
    net = pyg.Sequential("x, edge_index", layers).eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    model.predict(clustered)
    model, data.x = model.double(), data.x.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    clustered = gas.cluster(data, 4, model=model, log=False)
    expected = pyg.Sequential.forward(net.double(), data.x, data.edge_index)
    assert torch.allclose(model.predict(clustered), expected, atol=1e-5)


class HalfOff(nn.Module):
    """A module that drops by itself, as a feed-forward part of a transformer does."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(W, W)

    def forward(self, x):
        return F.dropout(self.lin(x).exp(), 0.5, self.training)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    "part", [HalfOff, Noise, nn.RReLU, lambda: pyg.MLP([W, W, W], dropout=0.5)]
)
def test_what_a_part_draws_is_not_stored(part):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.part, self.b = pyg.SAGEConv(W, W), part(), pyg.SAGEConv(W, W)

        def forward(self, x, edge_index):
            return self.b(self.part(self.a(x, edge_index)), edge_index)

    model = gas.to_scalable(Net(), graph())
    cut = gas.cluster(graph(), 2, model=model, log=False)
    stored = []
    for _ in range(2):
        for batch in gas.SubgraphLoader(cut, log=False):
            model(batch)
        stored.append(model.histories[0].emb.clone())
    assert torch.equal(*stored)
