"""Errors of ``gas.scalable.distributed``, and of models that it connects to other ranks."""

import contextlib
import copy

import torch
import torch.distributed as dist

import gas
from gas.augment import DropEdge
from gas.scalable.distributed import Group
from gas.training import train_epoch
from refusals import Model, first_batch, load, raising, ring, sharded


@contextlib.contextmanager
def alone(t):
    """One process that is all of its group."""
    store = dist.FileStore(str(t.path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(t, act, model=None, **options):
    """Do something with a model that is distributed over one process."""
    with alone(t):
        model = Model() if model is None else model
        return act(gas.distribute(model, **options))


def of_two(t, act, **changes):
    """Return the same where another rank says that it has something else."""
    with alone(t):
        model = gas.distribute(Model(), wrap=False)
        t.patch.setattr(Group, "gather_json", lambda _, mine, __: [mine, {**mine, **changes}])
        act(model)


def shard_batch():
    data = sharded()
    batch, *_ = gas.SubgraphLoader(gas.graph.shards.shard_of(data, 0), log=False)
    return batch


def one_shard(**changes):
    """Return a graph that is one shard of one."""
    data = gas.cluster(ring(**changes), 1, log=False)
    data.shards = torch.tensor([0, 4])
    return gas.SubgraphLoader(gas.graph.shards.shard_of(data, 0), log=False)


def failed_step(model):
    def fail(*_):
        raise KeyError("forward")

    model.module.push = fail
    with contextlib.suppress(KeyError):
        model(first_batch())
    model(first_batch())


def changed_header(t, place):
    with alone(t):
        model = gas.distribute(Model(), wrap=False)
        begin = model.ranks.group.start_all_to_all

        def changed(out, x, *sizes):
            work = begin(out, x, *sizes)
            if out.shape[1:] == (6,):
                work.wait()
                out[0, place] += 1  # As if it came from another rank.
            return work

        model.ranks.group.start_all_to_all = changed
        model(first_batch())


def gone(t, seen):
    """Return a collective fails, as when another rank has gone; ``seen`` is the store's answer."""
    with alone(t):
        group = Group()
        group.size = 3
        t.patch.setattr("gas.scalable.distributed.group.GRACE", 0.2)
        seen(group)
        t.patch.setattr(dist, "all_gather", raising(RuntimeError("[a.cc:1] Timed out. More")))
        group.gather(torch.ones(1), WHAT)


WHAT = "the exchange of rows of step 3"


def told(group):
    for rank in ("1", "2"):
        group._seen.set(rank, f"failed: {WHAT}\n0")


def elsewhere(group):
    group._seen.set("1", "failed: adding up the loss\n0")
    group._seen.set("2", f"failed: {WHAT}\n0")


def silent(group):
    group._seen.set("1", f"failed: {WHAT}\n0")


def unreachable(group):
    group._seen = None


def copied_ids(model):
    data, batch_size, n_id, offset, count = first_batch()
    model(data.x, data.adj_t, batch_size, n_id.clone(), offset, count)


def without_places(model):
    batch = first_batch()
    model(batch.data.x, batch.data.adj_t, batch.batch_size, batch.n_id)


CASES = {
    "distribute, without processes": lambda t: gas.distribute(Model()),
    "distribute, no model of gas": lambda t: gas.distribute(torch.nn.Linear(2, 2)),
    "distribute, twice": lambda t: distributed(t, gas.distribute),
    "distribute, a negative timeout": lambda t: distributed(t, None, timeout=-1),
    "distribute, another PyTorch on a rank": lambda t: of_two(
        t, lambda model: model.ranks.group.check_equal_on_ranks({"PyTorch": "2.13"}), PyTorch="2.11"
    ),
    "distribute, another graph on a rank": lambda t: of_two(
        t, lambda model: model(first_batch()), **{"the graph": "12345 in 2 shards"}
    ),
    "distribute, a graph of more shards": lambda t: distributed(t, lambda m: m(shard_batch())),
    "distribute, a model of another graph": lambda t: distributed(
        t, lambda m: m(next(iter(one_shard()))), Model(num_nodes=9)
    ),
    "distribute, batches of two graphs": lambda t: distributed(
        t, lambda m: [m(first_batch()), m(next(iter(one_shard())))]
    ),
    "distribute, batches of two graphs in shards": lambda t: distributed(
        t,
        lambda m: [
            m(next(iter(one_shard(edge_index=ring().edge_index[:, begin:])))) for begin in (0, 2)
        ],
    ),
    "distribute, a mask of several splits": lambda t: distributed(
        t, lambda m: m(first_batch(ring(train_mask=torch.ones(4, 2, dtype=torch.bool))))
    ),
    "distribute, a mask that isn't there": lambda t: distributed(
        t, lambda m: m(first_batch()), weight="trian_mask"
    ),
    "distribute, a negative weight": lambda t: distributed(
        t, lambda m: m(first_batch()), weight=lambda batch: -1
    ),
    "distribute, ids that are a copy": lambda t: distributed(t, copied_ids),
    "distribute, a copy": lambda t: distributed(t, copy.copy),
    "distribute, a batch without its places": lambda t: distributed(t, without_places),
    "distribute, fill": lambda t: distributed(
        t, lambda m: m(ring().x, ring().edge_index, fill=True)
    ),
    "distribute, a step after one that failed": lambda t: distributed(t, failed_step),
    "distribute, a rank that has left out a step": lambda t: changed_header(t, 3),
    "distribute, a rank with other views": lambda t: changed_header(t, 5),
    "distribute, a rank that doesn't answer": lambda t: gone(t, silent),
    "distribute, ranks that all fail": lambda t: gone(t, told),
    "distribute, a rank that does something else": lambda t: gone(t, elsewhere),
    "distribute, no other rank answers": lambda t: gone(t, unreachable),
    "distribute, histories for views": lambda t: distributed(
        t, lambda m: m.views(first_batch(epoch_transform=DropEdge(ring(), p=0.5)), "per_view")
    ),
    "distribute, verify": lambda t: distributed(t, lambda m: gas.verify(m.module, ring())),
    "distribute, micro_batches": lambda t: distributed(
        t, lambda m: train_epoch(m, load(), None, micro_batches=2)
    ),
    "a batch of a shard, without other ranks": lambda t: Model()(shard_batch()),
    "predict, of a shard in one process": lambda t: Model()(loader=one_shard()),
    "prepare, of a shard": lambda t: gas.models.GCN(
        num_nodes=4, in_channels=2, hidden_channels=2, out_channels=2, num_layers=2
    ).prepare(one_shard().data),
}
