"""Errors of ``gas.training``."""

import contextlib
import math
import subprocess
from types import SimpleNamespace

import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GCN, GCNConv, HeteroConv, SAGEConv

import gas
from gas import models
from gas.augment import DropEdge
from gas.cli import Experiment, Settings, results
from gas.cli.hetero import HeteroExperiment
from gas.cli.options import lock_output
from gas.cli.parser import Options
from gas.cli.report import open_events
from gas.contrib import simulation
from gas.contrib.simulation import Machine, PartitionStatistics, partition_statistics
from gas.contrib.simulation.local_ranks import measure_ranks
from gas.loader import PartSampler
from gas.training import (
    AveragedWeights,
    FullBatch,
    Progress,
    Run,
    loss_of,
    plan_micro_batches,
    raise_rate,
    run_epochs,
    score,
    train_epoch,
)
from gas.training.record import warn_if_unstable
from refusals import Model, load, ring

ARCHITECTURE = {"num_layers": 2, "hidden_channels": 2}


def gcn(out_channels=2):
    return models.GraphSAGE(
        num_nodes=4, in_channels=2, hidden_channels=2, out_channels=out_channels, num_layers=2
    )


def pruned():
    net = GCN(2, 2, 2)
    torch.nn.utils.parametrizations.weight_norm(net.convs[0].lin)
    return gas.to_scalable(net, ring())


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(2, 2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index), x


def train_pair():
    model = gas.to_scalable(Pair(), ring())
    return train_epoch(model, load(), torch.optim.SGD(model.parameters(), 0.1))


def train(loader=None, model=None, **options):
    model = gcn() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train_epoch(model, load() if loader is None else loader, optimizer, **options)


def with_other_weights():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gcn, self.sage = GCNConv(2, 2), SAGEConv(2, 2)

        def forward(self, x, edge_index):
            return self.gcn(x, edge_index) + self.sage(x, edge_index)

    model = gas.to_scalable(Both(), ring())
    graph = gas.cluster(ring(), 2, model=model, method="random", log=False)
    train(load(graph), model, edge_dropout=0.5)


class Two(Model):
    """Returns two values."""

    def forward(self, *args):
        out = super().forward(*args)
        return out, out


def cut(**changes):
    data = ring(**changes)
    for name in ("val_mask", "test_mask"):
        data[name] = changes.get(name, data.train_mask)
    return gas.cluster(data, 2, method="random", log=False)


def profile_twice():
    with gas.profile(), gas.profile():
        pass


def schedule(cls=torch.optim.lr_scheduler.ConstantLR, optimizer=None):
    return cls(optimizer or torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))


def plateau():
    model = gas.models.GCN(4, 2, 4, 2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = schedule(torch.optim.lr_scheduler.ReduceLROnPlateau, optimizer)
    return gas.fit(model, cut(), optimizer, 1, scheduler=scheduler)


def fit(graph=None, model=None, epochs=1, **options):
    model = gcn() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return gas.fit(model, cut() if graph is None else graph, optimizer, epochs, **options)


class Steps:
    """Optimizer that isn't one of PyTorch's."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]


def raised():
    optimizer = torch.optim.SGD(gcn().parameters(), 0.1)
    with raise_rate(optimizer, 5, Progress(), 2):
        optimizer.step()


def full_batch():
    whole = FullBatch(ring())
    whole.data.x.add_(1)
    whole(gcn())


def linked():
    return gas.LinkLoader(cut(edge_label_index=torch.tensor([[0], [2]])), log=False)


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
    t.patch.setattr("gas.training.cost._library_bytes", lambda *_: 10**9)
    plan(1000)


def full_disk(t):
    t.patch.setattr("gas.native.memory.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    results.check_disk_space(t.path, experiment())


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
    return simulation.simulate(
        partition or statistics(), model or gcn(), given or machine(), **options
    )


SEVERAL = torch.ones(4, 3, dtype=torch.bool)


def interrupted(t):
    from gas.cli.checkpoints import Checkpoints

    small = experiment(settings=Settings(ARCHITECTURE, num_parts=2, epochs=1))
    small.run(0, checkpoints=Checkpoints(t.path / "run"))
    return small, Checkpoints


def resumed(t, seed, **options):
    small, checkpoints = interrupted(t)
    small.run(seed, checkpoints=checkpoints(t.path / "run", **options))


def resumed_with_other_features(t):
    small, checkpoints = interrupted(t)
    small.data.x = gas.quantize(small.data.x, "bfloat16")
    small.run(0, checkpoints=checkpoints(t.path / "run", resume=True))


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


def of_ranks():
    model = gcn()
    model.ranks = object()
    return model


def evaluated(**changes):
    model = gas.models.GraphSAGE(4, 2, 2, 2, 2)
    return gas.evaluate(model, gas.cluster(ring(**changes), 2, method="random", log=False))


def fitted(*losses, spoilt=False, keep=False):
    data, model, losses = ring(), gcn(), list(losses)
    data.val_mask = data.test_mask = data.train_mask
    whole = FullBatch(data)

    def epoch():
        if spoilt:
            torch.nn.init.constant_(next(model.parameters()), math.nan)
        return losses.pop(0)

    return run_epochs(model, data, epoch, whole, len(losses), keep=keep)


def sum_beyond_floats(out, y):
    return out.sum() * 0 + 3e38


def ended_since(t):
    (t.path / "metrics.json").touch()
    with lock_output(Options(out=t.path)):
        pass


def typed():
    """Return a model of two types of nodes, both with labels, and its graph."""
    data = HeteroData()
    for kind in "ab":
        data[kind].x, data[kind].y = torch.ones(4, 2), torch.ones(4, dtype=torch.long)
    for ends in ("ab", "ba"):
        data[ends[0], "to", ends[1]].edge_index = torch.arange(4).repeat(2, 1)
    model = gas.to_scalable(Typed(data.edge_types), data)
    return model, gas.cluster(data, 2, method="random", log=False)


def typed_training():
    model, graph = typed()
    train_epoch(model, gas.SubgraphLoader(graph, log=False), torch.optim.Adam(model.parameters()))


class Typed(torch.nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.conv = HeteroConv({kind: SAGEConv(2, 2) for kind in kinds})

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


def optimizer_of_another():
    optimizer = torch.optim.Adam(gcn().parameters())
    return train_epoch(gcn(), load(), optimizer)


class NotFinite(torch.nn.Module):
    def forward(self, batch):
        return torch.full((2, 2), math.nan)


def loss_of_types():
    mask, y = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    batch = {"a": SimpleNamespace(train_mask=mask, y=y, batch_size=2)}
    experiment = SimpleNamespace(node_type="a", settings=Settings())
    progress = gas.training.Progress(epoch=3)
    HeteroExperiment._train_epoch(experiment, NotFinite(), [batch], None, 0, progress=progress)


CASES = {
    "train_epoch, a loader in place of the model": lambda t: train_epoch(load(), gcn(), None),
    "train_epoch, a graph in place of a loader": lambda t: train(cut()),
    "train_epoch, no loader": lambda t: train(3),
    "train_epoch, pairs of nodes": lambda t: train(linked()),
    "train_epoch, views and a loss": lambda t: train(with_views(), loss_fn=torch.nn.MSELoss()),
    "train_epoch, unknown labels": lambda t: train(
        load(ring(y=torch.tensor([[0, 1], [-1, 1], [1, 1], [1, 0]])))
    ),
    "train_epoch, classes in columns of labels": lambda t: train(
        load(ring(y=torch.tensor([[0, 1], [2, 1], [1, 1], [1, 0]])))
    ),
    "train_epoch, a loss without a gradient": lambda t: train(
        loss_fn=lambda out, y: out.detach().sum()
    ),
    "fit, pairs of nodes": lambda t: fit(linked()),
    "fit, a split too many": lambda t: fit(
        cut(train_mask=torch.ones(4, 2, dtype=torch.bool)), split=2
    ),
    "fit, learned attributes of edges": lambda t: fit(
        cut(edge_attr=torch.nn.Parameter(torch.ones(8, 2)))
    ),
    "fit, learned features": lambda t: fit(cut(x=torch.nn.Parameter(torch.ones(4, 2)))),
    "fit, a list of labels": lambda t: fit(cut().update({"y": [0, 1, 0, 1]})),
    "fit, optimizers": lambda t: gas.fit(gcn(), cut(), [], 1),
    "predictions, fewer names than classes": lambda t: gas.predictions(
        gcn(), cut(classes=["a"]), log=False
    ),
    "train_epoch, the name of an optimizer": lambda t: train_epoch(gcn(), load(), "adam"),
    "train_epoch, an optimizer that needs a closure": lambda t: train_epoch(
        (model := gcn()), load(), torch.optim.LBFGS(model.parameters())
    ),
    "fit, average_weights='no'": lambda t: gas.fit(
        (model := gcn()), cut(), torch.optim.SGD(model.parameters(), 0.1), 1, average_weights="no"
    ),
    "plan, the model first": lambda t: gas.plan(gcn(), ring()),
    "train_epoch, a sum": lambda t: train(loss_fn=torch.nn.CrossEntropyLoss(reduction="sum")),
    "plan, a model of ranks": lambda t: gas.plan(ring(), of_ranks()),
    "fit, a model of ranks": lambda t: fit(model=of_ranks()),
    "plan, a model without histories": lambda t: gas.plan(ring(), SAGEConv(2, 2)),
    "train_gas.py --hetero, a loss that is NaN": lambda t: loss_of_types(),
    "train_epoch, the optimizer of another model": lambda t: optimizer_of_another(),
    "evaluate, labels of several types": lambda t: gas.evaluate(*typed()),
    "train_epoch, a model of several types": lambda t: typed_training(),
    "train_epoch, a sum of losses that overflows": lambda t: train(loss_fn=sum_beyond_floats),
    "fit, a loss that grew": lambda t: fitted(1e9),
    "fit, a loss that grew after a better epoch": lambda t: fitted(1.0, 1e9, keep=True),
    "fit, weights that are NaN": lambda t: fitted(1.0, spoilt=True),
    "train_gas.py, a run that ended meanwhile": ended_since,
    "evaluate, no labels": lambda t: evaluated(y=None),
    "evaluate, a split too many": lambda t: gas.evaluate(
        gcn(), cut(test_mask=torch.ones(4, 2, dtype=torch.bool)), split=2
    ),
    "evaluate, no masks": lambda t: evaluated(train_mask=None),
    "train, several outputs": lambda t: train_pair(),
    "train_epoch, several outputs": lambda t: train(model=Two()),
    "evaluate, several outputs": lambda t: gas.evaluate(gas.to_scalable(Pair(), ring()), cut()),
    "evaluate, a graph that isn't clustered": lambda t: gas.evaluate(gcn(), ring()),
    "train_epoch, a loss that is NaN": lambda t: train(loss_fn=lambda out, y: out.sum() * math.nan),
    "train_epoch, parts by loss and views": lambda t: by_loss(views=True),
    "train_epoch, parts by the loss of other labels": lambda t: other_labels(),
    "Experiment, checkpoints without resume": lambda t: resumed(t, 0),
    "Experiment, checkpoints of another seed": lambda t: resumed(t, 1, resume=True),
    "Experiment, checkpoints of other features": resumed_with_other_features,
    "Experiment, checkpoints every fortnight": lambda t: resumed(t, 0, every="fortnight"),
    "Experiment, no micro-batches": lambda t: experiment(micro_batches=0),
    "check_disk_space, a full disk": full_disk,
    "score, r2 of two targets and one output": lambda t: score(
        "r2", torch.ones(4, 1), torch.rand(4, 2)
    ),
    "Experiment, a training node with an unknown label": lambda t: experiment(
        ring(
            y=torch.tensor([[1.0, math.nan], *([[0.0, 1.0]] * 3)]),
            val_mask=ring().train_mask,
            test_mask=ring().train_mask,
        )
    ),
    "score, a function without a result": lambda t: score(
        lambda out, y: None, torch.ones(4, 2), torch.zeros(4)
    ),
    "score, an unknown metric": lambda t: score("f2", torch.ones(4, 2), torch.zeros(4)),
    "score, roc_auc of other nodes": lambda t: score("roc_auc", torch.ones(3), torch.zeros(4)),
    "score, roc_auc of three classes": lambda t: score("roc_auc", torch.ones(4, 3), torch.zeros(4)),
    "score, classes instead of outputs": lambda t: score(
        "accuracy", torch.ones(4).long(), torch.ones(4).long()
    ),
    "score, accuracy of real numbers": lambda t: score("accuracy", torch.ones(4), torch.rand(4)),
    "score, roc_auc of class 2": lambda t: score("roc_auc", torch.ones(4), torch.full((4,), 2)),
    "train_epoch, no labels": lambda t: train(load(ring(y=None))),
    "loss_of, classes and one output a node": lambda t: loss_of(torch.ones(4), ring().y),
    "loss_of, classes as real numbers": lambda t: loss_of(torch.ones(4, 3), torch.ones(4)),
    "loss_of, classes in a column": lambda t: loss_of(torch.ones(4, 3), torch.ones(4, 1).long()),
    "Experiment, no labels": lambda t: experiment(ring(y=None)),
    "Experiment, no test_mask": lambda t: experiment(ring(val_mask=ring().train_mask)),
    "Settings.default, another model": lambda t: Settings.default("transformer"),
    "train_epoch, no micro-batches": lambda t: train(micro_batches=0),
    "train_epoch, no steps": lambda t: train(max_steps=0),
    "train_epoch, a loss that broadcasts": lambda t: train(
        load(ring(y=torch.ones(4))), gcn(out_channels=1), loss_fn=torch.nn.MSELoss()
    ),
    "train_epoch, a loss that isn't returned": lambda t: train(loss_fn=lambda out, y: None),
    "train_epoch, dropped edges of other weights": lambda t: with_other_weights(),
    "train_epoch, a loss by node": lambda t: train(
        loss_fn=torch.nn.CrossEntropyLoss(reduction="none")
    ),
    "fit, a negative norm of the gradient": lambda t: fit(grad_norm=-1.0),
    "fit, autocast to a name": lambda t: fit(autocast="bfloat16"),
    "fit, a loss by name": lambda t: fit(loss="cross_entropy"),
    "fit, no training nodes": lambda t: fit(cut(train_mask=torch.zeros(4, dtype=torch.bool))),
    "fit, unknown targets of all validation nodes": lambda t: fit(
        cut(
            y=torch.tensor([0, 1, 0, -1]),
            train_mask=torch.arange(4) < 3,
            val_mask=torch.arange(4) == 3,
        )
    ),
    "fit, real targets of two columns": lambda t: fit(cut(y=torch.full((4, 2), 0.5))),
    "fit, a class that has no output": lambda t: fit(cut(y=torch.tensor([0, 1, 2, 1]))),
    "evaluate, a module of PyTorch": lambda t: gas.evaluate(torch.nn.Linear(2, 2), cut()),
    "fit, a callback that isn't in a list": lambda t: fit(callbacks=print),
    "train_epoch, views and dropped edges": lambda t: train(with_views(), edge_dropout=0.5),
    "train_epoch, every edge dropped": lambda t: train(edge_dropout=1.0),
    "train_epoch, scale_loss and a generator": lambda t: train(iter(load()), scale_loss=True),
    "train_epoch, views without a loss": lambda t: train(list(with_views())),
    "fit, histories of views without views": lambda t: fit(bank="per_view"),
    "train_epoch, an unknown bank": lambda t: train(with_views(), bank="both"),
    "FullBatch, a tensor changed in place": lambda t: full_batch(),
    "fit, a module of PyTorch": lambda t: fit(model=torch.nn.Linear(2, 2)),
    "fit, a state_dict without the parameters": lambda t: fit(model=pruned()),
    "fit, a model that is frozen": lambda t: fit(
        model=gas.models.GraphSAGE(4, 2, 2, 2, 2).requires_grad_(False)
    ),
    "fit, no epochs": lambda t: fit(epochs=0),
    "fit, no patience": lambda t: fit(patience=0),
    "fit, never evaluated": lambda t: fit(evaluate_every=0),
    "fit, an unknown metric": lambda t: fit(metric="f2"),
    "fit, an unknown option": lambda t: fit(clip=1.0),
    "fit, a batch size with a loader": lambda t: fit(load(), batch_size=2),
    "fit, features in place of a graph": lambda t: fit(ring().x),
    "fit, a loss and a loss_fn": lambda t: fit(loss=abs, loss_fn=abs),
    "fit, no validation nodes": lambda t: fit(cut(val_mask=torch.zeros(4, dtype=torch.bool))),
    "fit, unknown targets": lambda t: fit(cut(y=torch.full((4,), -1))),
    "profile of a module": lambda t: contextlib.ExitStack().enter_context(gas.profile(3)),
    "two profiles": lambda t: profile_twice(),
    "fit, a metric of classes for real numbers": lambda t: fit(
        cut(y=torch.rand(4)), metric="accuracy"
    ),
    "score, the accuracy of counts": lambda t: score(
        "accuracy", torch.ones(4, 1), torch.tensor([0, 3, 1, 0])
    ),
    "fit, metrics in a list": lambda t: fit(metrics=[abs]),
    "fit, metrics without names": lambda t: fit(metrics={1: abs}),
    "fit, no function": lambda t: fit(on_epoch=3),
    "fit, callbacks that are functions": lambda t: fit(callbacks=[print]),
    "fit, a scheduler that is a number": lambda t: fit(scheduler=0.1),
    "fit, a scheduler of another optimizer": lambda t: fit(scheduler=schedule()),
    "fit, a scheduler that waits for a decrease": lambda t: plateau(),
    "MetricLogger of no function": lambda t: gas.training.MetricLogger(3),
    "fit, an optimizer of another model": lambda t: gas.fit(
        gcn(), cut(), torch.optim.SGD(gcn().parameters(), 0.1), 1
    ),
    "fit, half a step of warm-up": lambda t: fit(warm_up=0.5),
    "fit, warm-up of an optimizer that isn't one of PyTorch's": lambda t: gas.fit(
        (model := gcn()), cut(), Steps(model.parameters()), 1
    ),
    "raise_rate, an epoch without a number": lambda t: raised(),
    "fit, an optimizer that isn't one of PyTorch's": lambda t: AveragedWeights(
        torch.nn.Linear(2, 2), object(), 8
    ),
    "fit, a graph that was not clustered": lambda t: fit(load()),
    "fit, no labels": lambda t: fit(cut(y=None)),
    "fit, a loss that rises by stale rows": lambda t: warn_if_unstable(
        Run(loss=[1.0, 0.5, 0.7, 0.8, 0.9], drift=[0.4] * 5, test_acc=[0.0] * 5)
    ),
    "fit, a loss that stays by stale rows": lambda t: warn_if_unstable(
        Run(loss=[1.9] * 10, val_acc=[0.4] * 10, drift=[0.4] * 10, test_acc=[0.0] * 10)
    ),
    "run_epochs, no patience": lambda t: run_epochs(gcn(), ring(), train, None, 1, patience=0),
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
    "scaled, from one number of ranks": lambda t: statistics().extrapolate(ranks=4),
    "Machine, negative seconds": lambda t: machine(seconds_per_edge=-1.0),
    "Machine, no bandwidth": lambda t: machine(bandwidth=0),
    "Machine, twice the time for messages": lambda t: machine(backward_share=2),
    "Machine, no rank on a host": lambda t: machine(ranks_per_host=0),
    "Machine.measure, a model elsewhere": lambda t: Machine.measure(
        gcn().to("meta"), load(), 1e9, 0
    ),
    "Machine.measure, local processes that fail": ranks_that_fail,
    "Machine.measure, one rank": lambda t: Machine.measure(gcn(), load(), 1e9, 0, ranks=1),
    "Machine.measure, two parts": lambda t: Machine.measure(gcn(), load(), 1e9, 0),
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
    "open_events, tensorboard is missing": lambda t: without(
        t, "torch.utils.tensorboard", lambda: open_events(t.path)
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
