"""Calls and models that are wrong: they say so, and the histories hold what they held."""

import copy
import pickle
from functools import partial

import pytest
import torch
from conftest import clustered_graph, random_graph
from torch_geometric.nn import GraphSAGE
from user_models import SAGE, batch_of, fill, unchanged

import gas


@pytest.fixture
def graph():
    return clustered_graph()


@pytest.fixture
def model():
    return SAGE(60, 5, 3).eval()


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


def test_histories_of_another_model_are_no_substitute(graph):
    model, other = (Faulty([(0, lambda x: x), (1, lambda x: x)]) for _ in range(2))
    for history in (*model.histories, *other.histories):
        history.push(torch.zeros(60, 5))
    object.__setattr__(model, "push_and_pull", partial(push_elsewhere, model, other))
    with pytest.raises(RuntimeError, match="expected once for each of the model's 2 histories"):
        model(batch_of(graph))
    assert not any(history.emb.any() for history in other.histories)


def push_elsewhere(model, other, history, x, *args):
    position = list(model.histories).index(history)
    return type(model).push_and_pull(model, other.histories[position], x, *args)


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


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("text", ["no such layout", "out of luck"])
def test_only_pytorchs_errors_of_sparse_features_get_other_words(graph, is_sparse, kind, text):
    data, ptr = graph
    data.x = data.x.to_sparse_csr() if is_sparse else data.x

    class Fails(gas.ScalableGNN):
        def forward(self, x, adj_t, *args):
            raise kind(text)

    batch = next(iter(gas.SubgraphLoader(data, ptr, log=False)))
    is_explained = is_sparse and kind is RuntimeError and text == "no such layout"
    words = r"'x' is a torch.sparse_csr .* \(no such layout\)" if is_explained else f"^{text}$"
    with pytest.raises(kind, match=words):
        Fails(data.num_nodes, 4, 2)(batch)


def test_batches_of_another_clustering_are_refused():
    data, model = random_graph(), SAGE(60, 5, 3).eval()
    first, second = (gas.cluster(data, parts, log=False) for parts in (3, 5))
    loaders = [gas.SubgraphLoader(graph, batch_size=2, log=False) for graph in (first, second)]
    out = [model.predict(graph) for graph in (second, first)]
    torch.testing.assert_close(*out)
    before = [history.emb.clone() for history in model.histories]
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="another clustering than those before"):
            one(next(iter(loaders[1])))
    assert unchanged(model, before)
    with pytest.warns(UserWarning, match="before it was filled"):
        model.for_graph(60)(next(iter(loaders[1])))
    model.refresh(second, norms=False, log=False)
    for batch in loaders[1]:
        nodes = second.perm[batch.n_id[: batch.batch_size]]
        torch.testing.assert_close(model(batch), out[0][nodes])
    with pytest.raises(ValueError, match="another clustering than those before"):
        model(next(iter(loaders[0])), push=False)
    model.reset_parameters()
    with pytest.warns(UserWarning, match="before it was filled"):
        model(next(iter(loaders[0])))


def test_a_checkpoint_brings_the_order_of_its_rows(tmp_path):
    data, model = random_graph(), SAGE(60, 5, 3)
    first, second = (gas.cluster(data, parts, log=False) for parts in (3, 5))
    model.refresh(first, log=False)
    gas.save(tmp_path, model)
    model.refresh(second, log=False)
    for loaded in (model, SAGE(60, 5, 3)):
        gas.load(tmp_path, loaded)
        with pytest.raises(ValueError, match="another clustering than those before"):
            loaded(next(iter(gas.SubgraphLoader(second, log=False))))
        loaded(next(iter(gas.SubgraphLoader(first, log=False))))


def test_staleness_on_another_clustering_is_refused():
    data, model = random_graph(), SAGE(60, 5, 3)
    first, second = (gas.cluster(data, parts, log=False) for parts in (3, 5))
    model.refresh(first, log=False)
    assert len(model.staleness(gas.SubgraphLoader(first, log=False))) == len(model.histories)
    with pytest.raises(ValueError, match="another clustering than those before"):
        model.staleness(gas.SubgraphLoader(second, log=False))


def test_a_model_without_histories_takes_any_clustering():
    data = random_graph()
    model = gas.models.GraphSAGE(60, 5, 8, 3, num_layers=1).eval()
    full = model(data.x, gas.nn.Adjacency.of(data.edge_index, 60))
    for parts in (3, 5):
        graph = gas.cluster(data, parts, log=False)
        for batch in gas.SubgraphLoader(graph, log=False):
            own = graph.perm[batch.n_id[: batch.batch_size]]
            torch.testing.assert_close(model(batch), full[own])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
def test_a_square_mini_batch_without_ids_is_no_full_batch(layout, num_workers):
    """As with PyG's loaders, ``model(batch.x, batch.edge_index)[:batch.batch_size]``."""
    data = random_graph()
    model = gas.to_scalable(GraphSAGE(5, 4, 2, 3), data)
    graph = gas.cluster(data, 4, method="random", model=model, log=False)
    options = dict(layout=layout, bipartite=False, num_workers=num_workers, log=False)
    for batch in gas.SubgraphLoader(graph, batch_size=2, **options):
        for each in (batch, batch.to("cpu")):
            adj = each.edge_index if layout == "edge_index" else each.adj_t
            with pytest.raises(ValueError, match="is that of a mini-batch, which comes with ids"):
                model(each.x, adj)
    (batch,) = gas.SubgraphLoader(graph, batch_size=4, **{**options, "num_workers": 0})
    adj = batch.edge_index if layout == "edge_index" else batch.adj_t
    torch.testing.assert_close(model(batch.x, adj), model(batch))  # All nodes: no halo.


def test_several_outputs_of_a_subclass_are_those_of_the_batch():
    class Several(gas.ScalableGNN):
        def __init__(self):
            super().__init__(60, 5, 2)

        def forward(self, x, adj_t, *args):
            x = self.push_and_pull(self.histories[0], x, *args)
            return {"rows": x, "others": [x.sum(0), "a name"]}

    model = Several()
    graph = gas.cluster(random_graph(), 4, method="random", log=False)
    model.histories[0].push(torch.zeros(60, 5))
    for batch in gas.SubgraphLoader(graph, batch_size=2, layout="edge_index", log=False):
        out = model(batch)
        assert torch.equal(out["rows"], batch.x[: batch.batch_size])
        assert out["others"][0].shape == (5,)
        assert out["others"][1] == "a name"
