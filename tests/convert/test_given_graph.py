"""Models made of modules: equal to these on the graph as it is given, or refused."""

import copy
import sys
import threading
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, scatter, to_edge_index

import gas
from gas.convert.sample import subsample


class Two(torch.nn.Module):
    """Two layers, which may take the first features."""

    def __init__(self, first, last, initial=False):
        super().__init__()
        self.first, self.last, self.initial = first, last, initial

    def forward(self, x, adj_t):
        more = (x,) if self.initial else ()
        return self.last(self.first(x, *more, adj_t).relu(), *more, adj_t)


NETS = {
    "gcn": lambda: Two(pyg.GCNConv(5, 8), pyg.GCNConv(8, 3)),
    "improved": lambda: Two(pyg.GCNConv(5, 8, improved=True), pyg.GCNConv(8, 3, improved=True)),
    "sg": lambda: Two(pyg.SGConv(5, 8, K=2), pyg.SGConv(8, 3)),
    "ssg": lambda: Two(pyg.SSGConv(5, 8, 0.3, K=2), pyg.SSGConv(8, 3, 0.2)),
    "gcn2": lambda: Two(pyg.GCN2Conv(5, 0.1), pyg.GCN2Conv(5, 0.2), initial=True),
    "fa": lambda: Two(pyg.FAConv(5), pyg.FAConv(5), initial=True),
    "appnp": lambda: Two(pyg.APPNP(2, 0.1), pyg.APPNP(2, 0.1)),
    "tag": lambda: Two(pyg.TAGConv(5, 8), pyg.TAGConv(8, 3)),
    "lg": lambda: Two(pyg.LGConv(), pyg.LGConv()),
    "antisymmetric": lambda: Two(pyg.AntiSymmetricConv(5), pyg.AntiSymmetricConv(5)),
}


def matrix_graph(weighted=False, num_nodes=60, dtype=torch.float32):
    """Return a graph given as a matrix, in which every third node has a self-loop."""
    torch.manual_seed(1)
    dense = torch.rand(num_nodes, num_nodes) < 0.1
    dense.fill_diagonal_(False)
    dense[range(0, num_nodes, 3), range(0, num_nodes, 3)] = True
    value = torch.rand(num_nodes, num_nodes, dtype=dtype) + 0.5 if weighted else 1.0
    x = torch.randn(num_nodes, 5, dtype=dtype)
    return Data(x=x, adj_t=(dense.to(dtype) * value).to_sparse_csr())


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", NETS)
def test_loops_of_a_matrix_are_those_of_the_module(kind, weighted):
    data = matrix_graph(weighted, dtype=torch.float64)
    net = NETS[kind]().double().eval()
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = gas.cluster(data, 4, model=model, log=False)
    with torch.no_grad():
        expected = net(data.x, data.adj_t)
    assert torch.allclose(model.predict(graph), expected, rtol=1e-10, atol=1e-12)
    found = gas.verify(model, graph)
    assert found
    assert found.reference == "the uncut graph"
    assert max(found.errors) < 1e-12


def test_edges_with_weights_that_a_module_takes_as_a_matrix():
    given = matrix_graph(weighted=True)
    dst, src = given.adj_t.to_sparse_coo().indices()
    order = torch.randperm(src.numel())
    edge_index, weight = torch.stack([src, dst])[:, order], given.adj_t.values()[order]
    data = Data(x=given.x, edge_index=edge_index, edge_weight=weight)
    net = NETS["gcn"]().eval()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net(given.x, given.adj_t).detach()
    assert torch.allclose(model.predict(graph), expected, atol=1e-5)
    assert gas.verify(model, graph).reference == "the uncut graph"


def test_several_loops_of_one_node():
    rowptr, col = torch.tensor([0, 3, 4, 5]), torch.tensor([0, 0, 1, 0, 2])
    adj_t = torch.sparse_csr_tensor(rowptr, col, torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5]), (3, 3))
    model = gas.to_scalable(NETS["gcn"](), matrix_graph(weighted=True))
    found = model.prepare(Data(x=torch.ones(3, 5), adj_t=adj_t))
    dense = torch.tensor([[4.0, 1, 0], [1, 1, 0], [0, 0, 1.5]])
    scale = dense.sum(dim=1).pow(-0.5)
    out = torch.zeros(3, 3)
    out.index_put_((found.edge_index[1], found.edge_index[0]), found.edge_weight, accumulate=True)
    assert torch.allclose(out, scale[:, None] * dense * scale)


def test_layers_that_take_a_matrix_as_something_else_are_refused():
    """SimpleConv's mean divides by entries, of which a matrix has one for several loops."""
    net = Two(pyg.SimpleConv(), pyg.SimpleConv(aggr="mean", combine_root="self_loop"))
    with pytest.raises(ValueError, match="means or extremes over a matrix of edges that are there"):
        gas.to_scalable(net, matrix_graph())


def wrongly_prepared(data, model):
    """Return the loops of a matrix are kept as those of a list of edges, and no sample is tried."""
    model.transform = T.GCNNorm()
    model._conversion, conversion = None, model._conversion
    graph = gas.cluster(data, 4, model=model, log=False)
    graph[model._mark] = torch.tensor(2)  # As if it were of this model.
    model._conversion = conversion
    return graph


def test_verify_calls_the_module_on_the_graph_as_it_was_given():
    data = matrix_graph()
    model = gas.to_scalable(NETS["gcn"]().eval(), data)
    found = gas.verify(model, wrongly_prepared(data, model))
    assert found.first == len(found.errors) - 1
    assert found.errors[-1] > 0.01
    assert "outputs is the first to differ" in str(found)
    loader = gas.SubgraphLoader(wrongly_prepared(data, model), batch_size=2, log=False)
    assert not gas.verify(model, loader)


PREPARED = "the uncut graph, as prepared for the model"


@pytest.mark.parametrize(
    "change",
    ["copy", "data is gone", "data was written to", "features", "a layer", "folder", "in place"],
)
def test_verify_says_where_the_module_could_not_be_called(change, tmp_path):
    data = matrix_graph()
    model = gas.to_scalable(NETS["gcn"]().eval(), data)
    options = {"in_place": True} if change == "in place" else {}
    if change == "folder":
        options["out"] = tmp_path / "graph"
    graph = gas.cluster(data, 4, model=model, log=False, **options)
    if change == "copy":
        model = copy.deepcopy(model)
    elif change == "data is gone":
        del data
    elif change == "data was written to":
        data.x *= 2
    elif change == "features":
        graph.x = graph.x + 1
    elif change == "a layer":
        model.net.last = copy.deepcopy(model.net.last)
    found = gas.verify(model, graph)
    assert found
    assert found.reference == PREPARED
    assert f"reference: {PREPARED}\n" in str(found)


def test_verify_where_messages_do_not_fit(monkeypatch):
    data = matrix_graph()
    model = gas.to_scalable(NETS["gcn"]().eval(), data)
    graph = gas.cluster(data, 4, model=model, log=False)
    module = sys.modules["gas.scalable.verify"]  # The function has its name.
    monkeypatch.setattr(module, "free_memory", lambda device: 50_000)
    assert gas.verify(model, graph, num_nodes=60).reference == PREPARED


class BySize(pyg.MessagePassing):
    """Adds up neighbours otherwise where there are many nodes."""

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        return out * 2 if x.size(0) > 300 else out


class ByLargest(pyg.MessagePassing):
    """Scales all rows where one of their numbers is large."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x / x.abs().max().clamp(min=100))


def large_graph(largest=1.0):
    data = random_graph(num_nodes=900, num_edges=5000)
    data.x[123, 2] = largest
    return data


@pytest.mark.parametrize("layer", [BySize, ByLargest])
def test_layers_that_look_at_the_whole_graph_are_found_on_the_graph_itself(layer):
    data = large_graph(500.0)
    model = gas.to_scalable(Two(layer(), pyg.SAGEConv(5, 3)), data)
    with pytest.raises(ValueError, match=rf"'first' \({layer.__name__}\) isn't exact on mini-bat"):
        gas.cluster(data, 4, model=model, log=False)


def test_where_no_number_is_large_a_layer_passes():
    data = large_graph()
    model = gas.to_scalable(Two(ByLargest(), pyg.SAGEConv(5, 3)), data)
    assert gas.verify(model, gas.cluster(data, 4, model=model, log=False))


@pytest.mark.parametrize(
    "net",
    [
        lambda: pyg.GCN(5, 8, 3, 4),
        lambda: pyg.GAT(5, 8, 3, 4, heads=2),
        lambda: pyg.GraphSAGE(5, 8, 3, 4, aggr="max", norm="batch"),
        lambda: pyg.PNA(
            5, 8, 3, 4, aggregators=["mean", "max"], scalers=["identity"], deg=torch.ones(9).long()
        ),
    ],
)
def test_a_model_that_is_exact_is_not_refused_for_large_numbers(net):
    """And nothing else is changed by the trial: neither the graph nor random numbers."""
    data = large_graph(1e6)
    data.x[:200] *= 1e4
    model = gas.to_scalable(net(), data)
    state, copied = torch.get_rng_state(), copy.deepcopy(model)  # A copy tries nothing.
    weights = copy.deepcopy(model.state_dict())
    graphs = [gas.cluster(data, 4, model=each, log=False) for each in (model, copied)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    for key, value in graphs[0]:
        assert torch.equal(value, graphs[1][key])


def test_a_sample_of_a_graph_with_more_nodes():
    """It has the largest features, nodes that are connected, and what is theirs."""
    data = random_graph(num_nodes=900, num_edges=5000)
    data.x[123, 2] = 500.0
    data.edge_attr, data.node = torch.arange(5000).float(), torch.arange(900)
    found = subsample(data, ["x", "edge_attr", "node"], 100, 150)
    assert found.num_nodes == 97
    assert 90 < found.num_edges <= 149
    assert found.x.max() == 500
    assert torch.equal(found.x, data.x[found.node])
    ends = data.edge_index[:, found.edge_attr.long()]
    assert torch.equal(found.node[found.edge_index], ends)


class Keeping(Two):
    """It keeps what it has computed, for a look at it."""

    def forward(self, x, adj_t):
        out = super().forward(x, adj_t)
        self.seen = {"last": [out]}
        return out


def test_a_module_that_keeps_its_output_is_tried_on_the_graph():
    data = random_graph()
    net = Keeping(pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3))
    model = gas.to_scalable(net, data)
    kept = net(data.x, data.edge_index)
    assert kept is net.seen["last"][0]
    assert not kept.is_leaf
    for mine in (model, gas.to_scalable(net, data)):
        graph = gas.cluster(data, 6, model=mine, log=False)
        expected = net(data.x, data.edge_index)
        assert torch.allclose(mine.predict(graph), expected, atol=1e-5)


def test_a_module_that_can_be_copied_no_more_is_not_refused_for_that():
    data = random_graph()
    net = NETS["lg"]()
    model = gas.to_scalable(net, data)
    net.lock = threading.Lock()
    gas.cluster(data, 6, model=model, log=False)


class OnMatrix(torch.nn.Module):
    """A module that takes a matrix, whose forward is given."""

    def __init__(self, forward):
        super().__init__()
        self.sage, self.gcn = pyg.SAGEConv(5, 5), pyg.GCNConv(5, 5)
        self.other = pyg.GCNConv(5, 5, add_self_loops=False, improved=True)
        self._forward = (forward,)

    def forward(self, x, adj_t):
        return self._forward[0](self, x, adj_t)


ON_MATRIX = {
    "two normalisations": lambda net, x, adj_t: net.other(net.gcn(x, adj_t).relu(), adj_t),
    "with and without": lambda net, x, adj_t: net.sage(net.gcn(x, adj_t).relu(), adj_t),
    "scaled": lambda net, x, adj_t: net.sage(net.sage(x, adj_t * 2).relu(), adj_t),
    "transposed": lambda net, x, adj_t: adj_t.t().t() @ net.gcn(x, adj_t).relu(),
    "copied": lambda net, x, adj_t: net.gcn(x, adj_t.clone().detach()) * adj_t.is_sparse_csr,
    "reduced": lambda net, x, adj_t: torch.sparse.mm(adj_t, net.sage(x, adj_t).relu(), "mean"),
    "its size": lambda net, x, adj_t: net.gcn(x, adj_t).relu() + adj_t.size(0) / adj_t.shape[0],
    "its values": lambda net, x, adj_t: net.gcn.lin(
        scatter(
            adj_t.values()[:, None] * net.sage(x, adj_t)[adj_t.col_indices()],
            to_edge_index(adj_t)[0][0], 0, x.size(0),
        )
    ),
    "normalised outside": lambda net, x, adj_t: net.sage(
        gcn_norm(adj_t, num_nodes=x.size(0))[0] @ net.sage(x, adj_t), adj_t
    ),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ON_MATRIX)
def test_what_a_module_does_with_a_matrix(name, weighted):
    data = matrix_graph(weighted)
    net = OnMatrix(ON_MATRIX[name]).eval()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net(data.x, data.adj_t).detach()
    assert torch.allclose(model.predict(graph, log=False), expected, rtol=1e-4, atol=1e-5)
    assert gas.verify(model, graph).reference == "the uncut graph"


def test_a_matrix_beside_a_list_is_what_a_module_takes():
    data = matrix_graph(weighted=True)
    data.edge_index = to_edge_index(data.adj_t)[0].flip(0)
    net = NETS["gcn"]().eval()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net(data.x, data.adj_t).detach()
    assert torch.allclose(model.predict(graph, log=False), expected, atol=1e-5)


class Reading(torch.nn.Module):
    """Reads weights where the graph has some."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GraphConv(5, 3)

    def forward(self, data):
        return self.conv(data.x, data.edge_index, data.edge_weight)


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (lambda: pyg.GCN(5, 8, 2, 3), "edge_weight"),
        (lambda: pyg.GAT(5, 8, 2, 3, edge_dim=1), "edge_attr"),
        (Reading, "edge_weight"),
    ],
)
def test_attributes_that_a_model_was_converted_without_are_refused(net, name):
    data = random_graph()
    shape = (data.num_edges, 1) if name == "edge_attr" else (data.num_edges,)
    richer = copy.copy(data).update({name: torch.rand(shape) + 0.1})
    model = gas.to_scalable(net(), data)
    gas.cluster(data, 4, model=model, log=False)
    with pytest.raises(ValueError, match=f"'data' has '{name}', which .* takes, but the model"):
        gas.cluster(richer, 4, model=model, log=False)


@pytest.mark.parametrize("net", [lambda: pyg.GraphSAGE(5, 8, 2, 3), lambda: pyg.GAT(5, 8, 2, 3)])
def test_attributes_that_change_nothing_may_be_new(net):
    data = random_graph()
    model = gas.to_scalable(net(), data)
    data.edge_weight, data.edge_attr = torch.rand(data.num_edges), torch.rand(data.num_edges, 1)
    data.z = torch.rand(3)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert gas.verify(model, graph)


@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
def test_weights_of_a_batch_that_the_model_was_converted_without(layout):
    data, weighted = random_graph(), random_graph()
    weighted.edge_weight = torch.rand(data.num_edges) + 0.1
    loader = gas.SubgraphLoader(gas.cluster(weighted, 4, log=False), layout=layout, log=False)
    model = gas.to_scalable(Reading(), data)
    with pytest.raises(ValueError, match="'data' has 'edge_weight', which Reading takes, but the"):
        model(next(iter(loader)))
    with pytest.raises(ValueError, match="'edge_weight', which GraphConv takes"):
        gas.to_scalable(pyg.GraphConv(5, 3), data)(next(iter(loader)))
    sage = gas.to_scalable(pyg.GraphSAGE(5, 8, 1, 3), data)  # It takes weights, and ignores them.
    sage(next(iter(gas.SubgraphLoader(loader.data, layout="fused", log=False))))
    weighted.edge_weight = torch.ones(data.num_edges)
    loader = gas.SubgraphLoader(gas.cluster(weighted, 4, log=False), layout=layout, log=False)
    model(next(iter(loader)))


@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
@pytest.mark.parametrize("of_copy", [False, True])
def test_weights_of_pyg_are_those_of_a_model_that_normalises_a_graph_without(layout, of_copy):
    data = random_graph()
    net = pyg.GCN(5, 8, 2, 3).eval()
    model = gas.to_scalable(net, data)
    model = copy.deepcopy(model) if of_copy else model
    graph = gas.cluster(T.GCNNorm()(copy.copy(data)), 4, log=False)
    out = model.predict(graph, layout=layout)
    torch.testing.assert_close(out, net(data.x, data.edge_index), atol=1e-5, rtol=1e-5)
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    with pytest.raises(ValueError, match="the graph lacks what this model's layers compute"):
        model.predict(gas.cluster(T.GCNNorm()(data), 4, log=False), layout=layout)
    for prepare in (model.prepare, lambda data: gas.cluster(data, 4, model=model, log=False)):
        with pytest.raises(ValueError, match="'data' has 'edge_weight', which GCN takes, but"):
            prepare(data)


@pytest.mark.parametrize(
    "layer", [pyg.GCNConv, partial(pyg.TAGConv, K=2), partial(pyg.GCNConv, improved=True)]
)
def test_weights_that_were_not_prepared_are_refused(layer):
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    net = pyg.Sequential("x, edge_index", [(layer(5, 3), "x, edge_index -> x")])
    model = gas.to_scalable(net, data)
    for graph in (data, T.GCNNorm()(copy.copy(data))):
        with pytest.raises(ValueError, match="the graph lacks what this model's layers compute"):
            model.predict(gas.cluster(graph, 4, log=False))


class Tutorial(torch.nn.Module):
    """A module that takes a graph with a list of edges."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(5, 8), pyg.GATConv(8, 3)

    def forward(self, data):
        return self.second(self.first(data.x, data.edge_index).relu(), data.edge_index)


class OfEdges(Tutorial):
    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class OfRows(Tutorial):
    def forward(self, x, adj_t):
        return self.second(self.first(x, adj_t).relu(), adj_t)


@pytest.mark.parametrize("of_folder", [False, True])
@pytest.mark.parametrize("kind", [Tutorial, OfEdges])
def test_the_rows_of_a_folder_are_a_list_to_modules_that_take_one(tmp_path, kind, of_folder):
    data = random_graph()
    loops = torch.arange(0, 60, 3).repeat(2)  # Two of each, which a matrix would add up.
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :9], loops.tile(2, 1)], dim=1)
    net = kind().eval()
    out = net(data) if kind is Tutorial else net(data.x, data.edge_index)
    gas.cluster(data, 1, out=tmp_path / "one", log=False)
    one = gas.open_graph(tmp_path / "one")
    model = gas.to_scalable(net, one if of_folder else data)
    graph = gas.cluster(one, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph), out, atol=1e-5, rtol=1e-5)
    gas.cluster(one, 4, model=model, out=tmp_path / "four", log=False)
    found = model.predict(gas.open_graph(tmp_path / "four"))
    torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)


def test_the_rows_of_a_folder_are_a_matrix_to_modules_that_take_one(tmp_path):
    data = matrix_graph()
    net = OfRows().eval()
    gas.cluster(data, 1, out=tmp_path / "one", log=False)
    one = gas.open_graph(tmp_path / "one")
    model = gas.to_scalable(net, one)
    graph = gas.cluster(one, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph), net(data.x, data.adj_t), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
def test_keywords_of_a_call(layout):
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    model = gas.to_scalable(Reading(), data)
    graph = gas.cluster(data, 4, model=model, log=False)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)))
    weight = graph.edge_weight[batch.data.e_id]
    torch.testing.assert_close(model(batch, edge_weight=weight), model(batch))
    graph.edge_weight = 3 * graph.edge_weight
    other = next(iter(gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)))
    torch.testing.assert_close(model(batch, edge_weight=3 * weight), model(other))
    if layout != "edge_index":
        with pytest.raises(ValueError, match="'edge_weight' has shape .*, expected"):
            model(batch, edge_weight=weight[1:])
    torch.testing.assert_close(model(batch, edge_attr=None), model(batch))
    sage = gas.to_scalable(pyg.SAGEConv(5, 3), data)
    for converted, name in ((model, "scale"), (sage, "edge_weight")):
        with pytest.raises(ValueError, match=f"'{name}' is given, which the model doesn't take"):
            converted(batch, **{name: weight})


class Buffered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(5, 3)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * self.scale


def test_buffers_of_the_module_have_the_type_of_the_model():
    data, net = random_graph(), Buffered().eval()
    model = gas.to_scalable(net, data).double()
    assert net.scale.dtype == model.net.scale.dtype == torch.double
    data.x = data.x.double()
    graph = gas.cluster(data, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph), net(data.x, data.edge_index))
    net.scale.fill_(2.0)
    torch.testing.assert_close(model.predict(graph), net(data.x, data.edge_index))
    net.scale = torch.full((3,), 3.0).double()
    net.register_buffer("later", torch.ones(1))
    model.to("cpu")
    assert net.scale[0] == 3
    torch.testing.assert_close(model.predict(graph), net(data.x, data.edge_index))


class Degrees(torch.nn.Module):
    """Divides by degrees, and handles nodes without edges."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GraphConv(5, 3)

    def forward(self, x, edge_index, edge_weight):
        inverse = 1 / degree(edge_index[1], x.size(0))
        inverse = torch.where(torch.isinf(inverse), 0, inverse)
        return self.conv(x, edge_index, edge_weight * inverse[edge_index[1]])


@pytest.mark.parametrize("net", [Degrees, lambda: Two(pyg.GCNConv(5, 8), pyg.SAGEConv(8, 3))])
def test_what_layers_sort_out_is_prepared(net):
    data = random_graph()
    data.edge_index = data.edge_index[:, data.edge_index[1] > 5]
    if net is Degrees:
        data.edge_weight = torch.rand(data.num_edges)
    model = gas.to_scalable(net(), data)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert gas.verify(model, graph)
