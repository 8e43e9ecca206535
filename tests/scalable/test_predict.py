"""``model(batch)`` and ``model.predict(graph)``."""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.nn import GCNConv

import gas

LAYOUTS = ["csr", "edge_index", "fused"]


pytestmark = pytest.mark.filterwarnings("ignore:A history was read before it was filled")


def gat(num_nodes, i, h, o, num_layers):
    return gas.models.GAT(num_nodes, i, h, o, 2, 1, num_layers)


def make(cls=gas.models.GCN, **kwargs):
    torch.manual_seed(0)
    data = random_graph()
    model = cls(60, 5, 8, 3, num_layers=3, **kwargs).eval()
    return data, model, gas.cluster(data, 6, model=model, log=False)


class Weighted(gas.ScalableGNN):
    """Takes what a batch has by name."""

    transform = T.GCNNorm()

    def __init__(self):
        super().__init__(60, 8, 2)
        self.convs = torch.nn.ModuleList(
            GCNConv(i, o, normalize=False) for i, o in ((5, 8), (8, 3))
        )

    def forward(self, x, edge_index, *args, edge_weight=None, scale=None):
        x = self.convs[0](x, edge_index, edge_weight).relu()
        x = self.push_and_pull(self.histories[0], x, *args)
        out = self.convs[1](x, edge_index, edge_weight)
        return out if scale is None else out * scale


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", [gas.models.GCN, gas.models.GraphSAGE, gat])
def test_a_batch_is_enough(cls, layout):
    _, model, graph = make(cls)
    twin = model.for_graph(60)
    loader = gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)
    for batch in loader:
        x, adj_t, kwargs = twin.inputs_of(batch.data)
        assert torch.equal(model(batch), twin(x, adj_t, *batch[1:], **kwargs))
    for mine, other in zip(model.histories, twin.histories, strict=True):
        assert torch.equal(mine.emb, other.emb)


def test_arguments_beside_a_batch():
    torch.manual_seed(0)
    model = Weighted().eval()
    graph = gas.cluster(random_graph(), 6, model=model, log=False)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, layout="edge_index", log=False)))
    out = model(batch)
    before = model.histories[0].emb.clone()
    assert torch.equal(model(batch, scale=2.0, push=False), 2 * out)
    assert not torch.equal(model(batch, edge_weight=None, push=False), out)  # One's own counts.
    assert torch.equal(model.histories[0].emb, before)
    for given in ({"adj_t": batch.edge_index}, {"batch_size": 3}, {"n_id": batch.n_id}):
        with pytest.raises(ValueError, match="a mini-batch brings its own adjacency and ids"):
            model(batch, **given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", [gas.models.GCN, gas.models.GraphSAGE, gat])
def test_predictions_have_the_order_of_the_graph_that_was_given(cls, layout):
    data, model, graph = make(cls)
    prepared = model.prepare(data)
    expected = model(prepared.x, prepared.edge_index, edge_weight=prepared.get("edge_weight"))
    out = model.predict(graph, batch_size=2, layout=layout)
    assert not torch.equal(graph.perm, torch.arange(60))
    assert torch.allclose(out, expected, atol=1e-5)
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, layout=layout, log=False)
    assert torch.allclose(model.predict(loader), expected, atol=1e-5)


def test_graphs_that_cannot_be_predicted():
    data, model, graph = make()
    with pytest.raises(ValueError, match="the graph has no 'parts'"):
        model.predict(data)
    loader = gas.EvalSubgraphLoader(graph, log=False)
    with pytest.raises(ValueError, match="'layout' given with a loader, which has its own"):
        model.predict(loader, layout="csr")
    perm, ptr = gas.metis(data.edge_index, 6, num_nodes=60, log=False)
    old = gas.SubgraphLoader(T.GCNNorm()(gas.permute(data, perm, log=False)), ptr, log=False)
    with pytest.raises(ValueError, match="the graph has no 'perm'"):
        model.predict(old)


def test_prepare():
    data, model, _ = make()
    assert torch.equal(model.prepare(data).edge_weight, T.GCNNorm()(data.clone()).edge_weight)
    assert "edge_weight" not in data
    sage = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    assert sage.prepare(data) is data


def test_a_loader_that_prefetches():
    _, model, graph = make()
    loader = gas.SubgraphLoader(graph, batch_size=2, log=False)
    expected = model.predict(loader)
    prefetching = gas.PrefetchLoader(loader, model)
    assert torch.equal(model.predict(prefetching), expected)
    nodes = torch.tensor([7, 3])
    assert torch.equal(model.predict(prefetching, nodes=nodes), model.predict(loader, nodes=nodes))
    model.refresh(prefetching)
    assert gas.evaluate(model, prefetching) == gas.evaluate(model, loader)
    assert gas.predictions(model, prefetching)["node"].tolist() == list(range(60))


def test_a_model_that_was_made_in_inference_mode():
    data = random_graph()
    graph = gas.cluster(data, 6, log=False)
    with torch.inference_mode():
        model = gas.models.GraphSAGE(60, 5, 8, 3, num_layers=3)
        out = model.predict(graph)
        torch.testing.assert_close(model.predict(graph, nodes=torch.tensor([3, 59])), out[[3, 59]])
        full = model.eval()(data.x, gas.nn.Adjacency.of(data.edge_index, 60))
    torch.testing.assert_close(out, full)
