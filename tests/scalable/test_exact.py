"""Layers that aren't exact on mini-batches: refused by name, or right."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import clustered_graph
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator
from user_models import batch_of

import gas

pytestmark = pytest.mark.filterwarnings("ignore:A history was read before it was filled")


class Model(gas.ScalableGNN):
    """One layer to try, between two that are exact."""

    def __init__(self, layer, hidden=4):
        super().__init__(60, hidden, num_layers=3)
        self.convs = torch.nn.ModuleList(
            [pyg.SAGEConv(5, hidden), layer, pyg.SAGEConv(hidden, hidden)]
        )

    def forward(self, x, adj_t, *args, edge_weight=None):
        for history, conv in zip(self.histories, self.convs[:-1], strict=True):
            x = self.push_and_pull(history, conv(x, adj_t), *args)
        return self.convs[-1](x, adj_t)


class Attention(torch.nn.Module):
    """Attention as SGFormer and Polynormer call it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, edge_index):
        return self.attention(x[None], x.new_ones(1, x.size(0), dtype=torch.bool))[0]


class Along(torch.nn.Module):
    """Module over sequences, applied to the nodes as one sequence."""

    def __init__(self, module, times=1, shape=lambda x: x):
        super().__init__()
        self.module, self.times, self.shape = module, times, shape

    def forward(self, x, edge_index):
        out = self.module(*[self.shape(x)] * self.times)
        out = out[0] if isinstance(out, tuple) else out
        return out.reshape(x.size(0), -1)[:, :4]


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = pyg.TGNMemory(60, 1, 4, 4, IdentityMessage(1, 4, 4), LastAggregator())

    def forward(self, x, edge_index):
        return self.memory(torch.arange(x.size(0)))[0]


class Recurrent(torch.nn.Module):
    """Stands in for a layer of a package that isn't installed."""

    __module__ = "torch_geometric_temporal.nn.recurrent.temporalgcn"

    def forward(self, x, edge_index, state=None):
        return x


INEXACT = {
    "gcn": lambda: pyg.GCNConv(4, 4),
    "fused gcn": lambda: gas.nn.GCNConv(4, 4),
    "lg": lambda: pyg.LGConv(),
    "pdn": lambda: pyg.PDNConv(4, 4, 1, 4),
    "tag": lambda: pyg.TAGConv(4, 4, K=1),
    "two hops": lambda: pyg.TAGConv(4, 4, K=2, normalize=False),
    "appnp": lambda: pyg.APPNP(1, 0.1),
    "sg": lambda: pyg.SGConv(4, 4),
    "ssg": lambda: pyg.SSGConv(4, 4, 0.1),
    "arma": lambda: pyg.ARMAConv(4, 4),
    "cheb": lambda: pyg.ChebConv(4, 4, 2),
    "eg": lambda: pyg.EGConv(4, 4, num_heads=2),
    "gated": lambda: pyg.GatedGraphConv(4, 2),
    "mixhop": lambda: pyg.MixHopConv(4, 2, [0, 1]),
    "pan": lambda: pyg.PANConv(4, 4, 2),
    "dna": lambda: pyg.DNAConv(4),
    "hypergraph": lambda: pyg.HypergraphConv(4, 4),
    "both ways": lambda: pyg.DirGNNConv(pyg.SAGEConv(4, 4)),
    "backwards": lambda: pyg.SAGEConv(4, 4, flow="target_to_source"),
    "gps": lambda: pyg.GPSConv(4, pyg.SAGEConv(4, 4)),
    "gps, performer": lambda: pyg.GPSConv(4, pyg.SAGEConv(4, 4), attn_type="performer"),
    "gps, no conv": lambda: pyg.GPSConv(4, None),
    "sgformer": lambda: Attention(SGFormerAttention(4)),
    "polynormer": lambda: Attention(PolynormerAttention(4, 1, 4)),
    "tgn": lambda: Memory(),
    "temporal": lambda: Recurrent(),
    "equilibrium": lambda: pyg.SAGEConv(4, 4, pyg.aggr.EquilibriumAggregation(4, 4, [4], 1)),
    "multihead": lambda: Along(torch.nn.MultiheadAttention(4, 1), 3),
    "multihead, one sequence": lambda: Along(
        torch.nn.MultiheadAttention(4, 1, batch_first=True), 3, lambda x: x[None]
    ),
    "encoder": lambda: Along(torch.nn.TransformerEncoderLayer(4, 1, 8)),
    "gru": lambda: Along(torch.nn.GRU(4, 4)),
    "lstm, nodes in the wrong place": lambda: Along(
        torch.nn.LSTM(4, 4), 1, lambda x: torch.stack([x, x], 1)
    ),
}
ORDERED = {
    "lstm": lambda: pyg.aggr.LSTMAggregation(4, 4),
    "gru": lambda: pyg.aggr.GRUAggregation(4, 4),
    "mlp": lambda: pyg.aggr.MLPAggregation(4, 4, 60, num_layers=1),
    "lcm": lambda: pyg.aggr.LCMAggregation(4, 4),
    "patches": lambda: pyg.aggr.PatchTransformerAggregation(4, 4, 3, 4, 1),
}


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_layers_are_refused(name):
    model, graph = Model(INEXACT[name]()), clustered_graph()
    batch, *args = batch_of(graph, layout="edge_index")
    with pytest.raises(ValueError, match=r"'convs.1(\.\w+)*' \(\w+\) isn't exact .*: it .*:"):
        model(batch.x, batch.edge_index, *args)
    assert not any(history.written.any() for history in model.histories)
    with pytest.raises(ValueError, match=r"isn't exact on mini-batches"):
        model(loader=gas.EvalSubgraphLoader(*graph, layout="edge_index", log=False))
    assert not any(layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize("name", ORDERED)
def test_aggregations_by_the_order_of_edges_are_refused(name):
    model = Model(pyg.SAGEConv(4, 4, ORDERED[name]()))
    batch, *args = batch_of(clustered_graph(), layout="edge_index")
    with pytest.raises(ValueError, match=r"'convs.1.aggr_module' .* the order in which a node's"):
        model(batch.x, batch.edge_index, *args)


class Sequences(torch.nn.Module):
    """A sequence of each node's own."""

    def __init__(self, module, times):
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x, edge_index):
        out = self.module(*[torch.stack([x, x.relu(), -x], dim=1)] * self.times)
        return (out[0] if isinstance(out, tuple) else out)[:, -1]


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda: torch.nn.GRU(4, 4, batch_first=True), 1),
        (lambda: torch.nn.LSTM(4, 4, batch_first=True), 1),
        (lambda: torch.nn.MultiheadAttention(4, 2, batch_first=True), 3),
        (lambda: torch.nn.TransformerEncoderLayer(4, 1, 8, batch_first=True), 1),
    ],
)
def test_a_sequence_for_each_node_is_exact(make, times):
    (data, ptr), model = clustered_graph(), Model(Sequences(make(), times)).eval()
    whole = model(data.x, data.edge_index, fill=True).detach()
    loader = gas.SubgraphLoader(data, ptr, 2, layout="edge_index", log=False)
    for batch in loader:
        out = model(batch, push=False)
        assert torch.allclose(out, whole[batch.n_id[: batch.batch_size]], atol=1e-6)


@pytest.mark.parametrize("name", ["gcn", "appnp", "gps", "gps, performer", "gru", "multihead"])
def test_they_are_exact_on_the_whole_graph(name):
    (data, _), model = clustered_graph(), Model(INEXACT[name]())
    loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), layout="edge_index", log=False)
    batch, *args = next(iter(loader))
    whole = model(data.x, data.edge_index)
    assert torch.allclose(model(batch.x, batch.edge_index, *args), whole, atol=1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        pyg.GraphNorm,
        pyg.PairNorm,
        pyg.InstanceNorm,
        pyg.MeanSubtractionNorm,
        pyg.GraphSizeNorm,
        pyg.LayerNorm,
        lambda width: pyg.DiffGroupNorm(width, 2),
    ],
)
def test_norms_over_the_graph_are_refused(norm):
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            try:
                self.norm = norm(4)
            except TypeError:
                self.norm = norm()

        def forward(self, x, edge_index):
            return self.norm(x)

    batch, *args = batch_of(clustered_graph(), layout="edge_index")
    with pytest.raises(ValueError, match=r"'convs.1.norm' \(\w+\) isn't exact"):
        Model(Normed())(batch.x, batch.edge_index, *args)


def test_norms_by_node_pass():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = pyg.LayerNorm(4, mode="node")

        def forward(self, x, edge_index):
            return self.norm(x)

    batch, *args = batch_of(clustered_graph(), layout="edge_index")
    Model(Normed())(batch.x, batch.edge_index, *args)


class Normed(gas.ScalableGNN):
    """Batch norm behind a convolution, as on a full graph."""

    def __init__(self, norm, square):
        super().__init__(60, 4, num_layers=2)
        self.conv, self.norm, self.last = pyg.SAGEConv(5, 4), norm(4), pyg.SAGEConv(4, 3)
        self.square = square

    def forward(self, x, adj_t, *args):
        def ends(x):
            return x if self.square or not args else (x, x[: args[0]])

        x = self.norm(self.conv(ends(x), adj_t)).relu()
        x = self.push_and_pull(self.histories[0], x, *args)
        return self.last(ends(x), adj_t)


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d, pyg.BatchNorm])
@pytest.mark.parametrize("layout", ["edge_index", "csr"])
def test_batch_norm_counts_own_rows_alone(norm, layout):
    """On square batches, as on those without halo rows."""
    graph = clustered_graph()
    square, bipartite = Normed(norm, square=True), Normed(norm, square=False)
    bipartite.load_state_dict(square.state_dict())
    found, wanted = [], []
    for model, options, out in (
        (square, {"layout": layout, "bipartite": False}, found),
        (bipartite, {"layout": "csr"}, wanted),
    ):
        for history in model.histories:
            history.push(torch.zeros(60, 4))
        batch, *args = batch_of(graph, **options)
        assert batch.num_nodes > args[0]
        y = model(batch.x, batch.edge_index if layout == "edge_index" and model is square
                  else batch.adj_t, *args)  # fmt: skip
        y.pow(2).sum().backward()
        out += [y, *model.buffers(), *(p.grad for p in model.parameters())]
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=1e-5)


def test_batch_norm_of_inputs_normalises_the_halo_alike():
    norm = torch.nn.BatchNorm1d(5)
    seen = []

    class First(gas.ScalableGNN):
        def __init__(self):
            super().__init__(60, 4, num_layers=2)
            self.norm, self.conv, self.last = norm, pyg.SAGEConv(5, 4), pyg.SAGEConv(4, 3)

        def forward(self, x, adj_t, *args):
            x = self.norm(x)
            seen.append(x)
            x = self.push_and_pull(self.histories[0], self.conv(x, adj_t), *args)
            return self.last(x, adj_t)

    batch, *args = batch_of(clustered_graph(), layout="edge_index")
    own = batch.x[: args[0]]
    twin = copy.deepcopy(norm)
    First()(batch.x, batch.edge_index, *args)
    assert torch.allclose(seen[0][: args[0]], twin(own), atol=1e-6)
    assert torch.allclose(norm.running_mean, twin.running_mean)
    spread = (own.var(dim=0, unbiased=False) + norm.eps).sqrt()
    assert torch.allclose(seen[0], (batch.x - own.mean(dim=0)) / spread, atol=1e-5)
