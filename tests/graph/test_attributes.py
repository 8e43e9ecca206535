"""Copies of a graph: tensors of their own, but for what is to be shared."""

import pytest
import torch
from conftest import random_graph

import gas
from gas.graph.attributes import clone_unless_learnable, copy_graph


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
