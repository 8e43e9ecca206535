import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data

import gas
from gas.cli import MODELS, Experiment, Settings, command
from gas.cli.command import Signals, Training
from gas.cli.parser import Options
from gas.history.store import MemoryStore
from gas.training import run_epochs


def graph(num_nodes=120):
    data = random_graph(num_nodes=num_nodes, num_edges=4 * num_nodes, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    group = torch.arange(num_nodes) % 4
    data.train_mask, data.val_mask, data.test_mask = group < 2, group == 2, group == 3
    return data


def settings(model="gcn", **changes):
    small = {"hidden_channels": 8, "num_parts": 6, "batch_size": 2, "epochs": 3, "dropout": 0.0}
    return Settings.default(model).replace(**{**small, **changes})


def make(model="gcn", data=None, out_channels=3, changes=None, **options):
    return Experiment(
        graph() if data is None else data,
        out_channels,
        model,
        settings(model, **(changes or {})),
        log=False,
        **options,
    )


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("full_batch", [False, True])
def test_every_model_learns(model, full_batch):
    experiment = make(model, full_batch=full_batch, changes={"epochs": 40, "lr": 0.02})
    run = experiment.run(0)
    assert run.loss[-1] < 0.9 * run.loss[0]
    assert len(run.test_acc) == 40
    assert (run.moved_bytes[-1] > 0) != full_batch
    assert (run.history_bytes > 0) != full_batch
    again = experiment.run(0)
    assert again.loss == run.loss
    assert again.test_acc == run.test_acc


@pytest.mark.parametrize(("given", "batch_norm", "expected"), [
    (None, False, 40), (None, True, 0), (7, True, 7), (0, False, 0),
])  # fmt: skip
def test_warm_up_is_chosen_by_the_model(given, batch_norm, expected):
    experiment = make(changes={"warm_up": given, "batch_norm": batch_norm, "epochs": 1})
    experiment.run(0)
    assert experiment.settings.warm_up == expected


@pytest.mark.parametrize("model", ["gcn", "gat", "appnp"])
@pytest.mark.parametrize("key", ["edge_type", "time"])
def test_attributes_of_edges_have_no_effect(model, key):
    """These models add self-loops, of which they have no rows."""
    plain = graph()
    data = plain.clone()
    data[key] = torch.arange(data.num_edges)
    options = {"changes": {"epochs": 1}, "keep_edges": False}
    assert make(model, data, **options).run(0).loss == make(model, plain, **options).run(0).loss


def test_r2_does_not_train_on_unknown_classes():
    data = graph()
    data.y[0] = -1
    data.train_mask[0] = True
    with pytest.raises(ValueError, match="'train_mask' holds 1 nodes with a target that is unkno"):
        make(data=data, changes={"metric": "r2"})


@pytest.mark.parametrize("times", [0.5, 2])
def test_masks_of_another_graph(times):
    data = graph()
    data.y[0], rows = -1, int(times * data.num_nodes)
    data.train_mask = torch.ones(rows, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"'train_mask' has {rows} rows, but the graph has"):
        make(data=data)


@pytest.mark.parametrize("refresh", ["none", "full", "layerwise"])
@pytest.mark.parametrize("evaluation", ["full", "layerwise"])
def test_refreshing(evaluation, refresh):
    """Histories are exact after each epoch, or older; evaluation is the same either way."""
    changes = {"lr": 0.5, "epochs": 1}
    experiment = make(evaluation=evaluation, refresh=refresh, changes=changes, keep_edges=True)
    seen = []
    original = experiment._evaluate

    def evaluate(model, apart):
        before = [history.emb.clone() for history in model.histories]
        out = original(model, apart)
        exact = gas.training.FullBatch(experiment.data)
        twin = model.for_graph(model.num_nodes)
        expected = exact(twin.eval(), fill=True)
        assert torch.allclose(out, expected, atol=1e-4)
        for history, old, true in zip(model.histories, before, twin.histories, strict=True):
            seen.append(torch.allclose(history.emb, true.emb, atol=1e-4))
            assert not torch.allclose(old, true.emb, atol=1e-4)
            assert torch.equal(history.emb, old) == (refresh == "none")
        return out

    experiment._evaluate = evaluate
    experiment.run(0)
    assert seen == [refresh != "none"]


@pytest.mark.slow(fast=2)
@pytest.mark.parametrize("evaluation", ["full", "layerwise"])
@pytest.mark.parametrize("refresh", ["none", "full", "layerwise"])
def test_inductive(evaluation, refresh):
    """Only the training nodes and the edges between them are trained on."""
    data = graph()
    options = {"inductive": True, "evaluation": evaluation, "refresh": refresh}
    experiment = make(data=data, keep_edges=True, **options)
    trained = experiment.graph.data
    assert trained.num_nodes == int(data.train_mask.sum())
    assert bool(trained.train_mask.all())
    inside = data.train_mask[data.edge_index].all(dim=0)
    assert experiment.eval_graph.data.num_nodes == 120
    assert trained.edge_index.size(1) >= int(inside.sum())  # And self-loops of the normalisation.
    model = experiment.make_model()
    assert model.num_nodes == trained.num_nodes
    run = experiment.run(0)
    data.y[~data.train_mask] = 0  # What isn't trained on, its labels and features, changes nothing.
    data.x[~data.train_mask] += 1
    other = make(data=data, **options).run(0)
    assert other.loss == run.loss
    assert other.test_acc != run.test_acc


def test_inductive_needs_one_split():
    data = graph()
    data.train_mask = data.train_mask[:, None].expand(-1, 3).contiguous()
    with pytest.raises(ValueError, match="'inductive' is True, but the graph has 3 splits"):
        make(data=data, inductive=True)


def test_several_graphs_are_their_union():
    """As in PPI: no edge joins two graphs, so a union trains on each of them."""
    one, two = graph(60), graph(60)
    union = Data(
        x=torch.cat([one.x, two.x]),
        y=torch.cat([one.y, two.y]),
        edge_index=torch.cat([one.edge_index, two.edge_index + 60], dim=1),
    )
    union.train_mask = torch.arange(120) < 60
    union.val_mask = union.test_mask = ~union.train_mask
    trained = make(data=union, inductive=True).graph.data
    assert trained.num_nodes == 60
    assert torch.equal(trained.x.sort(dim=0).values, one.x.sort(dim=0).values)


def test_multiple_labels_and_regression():
    data = graph()
    data.y = (data.x[:, :4] > 0).long()
    experiment = make(data=data, out_channels=4, changes={"epochs": 30})
    assert experiment.metric == "micro_f1"
    run = experiment.run(0)
    assert run.loss[-1] < run.loss[0]
    data.y = data.x[:, 0] * 3 - 1
    experiment = make("sage", data, out_channels=1, changes={"epochs": 60, "lr": 0.02})
    assert experiment.metric == "r2"
    run = experiment.run(0)
    assert run.loss[-1] < 0.3 * run.loss[0]
    assert run.val_acc[run.best_epoch] > 0.5
    data.y = (data.x[:, 0] > 0).long()
    experiment = make("sage", data, out_channels=2, changes={"metric": "roc_auc", "epochs": 30})
    assert experiment.run(0).val_acc[-1] > 0.8


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("model", ["gin", "sage", "gat", "pna"])
def test_models_without_weights_ignore_those_of_the_graph(model):
    plain, weighted = graph(), graph()
    weighted.x, weighted.y, weighted.edge_index = plain.x, plain.y, plain.edge_index
    weighted.edge_weight = torch.rand(plain.edge_index.size(1))
    changes = {"correct_drift": False}  # It would amplify the rounding of another order of sums.
    runs = [make(model, data, changes=changes).run(0) for data in (plain, weighted)]
    runs.append(make(model, weighted, layout="edge_index", changes=changes).run(0))
    for run in runs[1:]:
        assert run.loss == pytest.approx(runs[0].loss, rel=1e-3)


def test_stale_rows_are_corrected_unless_the_settings_say_otherwise():
    data = graph()
    corrected, plain = (
        make("sage", data, changes=changes).run(0)
        for changes in ({"epochs": 2}, {"epochs": 2, "correct_drift": False})
    )
    assert all(0 < drift < 10 for drift in corrected.drift)
    assert all(math.isnan(drift) for drift in plain.drift)
    assert corrected.loss != plain.loss


def test_averaged_weights_are_scored_and_kept():
    data = graph()
    averaged, plain = (
        make("sage", data, changes={"epochs": 2, "average_weights": on}).run(0, keep=True)
        for on in (True, False)
    )
    assert averaged.loss[0] == plain.loss[0]  # The first epoch is trained alike.
    weights = [run.best.state["convs.0.lin_l.weight"] for run in (averaged, plain)]
    assert not torch.equal(*weights)


def test_targets_that_are_neither():
    data = graph()
    data.y = torch.rand(120, 3)
    with pytest.raises(ValueError, match=r"'data.y' has shape \[120, 3\] and holds .*, expected 0"):
        make(data=data)
    data.y = torch.arange(120)
    experiment = make(data=data, out_channels=120, changes={"metric": "r2"})
    assert experiment.make_model().out_channels == 1
    assert experiment.run(0).loss[0] > 1000  # Squares of numbers up to 119.


def test_early_stopping():
    scores = iter([0.1, 0.3, 0.2, 0.2, 0.4, 0.4, 0.3, 0.2, 0.9])
    experiment = make()
    model = experiment.make_model()
    data = Data(y=torch.zeros(10, dtype=torch.long))
    data.train_mask = data.val_mask = data.test_mask = torch.ones(10, dtype=torch.bool)

    def evaluate(model):
        right = round(10 * next(scores))
        return torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (10 - right))

    run = run_epochs(model, data, lambda: 1.0, evaluate, 100, patience=3)
    assert run.best_epoch == 4
    assert len(run.loss) == 8
    with pytest.raises(ValueError, match="'patience' is 0, expected at least 1 epoch"):
        run_epochs(model, data, lambda: 1.0, evaluate, 1, patience=0)


def test_batches_of_training_are_drawn_anew_and_those_of_evaluation_are_in_order():
    found = make(evaluation="layerwise").graph
    for loader, is_drawn in ((found.loader, True), (found.inference, False)):
        first = {tuple(next(iter(loader)).n_id.tolist()) for _ in range(8)}
        assert (len(first) > 1) == is_drawn


def test_a_memory_budget_makes_micro_batches():
    experiment = make(memory_budget=1 << 30)
    _, micro = experiment._make_batches(experiment.make_model())
    assert micro == 1
    model = experiment.make_model()
    loader = experiment.graph.loader
    largest = loader.edges_per_part().argmax().item()
    experiment.memory_budget = gas.training.activation_bytes(model, loader.cut([largest]))
    batches, micro = experiment._make_batches(model)
    assert (batches.batch_size, micro) == (1, 2)
    assert len(experiment.run(0).loss) == 3
    experiment.memory_budget = 100
    with pytest.raises(MemoryError, match="one part needs"):
        experiment.run(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mlp"}, "'model' is 'mlp', expected one of appnp, "),
        ({"evaluation": "batch"}, "'evaluation' is 'batch', expected one of full, layerwise"),
        ({"refresh": "often"}, "'refresh' is 'often', expected one of none, full, layerwise"),
        ({"full_batch": True, "refresh": "full"}, "'full_batch' is True, which has no histories"),
    ],
)
def test_wrong_options(options, message):
    model = options.pop("model", "gcn")
    with pytest.raises(ValueError, match=message):
        Experiment(graph(), 3, model, settings(), log=False, **options)


CHAIN = dict(
    mu_e=0.1, mu_v=0.1, sigma_delta_e=0.1, sigma_delta_v=0.1, a_e=1, b_e=1, a_v=1, b_v=1, lam1=1,
    lam2=0.99, lam3=1, lam4=0.99, num_steps=5, reference_size=10,
)  # fmt: skip


@pytest.mark.slow
def test_augmentation_takes_entropies_from_evaluations(monkeypatch):
    made, seen = [], []
    update = gas.MHAug.update_entropy
    monkeypatch.setattr(
        gas.MHAug, "update_entropy", lambda self, out: seen.append(out) or update(self, out)
    )

    def augment(data):
        made.append(gas.MHAug(data, **CHAIN))
        return made[-1]

    mild = functools.partial(gas.augment.mh_aug_loss, h=0.05)
    changes = {"epochs": 30, "lr": 0.02}
    experiment = make(augment=augment, changes=changes, training={"view_loss": mild})
    run = experiment.run(0)
    assert len(seen) == 30
    assert run.chain["steps"] == 150
    assert 0 < run.chain["acceptance_rate"] <= 1
    # Not the loss: the chain starts at the graph itself, and drops more and more.
    assert run.train_acc[-1] > run.train_acc[0] + 0.15
    again = experiment.run(0)
    assert made[0] is not made[1]
    assert again.loss == run.loss
    assert gas.cli.report.metrics([run, again])["chain"]["steps"]["mean"] == 150


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("evaluation", ["full", "layerwise"])
@pytest.mark.parametrize("pack", [0, "0", "1kB", "auto"])
def test_packed(pack, evaluation):
    data = graph()
    data.x = gas.quantize(data.x, "float32", store="disk")
    plain = make(data=data, store="disk", evaluation=evaluation).run(0)
    experiment = make(data=data, store="disk", pack=pack, evaluation=evaluation)
    for _ in range(2):
        packed = experiment.run(0)
        assert packed.loss == plain.loss
        assert packed.val_acc == plain.val_acc
    assert experiment.graph.loader.get_mapped_features().packed.rows_read


def test_packing_what_was_found_to_fit_memory():
    data = graph()
    run = make(data=data, store="auto", pack="auto").run(0)
    assert run.loss == make(data=data).run(0).loss
    with pytest.raises(ValueError, match="only rows of a DiskStore are packed"):
        make(data=data, store="host", pack="auto").run(0)


def test_a_plan_chooses_the_store_of_histories_unless_it_is_a_function(tmp_path):
    found = make(memory="8GB", path=tmp_path)  # Which a plan may use.
    assert found.histories == {"dtype": found.plan.dtype, "store": "host"}

    def store(num_rows, num_columns, dtype):
        return MemoryStore(num_rows, num_columns, dtype)

    assert make(memory="8GB", store=store).histories["store"] is store


def test_augmentation_within_a_memory_budget():
    experiment = make(augment=gas.augment.DropEdge, memory_budget=1 << 30)
    assert len(experiment.run(0).loss) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"full_batch": True},
            "'full_batch' has no mini-batches: use num_parts=1, which computes the same",
        ),
        ({"inductive": True}, "'inductive' evaluates another graph"),
        (
            {"changes": {"edge_dropout": 0.5}},
            "'edge_dropout' is 0.5 and views lack edges already: leave one out",
        ),
    ],
)
def test_what_augmentation_excludes(options, message):
    with pytest.raises(ValueError, match=f"'augment' is given, but {message}"):
        make(augment=gas.augment.DropEdge, **options)


@pytest.mark.parametrize(
    ("evaluation", "refresh", "inductive"),
    [
        ("full", "full", False),
        ("layerwise", "layerwise", False),
        ("full", "layerwise", True),
        ("full", "none", False),
        ("layerwise", "none", False),
        ("layerwise", "none", True),
    ],
)
def test_running_statistics_are_those_of_the_graph_that_is_trained_on(
    evaluation, refresh, inductive
):
    changes = {"batch_norm": True, "epochs": 2, "dropout": 0.5, "num_layers": 3}
    experiment = make(
        "sage", evaluation=evaluation, refresh=refresh, inductive=inductive, changes=changes
    )
    original, seen = experiment._evaluate, []

    def evaluate(model, apart):
        before = [history.emb.clone() for history in model.histories]
        out = original(model, apart)
        assert not any(module.training for module in model.modules())
        for history, old in zip(model.histories, before, strict=True):
            assert torch.equal(history.emb, old) == (refresh == "none")
        seen.append([buffer.clone() for buffer in model.bns.buffers()])
        exact = gas.training.FullBatch(experiment.graph.data)
        for norm in model.bns:
            norm.momentum = 1.0
            norm.train()
        exact(model)
        for mine, true in zip(seen[-1], model.bns.buffers(), strict=True):
            if mine.is_floating_point():
                torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)
        return out

    experiment._evaluate = evaluate
    run = experiment.run(0, keep=True)
    best = [value for key, value in run.best.state.items() if "running" in key]
    kept = [value for value in seen[run.best_epoch] if value.is_floating_point()]
    assert all(torch.allclose(mine, true, rtol=1e-4) for mine, true in zip(best, kept, strict=True))


@pytest.mark.parametrize("kind", ["real", "labels"])
def test_targets_may_be_unknown_outside_the_masks(kind):
    data = random_graph(directed=False)
    y = torch.randn(60) if kind == "real" else torch.randint(2, (60, 3)).float()
    data.y = y
    data.y[~data.train_mask & (torch.arange(60) % 2 == 0)] = torch.nan
    data.val_mask = data.test_mask = ~data.train_mask & (torch.arange(60) % 2 == 1)
    settings = Settings.default("sage").replace(epochs=2, num_parts=4, batch_size=2)
    run = Experiment(data, y[0].numel(), "sage", settings, log=False).run(0)
    assert all(math.isfinite(value) for value in run.loss + run.test_acc + run.train_acc)


def test_running_statistics_of_a_full_batch_are_averages_over_steps():
    """With histories they are those of the graph, here from the same weights."""
    data, changes = graph(), {"batch_norm": True, "lr": 0.0, "epochs": 1}
    of_graph, average = (
        make(data=data, changes=changes, full_batch=full_batch).run(0, keep=True).best.state
        for full_batch in (False, True)
    )
    names = [name for name in average if name.endswith("running_mean")]
    assert names
    for name in names:
        torch.testing.assert_close(average[name], 0.1 * of_graph[name])


def test_running_statistics_need_no_histories_of_their_own(monkeypatch):
    """Without a refresh they are gathered in those that evaluation has, before it."""
    data = random_graph(directed=False)
    data.val_mask = data.test_mask = ~data.train_mask
    settings = Settings.default("sage").replace(
        epochs=3, num_parts=4, batch_size=2, batch_norm=True
    )
    options = {"refresh": "none", "evaluation": "layerwise", "log": False}
    for_graph, made = gas.ScalableGNN.for_graph, []

    def counted(model, num_nodes):
        made.append(num_nodes)
        return for_graph(model, num_nodes)

    monkeypatch.setattr(gas.ScalableGNN, "for_graph", counted)
    run = Experiment(data, 3, "sage", settings, **options).run(0)
    assert made == [60]
    assert len(run) == 3


def test_of_runs_that_diverged_the_first_with_a_finished_epoch_is_kept():
    """Whose weights and scores are written if no run ends."""
    runs = []

    def diverge(seed, number, on_epoch, run, **_):
        run.best = {} if number in (1, 2) else None
        runs.append(run)
        raise FloatingPointError("the loss is NaN")

    args = Options(runs=4)
    experiment = SimpleNamespace(settings=settings(), run=diverge)
    training = Training(args, experiment, Signals())
    (kept,) = training.run()
    assert kept is runs[1]
    assert [failed["run"] for failed in training.failed] == [0, 1, 2, 3]


@pytest.mark.requires("matplotlib")
def test_the_error_of_several_runs_is_that_of_the_first_that_diverged(tmp_path, monkeypatch):
    def diverge(seed, *_, **__):
        raise FloatingPointError(f"the loss is NaN from seed {seed}")

    experiment = SimpleNamespace(settings=settings(), run=diverge)
    monkeypatch.setattr("gas.cli.command.prepare", lambda args: experiment)
    expected = "3 of 3 runs failed, such as that from seed 5: the loss is NaN from seed 5"
    with pytest.raises(FloatingPointError, match=expected):
        command.run(Options(runs=3, seed=5, out=tmp_path), Signals())


@pytest.mark.parametrize(
    ("finished", "told"),
    [(None, "no epoch has ended, so there are no results"), ({}, "reporting the runs that ended")],
)
def test_an_interruption_keeps_a_run_that_diverged_with_a_finished_epoch(capsys, finished, told):
    def interrupt(seed, number, on_epoch, run, **_):
        if number == 1:
            raise KeyboardInterrupt
        run.best = finished
        raise FloatingPointError("the loss is NaN")

    args = Options(runs=3)
    training = Training(args, SimpleNamespace(settings=settings(), run=interrupt), Signals())
    assert len(training.run()) == (0 if finished is None else 1)
    assert f"Interrupted: {told}." in capsys.readouterr().err


def test_each_run_says_whether_it_goes_on_from_a_checkpoint(tmp_path, capsys):
    def diverge(*_, **__):
        raise FloatingPointError("the loss is NaN")

    (tmp_path / "checkpoints/run1").mkdir(parents=True)
    gas.save(tmp_path / "checkpoints/run1", torch.nn.Linear(1, 1))
    args = Options(runs=3, resume=True, out=tmp_path)
    Training(args, SimpleNamespace(settings=settings(), run=diverge), Signals()).run()
    told = re.findall(r"^Run \d (?:starts over|goes on from).*$", capsys.readouterr().err, re.M)
    folder = tmp_path / "checkpoints/run"
    assert told == [
        f"Run 1 starts over: {folder}0 has no checkpoint",
        f"Run 2 goes on from {folder}1",
        f"Run 3 starts over: {folder}2 has no checkpoint",
    ]
