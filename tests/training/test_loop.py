import math

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.nn import GraphConv, SAGEConv

import gas
from gas.training import (
    FullBatch,
    Progress,
    Run,
    loss_of,
    mean_age,
    run_epochs,
    split_mask,
    train_epoch,
)


def make(num_parts=4, **kwargs):
    data = T.GCNNorm()(random_graph(directed=False))
    data.val_mask = data.test_mask = ~data.train_mask
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    model = gas.models.GCN(60, 5, 8, 3, 2, **kwargs)
    return data, ptr, model


def test_micro_f1():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([0, 1, 1, 1])
    assert gas.training.compute_micro_f1(logits, y) == 0.75
    assert gas.training.compute_micro_f1(logits, y, torch.tensor([True, False, True, False])) == 0.5
    assert gas.training.compute_micro_f1(logits, y, torch.zeros(4, dtype=torch.bool)) == 0
    unknown = torch.tensor([0, -1, 1, -1])  # They don't count.
    assert gas.training.compute_micro_f1(logits, unknown) == 0.5
    assert gas.training.compute_micro_f1(logits, torch.full((4,), -1)) == 0
    labels = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 0]])
    # Predicted: 11 01 10 01; hits 3, predicted 5, actual 4.
    assert gas.training.compute_micro_f1(logits, labels) == pytest.approx(2 * 3 / (5 + 4))
    assert gas.training.compute_micro_f1(-logits.abs(), labels * 0) == 0


def test_micro_f1_agrees_with_precision_and_recall():
    logits, y = torch.randn(50, 7), (torch.rand(50, 7) < 0.3).long()
    hits = ((logits > 0) & (y == 1)).sum() / 1.0
    precision, recall = hits / (logits > 0).sum(), hits / y.sum()
    expected = 2 * precision * recall / (precision + recall)
    assert gas.training.compute_micro_f1(logits, y) == pytest.approx(float(expected))


def test_splits():
    masks = torch.eye(4, 3, dtype=torch.bool)
    assert torch.equal(split_mask(masks, 4), masks[:, 1])
    assert torch.equal(split_mask(masks[:, 0], 4), masks[:, 0])


def test_losses():
    out = torch.randn(6, 3)
    y = torch.randint(3, (6,))
    assert torch.equal(loss_of(out, y), torch.nn.functional.cross_entropy(out, y))
    labels = torch.rand(6, 3) < 0.5
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out, labels.float())
    assert torch.equal(loss_of(out, labels), expected)
    for targets in (y.float(), y[:1].float()):  # The second would be broadcast.
        with pytest.raises(ValueError, match=r"numbers to predict, .* data.y = data.y.long\(\)"):
            loss_of(out, targets)


def test_one_part_trains_as_the_full_batch_does():
    data, _, model = make()
    whole = FullBatch(data)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), log=False)
    states = []
    for batches, full in ((loader, False), (whole, True)):
        torch.manual_seed(0)
        model.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = train_epoch(model, batches, optimizer, grad_norm=1.0, full_batch=full)
        states.append([loss, *(p.detach().clone() for p in model.parameters())])
    assert states[0][0] == pytest.approx(states[1][0])
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(*[s[1:] for s in states], strict=True)
    )


def test_training_learns_and_repeats():
    data, ptr, model = make(dropout=0.2)
    data.y = data.x[:, :3].argmax(dim=1)
    curves = []
    for _ in range(2):
        torch.manual_seed(3)
        model.reset_parameters()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        whole = FullBatch(data)
        whole(model.eval(), fill=True)
        loader = gas.SubgraphLoader(data, ptr, 2, shuffle=True, log=False)
        calls = []
        run = run_epochs(
            model,
            data,
            lambda: train_epoch(model, loader, optimizer),  # noqa: B023
            lambda model: whole(model, fill=True),  # noqa: B023
            epochs=15,
            on_epoch=lambda run: calls.append(len(run.loss)),  # noqa: B023
        )
        assert calls == list(range(1, 16))
        curves.append(run)
    assert curves[0].loss == curves[1].loss
    assert curves[0].val_acc == curves[1].val_acc
    assert curves[0].loss[-1] < 0.85 * curves[0].loss[0]
    assert all(0 < age < 4 for age in curves[0].age)  # Two batches per epoch and a refresh.
    assert len(curves[0].seconds) == 15


def test_classes_of_any_type():
    out, y = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
    for dtype in (torch.bool, torch.int32, torch.uint8):
        assert loss_of(out, y.to(dtype)) == loss_of(out, y)


def test_clipping_bounds_the_step():
    data, _, model = make()
    loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), log=False)
    before = [p.detach().clone() for p in model.parameters()]
    train_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=1.0), grad_norm=1e-3)
    after = [p.detach() for p in model.parameters()]
    moved = sum(float((a - b).pow(2).sum()) for a, b in zip(after, before, strict=True))
    assert moved**0.5 == pytest.approx(1e-3, rel=1e-3)


def test_the_loss_of_one_labelled_node_is_its_own():
    data, _, model = make()
    data.train_mask = torch.arange(60) == 7
    loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), log=False)
    out = model(data.x, data.edge_index, edge_weight=data.edge_weight)
    loss = train_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    assert loss == pytest.approx(loss_of(out[7:8], data.y[7:8]).item(), rel=1e-5)


def test_batches_without_labels_refresh_the_histories():
    data, ptr, model = make()
    data.train_mask[: int(ptr[1])] = False  # The first part has none.
    FullBatch(data)(model.eval(), fill=True)
    assert mean_age(model) == 0
    loader = gas.SubgraphLoader(data, ptr, 1, log=False)
    train_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    assert int(model.histories[0].age.max()) == 3  # Every part was pushed, the first one first.
    assert int(model.histories[0].age[0]) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_epoch(model, loader, optimizer, refresh_unlabelled=False)
    assert int(model.histories[0].age[0]) == 6


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_training_in_every_layout(layout):
    data, ptr, model = make()
    FullBatch(data)(model.eval(), fill=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout)
    loss = train_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    twin = make()[2]
    twin.load_state_dict(before)
    FullBatch(data)(twin.eval(), fill=True)
    plain = gas.SubgraphLoader(data, ptr, 2, log=False, layout="csr")
    expected = train_epoch(twin, plain, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert loss == pytest.approx(expected)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_mean_age_without_histories():
    assert mean_age(gas.ScalableGNN(4, 8, 1)) == 0


def test_run_picks_the_best_epoch():
    run = Run(val_acc=[0.5, 0.8, 0.8], test_acc=[0.1, 0.2, 0.3], seconds=[3.0, 1.0, 2.0])
    assert run.best_epoch == 1
    assert run.epoch_seconds == 2.0
    nan = float("nan")
    assert Run(val_acc=[nan, 0.1, 0.3, nan]).best_epoch == 2
    assert Run(val_acc=[nan, nan]).best_epoch == 1  # The last, if none is known.


class NoStep(torch.optim.SGD):
    """Keeps the gradient of every step, and takes none."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.seen = []

    def step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients]))


def gradients_of(model, loader, **options):
    optimizer = NoStep(model.parameters())
    loss = train_epoch(model, loader, optimizer, **options)
    return loss, optimizer.seen


def exact(data, model):
    """Exact histories, so that a batch's gradient doesn't depend on those before it."""
    FullBatch(data)(model.eval(), fill=True)
    return model


@pytest.mark.parametrize("micro", [2, 3, 4, 9])
def test_micro_batches_accumulate_the_mean_over_labels(micro):
    data, ptr, model = make()
    loader = gas.SubgraphLoader(data, ptr, 1, log=False)
    loss, single = gradients_of(exact(data, model), loader)
    counts = [int(batch.data.train_mask[: batch.batch_size].sum()) for batch in loader]
    assert len(set(counts)) > 1
    total, several = gradients_of(exact(data, model), loader, micro_batches=micro)
    assert total == pytest.approx(loss)
    assert len(several) == -(-4 // micro)
    for number, found in enumerate(several):
        group = slice(number * micro, (number + 1) * micro)
        parts = zip(single[group], counts[group], strict=True)
        expected = sum(g * n for g, n in parts) / sum(counts[group])
        assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="'micro_batches' is 0, expected an integer"):
        train_epoch(model, loader, NoStep(model.parameters()), micro_batches=0)


def test_scaled_losses_weigh_every_label_alike():
    data, ptr, model = make()
    loader = gas.SubgraphLoader(data, ptr, 1, log=False)
    _, plain = gradients_of(exact(data, model), loader)
    counts = [int(batch.data.train_mask[: batch.batch_size].sum()) for batch in loader]
    for batches in (loader, gas.PrefetchLoader(loader, model)):
        _, scaled = gradients_of(exact(data, model), batches, scale_loss=True)
        for mine, other, count in zip(scaled, plain, counts, strict=True):
            assert torch.allclose(mine, other * count / (sum(counts) / 4), atol=1e-6)
    for micro, steps in ((2, 2), (3, 2)):
        _, scaled = gradients_of(exact(data, model), loader, scale_loss=True, micro_batches=micro)
        assert len(scaled) == steps
        for number, mine in enumerate(scaled):
            group = slice(number * micro, (number + 1) * micro)
            parts = zip(plain[group], counts[group], strict=True)
            expected = sum(g * n for g, n in parts) / (sum(counts) / steps)
            assert torch.allclose(mine, expected, atol=1e-6)
    with pytest.raises(ValueError, match="'scale_loss' is True, but 'loader' doesn't say how many"):
        train_epoch(model, list(loader), NoStep(model.parameters()), scale_loss=True)


@pytest.mark.parametrize("scale_loss", [True, False])
def test_a_graph_without_a_mask_is_refused(scale_loss):
    data, ptr, model = make()
    del data.train_mask
    loader = gas.SubgraphLoader(data, ptr, log=False)
    with pytest.raises(ValueError, match="the graph has no 'train_mask', which says what to"):
        train_epoch(model, loader, NoStep(model.parameters()), scale_loss=scale_loss)


def test_the_regulariser_of_a_model_is_added():
    data, ptr, _ = make()
    model = gas.models.GIN(60, 5, 8, 3, 2, noise=0.5)
    loader = gas.SubgraphLoader(data, ptr, 4, log=False, edge_weight=False)
    torch.manual_seed(0)
    _, (found,) = gradients_of(model, loader)
    torch.manual_seed(0)
    ((batch, *args),) = loader
    out = model(batch.x, batch.adj_t, *args)
    mask = batch.train_mask
    loss = loss_of(out[mask], batch.y[mask])
    for objective, equal in ((loss, False), (loss + model.reg_loss, True)):
        wanted = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        expected = torch.cat([gradient.flatten() for gradient in wanted])
        assert torch.allclose(found, expected, atol=1e-6) == equal


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_edge_dropout(layout):
    """It is that of the whole batch, and right on average."""
    data, ptr, model = make()
    exact(data, model)
    loader = gas.SubgraphLoader(data, ptr, 4, log=False, layout=layout)
    seen = []
    model.convs[0].register_forward_pre_hook(lambda m, args: seen.append(args[1:3]))
    train_epoch(model, loader, NoStep(model.parameters()), edge_dropout=0.5)
    adj_t, weight = seen[0]
    values = {
        "csr": lambda: adj_t.values(), "edge_index": lambda: weight, "fused": lambda: adj_t.value
    }[layout]()  # fmt: skip
    edges = values.numel()
    total = data.edge_index.size(1)
    assert 0.35 * total < edges < 0.65 * total
    known = data.edge_weight.unique()
    assert bool(((values[:, None] / 2 - known).abs().amin(dim=1) < 1e-6).all())


def test_unweighted_edges_are_dropped_alike_in_every_layout():
    """Ones are no weights: a mean over what is left stays a mean."""
    data = random_graph(directed=False)
    data.train_mask = torch.ones(60, dtype=torch.bool)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    for layout in ("csr", "edge_index", "fused"):
        loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), layout=layout, log=False)
        seen = []
        hook = model.convs[0].lin_l.register_forward_pre_hook(lambda m, x: seen.append(x[0]))  # noqa: B023
        data.x = torch.ones(60, 5)
        train_epoch(model, loader, NoStep(model.parameters()), edge_dropout=0.5)
        hook.remove()
        assert set(seen[0].detach().unique().tolist()) == {0.0, 1.0}


def test_micro_batches_use_what_was_prefetched(monkeypatch):
    data, ptr, model = make(prefetch=1)
    exact(data, model)
    started, used = [], []
    start, take = gas.scalable.start_pulls, gas.scalable.call.take_started_pulls
    monkeypatch.setattr(
        gas.scalable.prefetch, "start_pulls", lambda *args: started.append(1) or start(*args)
    )
    monkeypatch.setattr(
        gas.scalable.call, "take_started_pulls", lambda *args: used.append(1) or take(*args)
    )
    batches = gas.PrefetchLoader(gas.SubgraphLoader(data, ptr, 1, log=False), model)
    train_epoch(model, batches, NoStep(model.parameters()), micro_batches=2)
    assert len(used) == 4
    assert len(started) == 3  # All but the first, before which there is no batch.
    assert not model._started_pulls


def test_the_most_steps_of_an_epoch():
    data, ptr, model = make()
    loader = gas.SubgraphLoader(data, ptr, 1, log=False)
    _, seen = gradients_of(exact(data, model), loader, max_steps=3)
    assert len(seen) == 3
    _, seen = gradients_of(exact(data, model), loader, max_steps=1, micro_batches=2)
    assert len(seen) == 1


def test_losses_of_real_numbers():
    out, y = torch.randn(6, 1), torch.randn(6)
    assert loss_of(out, y) == pytest.approx(float((out[:, 0] - y).pow(2).mean()))


def test_a_loss_of_ones_own_takes_outputs_in_its_own_shape():
    data = random_graph()
    data.y = torch.randn(60)
    model = gas.models.GraphSAGE(60, 5, 8, 1, 2)
    graph = gas.cluster(data, 4, model=model, log=False)
    loader = gas.SubgraphLoader(graph, log=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model.refresh(graph, log=False)
    losses = [
        train_epoch(model, loader, optimizer, loss_fn=loss)
        for loss in (loss_of, lambda out, y: torch.nn.functional.mse_loss(out.view(-1), y))
    ]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("layout", ["edge_index", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_autocast_with_every_codec(dtype, layout):
    data, ptr, model = make(dtype=dtype, batch_norm=True)
    exact(data, model)
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout)
    seen = []
    model.convs[1].lin.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    plain, _ = gradients_of(model, loader)
    loss, gradients = gradients_of(model, loader, autocast=torch.bfloat16)
    assert torch.bfloat16 in seen
    assert 0 < abs(loss - plain) < 0.03 * plain
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = [train_epoch(model, loader, optimizer, autocast=torch.bfloat16) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]


def test_autocast_with_csr_says_what_to_do():
    data, ptr, model = make()
    exact(data, model)
    loader = gas.SubgraphLoader(data, ptr, 2, log=False)
    with pytest.raises(RuntimeError, match="multiply by bfloat16 .* load with layout='edge_index'"):
        gradients_of(model, loader, autocast=torch.bfloat16)


def test_batches_with_views():
    data, ptr, model = make()
    raw = data.edge_subgraph(data.edge_index[0] != data.edge_index[1])
    raw.edge_weight = None
    exact(data, model)
    drop = gas.augment.DropEdge(raw, p=0.3)
    options = {"epoch_transform": drop, "graph_transform": T.GCNNorm(), "log": False}
    loader = gas.SubgraphLoader(raw, torch.tensor([0, 60]), **options)
    losses = []

    def view_loss(logits, first, second, y, labelled):
        losses.append((logits, first, second))
        return gas.augment.mh_aug_loss(logits, first, second, y, labelled, kl=0.3)

    drop.run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = train_epoch(model, loader, optimizer, view_loss=view_loss)
    (outs,) = losses
    mask = data.train_mask
    assert loss == pytest.approx(
        float(gas.augment.mh_aug_loss(*outs, data.y, mask, kl=0.3).detach())
    )
    with pytest.raises(ValueError, match="'edge_dropout' is 0.5, but batches have views"):
        train_epoch(model, loader, optimizer, edge_dropout=0.5)
    parts = gas.SubgraphLoader(raw, ptr, **options)
    plain = gas.SubgraphLoader(data, ptr, log=False)
    one, other = (gas.training.activation_bytes(model, each.cut([0, 1])) for each in (parts, plain))
    assert 2 * other < one < 4 * other


def test_a_full_batch_stays_as_it_was():
    data = random_graph()
    full = FullBatch(data)
    (batch,) = full
    del batch.data.y
    (batch,) = full
    batch.data.x.mul_(2)
    for use in (lambda: list(full), lambda: full(None)):
        with pytest.raises(ValueError, match="a tensor of the full batch was changed in place"):
            use()


def test_a_graph_without_labels_leaves_the_model_in_its_mode():
    data, ptr, model = make()
    del data.y
    loader = gas.SubgraphLoader(data, ptr, log=False)
    optimizer = torch.optim.Adam(model.eval().parameters())
    with pytest.raises(ValueError, match="the graph has no 'y'"):
        train_epoch(model, loader, optimizer)
    assert not model.training


def test_the_last_step_of_a_loader_without_a_length_is_counted():
    data, ptr, model = make()
    loader = gas.SubgraphLoader(data, ptr[[0, 1, 2, 4]], log=False)
    progress, steps = Progress(), []

    class Batches:
        def __iter__(self):
            return iter(loader)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data.x, data.edge_index, fill=True, edge_weight=data.edge_weight)
    train_epoch(
        model, Batches(), optimizer, micro_batches=2, progress=progress,
        on_step=lambda: steps.append((progress.batches, progress.steps)),
    )  # fmt: skip
    assert steps == [(2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (torch.tensor([0.5, math.nan, 1.5, 0.0]).repeat(15), "15 nodes with a target that is unkn"),
        (torch.tensor([0, 1, -100]).repeat(20), "20 nodes with a target that is unknown"),
        (torch.rand(60, 3), "loss=torch.nn.functional.mse_loss"),
    ],
)
def test_targets_that_the_loss_takes_for_others_are_refused_before_a_step(y, said):
    data, ptr, model = make()
    data.y, data.train_mask = y, torch.ones(60, dtype=torch.bool)
    loader = gas.SubgraphLoader(data, ptr, log=False)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        train_epoch(model, loader, torch.optim.Adam(model.parameters()))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_sparse_gradients_are_clipped_like_dense_ones(micro_batches):
    class Embedded(gas.ScalableGNN):
        def __init__(self, sparse):
            super().__init__(60, 4, 2)
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(60, 5, sparse=sparse)
            self.convs = torch.nn.ModuleList([GraphConv(5, 4), GraphConv(4, 3)])

        def forward(self, x, adj_t, *args):
            x, (first, last) = self.table(x.view(-1)), self.convs
            x = first((x, x[: adj_t.size(0)]), adj_t).relu()
            x = self.push_and_pull(self.histories[0], x, *args)
            return last((x, x[: adj_t.size(0)]), adj_t)

    data = random_graph(directed=False)
    data.x = torch.arange(60).view(60, 1) // 2  # Rows of the table are used more than once.
    graph = gas.cluster(data, 4, log=False)
    dense, sparse = models = Embedded(False), Embedded(True)
    for model in models:
        loader = gas.SubgraphLoader(graph, batch_size=4 // micro_batches, log=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.refresh(loader, log=False)
        train_epoch(model, loader, optimizer, grad_norm=0.01, micro_batches=micro_batches)
    assert not torch.equal(dense.table.weight, Embedded(False).table.weight)
    for one, other in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"grad_norm": 0.01}, {}])
def test_learned_features_take_the_same_step_as_weights(options):
    """Their gradients are divided by the labelled nodes, and clipped, like those of weights."""
    data = random_graph(directed=False)
    data.val_mask = data.test_mask = ~data.train_mask
    torch.manual_seed(0)
    net = SAGEConv(5, 3)
    features = torch.nn.Parameter(data.x.clone())
    out = net(features, data.edge_index)[data.train_mask]
    torch.nn.functional.cross_entropy(out, data.y[data.train_mask]).backward()
    expected = [features.grad, *(each.grad.clone() for each in net.parameters())]
    if "grad_norm" in options:
        norm = torch.stack([each.norm() for each in expected]).norm()
        expected = [each * (options["grad_norm"] / norm) for each in expected]
    net.zero_grad()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    graph.x = torch.nn.Parameter(graph.x.clone())
    weights = [graph.x, *model.parameters()]
    before = [each.detach().clone() for each in weights]
    size = 1 if "micro_batches" in options else 4
    loader = gas.SubgraphLoader(graph, batch_size=size, log=False)
    train_epoch(model, loader, torch.optim.SGD(weights, lr=1.0), **options)
    steps = [old - new.detach() for old, new in zip(before, weights, strict=True)]
    steps[0] = steps[0][graph.perm.argsort()]
    for step, gradient in zip(steps, expected, strict=True):
        torch.testing.assert_close(step, gradient)
