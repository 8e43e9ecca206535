"""Feedback rules: examples, how they are drawn and judged, by enumeration."""

import collections
import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, random_graph
from scipy import stats
from torch_geometric.data import Data

import gas
from gas.contrib.rules import Rule, RuleOversampling

N, C = 12, 3
MASKS = {
    "train_mask": [0, 1, 2, 3, 4],
    "held_out": [5, 6, 7, 8],
    "pool": [0, 1, 9, 10, 11],
}
COVERS = ([1, 2, 5, 6, 9, 10], [2, 6, 10, 11])  # Both cover 2, 6 and 10.
LABELS = (2, [1.0, 3.0, 0.0])
ASKED = ([0.0, 0.0, 1.0], [0.25, 0.75, 0.0])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def mask_of(nodes):
    return torch.zeros(N, dtype=torch.bool).index_fill_(0, torch.tensor(nodes), True)


def graph():
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, -1, -1, -1])  # Those of the rest aren't read.
    return Data(x=torch.arange(N).float()[:, None], y=y, edge_index=torch.zeros(2, 0).long())


def make(**options):
    rules = [Rule(mask_of(COVERS[0]), LABELS[0]), Rule(lambda data: mask_of(COVERS[1]), LABELS[1])]
    given = {name: mask_of(nodes) for name, nodes in MASKS.items()}
    given.update({"fraction": 0.4, "quota": 1.0, "generator": seeded(), **options})
    return RuleOversampling(graph(), rules, given.pop("train_mask"), given.pop("held_out"), **given)


def outputs(classes):
    """Return outputs that predict these classes."""
    return F.one_hot(torch.tensor(classes), C).float()


WORST = outputs([1] * N)  # No covered node of those held out gets what a rule asks for surely.


def asked_of(node):
    """Return the label that rules give a node, or None."""
    labels = [ASKED[number] for number in (0, 1) if node in COVERS[number]]
    return [sum(column) / len(labels) for column in zip(*labels, strict=True)] if labels else None


def listed(rules, conflicts):
    """Every single example of each node: labels as distributions."""
    out = {node: [] for node in range(N)}
    y = graph().y.tolist()
    for node in MASKS["train_mask"]:
        asked = asked_of(node)
        if asked is None or conflicts == "keep":
            out[node].append([float(y[node] == k) for k in range(C)])
        elif conflicts == "relabel":
            out[node].append(asked)
    for number, node in itertools.product((0, 1), range(N)):
        times = int(
            rules.state_dict()["kept"][number, node] + rules.state_dict()["tried"][number, node]
        )
        out[node] += [ASKED[number]] * times
    return out


@pytest.mark.parametrize("conflicts", ["relabel", "drop", "keep"])
def test_examples_are_those_that_are_listed(conflicts):
    """Weights and mixed labels have the loss, and the gradient, of every example on its own."""
    rules = make(conflicts=conflicts, fraction=1.0)
    logits = torch.randn(N, C, generator=seeded(), dtype=torch.double, requires_grad=True)
    n_id = torch.randperm(N, generator=seeded(1))
    rules.update(WORST)
    for _ in range(3):
        rules.run()
        examples = listed(rules, conflicts)
        weight, target = rules.examples(n_id)
        assert weight.tolist() == [len(examples[node]) for node in n_id.tolist()]
        losses = F.cross_entropy(logits[n_id], target.double(), reduction="none")
        found = (weight * losses).sum() / weight.sum()
        terms = [
            -(torch.tensor(label).double() * logits[node].log_softmax(0)).sum()
            for node, labels in examples.items()
            for label in labels
        ]
        expected = torch.stack(terms).mean()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        grads = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
        rules.update(outputs([0, 0, 0, 0, 0, 2, 2, 1, 2, 0, 0, 0]))
    assert rules.num_examples == 5  # The quota, kept at once; no proposal was made after.


def test_the_score_is_what_is_counted():
    rules = make()
    for seed in range(20):
        classes = torch.randint(C, (N,), generator=seeded(seed)).tolist()
        inside = [asked_of(node)[classes[node]] for node in MASKS["held_out"] if asked_of(node)]
        outside = [
            classes[node] == int(graph().y[node])
            for node in MASKS["held_out"] if not asked_of(node)
        ]  # fmt: skip
        score = rules.score(outputs(classes))
        assert score.agreement == pytest.approx(sum(inside) / len(inside))
        assert score.accuracy == pytest.approx(sum(outside) / len(outside))
        assert score.objective == score.agreement * score.accuracy
    assert rules.score(WORST, mask_of([0])) == (1.0, 0.0)
    assert rules.score(WORST, mask_of([11])) == (0.75, 1.0)


def test_proposals_are_drawn_alike():
    """Of all that could be drawn, by listing it: two examples, of two rules and their nodes."""
    pools = [sorted(set(MASKS["pool"]) & set(nodes)) for nodes in COVERS]
    assert pools == [[1, 9, 10], [10, 11]]
    single = {(r, node): 0.5 / len(pool) for r, pool in enumerate(pools) for node in pool}
    exact = collections.Counter()
    for one, two in itertools.product(single, repeat=2):
        exact[tuple(sorted((one, two)))] += single[one] * single[two]
    rules = make()
    rules.update(WORST)
    drawn = collections.Counter()
    for _ in range(4000):
        rules.run()
        tried = rules.state_dict()["tried"]
        where = [tuple(place) for place in tried.nonzero().tolist()]
        drawn[tuple(sorted(p for p in where for _ in range(int(tried[p]))))] += 1
        assert not rules.update(WORST)
    assert set(drawn) == set(exact)
    found = [drawn[key] for key in exact]
    assert stats.chisquare(found, [4000 * exact[key] for key in exact]).pvalue > 1e-3
    assert rules.num_examples == 0


def test_examples_stay_if_the_objective_is_the_best():
    rules = make()
    good = outputs([0, 0, 0, 0, 0, 2, 2, 1, 2, 0, 0, 0])  # Node 6 may be 1 as well.
    half = outputs([0, 0, 0, 0, 0, 2, 2, 0, 2, 0, 0, 0])
    before = rules.examples(torch.arange(N))
    rules.run()
    assert same(rules.examples(torch.arange(N)), before)  # Nothing to compare with yet.
    assert not rules.update(WORST)
    rules.run()
    tried = rules.examples(torch.arange(N))
    assert tried[0].sum() == before[0].sum() + 2
    rules.run()
    assert same(rules.examples(torch.arange(N)), tried)  # They are being tried.
    assert rules.update(half)
    assert same(rules.examples(torch.arange(N)), tried)
    assert rules.num_examples == 2
    for out in (half, WORST):  # No better.
        rules.run()
        assert not rules.update(out)
        assert same(rules.examples(torch.arange(N)), tried)
    rules.run()
    assert rules.update(good)
    assert rules.num_examples == 4
    assert str(rules) == "RuleOversampling(num_rules=2, covered=7, num_examples=4)"


def test_seeds_and_resuming():
    def history(rules, steps):
        states = []
        for step in range(steps):
            rules.run()
            states.append(rules.state_dict()["tried"])
            rules.update(torch.randn(N, C, generator=seeded(step)))
        return states

    first, second, third = make(), make(), make(generator=seeded(5))
    for rules in (first, second, third):
        rules.update(WORST)
    assert same(history(first, 3), history(second, 3))
    first.run()
    third.load_state_dict(first.state_dict())
    other = pickle.loads(pickle.dumps(first))
    found = [history(rules, 6) for rules in (first, third, other)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert any(tried.any() for tried in found[0])
    before = first.state_dict()
    with pytest.raises(ValueError, match="'state' has the entries"):
        first.load_state_dict({})
    with pytest.raises(ValueError, match="'kept' of .*saved for another graph"):
        first.load_state_dict({**before, "kept": before["kept"][:, :3]})
    assert same(list(before.values()), list(first.state_dict().values()))


def test_the_graph_is_left_alone():
    data = random_graph()
    before = copy.deepcopy(data)
    rules = RuleOversampling(
        data, [Rule(lambda data: data.x[:, 0] > 0, 1)], mask_of_half(60), ~mask_of_half(60)
    )
    rules.update(torch.randn(60, 3))
    rules.run()
    rules.examples(torch.arange(60))
    for key, value in before:
        assert torch.equal(data[key], value)


def mask_of_half(size):
    return torch.arange(size) < size // 2


def test_a_checkpoint_holds_rules(tmp_path):
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    rules = make()
    rules.update(WORST)
    rules.run()
    gas.save(tmp_path, model, rules=rules)
    other = make(generator=seeded(9))
    state = gas.load(tmp_path, gas.models.GraphSAGE(60, 5, 8, 3, 2))
    other.load_state_dict(state["rules"])
    assert same(list(other.state_dict().values()), list(rules.state_dict().values()))


def test_batches_of_a_clustered_graph():
    """A batch's own nodes are rows of the graph that the rules were given."""
    data = random_graph()
    clustered = gas.cluster(data, 6, log=False)
    rules = RuleOversampling(
        clustered, [Rule(lambda data: data.x[:, 0] > 0, 1)], mask_of_half(60), ~mask_of_half(60)
    )
    for batch in gas.SubgraphLoader(clustered, batch_size=2, log=False):
        own = batch.n_id[: batch.batch_size]
        weight, target = rules.examples(own)
        assert torch.equal(weight > 0, own < 30)
        covered = (batch.own.x[:, 0] > 0) & (own < 30)
        assert (target[covered, 1] == 1).all()
        rest = (own < 30) & ~covered
        assert torch.equal(target[rest].argmax(1), batch.own.y[rest])


@pytest.mark.parametrize("make", [int, np.int64, torch.tensor])
def test_a_class_may_be_the_number_of_any_library(make):
    covers = mask_of(COVERS[0])
    assert rules_with(rules=[Rule(covers, make(1))]).labels.tolist() == [[0, 1, 0]]
    assert rules_with(rules=[Rule(covers, make(4))]).num_classes == 5


def test_probabilities_are_kept_as_numbers_in_proportion():
    weights = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    labels = rules_with(rules=[Rule(mask_of(COVERS[0]), weights)]).labels
    assert labels.tolist() == [[0.25, 0, 0.75]]
    assert not labels.requires_grad


def rules_with(**changes):
    data = graph()
    for key in ("y", "x"):
        if key in changes:
            data[key] = changes.pop(key)
    rules = changes.pop("rules", [Rule(mask_of(COVERS[0]), LABELS[0])])
    masks = {name: mask_of(nodes) for name, nodes in MASKS.items()} | changes
    return RuleOversampling(data, rules, masks.pop("train_mask"), masks.pop("held_out"), **masks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": []}, r"'rules' is \[\], expected a list of gas.contrib.rules.Rule"),
        ({"rules": [("x > 0", 1)]}, "'rules' is .*, expected a list of gas.contrib.rules.Rule"),
        ({"rules": [Rule(mask_of([1, 5]), 3)], "num_classes": 3}, "'rules.0..label' is 3"),
        ({"rules": [Rule(mask_of([1, 5]), -1)]}, "'rules.0..label' is -1"),
        ({"rules": [Rule(mask_of([1, 5]), [0.0] * 3)]}, "'rules.0..label' is .*0.0"),
        ({"rules": [Rule(mask_of([1, 5]), [2.0, -1, 0])]}, "'rules.0..label' is .*-1"),
        ({"rules": [Rule(mask_of([1, 5]), [math.inf, 1, 0])]}, "'rules.0..label' is .*inf"),
        ({"rules": [Rule(mask_of([1, 5]), [3e38, 3e38, 0])]}, "'rules.0..label' is .*3e.38"),
        ({"rules": [Rule(mask_of([1, 5]), "first")]}, "'rules.0..label' is 'first'"),
        ({"rules": [Rule(mask_of([1, 5]), 1.0)]}, "'rules.0..label' is 1.0"),
        ({"rules": [Rule(torch.ones(N), 1)]}, "'rules.0..covers' is torch.float32"),
        ({"rules": [Rule([True] * N, 1)]}, "'rules.0..covers' is a list, expected a tensor of"),
        ({"y": graph().y.float()}, "'y' is torch.float32"),
        ({"y": graph().y[:, None]}, r"'y' is torch.int64 of shape \[12, 1\]"),
        ({"y": graph().y[:8]}, r"'y' is torch.int64 of shape \[8\]"),
        ({"y": graph().y - 1}, "'y' has the classes -1 to 1 where it is read"),
        ({"num_classes": 2, "rules": [Rule(mask_of([1, 5]), 1)]}, "'y' has the classes 0 to 2"),
        ({"held_out": mask_of([4, 5, 7])}, "'train_mask' and 'held_out' share 1 nodes"),
        ({"pool": mask_of([5, 9])}, "'pool' and 'held_out' share 1 nodes"),
        ({"held_out": mask_of([7, 8])}, "'held_out' has no node that a rule covers"),
        ({"held_out": mask_of([5, 6])}, "'held_out' has no node that no rule covers"),
        ({"pool": mask_of([0, 11])}, "'pool' has no node that a rule covers"),
        ({"conflicts": "remove"}, "'conflicts' is 'remove', expected one of relabel, drop, keep"),
    ],
)
def test_arguments_that_cannot_be_used(changes, message):
    rules_with()
    with pytest.raises(ValueError, match=message):
        rules_with(**changes)


def test_labels_of_any_integer_type():
    nodes = torch.arange(N)
    want = rules_with().examples(nodes)
    assert same(rules_with(y=graph().y.to(torch.uint8), num_classes=C).examples(nodes), want)


@pytest.mark.parametrize("shape", [(N,), (N - 1, C), (N + 1, C), (N, C - 1), (N, C + 1)])
def test_outputs_of_something_else(shape):
    rules = make()
    with pytest.raises(ValueError, match="'out' has shape .*expected the outputs of all nodes"):
        rules.update(torch.zeros(shape))
    assert float(rules.state_dict()["best"]) == -1


def test_how_many_examples():
    """Of five training nodes."""
    for fraction, quota, sizes in ((0.4, 1.0, [2, 2, 1, 0]), (0.6, 0.4, [2, 0, 0, 0])):
        rules = make(fraction=fraction, quota=quota)
        for size in sizes:
            rules.load_state_dict({**rules.state_dict(), "best": torch.tensor(0.0).double()})
            rules.run()
            assert int(rules.state_dict()["tried"].sum()) == size
            assert rules.update(outputs([0, 0, 0, 0, 0, 2, 2, 1, 2, 0, 0, 0])) == (size > 0)
        assert rules.num_examples == sum(sizes)


SCRIPT = ROOT / "examples" / "train_rules.py"


def test_the_example(run_script):
    done = run_script(SCRIPT, "--num-nodes", "600", "--runs", "2", "--epochs", "6")
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    *_, alone, corrected, oversampled = done.out.strip().splitlines()
    assert alone.startswith("labels alone")
    assert alone.rstrip().endswith(" 0")
    assert corrected.rstrip().endswith(" 0")
    assert oversampled.startswith("and oversampled")
    assert int(oversampled.split()[-1]) > 0
    done = run_script(SCRIPT, "--runs", "0")
    assert done.code == 2
    assert "argument --runs is 0, expected at least 1" in done.err
