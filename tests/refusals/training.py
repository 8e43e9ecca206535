"""Errors of ``gas.training``."""

import subprocess
from types import SimpleNamespace

import torch

import gas
from gas import models
from gas.augment import DropEdge
from gas.loader import PartSampler
from gas.training import (
    Experiment,
    FullBatch,
    Machine,
    PartitionStatistics,
    Settings,
    fit,
    loss_of,
    partition_statistics,
    plan_micro_batches,
    results,
    score,
    train_epoch,
)
from gas.training.local_ranks import measure_ranks
from gas.training.report import EventWriter
from refusals import load, ring

ARCHITECTURE = {"num_layers": 2, "hidden_channels": 2}


def gcn():
    return models.GraphSAGE(
        num_nodes=4, in_channels=2, hidden_channels=2, out_channels=2, num_layers=2
    )


def train(loader=None, **options):
    model = gcn()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train_epoch(model, load() if loader is None else loader, optimizer, **options)


def full_batch():
    whole = FullBatch(ring())
    whole.data.x.add_(1)
    whole(gcn())


def with_views():
    return load(epoch_transform=DropEdge(ring()))


def file(t, text):
    (t.path / "s.yaml").write_text(text)
    return Settings.load(t.path / "s.yaml")


def experiment(data=None, model="sage", settings=None, **options):
    data = data or ring(val_mask=ring().train_mask, test_mask=ring().train_mask)
    return Experiment(
        data, 2, model, settings or Settings(ARCHITECTURE, num_parts=2), log=False, **options
    )


def featureless():
    data = ring(val_mask=ring().train_mask, test_mask=ring().train_mask)
    data.num_nodes = data.x.size(0)
    del data.x
    return data


def without(t, package, use):
    t.without_package(package)
    use()


def plan(memory="1TB", model=None, **options):
    return gas.plan(ring(), model or gcn(), memory, log=False, **options)


def nothing_fits(t):
    t.patch.setattr("gas.training.planner._libraries", lambda *_: 10**9)
    plan(1000)


def full_disk(t):
    t.patch.setattr("gas.training.results.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    results.check_room(t.path, experiment())


def statistics(**changes):
    counts = dict.fromkeys(("num_parts", "replicas", "pairs", "halo", "ranges"), 2)
    return PartitionStatistics(
        **{"num_nodes": 4, "num_edges": 8, "num_ranks": 2, "cut": 4} | counts | changes
    )


def machine(**changes):
    given = {"seconds_per_row": 1e-6, "seconds_per_edge": 1e-7, "bandwidth": 1e9, "latency": 0}
    return Machine(**given | changes)


def ranks_that_fail(t):
    failed = subprocess.CompletedProcess([], 1, "", "no port is free")
    t.patch.setattr("subprocess.run", lambda *_, **__: failed)
    measure_ranks(2, [4], [2])


def simulate(partition=None, model=None, given=None, **options):
    return gas.simulate(partition or statistics(), model or gcn(), given or machine(), **options)


SEVERAL = torch.ones(4, 3, dtype=torch.bool)


def interrupted(t):
    from gas.training.checkpoints import Checkpoints

    small = experiment(settings=Settings(ARCHITECTURE, num_parts=2, epochs=1))
    small.run(0, checkpoints=Checkpoints(t.path / "run"))
    return small, Checkpoints


def resumed(t, seed, **options):
    small, checkpoints = interrupted(t)
    small.run(seed, checkpoints=checkpoints(t.path / "run", **options))


def by_loss(graph=None, of=None, views=False):
    graph = gas.cluster(ring(), 2, method="random", log=False) if graph is None else graph
    sampler = PartSampler(graph if of is None else of, by="loss", share=0.5)
    options = {"epoch_transform": DropEdge(graph, 0.5)} if views else {}
    train(gas.SubgraphLoader(graph, sampler=sampler, log=False, **options))


def other_labels():
    graph = gas.cluster(ring(), 2, method="random", log=False)
    before = graph.clone()
    graph.train_mask = torch.tensor([True, False, True, False])
    by_loss(graph, before)


CASES = {
    "train_epoch, parts by loss and views": lambda t: by_loss(views=True),
    "train_epoch, parts by the loss of other labels": lambda t: other_labels(),
    "Experiment, checkpoints without resume": lambda t: resumed(t, 0),
    "Experiment, checkpoints of another seed": lambda t: resumed(t, 1, resume=True),
    "Experiment, checkpoints every fortnight": lambda t: resumed(t, 0, every="fortnight"),
    "Experiment, no micro-batches": lambda t: experiment(micro_batches=0),
    "check_room, a full disk": full_disk,
    "score, an unknown metric": lambda t: score("f2", torch.ones(4, 2), torch.zeros(4)),
    "score, roc_auc of three classes": lambda t: score("roc_auc", torch.ones(4, 3), torch.zeros(4)),
    "score, classes instead of outputs": lambda t: score("accuracy", torch.ones(4), torch.ones(4)),
    "score, roc_auc of class 2": lambda t: score("roc_auc", torch.ones(4), torch.full((4,), 2.0)),
    "train_epoch, no labels": lambda t: train(load(ring(y=None))),
    "loss_of, classes in a column": lambda t: loss_of(torch.ones(4, 3), torch.ones(4, 1).long()),
    "Experiment, no labels": lambda t: experiment(ring(y=None)),
    "Experiment, no test_mask": lambda t: experiment(ring(val_mask=ring().train_mask)),
    "Settings.default, another model": lambda t: Settings.default("transformer"),
    "train_epoch, no micro-batches": lambda t: train(micro_batches=0),
    "train_epoch, views and dropped edges": lambda t: train(with_views(), edge_dropout=0.5),
    "train_epoch, every edge dropped": lambda t: train(edge_dropout=1.0),
    "train_epoch, scale_loss and a generator": lambda t: train(iter(load()), scale_loss=True),
    "train_epoch, an unknown bank": lambda t: train(with_views(), bank="both"),
    "FullBatch, a tensor changed in place": lambda t: full_batch(),
    "fit, no patience": lambda t: fit(gcn(), ring(), train, None, 1, patience=0),
    "plan_micro_batches, no budget": lambda t: plan_micro_batches(gcn(), load(), 0),
    "plan_micro_batches, one part is too much": lambda t: plan_micro_batches(gcn(), load(), 100),
    "plan, no bytes": lambda t: plan("6G"),
    "plan, no steps": lambda t: plan(steps=0),
    "plan, more parts than nodes": lambda t: plan(num_parts=5),
    "plan, an unknown evaluation": lambda t: plan(evaluation="sampled"),
    "plan, an unknown store": lambda t: plan(store="tape"),
    "plan, no way to store rows": lambda t: plan(dtype=[]),
    "plan, a model elsewhere": lambda t: plan(model=gcn().to("meta")),
    "plan, nothing fits": nothing_fits,
    "simulate, a number of ranks": lambda t: simulate(4),
    "simulate, a graph without shards": lambda t: simulate(ring()),
    "simulate, the shards of two ranks as text": lambda t: simulate(ring(shards="2")),
    "simulate, a shard without nodes": lambda t: simulate(ring(shards=torch.tensor([0, 4, 4]))),
    "partition_statistics, a part in two shards": lambda t: partition_statistics(
        ring(shards=torch.tensor([0, 2, 4]), parts=torch.tensor([0, 1, 4]))
    ),
    "simulate, a model without histories": lambda t: simulate(model=torch.nn.Linear(2, 2)),
    "simulate, bytes per second as the machine": lambda t: simulate(given=1e9),
    "simulate, a machine measured with another model": lambda t: simulate(
        given=machine(widths=(3,))
    ),
    "simulate, no parts per batch": lambda t: simulate(batch_size=0),
    "PartitionStatistics, more ranks than nodes": lambda t: statistics(num_ranks=5),
    "PartitionStatistics, a balance below 1": lambda t: statistics(sent_balance=0.5),
    "PartitionStatistics, a negative spread": lambda t: statistics(part_spread=-1.0),
    "scaled, from one number of ranks": lambda t: statistics().scaled(ranks=4),
    "Machine, negative seconds": lambda t: machine(seconds_per_edge=-1.0),
    "Machine, no bandwidth": lambda t: machine(bandwidth=0),
    "Machine, twice the time for messages": lambda t: machine(backward_share=2),
    "Machine, no rank on a host": lambda t: machine(ranks_per_host=0),
    "Machine.measured, a model elsewhere": lambda t: Machine.measured(
        gcn().to("meta"), load(), 1e9, 0
    ),
    "Machine.measured, local processes that fail": ranks_that_fail,
    "Machine.measured, one rank": lambda t: Machine.measured(gcn(), load(), 1e9, 0, ranks=1),
    "Machine.measured, two parts": lambda t: Machine.measured(gcn(), load(), 1e9, 0),
    "Experiment, memory in full batch": lambda t: experiment(full_batch=True, memory="1GB"),
    "Experiment, memory and a budget": lambda t: experiment(memory="1GB", memory_budget=10),
    "Settings, no parts": lambda t: Settings(num_parts=0),
    "Settings, half an epoch": lambda t: Settings(epochs=1.5),
    "Settings, a negative rate": lambda t: Settings(lr=-0.1),
    "Settings, a rate as text": lambda t: Settings(lr="5e-4"),
    "Settings, every edge dropped": lambda t: Settings(edge_dropout=1.0),
    "Settings, an unknown metric": lambda t: Settings(metric="f2"),
    "Settings.load, no settings": lambda t: file(t, "- 1"),
    "Settings.load, an unknown setting": lambda t: file(t, "learning_rate: 0.1"),
    "Settings.load, a rate as text": lambda t: file(t, "lr: 5e-4"),
    "Settings.load, not YAML": lambda t: file(t, "lr: [0.1"),
    "Settings.load, no file": lambda t: Settings.load(t.path / "s.yaml"),
    "Settings.load, pyyaml is missing": lambda t: without(t, "yaml", lambda: file(t, "lr: 0.1")),
    "EventWriter, tensorboard is missing": lambda t: without(
        t, "torch.utils.tensorboard", lambda: EventWriter(t.path)
    ),
    "Experiment, a graph without features": lambda t: experiment(data=featureless()),
    "Experiment, an unknown model": lambda t: experiment(model="gnn"),
    "Experiment, an unknown evaluation": lambda t: experiment(evaluation="sampled"),
    "Experiment, histories in full batch": lambda t: experiment(full_batch=True, refresh="full"),
    "Experiment, verify in full batch": lambda t: experiment(full_batch=True).verify(),
    "Experiment, several labels that aren't 0 and 1": lambda t: experiment(
        ring(y=torch.full((4, 2), 3))
    ),
    "Experiment, inductive on several splits": lambda t: experiment(
        ring(train_mask=SEVERAL, val_mask=SEVERAL, test_mask=SEVERAL), inductive=True
    ),
    "Experiment, augment in full batch": lambda t: experiment(full_batch=True, augment=DropEdge),
    "Experiment, augment inductively": lambda t: experiment(inductive=True, augment=DropEdge),
    "Experiment, augment for several labels": lambda t: experiment(
        ring(y=torch.ones(4, 2).long()), augment=DropEdge
    ),
    "Experiment, augment and dropped edges": lambda t: experiment(
        settings=Settings(ARCHITECTURE, num_parts=2, edge_dropout=0.5), augment=DropEdge
    ),
}
