import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph

import gas
from gas.training import activation_bytes, plan_micro_batches


@pytest.fixture
def parts():
    data = T.GCNNorm()(random_graph(num_nodes=600, num_edges=2400, directed=False))
    perm, ptr = gas.metis(data.edge_index, 16, num_nodes=600, log=False)
    return gas.permute(data, perm, log=False), ptr


def make(**kwargs):
    return gas.models.GCN(600, 5, 32, 3, 3, dropout=0.5, batch_norm=True, **kwargs)


def test_activation_bytes_grow_with_the_batch(parts):
    model = make()
    loader = gas.SubgraphLoader(*parts, 8, log=False)
    one, two, four = (activation_bytes(model, loader.cut(range(n))) for n in (1, 2, 4))
    assert one < two < four < 4.5 * one
    wide = gas.models.GCN(600, 5, 64, 3, 3, dropout=0.5, batch_norm=True)
    assert activation_bytes(wide, loader.cut([0])) > 1.5 * one


def test_activation_bytes_are_those_that_autograd_keeps():
    """One linear map: what it keeps is its input, of every layer but the first."""

    class Linear(gas.ScalableGNN):
        def __init__(self):
            super().__init__(600, 32, 2)
            self.first, self.last = torch.nn.Linear(5, 32), torch.nn.Linear(32, 3)

        def forward(self, x, adj_t, *args):
            return self.last(self.push_and_pull(self.histories[0], self.first(x), *args))

    data = random_graph(num_nodes=600)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 300, 600]), log=False)
    batch = loader.cut([0])
    rows = batch.n_id.numel()
    alone = gas.loader.batch.num_bytes(batch)
    assert activation_bytes(Linear(), batch) == alone + rows * 32 * 4
    gin = gas.models.GIN(600, 5, 8, 3, 3, noise=0.1)
    activation_bytes(gin, batch)
    assert gin.reg_loss == 0.0


def test_measuring_leaves_no_trace(parts):
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loader = gas.SubgraphLoader(*parts, 8, log=False)
    model.eval()
    state = torch.get_rng_state()
    activation_bytes(model, loader.cut([0, 3]))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert model.io == "concurrent"
    assert gas.scalable.moved_bytes(model) == 0
    assert all((history.age == -1).all() for history in model.histories)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_planning(parts):
    model = make()
    loader = gas.SubgraphLoader(*parts, 8, log=False)
    need = {}
    order = loader.edges_per_part().argsort(descending=True, stable=True)
    for size in (8, 4, 2, 1):
        need[size] = activation_bytes(model, loader.cut(order[:size].tolist()))
    assert plan_micro_batches(model, loader, need[8]) == (8, 1)
    assert plan_micro_batches(model, loader, need[8] - 1) == (4, 2)
    assert plan_micro_batches(model, loader, need[4] - 1) == (2, 4)
    assert plan_micro_batches(model, loader, need[1]) == (1, 8)
    six = gas.SubgraphLoader(*parts, 6, log=False)
    assert plan_micro_batches(model, six, need[4]) == (3, 2)
    with pytest.raises(MemoryError, match="but one part needs .* KiB: cut the graph into more"):
        plan_micro_batches(model, loader, need[1] - 1)
    with pytest.raises(ValueError, match="'budget_bytes' is 0, expected a number of bytes"):
        plan_micro_batches(model, loader, 0)


def test_cutting_some_parts(parts):
    loader = gas.SubgraphLoader(*parts, 4, log=False)
    batch = loader.cut([5, 2])
    expected = list(gas.SubgraphLoader(*parts, 1, log=False))
    assert batch.batch_size == expected[2].batch_size + expected[5].batch_size
    assert batch.offset.tolist() == [int(parts[1][2]), int(parts[1][5])]
    assert torch.equal(batch.data.x, parts[0].x[batch.n_id])
    edges = loader.edges_per_part()
    assert int(edges.sum()) == parts[0].edge_index.size(1)
    assert int(edges[2] + edges[5]) == batch.data.e_id.numel()
    for wrong in ([], [16], [-1], [3, 3]):
        with pytest.raises(ValueError, match="expected different parts between 0 and 15"):
            loader.cut(wrong)
