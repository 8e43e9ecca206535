"""Layer-wise inference, ``model(loader=...)``: what it needs, costs and leaves behind."""

import pytest
import torch
from conftest import clustered_graph, random_graph
from user_models import SAGE, fill, unchanged

import gas


@pytest.fixture
def graph():
    return clustered_graph()


@pytest.fixture
def model():
    return SAGE(60, 5, 3).eval()


def test_inference_leaves_every_module_in_its_mode(graph, model):
    model.train()
    model.bn.eval()
    model(loader=gas.EvalSubgraphLoader(*graph, log=False))
    assert model.training
    assert model.lin.training
    assert not model.bn.training


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
