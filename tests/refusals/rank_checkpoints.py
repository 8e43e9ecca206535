"""Errors of checkpoints of many ranks: in a group of one, or of what two ranks would have saved."""

import contextlib
import errno
import shutil

import torch
import torch.distributed as dist

import gas
from gas.checkpoint import load, save
from gas.checkpoint.files import NewestCheckpoint, rank_folder, write_newest
from gas.checkpoint.histories import history_writer
from gas.checkpoint.target import Graph
from gas.checkpoint.writer import CheckpointWriter, history_writers
from gas.graph.shards import shard_of
from gas.scalable.distributed import Exchange
from refusals import raising, ring, sharded


def loader(graph=None):
    return gas.SubgraphLoader(sharded() if graph is None else graph, log=False)


def sage(num_nodes=4):
    return gas.models.GraphSAGE(num_nodes, 2, 2, 2, num_layers=2)


@contextlib.contextmanager
def rank(t):
    """A model of the only rank."""
    store = dist.FileStore(str(t.path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield gas.distribute(sage())
    finally:
        dist.destroy_process_group()


def on_rank(function):
    """Return a case that is run on the only rank."""

    def case(t):
        with rank(t) as model:
            function(t, model)

    return case


def saved(t, number=1, histories=True, views=(), **changes):
    """Save on two ranks whose descriptions differ."""
    for rank in range(2):
        mine = loader(shard_of(sharded(), rank))
        model = sage(mine.num_nodes)
        graph = Graph.of(mine)
        about = {
            "rank": rank,
            "world_size": 2,
            "cut": mine.shard.fingerprint,
            "perm": graph.own,
            "sum": graph.sum,
        }
        content = CheckpointWriter(t.path / "run", model, None, mine, {})
        content.add("ranks", {**about, **(changes if rank else {})})
        parts = history_writers(model, True) if histories else {}
        parts |= {name: history_writer(name, model.histories[0], True) for name in views}
        content.write(rank_folder(t.path / "run", 2, rank), number, parts)
    write_newest(t.path / "run", NewestCheckpoint(2, number))
    return rank_folder(t.path / "run", 2, 1) / f"checkpoint_{number:06}"


def loaded(t, model=None, graph=None, **changes):
    """It is loaded by one process."""
    saved(t, **changes)
    load(t.path / "run", sage() if model is None else model, None, loader(graph))


def fewer_rows(t):
    t.patch.setattr(
        "gas.checkpoint.redistribution.is_count", lambda rows: rows is not None and rows > 9
    )
    loaded(t)


def newest(t, text):
    saved(t)
    (t.path / "run" / "newest.json").write_text(text)
    load(t.path / "run")


def unreadable(t):
    saved(t)
    file = t.path / "run" / "newest.json"
    file.unlink()
    file.mkdir()
    load(t.path / "run")


def missing(t, *numbers):
    for number in numbers:
        path = saved(t, number=number)
    shutil.rmtree(path)
    load(t.path / "run", sage(), None, loader())


def on_its_way(t, model):
    """Load a checkpoint whose sent rows don't match those of the senders."""
    message = {"number": 1, "sizes": [[0, 0]], "received": torch.zeros(3).byte()}
    state = {"arriving": [{**message, "pushes": [1]}]}
    t.patch.setattr(Exchange, "state_dict", lambda self: state)
    save(t.path / "run", model, None, loader())
    load(t.path / "run", model, None, loader())


def full_disk(t, model):
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    t.patch.setattr("gas.checkpoint.writer.write_tensors", full)
    save(t.path / "run", model, None, loader())


def another_graph(t, model):
    save(t.path / "run", model, None, loader())
    data = ring(edge_index=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [1, 1, 1, 1, 2, 2, 2, 2]]))
    other = gas.cluster(data, 2, 2, method="random", log=False)
    load(t.path / "run", model, None, loader(other))


def without_perm():
    graph = sharded()
    del graph.perm
    del graph.shards
    return graph


def larger():
    data = ring(x=torch.ones(6, 2), y=torch.zeros(6), train_mask=torch.ones(6, dtype=torch.bool))
    return gas.cluster(data, 2, 2, method="random", log=False)


NODES = torch.tensor([0, 1])

CASES = {
    "save, a rank, in the background": on_rank(
        lambda t, model: save(t.path / "run", model, None, loader(), background=True)
    ),
    "save, a rank, without a loader": on_rank(lambda t, model: save(t.path / "run", model)),
    "save, a rank, an object": on_rank(
        lambda t, model: save(t.path / "run", model, None, loader(), thing=object())
    ),
    "save, a rank, a full disk": on_rank(full_disk),
    "load, a rank, an empty folder": on_rank(
        lambda t, model: load(t.path / "run", model, None, loader())
    ),
    "load, a rank, without a loader": on_rank(
        lambda t, model: [saved(t), load(t.path / "run", model)]
    ),
    "load, a rank, another graph": on_rank(another_graph),
    "load, a rank, what was on its way": on_rank(on_its_way),
    "load, of two ranks, newest.json is a folder": unreadable,
    "load, of two ranks, newest.json is no JSON": lambda t: newest(t, "{"),
    "load, of two ranks, newest.json says nothing": lambda t: newest(t, "{}"),
    "load, of two ranks, newest.json is newer": lambda t: newest(
        t, '{"format": "gas checkpoint of ranks", "version": 2, "world_size": 2, "number": 1}'
    ),
    "load, of two ranks, one is missing": lambda t: missing(t, 1),
    "load, of two ranks, one is missing, with one before": lambda t: missing(t, 1, 2),
    "load, of two ranks, one in the place of another": lambda t: loaded(t, rank=0),
    "load, of two ranks, one process in the place of one": lambda t: loaded(t, rank=None),
    "load, of two ranks, by one": loaded,
    "load, of two ranks, without a loader": lambda t: [saved(t), load(t.path / "run", sage())],
    "load, of two ranks, a graph without perm": lambda t: loaded(t, graph=without_perm()),
    "load, of two ranks, a larger graph": lambda t: loaded(t, sage(6), larger()),
    "load, of two ranks, another graph": lambda t: loaded(t, sum=1),
    "load, of two ranks, each had all": lambda t: loaded(t, cut=None),
    "load, of two ranks, saved without a loader": lambda t: loaded(t, perm=None),
    "load, of two ranks, nodes without numbers": lambda t: loaded(t, perm=[1, 2]),
    "load, of two ranks, nodes that don't exist": lambda t: loaded(t, perm=NODES + 7),
    "load, of two ranks, a node twice": lambda t: loaded(t, perm=NODES * 0),
    "load, of two ranks, too few rows": fewer_rows,
    "load, of two ranks, without histories": lambda t: loaded(t, histories=False),
    "load, of two ranks, with those of views": lambda t: loaded(t, views=["view_0_history_0"]),
}
