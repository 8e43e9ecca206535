"""``gas.fit``: training of a model on a clustered graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import PERM, check_nodes, known_target_mask, open_if_path, to_original_order
from gas.loader import EvalSubgraphLoader, SubgraphLoader
from gas.native import check_flags, check_integer, check_names, report_progress
from gas.scalable import ScalableGNN, graph_of, is_tracked, refresh_and_predict
from gas.training.callbacks import Callback, CallbackList, check_metrics
from gas.training.epochs import run_epochs
from gas.training.full_batch import FullBatch, make_full_batch
from gas.training.loop import (
    check_homogeneous,
    check_loader,
    check_options,
    check_trainable,
    train_epoch,
)
from gas.training.metrics import (
    Metric,
    check_known_targets,
    check_metric,
    check_metric_name,
    check_usual_loss,
    loss_of,
    split_mask,
)
from gas.training.optimizer_hooks import (
    AveragedWeights,
    check_hooks,
    check_state,
    choose_warm_up,
    load_kept_weights,
    raise_rate,
    steps_per_epoch,
)
from gas.training.record import Progress, Run


@check_flags
def fit(
    model: ScalableGNN,
    graph: Data | SubgraphLoader,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *, batch_size: int | None = None, grad_norm: float | None = 1.0,
    correct_drift: bool = True, average_weights: bool = True, warm_up: int | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None, metric: Metric | None = None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] | None = None,
    scheduler: Any = None, callbacks: Sequence[Callback] = (),
    split: int = 0, evaluate_every: int = 1, patience: int | None = None, keep_best: bool = True,
    log: bool = True, on_epoch: Callable[[Run], None] | None = None,
    **options: Any,
) -> Run:  # fmt: skip
    """Train a model on a clustered graph, evaluate it, and end with the best weights.

    ::

        graph = gas.cluster(data, num_parts=512, model=model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run = gas.fit(model, graph, optimizer, epochs=50, batch_size=64)
        print(run.test_acc[run.best_epoch])

    The histories are filled before the first epoch and at the end. Every evaluation sets the
    running statistics of batch norms to those of the whole graph, as
    :meth:`gas.ScalableGNN.refresh` does, and computes the outputs in the same inference. Graphs of
    up to 20,000 nodes and 3 million edges are evaluated as one batch; larger ones layer by layer,
    which also fills the histories. A graph of one part, without augmentation, is trained as a full
    batch, without histories. Use :func:`train_epoch` for a loop of your own.

    Args:
        model: The model.
        graph: What :func:`gas.cluster` has returned, with ``y``, ``train_mask`` and, for the best
            epoch and early stopping, ``val_mask``; or a loader of it. Scores by a mask that is
            missing, or whose nodes have no known target, are NaN.
        optimizer: The optimizer of the model's parameters.
        epochs: The number of epochs.
        batch_size: Parts per mini-batch; many small parts mix better than few large ones.
            (default: ``graph.batch_size``, or ``1``)
        grad_norm: Clip the norm of the gradient to this, which keeps training with stale rows
            from oscillating; ``None`` doesn't clip. (default: ``1.0``)
        correct_drift: See :func:`train_epoch`. (default: ``True``)
        average_weights: Evaluate, and keep, the average of the weights over about the last epoch's
            steps, which is better and steadier than the weights after any of them. Training goes on
            with the weights themselves. (default: ``True``)
        warm_up: Raise the learning rate linearly over this many steps: in the first steps, all
            stored rows are stale, and at a high rate a model without a norm can get stuck at
            predicting one class. Not for a full batch. (default: ``40``, or ``0`` if the model has
            a batch norm for each history)
        loss: The mean loss of outputs and targets of labelled nodes, such as
            ``torch.nn.CrossEntropyLoss(weight=...)`` with a weight for each class.
            (default: the usual one for ``y``; see :func:`gas.training.loss_of`)
        metric: The score, of which the best epoch has the highest on the validation nodes: one of
            :data:`gas.training.METRICS`, or a function of outputs and targets.
            (default: that of :func:`gas.evaluate`)
        metrics: Further scores by name, functions of outputs and targets such as those of
            torchmetrics; ``run.metrics`` has their curves, as ``"val_NAME"``. (default: none)
        scheduler: A scheduler of ``torch.optim.lr_scheduler``, stepped after each epoch;
            ``ReduceLROnPlateau(optimizer, mode="max")`` gets the validation score. A callback's
            ``on_step_end`` steps a scheduler by step. (default: a constant learning rate)
        callbacks: What is called during training; see :class:`gas.training.Callback` and
            :class:`gas.training.MetricLogger`, for experiment trackers. (default: none)
        split: Which split of masks of shape ``[N, S]``. (default: ``0``)
        evaluate_every: Evaluate after every so many epochs, and after the last. Scores of the
            epochs between are NaN. On millions of nodes, an evaluation takes longer than an epoch.
            (default: ``1``)
        patience: Stop once the validation score has not risen for this many epochs.
            (default: never)
        keep_best: Load the weights of the epoch with the best validation score at the end, not
            those of the last. (default: ``True``)
        log: Report progress on standard error, every ten seconds. (default: ``True``)
        on_epoch: Called after each epoch with the record so far. The model then has the weights
            that are scored, and norms the statistics of the last evaluation. (default: nothing)
        **options: Further arguments of :func:`train_epoch`, such as ``autocast``.

    Returns:
        The record, a :class:`gas.training.Run`, with an entry per epoch.

    Raises:
        ValueError: If an argument is unusable, naming it.
        FloatingPointError: If training diverges. The model then has the weights of the best epoch
            before, if there is one.
    """
    options, warm_up = _check(
        model, optimizer, epochs, evaluate_every, warm_up, patience, metric, loss, grad_norm,
        keep_best, options,
    )  # fmt: skip
    check_metrics({} if metrics is None else metrics)
    called = CallbackList(callbacks, optimizer, scheduler, on_epoch, options.pop("on_step", None))
    loader, table = _open(graph, batch_size, split, bool(keep_best or patience), metric, options)
    full, inference = make_full_batch(model, loader), make_inference_loader(loader)
    is_whole = loader.ptr.numel() == 2 and loader.augmentation is None  # Trained as a full batch.
    batches = full if is_whole and full is not None else loader
    run, progress = Run(split=split), Progress()

    epoch = partial(
        train_epoch, model, batches, optimizer, split, grad_norm, is_whole, progress=progress,
        correct_drift=correct_drift, on_step=partial(called.on_step_end, progress), **options,
    )  # fmt: skip
    has_norms = not is_whole and any(map(is_tracked, model.modules()))

    def report(run: Run) -> bool:
        ticker.done = len(run)
        ticker.note = _format_epoch(run)
        with average.in_model():
            return called.on_epoch_end(run)

    steps = steps_per_epoch(batches, options.get("micro_batches", 1), options.get("max_steps"))
    average = AveragedWeights(model, optimizer, steps if average_weights else 1)
    try:
        called.on_fit_start(model, optimizer)
        if not is_whole:
            model.train().refresh(inference, norms=has_norms, log=False)
        with (
            report_progress("training", epochs, log) as ticker,
            raise_rate(optimizer, 0 if is_whole else warm_up, progress, steps),
        ):
            run_epochs(
                model, table, epoch, partial(_evaluate, full, inference, has_norms), epochs, split,
                report, metric, patience, options.get("leave_cores", True), keep_best, run,
                progress, average, metrics, evaluate_every,
            )  # fmt: skip
        return run
    finally:
        run.history_bytes = sum(history.store.nbytes for history in model.histories)
        try:
            load_kept_weights(model, run, average, inference, has_norms)
        finally:
            called.on_fit_end(run)


def _evaluate(
    full: FullBatch | None, inference: EvalSubgraphLoader, has_norms: bool, model: ScalableGNN
) -> Tensor:
    """Set running statistics, and compute every node's output.

    Evaluation of the whole graph at once leaves the histories as they are; layer by layer, it fills
    them.
    """
    if has_norms:
        model.train()
        if full is None:
            out = refresh_and_predict(model, inference)
        else:
            out = full.refresh_and_predict(model)
        model.eval()
    elif full is None:
        return model.eval().predict(inference, log=False)
    else:
        out = full(model.eval())
    return to_original_order(inference.data, out.cpu())


def _check(
    model: ScalableGNN,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    evaluate_every: int,
    warm_up: int | None,
    patience: int | None,
    metric: Metric | None,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    grad_norm: float | None,
    keep_best: bool,
    options: dict[str, Any],
) -> tuple[dict[str, Any], int]:
    """Refuse unusable arguments; return the options of :func:`train_epoch`, and ``warm_up``."""
    check_homogeneous(model)
    if not isinstance(getattr(model, "_orig_mod", model), ScalableGNN):  # Also a compiled one.
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN of a homogeneous "
            "graph in one process: convert it by gas.to_scalable, or write the loop with "
            "gas.train_epoch"
        )
    if model.ranks is not None:
        raise ValueError(
            "'model' is distributed, and gas.fit trains in one process: write the loop with "
            "gas.train_epoch and gas.evaluate, which average gradients and gather outputs"
        )
    check_integer("epochs", epochs, 1)
    check_integer("evaluate_every", evaluate_every, 1)
    if warm_up is not None:
        check_integer("warm_up", warm_up, 0)
    warm_up = choose_warm_up(model, warm_up)
    check_trainable(model, optimizer)
    if warm_up > 0:
        check_hooks(optimizer, "warm_up=0")
    if patience is not None:
        check_integer("patience", patience, 1)
    check_metric_name(metric)
    if loss is not None and "loss_fn" in options:
        raise ValueError("'loss' and 'loss_fn' are given, of which one is the loss: leave one out")
    parameters = inspect.signature(train_epoch).parameters.values()
    known = {"refresh_unlabelled", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    check_names(options, known - {"progress"}, "gas.fit, nor one that it passes to gas.train_epoch")
    options = options if loss is None else {**options, "loss_fn": loss}
    names = ("micro_batches", "max_steps", "autocast", "loss_fn", "edge_dropout")
    check_options(grad_norm, **{name: options[name] for name in names if name in options})
    if keep_best:
        check_state(model)
    return options, warm_up


def _open(
    graph: Any,
    batch_size: int | None,
    split: int,
    needs_val: bool,
    metric: Metric | None,
    options: Mapping[str, Any],
) -> tuple[SubgraphLoader, Data]:
    """Return a loader of a clustered graph, and its labels and masks in the original order."""
    graph, loss_fn = open_if_path(graph, "graph"), options.get("loss_fn", loss_of)
    if isinstance(graph, SubgraphLoader):
        check_loader(graph, loss_fn, options.get("view_loss"))
        if batch_size is not None:
            raise ValueError(
                f"'batch_size' is {batch_size}, but 'graph' is a loader, which has its own: leave "
                "'batch_size' out, or pass the graph"
            )
    elif not isinstance(graph, Data):
        raise ValueError(
            f"'graph' is a {type(graph).__name__}, expected what gas.cluster returns, or a "
            "gas.SubgraphLoader of it"
        )
    elif options.get("view_loss") is not None or options.get("bank", "original") != "original":
        name = "bank" if options.get("view_loss") is None else "view_loss"
        raise ValueError(
            f"{name!r} is given, but 'graph' has no views: leave it out, or pass a loader "
            "with an augmentation, gas.SubgraphLoader(graph, epoch_transform=gas.MHAug(graph))"
        )
    table = _labels_in_original_order(graph_of(graph), split, needs_val, loss_fn)
    if isinstance(metric, str):  # Of classes, it is checked with the first outputs.
        check_metric(metric, table.y, 1 if table.y.dim() == 1 else table.y.size(1))
    if loss_fn is loss_of:
        check_usual_loss(table.y)
    if not isinstance(graph, SubgraphLoader):  # A loader sets batch_size of the graph.
        graph = SubgraphLoader(graph, batch_size=batch_size, shuffle=True, log=False)
    if graph.trainable:
        raise ValueError(
            f"{graph.trainable[0]!r} of the graph requires a gradient, but gas.fit evaluates, "
            "averages and keeps the model's own parameters alone: detach() it, make it a parameter "
            "of the model, such as an Embedding, or write a loop with gas.train_epoch"
        )
    return graph, table


def make_inference_loader(loader: SubgraphLoader) -> EvalSubgraphLoader:
    """Return a loader of all nodes of another loader's graph, in order."""
    return EvalSubgraphLoader(
        loader.data, loader.ptr, loader.parts_per_batch, layout=loader.layout,
        edge_weight=loader.edge_weight, like=loader, log=False,
    )  # fmt: skip


def _format_epoch(run: Run) -> str:
    """Format the last epoch for the line of progress."""
    scores = [score for score in run.val_acc if not math.isnan(score)]
    note = f"loss {run.loss[-1]:.4f}" + (f", validation {scores[-1]:.4f}" if scores else "")
    drift = run.drift[-1]
    return note + (f", stored rows moved by {drift:.0%} on average" if math.isfinite(drift) else "")


def _labels_in_original_order(graph: Data, split: int, needs_val: bool, loss_fn: Any) -> Data:
    """Check the labels and masks of a clustered graph, and return them in its original order.

    Masks that no choice depends on may be missing, and then have no node.
    """
    if PERM not in graph:
        raise ValueError(
            "'graph' has no 'perm': expected the graph of gas.cluster(data, num_parts)"
        )
    check_nodes(graph, graph[PERM].numel())
    for name in ("y", "train_mask", *["val_mask"] * needs_val):
        if graph.get(name) is None:
            raise ValueError(
                f"'graph' has no {name!r}, by which nodes are trained and scored: set it before "
                "gas.cluster"
            )
    columns = graph.train_mask.shape[1:]
    check_integer("split", split, 0, columns[0] - 1 if columns else None)
    if not bool(split_mask(graph.train_mask, split).any()):
        raise ValueError("'train_mask' has no node, and nothing would be learnt: set it")
    if needs_val and not bool(split_mask(graph.val_mask, split).any()):
        raise ValueError(
            "'val_mask' has no node, by which the best epoch is chosen: set it, or pass "
            "keep_best=False"
        )
    y = graph.y.cpu()
    check_known_targets(y, split_mask(graph.train_mask, split).cpu(), loss_fn)
    known = known_target_mask(y).view(y.size(0), -1).any(dim=1)
    if needs_val and not bool((split_mask(graph.val_mask, split).cpu() & known).any()):
        raise ValueError(
            "'val_mask' has no node with a known target, by which the best epoch is chosen: set "
            "others, or pass keep_best=False"
        )
    none = torch.zeros_like(graph.train_mask, dtype=torch.bool)
    found = {name: graph.get(name) for name in ("train_mask", "val_mask", "test_mask")}
    found = {"y": y} | {name: none if mask is None else mask for name, mask in found.items()}
    return Data(**{name: to_original_order(graph, rows.cpu()) for name, rows in found.items()})
