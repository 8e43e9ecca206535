"""Models support autocast, DDP, hooks and copies, as any module."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE, SAGEConv

import gas


class Written(gas.ScalableGNN):
    """A model as a user writes it."""

    def __init__(self, num_nodes=60):
        super().__init__(num_nodes, 8, num_layers=3)
        self.convs = torch.nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 8), SAGEConv(8, 3)])

    def forward(self, x, adj_t, *args):
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = self.push_and_pull(history, conv(x, adj_t).relu(), *args)
        return self.convs[-1](x, adj_t)


def written(data):
    return Written(), "edge_index"


def by_rows(data):
    return gas.models.GraphSAGE(60, 5, 8, 3, num_layers=3), "fused"


def converted(data):
    return gas.to_scalable(GraphSAGE(5, 8, num_layers=3, out_channels=3), data), "fused"


@pytest.fixture(params=[written, by_rows, converted])
def case(request):
    """A model, and batches of it."""
    data = random_graph()
    model, layout = request.param(data)
    graph = gas.cluster(data, num_parts=6, model=model, log=False)
    model.predict(graph, layout=layout)
    return model, gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)


def step(model, batch):
    model.zero_grad()
    out = model(batch)
    F.cross_entropy(out.float(), batch.own.y).backward()
    return out.detach()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def rows_of(model):
    return [history.emb.clone() for history in model.histories]


def equal(a, b, **tolerance):
    return all(torch.allclose(x, y, **tolerance) for x, y in zip(a, b, strict=True))


def convs_of(model):
    return model.net.convs if hasattr(model, "net") else model.convs


def test_autocast(case):
    model, loader = case
    twin = copy.deepcopy(model)
    seen = []
    convs_of(model)[1].lin_l.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(8):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(batch)
                loss = F.cross_entropy(out, batch.own.y)
            loss.backward()
            if epoch == 0 and not losses and total == 0.0:
                step(twin, batch)
                assert equal(gradients(model), gradients(twin), atol=0.05)
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            total += loss.item()
        losses.append(total)
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(rows).all() for rows in rows_of(model))
    assert all(history.emb.dtype == torch.float32 for history in model.histories)


@pytest.fixture
def _alone(tmp_path):
    """One process that is all of its group."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_in_ddp(case):
    model, loader = case
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, twin)]
    for _ in range(2):
        for batch in loader:
            outs = [step(one, batch) for one in (wrapped, twin)]
            assert torch.equal(*outs)
            assert equal(gradients(wrapped), gradients(twin))
            for optimizer in optimizers:
                optimizer.step()
    assert equal(rows_of(model), rows_of(twin))
    batch = next(iter(loader))
    before = rows_of(model)
    assert torch.equal(wrapped(batch, push=False), twin(batch, push=False))
    assert equal(before, rows_of(model))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # PyTorch's, of any module.
def test_hooks_are_called_once(case):
    model, loader = case
    batch = next(iter(loader))
    expected = model(batch, push=False)
    seen = []
    with_kwargs = {"with_kwargs": True}
    model.register_forward_pre_hook(lambda m, a, k: seen.append(("before", a)), **with_kwargs)
    model.register_forward_hook(lambda m, a, out: seen.append(("after", out)))
    model.register_full_backward_hook(lambda m, i, o: seen.append(("backward", o[0])))
    conv = convs_of(model)[1]
    conv.register_forward_hook(lambda m, a, out: seen.append(("layer", out)))
    conv.lin_l.register_full_backward_hook(lambda m, i, o: seen.append(("layer back", o[0])))
    out = model(batch)
    assert torch.allclose(out, expected)
    out.sum().backward()
    assert [name for name, _ in seen] == ["before", "layer", "after", "backward", "layer back"]
    (_, given), (_, rows), (_, result), (_, grad), (_, back) = seen
    assert given[0] is batch.x
    assert given[2:] == (batch.batch_size, batch.n_id, batch.offset, batch.count)
    assert rows.shape[1] == 8
    assert torch.equal(result[: batch.batch_size], out)
    assert torch.equal(grad[: batch.batch_size], torch.ones_like(out))
    assert back.shape[1] == 8
    assert back.abs().sum() > 0


def test_a_hook_changes_what_is_given_and_what_comes_out(case):
    model, loader = case
    batch = next(iter(loader))
    once = model(batch, push=False)
    double = model.register_forward_hook(lambda m, a, out: 2 * out)
    assert torch.allclose(model(batch, push=False), 2 * once)
    double.remove()
    convs_of(model)[0].register_forward_hook(lambda m, a, out: torch.zeros_like(out))
    model(batch)
    assert all(not rows[batch.n_id[: batch.batch_size]].any() for rows in rows_of(model)[:1])


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_models_of_their_own(case, twin_of):
    model, loader = case
    before = rows_of(model), [p.detach().clone() for p in model.parameters()]
    twin = twin_of(model)
    assert equal(rows_of(twin), before[0])
    batch = next(iter(loader))
    assert torch.equal(twin(batch, push=False), model(batch, push=False))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for batch in loader:
        step(twin, batch)
        optimizer.step()
    assert equal(rows_of(model), before[0])
    assert equal([p.detach() for p in model.parameters()], before[1])
    assert all(p.grad is None for p in model.parameters())
    assert not equal(rows_of(twin), before[0])
    assert not equal([p.detach() for p in twin.parameters()], before[1])


def test_batches_read_as_neighbour_loaders_do(case):
    _, loader = case
    for batch in loader:
        assert isinstance(batch.batch_size, int)
        assert batch.n_id.shape == (batch.num_nodes,)
        assert torch.equal(batch.x, loader.data.x[batch.n_id])
        assert torch.equal(batch.y[: batch.batch_size], batch.own.y)
