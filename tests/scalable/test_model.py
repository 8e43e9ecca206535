"""``ScalableGNN``: full batches, mini-batches, copies, and several graphs."""

import copy

import pytest
import torch
from conftest import clustered_graph, random_graph
from user_models import SAGE, batch_of, fill, unchanged

import gas


@pytest.fixture
def graph():
    return clustered_graph()


@pytest.fixture
def model():
    return SAGE(60, 5, 3).eval()


def test_histories():
    model = gas.ScalableGNN(10, 8, num_layers=3)
    assert [str(h) for h in model.histories] == ["History(10, 8, dtype=float32, store='host')"] * 2
    model = gas.ScalableGNN(
        10, [8, 4], num_layers=3, dtype=torch.float16, pool_size=1, buffer_size=5
    )
    assert [h.embedding_dim for h in model.histories] == [8, 4]
    assert model.histories[0].emb.dtype == torch.float16
    assert (model.pool_size, model.buffer_size) == (1, 5)
    assert len(gas.ScalableGNN(10, 8, num_layers=1).histories) == 0
    assert model.device == model.histories[0].device == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 2), "'num_nodes' is 0"),
        ((10, 8, 0), "'num_layers' is 0"),
        ((10, 8, 2.0), "'num_layers' is 2.0"),
        ((10, 8, 2, 0), "'pool_size' is 0"),
        ((10, 8, 2, 1, "x"), "'buffer_size' is 'x'"),
        ((10, [8, 8], 2), "'hidden_channels' has 2 widths, expected one for each of the 1"),
    ],
)
def test_bad_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        gas.ScalableGNN(*arguments)


def test_full_batches_leave_histories_alone(graph, model):
    before = fill(model, graph)
    data = graph[0]
    model(2 * data.x, data.edge_index)
    assert unchanged(model, before)
    model(2 * data.x, data.edge_index, fill=True)
    assert not unchanged(model, before)
    model(data.x[:60], data.edge_index)
    other = random_graph(num_nodes=33)  # Full batch runs on any graph.
    assert model(other.x, other.edge_index).shape == (33, 3)


def test_staleness(graph, model):
    assert [tuple(s) for s in model.staleness()] == [(0, 0.0, 0, 1.0, None), (1, 0.0, 0, 1.0, None)]
    fill(model, graph)
    batch, batch_size, *ids = batch_of(graph)
    model(batch.x, batch.adj_t, batch_size, *ids)
    first, second = model.staleness()
    assert first == second._replace(layer=0)
    assert first.mean_age == pytest.approx(1 - batch_size / 60)
    assert (first.max_age, first.unwritten, first.error) == (1, 0.0, None)

    loader = gas.EvalSubgraphLoader(*graph, log=False)
    assert all(stale.error < 1e-6 for stale in model.staleness(loader))
    before = [history.emb.clone() for history in model.histories]
    for conv in model.convs:
        conv.lin_l.weight.data.mul_(1.5)
    ages = [history.age for history in model.histories]
    errors = [stale.error for stale in model.staleness(loader)]
    assert unchanged(model, before)  # Histories and ages are as they were.
    assert all(torch.equal(h.age, age) for h, age in zip(model.histories, ages, strict=True))
    exact = fill(model, graph)
    for error, old, new in zip(errors, before, exact, strict=True):
        assert error == pytest.approx(float((old - new).norm() / new.norm()), rel=1e-4)
        assert error > 0.01


def test_hooks_run(graph, model):
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    fill(model, graph)
    batch, *args = batch_of(graph)
    model(batch.x, batch.adj_t, *args)
    assert seen == [(60, 3), (args[0], 3)]
    seen.clear()
    loader = gas.EvalSubgraphLoader(*graph, batch_size=2, log=False)
    model(loader=loader)
    assert seen == [(batch_size, 3) for _, batch_size, *_ in loader]


def test_one_layer_needs_no_history(graph):
    model = gas.models.GCN(60, 5, 8, 3, num_layers=1).eval()
    graph[0].edge_weight = torch.rand(240)
    expected = model(graph[0].x, graph[0].edge_index, edge_weight=graph[0].edge_weight)
    loader = gas.EvalSubgraphLoader(*graph, log=False)
    assert torch.allclose(model(loader=loader), expected, atol=1e-6)
    for batch, batch_size, n_id, *ranges in loader:
        out = model(batch.x, batch.adj_t, batch_size, n_id, *ranges)
        assert torch.allclose(out, expected[n_id[:batch_size]], atol=1e-6)


def test_square_outputs_are_cut_to_the_batch(graph):
    class Last(gas.ScalableGNN):
        def forward(self, x, adj_t, *args):
            return x

    model = Last(60, 8, 1)
    loader = gas.SubgraphLoader(*graph, batch_size=2, log=False, bipartite=False)
    for batch, *args in loader:
        assert torch.equal(model(batch.x, batch.adj_t, *args), batch.x[: args[0]])


def test_state_dict_and_copies(graph, model):
    before = fill(model, graph)
    assert not any("histor" in key for key in model.state_dict())
    twin = copy.deepcopy(model)
    batch, *args = batch_of(graph)
    twin(2 * batch.x, batch.adj_t, *args)
    assert unchanged(model, before)
    assert not unchanged(twin, before)
    model.reset_parameters()
    assert all((history.emb == 0).all() for history in model.histories)


def test_an_exception_in_forward_leaves_a_usable_model(graph, model):
    fill(model, graph)
    batch, *args = batch_of(graph)
    expected = model(batch.x, batch.adj_t, *args)
    fail = model.bn.register_forward_pre_hook(lambda *_: 1 / 0)
    for kwargs in ({}, {"fill": True}):
        with pytest.raises(ZeroDivisionError):
            model(graph[0].x, graph[0].edge_index, **kwargs) if kwargs else model(
                batch.x, batch.adj_t, *args
            )
    with pytest.raises(ZeroDivisionError):
        model(loader=gas.EvalSubgraphLoader(*graph, log=False))
    fail.remove()
    before = fill(model, graph)
    assert torch.allclose(model(batch.x, batch.adj_t, *args), expected, atol=1e-6)
    model(3 * graph[0].x, graph[0].edge_index)
    after = [history.emb for history in model.histories]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(after, before, strict=True))


def test_the_pulled_halo_has_no_gradient(graph, model):
    fill(model, graph)
    _, batch_size, n_id, offset, count = batch_of(graph)
    x = torch.randn(batch_size, 8, requires_grad=True)
    out = model.push_and_pull(model.histories[0], x, batch_size, n_id, offset, count)
    assert out.shape == (n_id.numel(), 8)
    grad = torch.autograd.grad(out.sum(), x)[0]
    assert (grad == 1).all()
    assert torch.equal(out[batch_size:], model.histories[0].emb[n_id[batch_size:]])
    assert torch.equal(model.histories[0].emb[n_id[:batch_size]], x.detach())


def test_the_first_push_stores_the_values_at_the_call(graph):
    class InPlace(gas.ScalableGNN):
        def forward(self, x, adj_t, *args):
            h = x.clone()
            out = self.push_and_pull(self.histories[0], h, *args).zero_()
            h.zero_()
            return out

    model = InPlace(60, 5, 2)
    fill(model, graph)
    batch, *args = batch_of(graph)
    for _ in range(2):
        model(batch.x, batch.adj_t, *args)
        assert torch.equal(model.histories[0].emb[args[1][: args[0]]], batch.x[: args[0]])


# Several graphs -----------------------------------------------------------------------------------


def test_another_graph_shares_the_weights(graph, model):
    before = fill(model, graph)
    other = random_graph(num_nodes=33)
    twin = model.for_graph(33)
    assert [history.num_embeddings for history in twin.histories] == [33] * 2
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    loader = gas.EvalSubgraphLoader(other, torch.tensor([0, 20, 33]), log=False)
    expected = model.eval()(other.x, other.edge_index)
    assert torch.allclose(twin(loader=loader), expected, atol=1e-5)
    assert unchanged(model, before)
    batch, *args = next(iter(loader))
    with pytest.raises(ValueError, match="of a graph of 33 nodes, but the histories are for 60"):
        model(batch.x, batch.adj_t, *args)
    twin(batch.x, batch.adj_t, *args).sum().backward()  # Trains the shared weights.
    assert all(parameter.grad is not None for parameter in model.parameters())
    twin.close()
    assert model.histories[0].pull(torch.arange(3)).shape == (3, 8)  # Not closed with it.
    model.convs[0].lin_l.weight.data.zero_()
    assert not twin.convs[0].lin_l.weight.any()
    with pytest.raises(ValueError, match="'num_nodes' is 0, expected an integer of at least 1"):
        model.for_graph(0)


def test_another_graph_has_the_same_options(tmp_path):
    model = SAGE(60, 5, 3, dtype="int8", store="disk", path=tmp_path / "one", io="serial")
    twin = model.for_graph(33)
    assert twin.io == "serial"
    assert {(h.codec.name, h.store.tier) for h in twin.histories} == {("int8", "disk")}
    assert not any(str(h.store.path).startswith(str(tmp_path)) for h in twin.histories)
    kept = model.for_graph(33, path=tmp_path / "two")
    assert (tmp_path / "two" / "history_0").exists()
    for each in (model, twin, kept):
        each.close()


def test_copies_have_histories_of_their_own(graph, model):
    before = fill(model, graph)
    batch, *args = batch_of(graph)
    model(batch.x, batch.adj_t, *args).sum().backward()
    twin = copy.deepcopy(model)
    assert unchanged(twin, [history.emb.clone() for history in model.histories])
    for parameter in twin.parameters():
        parameter.data.add_(1)
    fill(twin, graph)
    assert not unchanged(model, [history.emb for history in twin.histories])
    own = args[1][: args[0]]
    for history, old in zip(model.histories, before, strict=True):
        kept = torch.ones(60, dtype=torch.bool)
        kept[own] = False
        assert torch.equal(history.emb[kept], old[kept])
