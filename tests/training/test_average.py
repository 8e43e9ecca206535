"""Averaged weights: their recurrence, the model that has them, checkpoints, and ``gas.fit``."""

import copy

import pytest
import torch
from torch_geometric.nn import GraphSAGE

import gas
from gas.training import AveragedWeights, steps_per_epoch


def make(lr=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 3, dtype=torch.double)).square().mean().backward()
    optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def test_recurrence():
    model, optimizer = make()
    average = AveragedWeights(model, optimizer, 4)
    expected = values(model)
    for number in range(1, 30):
        step(model, optimizer)
        decay = min(3 / 4, number / (10 + number))  # Shorter at the start.
        expected = [
            decay * old + (1 - decay) * new
            for old, new in zip(expected, values(model), strict=True)
        ]
    before = values(model)
    with average.in_model():
        torch.testing.assert_close(values(model), expected, rtol=1e-13, atol=0)
        assert not torch.equal(model.weight, before[0])
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    with pytest.raises(KeyError), average.in_model():
        raise KeyError
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    average.load_into_model()
    torch.testing.assert_close(values(model), expected, rtol=1e-13, atol=0)


def test_of_one_step_nothing_is_kept():
    model, optimizer = make()
    average = AveragedWeights(model, optimizer, 1)
    assert not average.is_on
    assert not optimizer._optimizer_step_post_hooks
    step(model, optimizer)
    before = values(model)
    with average.in_model():
        torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    average.load_into_model()
    average.stop()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    assert average.state_dict() == {"average": [], "steps": 0}
    AveragedWeights(model, object(), 1)  # Whatever the optimizer is.


def test_weights_of_half_precision_are_averaged_in_float32():
    model, optimizer = make(lr=0.0)
    model.bfloat16()
    model.register_parameter("count", torch.nn.Parameter(torch.tensor(3), requires_grad=False))
    average = AveragedWeights(model, optimizer, 1000)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for _ in range(9):
        optimizer.step()
    with torch.no_grad():
        model.weight.add_(1 / 128)  # The next number of bfloat16.
    for _ in range(300):  # Changes of each step round to nothing in bfloat16.
        optimizer.step()
    with average.in_model():
        assert float(model.weight.detach().min()) == 1 + 1 / 128
    assert int(model.count) == 3


def test_an_average_that_has_stopped_ignores_steps():
    model, optimizer = make()
    average = AveragedWeights(model, optimizer, 8)
    step(model, optimizer)
    state = copy.deepcopy(average.state_dict())
    average.stop()
    step(model, optimizer)
    assert average.state_dict()["steps"] == state["steps"] == 1
    torch.testing.assert_close(average.state_dict(), state, rtol=0, atol=0)


def test_a_restored_average_goes_on_as_before():
    model, optimizer = make()
    average = AveragedWeights(model, optimizer, 8)
    for _ in range(3):
        step(model, optimizer)
    other, its_optimizer = copy.deepcopy(model), None
    its_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    restored = AveragedWeights(other, its_optimizer, 8)
    restored.load_state_dict(copy.deepcopy(average.state_dict()))
    for pair in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(1)
        step(*pair)
    torch.testing.assert_close(restored.state_dict(), average.state_dict(), rtol=0, atol=0)


def test_the_optimizer_must_be_one_of_pytorch():
    with pytest.raises(ValueError, match="'optimizer' is of type object"):
        AveragedWeights(torch.nn.Linear(1, 1), object(), 2)


@pytest.mark.parametrize(
    ("loader", "options", "steps"),
    [
        (range(7), {}, 7),
        (range(7), {"micro_batches": 2}, 4),
        (range(7), {"micro_batches": 2, "max_steps": 3}, 3),
        (iter([]), {"max_steps": 5}, 5),
        (iter([]), {}, float("inf")),  # Not known.
    ],
)
def test_steps_of_an_epoch_are_counted(loader, options, steps):
    assert steps_per_epoch(loader, **options) == steps


def train(num_parts, **options):
    data, in_channels, out_channels = gas.get_data("", "planted:600")
    torch.manual_seed(0)
    net = GraphSAGE(in_channels, 16, 2, out_channels, dropout=0.5, norm="batch_norm")
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_parts, model=model, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    after_epochs = []
    run = gas.fit(
        model, graph, optimizer, 3, batch_size=min(2, num_parts), keep_best=False, log=False,
        on_epoch=lambda run: after_epochs.append(values(model)), **options,
    )  # fmt: skip
    assert not optimizer._optimizer_step_post_hooks
    return run, model, graph, after_epochs


def test_fit_scores_and_keeps_the_average():
    run, model, graph, weights = train(8)
    plain, its, its_graph, its_weights = train(8, average_weights=False)
    torch.testing.assert_close(its_weights[-1], values(its), rtol=0, atol=0)
    torch.testing.assert_close(weights[-1], values(model), rtol=0, atol=0)  # As scored.
    assert run.loss[0] == plain.loss[0]  # The first epoch is trained alike.
    assert gas.evaluate(model, graph)["val"] == pytest.approx(run.val_acc[-1])
    assert gas.evaluate(its, its_graph)["val"] == pytest.approx(plain.val_acc[-1])


def test_a_full_batch_has_nothing_to_average():
    run, model, *_ = train(1)
    other, its, *_ = train(1, average_weights=False)
    assert run.loss == other.loss
    assert run.val_acc == other.val_acc
    torch.testing.assert_close(values(model), values(its), rtol=0, atol=0)
