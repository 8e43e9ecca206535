"""A resumed training equals one that was never interrupted, bit by bit."""

import os
import random
import shutil
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint.trainings import CASES, EPOCHS, losses, small_graph, training
from conftest import run_forked
from torch_geometric.nn import GraphSAGE

import gas
from gas.augment import DropEdge
from gas.checkpoint import CheckpointError, checkpoints, tensors
from gas.checkpoint.ranks import _describe_rank
from gas.cli import Experiment, Settings
from gas.cli.checkpoints import Checkpoints
from gas.datasets.planted import planted_partition
from gas.training import Run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data():
    return small_graph()


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop", [1, 3, 5])  # An epoch has three steps.
def test_goes_on_bit_by_bit(data, tmp_path, case, stop):
    options = CASES[case]
    whole = training(data, **options)
    expected = losses(*whole, EPOCHS)
    parts = training(data, **options)
    folder = tmp_path / "checkpoints"

    def save():
        gas.save(folder, *parts, scores=[0.5, float("nan")], epoch=stop // 3)

    before = losses(*parts, EPOCHS, stop, save)
    assert before == expected[:stop]

    torch.manual_seed(123)  # As another process.
    again = training(data, **options)
    random.seed(5)
    state = gas.load(folder, *again)
    assert state["epoch"] == stop // 3
    assert state["scores"][0] == 0.5
    assert np.isnan(state["scores"][1])
    left = EPOCHS - (stop - 1) // 3  # That of the step is under way, perhaps at its end.
    after = losses(*again, left)
    assert before + after == expected
    for mine, theirs in zip(whole[0].histories, again[0].histories, strict=True):
        assert torch.equal(mine.emb, theirs.emb)
        assert torch.equal(mine.age, theirs.age)
    for mine, theirs in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_between_epochs(data, tmp_path):
    whole = training(data)
    expected = losses(*whole, EPOCHS)
    parts = training(data)
    found = losses(*parts, 1)
    future = gas.save(tmp_path, *parts, background=True)
    assert isinstance(future, Future)
    found += losses(*parts, 2)  # Beside the writing.
    assert found == expected
    assert future.result() == tmp_path / "checkpoint_000001"
    again = training(data)
    gas.load(tmp_path, *again)
    assert losses(*again, 2) == expected[3:]


def test_any_model_of_pyg_and_back(data, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file

    def net():
        return GraphSAGE(8, 16, num_layers=3, out_channels=4)

    model = gas.to_scalable(net(), data)
    path = gas.save(tmp_path, model)
    plain = net()
    plain.load_state_dict(load_file(path / "model.safetensors"))  # As anybody does.
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = net()
    gas.load(tmp_path, other)
    assert torch.equal(next(other.parameters()), next(model.parameters()))

    back = net()
    path = gas.save(tmp_path / "plain", back)
    gas.load(path, model, histories=False)
    assert torch.equal(next(back.parameters()), next(model.parameters()))
    with pytest.raises(ValueError, match="has 2 histories, but .* has 0"):
        gas.load(path, model)


def test_only_rows_that_changed_are_written_again(data, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    model, optimizer, loader = training(data)
    losses(model, optimizer, loader, 1)
    first = gas.save(tmp_path, model)
    whole = first / "history_0.safetensors"
    model.histories[0].push(torch.ones(3, 16), torch.tensor([5, 7, 250]))
    second = gas.save(tmp_path, model)
    assert (second / "history_0.safetensors").samefile(whole)
    assert len(load_file(second / "history_0_changes.safetensors")["index"]) == 3
    assert (
        not (second / "history_1_changes.safetensors").exists()
        or len(load_file(second / "history_1_changes.safetensors")["index"]) == 0
    )
    shutil.rmtree(first)  # The file stays where it is shared.
    again, *_ = training(data)
    gas.load(tmp_path, again)
    for mine, theirs in zip(model.histories, again.histories, strict=True):
        assert torch.equal(mine.emb, theirs.emb)
        assert torch.equal(mine.age, theirs.age)

    model.histories[0].emb[9] = 4.0  # Which no push tells.
    third = gas.save(tmp_path, model)
    assert not (third / "history_0_changes.safetensors").exists()
    gas.load(tmp_path, again)
    assert torch.equal(again.histories[0].emb, model.histories[0].emb)
    again.histories[0].push(torch.zeros(1, 16), torch.tensor([1]))
    fourth = gas.save(tmp_path, again)  # What was loaded is known, too.
    assert (fourth / "history_0.safetensors").samefile(third / "history_0.safetensors")
    losses(again, *training(data)[1:], 1)
    fifth = gas.save(tmp_path, again)
    assert not (fifth / "history_0_changes.safetensors").exists()


def test_rows_that_changed_belong_to_the_file_that_was_read(data, tmp_path):
    """After an older checkpoint than the newest, and in another folder."""
    model, *_ = training(data)
    paths = []
    for number in (1.0, 2.0, 3.0):
        model.histories[0].push(torch.full((300, 16), number))
        paths.append(gas.save(tmp_path / "run", model))
    gas.load(paths[0], model)
    model.histories[0].push(torch.full((2, 16), 7.0), torch.tensor([0, 1]))
    expected = model.histories[0].emb.clone()
    for folder in (tmp_path / "run", tmp_path / "other"):
        path = gas.save(folder, model)
        again, *_ = training(data)
        gas.load(path, again)
        assert torch.equal(again.histories[0].emb, expected)
    again = training(data)[0]
    gas.load(tmp_path / "run", again)
    assert torch.equal(again.histories[0].emb, expected)


class Mine(gas.history.Store):
    """A store of a user's own, without a table."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = torch.zeros(self.num_rows, self.columns, dtype=self.dtype)

    def read(self, index, out):
        out.copy_(self.rows[index])

    def write(self, index, rows):
        self.rows[index] = rows


@pytest.mark.parametrize("store", [None, "disk", Mine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8"])
def test_what_no_push_tells_is_written_whole(data, tmp_path, store, dtype):
    model, *_ = training(data, store=store, dtype=dtype)
    history = model.histories[0]
    history.push(torch.ones(300, 16))
    gas.save(tmp_path, model)
    history.reset_parameters()
    gas.save(tmp_path, model)
    again, *_ = training(data, store=store, dtype=dtype)
    gas.load(tmp_path, again)
    assert not again.histories[0].emb.any()
    assert not again.histories[0].written.any()
    history.push(torch.full((1, 16), 2.0), torch.tensor([4]))
    path = gas.save(tmp_path, model)
    gas.load(path, again)
    assert torch.equal(again.histories[0].emb, history.emb)
    gas.load(tmp_path / "checkpoint_000001", model)
    history.push(torch.full((1, 16), 3.0), torch.tensor([5]))
    gas.load(gas.save(tmp_path, model), again)
    assert torch.equal(again.histories[0].emb, history.emb)


def test_background_copies_what_it_writes(data, tmp_path):
    model, *_ = training(data)
    model.histories[0].push(torch.ones(300, 16))
    gas.save(tmp_path / "other", model)  # Whose files this folder lacks.
    future = gas.save(tmp_path, model, background=True, rows=torch.zeros(3))
    model.histories[0].push(torch.full((300, 16), 2.0))
    with torch.no_grad():
        next(model.parameters()).zero_()
    again, *_ = training(data)
    state = gas.load(tmp_path, again)  # Waits for it.
    assert future.done()
    assert torch.equal(again.histories[0].emb, torch.ones(300, 16))
    assert bool(next(again.parameters()).any())
    assert torch.equal(state["rows"], torch.zeros(3))


IN_A_THREAD = """
import sys, threading, time
import torch
import gas

def train():
    threading.main_thread().join()
    time.sleep(0.2)  # The interpreter has called what executors of threads have it call at exit.
    future = gas.save(sys.argv[1], torch.nn.Linear(2, 2), background=True)
    print(future.cancel(), future.result().name, flush=True)

threading.Thread(target=train).start()
"""


def test_background_in_a_thread_that_outlives_the_main_thread(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(IN_A_THREAD)
    done = run_forked(script, tmp_path / "checkpoints", cwd=tmp_path)
    assert (done.code, done.out) == (0, "False checkpoint_000001\n"), done.err


def test_what_is_kept(data, tmp_path):
    model, *_ = training(data)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "checkpoint_notes").mkdir()
    (tmp_path / "checkpoint_000009").write_text("a file of the user's")
    for number in range(5):
        path = gas.save(tmp_path, model, keep=2, number=number)
        (path / "note.txt").write_text("mine")
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint_000004", "checkpoint_000005"]
    left = {p.name for p in tmp_path.iterdir()}
    notes = {f"checkpoint_{n:06}" for n in (1, 2, 3)}
    assert left >= {"mine.txt", "checkpoint_notes", "checkpoint_000009", *notes}
    assert [p.name for p in (tmp_path / "checkpoint_000001").iterdir()] == ["note.txt"]
    assert gas.load(tmp_path, model)["number"] == 4
    assert gas.load(tmp_path / "checkpoint_000004")["number"] == 3


def test_values_come_back_as_they_were(tmp_path):
    model = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 2)
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    values = {
        "nested": {"a": [1, 2.5, None, True, "text"], 3: (4, torch.arange(3)), "3": torch.zeros(2)},
        "special": [float("inf"), -float("inf"), 0.1, 2**70],
        "array": np.arange(4.0),
        "dollar": {"$tensor": "no"},
        "bits": torch.tensor([True, False]),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4.0),
    }
    gas.save(tmp_path, model, scheduler=scheduler, generator=generator, **values)
    other = torch.Generator()
    again = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 7)
    found = gas.load(tmp_path, model, scheduler=again, generator=other)
    assert torch.equal(torch.rand(3, generator=other), torch.rand(3, generator=generator))
    assert again.step_size == 2
    assert found["special"] == values["special"]
    assert found["dollar"] == values["dollar"]
    assert found["nested"]["a"] == values["nested"]["a"]
    assert found["nested"][3][0] == 4
    assert torch.equal(found["nested"][3][1], torch.arange(3))
    assert torch.equal(found["nested"]["3"], torch.zeros(2))
    assert isinstance(found["array"], np.ndarray)
    for key in ("bits", "half", "empty", "scalar"):
        assert torch.equal(found[key], values[key])
        assert found[key].dtype == values[key].dtype
    assert gas.checkpoint.peek(tmp_path / "checkpoint_000001", "dollar") == {
        "dollar": found["dollar"]
    }
    of_tensor = gas.checkpoint.peek(tmp_path / "checkpoint_000001", "half", "dollar")
    assert torch.equal(of_tensor["half"], values["half"])
    assert "scheduler" in gas.load(tmp_path, model)  # As it was saved, without an object for it.
    assert "scheduler" in gas.load(tmp_path, model, scheduler=None)
    with pytest.raises(ValueError, match=r"'scheduler' is a int, which has no state_dict\(\)"):
        gas.load(tmp_path, model, scheduler=7)


def test_tensors_are_read_in_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK", 16)  # Bytes: two rows.
    rows, path = torch.arange(10.0).view(5, 2), tmp_path / "rows"
    with path.open("wb") as stream:
        tensors.write_tensors(stream, {"rows": rows}, {})
    blocks = {first: block.tolist() for first, block in tensors.TensorFile(path).blocks("rows")}
    assert blocks == {0: rows[:2].tolist(), 2: rows[2:4].tolist(), 4: rows[4:].tolist()}


def test_other_passes_over_a_loader_are_no_business_of_its_epoch(data, tmp_path):
    """Inference on a loader whose epoch is to go on has all batches, and leaves the rest."""
    whole = training(data)
    expected = losses(*whole, 2)
    parts = training(data)

    before = losses(*parts, 1, 2, lambda: gas.save(tmp_path, *parts))
    again = training(data)
    gas.load(tmp_path, *again)
    with torch.no_grad():
        out = again[0].eval()(loader=again[2])
        torch.testing.assert_close(out, parts[0].eval()(loader=parts[2]))
    gas.load(tmp_path, *again)
    assert before + losses(*again, 2) == expected

    rest = [list(batch.n_id[: batch.batch_size]) for batch in training(data)[2]]
    loader = training(data)[2]
    for number, _ in enumerate(loader):
        assert len(list(loader)) == len(rest)  # An epoch within one.
        assert loader.state_dict()["order"]["done"] == number + 1
    assert loader.state_dict()["order"] == {"epoch": None, "done": 0}


def test_a_generator_of_its_own(data, tmp_path):
    def parts():
        model, optimizer, loader = training(data)
        generator = torch.Generator().manual_seed(3)
        loader = gas.SubgraphLoader(
            loader.data, batch_size=2, shuffle=True, generator=generator, log=False
        )
        return model, optimizer, loader

    expected = losses(*parts(), 3)
    first = parts()
    before = losses(*first, 3, 4, lambda: gas.save(tmp_path, *first))
    again = parts()
    gas.load(tmp_path, *again)
    assert before + losses(*again, 2) == expected
    with pytest.raises(ValueError, match="has no generator, other than"):
        gas.load(tmp_path, None, None, training(data)[2])


def test_a_compiled_model_is_the_model(data, tmp_path):
    model, *_ = training(data)
    model.histories[0].push(torch.ones(300, 16))
    gas.save(tmp_path, torch.compile(model))
    for wrap in (torch.compile, lambda model: model):
        again, *_ = training(data)
        torch.nn.init.zeros_(next(again.parameters()))
        gas.load(tmp_path, wrap(again))
        assert torch.equal(next(again.parameters()), next(model.parameters()))
        assert torch.equal(again.histories[0].emb, torch.ones(300, 16))


def test_folders_that_others_call_alike_stay(tmp_path):
    model = torch.nn.Linear(2, 2)
    for name, files in (
        ("checkpoint_000000", ["model.safetensors"]),
        ("checkpoint_000001", ["model.safetensors", "manifest.json"]),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("mine")
    for _ in range(3):
        gas.save(tmp_path, model, keep=1)
    assert (tmp_path / "checkpoint_000000" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "checkpoint_000001" / "manifest.json").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint_000000", "checkpoint_000001", "checkpoint_000004",
    }  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
def test_other_optimizers_and_schedulers(tmp_path, make):
    def parts():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters())
        schedulers = [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
        ]
        return (
            model, optimizer,
            torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2]),
        )  # fmt: skip

    def steps(model, optimizer, scheduler, number):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            return loss

        found = []
        for _ in range(number):
            found.append(float(optimizer.step(closure)))
            scheduler.step()
        return found

    expected = steps(*parts(), 8)
    model, optimizer, scheduler = parts()
    before = steps(model, optimizer, scheduler, 3)
    gas.save(tmp_path, model, optimizer, scheduler=scheduler)
    model, optimizer, scheduler = parts()
    gas.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert before + steps(model, optimizer, scheduler, 5) == expected


def test_nothing_changes_where_something_does_not_fit(data, tmp_path):
    model, optimizer, loader = training(data)
    losses(model, optimizer, loader, 1)
    gas.save(tmp_path, model, optimizer, loader)
    wider = gas.models.GraphSAGE(300, 8, 16, 4, num_layers=3, dtype=torch.bfloat16)
    other = planted_partition(300, avg_degree=6, num_classes=4, num_features=8, seed=2)
    elsewhere = training(other)[2]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def snapshot():
        return [p.detach().clone() for p in wider.parameters()], torch.get_rng_state()

    before = snapshot()
    for given, text in (
        ((wider,), "codec bfloat16"),
        ((model, sgd), "'optimizer' has groups"),
        ((model, optimizer, elsewhere), "another graph"),
    ):
        with pytest.raises(ValueError, match=text):
            gas.load(tmp_path, *given)
    after = snapshot()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1])


# Experiments --------------------------------------------------------------------------------------


class KilledError(Exception):
    """As if the process had been killed."""


class KilledAfter(Checkpoints):
    """Checkpoints of a process that is killed after some steps."""

    def __init__(self, steps, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.left = steps

    def after_step(self):
        super().after_step()
        self.left -= 1
        if not self.left:
            raise KilledError


def experiment(max_steps=None, average_weights=True, **options):
    data, _, classes = gas.get_data("data", "planted:400")
    settings = Settings.default("gcn").replace(
        num_layers=3, hidden_channels=16, num_parts=8, batch_size=2, epochs=4, max_steps=max_steps,
        average_weights=average_weights,
    )  # fmt: skip
    return Experiment(data, classes, "gcn", settings, log=False, **options)


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 1),
        ({}, 3),
        ({}, "0.0001s"),
        ({"refresh": "none", "evaluation": "layerwise"}, 3),
        ({"full_batch": True}, 1),
        ({"patience": 1}, "0.0001s"),
        ({"max_steps": 3}, 1),
        ({"average_weights": False}, 3),
        ({"refresh": "full"}, 3),
        ({"micro_batches": 2}, 3),
        ({"prefetch": True}, 3),
        ({"augment": DropEdge}, "0.0001s"),
    ],
    ids=str,
)
def test_an_experiment_goes_on(tmp_path, options, every):
    made = experiment(**options)
    expected = made.run(3, keep=True)
    run = Run()
    kills = 0
    for steps in (3, 7, 1, 5, 100):
        run = Run()
        points = KilledAfter(steps, tmp_path, every, resume=True)
        try:
            made.run(3, keep=True, run=run, checkpoints=points)
        except KilledError:
            kills += 1
        else:
            break
    assert kills > 0
    for name in ("loss", "train_acc", "val_acc", "test_acc", "age"):
        assert getattr(run, name) == getattr(expected, name), name
    assert run.best.epoch == expected.best.epoch
    assert torch.equal(run.best.out, expected.best.out)
    for key, value in expected.best.state.items():
        assert torch.equal(run.best.state[key], value)
    assert len(checkpoints(tmp_path)) == 1
    again = made.run(3, run=Run(), checkpoints=Checkpoints(tmp_path, resume=True))  # It has ended.
    assert again.loss == expected.loss


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_a_checkpoint(tmp_path, number):
    made = experiment()
    expected = made.run(3)
    heard = []

    class Signalled(Checkpoints):
        def after_step(self):
            heard.append(self._progress.steps)
            if len(heard) == 6:
                os.kill(os.getpid(), number)
            super().after_step()

    error = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(error):
        made.run(3, checkpoints=Signalled(tmp_path, every=100))
    assert len(heard) == 6
    assert len(checkpoints(tmp_path)) == 1
    run = Run()
    made.run(3, run=run, checkpoints=Checkpoints(tmp_path, resume=True))
    assert run.loss == expected.loss


def test_a_run_after_one_that_had_nothing_left(tmp_path):
    """The rest of an epoch isn't the next run's."""
    made = experiment()
    expected = made.run(4).loss
    points = KilledAfter(6, tmp_path, "0.0001s", resume=True)
    with pytest.raises(KilledError):
        made.run(3, checkpoints=points)
    made.settings = made.settings.replace(epochs=1)
    run = Run()
    made.run(3, run=run, checkpoints=Checkpoints(tmp_path, resume=True))
    assert len(run) == 1
    made.settings = made.settings.replace(epochs=4)
    assert made.run(4).loss == expected


@pytest.mark.parametrize("change", [{"scale_loss": True}, {"bank": "per_view"}])
def test_other_options_are_refused(tmp_path, change):
    experiment().run(3, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ValueError, match=f"where '{next(iter(change))}' is None, but now it is"):
        experiment(training=change).run(3, checkpoints=Checkpoints(tmp_path, resume=True))


def test_a_signal_while_the_last_one_is_written(tmp_path):
    class Signalled(Checkpoints):
        def end(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().end()

    with pytest.raises(KeyboardInterrupt):
        experiment().run(3, checkpoints=Signalled(tmp_path))
    assert len(checkpoints(tmp_path)) == 1


def test_another_training_is_refused(tmp_path):
    experiment().run(3, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ValueError, match="pass resume=True"):
        Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="'seed' is 3, but now it is 4"):
        experiment().run(4, checkpoints=Checkpoints(tmp_path, resume=True))


def test_errors_name_the_checkpoint_before(data, tmp_path):
    model, *_ = training(data)
    for number in range(3):
        gas.save(tmp_path, model, number=number)
    last = checkpoints(tmp_path)[-1] / "model.safetensors"
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed since .* load '.*checkpoint_000002'"):
        gas.load(tmp_path, model)
    assert gas.load(checkpoints(tmp_path)[-2], model)["number"] == 1


class Chain(gas.ScalableGNN):
    """As many histories as wanted, and no weights."""

    def __init__(self, num_layers):
        super().__init__(60, 4, num_layers)

    def forward(self, x, adj_t, *args):
        return x


@pytest.mark.parametrize("num_layers", [2, 3, 5, 6])
def test_another_number_of_histories_is_refused(tmp_path, num_layers):
    gas.save(tmp_path, Chain(4))
    with pytest.raises(ValueError, match=f"has {num_layers - 1} histories, but .* has 3, those"):
        gas.load(tmp_path, Chain(num_layers))


@pytest.mark.parametrize("known", ["by the model", "by the loader", "not"])
def test_a_checkpoint_names_the_shard_that_model_or_loader_know(known):
    shard = SimpleNamespace(fingerprint=7)
    exchange = SimpleNamespace(shard=shard) if known == "by the model" else None
    graph = SimpleNamespace(shard=shard, own=None, sum=1) if known == "by the loader" else None
    ranks = SimpleNamespace(group=SimpleNamespace(rank=1, size=2), exchange=exchange)
    found = _describe_rank(ranks, graph, histories=False)
    assert (found["rank"], found["world_size"]) == (1, 2)
    assert found.get("cut", "unknown") == ("unknown" if known == "not" else 7)
