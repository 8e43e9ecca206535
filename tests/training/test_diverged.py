"""A training that diverges stops, and says where; nothing is left that looks like a result."""

import json
import math

import pytest
import torch
from conftest import ROOT, random_graph

import gas
from gas.checkpoint import checkpoints
from gas.cli import Checkpoints, Experiment, Settings
from gas.training import FullBatch, loss_of, run_epochs, train_epoch
from gas.training.record import is_usable


def made(num_parts=4):
    torch.manual_seed(0)
    data = random_graph(directed=False)
    data.train_mask[:] = True
    data.val_mask = data.test_mask = data.train_mask
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    graph = gas.cluster(data, num_parts, model=model, log=False, method="random")
    model.predict(graph)  # Fills the histories.
    return graph, model, torch.optim.SGD(model.parameters(), lr=0.01)


class NanAt:
    """A loss that is NaN, or infinite, at one of its calls."""

    def __init__(self, call, value=math.nan):
        self.call, self.value, self.calls = call, value, 0

    def __call__(self, out, y):
        self.calls += 1
        loss = loss_of(out, y)
        return loss * self.value if self.calls == self.call else loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_stops_the_epoch_before_weights_change(value, micro_batches):
    graph, model, optimizer = made()
    loader = gas.SubgraphLoader(graph, log=False)
    loss_fn = NanAt(3, value)
    with pytest.raises(FloatingPointError, match=f"the loss is {value} in batch 3: .*learning"):
        train_epoch(model, loader, optimizer, loss_fn=loss_fn, micro_batches=micro_batches)
    assert loss_fn.calls == 3
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert math.isfinite(train_epoch(model, loader, optimizer))


def test_a_regulariser_is_a_part_of_the_loss():
    graph, model, optimizer = made()
    model.reg_loss = torch.tensor(math.nan)
    with pytest.raises(FloatingPointError, match="nan in batch 1"):
        train_epoch(model, gas.SubgraphLoader(graph, log=False), optimizer)


def test_the_epoch_is_named():
    graph, model, optimizer = made()
    whole, loss_fn = FullBatch(graph), NanAt(4)
    progress = gas.training.Progress()

    def epoch():
        return train_epoch(
            model, whole, optimizer, full_batch=True, loss_fn=loss_fn, progress=progress
        )

    run = gas.training.Run()
    with pytest.raises(FloatingPointError, match="nan in epoch 4, batch 1"):
        run_epochs(model, whole.data, epoch, whole, 9, run=run, progress=progress)
    assert len(run) == 3


@pytest.mark.parametrize("loss", [1e7, math.nan, math.inf])
def test_a_loss_of_no_use_is_no_end(loss):
    graph, model, _ = made()
    whole = FullBatch(graph)
    with pytest.raises(FloatingPointError, match=r"the loss is .* after epoch 2: training div"):
        run_epochs(model, whole.data, lambda: loss, whole, 2)
    run_epochs(model, whole.data, lambda: 1e3, whole, 2)
    graph.y = torch.full((60,), 1e4)
    run_epochs(gas.models.GraphSAGE(60, 5, 8, 1, 2), FullBatch(graph).data, lambda: 1e7, whole, 2)


def test_weights_that_the_last_step_spoilt():
    graph, model, _ = made()
    whole = FullBatch(graph)

    def epoch():
        torch.nn.init.constant_(next(model.parameters()), math.nan)
        return 1.0

    with pytest.raises(FloatingPointError, match="isn't finite after epoch 1"):
        run_epochs(model, whole.data, epoch, whole, 1)


def test_no_checkpoint_of_it(tmp_path):
    data = random_graph(directed=False)
    data.val_mask = data.test_mask = ~data.train_mask
    settings = Settings.default("sage").replace(epochs=4, num_parts=4, batch_size=2)
    options = {"training": {"loss_fn": NanAt(4)}, "log": False}
    experiment = Experiment(data, 3, "sage", settings, **options)
    with pytest.raises(FloatingPointError, match="nan in epoch 2, batch 2"):
        experiment.run(0, checkpoints=Checkpoints(tmp_path / "run"))
    assert len(checkpoints(tmp_path / "run")) == 1


@pytest.mark.parametrize("spoilt", ["loss", "weight"])
def test_no_checkpoint_in_the_middle_of_an_epoch_that_diverges(tmp_path, spoilt):
    """A GPU's losses are read late: here by the checkpoint."""
    graph, model, optimizer = made()
    loader, run = gas.SubgraphLoader(graph, log=False), gas.training.Run()
    progress = gas.training.Progress()
    saved = Checkpoints(tmp_path / "run", "1s")
    saved.start(model, optimizer, loader, run, progress, {})
    progress.steps, progress.loss = 1, torch.tensor(0.5)
    saved.write()
    assert len(checkpoints(tmp_path / "run")) == 1
    progress.steps = 2
    if spoilt == "loss":
        progress.loss = torch.tensor(math.nan)
    else:
        torch.nn.init.constant_(next(model.parameters())[:1], math.inf)
    saved.write()
    assert len(checkpoints(tmp_path / "run")) == 1


@pytest.mark.slow
@pytest.mark.requires("matplotlib")
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_the_command_ends_with_an_error(tmp_path, run_script, model):
    script = ROOT / "examples" / "train_gas.py"
    options = ["--dataset", "planted:600", "--model", model, "--epochs", 2, "--lr", "1e9"]
    done = run_script(script, *options, "--out", "out")
    assert done.code == 1
    assert "training diverged" in done.err.splitlines()[-1]
    assert "test accuracy" not in done.out
    assert not (tmp_path / "out").exists()


def test_the_best_model_before_is_kept():
    graph, model, _ = made()
    whole, losses = FullBatch(graph), iter([1.0, 0.5, math.nan])

    def epoch():
        loss = next(losses)
        if math.isnan(loss):
            torch.nn.init.constant_(next(model.parameters()), math.nan)
            raise FloatingPointError("the loss is nan")
        return loss

    run = gas.training.Run()
    with pytest.raises(FloatingPointError, match="nan. The best model before is that of epoch 1$"):
        run_epochs(model, whole.data, epoch, whole, 9, keep=True, run=run)
    assert (len(run), run.best.epoch, run.loss) == (2, 0, [1.0, 0.5])
    assert all(value.isfinite().all() for value in run.best.state.values())


def test_an_epoch_that_spoilt_weights_is_never_the_best():
    graph, model, _ = made()
    graph.y[:] = 0  # What NaN is taken for; finite outputs are made to miss it.
    whole, calls, shift = FullBatch(graph), [], torch.tensor([100.0, 0.0, 0.0])

    def epoch():
        calls.append(0)
        if len(calls) == 2:
            torch.nn.init.constant_(next(model.parameters()), math.nan)
        return 1.0

    run = gas.training.Run()
    with pytest.raises(FloatingPointError, match="isn't finite after epoch 2: .* of epoch 1$"):
        run_epochs(model, whole.data, epoch, lambda m: whole(m) - shift, 2, keep=True, run=run)
    assert run.best.epoch == 0
    assert math.isnan(run.val_acc[1])


def test_a_best_model_of_no_use_is_not_kept():
    graph, model, _ = made()
    whole, run = FullBatch(graph), gas.training.Run()
    with pytest.raises(FloatingPointError, match="float32$"):
        run_epochs(model, whole.data, lambda: 1e7, whole, 2, keep=True, run=run)
    assert run.best is None


@pytest.mark.slow
@pytest.mark.requires("matplotlib", "pyarrow", "safetensors")
@pytest.mark.parametrize(("runs", "fails_in", "ended"), [(3, 2, [0, 2]), (1, 1, [])])
def test_runs_that_ended_are_written(tmp_path, run_script, monkeypatch, runs, fails_in, ended):
    """Of three runs the second diverges in its third epoch; or the only one does."""
    train, calls = gas.cli.experiment.train_epoch, []

    def diverge(*args, progress, **kwargs):
        calls.append(progress)
        if progress.epoch == 3 and len({id(each) for each in calls}) == fails_in:
            raise FloatingPointError("the loss is nan")
        return train(*args, progress=progress, **kwargs)

    monkeypatch.setattr(gas.cli.experiment, "train_epoch", diverge)
    script = ROOT / "examples" / "train_gas.py"
    options = ["--dataset", "planted:600", "--epochs", 4, "--runs", runs, "--seed", 5]
    done = run_script(script, *options, "--out", "out")
    assert done.code == 1
    said = json.loads((tmp_path / "out/metrics.json").read_text())
    number = fails_in - 1
    reason = said["failed"][0].pop("reason")
    assert reason.startswith("the loss is nan. The best model before")
    assert said["failed"] == [{"run": number, "seed": 5 + number}]
    assert [len(each["loss"]) for each in said["epochs"]] == ([4, 4] if ended else [2])
    assert ("until it diverged" in done.out) == (not ended)
    assert done.err.splitlines()[-1].endswith(reason)
    table = parquet_rows(tmp_path / "out/predictions.parquet")
    kept = (ended or [0])[said["kept_run"]]
    data, *_ = gas.get_data("data", "planted:600")
    parts = {part: data[f"{part}_mask"] for part in ("train", "val", "test")}
    for part, mask in parts.items():
        mask = mask if mask.dim() == 1 else mask[:, kept % mask.size(1)]
        assert [entry == part for entry in table["split"]] == mask.tolist()


def parquet_rows(path):
    from pyarrow import parquet

    return parquet.read_table(path).to_pydict()


def test_targets_that_are_unknown_have_no_scale():
    assert is_usable(0.5, torch.tensor([1.0, math.nan]))
    assert is_usable(1e7, torch.tensor([[1e4, math.nan], [1e4, 0.5]]))
    assert not is_usable(1e7, torch.tensor([[1.0, math.nan]]))
