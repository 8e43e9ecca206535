"""Scripts written for the best-known implementation run once their import line is changed."""

import importlib
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from conftest import ROOT, random_graph
from torch.nn import BatchNorm1d, Linear, ModuleList, ReLU, Sequential
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import PPI, GNNBenchmarkDataset
from torch_geometric.nn import GCNConv, GINConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import SparseTensor

import gas
from gas import compat
from gas.compat import (
    EvalSubgraphLoader,
    History,
    ScalableGNN,
    SubgraphLoader,
    compute_micro_f1,
    dropout,
    gen_masks,
    get_data,
    metis,
    models,
    permute,
)
from gas.compat.data import get_ppi
from gas.datasets import named

# Names of there, by module.
NAMES = {
    "data": "get_data get_ppi get_sbm",
    "history": "History",
    "loader": "EvalSubgraphLoader SubData SubgraphLoader",
    "metis": "metis permute",
    "models": "APPNP GAT GCN GCN2 PNA PNA_JK ScalableGNN",
    "pool": "AsyncIOPool",
    "utils": "compute_micro_f1 dropout gen_masks index2mask",
}
ARCHITECTURE = {
    "GCN": {"hidden_channels": 16, "batch_norm": True, "residual": True, "linear": True},
    "GAT": {"hidden_channels": 4, "hidden_heads": 2, "out_heads": 1},
    "APPNP": {"hidden_channels": 16, "alpha": 0.1},
    "GCN2": {"hidden_channels": 16, "alpha": 0.1, "theta": 0.5, "shared_weights": False},
    "PNA": {"hidden_channels": 8},
    "PNA_JK": {"hidden_channels": 8, "batch_norm": True, "residual": True},
}


def test_names():
    for module, names in NAMES.items():
        there = importlib.import_module(f"gas.compat.{module}")
        for name in names.split():
            assert hasattr(there, name), f"gas.compat.{module}.{name}"
    for name in compat.__all__:
        assert hasattr(compat, name)


def test_nothing_of_gas_imports_it():
    package = ROOT / "gas"
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] != "compat":
            assert "gas.compat" not in path.read_text(), path


def sparse_graph(splits=1):
    data = T.ToSparseTensor()(random_graph(directed=False))
    masks = gen_masks(data.y, 5, 5, splits)
    data.train_mask, data.val_mask, data.test_mask = (m if splits > 1 else m[:, 0] for m in masks)
    return data


def two_groups(model):
    return torch.optim.Adam(
        [
            dict(params=model.reg_modules.parameters(), weight_decay=5e-4),
            dict(params=model.nonreg_modules.parameters(), weight_decay=0),
        ],
        lr=0.01,
    )


def test_a_model_of_one_layer_has_its_histories_on_the_cpu():
    assert models.GCN(60, 5, 8, 3, num_layers=1).emb_device == torch.device("cpu")
    assert models.GCN(60, 5, 8, 3, num_layers=2).emb_device == torch.device("cpu")


@pytest.mark.requires("torch_sparse")
def test_a_script_with_a_ready_model():
    data = sparse_graph()
    data.adj_t = gcn_norm(data.adj_t, add_self_loops=True)
    perm, ptr = metis(data.adj_t, num_parts=8, log=True)
    data = permute(data, perm, log=True)
    loader = SubgraphLoader(data, ptr, batch_size=2, shuffle=True)

    model = models.GCN(
        num_nodes=data.num_nodes,
        in_channels=5,
        hidden_channels=16,
        out_channels=3,
        num_layers=2,
        dropout=0.5,
        drop_input=True,
        pool_size=1,
        buffer_size=500,
    ).to("cpu")
    optimizer = two_groups(model)
    criterion = torch.nn.CrossEntropyLoss()

    @torch.no_grad()
    def test():
        model.eval()
        out = model(data.x.to(model.device), data.adj_t.to(model.device)).cpu()
        return compute_micro_f1(out, data.y, data.train_mask)

    before = test()  # Fills the histories: no warning follows.
    for _ in range(60):
        model.train()
        for batch, *args in loader:
            batch = batch.to(model.device)
            optimizer.zero_grad()
            out = model(batch.x, batch.adj_t, *args)
            train_mask = batch.train_mask[: out.size(0)]
            if train_mask.sum() == 0:
                continue
            loss = criterion(out[train_mask], batch.y[: out.size(0)][train_mask])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert test() > max(before, 0.5)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("name", ["GCN", "GAT", "APPNP", "GCN2"])
def test_a_script_that_leaves_out_the_ranges_of_a_batch(name):
    data = sparse_graph(splits=2)
    data.adj_t = data.adj_t.set_diag() if name == "GAT" else gcn_norm(data.adj_t)
    perm, ptr = metis(adj_t=data.adj_t, num_parts=8, log=True)
    data = permute(data, perm, log=True)
    loader = SubgraphLoader(
        data, ptr, batch_size=4, shuffle=True, num_workers=0, persistent_workers=False
    )
    data = data.clone().to("cpu")
    kwargs = dict(num_nodes=data.num_nodes, in_channels=5, out_channels=3, device="cpu")
    model = getattr(models, name)(num_layers=2, **kwargs, **ARCHITECTURE[name])

    def loss_of(out, run):
        mask = data.train_mask[:, run]
        return float(torch.nn.functional.cross_entropy(out[mask], data.y[mask]))

    for run in range(2):
        model.reset_parameters()
        optimizer = two_groups(model)
        model.eval()
        with torch.no_grad():
            before = loss_of(model(data.x, data.adj_t), run)
        model.train()
        for _ in range(40):
            for batch, batch_size, n_id, _, _ in loader:
                mask = batch.train_mask[:batch_size, run]
                if mask.sum() == 0:
                    continue
                optimizer.zero_grad()
                out = model(batch.x, batch.adj_t, batch_size, n_id)
                loss = torch.nn.functional.cross_entropy(out[mask], batch.y[:batch_size][mask])
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.adj_t)
        assert loss_of(out, run) < before


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("name", ["GCN", "GCN2", "PNA", "PNA_JK"])
def test_a_script_that_evaluates_layer_by_layer(name):
    data = sparse_graph()
    perm, ptr = metis(data.adj_t, num_parts=8, log=True)
    data = permute(data, perm, log=True)
    norm = name in ("GCN", "GCN2")
    if norm:
        data.adj_t = data.adj_t.set_diag()
        data.adj_t = gcn_norm(data.adj_t, add_self_loops=False)
    loader = SubgraphLoader(data, ptr, batch_size=2, shuffle=True, num_workers=0)
    eval_loader = EvalSubgraphLoader(data, ptr, batch_size=2)
    buffer_size = max([n_id.numel() for _, _, n_id, _, _ in eval_loader])
    kwargs = {}
    if not norm:
        kwargs["deg"] = data.adj_t.storage.rowcount()
        kwargs["aggregators"], kwargs["scalers"] = ["mean", "max"], ["identity", "amplification"]
    model = getattr(models, name)(
        num_nodes=data.num_nodes,
        in_channels=5,
        out_channels=3,
        num_layers=3,
        pool_size=2,
        buffer_size=buffer_size,
        **ARCHITECTURE[name],
        **kwargs,
    ).to("cpu")
    optimizer = two_groups(model)
    model.eval()
    model(loader=eval_loader)
    for _ in range(3):
        model.train()
        for batch, batch_size, *args in loader:
            optimizer.zero_grad()
            adj_t = dropout(batch.adj_t.to(model.device), p=0.2)
            out = model(batch.x.to(model.device), adj_t, batch_size, *args)
            torch.nn.functional.cross_entropy(out, batch.y[:batch_size]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model.mini_inference(eval_loader)
        expected = model(data.x, data.adj_t)
        assert torch.allclose(out, expected, atol=1e-5)
        other = sparse_graph()  # Of another size: its embeddings are no one's here.
        other.adj_t = gcn_norm(other.adj_t[:50, :50].set_diag(), add_self_loops=False)
        before = model.histories[0].emb.clone()
        model(other.x[:50], other.adj_t)
        assert torch.equal(model.histories[0].emb, before)


class GIN(ScalableGNN):
    def __init__(self, num_nodes, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__(num_nodes, hidden_channels, num_layers, pool_size=2, buffer_size=5000)
        self.lins = ModuleList(
            [Linear(in_channels, hidden_channels), Linear(hidden_channels, out_channels)]
        )
        self.convs = ModuleList(
            GINConv(
                Sequential(
                    Linear(hidden_channels, hidden_channels),
                    BatchNorm1d(hidden_channels),
                    ReLU(),
                ),
                train_eps=True,
            )
            for _ in range(num_layers)
        )

    def forward(self, x, adj_t, *args):
        x = self.lins[0](x).relu()
        penalty = 0
        for conv, hist in zip(self.convs[:-1], self.histories, strict=True):
            h = conv((x, x[: adj_t.size(0)]), adj_t)
            penalty += h.norm(dim=-1).mean()
            h = h + x[: h.size(0)]
            x = self.push_and_pull(hist, h.relu_(), *args)
        h = self.convs[-1]((x, x[: adj_t.size(0)]), adj_t)
        return self.lins[1](h), penalty

    @torch.no_grad()
    def forward_layer(self, layer, x, adj_t, state):
        if layer == 0:
            x = self.lins[0](x).relu()
        h = self.convs[layer]((x, x[: adj_t.size(0)]), adj_t)
        if layer == self.num_layers - 1:
            return self.lins[1](h)
        h = h + x[: h.size(0)]
        return h.relu_()


@pytest.mark.requires("torch_sparse")
def test_a_script_with_a_model_of_its_own_on_many_graphs():
    graphs = [T.ToSparseTensor()(random_graph(30, 90, directed=False)) for _ in range(4)]
    data = Batch.from_data_list(graphs)
    data.batch = data.ptr = None
    perm, ptr = metis(data.adj_t, num_parts=8, log=False)
    data = permute(data, perm, log=False)
    loader = SubgraphLoader(
        data, ptr, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True
    )
    eval_loader = EvalSubgraphLoader(data, ptr, batch_size=2)

    model = GIN(data.num_nodes, 5, 16, 3, num_layers=3)
    assert all(isinstance(history, History) for history in model.histories)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.eval()
    model(loader=eval_loader)
    model.train()
    for _ in range(2):
        for batch, *args in loader:
            batch = batch.to(model.device)
            optimizer.zero_grad()
            out, penalty = model(batch.x, batch.adj_t, *args)
            loss = torch.nn.functional.cross_entropy(out, batch.y[: out.size(0)]) + 0.01 * penalty
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(loader=eval_loader)
        expected, _ = model(data.x, data.adj_t)
        of_one, _ = model(graphs[1].x, graphs[1].adj_t)  # Of another size: histories stay.
    assert torch.allclose(out, expected, atol=1e-5)
    nodes = torch.empty_like(perm)
    nodes[perm] = torch.arange(perm.numel())
    assert torch.allclose(of_one, expected[nodes[30:60]], atol=1e-5)


# What is otherwise than in gas --------------------------------------------------------------------


class GNN(ScalableGNN):
    def __init__(self, num_nodes):
        super().__init__(num_nodes, 8, 3)
        self.convs = ModuleList(GCNConv(i, 8, normalize=False) for i in (5, 8, 8))

    def forward(self, x, adj_t, *args):
        self.hidden = []
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv(x, adj_t).relu()
            self.hidden.append(x.detach())
            x = self.push_and_pull(history, x, *args)
        return self.convs[-1](x, adj_t)


def embeddings(model):
    return torch.stack([history.emb.clone() for history in model.histories])


@pytest.mark.parametrize("training", [False, True])
def test_full_batches_write_the_histories(training):
    data = random_graph()
    model = GNN(60).train(training)
    for _ in range(2):
        model(data.x, data.edge_index)
        assert torch.equal(embeddings(model), torch.stack(model.hidden))
        with torch.no_grad():
            model.convs[0].lin.weight.mul_(2)


def test_what_leaves_the_histories_alone():
    data, other = random_graph(), random_graph(40, 100)
    model = GNN(60).eval()
    model(data.x, data.edge_index)
    before = embeddings(model)
    with torch.no_grad():
        model.convs[0].lin.weight.mul_(2)
    model(other.x, other.edge_index)
    model(data.x, data.edge_index, fill=False)
    model(data.x, data.edge_index, push=False)
    assert torch.equal(embeddings(model), before)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_batches_and_inference_are_those_of_gas():
    data = random_graph()
    loader = SubgraphLoader(data, torch.tensor([0, 25, 60]), layout="edge_index", log=False)
    model = GNN(60).eval()
    batch, *args = next(iter(loader))
    model(batch.x, batch.edge_index, *args)
    for history in model.histories:
        assert history.written.tolist() == [True] * 25 + [False] * 35
    out = model(None, None, None, None, None, None, loader)
    assert torch.allclose(out, model(data.x, data.edge_index), atol=1e-5)
    assert torch.equal(model.mini_inference(loader), out)
    assert gas.verify(model, gas.cluster(data, 4, log=False))


@pytest.mark.parametrize("num_parts", [1, 4])
def test_metis_by_keyword(num_parts):
    edge_index = random_graph().edge_index
    for found, expected in zip(
        metis(adj_t=edge_index, num_parts=num_parts, recursive=True, log=False),
        gas.metis(edge_index, num_parts, recursive=True, log=False),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.requires("torch_sparse")
def test_dropped_weights_are_zero_and_their_edges_stay():
    adj_t = sparse_graph().adj_t
    torch.manual_seed(0)
    weighted = dropout(adj_t.set_value(torch.ones(adj_t.nnz()), layout="coo"), p=0.75)
    assert weighted.nnz() == adj_t.nnz()
    value = weighted.storage.value()
    assert set(value.tolist()) == {0.0, 4.0}
    assert dropout(weighted, 0.75, training=False) is weighted
    x = torch.randn(60, 3)
    dense = torch.zeros(60, 60)
    dense.index_put_((weighted.storage.row(), weighted.storage.col()), value, accumulate=True)
    assert torch.allclose(weighted @ x, dense @ x, atol=1e-5)

    plain = dropout(adj_t, p=0.75)
    assert plain.storage.value() is None
    assert 0 < plain.nnz() < adj_t.nnz()


def test_dropout_of_other_adjacencies_is_that_of_gas():
    data, ptr = random_graph(), torch.tensor([0, 60])
    adj_t = next(iter(SubgraphLoader(data, ptr, log=False))).adj_t
    torch.manual_seed(0)
    found = dropout(adj_t, 0.5)
    torch.manual_seed(0)
    assert torch.equal(found.values(), gas.drop_edges(adj_t, 0.5).values())


# Data sets ----------------------------------------------------------------------------------------


@pytest.mark.requires("shared")
@pytest.mark.requires("torch_sparse")
def test_get_data(data_root, tmp_path):
    for name in ("cora", "Cora"):  # The folder is as it is typed.
        folder = tmp_path / "Planetoid" / name / "raw"
        shutil.copytree(data_root / "Cora" / "raw", folder)
        data, in_channels, out_channels = get_data(root=str(tmp_path), name=name)
        assert (data.num_nodes, in_channels, out_channels) == (2708, 1433, 7)
        assert "edge_index" not in data
        assert isinstance(data.adj_t, SparseTensor)
        assert data.adj_t.nnz() == 10556
        assert int(data.train_mask.sum()) == 140


@pytest.mark.requires("torch_sparse")
def test_get_data_by_any_name_of_gas(tmp_path):
    data, in_channels, _ = get_data(str(tmp_path), "planted:500")
    assert data.adj_t.sizes() == [500, 500]
    assert in_channels == data.num_features


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize(("name", "folder"), [("WikiCS", "WIKICS"), ("yelp", "YELP")])
def test_folders_with_another_name(name, folder, monkeypatch):
    graph = random_graph()
    graph.stopping_mask = graph.train_mask
    folders = []

    def load(cls_name, root, **_):
        folders.append(root)
        return graph

    monkeypatch.setattr(named, "load_pyg", load)
    data, in_channels, out_channels = get_data("root", name)
    assert folders == [f"root/{folder}"]
    assert (in_channels, out_channels, data.adj_t.nnz()) == (5, 3, 240)


def write_ppi(folder):
    """Two graphs for each split, in the layout of the published files."""
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        links = [{"source": i, "target": j} for g in (0, 5) for i, j in ((g, g + 1), (g + 1, g))]
        graph = {"directed": True, "multigraph": False, "graph": {}, "links": links}
        graph["nodes"] = [{"id": i} for i in range(10)]
        (folder / f"{split}_graph.json").write_text(json.dumps(graph))
        np.save(folder / f"{split}_feats.npy", np.arange(30.0).reshape(10, 3))
        np.save(folder / f"{split}_labels.npy", np.ones((10, 4)))
        np.save(folder / f"{split}_graph_id.npy", np.repeat([1, 2], 5))


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("transformed", [False, True])
def test_get_ppi(tmp_path, transformed):
    write_ppi(tmp_path / "PPI" / "raw")
    if transformed:  # As scripts of there have left the files.
        PPI(str(tmp_path / "PPI"), pre_transform=T.ToSparseTensor())
    for split in ("train", "val", "test"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyG's, that transforms differ.
            data, in_channels, out_channels = get_ppi(str(tmp_path), split=split)
        assert type(data) is Data
        assert set(data.keys()) == {"x", "y", "adj_t", f"{split}_mask"}
        assert (in_channels, out_channels, data.num_nodes) == (3, 4, 10)
        row, col, _ = data.adj_t.coo()
        assert list(zip(row.tolist(), col.tolist(), strict=True)) == [
            (0, 1),
            (1, 0),
            (5, 6),
            (6, 5),
        ]
        assert bool(data[f"{split}_mask"].all())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "train_mask" in get_data(str(tmp_path), "ppi")[0]


@pytest.mark.requires("torch_sparse")
def test_graphs_of_the_stochastic_block_model(tmp_path):
    folder = tmp_path / "SBM" / "CLUSTER" / "raw"
    folder.mkdir(parents=True)
    edge_index = torch.tensor([[0, 1, 2], [1, 0, 0]])
    graph = {"x": torch.ones(3, 2), "y": torch.tensor([0, 1, 2]), "edge_index": edge_index}
    torch.save([[graph, graph], [graph], [graph]], folder / "CLUSTER_v2.pt")
    data, in_channels, out_channels = get_data(str(tmp_path), "CLUSTER")
    assert type(data) is Data
    assert (in_channels, out_channels, data.num_nodes) == (2, 3, 6)
    row, col, _ = data.adj_t.coo()
    assert row.tolist() == [0, 0, 1, 3, 3, 4]
    assert col.tolist() == [1, 2, 0, 4, 5, 3]
    # Scripts read the other splits by themselves, from the same files.
    options = {"name": "CLUSTER", "pre_transform": T.ToSparseTensor()}
    other = GNNBenchmarkDataset(str(tmp_path / "SBM"), split="val", **options)
    assert other[0].adj_t.nnz() == 3
