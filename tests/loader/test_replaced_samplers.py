"""Loaders that Lightning makes anew with another sampler, from their attributes."""

import pytest
import torch
from conftest import random_graph
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.transforms import GCNNorm

import gas
from gas.augment import DropEdge

OPTIONS = [
    {},
    {"batch_size": 2, "shuffle": True},
    {"batch_size": 2, "drop_last": True, "bipartite": False, "layout": "csr", "edge_weight": False},
    {"cache": True, "num_workers": 1, "layout": "edge_index"},
    {"graph_transform": GCNNorm(), "log": False},
]


def graph(num_parts=5):
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    return gas.cluster(data, num_parts, log=False, method="random", cache=False)


def sampler_of(loader, rank=0):
    return DistributedSampler(loader.dataset, num_replicas=2, rank=rank, shuffle=False)


def made_anew(loader, sampler, mode=None):
    """Return the same loader, as Lightning makes it."""
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    return data._update_dataloader(loader, sampler, mode)


def same(batch, other):
    assert torch.equal(batch.n_id, other.n_id)
    assert set(batch.data.keys()) == set(other.data.keys())
    for key, value in batch.data:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            assert torch.equal(value, other.data[key]), key
    matrices = [b.data.get("adj_t") for b in (batch, other)]
    if matrices[0] is not None:
        first, second = (getattr(m, "to_torch_sparse", lambda m=m: m)() for m in matrices)
        assert torch.equal(first.to_dense(), second.to_dense())


@pytest.mark.requires("lightning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [gas.SubgraphLoader, gas.EvalSubgraphLoader])
def test_a_sampler_is_replaced(kind, options):
    if kind is gas.EvalSubgraphLoader:
        refused = ("shuffle", "drop_last")
        options = {name: value for name, value in options.items() if name not in refused}
    loader = kind(graph(), **options)
    for rank in range(2):
        sampler = sampler_of(loader, rank)
        other = made_anew(loader, sampler)
        assert type(other) is kind
        assert other.sampler is sampler
        assert str(other) == str(loader)
        assert other._relabel is loader._relabel  # One copy of the edges.
        for name in ("bipartite", "log", "edge_weight", "cache", "drop_last", "num_workers"):
            assert getattr(other, name) == getattr(loader, name)
        size = loader.batch_size
        parts = [list(sampler)[i : i + size] for i in range(0, len(sampler), size)]
        if loader.drop_last:
            parts = [some for some in parts if len(some) == size]
        found = list(other)
        assert len(found) == len(other) == len(parts)
        for batch, some in zip(found, parts, strict=True):
            same(batch, loader.cut(some))


@pytest.mark.requires("lightning")
def test_for_predictions():
    """Every batch, and Lightning learns of which parts it is."""
    from lightning.pytorch.trainer.states import RunningStage

    loader = gas.SubgraphLoader(graph(), batch_size=2, log=False)
    other = made_anew(loader, loader.sampler, RunningStage.PREDICTING)
    for batch, want in zip(other, loader, strict=True):
        same(batch, want)
    assert other.batch_sampler.seen_batch_indices == [[0, 1], [2, 3], [4]]


@pytest.mark.requires("lightning")
def test_views_go_on():
    whole = graph()
    loader = gas.SubgraphLoader(
        whole, epoch_transform=DropEdge(whole, 0.5), graph_transform=GCNNorm(), log=False
    )
    other = made_anew(loader, sampler_of(loader))
    assert other.augmentation is loader.augmentation
    assert [len(batch.views) for batch in other] == [2, 2, 2]
    same(other.cut([0]), loader.cut([0]))


def test_what_others_look_at():
    """They find the sampler, to tell it the epoch and whether to shuffle."""
    loader = gas.SubgraphLoader(graph(), batch_size=2, log=False)
    assert type(loader.batch_sampler) is BatchSampler
    assert isinstance(loader.batch_sampler.sampler, SequentialSampler)
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=0, seed=1)
    loader = gas.SubgraphLoader(loader.data, batch_size=1, sampler=sampler, log=False)
    orders = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        orders.append([int(batch.offset) for batch in loader])
        assert orders[-1] == [int(loader.ptr[part]) for part in sampler]
    assert len(set(map(tuple, orders))) > 1


def test_parts_of_one_process_are_not_shared_out_again():
    whole = gas.cluster(random_graph(), 6, shards=2, log=False, method="random", cache=False)
    mine = gas.graph.shards.shard_of(whole, 0)
    loader = gas.SubgraphLoader(mine, log=False)
    sampler = sampler_of(loader)
    for options in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 1, False)}):
        with pytest.raises(ValueError, match="use shuffle=True instead, and Trainer"):
            gas.SubgraphLoader(mine, log=False, **options)
    loader = gas.SubgraphLoader(whole, sampler=sampler_of(gas.SubgraphLoader(whole, log=False)))
    assert len(loader) == 3  # In a single process it is a graph like any other.
