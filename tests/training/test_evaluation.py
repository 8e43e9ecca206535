"""Scores by split and tables of predictions: by equality with those of the graph before cutting."""

import numpy as np
import pytest
import torch
from conftest import random_graph
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv

import gas
from gas.training import compute_r2, compute_roc_auc


def made(out_channels=4, num_layers=2, **changes):
    """Return a graph as it was given, one that was cut so that orders differ, and their model."""
    data = random_graph(60, 300)
    data.y = torch.randint(out_channels, (60,)) if out_channels > 1 else torch.randn(60)
    data.node_id = np.array([f"node {i}" for i in range(60)])
    group = torch.randint(4, (60, 2))
    data.train_mask, data.val_mask, data.test_mask = (group == i for i in range(3))
    for key, value in changes.items():
        data[key] = value
    torch.manual_seed(0)
    net = GraphSAGE(5, 8, num_layers, out_channels, norm="batch_norm")
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 6, model=model, log=False, method="random")
    assert not torch.equal(graph.y, data.y)
    return data, graph, model, net


def full_batch(net, data):
    with torch.no_grad():
        return net.eval()(data.x, data.edge_index)


def accuracy(out, y, mask):
    return float((out.argmax(dim=1) == y)[mask].float().mean())


@pytest.mark.parametrize("split", [0, 1])
def test_accuracies_are_those_of_the_full_batch(split):
    data, graph, model, net = made()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    found = gas.evaluate(model, graph, split=split, batch_size=3)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    out = full_batch(net, data)
    masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
    expected = {name: accuracy(out, data.y, mask[:, split]) for name, mask in masks.items()}
    assert found == pytest.approx(expected)
    assert gas.evaluate(model, loader, split=split) == pytest.approx(expected)
    assert list(found) == ["train", "val", "test"]
    assert len(set(found.values())) == 3


def test_splits_that_are_there_and_nodes_that_have_labels():
    data, graph, model, net = made(test_mask=None, val_mask=torch.zeros(60, dtype=torch.bool))
    graph.y[graph.y == 3] = -1
    found = gas.evaluate(model, graph)
    out, known = full_batch(net, data), data.y < 3
    assert found["train"] == pytest.approx(accuracy(out, data.y, data.train_mask[:, 0] & known))
    assert np.isnan(found["val"])
    assert list(found) == ["train", "val"]


def test_the_metric_fits_the_targets():
    data, graph, model, net = made(1)
    mask, out = data.test_mask[:, 0], full_batch(net, data)
    test = gas.evaluate(model, graph)["test"]
    assert test == pytest.approx(compute_r2(out, data.y, mask), abs=1e-5)
    graph.y = (graph.y > 0).long()
    test = gas.evaluate(model, graph)["test"]
    assert test == pytest.approx(compute_roc_auc(out, data.y > 0, mask))
    data, graph, model, net = made(4, y=(torch.rand(60, 4) < 0.5).float())
    mask, out = data.test_mask[:, 0], full_batch(net, data)
    test = gas.evaluate(model, graph)["test"]
    assert test == pytest.approx(gas.training.compute_micro_f1(out, data.y, mask))


def test_integers_that_are_no_classes():
    """Counts, and negative numbers, of a single output are real numbers."""
    data, graph, model, net = made(1)
    mask, out = data.test_mask[:, 0], full_batch(net, data)
    graph.y = torch.arange(60)[graph.perm] - 30
    expected = compute_r2(out, torch.arange(60) - 30, mask)
    assert gas.evaluate(model, graph)["test"] == pytest.approx(expected, rel=1e-4)
    assert gas.evaluate(model, graph, "r2")["test"] == pytest.approx(expected, rel=1e-4)
    table = gas.predictions(model, graph)
    assert "probability" not in table
    np.testing.assert_allclose(table["prediction"], out.view(-1), rtol=1e-4, atol=1e-5)
    assert table["label"].tolist() == list(range(-30, 30))


def test_targets_in_bfloat16():
    data, graph, model, _ = made(1)
    graph.y = graph.y.bfloat16()
    label = gas.predictions(model, graph)["label"]
    np.testing.assert_allclose(label, data.y.bfloat16().float().view(-1))


def test_a_metric_of_ones_own():
    data, graph, model, net = made()
    found = gas.evaluate(model, graph, lambda out, y: out[torch.arange(len(y)), y].sum())
    mask = data.val_mask[:, 0]
    expected = full_batch(net, data)[mask].gather(1, data.y[mask][:, None]).sum()
    assert found["val"] == pytest.approx(float(expected), rel=1e-4)
    assert set(gas.evaluate(model, graph, "accuracy")) == {"train", "val", "test"}


def test_a_folder(tmp_path):
    data, graph, model, _ = made()
    expected, table = gas.evaluate(model, graph), gas.predictions(model, graph)
    gas.cluster(data, 6, model=model, log=False, method="random", out=tmp_path / "graph")
    assert gas.evaluate(model, tmp_path / "graph") == pytest.approx(expected)
    again = gas.predictions(model, tmp_path / "graph")
    assert again["node"].tolist() == table["node"].tolist()
    assert again["prediction"].tolist() == table["prediction"].tolist()


@pytest.mark.parametrize("has_ids", [False, True])
def test_a_table_of_some_nodes(has_ids):
    _, graph, model, _ = made()
    nodes, names = torch.tensor([7, 5, 31, 7]), [f"n{node}" for node in range(60)]
    del graph.node_id
    if has_ids:
        graph.node_id = names
    gas.predictions(model, graph)  # Fills the histories.
    every, mask = gas.predictions(model, graph), torch.zeros(60, dtype=torch.bool)
    mask[nodes] = True
    chosen = [({"nodes": nodes}, nodes), ({"nodes": mask}, torch.tensor([5, 7, 31]))]
    chosen += [({"ids": ["n7", "n5", "n31", "n7"]}, nodes)] * has_ids
    for options, rows in chosen:
        table = gas.predictions(model, graph, **options)
        assert list(table) == list(every)
        for name, column in table.items():
            expected = [every[name][row] for row in rows.tolist()]
            same = pytest.approx(expected) if name == "probability" else expected
            assert list(column) == same, name
    table = gas.predictions(model, graph, nodes=nodes)
    assert list(table["node"]) == ([names[i] for i in nodes] if has_ids else nodes.tolist())
    found = gas.evaluate(model, graph, nodes=mask)
    at = [i for i in nodes.unique().tolist() if every["split"][i] == "train"]
    right = [every["prediction"][i] == every["label"][i] for i in at]
    assert found["train"] == pytest.approx(sum(right) / len(at) if at else np.nan, nan_ok=True)


def test_names_of_classes_that_are_all_known():
    data, graph, model, _ = made()
    graph.classes = ["a", "b", "c", "dd"]
    table = gas.predictions(model, graph)
    assert table["label"].dtype.kind == "U"
    assert table["label"].tolist() == [graph.classes[i] for i in data.y]


def test_typed_graphs():
    torch.manual_seed(0)
    data = torch_typed()
    graph = gas.cluster(data, 4, log=False, method="random")
    model = gas.to_scalable(Typed(), data)
    with torch.no_grad():
        out = Typed.run(model, data)
    found = gas.evaluate(model, graph)
    expected = accuracy(out, data["paper"].y, data["paper"].test_mask)
    assert found == {"test": pytest.approx(expected)}
    assert gas.predictions(model, graph)["prediction"].tolist() == out.argmax(dim=1).tolist()


def torch_typed():
    from torch_geometric.data import HeteroData

    data = HeteroData()
    for kind in ("paper", "author"):
        data[kind].x = torch.randn(30, 4)
    data["paper"].y = torch.randint(3, (30,))
    data["paper"].test_mask = torch.rand(30) < 0.5
    data["author", "writes", "paper"].edge_index = torch.randint(30, (2, 90))
    data["paper", "by", "author"].edge_index = torch.randint(30, (2, 90))
    return data


class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        kinds = [("author", "writes", "paper"), ("paper", "by", "author")]
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: SAGEConv(i, o) for kind in kinds}) for i, o in ((4, 8), (8, 3))
        )

    def forward(self, x_dict, edge_index_dict):
        x = self.convs[0](x_dict, edge_index_dict)
        x = {kind: rows.relu() for kind, rows in x.items()}
        return self.convs[1](x, edge_index_dict)["paper"]

    @staticmethod
    def run(model, data):
        return model.predict(gas.cluster(data, 1, log=False))


def test_the_table():
    data, graph, model, net = made()
    graph.y[graph.perm == 7] = -1
    graph.classes = ["a", "b", "c", "d"]
    table, out = gas.predictions(model, graph, split=1), full_batch(net, data)
    assert list(table) == ["node", "prediction", "probability", "label", "split"]
    assert table["node"].tolist() == data.node_id.tolist()
    assert table["prediction"].tolist() == ["abcd"[i] for i in out.argmax(dim=1)]
    best = out.softmax(dim=1).amax(dim=1).numpy()
    np.testing.assert_allclose(table["probability"], best, rtol=1e-5)
    labels = ["abcd"[i] for i in data.y]
    labels[7] = None
    assert table["label"].tolist() == labels
    for name in ("train", "val", "test"):
        mask = data[f"{name}_mask"][:, 1]
        assert [entry == name for entry in table["split"]] == mask.tolist()
    assert {None, "train"} < set(table["split"].tolist())


def test_the_table_of_real_numbers_and_without_labels():
    data, graph, model, net = made(1)
    del graph.node_id, graph.train_mask, graph.val_mask, graph.test_mask
    table, out = gas.predictions(model, graph), full_batch(net, data).view(-1)
    assert list(table) == ["node", "prediction", "label"]
    np.testing.assert_allclose(table["prediction"], out, rtol=1e-4, atol=1e-5)
    assert table["node"].tolist() == list(range(60))
    del graph.y
    assert list(gas.predictions(model, graph)) == ["node", "prediction"]


def test_labels_as_floats_some_of_which_are_unknown():
    y = (torch.rand(60, 4) < 0.5).float()
    y[3, 1] = y[7] = torch.nan
    data, graph, model, net = made(4, y=y)
    out, mask = full_batch(net, data), data.test_mask[:, 0]
    expected = gas.training.compute_micro_f1(out[mask], y[mask])
    assert gas.evaluate(model, graph)["test"] == pytest.approx(expected)
    labels = gas.predictions(model, graph)["label"]
    assert labels[3] == [int(y[3, 0]), None, int(y[3, 2]), int(y[3, 3])]
    assert labels[7] is None
    assert labels[0].tolist() == y[0].tolist()


def test_several_real_numbers_for_each_node():
    y = torch.randn(60, 4)
    y[5, 2] = torch.nan
    data, graph, model, net = made(4, y=y)
    out, mask = full_batch(net, data), data.test_mask[:, 0]
    expected = compute_r2(out[mask], y[mask])
    assert gas.evaluate(model, graph)["test"] == pytest.approx(expected, abs=1e-4)
    table = gas.predictions(model, graph)
    assert "probability" not in table
    np.testing.assert_allclose(np.stack(table["prediction"]), out, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.stack(table["label"]), y)


@pytest.mark.parametrize(
    ("without", "metric", "text"),
    [("y", None, "has no 'y'"), ("masks", None, "has no 'train_mask'"), ("", "f2", "'metric' is")],
)
def test_what_cannot_be_scored_is_refused_before_histories_are_written(without, metric, text):
    _, graph, model, _ = made()
    for key in ("train_mask", "val_mask", "test_mask") if without == "masks" else [without]:
        graph.pop(key, None)
    with pytest.raises(ValueError, match=text):
        gas.evaluate(model, graph, metric)
    assert not any(history.written.any() for history in model.histories)
