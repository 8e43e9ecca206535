"""Features that aren't finite: refused where a graph enters."""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data, HeteroData

import gas
from gas.cli import Experiment, Settings
from gas.graph import features
from gas.graph.features import check_finite

INF, NAN = float("inf"), float("nan")


def spoilt(value=NAN, row=41, column=2):
    data = random_graph()
    data.x[row, column] = value
    return data


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_first_of_them_and_how_many(monkeypatch, dtype, value):
    monkeypatch.setattr(features, "BLOCK", 40)
    x = torch.randn(60, 5).to(dtype)
    check_finite("x", x)
    x[41, 2] = x[59, 0] = x[59, 4] = value
    found = f"'x' holds a NaN or infinite value in row 41, column 2 \\({value}; 3 such values\\)"
    with pytest.raises(ValueError, match=found):
        check_finite("x", x)
    with pytest.raises(ValueError, match="row 141, column 2 .*; at least 3 such values"):
        check_finite("x", x, 100)
    with pytest.raises(ValueError, match="row 41, column 2 .*; 3 such"):
        check_finite("x", x.float().to_sparse_csr())
    with pytest.raises(ValueError, match=r"row 17 \(.*; 1 such value\)"):
        check_finite("x", x[24:42, 2])
    check_finite("x", torch.full((3, 2), torch.finfo(dtype).max, dtype=dtype))  # Its sum isn't.


def test_rows_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(features, "BLOCK", 4)
    x = torch.ones(3, 5)
    check_finite("x", x)
    x[1, 4] = NAN
    with pytest.raises(ValueError, match=r"row 1, column 4 \(nan; 1 such value\)"):
        check_finite("x", x)


def test_they_are_refused_once():
    data = spoilt()
    with pytest.raises(ValueError, match="row 41, column 2"):
        gas.cluster(data, 4, log=False)
    graph = gas.cluster(data, 4, log=False, check=False)
    gas.SubgraphLoader(graph, log=False)  # It was accepted.
    with pytest.raises(ValueError, match="NaN"):
        gas.SubgraphLoader(graph, log=False, check=True)
    perm, ptr = gas.metis(data.edge_index, 4, num_nodes=60, log=False)
    permuted = gas.permute(data, perm, log=False)
    for loader in (gas.SubgraphLoader, gas.EvalSubgraphLoader):
        with pytest.raises(ValueError, match="NaN"):
            loader(permuted, ptr, log=False)
        loader(permuted, ptr, log=False, check=False)


def test_attributes_of_edges():
    data = random_graph()
    data.edge_attr = torch.ones(data.num_edges, 2)
    data.edge_attr[7, 1] = INF
    with pytest.raises(ValueError, match=r"'edge_attr' holds .* row 7, column 1 \(inf"):
        gas.cluster(data, 4, log=False)


def test_typed_graphs():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.ones(4, 2), torch.ones(4, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    gas.cluster(data, 2, log=False)
    data["author"].x[3, 1] = NAN
    with pytest.raises(ValueError, match=r"'data\['author'\].x' holds .* row 3, column 1"):
        gas.cluster(data, 2, log=False)
    gas.cluster(data, 2, log=False, check=False)


def test_mapped_features_are_looked_at_when_they_are_written(tmp_path):
    with pytest.raises(ValueError, match="row 41"):
        gas.cluster(spoilt(), 4, log=False, out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    graph = gas.cluster(spoilt(), 1, log=False, out=tmp_path / "graph", check=False)
    ptr = torch.tensor([0, 60])
    for key in ("parts", "perm"):
        del graph[key]
    gas.SubgraphLoader(graph, ptr, log=False)  # Not at every opening.
    with pytest.raises(ValueError, match="NaN"):
        gas.cluster(graph, 2, log=False, out=tmp_path / "again")


def test_experiments():
    data = T.ToUndirected()(spoilt())
    data.val_mask = data.test_mask = ~data.train_mask
    settings = Settings.default("sage").replace(epochs=1, num_parts=4, batch_size=2)
    with pytest.raises(ValueError, match="NaN"):
        Experiment(data, 3, "sage", settings, log=False)
    Experiment(data, 3, "sage", settings, log=False, check=False)


def test_import_of_stores(tmp_path):
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    data.x[1, 0] = NAN
    with pytest.raises(ValueError, match="row 1, column 0"):
        gas.datasets.import_graph(data, tmp_path / "graph", log=False)
