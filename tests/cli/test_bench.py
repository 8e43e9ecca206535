"""``gas bench``: an epoch with histories, without them, and of the full batch."""

import contextlib
import itertools
import json
import math
import re
import signal
import weakref

import pytest
import torch

import gas
from gas.cli import bench, main
from gas.cli.bench import DROPPED, FULL, HISTORIES, NAMES, NO_TRANSFERS, Bench, Measured
from gas.cli.settings import Settings

pytestmark = pytest.mark.requires("tyro")


def make(num_nodes=300, memory=None, model="sage", **changes):
    data, _, out_channels = gas.get_data("data", f"planted:{num_nodes}")
    settings = Settings.default(model).replace(hidden_channels=8, **changes)
    return Bench(data, out_channels, model, settings, memory, log=False)


def test_all_contenders_are_measured(tmp_path, capsys):
    options = ["--repeats", "2", "--num-parts", "8", "--batch-size", "2", "--model", "gcn"]
    main(["bench", "planted:300", *options, "--json", str(tmp_path / "found.json")])
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert tuple(found["contenders"]) == NAMES
    for name, one in found["contenders"].items():
        assert name in text
        assert len(one["seconds"]) == 2
        assert one["steps"] == (1 if name == FULL else 4)
        assert one["phases"]["dense layers"] > 0
    assert found["contenders"][FULL]["to_full_batch"] == 1
    assert found["contenders"][HISTORIES]["moved_bytes"] > 0
    assert found["contenders"][DROPPED]["moved_bytes"] == 0
    low, high = found["transfer_overhead_range"]
    assert low <= found["transfer_overhead"] <= high
    assert found["chosen"]["num_parts"] == 8
    assert found["machine"]["torch"] == torch.__version__
    assert "Time by phase" in text
    assert "edges between parts" in text


def test_batches_are_the_same_but_for_edges_between_them():
    made = make(num_parts=8, batch_size=2)
    assert "\n" not in str(made)  # What was chosen is shown once there are parts.
    made._partition_graph(made.chosen)
    assert str(made).splitlines()[1:] == str(made.partition).splitlines()
    assert "; 8 parts, 2 per mini-batch, histories of " in str(made)
    assert sorted(itertools.chain.from_iterable(made._batches)) == list(range(8))
    with contextlib.ExitStack() as models:
        kept, dropped = (
            made._make_contender(name, models).epoch.args[1] for name in (HISTORIES, DROPPED)
        )
        for one, other in zip(kept, dropped, strict=True):
            assert torch.equal(one.n_id[: one.batch_size], other.n_id)
            assert other.data.adj_t.shape == (one.batch_size, one.batch_size)
        inside = sum(int((one.data.adj_t.col < one.batch_size).sum()) for one in kept)
        assert inside == sum(other.data.adj_t.col.numel() for other in dropped)


def test_the_tables_of_what_was_measured():
    found = {name: Measured([], 0, math.nan, None, "no memory") for name in NAMES}
    found[FULL] = Measured([0.25, 2.0, 1.5], 1, 2**20, None)
    found[HISTORIES] = Measured([0.125, 1.0, 0.75], 4, math.nan, None)
    summary = bench.summarise(found)
    assert [re.split("  +", line) for line in bench.show(summary).splitlines()] == [
        ["", "an epoch", "lowest - highest", "to full batch", "steps", "memory of an epoch"],
        [FULL, "1.50 s", "250.0 ms - 2.00 s", "1.00x", "1", "1 MiB"],
        [HISTORIES, "750.0 ms", "125.0 ms - 1.00 s", "0.50x", "4", "-"],
        *([name, "not measured: no memory"] for name in NAMES[2:]),
    ]
    assert summary["transfer_overhead"] is None


@pytest.mark.parametrize(
    ("still", "is_noise"), [([0.1, 1.25, 0.5], True), ([0.1, 0.8, 0.5], False)]
)
def test_an_overhead_within_noise_is_called_so(still, is_noise):
    found = {name: Measured([], 0, math.nan, None, "no memory") for name in NAMES}
    found[HISTORIES] = Measured([0.125, 1.0, 0.75], 4, math.nan, None)
    found[NO_TRANSFERS] = Measured(still, 4, math.nan, None)
    line = bench.show(bench.summarise(found)).splitlines()[-1]
    low = "-20.0%" if is_noise else "+25.0%"
    assert line.startswith("Pulls and pushes of rows add +25.0% to an epoch with histories, in sin")
    assert line.endswith(f" {low} to +50.0%{', which is within noise' * is_noise}.")


@pytest.mark.parametrize("key", ["edge_attr", "edge_type"])
def test_attributes_of_edges_have_no_effect(key):
    """GCN adds self-loops, of which they have no rows."""
    data, _, out_channels = gas.get_data("data", "planted:300")
    data[key] = torch.ones(data.num_edges, 2)
    settings = Settings.default("gcn").replace(hidden_channels=8, num_parts=8, batch_size=2)
    found = Bench(data, out_channels, "gcn", settings, log=False).measure(1)
    assert all(found[name].seconds for name in NAMES)


def test_a_graph_without_training_nodes_is_refused():
    data, _, out_channels = gas.get_data("data", "planted:60")
    data.train_mask.fill_(False)
    with pytest.raises(ValueError, match="'train_mask' has no node, expected one at least"):
        Bench(data, out_channels, "sage", Settings.default("sage"), log=False)


def test_what_cannot_run_says_why(capsys):
    main(["bench", "planted:300", "--num-parts", "4", "--batch-size", "4", "--repeats", "1"])
    text = capsys.readouterr().out
    assert "histories" in text
    assert text.count("not measured: there is one mini-batch, which is the full batch") == 3


def test_a_full_batch_that_exceeds_memory_is_not_measured(monkeypatch):
    made = make()
    full = min(one.peak_bytes for one in made.plan.candidates if one.steps == 1)
    object.__setattr__(made.plan, "memory", full - 1)
    candidates = [one for one in made.plan.candidates if one.steps == 1]
    assert made._explain(candidates).startswith("needs about ")


def test_one_that_fails_leaves_the_others(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("can't allocate memory: 8 bytes\nstack")

    monkeypatch.setattr(bench, "FullBatch", fail)
    found = make(num_parts=8, batch_size=2).measure(1)
    assert found[FULL].reason == "can't allocate memory: 8 bytes"
    assert found[FULL].steps == 0
    assert all(found[name].seconds for name in NAMES[1:])


@pytest.mark.parametrize("number", [3, 9, 13])
def test_an_interruption_shows_the_epochs_that_ended(monkeypatch, tmp_path, capsys, number):
    """The signal comes while contenders warm up, in the second round, in the phases."""
    train, calls = bench.train_epoch, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return train(*args, **options)

    monkeypatch.setattr(bench, "train_epoch", interrupted)
    options = ["--repeats", "2", "--num-parts", "8", "--batch-size", "2"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "planted:300", *options, "--json", str(tmp_path / "found.json")])
    assert end.value.code == 130
    text, found = capsys.readouterr(), json.loads((tmp_path / "found.json").read_text())
    assert "Interrupted: these are the epochs that ended before." in text.err
    assert found["interrupted"]
    epochs = [len(one.get("seconds", [])) for one in found["contenders"].values()]
    assert epochs == {3: [0, 0, 0, 0], 9: [1, 1, 1, 1], 13: [2, 2, 2, 2]}[number]
    assert text.out.count("not measured: interrupted") == (4 if number == 3 else 0)
    ratio = found["contenders"][HISTORIES].get("to_full_batch")
    assert (ratio is None) == (number == 3)


def test_an_interruption_in_python_returns_the_epochs_that_ended(monkeypatch):
    train, calls = bench.train_epoch, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(bench, "train_epoch", interrupted)
    made = make(num_parts=8, batch_size=2)
    assert [len(one.seconds) for one in made.measure(2).values()] == [1, 1, 1, 1]
    assert made.summary()["interrupted"]


def interrupt_in_a_callback():
    """Send Ctrl-C while a weak reference calls back, where Python drops KeyboardInterrupt."""
    dropped = torch.nn.Identity()
    reference = weakref.ref(dropped, lambda _: signal.raise_signal(signal.SIGINT))
    del dropped
    assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_python_drops_is_not_lost(monkeypatch, capsys):
    """It ends the epoch after the next step; one while planning, before the first is measured."""
    train, calls = bench.train_epoch, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 5:  # Each contender has warmed up.
            interrupt_in_a_callback()
        return train(*args, **options)

    monkeypatch.setattr(bench, "train_epoch", interrupted)
    command = ["bench", "planted:300", "--repeats", "2", "--num-parts", "8", "--batch-size", "2"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 130
    assert len(calls) == 5
    assert "Interrupted: these are the epochs that ended before." in capsys.readouterr().err
    make_plan = gas.plan

    def plan(*args, **options):
        interrupt_in_a_callback()
        return make_plan(*args, **options)

    monkeypatch.setattr(gas, "plan", plan)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 130
    assert len(calls) == 6


def test_a_second_interruption_ends_at_once(monkeypatch, capsys):
    def show(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gas.cli.commands.show", show)
    monkeypatch.setattr(bench, "train_epoch", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        main(["bench", "planted:300", "--num-parts", "8", "--batch-size", "2"])
    assert end.value.code == 130
    assert capsys.readouterr().out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_are_one_line():
    with pytest.raises(SystemExit, match="gas bench: error: --repeats is 0, expected"):
        main(["bench", "planted:60", "--repeats", "0"])
    with pytest.raises(SystemExit, match="gas bench: error: --memory is '6XB'"):
        main(["bench", "planted:60", "--memory", "6XB"])
