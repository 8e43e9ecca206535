"""Masks and augmented graphs, common to all augmentations, by the example of MHAug."""

import copy
import math
import pickle

import pytest
import torch
from augment_graphs import make_chain, path, same
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from gas.augment import DropEdge
from gas.augment.units import mask_node_features


def test_views():
    data = random_graph()
    data.edge_attr = torch.arange(240.0)
    before = copy.deepcopy(data)
    chain = make_chain(data, num_steps=20)
    out = chain(data)
    assert chain.edge_mask.shape == (240,)
    assert chain.node_mask.shape == (60,)
    assert 0 < int((~chain.edge_mask).sum()) < 240
    assert torch.equal(out.edge_index, data.edge_index[:, chain.edge_mask])
    assert torch.equal(out.edge_attr, data.edge_attr[chain.edge_mask])
    kept = chain.node_mask
    assert (out.x[~kept] == 0).all()
    assert torch.allclose(out.x[kept], data.x[kept] * 60 / int(kept.sum()))
    assert torch.equal(out.y, data.y)
    for key in before.keys():  # noqa: SIM118  # Data is no dictionary.
        assert torch.equal(before[key], data[key])

    assert chain.previous_edge_mask.all()  # Where the call began.
    assert chain.previous_node_mask.all()
    assert bool(chain.previous_is_milder)
    first = chain.edge_mask, chain.node_mask
    chain.run(30)
    assert same(first, [chain.previous_edge_mask, chain.previous_node_mask])
    past = chain.apply(data, previous=True)
    assert torch.equal(past.edge_index, out.edge_index)
    assert torch.equal(past.x, out.x)
    assert torch.equal(chain.apply(data).edge_index, data.edge_index[:, chain.edge_mask])
    steps = chain.statistics().steps
    assert steps == 50
    assert chain.forward(data).num_nodes == 60
    assert chain.statistics().steps == 70
    assert str(chain) == f"MHAug(num_nodes=60, num_edges={chain.units.size})"
    assert str(make_chain(path(), undirected=True)) == "MHAug(num_nodes=4, num_pairs=3)"
    # Plain PyG training, normalised by the degrees of the view.
    GCN(5, 8, 2, 3)(out.x, out.edge_index).sum().backward()


def test_a_copy_knows_its_graph():
    data = random_graph()
    data.edge_index.add_(0)
    drop = DropEdge(data, 0.3)
    for twin in (copy.deepcopy(drop), pickle.loads(pickle.dumps(drop))):
        assert twin(data).num_edges < data.num_edges
        twin.units._edge_index.add_(0)
        with pytest.raises(ValueError, match="'edge_index' was changed in place"):
            twin(data)
    data.edge_index.add_(0)
    with pytest.raises(ValueError, match="'edge_index' was changed in place"):
        copy.deepcopy(drop)(data)


def test_features_in_double_precision_are_scaled_so():
    data = random_graph()
    data.x = data.x.double()
    chain = make_chain(data, num_steps=20)
    kept = chain(data).x[chain.node_mask] / data.x[chain.node_mask]
    assert torch.allclose(kept, kept.new_tensor(60 / int(chain.node_mask.sum())), rtol=1e-14)


def test_a_view_masks_nan_features_too():
    data = random_graph()
    data.x[3] = math.nan
    chain = make_chain(data)
    nodes = torch.ones(60, dtype=torch.bool)
    nodes[3] = False
    chain.reset(node_mask=nodes)
    assert (chain.apply(data).x[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_masked_features_of_any_type(dtype):
    x = (10 * torch.randn(6, 3, 2)).to(dtype)
    mask = torch.tensor([True, False, True, True, False, True])
    expected = x * torch.tensor(2, dtype=dtype)
    expected[~mask] = 0
    found = mask_node_features(x, mask, torch.tensor(2.0))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_masked_features_have_gradients():
    x = torch.randn(4, 3, requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    mask_node_features(x, mask, torch.tensor(2.0)).sum().backward()
    assert torch.equal(x.grad, 2.0 * mask[:, None].expand(4, 3))


def ones(size):
    return torch.ones(size, dtype=torch.bool)


def test_masks_of_another_graph():
    data = random_graph(directed=False)
    chain = make_chain(data, undirected=True)
    edges = data.num_edges
    for call in (chain.log_prob, chain.delta, chain.reset):
        with pytest.raises(ValueError, match=rf"'edge_mask' is .*\[7\].*expected.*\[{edges}\]"):
            call(ones(7), ones(60))
        with pytest.raises(ValueError, match=r"'node_mask' is .*\[8\].*expected.*\[60\]"):
            call(ones(edges), ones(8))
        with pytest.raises(ValueError, match="'edge_mask' is torch.float32"):
            call(torch.ones(edges), ones(60))
        with pytest.raises(ValueError, match="'node_mask' drops all 60 nodes"):
            call(ones(edges), ~ones(60))
    loop = (data.edge_index[0] == data.edge_index[1]).nonzero()[0]
    other = (data.edge_index[0] != data.edge_index[1]).nonzero()[0]
    for edge in (loop, other):
        mask = ones(edges)
        mask[edge] = False
        with pytest.raises(ValueError, match="'edge_mask' drops a self-loop, or one direction"):
            chain.log_prob(mask, ones(60))


def test_graphs_that_can_not_be_augmented():
    x = torch.ones(3, 2)
    loops = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ValueError, match=r"'data' has 2 edges.*none to drop.*MaskFeatures"):
        make_chain(Data(x=x, edge_index=loops))
    with pytest.raises(ValueError, match=r"'data' has 0 edges"):
        make_chain(Data(x=x, edge_index=loops[:, :0]))
    with pytest.raises(ValueError, match=r"'data' has no 'edge_index'.*with_edge_index"):
        make_chain(Data(x=x, adj_t=torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match=r"'data' has no nodes"):
        make_chain(Data(x=x[:0], edge_index=loops[:, :0]))
    one_way = torch.tensor([[0, 1, 1, 1], [1, 0, 2, 2]])
    with pytest.raises(ValueError, match=r"'undirected' is True, but the edge 1 -> 2 .*ToUnd"):
        make_chain(Data(x=x, edge_index=one_way), undirected=True)
    twice = torch.tensor([[0, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match=r"the edge 1 -> 0 is stored more often"):
        make_chain(Data(x=x, edge_index=twice), undirected=True)


def test_another_graph():
    data = random_graph()
    chain = make_chain(data)
    same_graph = data.clone()
    same_graph.x = torch.zeros(60, 2)
    chain(same_graph)
    with pytest.raises(ValueError, match=r"'data' has 50 nodes and 240 edges, but .* 60 and 240"):
        chain(random_graph(50))
    reordered = data.clone()
    reordered.edge_index = data.edge_index.flip(1)
    with pytest.raises(ValueError, match="'data' has other edges, or in another order"):
        chain(reordered)
    for x in (None, torch.ones(60, 2, dtype=torch.long), torch.ones(7, 2)):
        wrong = Data(x=x, edge_index=data.edge_index, num_nodes=60)
        steps = chain.statistics().steps
        with pytest.raises(ValueError, match="'x' is .*expected floating-point features"):
            chain(wrong)
        assert chain.statistics().steps == steps
    moved = Data(x=torch.empty(60, 2, device="meta"), edge_index=data.edge_index)
    with pytest.raises(ValueError, match="'x' is on meta, but the augmentation was built on cpu"):
        chain(moved)
    data.edge_index[0, 0] = 1
    for call in (chain, chain.apply):
        with pytest.raises(ValueError, match="'edge_index' was changed in place"):
            call(data)


def test_masks_are_copies():
    data = random_graph()
    drop = DropEdge(data)
    drop.run()
    for name in ("edge_mask", "node_mask", "previous_edge_mask", "previous_node_mask"):
        before = getattr(drop, name).clone()
        getattr(drop, name).logical_not_()
        assert torch.equal(getattr(drop, name), before)
