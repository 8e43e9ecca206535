"""The epoch loop of the examples and benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from gas.loader import EvalSubgraphLoader, SubData
from gas.scalable import ScalableGNN
from gas.training.metrics import compute_micro_f1


@dataclass
class Run:
    """What happened in one run, one entry per epoch; accuracies are fractions.

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
    """The whole graph as one batch without a halo, for full-batch training and evaluation."""

    def __init__(self, data: Data, device: torch.device | str = "cpu") -> None:
        whole = torch.tensor([0, data.num_nodes])
        self.data = next(iter(EvalSubgraphLoader(data, whole, log=False))).data.to(device)

    def __call__(self, model: ScalableGNN, fill: bool = False) -> Tensor:
        """Computes every node's output, of shape ``[N, C]``."""
        return model(self.data.x, self.data.adj_t, fill=fill)

    def batches(self) -> Iterator[SubData]:
        """Yields the graph as an epoch of one batch."""
        empty = torch.empty(0, dtype=torch.long)
        yield SubData(self.data, self.data.num_nodes, empty, empty, empty)


def split_mask(mask: Tensor, split: int) -> Tensor:
    """The mask of one split, of shape ``[N]``; runs beyond the last split start over."""
    return mask if mask.dim() == 1 else mask[:, split % mask.size(1)]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy for one class per node, binary cross entropy for several labels."""
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    return F.cross_entropy(out, y)


def train_epoch(
    model: ScalableGNN,
    loader: Iterable[SubData],
    optimizer: torch.optim.Optimizer,
    split: int = 0,
    grad_norm: float | None = None,
    full_batch: bool = False,
    refresh_unlabelled: bool = True,
) -> float:
    """Trains on every batch once; returns the mean loss per labelled node.

    Args:
        model: The model.
        loader: The mini-batches.
        optimizer: Steps once per batch.
        split: Which split of ``train_mask`` to use. (default: ``0``)
        grad_norm: Clip the norm of the gradient to this. (default: no clipping)
        full_batch: The batch is the whole graph, without histories. (default: ``False``)
        refresh_unlabelled: Run batches without labelled nodes forward, without gradient, so that
            their rows in the histories do not go stale. (default: ``True``)
    """
    model.train()
    total = 0.0
    labelled = 0
    for batch in loader:
        data, batch_size = batch.data.to(model.device), batch.batch_size
        args: tuple[Any, ...] = () if full_batch else batch[1:]
        mask = split_mask(data.train_mask[:batch_size], split)
        count = int(mask.sum())
        x, adj_t, kwargs = model.inputs_of(data)
        if count == 0:
            if refresh_unlabelled:
                with torch.no_grad():
                    model(x, adj_t, *args, **kwargs)
            continue
        optimizer.zero_grad()
        out = model(x, adj_t, *args, **kwargs)
        loss = loss_of(out[mask], data.y[:batch_size][mask])
        loss.backward()
        if grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
        optimizer.step()
        total += float(loss.detach()) * count
        labelled += count
    return total / max(labelled, 1)


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
    """
    run = Run()
    curves = {key: getattr(run, f"{key}_acc") for key in ("train", "val", "test")}
    masks = {key: split_mask(data[f"{key}_mask"], split).cpu() for key in curves}
    y = data.y.cpu()
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
            curve.append(compute_micro_f1(out, y, masks[key]))
        if on_epoch is not None:
            on_epoch(run)
    return run
