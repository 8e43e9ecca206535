"""``torch.compile(model)``: one graph for a forward pass, and the results of the model."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import REQUIREMENTS, random_graph
from torch._dynamo.utils import counters
from torch_geometric.data import Data
from torch_geometric.nn import GIN, EdgeConv, GATConv, GCNConv, GraphSAGE, SAGEConv

import gas

LAYOUTS = ["fused", "csr", "edge_index"]
ONE_GRAPH, _ = REQUIREMENTS["one_graph"]


class Net(gas.ScalableGNN):
    """Layers of PyG, as a user writes them."""

    def __init__(self, conv, norm):
        super().__init__(300, 8, num_layers=3)
        widths = [5, 8, 8, 3]
        self.convs = torch.nn.ModuleList(conv(i, o) for i, o in itertools.pairwise(widths))
        self.norm = norm

    def forward(self, x, adj_t, *args):
        is_square = isinstance(adj_t, torch.Tensor) and adj_t.layout == torch.strided
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            h = conv(x if is_square else (x, x[: args[0]]), adj_t)
            x = self.push_and_pull(history, self.norm(h).relu(), *args)
        return self.convs[-1](x if is_square else (x, x[: args[0]]), adj_t)


def sage(data):
    return Net(SAGEConv, torch.nn.BatchNorm1d(8))


def gat(data):
    return Net(lambda i, o: GATConv(i, o, add_self_loops=False), torch.nn.Tanh())


def gcn(data):
    return gas.models.GCN(300, 5, 8, 3, num_layers=3, batch_norm=True)


def gcn_with_rows_of_the_input(data):
    return gas.models.GCN(300, 5, 8, 3, num_layers=2, linear=True, residual=True)


def converted(data):
    return gas.to_scalable(GraphSAGE(5, 8, num_layers=3, out_channels=3, norm="batch"), data)


MODELS = [sage, gat, gcn, gcn_with_rows_of_the_input, converted]


def graph_and(make, layout, **kwargs):
    """Return a graph, a model, its copy to compile, and loaders of batches of any size."""
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


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MODELS)
def test_results(make, layout):
    graph, model, twin, loader = graph_and(make, layout)
    backend = Counting()
    compiled = torch.compile(twin, backend=backend)
    for training in (True, False) if make in (sage, gcn) else (True,):
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
    assert backend.graphs > 0 or layout == "csr"
    if ONE_GRAPH:
        assert breaks() == 0
        # For the sizes of the first batch, for any, and one part; of training and of evaluation.
        assert backend.graphs <= (0 if layout == "csr" else 2 * 3)
    expected = model.predict(graph, batch_size=3, layout=layout)
    assert torch.allclose(compiled.predict(graph, batch_size=3, layout=layout), expected, atol=1e-5)
    evaluation = gas.EvalSubgraphLoader(graph, None, 3, layout=layout, log=False)
    assert torch.allclose(compiled(loader=evaluation), model(loader=evaluation), atol=1e-5)
    assert breaks() == 0 or not ONE_GRAPH


def batches_of(make, layout="fused"):
    _, model, twin, loader = graph_and(make, layout)
    return model, twin, list(loader)


@pytest.mark.requires("one_graph")
def test_one_graph():
    model, _, batches = batches_of(gcn)
    found = torch._dynamo.explain(model.eval())(batches[0])
    assert (found.graph_count, found.graph_break_count) == (1, 0)


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("make", [gcn, gcn_with_rows_of_the_input, converted])
def test_gradients_of_what_the_backward_pass_compiles(make):
    model, twin, batches = batches_of(make)
    compiled = torch.compile(twin, backend="aot_eager")
    for batch in batches[:3]:
        for one in (model, compiled):
            one.zero_grad()
            F.cross_entropy(one(batch), batch.own.y).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert_same(*([h.emb for h in m.histories] for m in (model, twin)))


@pytest.mark.slow
def test_read_only_and_full_batches():
    model, twin, batches = batches_of(gcn)
    model.eval()
    compiled = torch.compile(twin.eval(), backend="eager")
    before = [h.emb.clone() for h in twin.histories]
    for batch in batches[:3]:
        assert torch.allclose(compiled(batch, push=False), model(batch, push=False), atol=1e-5)
    assert all(map(torch.equal, before, (h.emb for h in twin.histories)))
    data = random_graph(300, 900)
    data = model.prepare(data)
    adj = gas.nn.Adjacency.of(data.edge_index, 300, data.edge_weight)
    assert torch.allclose(compiled(data.x, adj), model(data.x, adj), atol=1e-5)
    assert all(map(torch.equal, before, (h.emb for h in twin.histories)))
    compiled(data.x, adj, fill=True)
    model(data.x, adj, fill=True)
    assert_same(*([h.emb for h in m.histories] for m in (model, twin)))


def test_module_compile_and_a_module_around():
    model, twin, batches = batches_of(sage, "edge_index")
    model.eval()
    twin.eval().compile(backend="eager")
    around = torch.nn.Sequential(copy.deepcopy(model), torch.nn.ReLU())
    compiled = torch.compile(around, backend="eager")
    for batch in batches[:3]:
        out = model(batch)
        assert torch.allclose(twin(batch), out, atol=1e-5)
        assert torch.allclose(compiled(batch), out.relu(), atol=1e-5)
    assert_same(*([h.emb for h in m.histories] for m in (model, twin)))
    assert_same(*([h.emb for h in m.histories] for m in (model, around[0])))
    assert breaks() <= 2  # Of the module around, at the call: for the first sizes, and for any.


class OwnRows(gas.ScalableGNN):
    """Has no use for the rows of the halo."""

    def __init__(self):
        super().__init__(300, 5, num_layers=2)
        self.lin = torch.nn.Linear(5, 3)

    def forward(self, x, adj_t, batch_size, *args):
        x = self.push_and_pull(self.histories[0], 2 * x, batch_size, *args)
        return self.lin(x[:batch_size])


def test_rows_that_nobody_pulls_are_pushed():
    _, twin, batches = batches_of(lambda data: OwnRows())
    compiled = torch.compile(twin, backend="aot_eager")
    for batch in batches[:3]:
        compiled(batch).sum().backward()
        own = batch.n_id[: batch.batch_size]
        assert torch.equal(twin.histories[0].emb[own], 2 * batch.own.x)


class Faulty(OwnRows):
    """Does something wrong."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.conv = GCNConv(5, 5) if fault == "inexact" else None

    def forward(self, x, adj_t, *args):
        if self.fault == "inexact":
            x = self.conv(x, adj_t)
        elif self.fault == "narrow":
            return F.pad(self.push_and_pull(self.histories[0], x[:, :3], *args), (0, 2))
        elif self.fault == "untold":
            args = ()
        if self.fault != "never":
            x = self.push_and_pull(self.histories[0], x, *args)
        return self.lin(x)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@pytest.mark.parametrize("fault", ["inexact", "narrow", "untold", "never"])
def test_what_is_refused_is_refused(fault):
    data = gas.cluster(random_graph(300, 900), 16, log=False)
    batch = next(iter(gas.SubgraphLoader(data, batch_size=3, layout="edge_index", log=False)))
    model = Faulty(fault)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises((ValueError, RuntimeError), match="isn't exact|'x' has shape|0 times"):
        compiled(batch)
    assert not model.histories[0].written.any()
    model.fault = ""
    compiled(batch)  # It isn't left in the middle of a call.
    assert model.histories[0].written.any()


@pytest.mark.slow
def test_another_graph():
    model, _, batches = batches_of(gcn)
    model.eval()
    other = random_graph(200, 700)
    twin = model.for_graph(200)
    graph = gas.cluster(other, 8, model=twin, log=False)
    expected = twin.predict(graph)
    compiled, its = (torch.compile(one, backend="eager") for one in (model, twin))
    before = [h.emb.clone() for h in twin.histories]
    for batch in batches[:2]:
        compiled(batch)
    assert all(map(torch.equal, before, (h.emb for h in twin.histories)))
    for batch in gas.SubgraphLoader(graph, batch_size=2, log=False):
        own = batch.perm[: batch.batch_size]
        assert torch.allclose(its(batch), expected[own], atol=1e-5)


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize(
    "twin_of",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.for_graph(m.num_nodes)],
)
def test_copies_of_a_compiled_model_are_their_own(twin_of):
    model, _, batches = batches_of(gcn)
    model.eval().compile(backend="eager")
    expected = model(batches[0])
    twin = twin_of(model)
    for mine, its in zip(model.histories, twin.histories, strict=True):
        its.push(mine.emb)
    for history in model.histories:
        history.emb.fill_(3)
    assert torch.allclose(twin(batches[0]), expected, atol=1e-4)
    assert all((history.emb == 3).all() for history in model.histories)


@pytest.mark.slow
def test_gcn_is_compiled_in_training_unless_somebody_wrote_it():
    class Own(gas.models.GCN):
        pass

    for cls, is_compiled in ((gas.models.GCN, True), (Own, False)):
        data = random_graph(300, 900)
        model = cls(300, 5, 8, 3, num_layers=3, batch_norm=True)
        graph = gas.cluster(data, num_parts=16, model=model, log=False)
        model.predict(graph)
        backend = Counting()
        compiled = torch.compile(model, backend=backend)
        for batch in list(gas.SubgraphLoader(graph, batch_size=3, log=False))[:4]:
            compiled(batch)
        assert (backend.graphs > 0) == is_compiled


def running_means(model):
    return {key: value for key, value in model.state_dict().items() if "running_mean" in key}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fused", "csr", "edge_index"])
def test_norms_count_own_rows_when_the_layout_changes(first):
    """Inside a layer they see a batch's own rows in one layout and all rows in another."""
    data = random_graph(300, 1200)
    net = GIN(5, 8, num_layers=2, out_channels=3, norm="batch")
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = gas.to_scalable(copy.deepcopy(net), data)
        graph = gas.cluster(data, 8, model=model, log=False)
        model.predict(graph)
        run = torch.compile(model, backend="eager") if is_compiled else model
        model.train()
        for layout in (first, "edge_index", "edge_index", first):
            for batch in gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False):
                run(batch)
        results.append(running_means(model))
    assert len(results[0]) == 3
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_a_norm_of_edges_that_are_as_many_as_the_nodes():
    """Once it has been seen to count edges, it isn't taken for one of nodes."""
    node = torch.arange(20)
    edge_index = torch.cat([torch.stack([node, node]), torch.stack([node + 20, node])], dim=1)
    data = Data(x=torch.randn(60, 5), edge_index=edge_index, num_nodes=60)
    far = torch.stack([torch.arange(20, 40), torch.randint(40, 60, (20,))]).repeat(1, 3)
    data.edge_index = torch.cat([data.edge_index, far], dim=1)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            mlp = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8, momentum=1))
            self.convs = torch.nn.ModuleList([EdgeConv(mlp), SAGEConv(8, 3)])

        def forward(self, x, edge_index):
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    model = gas.to_scalable(Net(), data).train()
    ptr = torch.tensor([0, 20, 40, 60])
    loader = gas.SubgraphLoader(
        model.prepare(data), ptr, layout="edge_index", log=False, check=True
    )
    for part in (2, 0):  # 40 nodes, halo included, and 60 edges; then as many, and 40 edges.
        batch = loader.cut([part])
        model(batch)
    assert batch.n_id.numel() == batch.edge_index.size(1) == 40
    norm, source, target = model.net.convs[0].nn[1], *batch.edge_index
    x = batch.x
    seen = model.net.convs[0].nn[0](torch.cat([x[target], x[source] - x[target]], dim=1))
    torch.testing.assert_close(norm.running_mean, seen.mean(dim=0).detach())
