"""What a model does with the rows that ``push_and_pull`` returns, and what becomes of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T

import gas
from gas.planted import planted_partition


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
        return self.convs[-1]((x, x[:batch_size]), adj_t) + F.elu(x)[:batch_size].sum(1)[:, None]


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
    grads = []
    for model, layout in ((plain_model, "csr"), (fused_model, "fused")):
        for batch, *args in make_loader(layout):
            model(batch.x, batch.adj_t, *args).pow(2).mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(conv.path == "fused" for conv in fused_model.convs)
    for mine, other in zip(*grads, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


class Keeps(gas.ScalableGNN):
    """A model that keeps what it was given."""

    def __init__(self):
        super().__init__(60, 4, 2, io="serial")
        self.conv = gas.nn.SAGEConv(4, 3)
        self.kept = []
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, adj_t, batch_size, n_id, *args):
        x = self.push_and_pull(self.histories[0], x * 1, batch_size, n_id, *args)
        self.kept.append((x, batch_size, n_id))
        x = self.dropout(x)
        return self.conv((x, x[:batch_size]), adj_t)


def push(model, rows):
    model.histories[0].push(rows)


def push_some(model, rows):
    model.histories[0].push(rows[:5], torch.arange(5))


def overwrite(model, rows):
    model.histories[0].emb.copy_(rows)


def reset(model, rows):
    model.reset_parameters()


def close(model, rows):
    model.close()


@pytest.mark.parametrize("call", ["model", "forward", "sweep", "raises"])
@pytest.mark.parametrize("change", [push, push_some, overwrite, reset, close])
def test_rows_that_are_kept_stay_as_they_were(call, change):
    model, loader = Keeps(), make_loader()
    rows = torch.randn(60, 4)
    model.histories[0].push(rows)
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
        rows = model.histories[0].emb.clone()
    kept, batch_size, n_id = model.kept[-1]
    wanted = rows[n_id[batch_size:]].clone()
    change(model, torch.randn(60, 4))
    assert torch.equal(kept[batch_size:], wanted)


def test_ids_that_are_not_contiguous():
    model, loader = Keeps().eval(), make_loader()
    model.histories[0].push(torch.randn(60, 4))
    batch, batch_size, n_id, *where = next(iter(loader))
    outs = []
    for ids in (n_id, torch.stack([n_id, -n_id], dim=1)[:, 0]):
        outs.append(model(batch.x, batch.adj_t, batch_size, ids, *where))
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "APPNP", "GCN2"])
def test_models_move_no_rows_of_the_halo(monkeypatch, name):
    arguments = {"GCN2": (4, 8, 3, 3, 0.1, 0.5), "APPNP": (4, 8, 8, 3)}.get(name, (4, 8, 8, 3))
    model = getattr(gas.models, name)(60, *arguments, dropout=0.5, io="serial")
    loader = make_loader(transform=T.GCNNorm() if model.needs_weights else lambda data: data)
    for history in model.histories:
        history.push(torch.randn(60, history.embedding_dim))
    monkeypatch.setattr(gas.History, "start_pull", lambda *_: pytest.fail("rows were pulled"))
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args).sum().backward()


def test_fuse_makes_dropout_spare_the_halo():
    model = gas.fuse(Keeps())
    assert type(model.dropout) is gas.nn.Dropout
    in_place = torch.nn.Dropout(0.5, inplace=True)
    x = torch.ones(50, 3)
    assert gas.fuse(torch.nn.Sequential(in_place))(x) is x
    assert bool((x == 0).any())
