"""Parts visited in an epoch, their frequencies, and the weights that correct for these."""

import copy
import itertools

import pytest
import torch
from conftest import random_graph
from torch.nn import functional as F
from torch.utils.data import BatchSampler
from torch_geometric.nn import SAGEConv

import gas
from gas.loader import PartSampler
from gas.loader.part_sampler import MIN_SHARE, inclusion_probabilities, systematic_sample
from gas.training import train_epoch

PARTS = 12


def made(labelled_parts=(0, 3, 4, 9, 11), num_parts=PARTS, layers=2):
    """Return a graph whose labelled nodes, more and more of them, are in some parts."""
    torch.manual_seed(0)
    data = random_graph(240, 1400)
    model = gas.models.GraphSAGE(240, data.num_features, 8, 4, num_layers=layers)
    graph = gas.cluster(data, num_parts, model=model, log=False, method="random")
    graph.y = torch.arange(240) % 4
    graph.train_mask = torch.zeros(240, dtype=torch.bool)
    for number, part in enumerate(labelled_parts):
        first = int(graph.parts[part])
        graph.train_mask[first + 1 : first + 3 + number] = True
    model.predict(graph)  # Fills the histories.
    return graph, model


def loader_of(graph, batch_size=2, **options):
    sampler = PartSampler(graph, **options)
    return gas.SubgraphLoader(graph, batch_size=batch_size, sampler=sampler, log=False), sampler


def parts_in(graph, batch):
    return torch.searchsorted(graph.parts, batch.offset, right=True).sub(1).tolist()


def epoch(graph, loader):
    """Return the parts of each batch."""
    return [parts_in(graph, batch) for batch in loader]


def losses_of(out, own):
    return F.cross_entropy(out[own.train_mask], own.y[own.train_mask], reduction="none")


def test_parts_without_labels_are_left_out():
    graph, _ = made()
    loader, sampler = loader_of(graph)
    assert str(sampler) == "PartSampler(by='labels', 5 of 12 parts an epoch)"
    assert len(loader) == 3
    orders = [epoch(graph, loader) for _ in range(4)]
    assert all(sorted(itertools.chain(*order)) == [0, 3, 4, 9, 11] for order in orders)
    assert len({str(order) for order in orders}) > 1
    assert sampler.age.tolist() == [0, -1, -1, 0, 0, -1, -1, -1, -1, 0, -1, 0]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 20])
def test_others_are_visited_in_turn_and_first(every):
    graph, _ = made()
    sampler = PartSampler(graph, every=every)
    orders = [list(sampler) for _ in range(30)]
    assert {len(order) for order in orders} == {len(sampler)} == {5 + -(-7 // every)}
    for order in orders:
        assert sorted(order[-5:]) == [0, 3, 4, 9, 11]
        assert len(set(order)) == len(order)
    for start in range(30 - every):
        assert len(set(itertools.chain(*orders[start : start + every]))) == PARTS
        assert int(sampler.age.max()) < every


def test_ages_are_epochs():
    graph, _ = made()
    sampler = PartSampler(graph, every=7)
    assert sampler.age.tolist() == [-1] * PARTS
    for _ in range(3):
        list(sampler)
    assert sampler.age.tolist() == [0, 2, 1, 0, 0, 0, -1, -1, -1, 0, -1, 0]


def test_rows_of_parts_that_are_left_out_stay_old():
    graph, model = made()
    loader, _ = loader_of(graph, batch_size=1, every=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_epoch(model, loader, optimizer)
    pushes, age = 3 * len(loader), model.histories[0].age
    for part in range(PARTS):
        rows = slice(int(graph.parts[part]), int(graph.parts[part + 1]))
        is_young = age[rows] < pushes
        assert bool(is_young.all()) == bool(is_young.any()) == (part in {0, 3, 4, 9, 11, 1, 2, 5})
    assert model.staleness()[0].max_age >= pushes


def test_all_parts_in_the_order_of_staleness_bound_the_age_of_rows():
    graph, model = made()
    oldest = {}
    for name in ("staleness", "shuffle"):
        torch.manual_seed(1)
        loader = gas.SubgraphLoader(graph, shuffle=True, log=False)
        if name == "staleness":
            loader, sampler = loader_of(graph, batch_size=1, by="staleness")
        model.predict(graph)
        for _ in range(6):
            with torch.no_grad():
                for batch in loader:
                    model(batch)
        oldest[name] = 0
        for _ in range(6):
            with torch.no_grad():
                for batch in loader:
                    model(batch)
                    oldest[name] = max(oldest[name], model.staleness()[0].max_age)
    assert oldest["staleness"] == PARTS - 1
    assert PARTS - 1 < oldest["shuffle"] <= 2 * PARTS - 2
    assert sampler.labelled.sum() == graph.train_mask.sum()


@pytest.mark.parametrize("share", [0.01, 0.25, 0.4, 0.75, 1.0])
def test_the_stalest_come_and_each_as_often(share):
    graph, _ = made()
    del graph.train_mask
    sampler = PartSampler(graph, by="staleness", share=share)
    count, last = torch.zeros(PARTS, dtype=torch.long), torch.zeros(PARTS, dtype=torch.long)
    for number in range(1, 4 * PARTS + 1):
        order = list(sampler)
        assert len(order) == len(sampler) == -(-round(share * PARTS * 100) // 100)
        left = [part for part in range(PARTS) if part not in order]
        if left:
            assert int(last[order].max()) <= int(last[left].min())
        last[order] = number
        count[order] += 1
        assert int(count.max() - count.min()) <= 1


@pytest.mark.parametrize(("by", "epochs"), [("staleness", 4), ("labels", 1)])
def test_weights_make_up_for_the_share(by, epochs):
    """Of losses that are 1, the weighted sum of an epoch is 1: on average over a turn of all."""
    graph, _ = made(labelled_parts=range(0, PARTS, 3))
    loader, sampler = loader_of(graph, batch_size=1, by=by, share=0.25)
    assert len(loader) == (3 if by == "staleness" else 1)
    total = sum(float(sampler.weight(b).sum()) for _ in range(epochs) for b in loader)
    number = int(graph.train_mask.sum())
    if by == "staleness":
        assert total / epochs == pytest.approx(1)
    else:
        (part,) = sampler.age.eq(0).nonzero().view(-1).tolist()
        assert total == pytest.approx(4 * int(sampler.labelled[part]) / number)


# By loss ------------------------------------------------------------------------------------------


def enumerated(chance):
    """Every set that is drawn, with the length of the starts that draw it: all that is possible."""
    line = torch.where(chance == 1, 0.0, chance).cumsum(0)
    ends = torch.cat([line % 1, torch.tensor([0.0, 1.0])]).sort().values
    for low, high in itertools.pairwise(ends.tolist()):
        if high - low > 1e-12:
            yield systematic_sample(chance, (low + high) / 2), high - low


@pytest.mark.parametrize("number", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("seed", range(5))
def test_each_is_drawn_by_its_chance(number, seed):
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(7, generator=generator, dtype=torch.double) ** 4 + 1e-3
    chance = inclusion_probabilities(score, number)
    assert float(chance.sum()) == pytest.approx(number)
    assert bool((chance <= 1).all())
    free = chance < 1
    ratio = (chance / score)[free]
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio))  # By the score, and the others
    assert bool((score[~free] >= score[free].max()).all() if free.any() else True)  # have more.
    found = torch.zeros(7, dtype=torch.double)
    for drawn, length in enumerated(chance):
        assert drawn.unique().numel() == drawn.numel() == number
        found[drawn] += length
    torch.testing.assert_close(found, chance)


def test_many_are_drawn_once_each():
    score = torch.linspace(1, 2, 100_000, dtype=torch.double)
    chance = inclusion_probabilities(score, 50_000)
    for start in (0.0, 0.5, 1 - 2**-53):
        assert systematic_sample(chance, start).unique().numel() == 50_000


def told(by="loss", share=0.4, seed=0, layers=2):
    """Return a sampler that knows losses."""
    graph, model = made(layers=layers)
    loader, sampler = loader_of(graph, by=by, share=share)
    torch.manual_seed(seed)
    if by == "loss":
        for part in (0, 3, 4, 9, 11):
            batch = loader.cut([part])
            sampler.report(batch, torch.full((int(sampler.labelled[part]),), 0.1 + part))
    return graph, model, loader, sampler


def gradient(model, loss):
    return torch.cat([g.view(-1) for g in torch.autograd.grad(loss, model.parameters())])


@pytest.mark.parametrize("by", ["loss", "labels"])
@pytest.mark.parametrize(("batch_size", "layers"), [(1, 2), (2, 1)])
def test_the_expected_gradient_of_an_epoch_is_that_of_all_parts(
    by, batch_size, layers, monkeypatch
):
    """All draws of one order of parts are enumerated: the intervals of the start.

    Gradients flow between the parts of a batch; not so in one layer, which reads features alone.
    """
    graph, model, _, sampler = told(by, layers=layers)
    model = model.double()
    graph.x = graph.x.double()
    model.eval()
    loader = gas.SubgraphLoader(graph, batch_size=batch_size, sampler=sampler, log=False)
    expected = 0
    for part in range(PARTS):
        batch = loader.cut([part])
        own = batch.own
        loss = losses_of(model(batch, push=False), own).sum() / graph.train_mask.sum()
        if own.train_mask.any():
            expected = expected + gradient(model, loss)
    first = sampler._first
    order = torch.tensor([2, 0, 4, 1, 3])
    chance = inclusion_probabilities(sampler_scores(sampler)[first[order]], sampler._num_first)
    if by == "loss":
        assert float(chance.max() / chance.min()) > 3
    state, mean, seen = sampler.state_dict(), 0, 0.0
    ends = torch.cat([chance.cumsum(0) % 1, torch.tensor([0.0, 1.0])]).sort().values
    for low, high in itertools.pairwise(ends.tolist()):
        if high - low < 1e-12:
            continue
        sampler.load_state_dict(copy.deepcopy(state))
        monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
        monkeypatch.setattr(torch, "rand", lambda *_, u=(low + high) / 2, **__: u)
        batches = [sorted(parts) for parts in BatchSampler(sampler, batch_size, drop_last=False)]
        monkeypatch.undo()
        for parts in batches:
            batch = loader.cut(parts)
            weight = sampler.weight(batch).double()
            loss = (weight * losses_of(model(batch, push=False), batch.own)).sum()
            mean = mean + (high - low) * gradient(model, loss)
        seen += high - low
    assert seen == pytest.approx(1)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-9)  # Weights are float32.


def sampler_scores(sampler):
    sampler.state_dict()  # Takes up what was reported.
    return sampler._score()


def test_a_part_with_more_loss_comes_more_often_and_none_never():
    _, _, _, sampler = told(share=0.2)
    count = torch.zeros(PARTS)
    for _ in range(2000):
        count[list(sampler)] += 1
    chance = sampler._chance
    labelled = sampler.labelled > 0
    assert torch.allclose(count[labelled] / 2000, chance[labelled].float(), atol=0.045)
    loss = torch.arange(PARTS) + 0.1
    score = (loss * sampler.labelled)[labelled]
    by_loss = (1 - MIN_SHARE) * score / score.sum() + MIN_SHARE / 5
    torch.testing.assert_close(chance[labelled].float(), by_loss)
    assert float(chance[0]) > MIN_SHARE / 5
    assert not count[~labelled].any()


def test_losses_that_are_not_known_or_all_alike():
    graph, _ = made()
    loader, sampler = loader_of(graph, by="loss", share=0.4)
    list(sampler)
    assert torch.allclose(sampler._chance[[0, 3, 4, 9, 11]], torch.tensor(0.4).double())
    sampler.report(loader.cut([0]), torch.zeros(2))
    list(sampler)
    assert torch.allclose(sampler._chance[[0, 3, 4, 9, 11]], torch.tensor(0.4).double())
    sampler.report(loader.cut([3]), torch.ones(3))
    list(sampler)
    others = sampler._chance[[3, 4, 9, 11]]
    assert torch.equal(others, others[:1].expand(4))  # Those not known count as the largest.
    assert float(sampler._chance[0]) < float(others[0])
    sampler.report(loader.cut([3]), torch.full((3,), 4.0))
    list(sampler)
    assert float(sampler._loss[3]) == 2.5  # A running mean.


def test_a_loss_for_each_labelled_node_of_each_part():
    graph, _ = made()
    loader, sampler = loader_of(graph, by="loss", share=0.5)
    sampler.report(loader.cut([3, 7, 11]), torch.tensor([1.0, 2, 3, 1, 1, 1, 1, 1, 7]))
    sampler.state_dict()
    known = {part: float(loss) for part, loss in enumerate(sampler._loss) if loss == loss}
    assert known == {3: 2.0, 11: 2.0}
    weight = sampler.weight(loader.cut([7, 3]))
    torch.testing.assert_close(weight, torch.full((3,), 1 / int(graph.train_mask.sum())))
    sampler.report(loader.cut([3]), torch.tensor([1.0, torch.nan, 1]))
    with pytest.raises(ValueError, match=r"the 'loss' of the part 3 is nan"):
        list(sampler)
    list(sampler)  # Goes on.


def test_batches_of_other_ranges_than_parts_are_refused():
    """One begins where a part does, but has two; the other has as many nodes as a part."""
    graph, _ = made()
    sampler = PartSampler(graph)
    joined = next(iter(gas.EvalSubgraphLoader(graph, batch_size=2, log=False)))
    loader = gas.SubgraphLoader(graph, log=False)
    shifted = loader.cut_nodes(torch.arange(1, 1 + int(graph.parts[1])))
    for batch in (joined, shifted):
        with pytest.raises(ValueError, match=r"which aren't parts of the sampler's graph"):
            sampler.weight(batch)


def steps(model, graph, loader, sampler):
    """Return an epoch as a program writes it, and the parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    for batch in loader:
        own = batch.own
        if not own.train_mask.any():
            with torch.no_grad():
                model(batch)
            continue
        loss = losses_of(model(batch), own)
        sampler.report(batch, loss)
        optimizer.zero_grad()
        ((sampler.weight(batch) * loss).sum() * len(loader)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{"by": "loss", "share": 0.6, "every": 3}])
@pytest.mark.parametrize("prefetch", [False, True])
def test_train_epoch_is_the_loop_by_hand(options, prefetch):
    found = []
    for by_hand in (True, False):
        graph, model = made()
        loader, sampler = loader_of(graph, **options)
        torch.manual_seed(5)
        for _ in range(3):
            if by_hand:
                after = steps(model, graph, loader, sampler)
                continue
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            ahead = gas.PrefetchLoader(loader, model) if prefetch else loader
            train_epoch(model, ahead, optimizer)
            after = [p.detach().clone() for p in model.parameters()]
        found.append((after, sampler.state_dict()))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0][1]["loss"], found[1][1]["loss"], equal_nan=True)
    assert torch.equal(found[0][1]["drawn_at"], found[1][1]["drawn_at"])


def test_all_labelled_parts_once_are_scaled_as_without_a_sampler():
    """Parts without labels have no gradient; in order, the steps are the same."""
    found = []
    for sampled in (True, False):
        graph, model = made()
        loader = gas.SubgraphLoader(graph, log=False)
        if sampled:
            loader, _ = loader_of(graph, batch_size=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.eval()
        grads = [torch.zeros_like(p) for p in model.parameters()]

        def add(grads=grads, model=model):
            for total, parameter in zip(grads, model.parameters(), strict=True):
                total += parameter.grad
            return torch.zeros(())

        optimizer.step = add
        train_epoch(model, loader, optimizer, scale_loss=True, refresh_unlabelled=False)
        # A step's gradient is scaled by the number of steps, over which their mean is taken.
        found.append([grad / len(loader) for grad in grads])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


# Checkpoints --------------------------------------------------------------------------------------


def training(ahead=False, **options):
    graph, model = made()
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(7) if options.pop("own", False) else None
    loader, sampler = loader_of(graph, generator=generator, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if ahead:
        loader = gas.PrefetchLoader(loader, model)
    return (model, optimizer, loader), graph, sampler


def curve(parts, graph, sampler, epochs, stop=None, save=None):
    model, optimizer, loader = parts
    found = []
    for _ in range(epochs):
        model.train()
        for batch in loader:
            own = batch.own
            loss = losses_of(model(batch), own)
            if not loss.numel():
                continue
            sampler.report(batch, loss)
            optimizer.zero_grad()
            (sampler.weight(batch) * loss).sum().backward()
            optimizer.step()
            found.append((parts_in(graph, batch), float(loss.detach().mean())))
            if len(found) == stop:
                save()
                return found
    return found


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize(("own", "ahead"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    "options",
    [{}, {"every": 4}, {"by": "staleness", "share": 0.4}, {"by": "loss", "share": 0.6, "every": 2}],
)
def test_goes_on_bit_by_bit(options, own, ahead, tmp_path):
    options = {**options, "own": own, "ahead": ahead}
    expected = curve(*training(**options), epochs=5)
    for stop in (2, 5):
        parts, graph, sampler = training(**options)
        folder = tmp_path / str(stop)
        before = curve(parts, graph, sampler, 5, stop, lambda p=parts, f=folder: gas.save(f, *p))
        parts, graph, sampler = training(**options)
        torch.manual_seed(99)  # As another process.
        list(sampler)
        gas.load(folder, *parts)
        after = curve(parts, graph, sampler, 6)
        assert (before + after)[: len(expected)] == expected


def test_a_checkpoint_of_another_sampler_is_refused(tmp_path):
    graph, model = made()
    loader, sampler = loader_of(graph, every=3)
    plain = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    gas.save(tmp_path / "sampler", model, loader=loader)
    gas.save(tmp_path / "plain", model, loader=plain)
    for folder, other, why in (
        ("sampler", plain, "'loader' has no PartSampler"),
        ("plain", loader, "'loader' has a PartSampler, other than what was saved"),
        ("sampler", loader_of(graph, every=4)[0], "whose 'every' is 4, but it was 3"),
        ("sampler", loader_of(graph, by="staleness")[0], "whose 'by' is 'staleness'"),
    ):
        with pytest.raises(ValueError, match=why):
            gas.load(tmp_path / folder, model, loader=other)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert "sampler" not in plain.state_dict()  # As before there were samplers.


def test_of_several_splits_one():
    graph, _ = made()
    graph.train_mask = torch.stack([graph.train_mask, ~graph.train_mask], dim=1)
    assert len(PartSampler(graph)) == 5
    assert len(PartSampler(graph, split=1)) == PARTS


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {"sampler": True}])
def test_inference_with_a_training_loader_leaves_its_epochs(options):
    """It visits all parts in order, whichever the loader draws, and draws nothing from it."""
    graph = gas.cluster(random_graph(), 7, log=False)
    model = gas.to_scalable(SAGEConv(5, 3), graph)

    def train(with_inference):
        generator = torch.Generator().manual_seed(0)
        chosen = {key: value for key, value in options.items() if key != "sampler"}
        if "sampler" in options:
            chosen["sampler"] = gas.PartSampler(
                graph, by="staleness", share=0.5, generator=generator
            )
        loader = gas.SubgraphLoader(graph, batch_size=2, generator=generator, log=False, **chosen)
        seen = []
        for _ in range(3):
            seen += [batch.offset.tolist() for batch in loader]
            if with_inference:
                torch.testing.assert_close(model.predict(loader), outputs)
                model.refresh(loader, log=False)
                gas.evaluate(model, loader)
                model.staleness(loader)
        return seen

    outputs = model.predict(graph)
    assert train(True) == train(False)
