"""``model.refresh(graph)``: running statistics and histories are those of one full batch."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import random_graph
from torch.utils._python_dispatch import TorchDispatchMode
from user_models import SAGE, SquareSAGE

import gas
from gas.scalable import refresh_and_predict
from gas.scalable.norms import Moments
from gas.training import FullBatch

pytestmark = pytest.mark.filterwarnings("ignore:A history was read before it was filled")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def double_graph():
    torch.manual_seed(0)
    data = random_graph()
    data.x = data.x.double() + 1
    return data


def norms_of(model):
    return [each for each in model.modules() if isinstance(each, torch.nn.BatchNorm1d)]


def full_batch(model, data):
    """Return a copy of a model after one full batch with momentum 1 and without dropout."""
    twin = copy.deepcopy(model)
    modes = [norm.training for norm in norms_of(twin)]
    twin.eval()
    for norm, mode in zip(norms_of(twin), modes, strict=True):
        norm.training, norm.momentum = mode, 1.0
    x, edge_index, kwargs = twin.inputs_of(twin.prepare(data))
    with torch.no_grad():
        twin(x, edge_index, fill=True, **kwargs)
    return twin


def check_alike(model, exact, graph):
    found, expected = dict(model.named_buffers()), dict(exact.named_buffers())
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, **CLOSE, msg=name)
    for mine, true in zip(model.histories, exact.histories, strict=True):
        torch.testing.assert_close(mine.emb, true.emb[graph.perm], **CLOSE)


def check_refresh(model, data, batch_size=2, **options):
    """Everything is that of the full batch, and modes are as they were."""
    exact = full_batch(model, data)
    modes = [module.training for module in model.modules()]
    graph = gas.cluster(data, 6, model=model, log=False)
    assert model.refresh(graph, batch_size, **options) is None
    check_alike(model, exact, graph)
    assert [module.training for module in model.modules()] == modes
    assert not any("forward" in vars(norm) for norm in norms_of(model))


def converted(cls, data, **kwargs):
    net = cls(5, 8, 3, out_channels=3, norm="batch_norm", dropout=0.5, **kwargs).double()
    return gas.to_scalable(net, data, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cls", "layout"),
    [(pyg.GraphSAGE, "csr"), (pyg.GIN, "edge_index"), (pyg.GAT, "fused"), (pyg.GCN, "fused")],
)
def test_converted_models(cls, layout):
    data = double_graph()
    check_refresh(converted(cls, data), data, layout=layout)


@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_batch_sizes(batch_size):
    data = double_graph()
    check_refresh(converted(pyg.GraphSAGE, data, jk="cat"), data, batch_size)


@pytest.mark.parametrize("cls", [SAGE, SquareSAGE])
def test_models_without_forward_layer(cls):
    data = double_graph()
    model = cls(60, 5, 3, dtype=torch.float64).double()
    layout = "edge_index" if cls is SquareSAGE else "csr"
    check_refresh(model, data, layout=layout)


@pytest.mark.parametrize("cls", [gas.models.GraphSAGE, gas.models.GIN, gas.models.PNA_JK])
def test_models_of_the_library(cls):
    """PNA_JK computes its first norm again behind the last layer."""
    data = double_graph()
    options = {"batch_norm": True, "dtype": torch.float64, "dropout": 0.5}
    if cls is gas.models.PNA_JK:
        options |= {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(60)}
    check_refresh(cls(60, 5, 8, 3, num_layers=3, **options).double(), data)


class Shared(gas.ScalableGNN):
    """One norm in every layer, before the first and behind the last; of the halo's rows, too."""

    def __init__(self, **kwargs):
        super().__init__(60, [5, 5], 3, dtype=torch.float64)
        self.convs = torch.nn.ModuleList(pyg.SAGEConv(5, 5) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(5, **kwargs)
        self.double()

    def forward(self, x, adj_t, *args):
        size = args[0] if args else None
        x = self.norm(x)
        for conv, history in itertools.zip_longest(self.convs, self.histories):
            x = self.norm(conv((x, x[:size]), adj_t)).relu()
            if history is not None:
                x = self.push_and_pull(history, x, *args)
        return self.norm(x)


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
def test_a_norm_of_several_layers(options):
    data = double_graph()
    model = Shared(**options)
    check_refresh(model, data)
    if "track_running_stats" not in options:
        assert int(model.norm.num_batches_tracked) == 5


def test_norms_in_evaluation_mode_stay_as_they_are():
    data = double_graph()
    model = converted(pyg.GraphSAGE, data)
    first, second = norms_of(model)
    first.running_mean.uniform_()
    before = first.running_mean.clone()
    first.eval()
    check_refresh(model, data)
    assert torch.equal(first.running_mean, before)
    assert float(second.running_mean.abs().max()) > 0


def test_norms_of_edges():
    """Each edge counts once, also in the one batch that has as many as nodes."""
    data = double_graph()
    start = torch.arange(60)
    twice = torch.tensor([[3], [4]])
    data.edge_index = torch.cat([torch.stack([start, (start + 1) % 60]), twice], dim=1)
    layers = [torch.nn.Linear(10, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()]
    convs = [pyg.EdgeConv(torch.nn.Sequential(*layers)), pyg.SAGEConv(4, 3)]
    net = pyg.Sequential("x, edge_index", [(conv, "x, edge_index -> x") for conv in convs])
    model = gas.to_scalable(net.double(), data, dtype=torch.float64)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 10, 35, 60]), log=False)
    assert sum(b.data.adj_t.values().numel() == b.n_id.numel() for b in loader) == 1
    exact = full_batch(model, data)
    model.refresh(loader)
    data.perm = start
    check_alike(model, exact, data)


def test_norms_false_is_inference():
    data = double_graph()
    model = converted(pyg.GraphSAGE, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    before = [buffer.clone() for buffer in model.buffers()]
    model.predict(graph)
    expected = [history.emb.clone() for history in model.histories]
    for history in model.histories:
        history.reset_parameters()
    model.refresh(graph, norms=False)
    assert all(map(torch.equal, model.buffers(), before))
    for history, rows in zip(model.histories, expected, strict=True):
        assert torch.equal(history.emb, rows)
    some = model.predict(graph, nodes=torch.arange(9))  # Without a warning of stale rows.
    torch.testing.assert_close(some, model.predict(graph)[:9], **CLOSE)


def test_predict_is_that_of_running_statistics():
    data = double_graph()
    net = pyg.GraphSAGE(5, 8, 3, out_channels=3, norm="batch_norm", dropout=0.5).double()
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = gas.cluster(data, 6, model=model, log=False)
    model.refresh(graph)
    found = model.predict(graph)
    assert net.training
    with torch.no_grad():
        torch.testing.assert_close(found, net.eval()(data.x, data.edge_index), **CLOSE)


def test_norms_without_running_statistics_are_exact_in_predict():
    data = double_graph()
    model = Shared(track_running_stats=False)
    graph = gas.cluster(data, 6, model=model, log=False)
    with torch.no_grad():
        expected = model.eval()(data.x, data.edge_index)
    torch.testing.assert_close(model.predict(graph), expected, **CLOSE)


def test_an_error_leaves_statistics_as_they_were():
    data = double_graph()
    model = converted(pyg.GraphSAGE, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    before = [buffer.clone() for buffer in model.buffers()]
    handle = model.net.convs[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.refresh(graph)
    handle.remove()
    assert all(map(torch.equal, model.buffers(), before))
    assert model.training
    assert all(norm.training for norm in norms_of(model))
    assert not any("forward" in vars(norm) for norm in norms_of(model))


def test_single_precision_of_shifted_rows():
    data = double_graph()
    data.x = data.x.float() + 1000
    model = Shared().float()
    exact = copy.deepcopy(model).double()
    exact = full_batch(exact, data.clone().apply(torch.Tensor.double, "x"))
    model.refresh(gas.cluster(data, 6, log=False))
    close = {"rtol": 1e-4, "atol": 1e-4}
    for name in ("running_mean", "running_var"):
        found, expected = (getattr(each.norm, name).double() for each in (model, exact))
        torch.testing.assert_close(found, expected, **close)


def test_the_order_of_norms_has_to_be_that_of_every_batch():
    class Mixed(Shared):
        def forward(self, x, adj_t, *args):
            if args[0] > 9:
                self.other(x)
            return super().forward(x, adj_t, *args)

    data = double_graph()
    model = Mixed()
    model.other = torch.nn.BatchNorm1d(5).double()
    loader = gas.SubgraphLoader(data, torch.tensor([0, 5, 25, 60]), log=False)
    with pytest.raises(RuntimeError, match="'norm' first for one mini-batch and 'other'"):
        model.refresh(loader)


def test_a_model_in_evaluation_mode_is_told_to_train():
    data = double_graph()
    model = converted(pyg.GraphSAGE, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    before = norms_of(model)[0].running_mean.clone()
    model.eval()
    with pytest.warns(UserWarning, match=r"evaluation mode. Call model\.train\(\)") as seen:
        model.refresh(graph)
    assert seen[0].filename == __file__
    assert torch.equal(norms_of(model)[0].running_mean, before)
    model.refresh(graph, norms=False)  # Without a warning, which would be an error here.
    model.train()
    for norm in norms_of(model):  # Frozen statistics.
        norm.eval()
    model.refresh(graph)


class Typed(gas.ScalableGNN):
    """A norm for each type of node between two layers."""

    def __init__(self, data, **options):
        super().__init__(data.num_nodes, 8, 2)
        self.convs = torch.nn.ModuleList([pyg.GraphConv(-1, 8), pyg.GraphConv(8, 3)])
        self.norm = pyg.HeteroBatchNorm(8, 2, **options)

    def forward(self, x, adj_t, *args, kind):
        x = self.convs[0]((x, x[: adj_t.size(0)]), adj_t)
        x = self.push_and_pull(self.histories[0], self.norm(x, kind[: x.size(0)]), *args)
        return self.convs[1]((x, x[: adj_t.size(0)]), adj_t)


def test_norms_of_types_are_refused_by_name_unless_they_keep_their_statistics():
    data = random_graph()
    data.kind = torch.arange(data.num_nodes) % 2
    model, graph = Typed(data), gas.cluster(data, 6, log=False)
    with pytest.raises(ValueError, match=r"batch norm 'norm' is a HeteroBatchNorm.*norms=False"):
        model.refresh(graph)
    model.refresh(graph, norms=False)
    model.norm.eval()
    model.refresh(graph)
    without = Typed(data, track_running_stats=False)
    with pytest.raises(ValueError, match=r"'norm' \(HeteroBatchNorm\).*statistics of the batch"):
        without.refresh(graph, norms=False)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, torch.Tensor) else []
        self.found = max(
            [self.found, *(each.nbytes for each in made if each.dtype == torch.double)]
        )
        return out


@pytest.mark.parametrize("shape", [(1000, 7), (1000, 7, 3), (5, 3000), (0, 7)])
def test_moments_are_taken_of_blocks(shape, monkeypatch):
    x = torch.randn(shape) + 3
    whole = Moments.of(x, shape[1])
    monkeypatch.setattr("gas.scalable.norms.BLOCK", 100)
    with Largest() as largest:
        blocks = Moments.of(x, shape[1])
    torch.testing.assert_close(blocks.values, whole.values, rtol=1e-12, atol=0)
    assert largest.found <= max(800, 8 * (1 + 2 * shape[1]))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("cls", [pyg.GraphSAGE, pyg.GCN, SAGE, Shared])
def test_outputs_with_new_statistics_in_one_inference(cls, is_whole, monkeypatch):
    """The outputs are those of evaluation mode, and layers are computed once less."""
    monkeypatch.setattr("gas.scalable.norms.MANY_NODES", 60)
    data = double_graph()
    if cls is SAGE:
        model = SAGE(60, 5, 3, dtype=torch.float64).double()
    else:
        model = Shared() if cls is Shared else converted(cls, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    whole, loader = FullBatch(graph), gas.EvalSubgraphLoader(graph, batch_size=2, log=False)
    seen = []
    layer = next(each for each in model.modules() if isinstance(each, pyg.MessagePassing))
    layer.register_forward_hook(lambda *_: seen.append(1))
    twin, modes = copy.deepcopy(model), [module.training for module in model.modules()]
    if is_whole:
        out = whole.refresh_and_predict(model)
        assert sum(seen) == 1 + (cls is Shared)
        whole.refresh(twin)
    else:
        out = refresh_and_predict(model, loader)
        twin.refresh(loader, log=False)
    assert [module.training for module in model.modules()] == modes
    for norm, other in zip(norms_of(model), norms_of(twin), strict=True):
        assert norm.num_batches_tracked == other.num_batches_tracked > 0
        close = {"rtol": 0.2, "atol": 0.05}  # Of 60 rows: the variance is divided by 59, not 60.
        torch.testing.assert_close(norm.running_var, other.running_var, **close)
    if is_whole:
        with torch.no_grad():
            assert torch.equal(out, whole(model.eval()))
    else:
        assert gas.scalable.is_exact(model, graph)
        histories = [history.emb.clone() for history in model.histories]
        assert torch.equal(out, model.eval()(loader=loader))
        for mine, then in zip(histories, model.histories, strict=True):
            assert torch.equal(mine, then.emb)


def test_outputs_with_new_statistics_of_few_nodes():
    """The statistics are those of one step in training mode, to the last digit."""
    data = double_graph()
    model = converted(pyg.GraphSAGE, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    whole, loader = FullBatch(graph), gas.EvalSubgraphLoader(graph, batch_size=2, log=False)
    twin = copy.deepcopy(model)
    twin.refresh(loader, log=False)
    for get_outputs in (partial(refresh_and_predict, loader=loader), whole.refresh_and_predict):
        out = get_outputs(model)
        for mine, other in zip(norms_of(model), norms_of(twin), strict=True):
            torch.testing.assert_close(mine.running_mean, other.running_mean, **CLOSE)
            torch.testing.assert_close(mine.running_var, other.running_var, **CLOSE)
        torch.testing.assert_close(out, twin.eval()(loader=loader))
