"""The learning rate of the first epochs of ``gas.fit``."""

import math

import pytest
import torch
from conftest import random_graph

import gas
from gas.training import Progress, choose_warm_up, raise_rate


class Watched(torch.optim.SGD):
    """SGD that notes the rate of its steps, at their start and end."""

    seen, after = [], []

    def step(self, closure=None):
        self.seen.append(self.param_groups[0]["lr"])
        super().step(closure)
        self.after.append(self.param_groups[0]["lr"])


def rates_of(num_parts=4, epochs=3, scheduler=None, batch_norm=False, **options):
    """Return the rates of all steps, and the optimizer."""
    torch.manual_seed(0)
    data = random_graph(num_nodes=60, num_edges=200, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    data.train_mask = data.val_mask = data.test_mask = torch.ones(60, dtype=torch.bool)
    model = gas.models.GIN(60, data.num_features, 8, 3, 2, batch_norm=batch_norm)
    graph = gas.cluster(data, num_parts, model=model, method="random", log=False)
    torch.optim.SGD(model.parameters())  # From now on, the hooks are called by both steps.
    optimizer = Watched(model.parameters(), lr=0.1)
    del Watched.seen[:], Watched.after[:]
    made = None if scheduler is None else scheduler(optimizer)
    batch_size = min(2, num_parts)
    gas.fit(
        model, graph, optimizer, epochs, batch_size=batch_size, scheduler=made, log=False, **options
    )
    return list(optimizer.seen), optimizer


def test_the_rate_rises_by_steps():
    rates, optimizer = rates_of(warm_up=4)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_is_scaled():
    rates, optimizer = rates_of(
        warm_up=4, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5)
    )
    assert rates == pytest.approx([0.025, 0.05, 0.0375, 0.05, 0.025, 0.025])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_the_rate_is_scaled_until_a_subclass_has_ended_its_step():
    rates, _ = rates_of(warm_up=4)
    assert Watched.after == rates


@pytest.mark.parametrize("options", [{"warm_up": 0}, {"num_parts": 1}])
def test_it_can_be_left_out(options):
    rates, _ = rates_of(**options)  # Of a full batch, it is.
    assert rates == pytest.approx([0.1] * len(rates))


def test_a_model_with_batch_norms_learns_at_once():
    rates, _ = rates_of(batch_norm=True)
    assert rates == [0.1] * 6
    rates, _ = rates_of()
    assert rates == pytest.approx([0.1 * step / 40 for step in range(1, 7)])
    rates, _ = rates_of(batch_norm=True, warm_up=4)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_each_history_needs_a_batch_norm():
    model = gas.ScalableGNN(10, 4, num_layers=3)
    assert choose_warm_up(model, None) == 40
    model.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4)])
    assert choose_warm_up(model, None) == 40
    model.norms.append(torch.nn.BatchNorm1d(4))
    assert choose_warm_up(model, None) == 0
    assert choose_warm_up(model, 7) == 7
    alone = gas.ScalableGNN(10, 4, num_layers=1)  # Without histories.
    assert choose_warm_up(alone, None) == 40


def first_rate(warm_up, progress, steps):
    """Return the rate of a step, relative to the optimizer's own."""
    seen = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    with raise_rate(optimizer, warm_up, progress, steps):
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    return seen[0] / 2


def test_the_rate_of_a_step_follows_from_its_number():
    progress = Progress(epoch=3, steps=4)
    assert first_rate(40, progress, 7) == pytest.approx((2 * 7 + 4 + 1) / 40)
    assert first_rate(19, progress, 7) == first_rate(10, progress, 7) == 1.0


def test_epochs_of_unknown_length_rise_in_the_first():
    rates = [first_rate(40, Progress(epoch=n, steps=9), math.inf) for n in (1, 2, 3)]
    assert rates == pytest.approx([0.25, 1.0, 1.0])


def test_a_step_that_fails_leaves_the_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), raise_rate(optimizer, 5, Progress(epoch=1), 2):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_a_loop_without_numbers_of_epochs_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    with pytest.raises(ValueError, match="'progress' has no number of the epoch"):
        first_rate(5, Progress(), 2)
    assert optimizer.param_groups[0]["lr"] == 2.0
