import copy

import pytest
import torch
from conftest import random_graph
from torch_geometric.nn import GCN, GIN, GraphSAGE
from user_models import SAGE

import gas
from gas.cli.options import make_experiment, parse_args


def words(share=0.02, width=100):
    """Return a graph with features of which so many aren't zero, exactly."""
    data = random_graph()
    data.x = torch.zeros(data.num_nodes * width)
    data.x[torch.randperm(data.x.numel())[: round(share * data.x.numel())]] = 1.5
    data.x = data.x.view(-1, width)
    return data


def cluster(data, model=None, **kwargs):
    return gas.cluster(data, 4, model=model, log=False, **kwargs)


def our(name, **kwargs):
    cls = getattr(gas.models, name)
    return cls(60, 100, 8, 3, 2, **kwargs)


def test_features_that_are_mostly_zeros_are_kept_sparse(capsys):
    data = words()
    dense = data.x
    for net in (GraphSAGE(100, 8, 2, 3), GCN(100, 8, 2, 3)):
        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, 4, model=model)
        said = "Features stay sparse: 2.00% of 60 x 100 values aren't zero"
        assert capsys.readouterr().err.count(said) == 1
        assert graph.x.layout == torch.sparse_csr
        assert data.x is dense
        assert torch.equal(graph.x.to_dense(), dense[graph.perm])
        plain = cluster(data, model, sparse_features=False)
        assert torch.equal(plain.x, dense[graph.perm])
        torch.testing.assert_close(model.predict(graph), model.predict(plain))
        assert gas.verify(model, graph)


def test_one_in_thirty_is_too_many():
    for count, layout in ((199, torch.sparse_csr), (200, torch.strided)):
        data = words(count / 6000)
        assert cluster(data, our("GraphSAGE")).x.layout == layout


def test_only_models_that_gain_by_it_get_it():
    data = words()

    class Mine(gas.models.GraphSAGE):
        pass

    hooked = gas.to_scalable(GraphSAGE(100, 8, 2, 3), data)
    hooked.net.convs[0].register_forward_pre_hook(lambda *_: None)
    for model in (
        None,
        SAGE(60, 100, 3),  # Written by hand.
        Mine(60, 100, 8, 3, 2),
        our("GIN"),
        our("GraphSAGE", aggr="max"),
        gas.to_scalable(GIN(100, 8, 2, 3), data),
        gas.to_scalable(GraphSAGE(100, 8, 2, 3, aggr="max"), data),
        hooked,
    ):
        assert cluster(data, model).x.layout == torch.strided
    for name in ("GraphSAGE", "GCN", "GCN2", "APPNP"):
        assert cluster(data, our(name)).x.layout == torch.sparse_csr
    assert cluster(data, sparse_features=True).x.layout == torch.sparse_csr


class Skip(torch.nn.Module):
    """Drops features, and adds them to the end."""

    def __init__(self, norm=False):
        super().__init__()
        self.norm = torch.nn.LayerNorm(100) if norm else None
        self.convs, self.skip = GraphSAGE(100, 8, 2, 3), torch.nn.Linear(100, 3)

    def forward(self, x, edge_index):
        if self.norm is not None:
            x = self.norm(x)
        x = torch.nn.functional.dropout(x, 0.5, self.training)
        return self.convs(x, edge_index) + self.skip(x)


@pytest.mark.parametrize(("norm", "layout"), [(0, torch.sparse_csr), (1, torch.strided)])
def test_a_module_whose_first_layers_take_them(norm, layout):
    data = words()
    model = gas.to_scalable(Skip(bool(norm)), data)
    graph = cluster(data, model)
    assert graph.x.layout == layout
    model.predict(graph)
    loss = model.train()(next(iter(gas.SubgraphLoader(graph, log=False)))).sum()
    loss.backward()
    assert gas.verify(model, graph)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.long(),
        lambda x: x.bfloat16(),
        lambda x: gas.quantize(x, "int8"),
    ],
)
def test_features_of_other_kinds_stay_as_they_are(change):
    data = words()
    data.x = change(data.x)
    model = our("GraphSAGE")
    graph = cluster(data, model)
    assert graph.x.layout == torch.strided
    assert type(graph.x) is type(data.x)


def test_mapped_features_stay_where_they_are(tmp_path):
    folder = gas.cluster(words(), 1, out=tmp_path / "whole", log=False)
    assert cluster(folder, our("GraphSAGE")).x.layout == torch.strided
    other = cluster(words(), our("GraphSAGE"), out=tmp_path / "sparse")
    assert other.x.layout == torch.sparse_csr


def test_blocks(monkeypatch):
    monkeypatch.setattr("gas.graph.features.BLOCK", 300)
    data = words()
    graph = cluster(data, our("GraphSAGE"))
    assert torch.equal(graph.x.to_dense(), data.x[graph.perm])
    for x in (torch.zeros(60, 100), torch.zeros(60, 0)):
        data = copy.copy(data)
        data.x = x
        assert torch.equal(cluster(data, sparse_features=True).x.to_dense(), x)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ([], torch.sparse_csr),
        (["--no-sparse-features"], torch.strided),
        (["--model", "gin"], torch.strided),
        (["--model", "gin", "--sparse-features"], torch.sparse_csr),
    ],
)
def test_the_command_line(options, layout, tmp_path):
    data = words()
    for number, name in enumerate(("train", "val", "test")):
        data[f"{name}_mask"] = torch.arange(60) % 3 == number
    data.y = torch.arange(60) % 5
    torch.save(data, tmp_path / "graph.pt")
    command = ["--dataset", str(tmp_path / "graph.pt"), "--undirected", "--device", "cpu"]
    command += ["--io", "serial", "--num-parts", "4", "--batch-size", "2"]
    assert make_experiment(parse_args([*command, *options])).data.x.layout == layout
