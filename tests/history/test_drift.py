"""Correction of stale rows by how far a batch's own rows have moved."""

import copy
import math

import pytest
import torch
from conftest import random_graph
from torch_geometric.nn import GraphSAGE

import gas
from gas.history import DriftCorrection, measure_staleness
from gas.training import train_epoch


def make_history(rows):
    history = gas.History(*rows.shape)
    history.push(rows)
    return history


def test_rows_that_have_not_changed_are_left_exactly_as_they_are():
    torch.manual_seed(0)
    rows = torch.randn(50, 8) * torch.logspace(-3, 3, 8)
    rows[:, 3] = 0  # A channel that is always 0.
    rows[:, 4] = 7
    n_id = torch.randperm(50)
    correct = DriftCorrection().measure(make_history(rows), rows[n_id[:20]], n_id)
    halo = rows[n_id[20:]].clone()
    correct(halo)
    assert torch.equal(halo, rows[n_id[20:]])


def test_rounding_is_no_change():
    torch.manual_seed(0)
    rows = torch.randn(50, 8) * torch.logspace(-3, 3, 8)
    own = rows[:20] * (1 + 1e-6 * torch.randn(20, 8))
    correct = DriftCorrection().measure(make_history(rows), own, torch.arange(50))
    halo = rows[20:].clone()
    correct(halo)
    assert torch.equal(halo, rows[20:])
    correct = DriftCorrection().measure(make_history(rows), own * 1.001, torch.arange(50))
    correct(halo)
    assert not (halo == rows[20:]).all(0).any()


@pytest.mark.parametrize(
    ("pushes", "share"),
    [([0, 1], 1 / 2), ([0, 1, 0], 1), ([1, 0], 1), ([0, 1, 1, 2], (2 + 1) / 2 / 4)],
    ids=["younger", "as old", "older", "partly younger"],
)
def test_the_halo_follows_by_its_age(pushes, share):
    """Own rows 0 to 29 and both halves of the halo are pushed in turn; the halo's others first."""
    torch.manual_seed(0)
    rows, ids = torch.randn(90, 4), (torch.arange(30), torch.arange(30, 60), torch.arange(60, 90))
    history, n_id = gas.History(90, 4), torch.arange(90 if 2 in pushes else 60)
    history.push(rows)
    for each in pushes:
        history.push(rows[ids[each]], ids[each])
    own = rows[:30] * 3 + torch.tensor([1.0, -2.0, 0.0, 5.0])
    correct = DriftCorrection().measure(history, own, n_id)
    halo = rows[30:].clone()
    correct(halo)
    whole_way = rows[30:] * 3 + torch.tensor([1.0, -2.0, 0.0, 5.0])
    expected = rows[30:] + share * (whole_way - rows[30:])
    lowest = torch.minimum(own, rows[:30]).amin(0)
    torch.testing.assert_close(halo, torch.maximum(expected, lowest))


def test_ages_are_exact_after_many_pushes():
    """Float32 has no number next to 50 million but four away."""
    torch.manual_seed(0)
    rows, history = torch.randn(60, 4), gas.History(60, 4)
    written_at = torch.tensor([50_000_001] * 30 + [50_000_003] * 30, dtype=torch.int32)
    history.restore([(torch.arange(60), rows)], written_at, 50_000_003)
    correct = DriftCorrection().measure(history, rows[:30] + 1, torch.arange(60))
    torch.testing.assert_close(correct.offset, torch.full((4,), 1 / 3))


def test_rows_after_a_relu_stay_so():
    torch.manual_seed(0)
    rows = torch.randn(200, 16).relu()
    own = (rows[:100] - 0.7).relu()
    correct = DriftCorrection().measure(make_history(rows), own, torch.arange(200))
    halo = rows[100:].clone()
    correct(halo)
    assert halo.min() == 0
    assert (halo.mean(0) < rows[100:].mean(0)).all()


def test_a_channel_is_scaled_by_five_at_most():
    rows = torch.tensor([[-1.0], [1.0], [0.5]])
    own = rows[:2] * 1000
    correct = DriftCorrection().measure(make_history(rows), own, torch.arange(3))
    assert correct.scale.tolist() == [5.0]


def test_large_batches_are_sampled_evenly():
    torch.manual_seed(0)
    rows = torch.randn(6000, 2)
    drift = DriftCorrection()
    own = rows[:5000] + 1
    own[1::5] = math.nan  # Not among each fifth row from the first.
    correct = drift.measure(make_history(rows), own, torch.arange(6000))
    torch.testing.assert_close(correct.offset, torch.tensor([1.0, 1.0]))
    now = torch.cat([own[::5].std(0), own[::5].mean(0)])
    assert drift.mean() == pytest.approx(math.sqrt(2) / float(now.norm()))  # Means moved by 1.


def test_noise_of_single_rows_is_no_drift():
    torch.manual_seed(0)
    rows = torch.randn(5000, 2) + 3
    drift = DriftCorrection()
    drift.measure(make_history(rows), torch.randn(5000, 2) + 3, torch.arange(5000))
    assert drift.mean() < 0.03


def test_nothing_is_measured_where_nothing_can_be():
    drift = DriftCorrection()
    history = gas.History(4, 2)
    history.push(torch.ones(2, 2), torch.arange(2))
    assert drift.measure(history, torch.ones(2, 2), torch.arange(2)) is None  # Two never written.
    history.push(torch.ones(2, 2), torch.tensor([2, 3]))
    assert drift.measure(history, torch.ones(1, 2), torch.arange(1)) is None  # Has no deviation.
    assert math.isnan(drift.mean())
    assert drift.measure(history, torch.ones(2, 2), torch.arange(2)) is not None
    assert drift.mean() == 0


# In training --------------------------------------------------------------------------------------


def make_model(dropout=0.0, own_layers=False):
    torch.manual_seed(0)
    data = random_graph(num_nodes=120, num_edges=480, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    data.train_mask = torch.arange(120) % 2 == 0
    if own_layers:
        model = gas.models.GCN(
            data.num_nodes, data.num_features, 8, 3, num_layers=3, dropout=dropout
        )
    else:
        net = GraphSAGE(data.num_features, 8, num_layers=3, out_channels=3, dropout=dropout)
        model = gas.to_scalable(net, data)
    return model, gas.cluster(data, 6, model=model, method="random", log=False)


@pytest.mark.parametrize("own_layers", [False, True])
def test_fixed_weights_give_the_same_loss(own_layers):
    losses = []
    for correct_drift in (False, True):
        model, graph = make_model(own_layers=own_layers)
        model.refresh(graph, log=False)
        loader = gas.SubgraphLoader(graph, batch_size=2, log=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses.append(train_epoch(model, loader, optimizer, correct_drift=correct_drift))
        assert model._drift is None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("own_layers", [False, True])
def test_a_batch_reads_corrected_rows(own_layers):
    """Compared with histories whose halo rows were corrected by hand."""
    model, graph = make_model(own_layers=own_layers)
    model.train()
    model.refresh(graph, log=False)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
    before = [history.emb.clone() for history in model.histories]
    ages = [history.age + 1.0 for history in model.histories]
    shares = [min(1.0, float(age[halo].mean() / age[own].mean())) for age in ages]

    by_hand = copy.deepcopy(model)
    for layer, history in enumerate(by_hand.histories):
        by_hand(batch)  # Stores this layer's own rows, as the layers before are corrected already.
        new, old = history.emb[own].clone(), before[layer][own]
        scale = (new.std(0) / old.std(0)).where(old.std(0) > 0, torch.ones(())).clamp(0.2, 5)
        whole_way = before[layer][halo] * scale + new.mean(0) - scale * old.mean(0)
        moved = before[layer][halo] + shares[layer] * (whole_way - before[layer][halo])
        history.emb[halo] = torch.maximum(moved, torch.minimum(new.amin(0), old.amin(0)))
    expected = by_hand(batch)

    plain = copy.deepcopy(model)(batch)
    assert not model._is_proven  # The first call of all, as after a resumption, is no other.
    with model._correct_drift(True):
        out = model(batch)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, plain, rtol=0.01, atol=0.01)
    for history, rows in zip(model.histories, before, strict=True):
        assert torch.equal(history.emb[halo], rows[halo])  # Stored rows stay.


def test_read_only_calls_and_views_are_left():
    model, graph = make_model()
    model.refresh(graph, log=False)
    with torch.no_grad():
        model.histories[0].emb.add_(1)
    loader = gas.SubgraphLoader(
        graph, batch_size=2, log=False, epoch_transform=gas.augment.DropEdge(graph, 0.3)
    )
    batch = next(iter(loader))
    model.views(batch)
    views = copy.deepcopy(model).views(batch)
    expected = model(batch, push=False)
    with model._correct_drift(True) as drift:
        assert torch.equal(model(batch, push=False), expected)
        for out, before in zip(model.views(batch), views, strict=True):
            assert torch.equal(out, before)
    assert math.isnan(drift.mean())


def test_training_records_the_drift():
    model, graph = make_model(dropout=0.5)
    graph.val_mask = graph.test_mask = ~graph.train_mask
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = gas.fit(model, graph, optimizer, 3, batch_size=2, log=False)
    assert len(run.drift) == 3
    assert all(0 < each < 10 for each in run.drift)
    run = gas.fit(model, graph, optimizer, 2, batch_size=2, log=False, correct_drift=False)
    assert all(math.isnan(each) for each in run.drift)


def test_the_error_of_rows_is_relative_to_the_exact_ones():
    stored = make_history(torch.full((4, 3), 1.5))
    exact = make_history(torch.full((4, 3), 2.0))
    found = measure_staleness(1, stored, exact)
    assert (found.layer, found.mean_age, found.error) == (1, 0.0, 0.25)
