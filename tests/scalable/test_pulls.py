"""Pulls that overlap with the computation: each row once, in any order of layers."""

import time

import pytest
import torch
from conftest import clustered_graph

import gas
from gas.history import Store


class Counting(Store):
    """Rows in memory, and how often some were read."""

    def __init__(self, num_rows, columns, dtype):
        super().__init__(num_rows, columns, dtype)
        self.rows = torch.zeros(num_rows, columns, dtype=dtype)
        self.reads = 0

    def read(self, index, out):
        self.reads += 1
        out.copy_(self.rows[index])

    def write(self, index, rows):
        self.rows[index] = rows


class InOrder(gas.ScalableGNN):
    """Three layers, whose histories are asked for in an order of its own."""

    def __init__(self, order, **options):
        super().__init__(60, 5, 4, **options)
        self.order = order
        self.convs = torch.nn.ModuleList(gas.nn.SAGEConv(5, 5) for _ in range(4))

    def forward(self, x, adj_t, batch_size, *args):
        for conv, number in zip(self.convs, self.order, strict=False):
            x = conv((x, x[:batch_size]), adj_t).relu()
            x = self.push_and_pull(self.histories[number], x, batch_size, *args)
            time.sleep(0.02)  # Time enough to read too much.
        return self.convs[-1]((x, x[:batch_size]), adj_t)


@pytest.mark.parametrize("pool_size", [1, 2, None])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_every_row_is_read_once(order, pool_size):
    data, ptr = clustered_graph()
    model = InOrder(order, store=Counting, io="concurrent", pool_size=pool_size)
    twin = InOrder(order, io="serial")
    twin.load_state_dict(model.state_dict())
    for mine, other in zip(model.histories, twin.histories, strict=True):
        rows = torch.randn(60, 5)
        mine.push(rows)
        other.push(rows)
    for batch, *args in gas.SubgraphLoader(data, ptr, 2, log=False):
        before = [history.store.reads for history in model.histories]
        out = model(batch.x, batch.adj_t, *args)
        assert torch.allclose(out, twin(batch.x, batch.adj_t, *args), atol=1e-6)
        reads = [history.store.reads for history in model.histories]
        assert [now - then for now, then in zip(reads, before, strict=True)] == [1, 1, 1]
