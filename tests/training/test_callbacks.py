"""Loss, metrics, schedulers and callbacks of ``gas.fit``."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import gas
from gas.training import Callback, MetricLogger, Run
from gas.training.record import is_true


@pytest.fixture
def made():
    """Return a model, a clustered graph and an optimizer."""
    torch.manual_seed(0)
    data = random_graph()
    data.y = torch.randint(3, (60,))
    for name, nodes in zip(("train", "val", "test"), torch.randperm(60).chunk(3), strict=True):
        data[f"{name}_mask"] = torch.zeros(60, dtype=torch.bool).index_fill_(0, nodes, True)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2, batch_norm=True)
    graph = gas.cluster(data, 6, model=model, log=False)
    return model, graph, torch.optim.Adam(model.parameters(), lr=0.01)


def fit(made, epochs=3, **options):
    return gas.fit(*made, epochs, batch_size=2, log=False, **options)


def test_the_loss_is_that_of_the_labelled_nodes(made):
    seen = []

    def loss(out, y):
        seen.append((out.shape, y.shape))
        return F.cross_entropy(out, y, weight=torch.tensor([1.0, 0.5, 0.5]))

    run = fit(made, 1, loss=loss)
    assert sum(shape[0] for _, shape in seen) == int(made[1].train_mask.sum())
    assert all(out == (*y, 3) for out, y in seen)
    assert len(run) == 1


def test_weights_of_classes_change_what_is_learnt(made):
    weight = torch.tensor([1.0, 1e-6, 1e-6])
    fit(made, 30, loss=torch.nn.CrossEntropyLoss(weight=weight), keep_best=False)
    assert (made[0].predict(made[1], log=False).argmax(dim=1) == 0).float().mean() > 0.9


class Mean:
    """A metric with a state, as those of torchmetrics have one."""

    def __init__(self):
        self.rows, self.total = 0, 0.0

    def __call__(self, out, y):
        self.rows, self.total = self.rows + len(y), self.total + float(y.sum())
        return torch.tensor(self.total / self.rows)

    def reset(self):
        self.rows, self.total = 0, 0.0


def test_metrics_have_curves_by_split(made):
    graph = made[1]
    run = fit(made, 2, metrics={"mean": Mean(), "rows": lambda out, y: len(y)})
    for name in ("train", "val", "test"):
        mask = graph[f"{name}_mask"]
        mean = pytest.approx(float(graph.y[mask].float().mean()), abs=1e-6)
        assert run.metrics[f"{name}_mean"] == [mean, mean]
        assert run.metrics[f"{name}_rows"] == [int(mask.sum())] * 2
    assert len(run.metrics) == 6


def test_a_function_chooses_the_best_epoch(made):
    scores = iter([0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5])
    run = fit(made, 3, metric=lambda out, y: next(scores))
    assert (run.val_acc, run.best_epoch) == ([0.1, 0.9, 0.5], 1)


def test_a_scheduler_steps_after_each_epoch(made):
    run = fit(made, 4, scheduler=StepLR(made[2], step_size=2, gamma=0.1))
    assert run.lr == pytest.approx([0.01, 0.01, 0.001, 0.001])


def test_a_plateau_is_that_of_the_validation_score(made):
    scheduler = ReduceLROnPlateau(made[2], mode="max", factor=0.1, patience=0)
    run = fit(made, 3, scheduler=scheduler, metric=lambda out, y: 0.5)
    assert run.lr == pytest.approx([0.01, 0.01, 0.001])


class Record(Callback):
    def __init__(self):
        self.calls = []

    def on_fit_start(self, model, optimizer):
        self.calls.append(("start", type(model).__name__, type(optimizer).__name__))

    def on_step_end(self, progress):
        self.calls.append(("step", progress.steps))

    def on_epoch_end(self, run):
        self.calls.append(("epoch", len(run)))

    def on_fit_end(self, run):
        self.calls.append(("end", len(run)))


def test_callbacks_are_called_in_turn(made):
    record, on_steps = Record(), []
    fit(made, 2, callbacks=[record], on_step=lambda: on_steps.append(1))
    of_epoch = [("step", 1), ("step", 2), ("step", 3)]
    assert record.calls == [
        ("start", "GraphSAGE", "Adam"), *of_epoch, ("epoch", 1), *of_epoch, ("epoch", 2), ("end", 2)
    ]  # fmt: skip
    assert len(on_steps) == 6


def test_callbacks_learn_of_the_end_if_the_last_inference_fails(made, monkeypatch):
    record = Record()

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(sys.modules["gas.training.fit"], "load_kept_weights", fail)
    with pytest.raises(MemoryError, match="no room"):
        fit(made, 1, callbacks=[record])
    assert record.calls[-1] == ("end", 1)


def test_further_metrics_survive_a_checkpoint(made):
    run = fit(made, 2, metrics={"mean": lambda out, y: out.mean()})
    other = Run()
    other.load_state_dict(run.state_dict())
    assert other.metrics == run.metrics
    assert len(other.metrics["val_mean"]) == 2
    state = run.state_dict()
    del state["metrics"]  # Of an older checkpoint.
    other.load_state_dict(state)
    assert other.metrics == {}


def test_a_callback_ends_the_training(made):
    class Stop(Callback):
        def on_epoch_end(self, run):
            return len(run) == 2

    record = Record()
    assert len(fit(made, 5, callbacks=[Stop(), record])) == 2
    assert record.calls[-2:] == [("epoch", 2), ("end", 2)]


def test_an_interrupted_training_ends_its_callbacks(made):
    class Interrupt(Callback):
        def on_epoch_end(self, run):
            raise KeyboardInterrupt

    record = Record()
    with pytest.raises(KeyboardInterrupt):
        fit(made, callbacks=[record, Interrupt()])
    assert record.calls[-1] == ("end", 1)


def test_a_scheduler_by_step(made):
    class Schedule(Callback):
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def on_step_end(self, progress):
            self.scheduler.step()

    scheduler = OneCycleLR(made[2], max_lr=0.1, total_steps=7)
    run = fit(made, 2, callbacks=[Schedule(scheduler)])
    assert run.lr[1] == pytest.approx(0.1 / 25 / 1e4)
    assert scheduler.last_epoch == 6


def test_a_tracker_gets_every_curve(made):
    logged = []

    def log(values, step):
        logged.append((step, values))

    run = fit(made, 2, callbacks=[MetricLogger(log)], metrics={"none": lambda out, y: float("nan")})
    assert [step for step, _ in logged] == [1, 2]
    assert logged[1][1]["val_acc"] == run.val_acc[1]
    assert logged[1][1]["lr"] == 0.01
    assert "val_none" not in logged[1][1]


def test_tensorboard_gets_scalars(made):
    class Writer:
        def __init__(self):
            self.rows = []

        def add_scalar(self, *row):
            self.rows.append(row)

    writer = Writer()
    run = fit(made, 2, callbacks=[MetricLogger(writer)])
    assert ("test_acc", run.test_acc[1], 2) in writer.rows


def test_every_callback_that_was_started_is_ended(made):
    class Fails(Record):
        def on_fit_start(self, model, optimizer):
            super().on_fit_start(model, optimizer)
            raise RuntimeError("no connection")

        def on_fit_end(self, run):
            super().on_fit_end(run)
            raise RuntimeError("no connection either")

    first, second, third = Record(), Fails(), Record()
    with pytest.raises(RuntimeError, match="no connection either"):
        fit(made, callbacks=[first, second, third])
    assert [record.calls[-1][0] for record in (first, second)] == ["end", "end"]
    assert third.calls == []


def test_curves_of_an_interrupted_epoch_are_cut(made):
    seen, runs = [], []

    def metric(out, y):
        seen.append(1)
        if len(seen) == 5:  # Of the second epoch's validation nodes.
            raise KeyboardInterrupt
        return 0.5

    class Keep(Callback):
        def on_fit_end(self, run):
            runs.append(run)

    with pytest.raises(KeyboardInterrupt):
        fit(made, metrics={"half": metric}, callbacks=[Keep()])
    (run,) = runs
    curves = [run.loss, run.val_acc, run.lr, run.seconds, run.layer_age, *run.metrics.values()]
    assert [len(curve) for curve in curves] == [1] * 8


def test_scores_that_are_all_nan_choose_no_epoch(made):
    run = fit(made, 3, metric=lambda out, y: float("nan"))
    assert run.best_epoch == run.best.epoch == 2


def test_a_run_is_printed_in_a_line():
    run = gas.training.Run()
    assert str(run) == "Run of 0 epochs"
    run.val_acc[:], run.test_acc[:], run.seconds[:] = [0.5, 0.75], [0.4, 0.7], [1.0, 2.0]
    line = "Run of 2 epochs of 1.50 s: best validation accuracy 0.7500 in epoch 2 (test 0.7000)"
    assert str(run) == line


@pytest.mark.parametrize("end", [True, np.True_, torch.tensor(True)])
def test_every_kind_of_true_ends_training(end):
    assert is_true(end)
    assert not any(map(is_true, (None, 1, 0.5, "yes", np.float64(1), torch.ones(()), np.False_)))
