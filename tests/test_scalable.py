import copy

import pytest
import torch
from conftest import random_graph
from user_models import SAGE

import gas


@pytest.fixture
def graph():
    data = random_graph()
    perm, ptr = gas.metis(data.edge_index, 6, num_nodes=60, log=False)
    return gas.permute(data, perm, log=False), ptr


@pytest.fixture
def model():
    return SAGE(60, 5, 3).eval()


def batch_of(graph, number=0):
    return list(gas.SubgraphLoader(*graph, batch_size=2, log=False))[number]


def fill(model, graph):
    model(graph[0].x, graph[0].edge_index, fill=True)
    return [history.emb.clone() for history in model.histories]


def unchanged(model, before):
    return all(torch.equal(h.emb, b) for h, b in zip(model.histories, before, strict=True))


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
    assert model.device == model.emb_device == torch.device("cpu")


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


def test_inference_leaves_every_module_in_its_mode(graph, model):
    model.train()
    model.bn.eval()
    model(loader=gas.EvalSubgraphLoader(*graph, log=False))
    assert model.training
    assert model.lin.training
    assert not model.bn.training


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": None}, "'batch_size' and 'n_id' describe a mini-batch together"),
        ({"n_id": None}, "'batch_size' and 'n_id' describe a mini-batch together"),
        ({"batch_size": -1}, "'batch_size' is -1, expected an integer between 0 and"),
        ({"batch_size": 10_000}, "'batch_size' is 10000, expected"),
        ({"batch_size": torch.tensor(3)}, r"'batch_size' is tensor\(3\)"),
        ({"x": torch.randn(4, 5)}, "'x' has 4 rows, expected one per node"),
        ({"fill": True}, "'fill' is for full batches"),
    ],
)
def test_bad_calls_change_nothing(graph, model, change, message):
    before = fill(model, graph)
    batch, batch_size, n_id, offset, count = batch_of(graph)
    arguments = dict(
        x=2 * batch.x,
        adj_t=batch.adj_t,
        batch_size=batch_size,
        n_id=n_id,
        offset=offset,
        count=count,
    )
    with pytest.raises(ValueError, match=message):
        model(**{**arguments, **change})
    assert unchanged(model, before)


def test_a_batch_of_a_larger_graph_changes_nothing(graph):
    model = SAGE(40, 5, 3)
    model.histories[0].push(torch.ones(40, 8))
    batch, *args = batch_of(graph)
    with pytest.raises(ValueError, match="of a graph of 60 nodes, but the .* are for 40"):
        model(batch.x, batch.adj_t, *args)
    assert (model.histories[0].emb == 1).all()


def test_forgotten_batch_arguments(graph):
    class Forgetful(SAGE):
        def push_and_pull(self, history, x, *args):
            return super().push_and_pull(history, x)

    batch, *args = batch_of(graph)
    model = Forgetful(60, 5, 3)
    fill(model, graph)
    with pytest.raises(ValueError, match="was not told which batch this is: pass on what"):
        model(batch.x, batch.adj_t, *args)


@pytest.mark.parametrize("through", ["list", "prefetch", "workers"])
def test_loaders_of_another_graph_are_noticed_by_their_batches(graph, model, through):
    before = fill(model, graph)
    other = random_graph(num_nodes=33)
    workers = 1 if through == "workers" else 0
    loader = gas.SubgraphLoader(other, torch.tensor([0, 20, 33]), log=False, num_workers=workers)
    message = "of a graph of 33 nodes, but the histories are for 60"
    if through == "workers":
        for batch, *args in loader:
            with pytest.raises(ValueError, match=message):
                model(batch.x, batch.adj_t, *args)
    else:
        batches = list(loader) if through == "list" else gas.PrefetchLoader(loader, model)
        with pytest.raises(ValueError, match=message):
            model(loader=batches)
    assert unchanged(model, before)


def test_a_batch_of_a_smaller_graph_changes_nothing(graph, model):
    before = fill(model, graph)
    other = random_graph(num_nodes=33)
    batch, *args = next(iter(gas.SubgraphLoader(other, torch.tensor([0, 20, 33]), log=False)))
    with pytest.raises(ValueError, match="of a graph of 33 nodes, but the histories are for 60"):
        model(batch.x, batch.adj_t, *args)
    assert unchanged(model, before)


class Faulty(gas.ScalableGNN):
    """Calls ``push_and_pull`` as it is told to."""

    def __init__(self, calls, **kwargs):
        super().__init__(60, 5, num_layers=3, **kwargs)
        self.calls = calls

    def forward(self, x, adj_t, *args):
        for layer, change in self.calls:
            x = self.push_and_pull(self.histories[layer], change(x), *args)
        return x


@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize(
    ("calls", "error", "message"),
    {
        "never": ([], RuntimeError, "forward called push_and_pull 0 times, expected once for each"),
        "too_seldom": ([(0, lambda x: x)], RuntimeError, "called push_and_pull 1 times, expected"),
        "twice": (
            [(0, lambda x: x)] * 2,
            RuntimeError,
            "push_and_pull twice with the same history",
        ),
        "few_rows": (
            [(0, lambda x: x), (1, lambda x: x[:2])],
            ValueError,
            r"'x' has shape \[2, 5\], expected the rows of the",
        ),
        "wide": (
            [(0, lambda x: x), (1, lambda x: torch.cat([x, x], dim=1))],
            ValueError,
            r"'x' has shape .* 10\], expected .* of the history's width 5",
        ),
        "raises": (
            [(0, lambda x: x), (1, lambda x: x + torch.ones(7, 7))],
            RuntimeError,
            "The size of tensor",
        ),
    }.values(),
    ids=lambda value: "",
)
def test_a_wrong_forward_leaves_histories_alone(graph, calls, error, message, io):
    model = Faulty(calls, io=io)
    before = [torch.rand(60, 5) for _ in range(2)]
    for history, rows in zip(model.histories, before, strict=True):
        history.push(rows)
    batch, *args = batch_of(graph)
    for _ in range(2):
        with pytest.raises(error, match=message):
            model(batch.x, batch.adj_t, *args)
        assert all(
            torch.equal(history.emb, rows)
            for history, rows in zip(model.histories, before, strict=True)
        )
    for call in (
        lambda: model(graph[0].x, graph[0].edge_index, fill=True),
        lambda: model(loader=gas.EvalSubgraphLoader(*graph, log=False)),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()
        assert all(
            torch.equal(history.emb, rows)
            for history, rows in zip(model.histories, before, strict=True)
        )
    right = Faulty([(0, lambda x: x), (1, lambda x: 2 * x)], io=io)
    fill(right, graph)
    right(batch.x, batch.adj_t, *args)
    own = args[1][: args[0]]
    assert torch.equal(right.histories[1].emb[own], 2 * batch.x[: args[0]])


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


def test_filling_needs_the_whole_graph(graph, model):
    before = fill(model, graph)
    other = random_graph(num_nodes=33)
    with pytest.raises(ValueError, match="'x' has 33 rows, expected one per node: 60"):
        model(other.x, other.edge_index, fill=True)
    assert unchanged(model, before)


def test_too_few_rows(graph, model):
    fill(model, graph)
    _, batch_size, n_id, offset, count = batch_of(graph)
    message = rf"'x' has shape \[2, 8\], expected the rows of the {batch_size} in-batch nodes"
    with pytest.raises(ValueError, match=message):
        model.push_and_pull(model.histories[0], torch.ones(2, 8), batch_size, n_id, offset, count)


def test_inference_needs_every_node_and_this_graph(graph, model):
    data, ptr = graph
    before = fill(model, graph)
    other = random_graph(num_nodes=33)
    loader = gas.EvalSubgraphLoader(other, torch.tensor([0, 33]), log=False)
    with pytest.raises(ValueError, match="'loader' has a graph of 33 nodes, but the histories are"):
        model(loader=loader)
    assert unchanged(model, before)
    some = list(gas.EvalSubgraphLoader(data, ptr, log=False))[:-1]
    with pytest.raises(ValueError, match="'loader' yields .* of the graph's 60 nodes"):
        model(loader=some)


def test_inference_needs_push_and_pull(graph):
    class Forgetful(gas.ScalableGNN):
        def forward(self, x, adj_t, *args):
            return x

    with pytest.raises(RuntimeError, match="forward called push_and_pull 0 times, expected once"):
        Forgetful(60, 8, 2)(loader=gas.EvalSubgraphLoader(*graph, log=False))


def test_inference_refuses_more_calls_than_histories(graph, model):
    class Eager(SAGE):
        def forward(self, x, adj_t, *args):
            out = super().forward(x, adj_t, *args)
            self.push_and_pull(self.histories[0], torch.zeros(out.size(0), 8), *args)
            return out

    eager = Eager(60, 5, 3)
    loader = gas.EvalSubgraphLoader(*graph, log=False)
    with pytest.raises(RuntimeError, match="called push_and_pull twice with the same history"):
        eager(loader=loader)
    with pytest.raises(ValueError, match="'loader' brings its own batches"):
        model(graph[0].x, loader=loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_inference_keeps_state_per_batch(graph, shuffle):
    """A hand-written ``forward_layer`` sees its own batch's state in every layer."""

    class Stateful(SAGE):
        def forward_layer(self, layer, x, adj_t, state):
            if layer == 0:
                state["first"] = x
            assert state["first"].size(0) == x.size(0)
            batch_size = adj_t.size(0)
            h = self.convs[layer]((x, x[:batch_size]), adj_t)
            if layer == 1:
                h = self.bn(h) + x[:batch_size]
            h = h.relu()
            state.setdefault("outs", []).append(h)
            return h if layer < 2 else self.lin(torch.cat(state["outs"], dim=-1))

    model = Stateful(60, 5, 3).eval()
    expected = model(graph[0].x, graph[0].edge_index)
    out = model(loader=gas.SubgraphLoader(*graph, batch_size=1, shuffle=shuffle, log=False))
    assert torch.allclose(out, expected, atol=1e-6)


def test_inference_is_linear_in_passes(graph, model):
    """Generic inference runs layer l of L in the sweeps l, l + 1, ..., L: about L/2 times."""
    fill(model, graph)  # Otherwise it would run forward once more, to see whether it is right.
    calls = [0, 0, 0]
    for layer, conv in enumerate(model.convs):
        conv.register_forward_hook(
            lambda *_, layer=layer: calls.__setitem__(layer, calls[layer] + 1)
        )
    model(loader=gas.EvalSubgraphLoader(*graph, batch_size=2, log=False))
    assert calls == [3 * 3, 3 * 2, 3 * 1]


def test_memory_of_inference_is_that_of_a_batch(graph, model):
    """No tensor but histories and the result has a row per node."""
    sizes = set()
    for conv in model.convs:
        conv.register_forward_hook(lambda m, args, out: sizes.add(out.size(0)))
    loader = gas.EvalSubgraphLoader(*graph, log=False)
    model(loader=loader)
    assert max(sizes) == max(batch_size for _, batch_size, *_ in loader) < 60


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
