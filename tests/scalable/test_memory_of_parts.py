"""``gas.cluster(data, "auto", memory=...)``: as few parts as fit."""

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.scalable.memory import activation_bytes


@pytest.fixture
def data():
    return random_graph(num_nodes=600, num_edges=2400, directed=False)


def largest(model, graph):
    """By looking at every mini-batch."""
    loader = gas.SubgraphLoader(graph, log=False, layout="fused")
    return max(activation_bytes(model, loader.cut([part])) for part in range(len(graph.parts) - 1))


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("share", [2.0, 0.5, 0.2, 0.05])
def test_parts_fit_and_are_few(data, share):
    """Not many more than the fewest that fit, found by trying them all."""
    model = gas.models.GCN(600, 5, 32, 3, 3)
    whole = gas.cluster(data, 1, model=model, log=False)
    memory = int(share * largest(model, whole))
    graph = gas.cluster(data, "auto", model=model, memory=memory, log=False)
    assert largest(model, graph) <= memory
    fewest = next(
        parts for parts in range(1, 601)
        if largest(model, gas.cluster(data, parts, model=model, log=False)) <= memory
    )  # fmt: skip
    assert fewest <= len(graph.parts) - 1 <= max(1.3 * fewest, fewest + 1)
    assert not model.histories[0].written.any()


def test_of_a_converted_model(data):
    net = GraphSAGE(5, 32, 3, 4)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, "auto", model=model, memory=200_000, log=False)
    assert largest(model, graph) <= 200_000
    assert len(graph.parts) > 2


def test_large_graphs_are_measured_in_small_parts_first():
    """So that measuring never takes what training isn't allowed."""
    measured = []

    class Model(gas.models.GraphSAGE):
        def forward(self, x, *args, **kwargs):
            measured.append(x.size(0))
            return super().forward(x, *args, **kwargs)

    ring = torch.arange(20_000)
    ring = torch.stack([ring, (ring + 1) % 20_000])
    data = Data(x=torch.randn(20_000, 4), edge_index=torch.cat([ring, ring.flip(0)], 1))
    model = Model(20_000, 4, 8, 2, 2)
    memory = 300_000
    graph = gas.cluster(data, "auto", model=model, memory=memory, method="random", log=False)
    assert largest(model, graph) <= memory
    assert max(measured) < 20_000


def test_a_node_that_does_not_fit(data):
    model = gas.models.GCN(600, 5, 32, 3, 3)
    with pytest.raises(MemoryError, match="'memory' is 100 bytes, but a single node"):
        gas.cluster(data, "auto", model=model, memory=100, log=False)
