"""Arguments of a call and its side effects: keyword arguments, threads, recomputing."""

import threading

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import clustered_graph
from torch.utils.checkpoint import checkpoint
from user_models import SAGE, batch_of, fill, unchanged

import gas
from gas.augment import DropEdge
from gas.training import train_epoch


class Positioned(gas.ScalableGNN):
    """Takes positions of nodes and types of edges by name."""

    def __init__(self, own_layers=False):
        super().__init__(60, 4, num_layers=2)
        self.first, self.last = pyg.SAGEConv(5 + 2, 4), pyg.RGCNConv(4, 3, num_relations=2)
        self.own_layers = own_layers
        self.seen = []

    def forward(self, x, edge_index, *args, pos=None, edge_type=None, missing=None):
        self.seen.append((pos, edge_type, missing))
        x = self.first(torch.cat([x, pos], dim=-1), edge_index).relu()
        x = self.push_and_pull(self.histories[0], x, *args)
        return self.last(x, edge_index, edge_type)


class ByLayer(Positioned):
    def forward_layer(self, layer, x, edge_index, state, pos=None, edge_type=None):
        if layer == 0:
            return self.first(torch.cat([x, pos], dim=-1), edge_index).relu()
        return self.last(x, edge_index, edge_type)


@pytest.fixture
def typed():
    data, ptr = clustered_graph()
    data.pos = torch.randn(60, 2)
    data.edge_type = torch.randint(2, (data.num_edges,))
    data.train_mask = torch.ones(60, dtype=torch.bool)
    data.y = torch.randint(3, (60,))
    return data, ptr


@pytest.mark.parametrize("cls", [Positioned, ByLayer])
def test_inference_brings_what_forward_names(typed, cls):
    data, _ = typed
    model = cls()
    whole = model.eval()(data.x, data.edge_index, pos=data.pos, edge_type=data.edge_type)
    loader = gas.EvalSubgraphLoader(*typed, batch_size=2, layout="edge_index", log=False)
    assert torch.allclose(model(loader=loader), whole, atol=1e-5)
    assert all(missing is None for *_, missing in model.seen)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@pytest.mark.parametrize("edge_dropout", [0.0, 0.5])
def test_training_brings_what_forward_names(typed, edge_dropout):
    model = Positioned()
    loader = gas.SubgraphLoader(*typed, batch_size=2, layout="edge_index", log=False)
    optimizer = torch.optim.Adam(model.parameters())
    train_epoch(model, loader, optimizer, edge_dropout=edge_dropout)
    data, _ = typed
    rows = 0
    for (batch, *_), (pos, edge_type, _) in zip(loader, model.seen, strict=True):
        assert torch.equal(pos, batch.pos)
        rows += edge_type.numel()
    assert (rows == data.num_edges) == (edge_dropout == 0)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_views_bring_what_forward_names(typed):
    data, ptr = typed
    augmentation = DropEdge(data, p=0.5)
    loader = gas.SubgraphLoader(
        data, ptr, batch_size=2, layout="edge_index", epoch_transform=augmentation, log=False
    )
    model = Positioned()
    for batch in loader:
        model.seen.clear()
        model.views(batch)
        for (pos, edge_type, _), view in zip(
            model.seen, [batch.data, *batch.data.views], strict=True
        ):
            assert torch.equal(pos, batch.data.pos)
            assert torch.equal(edge_type, data.edge_type[view.e_id])


def test_without_pushing_nothing_changes():
    graph = clustered_graph()
    model = SAGE(60, 5, 3).eval()
    before = fill(model, graph)
    ages = [history.age.clone() for history in model.histories]
    batch, *args = batch_of(graph)
    expected = model(graph[0].x, graph[0].edge_index)[args[1][: args[0]]]
    out = model(batch.x, batch.adj_t, *args, push=False)
    assert torch.allclose(out, expected, atol=1e-5)
    perturbed = model(batch.x * 2, batch.adj_t, *args, push=False)
    assert not torch.allclose(perturbed, expected, atol=1e-2)
    assert unchanged(model, before)
    assert all(torch.equal(h.age, age) for h, age in zip(model.histories, ages, strict=True))
    with pytest.raises(ValueError, match="'loader' brings its own batches"):
        model(loader=gas.EvalSubgraphLoader(*graph, log=False), push=False)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_push_and_pull_is_refused(reentrant):
    class Checkpointed(SAGE):
        around = True

        def forward(self, x, adj_t, *args):
            own = args[0] if args else None

            def block(x):
                x = self.convs[0]((x, x[:own]), adj_t).relu()
                if self.around:
                    x = self.push_and_pull(self.histories[0], x, *args)
                return x.tanh()

            x = checkpoint(block, x, use_reentrant=reentrant)
            if not self.around:
                x = self.push_and_pull(self.histories[0], x, *args)
            x = self.convs[1]((x, x[:own]), adj_t)
            x = self.push_and_pull(self.histories[1], x, *args)
            return self.convs[2]((x, x[:own]), adj_t)

    graph = clustered_graph()
    model = Checkpointed(60, 5, 3)
    batch, *args = batch_of(graph)
    x = batch.x.requires_grad_()
    out = model(x, batch.adj_t, *args)
    before = [history.emb.clone() for history in model.histories]
    with pytest.raises(RuntimeError, match=r"called in the backward pass.*Checkpoint the layers"):
        out.sum().backward()
    assert unchanged(model, before)
    model.around = False  # The cure.
    model(x, batch.adj_t, *args).sum().backward()


class Waiting(SAGE):
    """Waits within forward until it is let go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, x, adj_t, *args):
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go.wait(30)
        return super().forward(x, adj_t, *args)


def test_a_second_thread_is_refused():
    graph = clustered_graph()
    model = Waiting(60, 5, 3).eval()
    fill(model, graph)
    batch, *args = batch_of(graph)
    expected = model(batch.x, batch.adj_t, *args, push=False)
    outs = []
    thread = threading.Thread(target=lambda: outs.append(model(batch.x, batch.adj_t, *args)))
    thread.start()
    assert model.entered.wait(30)
    before = [history.emb.clone() for history in model.histories]
    other, *others = batch_of(graph, 1)
    with pytest.raises(RuntimeError, match="another thread is calling this model"):
        model(other.x, other.adj_t, *others)
    assert unchanged(model, before)
    whole = model(graph[0].x, graph[0].edge_index)  # Uses no histories.
    model.go.set()
    thread.join()
    assert torch.allclose(outs[0], expected, atol=1e-6)
    assert torch.allclose(outs[0], whole[args[1][: args[0]]], atol=1e-5)
    model(other.x, other.adj_t, *others)


def test_a_call_that_failed_lets_others_in():
    graph = clustered_graph()
    model = SAGE(60, 5, 3).eval()
    fill(model, graph)
    batch, *args = batch_of(graph)
    with pytest.raises(RuntimeError):
        model(batch.x[:, :3], batch.adj_t, *args)
    done = []
    thread = threading.Thread(target=lambda: done.append(model(batch.x, batch.adj_t, *args)))
    thread.start()
    thread.join()
    assert len(done) == 1


def test_other_threads_are_refused_during_an_inference():
    """Between two of its calls, the model isn't in the mode that its user has set."""
    graph = clustered_graph()
    data, ptr = graph
    model = SAGE(60, 5, 3)
    fill(model, graph)
    loader = gas.EvalSubgraphLoader(data, ptr, log=False)
    expected, refused = model(loader=loader), []
    batch, *args = batch_of(graph)

    class Watched:
        """Calls the model from another thread before each batch."""

        def __iter__(self):
            for each in loader:
                thread = threading.Thread(target=call_both)
                thread.start()
                thread.join()
                yield each

    def call_both():
        for call in (lambda: model(batch.x, batch.adj_t, *args), lambda: model(loader=loader)):
            with pytest.raises(RuntimeError, match="another thread is calling this model"):
                call()
            refused.append(not model.training)

    assert torch.equal(model(loader=Watched()), expected)
    assert model.training
    assert all(refused)
    assert len(refused) == 2 * len(ptr[1:]) * (len(model.histories) + 1)
    model(batch.x, batch.adj_t, *args)
