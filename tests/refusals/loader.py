"""Errors of ``gas.loader``."""

import threading

import torch
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.transforms import GCNNorm

import gas
from gas.augment import DropEdge
from gas.graph.shards import shard_of
from gas.loader import PartSampler
from refusals import HALVES, first_batch, load, ring, sharded, without_cuda

SHARED_OUT = DistributedSampler(range(1), num_replicas=2, rank=0)
FIRST = torch.tensor([0])


def evaluation(**options):
    return gas.EvalSubgraphLoader(ring(), HALVES, log=False, **options)


def augmented(**options):
    return load(epoch_transform=DropEdge(ring(), 0.5), **options)


def local(**options):
    return gas.SubgraphLoader(shard_of(sharded(), 0), log=False, **options)


def changed(key, **options):
    data = ring()
    loader = load(data, **options)
    data[key] += 1
    next(iter(loader))


def with_a_lock(**options):
    next(iter(load(ring(lock=threading.Lock()), **options)))


def cut_before_a_change():
    data = ring()
    batch = load(data).cut([0])
    data.x += 1
    return batch.x


def clustered(**changes):
    data = ring(**changes)
    return gas.cluster(data, 2, method="random", log=False)


def sampled(data=None, **options):
    return PartSampler(clustered() if data is None else data, **options)


def with_sampler(sampler, **options):
    return gas.SubgraphLoader(clustered(), sampler=sampler, log=False, **options)


def saved(sampler, other):
    with_sampler(other).load_state_dict(with_sampler(sampler).state_dict())


def told(loss):
    sampler = sampled(by="loss", share=0.5)
    sampler.report(with_sampler(sampler).cut([1]), loss)
    list(sampler)


NO_LABELS = torch.zeros(4, dtype=torch.bool)
CASES = {
    "SubgraphLoader, features of a learnable tensor": lambda t: load(
        ring(x=torch.ones(4, 2, requires_grad=True) * 2)
    ),
    "SubgraphLoader, a sampler of parts that aren't there": lambda t: list(with_sampler([0, 7])),
    "SubgraphLoader, an attribute 'views'": lambda t: load(ring(views=torch.ones(4))),
    "SubgraphLoader, a batch of no parts": lambda t: list(load(batch_sampler=[[0], []])),
    "SubgraphLoader, a part twice in a batch": lambda t: list(load(batch_sampler=[[1, 1]])),
    "SubgraphLoader, an unknown name": lambda t: load(shuffled=True),
    "SubgraphLoader, a function that collates": lambda t: load(collate_fn=list),
    "batch.to, no CUDA": lambda t: without_cuda(
        t, "gas.loader.batch.apply", lambda: next(iter(load())).to("cuda")
    ),
    "PartSampler, by chance": lambda t: sampled(by="chance"),
    "PartSampler, more than all parts": lambda t: sampled(share=2),
    "PartSampler, all parts by loss": lambda t: sampled(by="loss"),
    "PartSampler, every part never": lambda t: sampled(every=0),
    "PartSampler, every tenth by staleness": lambda t: sampled(by="staleness", every=10),
    "PartSampler, no parts": lambda t: sampled(ring()),
    "PartSampler, a graph of several processes": lambda t: sampled(sharded()),
    "PartSampler, no mask": lambda t: sampled(clustered(train_mask=None)),
    "PartSampler, a mask of another graph": lambda t: sampled(
        clustered(train_mask=None).update({"train_mask": torch.ones(3, dtype=torch.bool)})
    ),
    "PartSampler, no labelled node": lambda t: sampled(clustered(train_mask=NO_LABELS)),
    "PartSampler.weight, a batch of some nodes": lambda t: sampled().weight(
        load().cut_nodes(torch.tensor([1]))
    ),
    "PartSampler.report, losses of all nodes": lambda t: told(torch.ones(4)),
    "PartSampler.report, a loss that is no number": lambda t: told(torch.full((2,), torch.nan)),
    "SubgraphLoader, a sampler of other parts": lambda t: load(
        ptr=torch.tensor([0, 1, 4]), sampler=sampled()
    ),
    "SubgraphLoader, the state of a loader without a sampler": lambda t: with_sampler(
        sampled()
    ).load_state_dict(with_sampler(None).state_dict()),
    "SubgraphLoader, the state of another sampler": lambda t: saved(
        sampled(every=2), sampled(every=3)
    ),
    "SubgraphLoader, the state of a sampler with a generator": lambda t: saved(
        sampled(generator=torch.Generator()), sampled()
    ),
    "SubgraphLoader, a folder of something else": lambda t: gas.SubgraphLoader(t.path),
    "SubData, rows that were changed": lambda t: cut_before_a_change(),
    "SubgraphLoader, no parts": lambda t: gas.SubgraphLoader(ring()),
    "SubData, what its graph doesn't have": lambda t: next(iter(load())).z,
    "SubData, an attribute that is set": lambda t: setattr(next(iter(load())), "x", None),
    "SubgraphLoader, no parts in a batch": lambda t: load(batch_size=0),
    "SubgraphLoader, half a part in a batch": lambda t: load(batch_size=1.5),
    "SubgraphLoader, views and workers that stay": lambda t: augmented(
        num_workers=1, persistent_workers=True
    ),
    "SubgraphLoader, kept batches that are shuffled": lambda t: list(
        load(batch_size=2, shuffle=True, cache=True)
    ),
    "SubgraphLoader, what workers can't send": lambda t: with_a_lock(num_workers=1),
    "SubgraphLoader.cut_nodes, no nodes": lambda t: load().cut_nodes(torch.arange(0)),
    "SubgraphLoader.cut, no parts": lambda t: load().cut([]),
    "SubgraphLoader.cut, a part twice": lambda t: load().cut([1, 1]),
    "SubgraphLoader.cut, a part too many": lambda t: load().cut([2]),
    "SubgraphLoader.neighbourhood, no hop": lambda t: load().neighbourhood(FIRST, 0),
    "SubgraphLoader.neighbourhood, a node too many": lambda t: load().neighbourhood(FIRST + 4, 1),
    "SubgraphLoader.neighbourhood, more than may be": lambda t: load().neighbourhood(FIRST, 2, 9),
    "SubgraphLoader, edges changed afterwards": lambda t: changed("edge_index"),
    "SubgraphLoader, features changed, with workers that stay": lambda t: changed(
        "x", num_workers=1, persistent_workers=True
    ),
    "SubgraphLoader.neighbourhood, of a shard": lambda t: local().neighbourhood(FIRST, 1),
    "SubgraphLoader, views of a shard": lambda t: local(epoch_transform=DropEdge(ring(), 0.5)),
    "SubgraphLoader, a shard and a transform": lambda t: local(graph_transform=GCNNorm()),
    "SubgraphLoader, parts that aren't a shard's": lambda t: local(ptr=HALVES),
    "SubgraphLoader, parts of one process shared out again": lambda t: gas.SubgraphLoader(
        shard_of(gas.cluster(ring(), 2, shards=2, method="random", log=False), 0),
        sampler=SHARED_OUT,
        log=False,
    ),
    "SubgraphLoader, like that of another graph": lambda t: load(like=load()),
    "a batch, edges of another layout": lambda t: first_batch().edge_index,
    "SubgraphLoader, a list of graphs": lambda t: gas.SubgraphLoader([ring()]),
    "SubgraphLoader, a loader": lambda t: gas.SubgraphLoader(load()),
    "SubgraphLoader, weights to learn": lambda t: next(
        iter(load(ring(edge_weight=torch.nn.Parameter(torch.ones(8)))))
    ),
    "SubgraphLoader, features to learn, in workers": lambda t: next(
        iter(load(ring(x=torch.nn.Parameter(torch.ones(4, 2))), num_workers=1))
    ),
    "EvalSubgraphLoader, shuffled": lambda t: evaluation(shuffle=True),
    "EvalSubgraphLoader, without the last batch": lambda t: evaluation(drop_last=True),
    "EvalSubgraphLoader, no parts in a batch": lambda t: evaluation(batch_size=0),
}
