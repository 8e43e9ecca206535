import gc
import threading

import pytest
import torch
from conftest import clustered_graph
from user_models import SAGE

import gas


@pytest.fixture
def graph():
    return clustered_graph(10, num_nodes=200, num_edges=1200)


def make_model(graph, **kwargs):
    torch.manual_seed(0)
    model = SAGE(200, 5, 3, **kwargs)
    with torch.no_grad():
        model(graph[0].x, graph[0].edge_index, fill=True)
    return model.eval()


@pytest.fixture(autouse=True, params=["thread", "inline"])
def _beside(request, monkeypatch):
    """Batches are prepared by a thread where cores are idle."""
    monkeypatch.setattr("gas.scalable.prefetch.has_idle_cores", lambda: request.param == "thread")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_batches_of_the_loader_in_its_order(graph, prefetch):
    model = make_model(graph, prefetch=prefetch)
    loader = gas.SubgraphLoader(*graph, batch_size=3, shuffle=True, log=False)
    prefetching = gas.PrefetchLoader(loader, model)
    assert len(prefetching) == len(loader) == 4
    assert "PrefetchLoader(SubgraphLoader" in repr(prefetching)
    for _ in range(2):
        state = torch.get_rng_state()
        expected = list(loader)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found = list(prefetching)
        assert torch.equal(torch.get_rng_state(), after)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine.n_id, other.n_id)
            assert torch.equal(mine.data.x, other.data.x)
            assert torch.equal(mine.data.adj_t.values(), other.data.adj_t.values())


def test_the_loader_inside_is_saved_as_of_the_last_batch(graph):
    """It has cut one batch more, which isn't lost when training is continued from its state."""
    model = make_model(graph)
    loader = gas.SubgraphLoader(*graph, batch_size=3, shuffle=True, log=False)
    prefetching = gas.PrefetchLoader(loader, model)
    seen, states = [], []
    for batch in prefetching:
        seen.append(batch.n_id)
        states.append(loader.state_dict())
        assert states[-1]["order"] == prefetching.state_dict()["order"]
    assert [state["order"]["done"] for state in states] == [1, 2, 3, 4]
    assert loader.state_dict()["order"] == {"epoch": None, "done": 0}  # The epoch has ended.
    for done, state in enumerate(states, 1):
        other = gas.SubgraphLoader(*graph, batch_size=3, shuffle=True, log=False)
        other.load_state_dict(state)
        rest, order = [], []
        for batch in gas.PrefetchLoader(other, model):
            rest.append(batch.n_id)
            order.append(other.state_dict()["order"]["done"])
        assert order == [*range(done + 1, 5)]
        assert all(map(torch.equal, rest, seen[done:]))


def test_a_loop_that_was_left_does_not_count_for_the_next(graph):
    model = make_model(graph)
    loader = gas.SubgraphLoader(*graph, batch_size=3, shuffle=True, log=False)
    left = iter(gas.PrefetchLoader(loader, model))
    next(left)
    for done, _ in enumerate(loader, 1):
        assert loader.state_dict()["order"]["done"] == done
    left.close()
    assert loader.state_dict()["order"] == {"epoch": None, "done": 0}


def test_loops_of_one_loader_count_their_own_batches(graph):
    """A thread of a loop that was left may draw a batch after the next loop has begun."""
    loader = gas.SubgraphLoader(*graph, batch_size=3, shuffle=True, log=False)
    left, other = iter(loader), iter(loader)
    next(left)
    for done, _ in enumerate(other, 1):
        assert loader.state_dict()["order"]["done"] == done
        if done < 3:
            next(left)
    left.close()
    inner = gas.PrefetchLoader(loader, make_model(graph))
    for done, _ in enumerate(gas.PrefetchLoader(loader, make_model(graph)), 1):
        before = loader.state_dict()["order"]
        assert before["done"] == done
        list(inner)
        assert loader.state_dict()["order"] == before
    assert loader.state_dict()["order"] == {"epoch": None, "done": 0}


def test_prefetched_rows_are_those_before_the_last_batch(graph):
    """prefetch=1: a batch sees all pushes but those of the batch before it."""
    loader = gas.SubgraphLoader(*graph, batch_size=2, log=False)
    seen = []

    class Recording(gas.ScalableGNN):
        def forward(self, x, adj_t, batch_size, n_id, *args):
            step = float(len(seen) + 1)
            x = x.new_full((batch_size, 1), step)
            x = self.push_and_pull(self.histories[0], x, batch_size, n_id, *args)
            seen.append((n_id, x[batch_size:, 0]))
            return x

    for prefetch in (0, 1):
        for _ in range(2):
            seen.clear()
            model = Recording(200, 1, 2, prefetch=prefetch)
            model.histories[0].push(torch.zeros(200, 1))
            batches = list(loader)
            for batch, *args in gas.PrefetchLoader(loader, model):
                model(batch.x, batch.adj_t, *args)
            table = torch.zeros(len(batches) + 1, 200)  # After so many steps.
            for step, batch in enumerate(batches):
                table[step + 1] = table[step]
                table[step + 1, batch.n_id[: batch.batch_size]] = step + 1.0
            for step, (n_id, rows) in enumerate(seen):
                sees = max(step - prefetch, 0)
                halo = n_id[batches[step].batch_size :]
                assert torch.equal(rows, table[sees, halo])


@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("pool_size", [None, 1, 2])
def test_started_pulls_do_not_see_later_pushes(graph, pool_size, store, io):
    seen = []

    class Recording(gas.ScalableGNN):
        def forward(self, x, adj_t, batch_size, *args):
            for history in self.histories:
                out = self.push_and_pull(history, x[:, :2], batch_size, *args)
                seen.append(out[batch_size:].clone())
            return x

    model = Recording(200, 2, 5, pool_size=pool_size, store=store, io=io)
    for number, history in enumerate(model.histories):
        history.push(torch.full((200, 2), float(number)))
    batch = next(iter(gas.SubgraphLoader(*graph, batch_size=3, log=False)))
    gas.scalable.start_pulls(model, batch)
    for history in model.histories:
        history.push(torch.full((200, 2), -1.0))
    model(batch.data.x, batch.data.adj_t, *batch[1:])
    for number, rows in enumerate(seen):
        assert rows.numel() > 0
        assert (rows == number).all()
    model.close()


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_nothing_crosses_an_epoch(graph, prefetch):
    model = make_model(graph, prefetch=prefetch)
    loader = gas.PrefetchLoader(gas.SubgraphLoader(*graph, batch_size=3, log=False), model)
    before = threading.active_count()
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args)
    assert not model._started_pulls
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args)
        break
    gc.collect()
    assert not model._started_pulls
    assert threading.active_count() == before


def test_sweeps_converge_with_prefetching(graph):
    """E2: one more sweep at most, because rows are one step older."""
    data, ptr = graph
    model = make_model(graph, prefetch=1)
    expected = model(data.x, data.edge_index).detach()
    for history in model.histories:
        history.push(torch.zeros_like(history.emb))
    loader = gas.SubgraphLoader(data, ptr, batch_size=3, shuffle=True, log=False)
    for _ in range(2 * model.num_layers):
        out = torch.zeros_like(expected)
        for batch, *args in gas.PrefetchLoader(loader, model):
            out[args[1][: args[0]]] = model(batch.x, batch.adj_t, *args).detach()
    assert float((out - expected).abs().max() / expected.abs().max()) < 1e-5


def test_errors_of_the_loader_arrive(graph):
    model = make_model(graph, prefetch=1)

    def broken():
        yield from list(gas.SubgraphLoader(*graph, batch_size=3, log=False))[:2]
        raise RuntimeError("the graph is gone")

    batches = iter(gas.PrefetchLoader(broken(), model))
    next(batches)
    with pytest.raises(RuntimeError, match="the graph is gone"):
        list(batches)
    assert list(gas.PrefetchLoader([], model)) == []


@pytest.mark.parametrize("layer", [gas.nn.SAGEConv, gas.nn.GATConv])
def test_the_thread_makes_what_layers_made_of_the_batch_before(graph, request, layer):
    class Model(gas.ScalableGNN):
        def __init__(self):
            super().__init__(200, 4, 2)
            self.convs = torch.nn.ModuleList([layer(5, 4), layer(4, 3)])

        def forward(self, x, adj_t, batch_size, *args):
            x = self.convs[0]((x, x[:batch_size]), adj_t)
            x = self.push_and_pull(self.histories[0], x, batch_size, *args)
            return self.convs[1]((x, x[:batch_size]), adj_t)

    def known(adj):
        looped = adj._structure.with_self_loops
        return adj._structure.known, looped and looped._structure.known

    model = Model()
    model.histories[0].push(torch.zeros(200, 4))
    options = {"batch_size": 2, "layout": "fused", "log": False}
    loader = gas.SubgraphLoader(*graph, cache=False, **options)
    is_thread = request.node.callspec.params["_beside"] == "thread"
    plain = list(loader)
    for number, batch in enumerate(gas.PrefetchLoader(loader, model)):
        before, adj = known(batch.adj_t), batch.adj_t
        model(batch).sum().backward()
        model(plain[number]).sum().backward()
        others = known(plain[number].adj_t)
        # Beside the first: the layers may or may not have been there by then.
        is_second = is_thread and number == 1
        if is_thread and number >= 2:
            assert before == known(adj)  # The same objects: none was made.
            for mine, other in zip(before, others, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert all(map(torch.equal, mine[0], other[0]))
                    assert mine[1] == other[1]
        elif not is_second:
            assert before == (None, None)
        assert any(known(adj))
