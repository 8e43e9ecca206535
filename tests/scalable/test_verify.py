"""``gas.verify``: exact models are called so, others by the first layer that differs."""

import itertools

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.nn import GCNConv

import gas


class Model(gas.ScalableGNN):
    """Four layers, of which one may count what is only in a batch."""

    transform = T.GCNNorm()

    def __init__(self, wrong=None, **kwargs):
        super().__init__(60, 8, 4, **kwargs)
        self.wrong = wrong
        widths = [5, 8, 8, 8, 3]
        self.convs = torch.nn.ModuleList(
            GCNConv(i, o, normalize=False) for i, o in itertools.pairwise(widths)
        )

    def forward(self, x, adj_t, *args):
        for layer, conv in enumerate(self.convs):
            x = conv(x, adj_t)
            if layer == self.wrong:
                x = x - x.mean(dim=0)
            if layer < 3:
                x = self.push_and_pull(self.histories[layer], x.tanh(), *args)
        return x


def clustered(model):
    torch.manual_seed(0)
    return gas.cluster(random_graph(), 6, model=model, log=False)


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
@pytest.mark.parametrize("cls", [gas.models.GCN, gas.models.GraphSAGE, gas.models.GIN])
def test_exact_models(cls, layout):
    model = cls(60, 5, 8, 3, num_layers=4, dropout=0.5)
    found = gas.verify(model, clustered(model), 2, layout=layout)
    assert found
    assert found.first is None
    assert len(found.errors) == 4
    assert max(found.errors) < 1e-6
    assert "exact: relative errors are at most 1e-05" in str(found)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_the_first_layer_that_differs(wrong):
    model = Model(wrong)
    found = gas.verify(model, clustered(model), 2)
    assert not found
    assert found.first == wrong
    assert all(error < 1e-6 for error in found.errors[:wrong])
    assert all(error > 1e-3 for error in found.errors[wrong:])
    name = "outputs" if wrong == 3 else f"history {wrong}"
    assert f"not exact: {name} is the first to differ" in str(found)


def test_errors_are_relative_to_the_uncut_graph():
    model = Model(wrong=3).eval()
    graph = clustered(model)
    assert gas.verify(model, graph, 6)  # One batch: it is the graph.
    found = gas.verify(model, graph, 3)
    with torch.no_grad():
        (whole,) = gas.EvalSubgraphLoader(graph, torch.tensor([0, 60]), log=False)
        expected = model(whole.x, whole.adj_t)
        out = model(loader=gas.EvalSubgraphLoader(graph, batch_size=3, log=False))
    error = (out - expected).norm() / expected.norm()
    assert found.errors[-1] == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 2e-2), ("int8", 2e-2), ("float16", 2e-3)]
)
def test_histories_of_fewer_bits(dtype, tolerance):
    model = Model(dtype=dtype)
    found = gas.verify(model, clustered(model), 2)
    assert found.tolerance == tolerance
    assert found
    assert 1e-6 < found.errors[-1] < tolerance
    assert not gas.verify(model, clustered(model), 2, tolerance=1e-7)


def test_nan_is_not_exact():
    model = Model()
    graph = clustered(model)
    graph.x[7] = float("nan")
    assert gas.verify(model, graph).first == 0


def test_the_model_stays_as_it_is():
    model = Model().train()
    graph = clustered(model)
    model.predict(graph)
    model.convs[1].eval()
    before = [history.emb.clone() for history in model.histories]
    weights = [parameter.clone() for parameter in model.parameters()]
    model.convs[0].lin.weight.data.mul_(2)
    weights[1 if weights[0].dim() == 1 else 0] *= 2
    assert gas.verify(model, graph, 2)
    assert model.training
    assert not model.convs[1].training
    for old, history in zip(before, model.histories, strict=True):
        assert torch.equal(old, history.emb)
    for old, parameter in zip(weights, model.parameters(), strict=True):
        assert torch.equal(old, parameter)


def test_layers_that_are_refused():
    model = Model()
    model.convs[1] = GCNConv(8, 8)
    with pytest.raises(ValueError, match="'convs.1' .GCNConv. isn't exact on mini-batches"):
        gas.verify(model, clustered(model))
    with pytest.raises(ValueError, match="the graph has no 'parts'"):
        gas.verify(model, random_graph())
