"""``gas.fit``: the loop with refreshing, clipping, evaluation and the best weights."""

import copy
import math
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch_geometric.nn import GraphSAGE

import gas
from gas.loader import PartSampler
from gas.training import FullBatch, Run, train_epoch
from gas.training.record import warn_if_unstable

OPTIONS = [None, "batch_norm"]


def make_graph(norm=None, num_parts=6, dropout=0.5):
    torch.manual_seed(0)
    data = random_graph(num_nodes=120, num_edges=480, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    group = torch.arange(120) % 4
    data.train_mask, data.val_mask, data.test_mask = group < 2, group == 2, group == 3
    net = GraphSAGE(data.num_features, 8, num_layers=3, out_channels=3, dropout=dropout, norm=norm)
    model = gas.to_scalable(net, data)
    return data, model, gas.cluster(data, num_parts, model=model, method="random", log=False)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("norm", OPTIONS)
def test_it_is_the_loop_of_the_readme(norm, is_small, monkeypatch):
    _, model, graph = make_graph(norm)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    monkeypatch.setattr("gas.training.full_batch.MOST_NODES", 1000 * is_small)
    run = gas.fit(
        model, graph, adam(model), 4, batch_size=2, keep_best=False, correct_drift=False,
        average_weights=False, warm_up=0, log=False,
    )  # fmt: skip

    torch.manual_seed(1)
    if is_small:
        FullBatch(graph)  # Its DataLoader draws a random number.
    optimizer, scores = adam(other), []
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    other.train()
    other.refresh(graph, log=False)
    for _ in range(4):
        other.train()
        for batch in loader:
            own = batch.own
            loss = F.cross_entropy(other(batch)[own.train_mask], own.y[own.train_mask])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
        rows, state = [history.emb.clone() for history in other.histories], torch.get_rng_state()
        if norm is not None:  # Else the evaluation is enough.
            other.refresh(graph, log=False)
        scores.append(gas.evaluate(other, graph))
        if is_small:  # Evaluated as one batch, which leaves the histories and the generator.
            torch.set_rng_state(state)
            for history, row in zip(other.histories, rows, strict=True):
                history.emb.copy_(row)
    assert run.val_acc == pytest.approx([each["val"] for each in scores])
    assert run.test_acc == pytest.approx([each["test"] for each in scores])
    for key, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


@pytest.mark.parametrize("norm", OPTIONS)
def test_it_ends_with_the_best_weights(norm):
    data, model, graph = make_graph(norm)
    run = gas.fit(model, graph, adam(model), 6, batch_size=2, log=False)
    assert len(run) == 6
    assert not model.training
    scores = gas.evaluate(model, graph)
    best = run.best_epoch
    assert scores["val"] == pytest.approx(run.val_acc[best])
    assert scores["test"] == pytest.approx(run.test_acc[best])
    torch.testing.assert_close(model.predict(graph, log=False), run.best.out)
    before = [history.emb.clone() for history in model.histories]
    model.refresh(graph, norms=False, log=False)
    for history, rows in zip(model.histories, before, strict=True):
        torch.testing.assert_close(history.emb, rows)  # They are those of the best weights.
    assert set(scores) == {"train", "val", "test"}
    assert data.train_mask.sum() == 60


def test_one_part_is_a_full_batch():
    _, model, graph = make_graph(num_parts=1)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    run = gas.fit(model, graph, adam(model), 3, keep_best=False, log=False)
    torch.manual_seed(1)
    whole, optimizer = FullBatch(graph, layout="fused"), adam(other)
    losses = []
    for _ in range(3):
        losses.append(train_epoch(other, whole, optimizer, 0, 1.0, True))
    assert run.loss == pytest.approx(losses)
    assert run.moved_bytes == [0, 0, 0]


def test_a_loader_of_its_own_and_options():
    _, model, graph = make_graph()
    loader = gas.SubgraphLoader(graph, batch_size=3, shuffle=True, log=False)
    seen = []
    run = gas.fit(
        model, loader, adam(model), 50, patience=2, grad_norm=None, micro_batches=2, log=False,
        on_epoch=lambda run: seen.append(len(run)),
    )  # fmt: skip
    assert seen == list(range(1, len(run) + 1))
    assert len(run) < 50
    assert len(run) - 1 - run.best_epoch == 2


def test_a_run_that_diverges_ends_with_the_best_weights():
    _, model, graph = make_graph()
    optimizer, runs = torch.optim.SGD(model.parameters(), lr=0.01), []

    def diverge(run):
        runs.append(run)
        if len(run) == 2:
            optimizer.param_groups[0]["lr"] = 1e30

    with pytest.raises(FloatingPointError, match="best model before is that of epoch"):
        gas.fit(
            model, graph, optimizer, 9, batch_size=2, grad_norm=None, on_epoch=diverge, log=False
        )
    scores = gas.evaluate(model, graph)
    assert scores["val"] == pytest.approx(max(runs[-1].val_acc))


@pytest.mark.parametrize(
    ("losses", "drift", "warns"),
    [
        ([1.0, 0.5, 0.7, 0.8, 0.9], 0.4, True),
        ([1.0, 0.5, 0.7, 0.8, 0.9], 0.1, False),  # Nothing is stale: something else is wrong.
        ([1.0, 0.5, 0.7, 0.8, 0.9], math.nan, False),  # A full batch.
        ([1.0, 0.02, 0.05, 0.06, 0.05], 0.4, False),  # Near zero it varies that much.
        ([1.0, 0.5, 0.7, 0.6, 0.9], 0.4, False),  # One of three is near the best.
        ([0.5, 0.7, 0.8], 0.4, False),  # Too early to say.
    ],
)
def test_a_loss_that_rises_by_stale_rows_is_told(losses, drift, warns):
    run = Run(loss=losses, drift=[drift] * len(losses), test_acc=[0.0] * len(losses))
    if not warns:
        assert not warn_if_unstable(run)
        return
    text = r"risen from 0.5 in epoch 2 to 0.7 .* move by 40% .* smaller learning rate"
    with pytest.warns(UserWarning, match=text):
        assert warn_if_unstable(run)


def test_nothing_is_told_while_the_score_is_good():
    run = Run(loss=[1.0, 0.5, 0.7, 0.8, 0.9], drift=[0.4] * 5, test_acc=[0.0] * 5)
    run.val_acc = [0.1, 0.9, 0.8, 0.9, 0.8]
    assert not warn_if_unstable(run)
    run.val_acc[-2] = 0.8
    with pytest.warns(UserWarning, match="risen"):
        assert warn_if_unstable(run)


@pytest.mark.parametrize(
    ("losses", "scores", "drift", "warns"),
    [
        ([1.85, 1.86], [0.37, 0.371], 0.4, True),
        ([1.85, 1.86], [0.37, 0.371], 0.1, False),  # It has converged.
        ([1.85, 1.88], [0.37, 0.371], 0.4, False),  # The loss still changes,
        ([1.85, 1.86], [0.37, 0.375], 0.4, False),  # or the score does.
    ],
)
def test_a_loss_that_stays_by_stale_rows_is_told(losses, scores, drift, warns):
    run = Run(loss=[9.0, *5 * losses], val_acc=[0.1, *5 * scores], drift=[drift] * 11)
    run.test_acc = [0.0] * 11
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert warn_if_unstable(run) == warns
    told = [str(each.message).partition(",")[0] for each in caught]
    assert told == warns * ["the loss has stayed at 1.85 for 10 epochs"]
    del run.loss[0], run.val_acc[0], run.drift[0], run.test_acc[0]
    del run.loss[0], run.val_acc[0], run.drift[0], run.test_acc[0]
    assert not warn_if_unstable(run)  # Nine epochs.


def test_epochs_between_evaluations_have_no_scores(monkeypatch):
    evaluations = []
    module = sys.modules["gas.training.fit"]
    evaluate = module._evaluate
    monkeypatch.setattr(module, "_evaluate", lambda *a: evaluations.append(1) or evaluate(*a))
    _, model, graph = make_graph("batch_norm")
    options = {"batch_size": 2, "keep_best": False, "log": False}
    metrics = {"f1": lambda out, y: 0.5}
    run = gas.fit(model, graph, adam(model), 8, evaluate_every=3, metrics=metrics, **options)
    assert len(run) == len(run.loss) == 8
    assert len(evaluations) == 3
    known = [not math.isnan(score) for score in run.val_acc]
    assert known == [False, False, True] * 2 + [False, True]  # And the last.
    assert [not math.isnan(score) for score in run.metrics["val_f1"]] == known
    assert run.best_epoch in (2, 5, 7)
    assert all(map(math.isfinite, run.loss))


@pytest.mark.parametrize("keep_best", [False, True])
def test_norms_belong_to_the_weights_of_an_epoch_that_was_not_evaluated(keep_best):
    class StopEarly(gas.training.Callback):
        def on_epoch_end(self, run):
            return len(run) == 4

    _, model, graph = make_graph("batch_norm")
    gas.fit(
        model, graph, adam(model), 20, batch_size=2, evaluate_every=10, keep_best=keep_best,
        callbacks=[StopEarly()], log=False,
    )  # fmt: skip
    before = model.predict(graph)
    model.train().refresh(graph, log=False)
    torch.testing.assert_close(model.eval().predict(graph), before, rtol=1e-4, atol=1e-5)


def test_the_best_weights_are_of_an_evaluated_epoch():
    _data, model, graph = make_graph()
    optimizer = adam(model)
    run = gas.fit(model, graph, optimizer, 9, batch_size=2, evaluate_every=4, log=False)
    assert run.best.epoch == run.best_epoch in (3, 7, 8)
    assert gas.evaluate(model, graph)["val"] == pytest.approx(run.val_acc[run.best_epoch])


def test_patience_waits_for_an_evaluation():
    run = Run(val_acc=[math.nan, 0.9, math.nan, 0.8, math.nan], test_acc=[0.0] * 5)
    assert run.best_epoch == 1
    assert not run.has_stalled(3)
    run.val_acc.append(0.8)
    run.test_acc.append(0.0)
    assert run.has_stalled(4)
    assert not run.has_stalled(5)


def test_a_plateau_counts_evaluations():
    _, model, graph = make_graph()
    optimizer = adam(model)
    seen = []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    plateau.step = seen.append
    gas.fit(
        model, graph, optimizer, 5, batch_size=2, evaluate_every=2, scheduler=plateau, log=False
    )
    assert len(seen) == 3
    assert all(map(math.isfinite, seen))


def test_it_is_told_once(monkeypatch):
    told = []
    module = sys.modules["gas.training.epochs"]
    monkeypatch.setattr(module, "warn_if_unstable", lambda run: told.append(len(run)) or True)
    _, model, graph = make_graph()
    gas.fit(model, graph, adam(model), 3, batch_size=2, log=False)
    assert told == [1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_masks_of_numbers_are_masks(dtype):
    losses = []
    for convert in (lambda mask: mask, lambda mask: mask.to(dtype)):
        _, model, graph = make_graph()
        for name in ("train_mask", "val_mask", "test_mask"):
            graph[name] = convert(graph[name])
        torch.manual_seed(1)
        run = gas.fit(model, graph, adam(model), 2, batch_size=2, log=False)
        losses.append((run.loss, run.val_acc))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "option", [{"grad_norm": -1.0}, {"grad_norm": math.nan}, {"max_steps": 0}, {"loss": "mse"}]
)
def test_unusable_options_change_nothing(option):
    _, model, graph = make_graph()
    with pytest.raises(ValueError, match=min(option)):
        gas.fit(model, graph, adam(model), 1, log=False, **option)
    assert all(not history.written.any() for history in model.histories)


def test_a_graph_that_cannot_be_trained_on_stays_as_it_is():
    _, model, graph = make_graph()
    del graph.val_mask
    for options in ({}, {"keep_best": False, "patience": 3}):
        with pytest.raises(ValueError, match="'graph' has no 'val_mask'"):
            gas.fit(model, graph, adam(model), 1, batch_size=2, log=False, **options)
    assert "batch_size" not in graph


def test_masks_that_nothing_depends_on_may_be_missing():
    _, model, graph = make_graph()
    del graph.test_mask
    run = gas.fit(model, graph, adam(model), 2, batch_size=2, log=False)
    assert all(map(math.isnan, run.test_acc))
    assert not any(map(math.isnan, run.val_acc))
    del graph.val_mask
    run = gas.fit(model, graph, adam(model), 2, batch_size=2, keep_best=False, log=False)
    assert all(map(math.isnan, run.val_acc))
    assert not any(map(math.isnan, run.train_acc))


@pytest.mark.parametrize("metric", ["accuracy", "r2", "roc_auc"])
def test_scores_of_nodes_without_a_known_target_are_nan(metric):
    data, model, graph = make_graph()
    net = GraphSAGE(
        data.num_features, 8, num_layers=3, out_channels=3 if metric == "accuracy" else 1
    )
    model = gas.to_scalable(net, data)
    graph.y = {"accuracy": graph.y, "r2": graph.y.float(), "roc_auc": (graph.y > 0).float()}[metric]
    graph.y[graph.test_mask] = -1 if metric == "accuracy" else math.nan
    run = gas.fit(model, graph, adam(model), 1, metric=metric, batch_size=2, log=False)
    assert all(map(math.isnan, run.test_acc))
    assert not any(map(math.isnan, run.val_acc))
    assert math.isnan(gas.evaluate(model, graph, metric)["test"])


def test_a_loss_of_ones_own_may_leave_targets_out():
    data, _, graph = make_graph()
    model = gas.to_scalable(GraphSAGE(data.num_features, 8, num_layers=2, out_channels=2), data)
    graph.y = torch.stack([graph.y == 0, graph.y == 1], dim=1).float()
    graph.y[::3, 0] = math.nan

    def masked(out, y):
        known = ~y.isnan()
        return F.binary_cross_entropy_with_logits(out[known], y[known])

    run = gas.fit(model, graph, adam(model), 5, loss=masked, batch_size=2, warm_up=0, log=False)
    assert run.loss[-1] < run.loss[0]
    with pytest.raises(ValueError, match="'train_mask' holds 19 nodes with a target that is unk"):
        gas.fit(model, graph, adam(model), 1, batch_size=2, log=False)


def test_classes_that_cross_entropy_ignores_are_left_out():
    _, model, graph = make_graph()
    graph.y[graph.train_mask.nonzero()[0]] = -1
    loss = torch.nn.CrossEntropyLoss(ignore_index=-1)
    gas.fit(model, graph, adam(model), 1, loss=loss, batch_size=2, log=False)
    for loss in (torch.nn.CrossEntropyLoss(), F.cross_entropy):
        with pytest.raises(ValueError, match="'train_mask' holds 1 nodes"):
            gas.fit(model, graph, adam(model), 1, loss=loss, batch_size=2, log=False)


@pytest.mark.parametrize(
    "loss",
    [torch.nn.CrossEntropyLoss(ignore_index=-1), partial(F.cross_entropy, ignore_index=-1)],
    ids=["module", "function"],
)
def test_classes_that_cross_entropy_ignores_are_no_labels(loss):
    """Gradients of micro-batches are those of the mean over all others; a batch may have none."""
    data, _, _ = make_graph()
    torch.manual_seed(1)
    data.y[torch.rand(data.num_nodes) < 0.5] = -1
    net = GraphSAGE(data.num_features, 8, num_layers=1, out_channels=int(data.y.max()) + 1)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 8, model=model, log=False)
    first = slice(int(graph.parts[0]), int(graph.parts[1]))
    graph.y[first], data.y[graph.perm[first]] = -1, -1
    mask = data.train_mask & (data.y >= 0)
    expected = F.cross_entropy(net(data.x, data.edge_index)[mask], data.y[mask])
    wanted = torch.autograd.grad(expected, list(net.parameters()))
    before = [weight.detach().clone() for weight in net.parameters()]
    mean = train_epoch(
        model, gas.SubgraphLoader(graph, log=False), torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batches=8, loss_fn=loss,
    )  # fmt: skip
    assert mean == pytest.approx(expected.item())
    for weight, old, gradient in zip(net.parameters(), before, wanted, strict=True):
        torch.testing.assert_close(old - weight, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by", ["loss", "labels"])
def test_samplers_count_classes_that_a_loss_ignores(by):
    """They draw parts by labels, of which they know no more than the mask."""
    _, model, graph = make_graph()
    graph.y[graph.train_mask.nonzero()[::2]] = -1
    model.refresh(graph, log=False)
    loader = gas.SubgraphLoader(graph, sampler=PartSampler(graph, by=by, share=0.5), log=False)
    loss = torch.nn.CrossEntropyLoss(ignore_index=-1, reduction="none" if by == "loss" else "mean")
    assert math.isfinite(train_epoch(model, loader, adam(model), loss_fn=loss))


def test_compiled_models_are_trained_as_the_ones_inside():
    runs = []
    for compile_model in (lambda model: model, partial(torch.compile, backend="eager")):
        _, model, graph = make_graph(dropout=0.0)
        compiled = compile_model(model)
        torch.manual_seed(1)
        runs.append(gas.fit(compiled, graph, adam(model), 3, batch_size=2, log=False))
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-4)
    assert runs[0].val_acc == pytest.approx(runs[1].val_acc)


def test_scores_are_those_of_evaluate_for_a_single_output():
    data, _, graph = make_graph()
    model = gas.to_scalable(GraphSAGE(data.num_features, 8, num_layers=2, out_channels=1), data)
    graph.y = (graph.y > 0).long().view(-1, 1)
    run = gas.fit(model, graph, adam(model), 2, batch_size=2, log=False)
    assert run.metric == "roc_auc"
    assert run.val_acc[run.best_epoch] == pytest.approx(gas.evaluate(model, graph)["val"])


def test_one_part_is_augmented():
    """It is a full batch without histories only if it isn't."""
    _, model, graph = make_graph(num_parts=1)
    dropped = gas.augment.DropEdge(graph, 0.5)
    loader = gas.SubgraphLoader(graph, epoch_transform=dropped, log=False)
    seen = []
    views = model.views

    def counted(*args):
        seen.append(args)
        return views(*args)

    model.views = counted
    gas.fit(model, loader, adam(model), 3, log=False)
    assert len(seen) == 3


def test_real_targets_of_several_columns_need_a_loss():
    """The usual one would take them for labels."""
    _, model, graph = make_graph()
    out_channels = model.predict(graph).size(1)
    graph.y = torch.randn(graph.num_nodes, out_channels)
    for call in (
        lambda: gas.fit(model, graph, adam(model), 1, log=False),
        lambda: train_epoch(model, gas.SubgraphLoader(graph, log=False), adam(model)),
    ):
        with pytest.raises(ValueError, match="'y' holds real numbers of shape .*: pass a loss"):
            call()
    run = gas.fit(model, graph, adam(model), 2, loss=F.mse_loss, log=False)
    assert run.metric == "r2"
    assert run.loss[1] < run.loss[0]


@pytest.mark.parametrize("unknown", [-1, math.nan])
def test_validation_nodes_without_a_known_target_are_refused(unknown):
    _, model, graph = make_graph()
    if unknown != -1:
        graph.y = torch.randn(graph.num_nodes)
    graph.y[graph.val_mask] = unknown
    with pytest.raises(ValueError, match="'val_mask' has no node with a known target"):
        gas.fit(model, graph, adam(model), 1, log=False)


@pytest.mark.parametrize("p", [-0.5, math.nan, 1.0, True, "x"])
def test_edge_dropout_is_a_probability(p):
    _, model, graph = make_graph()
    with pytest.raises(ValueError, match=r"'edge_dropout' is .*, expected a probability in \[0, 1"):
        gas.fit(model, graph, adam(model), 1, edge_dropout=p, log=False)


@pytest.mark.parametrize("split", [-1, 1.5, "a"])
def test_a_split_is_a_number(split):
    _, model, graph = make_graph()
    with pytest.raises(ValueError, match=f"'split' is {split!r}, expected an integer of at least"):
        gas.fit(model, graph, adam(model), 1, split=split, log=False)
    with pytest.raises(ValueError, match="'split' is"):
        gas.evaluate(model, graph, split=split)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_parameters_that_the_optimizer_lacks_do_not_count(micro_batches):
    """They aren't cleared, so that their norm would grow, and steps would shrink."""
    steps = []
    for frozen in (False, True):
        torch.manual_seed(0)
        _, model, graph = make_graph()
        last = [each for key, each in model.named_parameters() if "convs.2" in key]
        assert last
        for each in model.parameters():
            each.requires_grad_(not frozen or any(each is one for one in last))
        before = [each.detach().clone() for each in last]
        model.refresh(graph, log=False)
        torch.manual_seed(1)
        loader = gas.SubgraphLoader(graph, batch_size=1, log=False)
        optimizer = torch.optim.SGD(last, lr=0.1)
        for _ in range(4):
            train_epoch(model, loader, optimizer, grad_norm=0.1, micro_batches=micro_batches)
        steps.append([each.detach() - start for each, start in zip(last, before, strict=True)])
    for free, frozen in zip(*steps, strict=True):
        torch.testing.assert_close(free, frozen)
