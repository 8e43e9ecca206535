import copy
import pickle

import pytest
import torch
from loaders import LAYOUTS, make
from torch_geometric.data import Data

import gas
from gas.loader import batch as sub_data


def test_attributes_of_a_batch_are_its_own():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, layout="fused", cache=True)
    for _ in range(3):
        ((batch, *_),) = loader
        assert "new" not in batch
        assert not batch.adj_t._kept
        assert torch.equal(batch.edge_weight, batch.adj_t.value)
        batch.new = batch.adj_t._kept["new"] = 1
        batch.adj_t.value = None
        del batch.x, batch.edge_weight


def test_sub_data():
    data, ptr = make()
    batch = next(iter(gas.SubgraphLoader(data, ptr, 2, log=False)))
    assert isinstance(batch, gas.SubData)
    assert batch._fields == ("data", "batch_size", "n_id", "offset", "count")
    moved = batch.to("cpu")
    assert isinstance(moved, gas.SubData)
    assert torch.equal(moved.data.x, batch.data.x)
    assert isinstance(batch.batch_size, int)


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_moving_a_batch_leaves_the_original_where_it_is(layout):
    data, ptr = make()
    data.nested = [Data(z=torch.ones(2), inner=Data(w=torch.ones(2)))]
    drop = gas.augment.DropEdge(data)
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, layout=layout, epoch_transform=drop)
    batch = next(iter(loader))
    moved = batch.to("meta")
    assert moved.n_id is batch.n_id
    assert all(tensor.is_meta for tensor in sub_data.iter_tensors(moved.data))
    assert not any(tensor.is_meta for tensor in sub_data.iter_tensors(batch.data))
    assert moved.data.nested[0].z.is_meta
    assert moved.data.nested[0].inner.w.is_meta
    for graph in (data, batch.data):
        assert not graph.nested[0].z.is_meta
        assert not graph.nested[0].inner.w.is_meta
    part = batch.to("meta", "y")
    assert part.data.y.is_meta
    assert not part.data.x.is_meta


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_read_as_its_graph(layout):
    data, ptr = make()
    for batch in gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False):
        assert batch.x is batch.data.x
        adjacency = "edge_index" if layout == "edge_index" else "adj_t"
        assert getattr(batch, adjacency) is batch.data[adjacency]
        with pytest.raises(AttributeError, match="a batch has no 'missing'; its graph has .*x"):
            batch.missing  # noqa: B018
        assert not hasattr(batch, "pin_memory")  # DataLoader would call it: the graph's.
        assert not hasattr(batch, "_store")
        assert batch.count is batch[4]
        for twin in (copy.copy(batch), pickle.loads(pickle.dumps(batch))):
            assert isinstance(twin, gas.SubData)
            assert torch.equal(twin.x, batch.x)


def test_own():
    data, ptr = make()
    data.train_mask = torch.rand(60) > 0.5
    data.y = torch.arange(60)
    data.names = "some"
    for batch in gas.SubgraphLoader(data, ptr, 2, log=False):
        own = batch.own
        assert own.num_nodes == batch.batch_size
        assert set(own.keys()) == {"x", "y", "train_mask", "n_id", "num_nodes"}
        for key in ("x", "y", "train_mask"):
            assert torch.equal(own[key], data[key][batch.n_id[: batch.batch_size]])
        own.x.mul_(2)
        assert torch.equal(own.x, batch.x[: batch.batch_size])  # A view.


def test_own_rows_are_named_by_the_batch_where_a_graph_has_ids_of_a_sampler():
    data, ptr = make()
    data.n_id = 3 * torch.arange(data.num_nodes)
    for batch in gas.SubgraphLoader(data, ptr, 2, log=False):
        assert torch.equal(batch.own.n_id, batch.n_id[: batch.batch_size])
        assert torch.equal(batch.data.n_id, 3 * batch.n_id)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_batch_is_printed_in_three_lines(is_read):
    data, ptr = make()
    data.train_mask = torch.rand(60) > 0.5
    batch = next(iter(gas.SubgraphLoader(data, ptr, 2, log=False)))
    own, rows = batch.batch_size, batch.n_id.numel()
    if is_read:
        batch.train_mask  # noqa: B018
    first, second, third = repr(batch).split("\n")
    assert first == f"SubData of {own} own nodes in 2 parts, and a halo of {rows - own}"
    assert f"adj_t [{own}, {rows}]" in second
    assert f"train_mask [{rows}]" in second
    assert "out[batch.own.train_mask], not out[batch.train_mask]" in third


def test_own_where_there_are_as_many_edges_as_nodes():
    ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
    data = Data(x=torch.rand(6, 1), edge_index=ring, edge_attr=torch.rand(6, 1))
    (batch,) = gas.SubgraphLoader(data, torch.tensor([0, 6]), log=False)
    assert set(batch.own.keys()) == {"x", "n_id", "num_nodes"}
