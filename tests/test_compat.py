"""Scripts written for the best-known implementation run once their import line is changed."""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch.nn import Linear, ModuleList, ReLU, Sequential
from torch_geometric.nn import GINConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gas import (
    EvalSubgraphLoader,
    History,
    ScalableGNN,
    SubgraphLoader,
    compute_micro_f1,
    dropout,
    gen_masks,
    get_data,
    metis,
    models,
    permute,
)


def sparse_graph():
    data = random_graph(directed=False)
    data = T.ToSparseTensor()(data)
    data.train_mask, data.val_mask, data.test_mask = (m[:, 0] for m in gen_masks(data.y, 5, 5, 1))
    return data


@pytest.mark.requires("torch_sparse")
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_a_script_with_a_ready_model():
    data = sparse_graph()
    data.adj_t = gcn_norm(data.adj_t, add_self_loops=True)
    perm, ptr = metis(data.adj_t, num_parts=8, log=True)
    data = permute(data, perm, log=True)
    loader = SubgraphLoader(data, ptr, batch_size=2, shuffle=True)

    model = models.GCN(
        num_nodes=data.num_nodes,
        in_channels=5,
        hidden_channels=16,
        out_channels=3,
        num_layers=2,
        dropout=0.5,
        drop_input=True,
        pool_size=1,
        buffer_size=500,
    ).to("cpu")
    optimizer = torch.optim.Adam(
        [
            dict(params=model.reg_modules.parameters(), weight_decay=5e-4),
            dict(params=model.nonreg_modules.parameters(), weight_decay=0),
        ],
        lr=0.01,
    )
    criterion = torch.nn.CrossEntropyLoss()

    def test():
        model.eval()
        with torch.no_grad():
            out = model(data.x.to(model.device), data.adj_t.to(model.device)).cpu()
        return compute_micro_f1(out, data.y, data.train_mask)

    before = test()
    for _ in range(60):
        model.train()
        for batch, *args in loader:
            batch = batch.to(model.device)
            optimizer.zero_grad()
            out = model(batch.x, batch.adj_t, *args)
            train_mask = batch.train_mask[: out.size(0)]
            if train_mask.sum() == 0:
                continue
            loss = criterion(out[train_mask], batch.y[: out.size(0)][train_mask])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert test() > max(before, 0.5)


@pytest.mark.requires("torch_sparse")
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_a_script_with_a_model_of_its_own():
    data = sparse_graph()
    perm, ptr = metis(data.adj_t, num_parts=8, log=False)
    data = permute(data, perm, log=False)

    class GIN(ScalableGNN):
        def __init__(self, num_nodes, in_channels, hidden_channels, out_channels, num_layers):
            super().__init__(num_nodes, hidden_channels, num_layers, pool_size=2, buffer_size=5000)
            self.lins = ModuleList(
                [Linear(in_channels, hidden_channels), Linear(hidden_channels, out_channels)]
            )
            self.convs = ModuleList(
                GINConv(
                    Sequential(Linear(hidden_channels, hidden_channels), ReLU()), train_eps=True
                )
                for _ in range(num_layers)
            )

        def forward(self, x, adj_t, batch_size, n_id, offset, count):
            x = self.lins[0](x).relu()
            for conv, hist in zip(self.convs[:-1], self.histories, strict=True):
                h = conv((x, x[: adj_t.size(0)]), adj_t)
                h = h + x[: h.size(0)]
                x = self.push_and_pull(hist, h.relu_(), batch_size, n_id, offset, count)
            h = self.convs[-1]((x, x[: adj_t.size(0)]), adj_t)
            return self.lins[1](h)

        @torch.no_grad()
        def forward_layer(self, layer, x, adj_t, state):
            if layer == 0:
                x = self.lins[0](x).relu()
            h = self.convs[layer]((x, x[: adj_t.size(0)]), adj_t)
            if layer == self.num_layers - 1:
                return self.lins[1](h)
            h = h + x[: h.size(0)]
            return h.relu_()

    model = GIN(data.num_nodes, 5, 16, 3, num_layers=3)
    assert all(isinstance(history, History) for history in model.histories)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = SubgraphLoader(data, ptr, batch_size=2, shuffle=True, num_workers=0)
    eval_loader = EvalSubgraphLoader(data, ptr, batch_size=2)
    for _ in range(2):
        for batch, batch_size, n_id, offset, count in loader:
            optimizer.zero_grad()
            adj_t = dropout(batch.adj_t, p=0.2, training=True)
            out = model(batch.x, adj_t, batch_size, n_id, offset, count)
            torch.nn.functional.cross_entropy(out, batch.y[:batch_size]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(loader=eval_loader)
        expected = model(data.x, data.adj_t)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.requires("shared")
def test_get_data(data_root):
    data, in_channels, out_channels = get_data(root=str(data_root), name="cora")
    assert (data.num_nodes, in_channels, out_channels) == (2708, 1433, 7)
