"""Outputs of ``push_and_pull``: a tensor owned by the caller or, on request, two parts."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T

import gas
from gas.datasets.planted import planted_partition
from gas.history import Rows


class Script(gas.ScalableGNN):
    """A model as a user writes it, which changes what it pulls in several ways."""

    def __init__(self):
        super().__init__(60, 6, 3)
        sizes = [(4, 6), (6, 6), (6, 3)]
        self.convs = torch.nn.ModuleList(pyg.SAGEConv(i, o) for i, o in sizes)

    def forward(self, x, adj_t, batch_size, *args):
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv((x, x[:batch_size]), adj_t).relu()
            x = self.push_and_pull(history, x, batch_size, *args)
            assert type(x) is torch.Tensor
        return self.convs[-1]((x, x[:batch_size]), adj_t) + F.elu(x)[:batch_size].sum(1)[:, None]


class RowsScript(Script):
    """The same, by parts."""

    def forward(self, x, adj_t, batch_size, *args):
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv(x if isinstance(x, Rows) else (x, x[:batch_size]), adj_t).relu()
            x = self.push_and_pull(history, x, batch_size, *args, rows=True)
            assert isinstance(x, Rows)
        return self.convs[-1](x, adj_t) + F.elu(x.own).sum(1)[:, None]


def make_loader(layout="fused", transform=lambda data: data, loader=gas.SubgraphLoader):
    data = transform(planted_partition(60, 5, 3, 4, 20))
    perm, ptr = gas.metis(data.edge_index, 3, num_nodes=60, log=False)
    return loader(gas.permute(data, perm, log=False), ptr, layout=layout, log=False)


def test_a_users_model():
    torch.manual_seed(0)
    plain_model = Script()
    plain_model.histories[0].push(torch.randn(60, 6))
    plain_model.histories[1].push(torch.randn(60, 6))
    fused_model = gas.fuse(copy.deepcopy(plain_model))
    rows_model = copy.deepcopy(fused_model)
    rows_model.__class__ = RowsScript
    grads = []
    for model, layout in ((plain_model, "csr"), (fused_model, "fused"), (rows_model, "fused")):
        for batch, *args in make_loader(layout):
            model(batch.x, batch.adj_t, *args).pow(2).mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(conv.path == "fused" for conv in [*fused_model.convs, *rows_model.convs])
    for wanted, *others in zip(*grads, strict=True):
        for other in others:
            assert torch.allclose(wanted, other, rtol=1e-4, atol=1e-6)


class Keeps(gas.ScalableGNN):
    """A model that keeps what it was given."""

    def __init__(self, rows=False, io="serial"):
        super().__init__(60, 4, 2, io=io)
        self.conv = gas.nn.SAGEConv(4, 3)
        self.kept = []
        self.rows = rows
        self.dropout = gas.nn.Dropout(0.5)

    def forward(self, x, adj_t, batch_size, n_id, *args):
        x = x * 1
        given = x[:batch_size].clone()
        x = self.push_and_pull(self.histories[0], x, batch_size, n_id, *args, rows=self.rows)
        self.kept.append((x, given, batch_size, n_id))
        x = self.dropout(x)
        return self.conv(x if self.rows else (x, x[:batch_size]), adj_t)


def push(model, rows):
    model.histories[0].push(rows)


def push_some(model, rows):
    model.histories[0].push(rows[:5], model.kept[-1][3][-5:])


def overwrite(model, rows):
    model.histories[0].emb.copy_(rows)


def reset(model, rows):
    model.reset_parameters()


def close(model, rows):
    model.close()


@pytest.mark.parametrize("call", ["model", "forward", "sweep", "raises"])
@pytest.mark.parametrize("change", [push, push_some, overwrite, reset, close])
@pytest.mark.parametrize("rows", [False, True])
def test_what_is_kept_stays_as_it_was_or_is_refused(call, change, rows):
    model, loader = Keeps(rows), make_loader()
    table = torch.randn(60, 4)
    model.histories[0].push(table)
    batch = next(iter(loader))
    if call == "model":
        model(batch.data.x, batch.data.adj_t, *batch[1:])
    elif call == "forward":
        model.forward(batch.data.x, batch.data.adj_t, *batch[1:])
    elif call == "raises":
        model.conv.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch.data.x, batch.data.adj_t, *batch[1:])
    else:
        model(loader=make_loader(loader=gas.EvalSubgraphLoader))
        table = model.histories[0].emb.clone()
    kept, given, batch_size, n_id = model.kept[-1]
    wanted = torch.cat([given, table[n_id[batch_size:]]])
    assert torch.equal(kept.tensor() if rows else kept, wanted)
    if rows:  # Its halo wasn't read.
        kept = Rows(given, model.histories[0].stored_rows(n_id[batch_size:], torch.float32))
    change(model, torch.randn(60, 4))
    if rows:
        with pytest.raises(RuntimeError, match="it has changed since push_and_pull"):
            kept.tensor()
    else:
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("rows", [False, True])
def test_a_second_batch_before_the_backward_pass(rows):
    model = Keeps(rows).eval()
    table = torch.randn(60, 4)
    found = []
    for together in (True, False):
        model.histories[0].push(table)
        model.zero_grad()
        losses = []
        for batch, *args in make_loader():
            losses.append(model(batch.x, batch.adj_t, *args).pow(2).sum())
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other)


class Checkpointed(Keeps):
    def __init__(self):
        super().__init__(rows=True)
        self.dropout = torch.nn.Identity()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x, adj_t, *args):
        x = self.push_and_pull(self.histories[0], self.lin(x), *args, rows=True)
        return torch.utils.checkpoint.checkpoint(self.conv, x, adj_t, use_reentrant=False)


def test_checkpoints_around_a_layer():
    """The first call pushes when it has ended: its own rows, which aren't read again."""
    model = Checkpointed()
    model.histories[0].push(torch.randn(60, 4))
    (first, *others), (second, *more) = list(make_loader())[:2]
    model(first.x, first.adj_t, *others).sum().backward()
    out = model(first.x, first.adj_t, *others)
    model(second.x, second.adj_t, *more)
    with pytest.raises(RuntimeError, match="a checkpointed block reads them in the backward pass"):
        out.sum().backward()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("io", ["serial", "concurrent"])
def test_ids_that_are_not_contiguous(rows, io):
    model, loader = Keeps(rows, io).eval(), make_loader()
    model.histories[0].push(torch.randn(60, 4))
    batch, batch_size, n_id, *where = next(iter(loader))
    outs = []
    for ids in (n_id, torch.stack([n_id, -n_id], dim=1)[:, 0]):
        outs.append(model(batch.x, batch.adj_t, batch_size, ids, *where))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rows_that_are_stored_in_another_type_are_pulled(dtype):
    history = gas.History(60, 4, dtype=dtype)
    assert history.stored_rows(torch.arange(3), torch.float32) is None
    model = gas.models.GraphSAGE(60, 4, 8, 3, 2, dtype=dtype).eval()
    twin = copy.deepcopy(model)
    model.histories[0].push(torch.randn(60, 8))
    twin.histories[0].push(model.histories[0].pull())
    for layout, each in (("fused", model), ("csr", twin)):
        batch, *args = next(iter(make_loader(layout)))
        each.out = each(batch.x, batch.adj_t, *args)
    assert torch.allclose(model.out, twin.out, atol=1e-6)


def test_without_gradient_it_stays_without():
    model = Keeps()
    _, *args = next(iter(make_loader()))
    own = torch.randn(args[0], 4, requires_grad=True)
    model.histories[0].push(torch.randn(60, 4))
    for rows in (False, True):
        with torch.no_grad():
            x = model.push_and_pull(model.histories[0], own, *args, rows=rows)
        assert not x.requires_grad
        x = model.push_and_pull(model.histories[0], own, *args, rows=rows)
        assert x.requires_grad
        with torch.inference_mode():
            x = model.push_and_pull(model.histories[0], own, *args, rows=rows)
            assert torch.equal((x.tensor() if rows else x)[: args[0]], own)
    assert model.push_and_pull(model.histories[0], own, rows=True) is own  # A full batch.


# An ordinary tensor -------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # The compiler looks at it.
@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x.mul_(3) * x,
        lambda x: x.relu_(),
        lambda x: x[3:9],
        lambda x: torch.stack(x.unbind(1)),
        lambda x: Twice.apply(x),
        lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False),
        lambda x: torch.compile(torch.nn.Tanh(), backend="aot_eager")(x),
        lambda x: copy.deepcopy(x.detach()) + x,
        lambda x: torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0],
        lambda x: gas.nn.dropout(x, 0.0),
    ],
)
def test_everything_takes_the_tensor(function, io):
    model, batch = Keeps(io=io), next(iter(make_loader()))
    _, size, n_id, *where = batch
    table = torch.randn(60, 4)
    model.histories[0].push(table)
    leaf = torch.randn(n_id.numel(), 4, requires_grad=True)
    own = leaf * 1
    seen = []
    x = model.push_and_pull(model.histories[0], own, size, n_id, *where)
    assert type(x) is torch.Tensor
    assert x.shape == (n_id.numel(), 4)
    x.register_hook(lambda grad: seen.append(grad.shape))
    plain = torch.cat([own[:size], table[n_id[size:]]])
    before = plain.detach().clone()
    own.mul_(2)  # What was given may change.
    out, wanted = function(x), function(plain)
    assert torch.equal(out, wanted)
    assert torch.equal(
        *(torch.autograd.grad(each.pow(2).sum(), leaf, retain_graph=True)[0]
          for each in (out, wanted))
    )  # fmt: skip
    assert seen[-1] == x.shape
    assert torch.equal(model.histories[0].pull(n_id[:size]), before[:size])


def test_tensors_of_one_batch_are_apart():
    """Those that are pulled twice, and what the history holds."""
    model, batch = Keeps(), next(iter(make_loader()))
    table = torch.randn(60, 4)
    model.histories[0].push(table)
    own, history = torch.randn(batch.batch_size, 4), model.histories[0]
    first, second = (model.push_and_pull(history, own, *batch[1:]) for _ in range(2))
    wanted = second.clone()
    first.zero_()
    assert torch.equal(second, wanted)
    assert torch.equal(own, wanted[: batch.batch_size])
    assert torch.equal(history.pull(batch.n_id), wanted)


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "APPNP", "GCN2"])
def test_models_move_no_rows_of_the_halo(monkeypatch, name):
    arguments = {"GCN2": (4, 8, 3, 3, 0.1, 0.5), "APPNP": (4, 8, 8, 3)}.get(name, (4, 8, 8, 3))
    model = getattr(gas.models, name)(60, *arguments, dropout=0.5, io="serial")
    loader = make_loader(transform=T.GCNNorm() if model.needs_weights else lambda data: data)
    for history in model.histories:
        history.push(torch.randn(60, history.embedding_dim))
    monkeypatch.setattr(gas.History, "start_pull", lambda *_, **__: pytest.fail("rows were pulled"))
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args).sum().backward()


@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
@pytest.mark.parametrize("bipartite", [True, False])
def test_models_ask_for_rows_where_their_layers_take_them(monkeypatch, layout, bipartite):
    model = gas.models.GraphSAGE(60, 4, 8, 3, 2)
    model.histories[0].push(torch.randn(60, 8))
    data = planted_partition(60, 5, 3, 4, 20)
    perm, ptr = gas.metis(data.edge_index, 3, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    loader = gas.SubgraphLoader(data, ptr, layout=layout, bipartite=bipartite, log=False)
    asked, push_and_pull = [], model.push_and_pull
    monkeypatch.setattr(
        model, "push_and_pull", lambda *args, rows: asked.append(rows) or push_and_pull(*args)
    )
    batch, *_ = batches = next(iter(loader))
    model(*model.inputs_of(batch)[:2], *batches[1:])
    assert asked == [layout == "fused" and bipartite]


def test_fuse_makes_dropout_faster():
    model = gas.fuse(torch.nn.Sequential(torch.nn.Dropout(0.5)))
    assert type(model[0]) is gas.nn.Dropout
    in_place = torch.nn.Dropout(0.5, inplace=True)
    x = torch.ones(50, 3)
    assert gas.fuse(torch.nn.Sequential(in_place))(x) is x
    assert bool((x == 0).any())
