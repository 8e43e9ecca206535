"""The learning rate of the first epochs of ``gas.fit``."""

import pytest
import torch
from conftest import random_graph

import gas
from gas.training import Progress, raise_rate


class Watched(torch.optim.SGD):
    """SGD that notes the rate of its steps."""

    def step(self, closure=None):
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


def rates_of(num_parts=4, epochs=20, scheduler=None, **options):
    """Return the rates of all steps, and the optimizer."""
    torch.manual_seed(0)
    data = random_graph(num_nodes=60, num_edges=200, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    data.train_mask = data.val_mask = data.test_mask = torch.ones(60, dtype=torch.bool)
    model = gas.models.GIN(60, data.num_features, 8, 3, 2)
    graph = gas.cluster(data, num_parts, model=model, method="random", log=False)
    torch.optim.SGD(model.parameters())  # From now on, the hooks are called by both steps.
    optimizer = Watched(model.parameters(), lr=0.1)
    optimizer.seen = []
    made = None if scheduler is None else scheduler(optimizer)
    batch_size = min(2, num_parts)
    gas.fit(
        model, graph, optimizer, epochs, batch_size=batch_size, scheduler=made, log=False, **options
    )
    return optimizer.seen, optimizer


def test_the_rate_rises_by_steps():
    rates, optimizer = rates_of(warm_up=2)
    assert rates == pytest.approx([0.025, 0.05, 0.075, *[0.1] * 37])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_is_scaled():
    rates, optimizer = rates_of(
        warm_up=2, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5)
    )
    assert rates[:6] == pytest.approx([0.025, 0.05, 0.0375, 0.05, 0.025, 0.025])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**20)


@pytest.mark.parametrize("options", [{"warm_up": 0}, {"num_parts": 1}, {"epochs": 9}])
def test_it_can_be_left_out(options):
    rates, _ = rates_of(**options)  # Of a full batch, and of less than ten epochs, it is.
    assert rates == pytest.approx([0.1] * len(rates))


def step_rate(epochs, progress, steps):
    """Return the rate of a step, relative to the optimizer's own."""
    seen = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    with raise_rate(optimizer, 5, epochs, progress, steps):
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    return seen[0] / 2


@pytest.mark.parametrize(("epochs", "expected"), [(9, 1.0), (10, 0.5), (29, 0.25), (90, 0.1)])
def test_it_is_at_most_a_tenth_of_the_epochs(epochs, expected):
    assert step_rate(epochs, Progress(), steps=2) == pytest.approx(expected)


def test_a_step_that_fails_leaves_the_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), raise_rate(optimizer, 5, 50, Progress(), 2):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_an_epoch_of_unknown_length_rises_by_epochs():
    rates = [step_rate(50, Progress(epoch=epoch), float("inf")) for epoch in range(1, 8)]
    assert rates == pytest.approx([0.02, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
