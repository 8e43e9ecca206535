"""Sparse features are what the same features are as a dense tensor, through everything."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from conftest import random_graph
from scipy import sparse
from test_equality import OURS, ZOO, make_model, zoo_class
from torch_geometric.data import Data
from torch_geometric.transforms import GCNNorm

import gas
from gas.cli import Experiment, Settings
from gas.graph.features import to_csr_features
from gas.history import Features
from gas.training import FullBatch

LAYOUTS = ("fused", "csr", "edge_index")


def thinned(x: torch.Tensor) -> torch.Tensor:
    """Return a third of the elements, with rows that are empty."""
    torch.manual_seed(1)
    x = x * (torch.rand_like(x) < 0.3)
    x[::7] = 0
    return x


def sparse_of(x: torch.Tensor) -> torch.Tensor:
    return to_csr_features(x.to_sparse_coo())


def both(data: Data) -> tuple[Data, Data]:
    """Return a graph with dense features, and with the same ones sparse."""
    data = copy.copy(data)
    data.x = thinned(data.x)
    other = copy.copy(data)
    other.x = sparse_of(data.x)
    return data, other


def graphs(name: str) -> list[Data]:
    data = random_graph(directed=True)
    transform = zoo_class(name).transform
    data = data if transform is None else transform(data)
    return [gas.cluster(graph, 6, log=False) for graph in both(data)]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def results(model, graph, layout):
    """Return outputs and gradients of batches with exact histories, then outputs of inference."""
    model.eval()
    model.zero_grad()
    options = {"layout": layout, "log": False}
    pred = model.predict(graph, layout=layout)
    out = []
    for batch in gas.SubgraphLoader(graph, batch_size=2, **options):
        out.append(model(batch))
        out[-1].pow(2).sum().backward()
    return torch.cat(out).detach(), pred, gradients(model)


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_every_model(name, layout):
    dense, other = graphs(name)
    model = make_model(name, dense)
    wanted, found = results(model, dense, layout), results(model, other, layout)
    same(found[0], wanted[0])
    same(found[1], wanted[1])
    scale = max(float(grad.abs().max()) for grad in wanted[2])
    for mine, expected in zip(found[2], wanted[2], strict=True):
        assert float((mine - expected).abs().max()) < 1e-5 * scale
    assert gas.verify(model, other, layout=layout)
    assert gas.verify(model, other, layout=layout, num_nodes=5)
    for batch in gas.SubgraphLoader(other, layout=layout, log=False):
        assert batch.x.layout == torch.sparse_csr
        assert batch.own.x.shape == (batch.batch_size, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OURS)
def test_full_batch(name, layout):
    dense, other = graphs(name)
    model = make_model(name, dense).eval()
    outs = []
    for graph in (dense, other):
        whole = FullBatch(graph, layout=layout)
        outs.append(whole(model))
        model.zero_grad()
        whole(model).pow(2).sum().backward()
        outs.append(torch.cat([grad.flatten() for grad in gradients(model)]))
    same(outs[2], outs[0])
    same(outs[3] / outs[1].abs().max(), outs[1] / outs[1].abs().max())


def of_type(x: torch.Tensor, kind: str):
    csr = x.to_sparse_csr() if kind != "coo" else None
    array = sparse.csr_matrix(x.numpy())
    if kind == "int32":
        ids = csr.crow_indices().int(), csr.col_indices().int()
        return torch.sparse_csr_tensor(*ids, csr.values(), x.shape)
    if kind == "unsorted":  # Rows backwards, and each entry in two halves.
        rowptr, col, value = csr.crow_indices(), csr.col_indices(), csr.values()
        back = [torch.arange(b - 1, a - 1, -1) for a, b in itertools.pairwise(rowptr.tolist())]
        order = torch.cat(back).repeat_interleave(2)
        return torch.sparse_csr_tensor(
            2 * rowptr, col[order], value[order] / 2, x.shape, check_invariants=False
        )
    if kind == "zeros":  # All are stored.
        return torch.sparse_csr_tensor(
            torch.arange(0, x.numel() + 1, x.size(1)),
            torch.arange(x.size(1)).repeat(x.size(0)),
            x.flatten(),
            x.shape,
        )
    return {
        "int64": lambda: csr,
        "coo": lambda: x.to_sparse_coo(),
        "csc": lambda: x.to_sparse_csc(),
        "scipy csr": lambda: array,
        "scipy coo": lambda: array.tocoo(),
        "scipy csc_array": lambda: sparse.csc_array(array),
    }[kind]()


KINDS = ("int64", "int32", "unsorted", "zeros", "coo", "csc", "scipy csr", "scipy coo",
         "scipy csc_array")  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse C")  # What PyTorch says of its own.
@pytest.mark.parametrize("kind", KINDS)
def test_what_they_are_made_of(kind):
    dense, _ = both(GCNNorm()(random_graph()))
    given = copy.copy(dense)
    given.x = of_type(dense.x, kind)
    before = dense.x.clone()
    perm, ptr = gas.metis(dense.edge_index, 4, num_nodes=60, log=False)
    permuted = gas.permute(given, perm, log=False)
    assert permuted.x.col_indices().dtype == torch.int32
    assert torch.equal(permuted.x.to_dense(), before[perm])
    for graph in (permuted, gas.cluster(given, 4, log=False)):
        for batch in gas.EvalSubgraphLoader(graph, ptr, log=False):
            assert torch.equal(batch.x.to_dense(), graph.x.to_dense()[batch.n_id])
            crow, col = batch.x.crow_indices(), batch.x.col_indices()
            rises = [
                bool((col[a:b].diff() > 0).all()) for a, b in itertools.pairwise(crow.tolist())
            ]
            assert all(rises)
    whole = torch.tensor([0, 60])
    (batch,) = gas.SubgraphLoader(given, whole, log=False)
    assert torch.equal(batch.x.to_dense(), before)
    assert torch.equal(FullBatch(given).data.x.to_dense(), before)
    assert given.x is not dense.x  # It wasn't replaced.


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_a_scipy_matrix_shares_its_memory_unless_its_indices_have_two_types(kind):
    array = sparse.csr_matrix(np.eye(3, 4, dtype="float32"))
    array.indptr = array.indptr.astype(kind)
    x = to_csr_features(array)
    assert torch.equal(x.to_dense(), torch.eye(3, 4))
    assert x.values().data_ptr() == array.data.ctypes.data
    assert (x.col_indices().data_ptr() == array.indices.ctypes.data) == (kind == "int32")


@pytest.mark.parametrize("kind", ["int8", "uint8", "int64", "bool", "float32"])
def test_duplicates_of_a_scipy_matrix_add_up_to_what_their_type_has_no_room_for(kind):
    largest = {"int8": 100, "uint8": 200, "int64": 2**53, "bool": 1, "float32": 0.5}[kind]
    values = np.array([largest, largest, largest], dtype=kind)
    matrix = sparse.coo_matrix((values, ([0, 0, 1], [2, 2, 0])), shape=(2, 3))
    x = to_csr_features(matrix)
    assert x.to_dense().tolist() == [[0, 0, 2 * largest], [largest, 0, 0]]


def test_a_graph_in_order_is_taken_as_it_is():
    _, other = both(random_graph())
    assert to_csr_features(other.x) is other.x
    loader = gas.SubgraphLoader(other, torch.tensor([0, 30, 60]), log=False)
    assert loader.data is other
    other.x.values().mul_(2)  # Followed, as changes of dense features are.
    x = torch.cat([batch.own.x.to_dense() for batch in loader])
    assert torch.equal(x, other.x.to_dense())
    other.x = other.x.to_sparse_coo()
    assert next(iter(loader)).x.layout == torch.sparse_csr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, dtype):
    torch.manual_seed(0)
    x = thinned(torch.randn(40, 9))
    weight = torch.randn(4, 9).to(dtype).requires_grad_()
    b = torch.randn(4).to(dtype).requires_grad_() if bias else None
    wanted = F.linear(x.double(), weight.double(), None if b is None else b.double())
    out = gas.nn.linear(sparse_of(x), weight, b)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
    if dtype == torch.float64:
        wanted = F.linear(x.double(), weight, b)
    torch.testing.assert_close(out.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    seed = torch.randn(40, 4)
    given = [weight] if b is None else [weight, b]
    expected = torch.autograd.grad(wanted, given, seed.double())
    for mine, other in zip(torch.autograd.grad(out, given, seed.to(dtype)), expected, strict=True):
        torch.testing.assert_close(
            mine.double(), other.double(), rtol=tolerance, atol=10 * tolerance
        )


def test_linear_of_dense_features_is_pytorchs():
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    assert torch.equal(gas.nn.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("cls", [gas.nn.Linear, torch.nn.Linear, pyg.Linear])
def test_linear_layers_of_a_fused_model(cls):
    layer = cls(9, 4)
    before = str(layer), {key: value.clone() for key, value in layer.state_dict().items()}
    model = gas.fuse(torch.nn.Sequential(layer))
    x = thinned(torch.randn(20, 9))
    for each in (model, copy.deepcopy(model)):
        same(each(sparse_of(x)), each(x))
        assert str(each[0]) == before[0]
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in before[1].items())


def test_a_transpose_is_made_once_and_follows_changes():
    x = sparse_of(thinned(torch.randn(20, 9)))
    weight = torch.randn(4, 9, requires_grad=True)

    def check() -> None:
        out = gas.nn.linear(x, weight)
        same(out, F.linear(x.to_dense(), weight))
        (grad,) = torch.autograd.grad(out.sum(), weight)
        same(grad, x.to_dense().sum(dim=0).expand(4, 9))

    check()
    x.values().mul_(-3)
    check()
    x.col_indices()[x.crow_indices()[1]] = 8  # Of the second row, or of the first that has any.
    check()
    dropped = gas.nn.dropout(x)
    dropped.values().add_(1)
    same(gas.nn.linear(dropped, weight), F.linear(dropped.to_dense(), weight))


def mask_of(x: torch.Tensor, dropped: torch.Tensor, p: float) -> torch.Tensor:
    """Return dropout's factors of the stored elements; 1 elsewhere."""
    kept = sparse.csr_matrix(
        (
            (dropped.values() != 0).numpy().astype(np.float32) / (1 - p),
            dropped.col_indices().numpy(),
            dropped.crow_indices().numpy(),
        ),
        x.shape,
    ).toarray()
    return torch.where(x != 0, torch.from_numpy(kept), 1.0)


def test_dropout():
    x = thinned(torch.randn(400, 50)).abs()
    torch.manual_seed(3)
    out = gas.nn.dropout(sparse_of(x), 0.3)
    torch.manual_seed(3)
    again = gas.nn.Dropout(0.3, inplace=True)(sparse_of(x))
    assert torch.equal(out.to_dense(), again.to_dense())
    same(out.to_dense(), x * mask_of(x, out, 0.3))
    share = float((out.values() == 0).float().mean())
    assert abs(share - 0.3) < 0.03
    assert gas.nn.dropout(sparse_of(x), 1.0).to_dense().count_nonzero() == 0
    other = sparse_of(x)
    assert gas.nn.dropout(other, 0.5, False) is other
    assert gas.nn.Dropout(0.5).eval()(other) is other


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT", "APPNP", "GIN", "PNA"])
def test_dropout_in_models_is_that_of_dense_features_with_the_same_mask(name, monkeypatch):
    dense, other = graphs(f"gas.{name}")
    model = make_model(f"gas.{name}", dense).train()
    model.dropout = 0.5
    for conv in model.convs:  # Of attention.
        conv.dropout = 0.0
    masks, real = [], gas.nn.dropout

    def keep(x, p=0.5, training=True):
        if not (isinstance(x, torch.Tensor) and x.layout == torch.sparse_csr and training):
            return x
        out = real(x, p, training)
        masks.append((x, out))
        return out

    def replay(x, p=0.5, training=True):
        x = x.tensor() if isinstance(x, Features) else x
        if not training or not isinstance(x, torch.Tensor) or x.size(1) != 5 or not masks:
            return x
        before, out = masks.pop(0)
        assert torch.equal(before.to_dense(), x)
        return x * mask_of(x, out, p)

    module = __import__(model.__class__.__module__, fromlist=["drop"])
    monkeypatch.setattr(type(model), "_drops_in_one_pass", lambda *_: False)
    found = []
    for graph, drop in ((other, keep), (dense, replay)):
        for where in ("gas.models.layered.dropout", f"{module.__name__}.drop"):
            monkeypatch.setattr(where, drop, raising=False)
        model.zero_grad()
        outs = []
        for batch in gas.SubgraphLoader(graph, batch_size=6, log=False):
            torch.manual_seed(0)
            outs.append(model(batch))
            outs[-1].pow(2).sum().backward()
        found.append((torch.cat(outs).detach(), gradients(model)))
    assert not masks
    same(found[0][0], found[1][0])
    scale = max(float(grad.abs().max()) for grad in found[1][1])
    for mine, expected in zip(found[0][1], found[1][1], strict=True):
        assert float((mine - expected).abs().max()) < 1e-5 * scale


CONVS = {
    "GCN": lambda: gas.nn.GCNConv(5, 4),
    "SAGE": lambda: gas.nn.SAGEConv(5, 4),
    "SAGE sum, normalised": lambda: gas.nn.SAGEConv(5, 4, aggr="sum", normalize=True),
    "SAGE max": lambda: gas.nn.SAGEConv(5, 4, aggr="max"),
    "SAGE projected": lambda: gas.nn.SAGEConv(5, 4, project=True),
    "SAGE without root": lambda: gas.nn.SAGEConv(5, 4, root_weight=False, bias=False),
    "SAGE pair": lambda: gas.nn.SAGEConv((5, 5), 4),
    "Graph": lambda: gas.nn.GraphConv(5, 4),
    "Graph max": lambda: gas.nn.GraphConv(5, 4, aggr="max"),
    "GAT": lambda: gas.nn.GATConv(5, 4, heads=2, residual=True),
    "GAT pair": lambda: gas.nn.GATConv((5, 5), 4, add_self_loops=False),
    "GATv2": lambda: gas.nn.GATv2Conv(5, 4, heads=2, residual=True),
    "GATv2 shared": lambda: gas.nn.GATv2Conv(5, 4, share_weights=True),
    "GIN": lambda: gas.nn.GINConv(torch.nn.Linear(5, 4), train_eps=True),
    "Edge": lambda: gas.nn.EdgeConv(torch.nn.Linear(10, 4)),
    "Simple": lambda: gas.nn.SimpleConv(),
}


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("how", ["fused", "csr", "edge_index", "hooked"])
@pytest.mark.parametrize("name", CONVS)
def test_convolutions(name, how):
    data, other = both(random_graph())
    adj = gas.nn.Adjacency.of(data.edge_index, 60)
    adj = {"csr": adj.to_torch_sparse(), "edge_index": data.edge_index}.get(how, adj)
    torch.manual_seed(0)
    conv = CONVS[name]()
    seen = []
    if how == "hooked":
        for layer in conv.modules():
            if isinstance(layer, torch.nn.Linear | pyg.Linear):
                layer.register_forward_hook(lambda *_: seen.append(1))
    outs = []
    for x in (data.x, other.x):
        conv.zero_grad()
        out = conv(x, adj)
        if out.requires_grad:
            out.pow(2).sum().backward()
        outs.append((out, gradients(conv)))
        if how != "hooked":
            assert conv.path.startswith("fused" if how == "fused" else "pyg")
    same(outs[1][0], outs[0][0])
    for mine, expected in zip(outs[1][1], outs[0][1], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)
    assert not seen or len(seen) % 2 == 0  # As often for either.


def test_sources_and_destinations_apart():
    """Of a bipartite graph whose destinations are other nodes than the first sources."""
    torch.manual_seed(0)
    source, target = thinned(torch.randn(7, 5)), thinned(torch.randn(9, 3))
    adj = gas.nn.Adjacency(torch.arange(10), torch.randint(7, (9,)), None, 7)
    for conv in (gas.nn.SAGEConv((5, 3), 4), gas.nn.GraphConv((5, 3), 4)):
        same(conv((sparse_of(source), sparse_of(target)), adj), conv((source, target), adj))
        same(conv((sparse_of(source), target), adj), conv((source, target), adj))


NETS = {
    "SAGE": lambda: pyg.GraphSAGE(5, 8, 3, 4, dropout=0.5),
    "GCN": lambda: pyg.GCN(5, 8, 3, 4, norm="batch_norm", jk="cat"),
    "GAT": lambda: pyg.GAT(5, 8, 2, 4, heads=2),
    "GIN": lambda: pyg.GIN(5, 8, 2, 4),
    "not fused": lambda: pyg.Sequential(
        "x, edge_index",
        [(pyg.ResGatedGraphConv(5, 8), "x, edge_index -> x"), torch.nn.ReLU(),
         (pyg.SAGEConv(8, 4), "x, edge_index -> x")],
    ),
    "a perceptron first": lambda: pyg.Sequential(
        "x, edge_index",
        [(torch.nn.Dropout(0.5), "x -> x"), (torch.nn.Linear(5, 8), "x -> x"), torch.nn.ReLU(),
         (pyg.SAGEConv(8, 8), "x, edge_index -> x"), torch.nn.ReLU(),
         (pyg.GraphConv(8, 4), "x, edge_index -> x")],
    ),
    "a norm first": lambda: pyg.Sequential(
        "x, edge_index",
        [(torch.nn.LayerNorm(5), "x -> x"), (pyg.SAGEConv(5, 8), "x, edge_index -> x"),
         torch.nn.ReLU(), (pyg.SAGEConv(8, 4), "x, edge_index -> x")],
    ),
}  # fmt: skip


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETS)
def test_converted_models(name, layout):
    torch.manual_seed(0)
    net = NETS[name]()
    dense, other = both(random_graph(directed=False))
    found = []
    for data in (dense, other):
        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, 4, model=model, log=False)
        found.append(results(model, graph, layout))
        assert gas.verify(model, graph, layout=layout)
    same(found[1][0], found[0][0])
    same(found[1][1], found[0][1])
    for mine, expected in zip(found[1][2], found[0][2], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)


def test_features_may_stay_sparse_under_dropout():
    """Only non-zeros are multiplied if dropout, or an own row, is all that is before a layer."""

    class First(torch.nn.Module):
        def __init__(self, change):
            super().__init__()
            self.change, self.conv = change, pyg.SAGEConv(5, 3)

        def forward(self, x, edge_index):
            return self.conv(self.change(x, self.training), edge_index)

    data = random_graph()
    for change, stays in (
        (lambda x, training: F.dropout(x, 0.5, training), True),
        (lambda x, training: x, True),
        (lambda x, training: x + 1, False),
    ):
        assert gas.to_scalable(First(change), data)._supports_sparse_features is stays


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("kind", ["views", "workers", "cache", "prefetch", "compiled", "memory"])
def test_beside_other_things(kind):
    dense, other = both(random_graph(directed=False))
    outs = []
    for data in (dense, other):
        torch.manual_seed(0)
        model = gas.models.GraphSAGE(60, 5, 8, 3, 2).eval()
        if kind == "memory":
            graph = gas.cluster(data, "auto", model=model, memory=20_000, log=False)
        else:
            graph = gas.cluster(data, 4, log=False)
        options = {"workers": {"num_workers": 1}, "cache": {"cache": True}}.get(kind, {})
        if kind == "views":
            options = {"epoch_transform": gas.augment.MaskFeatures(graph, 0.5)}
        loader = gas.SubgraphLoader(graph, log=False, **options)
        batches = gas.PrefetchLoader(loader, model) if kind == "prefetch" else loader
        if kind == "compiled":
            model.compile(backend="eager")
        model.predict(graph)
        torch.manual_seed(0)
        for _ in range(2):
            out = [
                torch.cat(model.views(batch)) if kind == "views" else model(batch)
                for batch in batches
            ]
        outs.append(torch.cat(out))
    same(outs[1], outs[0])


@pytest.mark.slow
@pytest.mark.parametrize("inductive", [False, True])
def test_experiments(inductive):
    data, _, outs = gas.get_data("data", "planted:600")
    data.x = thinned(data.x)
    settings = Settings.default("gcn").replace(epochs=2, dropout=0.0, num_parts=4, batch_size=2)
    sparse_data = copy.copy(data)
    sparse_data.x = sparse_of(data.x)
    runs = [
        Experiment(each, outs, "gcn", settings, inductive=inductive, log=False).run(0)
        for each in (data, sparse_data)
    ]
    assert runs[1].loss == pytest.approx(runs[0].loss, rel=1e-4)


def test_get_data():
    dense, width, _ = gas.get_data("data", "planted:200")
    data, same_width, _ = gas.get_data("data", "planted:200", sparse_features=True)
    assert width == same_width
    assert torch.equal(data.x.to_dense(), dense.x)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_a_folder_with_sparse_features(kind, tmp_path):
    x = thinned(torch.randn(6, 9))
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_matrix(x.numpy()).asformat(kind))
    np.savez(tmp_path / "other.npz", x=x)  # Left alone.
    np.save(tmp_path / "y.npy", np.arange(6) % 2)
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]))
    data = gas.open_graph(tmp_path, log=False)
    assert data.x.layout == torch.sparse_csr
    assert torch.equal(data.x.to_dense(), x)
    torch.save(data, tmp_path / "graph.pt")
    again = gas.open_graph(tmp_path / "graph.pt", log=False)
    assert torch.equal(again.x.to_dense(), x)


def test_what_is_stored_is_looked_at_for_nan():
    _, other = both(random_graph())
    other.x.values()[-1] = torch.nan
    row = int((other.x.crow_indices() < other.x.values().numel()).sum()) - 1
    with pytest.raises(ValueError, match=f"value in row {row}, column .*: replace"):
        gas.SubgraphLoader(other, torch.tensor([0, 60]), log=False, check=True)


def test_two_runs_are_bitwise_alike():
    _, other = both(GCNNorm()(random_graph()))
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = gas.models.GCN(60, 5, 8, 3, 2, dropout=0.5)
        graph = gas.cluster(other, 4, log=False)
        model.predict(graph)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in gas.SubgraphLoader(graph, shuffle=True, log=False):
            optimizer.zero_grad()
            model(batch).pow(2).sum().backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


assert len(ZOO) == len(OURS)  # Every model is here.
