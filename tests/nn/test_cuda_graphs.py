"""Layers in captured CUDA graphs, and seeds without a wait for the device."""

import importlib

import pytest
import torch
from adjacencies import make_adjacency

from gas.nn import attention, gat_attention, gatv2_attention

dropout = importlib.import_module("gas.nn.dropout")  # The package names the function so.
CUDA = torch.device("cuda")


@pytest.fixture
def case():
    adj = make_adjacency(20, 50, 300)
    x, ends = (torch.randn(n, 2, 4) for n in (50, 20))
    return adj, {
        gat_attention: (x, torch.randn(50, 2), torch.randn(20, 2)),
        gatv2_attention: (x, ends, torch.randn(2, 4)),
    }


def test_dropout_is_refused_where_its_seed_would_stay(monkeypatch):
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(RuntimeError, match="'dropout' is 0.5 while a CUDA graph is captured"):
        attention.draw_seed(0.5, CUDA)
    assert attention.draw_seed(0.0, CUDA) == 0
    attention.draw_seed(0.5, torch.device("cpu"))  # Of another batch, outside the capture.
    capturing = False
    attention.draw_seed(0.5, CUDA)


def test_operators_ask_for_the_device_of_their_features(case, monkeypatch):
    adj, inputs = case
    asked = []
    monkeypatch.setattr(
        attention, "draw_seed", lambda p, device: asked.append((p, device)) or torch.tensor(7)
    )
    for operator, tensors in inputs.items():
        operator(adj, *tensors, dropout=0.5)
        operator(adj, *tensors, dropout=0.5, training=False)
    assert asked == 2 * [(0.5, torch.device("cpu")), (0.0, torch.device("cpu"))]


def test_seeds_are_the_cpus_wherever_tensors_are_made(case):
    """A user's default device may be the GPU, where reading a seed would wait for it."""
    adj, inputs = case
    torch.manual_seed(1)
    expected = [operator(adj, *t, dropout=0.5) for operator, t in inputs.items()]
    seed = dropout._seed()
    torch.manual_seed(1)
    with torch.device("meta"):
        found = [operator(adj, *t, dropout=0.5) for operator, t in inputs.items()]
        assert dropout._seed() == seed
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.requires("cuda")
def test_captured_attention(case):
    """A replay reads what is in its inputs by then."""
    adj, inputs = case
    adj = adj.to(CUDA)
    for operator, tensors in inputs.items():
        tensors = [tensor.to(CUDA) for tensor in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            operator(adj, *tensors)  # Makes what is made once.
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operator(adj, *tensors)
        tensors[0].normal_()
        graph.replay()
        assert torch.equal(out, operator(adj, *tensors))
        refused = pytest.raises(RuntimeError, match="while a CUDA graph is captured")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensors[0].mul_(1.0)  # An empty graph would be warned of.
            operator(adj, *tensors, dropout=0.5)


@pytest.mark.requires("cuda")
def test_the_same_seed_drops_the_same_as_on_the_cpu(case):
    adj, inputs = case
    for operator, tensors in inputs.items():
        torch.manual_seed(2)
        expected = operator(adj, *tensors, dropout=0.5)
        torch.manual_seed(2)
        out = operator(adj.to(CUDA), *(t.to(CUDA) for t in tensors), dropout=0.5)
        assert torch.allclose(out.cpu(), expected, atol=1e-4)
