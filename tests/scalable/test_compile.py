"""``torch.compile(model)``: one graph for a forward pass, and the results of the model."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch._dynamo.utils import counters
from torch_geometric.nn import GATConv, GraphSAGE, SAGEConv

import gas

LAYOUTS = ["fused", "csr", "edge_index"]


class Net(gas.ScalableGNN):
    """Layers of PyG, as a user writes them."""

    def __init__(self, conv, num_nodes=300):
        super().__init__(num_nodes, 8, num_layers=3)
        widths = [5, 8, 8, 3]
        self.convs = torch.nn.ModuleList(conv(i, o) for i, o in itertools.pairwise(widths))
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, adj_t, *args):
        is_square = isinstance(adj_t, torch.Tensor) and adj_t.layout == torch.strided
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            h = conv(x if is_square else (x, x[: args[0]]), adj_t)
            x = self.push_and_pull(history, self.norm(h).relu(), *args)
        return self.convs[-1](x if is_square else (x, x[: args[0]]), adj_t)


def sage(data):
    return Net(SAGEConv)


def gat(data):
    return Net(lambda i, o: GATConv(i, o, add_self_loops=False))


def gcn(data):
    return gas.models.GCN(300, 5, 8, 3, num_layers=3, batch_norm=True)


def gcn_with_rows_of_the_input(data):
    return gas.models.GCN(300, 5, 8, 3, num_layers=2, linear=True, residual=True)


def converted(data):
    return gas.to_scalable(GraphSAGE(5, 8, num_layers=3, out_channels=3, norm="batch"), data)


MODELS = [sage, gat, gcn, gcn_with_rows_of_the_input, converted]


def graph_and(make, layout, **kwargs):
    """A graph, a model, the same again to be compiled, and loaders of batches of any size."""
    data = random_graph(300, 900)
    model = make(data)
    graph = gas.cluster(data, num_parts=16, model=model, log=False)
    model.predict(graph)  # Fills the histories.
    loader = gas.SubgraphLoader(graph, batch_size=3, layout=layout, log=False, **kwargs)
    return graph, model, copy.deepcopy(model), loader


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """A compiler that counts graphs."""

    def __init__(self, backend="eager"):
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.backend(graph, inputs)


def breaks():
    return sum(counters["graph_break"].values())


def assert_same(a, b):
    for one, other in zip(a, b, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MODELS)
def test_results(make, layout):
    graph, model, twin, loader = graph_and(make, layout)
    backend = Counting()
    compiled = torch.compile(twin, backend=backend)
    for training in (True, False):
        model.train(training)
        twin.train(training)
        for batch in loader:  # The last of one part.
            outs = []
            for one in (model, compiled):
                one.zero_grad()
                out = one(batch)
                F.cross_entropy(out, batch.own.y).backward()
                outs.append(out)
            assert_same(outs[:1], outs[1:])
            grads = ([p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin))
            assert_same(*grads)
            assert_same(model.buffers(), twin.buffers())
            assert_same(*([h.emb for h in m.histories] for m in (model, twin)))
            assert_same(*([h.age for h in m.histories] for m in (model, twin)))
    assert breaks() == 0
    # For the sizes of the first batch, for any, and for one part; of training and of evaluation.
    assert backend.graphs <= (0 if layout == "csr" else 2 * 3)
    assert backend.graphs > 0 or layout == "csr"
    expected = model.predict(graph, batch_size=3, layout=layout)
    assert torch.allclose(compiled.predict(graph, batch_size=3, layout=layout), expected, atol=1e-5)
    evaluation = gas.EvalSubgraphLoader(graph, None, 3, layout=layout, log=False)
    assert torch.allclose(compiled(loader=evaluation), model(loader=evaluation), atol=1e-5)
    assert breaks() == 0
