"""The epoch loop of the examples and benchmarks."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from gas.loader import EvalSubgraphLoader, SubData
from gas.scalable import ScalableGNN
from gas.subgraph import dropout as edge_dropout_of_matrix
from gas.subgraph import num_rows
from gas.training.metrics import metric_of, score


@dataclass
class Run:
    """What happened in one run, one entry per epoch.

    ``train_acc``, ``val_acc`` and ``test_acc`` are accuracies, as fractions, or another score where
    the data asks for one.
    ``age`` is the mean number of pushes since a history's rows were written, at the epoch's end;
    ``moved_bytes`` are those of stored rows that were read and written in training.
    """

    loss: list[float] = field(default_factory=list)
    train_acc: list[float] = field(default_factory=list)
    val_acc: list[float] = field(default_factory=list)
    test_acc: list[float] = field(default_factory=list)
    age: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    history_bytes: int = 0
    moved_bytes: list[int] = field(default_factory=list)

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 0, of the highest validation accuracy."""
        return self.val_acc.index(max(self.val_acc))

    @property
    def epoch_seconds(self) -> float:
        """The median time of a training epoch, evaluation apart."""
        return statistics.median(self.seconds)


class FullBatch:
    """The whole graph as one batch without a halo, for full-batch training and evaluation.

    It is an epoch of that one batch, and a function of a model.

    Args:
        data: The graph.
        device: Where to keep it. (default: ``"cpu"``)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"csr"``)
    """

    def __init__(self, data: Data, device: torch.device | str = "cpu", layout: str = "csr") -> None:
        whole = torch.tensor([0, data.num_nodes])
        loader = EvalSubgraphLoader(data, whole, log=False, layout=layout)
        self.data = next(iter(loader)).data.to(device)

    def __call__(self, model: ScalableGNN, fill: bool = False) -> Tensor:
        """Computes every node's output, of shape ``[N, C]``."""
        x, adj_t, kwargs = model.inputs_of(self.data)
        return model(x, adj_t, fill=fill, **kwargs)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[SubData]:
        empty = torch.empty(0, dtype=torch.long)
        yield SubData(self.data, self.data.num_nodes, empty, empty, empty)


def split_mask(mask: Tensor, split: int) -> Tensor:
    """The mask of one split, of shape ``[N]``; runs beyond the last split start over."""
    return mask if mask.dim() == 1 else mask[:, split % mask.size(1)]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """The usual loss for targets ``y``, the mean over its rows.

    Cross entropy for classes of shape ``[n]``, binary cross entropy for labels of shape ``[n, C]``,
    squared error for real numbers of shape ``[n]``.
    """
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    if y.is_floating_point():
        return F.mse_loss(out.view(-1), y.to(out.dtype))
    return F.cross_entropy(out, y)


def train_epoch(
    model: ScalableGNN,
    loader: Iterable[SubData],
    optimizer: torch.optim.Optimizer,
    split: int = 0,
    grad_norm: float | None = None,
    full_batch: bool = False,
    refresh_unlabelled: bool = True,
    *,
    micro_batches: int = 1,
    scale_loss: bool = False,
    edge_dropout: float = 0.0,
    max_steps: int | None = None,
    autocast: torch.dtype | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> float:
    """Trains on every batch once; returns the mean loss per labelled node.

    A model's ``reg_loss`` (see :class:`gas.models.GIN`) is added to the loss.

    Args:
        model: The model.
        loader: The mini-batches.
        optimizer: Steps once per ``micro_batches`` batches.
        split: Which split of ``train_mask`` to use. (default: ``0``)
        grad_norm: Clip the norm of the gradient to this. (default: no clipping)
        full_batch: The batch is the whole graph, without histories. (default: ``False``)
        refresh_unlabelled: Run batches without labelled nodes forward, without gradient, so that
            their rows in the histories do not go stale. (default: ``True``)
        micro_batches: Accumulate the gradients of this many batches before each step, at the
            memory of one: the gradient is that of the mean over all their labelled nodes.
            (default: ``1``)
        scale_loss: Weigh each step by its number of labelled nodes, relative to the mean over the
            epoch's steps, so that every labelled node counts alike. Needs a loader with a length.
            (default: a step is the mean over its labelled nodes, however few)
        edge_dropout: Drop each edge of a batch with this probability; see :func:`gas.dropout`.
            (default: ``0.0``)
        max_steps: End the epoch after this many steps. (default: every batch)
        autocast: Run the forward pass in this type where PyTorch considers it safe.
            (default: no)
        loss_fn: The mean loss of outputs and targets. (default: :func:`loss_of`)
    """
    if micro_batches < 1:
        raise ValueError(f"'micro_batches' is {micro_batches}, expected at least 1")
    model.train()
    total, labelled = 0.0, 0
    per_step = _labels_per_step(loader, split, micro_batches) if scale_loss else None
    batches = iter(loader)
    steps = 0
    while max_steps is None or steps < max_steps:
        group = list(itertools.islice(batches, micro_batches))
        if not group:
            break
        steps += 1
        counts = [int(_train_mask(batch, split).sum()) for batch in group]
        if sum(counts):
            optimizer.zero_grad()
        for batch, count in zip(group, counts, strict=True):
            if count == 0 and not refresh_unlabelled:
                continue
            data = batch.data.to(model.device)
            x, adj_t, kwargs = model.inputs_of(data)
            if edge_dropout > 0:
                adj_t, kwargs = _drop_edges(adj_t, kwargs, edge_dropout)
            args: tuple[Any, ...] = () if full_batch else batch[1:]
            with torch.set_grad_enabled(count > 0), _autocast(model.device, autocast):
                out = model(x, adj_t, *args, **kwargs)
            if count == 0:
                continue
            mask = _train_mask(batch, split).to(out.device)
            out = out[mask] if autocast is None else out[mask].float()
            loss = loss_fn(out, data.y[: batch.batch_size][mask])
            total += float(loss.detach()) * count
            labelled += count
            weight = count / (sum(counts) if per_step is None else per_step)
            objective = loss * weight + getattr(model, "reg_loss", 0.0) / len(group)
            objective.backward()
        if sum(counts):
            if grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
            optimizer.step()
    return total / max(labelled, 1)


def _train_mask(batch: SubData, split: int) -> Tensor:
    return split_mask(batch.data.train_mask[: batch.batch_size], split)


def _labels_per_step(loader: Iterable[SubData], split: int, micro_batches: int) -> float:
    """The mean number of labelled nodes per step of an epoch."""
    inner = getattr(loader, "loader", loader)  # Of a PrefetchLoader.
    data = getattr(inner, "data", None)
    if data is None or not isinstance(inner, Sized):
        raise ValueError(
            "'scale_loss' is True, but 'loader' doesn't say how many batches and labels it has: "
            "pass a SubgraphLoader"
        )
    return int(split_mask(data.train_mask, split).sum()) * micro_batches / max(len(inner), 1)


def _drop_edges(adj_t: Any, kwargs: dict[str, Any], p: float) -> tuple[Any, dict[str, Any]]:
    if num_rows(adj_t) is not None:
        return edge_dropout_of_matrix(adj_t, p), kwargs
    keep = torch.rand(adj_t.size(1), device=adj_t.device) >= p
    kept = {key: value[keep] for key, value in kwargs.items()}
    if "edge_weight" in kept:
        kept["edge_weight"] = kept["edge_weight"] / (1 - p)
    return adj_t[:, keep], kept


def _autocast(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def mean_age(model: ScalableGNN) -> float:
    """The mean age of all rows of all histories, in pushes; 0 without histories."""
    ages = [stale.mean_age for stale in model.staleness()]
    return statistics.fmean(ages) if ages else 0.0


def fit(
    model: ScalableGNN,
    data: Data,
    epoch: Callable[[], float],
    evaluate: Callable[[ScalableGNN], Tensor],
    epochs: int,
    split: int = 0,
    on_epoch: Callable[[Run], None] | None = None,
    metric: str | None = None,
    patience: int | None = None,
) -> Run:
    """Trains for some epochs and evaluates after each.

    Args:
        model: The model.
        data: The whole graph, for its labels and masks.
        epoch: Trains one epoch and returns its loss.
        evaluate: Returns every node's output, of shape ``[N, C]``; it may refresh the histories.
        epochs: The number of epochs.
        split: Which split of the masks to use. (default: ``0``)
        on_epoch: Called after each epoch with the run so far.
        metric: The score; see :func:`gas.training.score`. (default: the usual one for ``data.y``)
        patience: Stop once the validation score has not risen for this many epochs.
            (default: never)
    """
    if patience is not None and patience < 1:
        raise ValueError(f"'patience' is {patience}, expected at least 1 epoch")
    run = Run()
    curves = {key: getattr(run, f"{key}_acc") for key in ("train", "val", "test")}
    masks = {key: split_mask(data[f"{key}_mask"], split).cpu() for key in curves}
    y = data.y.cpu()
    metric = metric or metric_of(y)
    for _ in range(epochs):
        start, moved = time.perf_counter(), model.moved_bytes
        run.loss.append(epoch())
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        run.seconds.append(time.perf_counter() - start)
        run.moved_bytes.append(model.moved_bytes - moved)
        run.age.append(mean_age(model))
        model.eval()
        with torch.no_grad():
            out = evaluate(model).cpu()
        for key, curve in curves.items():
            curve.append(score(metric, out, y, masks[key]))
        if on_epoch is not None:
            on_epoch(run)
        if patience is not None and len(run.loss) - 1 - run.best_epoch >= patience:
            break
    return run
