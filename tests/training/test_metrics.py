import contextlib
import itertools
import math

import pytest
import torch

from gas.training import compute_micro_f1, compute_r2, compute_roc_auc, metric_of, score
from gas.training.metrics import baseline, check_metric


@pytest.mark.parametrize("levels", [3, 1000])
def test_roc_auc_counts_pairs(levels):
    """Against enumeration, with ties and without."""
    scores = torch.randint(levels, (40,)).float()
    y = torch.randint(2, (40,))
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, b in itertools.product(scores[y == 1].tolist(), scores[y == 0].tolist())
    ]
    expected = sum(wins) / len(wins)
    assert compute_roc_auc(scores, y) == pytest.approx(expected)
    assert compute_roc_auc(scores[:, None], y[:, None].float()) == pytest.approx(expected)
    logits = torch.stack([torch.zeros(40), scores], dim=1)
    assert compute_roc_auc(logits, y) == pytest.approx(expected)
    assert compute_roc_auc(-scores, y) == pytest.approx(1 - expected)
    mask = torch.rand(40) < 0.5
    assert compute_roc_auc(scores, y, mask) == compute_roc_auc(scores[mask], y[mask])


def test_roc_auc_of_one_class_and_of_none():
    assert compute_roc_auc(torch.randn(4), torch.ones(4)) == 0.5
    assert compute_roc_auc(torch.randn(4), torch.zeros(4)) == 0.5
    assert compute_roc_auc(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])) == 1
    assert compute_roc_auc(torch.empty(0), torch.empty(0)) == 0.5


def test_roc_auc_needs_a_binary_target():
    with pytest.raises(ValueError, match="'y' holds 2, expected 0 and 1"):
        compute_roc_auc(torch.randn(3), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="'y' holds -1, expected 0 and 1"):
        compute_roc_auc(torch.randn(2), torch.tensor([-1, 1]))
    with pytest.raises(ValueError, match="'y' holds nan, expected 0 and 1"):
        compute_roc_auc(torch.randn(2), torch.tensor([torch.nan, 1]))
    with pytest.raises(ValueError, match=r"'y' has shape \[4, 2\], of 2 labels per node: choose"):
        compute_roc_auc(torch.randn(4, 2), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"'logits' has shape \[6, 2\] and 'y' \[4\], expected a"):
        compute_roc_auc(torch.randn(6, 2), torch.zeros(4))
    with pytest.raises(ValueError, match="roc_auc is for two classes, but .*, of 4 classes: ch"):
        compute_roc_auc(torch.randn(3, 4), torch.tensor([0, 1, 1]))


def test_r2():
    y = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert compute_r2(y[:, None], y) == 1
    assert compute_r2(torch.full((4, 1), 3.0), y) == 0
    assert compute_r2(y + 1, y) == pytest.approx(1 - 4 / 14)
    assert compute_r2(y + 1, y, torch.tensor([True, True, False, False])) == pytest.approx(-3)
    assert compute_r2(y[:1], y[:1]) == 0


def test_the_usual_metric():
    assert metric_of(torch.tensor([0, 1])) == "accuracy"
    assert metric_of(torch.tensor([[0, 1]])) == "micro_f1"
    assert metric_of(torch.tensor([0.5, 1])) == "r2"
    assert metric_of(torch.tensor([[0.5], [1]])) == "r2"
    assert metric_of(torch.tensor([[0.0, 1.0]])) == "micro_f1"
    out, y = torch.randn(9, 2), torch.randint(2, (9,))
    assert score("accuracy", out, y) == score("micro_f1", out, y)
    assert score("roc_auc", out, y) == compute_roc_auc(out, y)
    assert score("r2", out[:, 0], y.float()) == compute_r2(out[:, 0], y.float())
    with pytest.raises(ValueError, match="'metric' is 'mape', expected one of accuracy, micro_f1"):
        score("mape", out, y)


def test_micro_f1():
    """Of 3 labels that were given and 4 that are true, 2 are right."""
    out = torch.tensor([[1.0, -1.0], [2.0, 0.0], [-3.0, 4.0]])
    y = torch.tensor([[1, 1], [0, 1], [0, 1]])
    assert compute_micro_f1(out, y) == pytest.approx(2 * 2 / (3 + 4))
    assert compute_micro_f1(out, y.float()) == pytest.approx(2 * 2 / (3 + 4))
    assert compute_micro_f1(out, y, torch.tensor([True, True, False])) == pytest.approx(2 / 5)
    assert compute_micro_f1(out[:1], torch.tensor([[1, 0]])) == 1
    assert compute_micro_f1(-out.abs(), y * 0) == 0
    classes = torch.tensor([0, 1, 1])
    assert compute_micro_f1(out, classes) == pytest.approx(2 / 3)
    assert compute_micro_f1(out, classes, torch.tensor([True, False, True])) == 1
    assert compute_micro_f1(out[:0], classes[:0]) == 0
    assert compute_micro_f1(out, classes.view(-1, 1)) == pytest.approx(2 / 3)  # OGB's shape.
    assert compute_micro_f1(out[:, :1], y[:, :1]) == pytest.approx(2 * 1 / (2 + 1))
    for wrong in (y[:2], classes[:2], torch.ones(3, 3), classes[0]):
        with pytest.raises(ValueError, match=r"'logits' has shape \[3, 2\] and 'y'"):
            compute_micro_f1(out, wrong)
    with pytest.raises(ValueError, match=r"'logits' has shape \[3\]"):  # Classes, not outputs.
        compute_micro_f1(out.argmax(dim=-1), classes)


def test_baseline_is_the_best_constant():
    y = torch.tensor([0, 1, 1, 2, 1, 0, -1])
    train = torch.tensor([1, 1, 1, 0, 0, 0, 1]).bool()
    test = torch.tensor([0, 0, 0, 1, 1, 1, 0]).bool()
    assert baseline("accuracy", y, train, test) == pytest.approx(1 / 3)  # Class 1.
    assert baseline("roc_auc", y, train, test) == 0.5
    labels = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1]]).float()
    found = baseline("micro_f1", labels, train[:6], test[:6])
    always = torch.tensor([1.0, -1.0]).expand(6, 2)  # The first label, and never the second.
    assert found == compute_micro_f1(always, labels, test[:6]) > 0
    real = torch.tensor([1.0, 2.0, 3.0, 5.0, 6.0, 7.0])
    mean = torch.full((6, 1), 2.0)
    assert baseline("r2", real, train[:6], test[:6]) == compute_r2(mean, real, test[:6]) < 0


def test_labels_that_are_unknown_do_not_count():
    logits = torch.randn(30, 4)
    y = torch.randint(2, (30, 4)).float()
    hidden = torch.rand(30, 4) < 0.4
    known = ~hidden
    hits = int(((logits > 0) & (y > 0.5) & known).sum())
    named = int(((logits > 0) & known).sum()) + int(((y > 0.5) & known).sum())
    assert compute_micro_f1(logits, y.masked_fill(hidden, torch.nan)) == 2 * hits / named
    assert compute_micro_f1(logits, y.long().masked_fill(hidden, -1)) == 2 * hits / named


def test_floats_are_labels_or_real_numbers():
    assert metric_of(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])) == "micro_f1"
    assert metric_of(torch.tensor([[0.0, 1.0], [0.5, 1.0]])) == "r2"
    assert metric_of(torch.tensor([[0, 1], [-1, 1]])) == "micro_f1"


def test_r2_of_several_targets_is_the_mean_of_their_own():
    out, y = torch.randn(20, 3), torch.randn(20, 3)
    y[:5, 0] = y[:, 2] = torch.nan
    expected = (compute_r2(out[5:, 0], y[5:, 0]) + compute_r2(out[:, 1], y[:, 1])) / 2
    assert compute_r2(out, y) == pytest.approx(expected)
    mask = torch.arange(20) < 10
    assert compute_r2(out, y, mask) == compute_r2(out[:10], y[:10])
    assert compute_r2(out, torch.full((20, 3), torch.nan)) == 0


@pytest.mark.parametrize(
    ("metric", "y", "num_outputs", "fits"),
    [
        ("roc_auc", torch.tensor([0, 1]), 2, True),
        ("roc_auc", torch.tensor([[0], [1]]), 1, True),
        ("roc_auc", torch.tensor([0.0, 1.0]), 1, True),
        ("roc_auc", torch.tensor([0, 1]), 3, False),
        ("roc_auc", torch.tensor([[0, 1], [1, 1]]), 2, False),
        ("roc_auc", torch.tensor([0.5, 1.0]), 1, False),
        ("accuracy", torch.tensor([0.5, 1.0]), 1, False),
        ("r2", torch.tensor([-0.5, 1.0]), 1, True),
        (None, torch.tensor([0.5, 1.0]), 1, True),
    ],
)
def test_metrics_fit_their_targets(metric, y, num_outputs, fits):
    expected = contextlib.nullcontext() if fits else pytest.raises(ValueError, match="choose")
    with expected:
        check_metric(metric, y, num_outputs)


def test_a_single_output_of_two_classes_is_positive_for_the_second():
    out, y = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1, 1, 0, 0])
    for targets in (y, y[:, None], torch.tensor([1, 1, -1, 0])):
        expected = 2 / 3 if int(targets.min()) < 0 else 0.5
        assert score("accuracy", out, targets) == pytest.approx(expected)
    assert score("micro_f1", out, y[:, None]) == pytest.approx(2 / 4)


def test_unknown_targets_do_not_count_for_roc_auc():
    out, y = torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.tensor([1, 0, 1, -1])
    assert score("roc_auc", out, y) == 1.0
    assert score("roc_auc", out, torch.tensor([1.0, 0.0, 1.0, math.nan])) == 1.0
    assert score("roc_auc", out, y, torch.tensor([True, False, True, True])) == 0.5


@pytest.mark.parametrize(
    ("metric", "y"),
    [
        ("accuracy", torch.rand(9)), ("micro_f1", torch.rand(9, 1)), ("r2", torch.arange(9) % 3),
        ("accuracy", torch.randint(2, (9, 3))),
    ],
)  # fmt: skip
def test_a_metric_of_other_targets_is_refused(metric, y):
    out = torch.rand(9, 1 if y.is_floating_point() else 3)
    with pytest.raises(ValueError, match=f"'metric' is {metric}, but the targets are .*: choose"):
        score(metric, out, y)
