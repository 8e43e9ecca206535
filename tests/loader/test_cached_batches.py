import copy
import pickle

import pytest
import torch
from loaders import LAYOUTS, dense_of, everything, make
from torch_geometric.data import Data

import gas
from gas.loader import cache as cache_module


def test_fixed_batches_are_cached(monkeypatch):
    data, ptr = make()
    cuts = []
    original = gas.SubgraphLoader._cut
    monkeypatch.setattr(
        gas.SubgraphLoader, "_cut", lambda self, parts: cuts.append(parts) or original(self, parts)
    )

    def cut_in_two_epochs(*args, **kwargs):
        cuts.clear()
        loader = gas.SubgraphLoader(data, ptr, *args, log=False, **kwargs)
        for _ in range(2):
            for batch, _, n_id, *_ in loader:
                assert torch.equal(batch.x, data.x[n_id])
                batch.x = None  # A caller's change of the batch is not kept.
        return len(cuts)

    assert cut_in_two_epochs(2) == 3
    assert cut_in_two_epochs(1, shuffle=True) == 6
    assert cut_in_two_epochs(2, cache=False) == 6
    assert cut_in_two_epochs(2, shuffle=True) == 6
    with pytest.raises(ValueError, match="'cache' is True, but shuffling makes new batches"):
        cut_in_two_epochs(2, shuffle=True, cache=True)
    one_batch = 5000  # Bytes, roughly.
    monkeypatch.setattr(cache_module, "CACHE_BYTES", one_batch)
    assert 3 < cut_in_two_epochs(2) < 6
    assert cut_in_two_epochs(2, cache=True) == 3


def test_changing_features_in_place_does_not_reach_the_next_epoch():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, log=False)
    for _ in range(2):
        for batch, _, n_id, *_ in loader:
            assert torch.equal(batch.x, data.x[n_id])
            batch.x.mul_(2)


@pytest.mark.parametrize("cache", [None, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, "fused"])
def test_changing_a_batch_in_place_does_not_reach_the_next_epoch(layout, cache):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout, cache=cache)
    expected = [everything(batch) for batch in gas.SubgraphLoader(data, ptr, 2, log=False,
                layout=layout, cache=False)]  # fmt: skip

    def check():
        for batch, tensors in zip(loader, expected, strict=True):
            for found, tensor in zip(everything(batch), tensors, strict=True):
                assert torch.equal(found, tensor)

    for number in range(len(expected[0])):
        check()
        for batch in loader:
            everything(batch)[number].zero_()
    check()
    for batch in loader:  # PyTorch doesn't count these changes.
        for tensor in (*batch[2:], batch.data.edge_weight, batch.data.edge_attr):
            tensor.data.zero_()
            tensor.numpy()[:] = 7
        if layout == "csr":
            batch.data.adj_t.col_indices().data.zero_()
    check()


@pytest.mark.parametrize("layout", [*LAYOUTS, "fused"])
def test_two_batches_of_the_same_parts_are_apart(layout):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout)
    for _ in range(2):
        for one, other in zip(loader, loader, strict=True):
            before = dense_of(other.data, layout)
            one.data.edge_weight.mul_(0.5)
            one.n_id.zero_()
            assert torch.equal(dense_of(one.data, layout), before * 0.5)
            assert torch.equal(dense_of(other.data, layout), before)
            assert torch.equal(other.data.x, data.x[other.n_id])


def test_fixed_batches_share_a_transpose():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, layout="fused")
    one, other = (next(iter(loader)).data.adj_t for _ in range(2))
    assert one is not other
    assert one.matrix is other.matrix
    assert one.remove_values().matrix is one.matrix
    assert one.with_self_loops() is other.with_self_loops()


def test_batches_cut_in_inference_mode_can_be_trained_on():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, log=False, cache=True)
    with torch.inference_mode():
        assert not any(batch.x.is_inference() for batch, *_ in loader)
    for batch, *_ in loader:
        (batch.adj_t @ torch.randn(batch.num_nodes, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cache", [None, True, False])
def test_changes_of_the_graph_are_followed(cache, workers):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, cache=cache, num_workers=workers)

    def check():
        for batch, _, n_id, *_ in loader:
            for key in ("x", "y", "new_mask"):
                assert (key in batch) == (key in data)
                assert key not in data or torch.equal(batch[key], data[key][n_id])
            assert ("edge_attr" in batch) == ("edge_attr" in data)
            if "edge_attr" in data:
                assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
            assert batch.get("scale") == data.get("scale")

    check()
    data.x.mul_(2)
    check()
    data.x = torch.randn(60, 3)
    data.edge_attr.add_(1)
    check()
    data.edge_attr = torch.randn(data.num_edges, 2)
    data.new_mask = torch.rand(60) < 0.5
    data.scale = torch.tensor(2.0)
    check()
    data.scale.mul_(2)
    del data.y, data.edge_attr
    check()
    assert torch.equal(loader.cut([0]).data.x, data.x[loader.cut([0]).n_id])
    data.x = torch.randn(61, 3)
    with pytest.raises(ValueError, match="'x' has 61 rows, but the graph has 60 nodes"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("edge_weight", lambda data: data.edge_weight.mul_(2)),
        ("edge_weight", lambda data: setattr(data, "edge_weight", data.edge_weight * 2)),
        ("edge_index", lambda data: data.edge_index.copy_(data.edge_index.flip(0))),
        ("adj_t", lambda data: setattr(data, "adj_t", torch.eye(60).to_sparse_csr())),
    ],
)
def test_changes_of_edges_are_refused(name, change):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, log=False)
    change(data)
    for iterate in (lambda: next(iter(loader)), lambda: loader.cut([0])):
        with pytest.raises(ValueError, match=f"'{name}' of the graph was changed after the load"):
            iterate()
    data, ptr = make()
    data = Data(x=data.x, adj_t=torch.eye(60).to_sparse_csr())
    loader = gas.SubgraphLoader(data, ptr, log=False)
    data.adj_t.values().mul_(2)
    with pytest.raises(ValueError, match="'adj_t' of the graph was changed after the loader"):
        next(iter(loader))


def test_workers_that_stay_do_not_follow():
    data, ptr = make()
    options = {"num_workers": 1, "persistent_workers": True}
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, **options)
    list(loader)
    data.x.mul_(2)
    with pytest.raises(ValueError, match="'x' of the graph was changed, but 'persistent_workers'"):
        next(iter(loader))


def test_copies_of_a_loader_follow_their_own_graph():
    data, ptr = make()
    data.x.mul_(2)
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, cache=True)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        next(iter(twin))
        twin.data.x.zero_()
        assert (next(iter(twin)).data.x == 0).all()
        twin.data.edge_weight.zero_()
        with pytest.raises(ValueError, match="'edge_weight' of the graph was changed"):
            next(iter(twin))
    assert torch.equal(next(iter(loader)).data.x.sort(0)[0], data.x.sort(0)[0])
