"""Lazy rows of a batch: gathered on first access, and the right ones."""

import copy
import pickle

import pytest
import torch
from loaders import LAYOUTS, make

import gas
from gas.loader.lazy import LazyRows, get_lazy


def batches(layout="fused", **options):
    data, ptr = make()
    return data, list(gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False, **options))


@pytest.mark.parametrize("layout", [*LAYOUTS, "fused"])
def test_nothing_is_read_that_nobody_asks_for(layout):
    data, loaded = batches(layout)
    for batch in loaded:
        assert torch.equal(batch.y, data.y[batch.n_id])
        for key, index in (("x", batch.n_id), ("edge_attr", batch.data.e_id)):
            assert get_lazy(batch.data, key) is not None
            assert torch.equal(getattr(batch, key), data[key][index])
            assert get_lazy(batch.data, key) is None
        assert torch.equal(batch.data.edge_weight, data.edge_weight[batch.data.e_id])


def test_what_was_read_is_the_callers():
    data, (batch, *_) = batches()
    before = data.x.clone()
    batch.x.zero_()
    assert not batch.data.x.any()
    assert torch.equal(data.x, before)


@pytest.mark.parametrize(
    "twin_of",
    [
        copy.copy,
        copy.deepcopy,
        lambda data: pickle.loads(pickle.dumps(data)),
        lambda data: data.clone(),
        lambda data: type(data).from_dict(data.to_dict()),
        lambda data: type(data)(**dict(data._store._mapping)),
    ],
)
def test_copies_of_a_batch_have_all(twin_of):
    data, (batch, *_) = batches()
    twin = twin_of(batch.data)
    assert set(twin.keys()) == set(batch.data.keys())
    assert torch.equal(twin.x, data.x[batch.n_id])
    assert torch.equal(twin["edge_attr"], data.edge_attr[batch.data.e_id])


WAYS = {
    "pairs": lambda data: dict(data)["x"],
    "items": lambda data: dict(data.to_dict().items())["x"],
    "values": lambda data: dict(zip(data.to_dict(), data.to_dict().values(), strict=True))["x"],
    "get": lambda data: data.get("x"),
    "pop": lambda data: data._store._mapping.pop("x"),
    "attribute": lambda data: data.x,
    "tuple": lambda data: data.to_namedtuple().x,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_read(way):
    data, (batch, *_) = batches()
    assert torch.equal(WAYS[way](batch.data), data.x[batch.n_id])
    assert ("x" in batch.data) == (way != "pop")


def test_rows_that_nobody_read_can_be_replaced():
    data, (batch, other, *_) = batches()
    del batch.data.x
    assert "x" not in batch.data
    assert batch.data.get("x") is None
    other.data.x = data.x[other.n_id] + 1
    assert torch.equal(other.x, data.x[other.n_id] + 1)
    assert other.features() is other.x
    assert other.data.num_features == data.num_features
    assert "y=" in repr(other.data)


def test_own_rows_are_views():
    data, (batch, *_) = batches()
    own = batch.own
    assert get_lazy(batch.data, "x") is not None
    assert "edge_attr" not in own
    assert torch.equal(own.x, data.x[batch.n_id[: batch.batch_size]])
    assert own.x.data_ptr() == batch.x.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(batch.own)).x, own.x)


def test_what_is_assigned_to_a_batch_does_not_reach_its_own_rows():
    data, (batch, *_) = batches()
    own = batch.own
    batch.data.x = torch.zeros_like(batch.data.x)  # Hidden inputs, which are to be found again.
    assert torch.equal(own.x, data.x[batch.n_id[: batch.batch_size]])


def test_copies_share_what_was_read():
    _, (batch, *_) = batches()
    twin = copy.copy(batch.data)
    twin.x.zero_()
    assert not batch.data.x.any()


def test_changes_that_nobody_counts_do_not_reach_a_batch():
    data, ptr = make()
    with torch.inference_mode():
        data.x = data.x + 1
    batch = gas.SubgraphLoader(data, ptr, log=False).cut([0])
    expected = data.x[batch.n_id].clone()
    with torch.inference_mode():
        data.x.zero_()
    assert torch.equal(batch.x, expected)


def test_a_neighbourhood_is_a_graph_of_its_own():
    data, ptr = make()
    found = gas.SubgraphLoader(data, ptr, log=False).neighbourhood(torch.tensor([3, 4]), 2)
    expected = data.x[found.n_id]
    data.x.zero_()
    assert torch.equal(found.x, expected)


def test_prefetched_batches_are_as_the_graph_was():
    data, ptr = make()
    model = gas.models.GraphSAGE(data.num_nodes, data.num_features, 4, 3, 2, prefetch=1)
    before = data.x.clone()
    loader = gas.SubgraphLoader(data, ptr, 3, layout="fused", log=False)
    model(loader=gas.EvalSubgraphLoader(data, ptr, log=False))
    for number, batch in enumerate(gas.PrefetchLoader(loader, model)):
        if number == 0:
            model(batch)
            data.x[batch.n_id] *= 2  # The next one has been cut.
        else:
            assert torch.equal(batch.x, before[batch.n_id])
            model(batch)


def test_batches_without_the_edges_of_the_graph_are_alike():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, log=False)
    del data.edge_attr
    next(iter(loader))
    loader.forget_edges()
    assert not any("edge_weight" in batch.data for batch in loader)


@pytest.mark.parametrize("changed", ["graph", "ids"])
def test_rows_that_changed_are_refused(changed):
    data, (batch, *_) = batches()
    (data.x if changed == "graph" else batch.n_id).add_(0)
    with pytest.raises(RuntimeError, match=r"'x' of the graph, or the ids .* changed in place"):
        _ = batch.x
    with pytest.raises(RuntimeError, match="cut the batch anew"):
        batch.features()


def test_a_replaced_tensor_does_not_change_a_batch():
    data, (batch, *_) = batches()
    expected = data.x[batch.n_id]
    data.x = data.x + 1
    assert torch.equal(batch.x, expected)


def test_no_rows_of_inference_mode():
    _data, loaded = batches()
    with torch.inference_mode():
        x = loaded[0].x
    assert not x.is_inference()


def test_cached_batches_hold_what_they_read():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, layout="fused", cache=True, log=False)
    for _ in range(2):
        for batch in loader:
            assert get_lazy(batch.data, "x") is None
            assert torch.equal(batch.x, data.x[batch.n_id])


def test_workers_send_rows_not_tables():
    _data, (batch, *_) = batches()
    assert isinstance(dict.get(batch.data._store._mapping, "x"), LazyRows)
    sent = pickle.dumps(batch)
    assert b"LazyRows" not in sent
    assert type(pickle.loads(sent).data._store._mapping) is dict


@pytest.mark.parametrize("layout", ["fused", "csr"])
def test_a_batch_with_sparse_features_can_be_deep_copied(layout):
    data, ptr = make()
    data.x = data.x.to_sparse_csr()
    batch = next(iter(gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False)))
    twin = copy.deepcopy(batch)
    assert torch.equal(twin.x.to_dense(), batch.x.to_dense())
    twin.x.values().zero_()
    assert batch.x.values().any()
    assert torch.equal(data.clone().x.to_dense(), data.x.to_dense())  # What the docs tell to do.
