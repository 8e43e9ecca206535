"""Attributes of a graph: their copies, and which have a row per edge."""

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import gas
from gas.graph.attributes import clone_unless_learnable, copy_graph, is_row_per_edge


def make(layout):
    data = random_graph()
    data.a_first = torch.rand(60)  # Of a name before "adj_t", and one after.
    data.edge_weight = torch.rand(240)
    data.name = "some"
    perm, ptr = gas.metis(data.edge_index, 6, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    return next(iter(gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False))).data


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_tensors_are_its_own(layout):
    data = make(layout)
    out = copy_graph(data, {"y"})
    assert out.y is data.y
    assert set(out.keys()) == set(data.keys())
    for key in ("a_first", "x", "edge_weight", "e_id"):
        assert torch.equal(out[key], data[key])
        assert out[key].data_ptr() != data[key].data_ptr()
    if layout != "edge_index":
        out.edge_weight.zero_()
        value = out.adj_t.values() if layout == "csr" else out.adj_t.value
        mine = data.adj_t.values() if layout == "csr" else data.adj_t.value
        assert value.data_ptr() == out.edge_weight.data_ptr()  # As in the original.
        assert mine.data_ptr() == data.edge_weight.data_ptr()
        assert data.edge_weight.min() > 0


def test_values_that_are_no_attribute():
    data = make("fused")
    del data.edge_weight
    out = copy_graph(data)
    out.adj_t.value.zero_()
    assert data.adj_t.value.min() > 0


def test_learnable_tensors_are_handed_on():
    plain, learnable = torch.rand(3), torch.rand(3, requires_grad=True)
    assert clone_unless_learnable(plain) is not plain
    assert clone_unless_learnable(learnable) is learnable


@pytest.mark.parametrize("first", ["edge_type", "edge_index"])
def test_types_that_self_loops_lack_are_left_out(first):
    """PyG counts the edges by the first attribute with "edge" in its name."""
    torch.manual_seed(0)
    edges = {"edge_index": torch.randint(40, (2, 160)), "edge_type": torch.arange(160) % 4}
    data = Data(x=torch.randn(40, 5), **{first: edges.pop(first)}, **edges)
    net = GCN(5, 8, num_layers=3, out_channels=3).eval()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, method="random", log=False)
    assert graph.edge_index.size(1) > 160  # With self-loops.
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))
    assert "edge_type" not in graph
    assert is_row_per_edge(graph, "edge_weight")


def test_rows_per_edge_are_counted_by_the_edges_and_not_by_pairs_to_predict():
    data = Data(edge_label_index=torch.zeros(2, 3, dtype=torch.long), num_nodes=4)
    data.edge_index, data.edge_attr = torch.randint(4, (2, 5)), torch.rand(5, 2)
    assert is_row_per_edge(data, "edge_attr")
    batch = make("csr")  # Of fewer rows than columns.
    assert batch.adj_t.size(0) < batch.adj_t.size(1)
    assert is_row_per_edge(batch, "edge_weight")
    assert not is_row_per_edge(batch, "x")


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (2, -1)])
def test_node_ids_of_any_shape_are_renumbered(shape, dtype):
    data = random_graph()
    data.train_idx = torch.tensor([5, 7, 59, 0]).view(shape).to(dtype)
    data.number = torch.arange(60)
    graph = gas.cluster(data, 6, log=False)
    assert graph.train_idx.shape == data.train_idx.shape
    assert torch.equal(graph.number[graph.train_idx], data.train_idx.long())


@pytest.mark.parametrize("name", ["edge_mask", "train_edge_mask", "e_mask"])
@pytest.mark.parametrize("matrix", [False, True])
def test_a_mask_of_edges_has_a_row_for_each(name, matrix, tmp_path):
    data = random_graph()
    src, dst = data.edge_index
    data[name] = (src + 2 * dst) % 3 == 0  # By its ends, so that it can be told in any order.
    if matrix:
        rowptr = torch.cat([torch.zeros(1).long(), torch.bincount(dst, minlength=60).cumsum(0)])
        order = torch.argsort(dst * 60 + src, stable=True)
        data.adj_t = torch.sparse_csr_tensor(
            rowptr, src[order], torch.ones(240), (60, 60), check_invariants=False
        )
        data[name] = data[name][order]
        del data.edge_index
    perm = torch.randperm(60)
    found = gas.permute(data, perm, log=False)
    graph = gas.cluster(data, 6, method="random", log=False)
    gas.cluster(data, 6, method="random", out=tmp_path / "graph", log=False)
    stored = gas.open_graph(tmp_path / "graph", log=False)
    for moved, order in ((found, perm), (graph, graph.perm), (stored, stored.perm)):
        edges = gas.graph.read_graph(moved)
        expected = (order[edges.src] + 2 * order[edges.dst]) % 3 == 0
        assert torch.equal(moved[name], expected)
    for batch in gas.SubgraphLoader(graph, batch_size=2, layout="edge_index", log=False):
        src, dst = graph.perm[batch.n_id[batch.edge_index]]
        assert torch.equal(batch.data[name], (src + 2 * dst) % 3 == 0)


def test_other_masks_have_a_row_for_each_node():
    for name, size in (("train_mask", 240), ("edge_mask", 100), ("other_mask", 59)):
        data = random_graph().update({name: torch.ones(size, dtype=torch.bool)})
        with pytest.raises(ValueError, match=f"'{name}' has {size} rows, but the graph has 60"):
            gas.cluster(data, 6, method="random", log=False)
    data = random_graph().update({"own_mask": torch.arange(60) % 2 == 0})
    graph = gas.cluster(data, 6, method="random", log=False)
    assert torch.equal(graph.own_mask, data.own_mask[graph.perm])
