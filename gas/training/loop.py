"""The epoch loop of the examples and benchmarks."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.augment import mh_aug_loss
from gas.graph.features import with_csr_features
from gas.graph.versions import Versions
from gas.history.cores import share_cores
from gas.loader import EvalSubgraphLoader
from gas.loader.batch import SubData, tensors
from gas.loader.moving import moved_tensor
from gas.loader.sampler import sampler_of
from gas.scalable.model import ScalableGNN
from gas.training.metrics import metric_of, score
from gas.training.objective import Objective, loss_of, split_mask
from gas.training.run import Best, Progress, Run


class FullBatch:
    """The whole graph as one batch without a halo, for full-batch training and evaluation.

    It is an epoch of that one batch, and a function of a model.

    Args:
        data: The graph.
        device: Where to keep it. (default: ``"cpu"``)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"csr"``)
        edge_weight: See :class:`gas.SubgraphLoader`. (default: ``True``)
    """

    def __init__(
        self,
        data: Data,
        device: torch.device | str = "cpu",
        layout: str = "csr",
        edge_weight: bool = True,
    ) -> None:
        data = with_csr_features(data)
        whole = torch.tensor([0, data.num_nodes])
        options: dict[str, Any] = {"layout": layout, "edge_weight": edge_weight, "log": False}
        loader = EvalSubgraphLoader(data, whole, **options)
        self.data = next(iter(loader)).to(device).data
        self._versions = Versions(tensors(self.data))

    def __call__(self, model: ScalableGNN, fill: bool = False) -> Tensor:
        """Computes every node's output, of shape ``[N, C]``."""
        self._check()
        x, adj_t, kwargs = model.inputs_of(self.data)
        return model(x, adj_t, fill=fill, **kwargs)

    def _check(self) -> None:
        if self._versions.changed():
            raise ValueError(
                "a tensor of the full batch was changed in place, perhaps by the model's forward: "
                "expected the graph as it was, for the next epoch; change a clone() of it"
            )

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[SubData]:
        empty = torch.empty(0, dtype=torch.long)
        self._check()
        yield SubData(copy.copy(self.data), self.data.num_nodes, empty, empty, empty)


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
    view_loss: Callable[..., Tensor] = mh_aug_loss,
    bank: str = "original",
    leave_cores: bool = True,
    progress: Progress | None = None,
    on_step: Callable[[], None] | None = None,
) -> float:
    """Trains on every batch once; returns the mean loss per labelled node.

    A model's ``reg_loss`` (see :class:`gas.models.GIN`) is added to the loss. Batches with views
    (``SubgraphLoader(..., epoch_transform=...)``) are trained by ``view_loss``; those without
    labelled nodes refresh the histories alone.

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
            epoch's steps, so that every labelled node counts alike; with a
            :class:`gas.loader.PartSampler`, by its weights, too, as is always so where that draws
            parts by their loss. Needs a loader with a length.
            (default: a step is the mean over its labelled nodes, however few)
        edge_dropout: Drop each edge of a batch with this probability; see :func:`gas.drop_edges`.
            (default: ``0.0``)
        max_steps: End the epoch after this many steps. (default: every batch)
        autocast: Run the forward pass in this type where PyTorch considers it safe.
            (default: no)
        loss_fn: The mean loss of outputs and targets. (default: :func:`loss_of`)
        view_loss: The loss of batches with views, of the outputs for the original graph and for
            each view, the targets, and the positions of labelled nodes.
            (default: :func:`gas.augment.mh_aug_loss`)
        bank: Which histories views have; see :meth:`gas.ScalableGNN.views`.
            (default: ``"original"``)
        leave_cores: Leave cores to other processes that keep them busy: the epoch then takes
            fewer of PyTorch's threads, see :func:`gas.training.share_cores`. Sums of PyTorch's
            own may be rounded otherwise then, unless it has one thread from the start.
            (default: ``True``)
        progress: How far the epoch has come, when it goes on after a checkpoint; it is filled, and
            ``loader`` has what is left. (default: the epoch begins)
        on_step: Called after every step, such as to write a checkpoint. (default: nothing)
    """
    if micro_batches < 1:
        raise ValueError(f"'micro_batches' is {micro_batches}, expected at least 1")
    ranks = getattr(model, "ranks", None)
    if ranks is not None and (micro_batches > 1 or scale_loss):
        raise ValueError(
            f"'micro_batches' is {micro_batches} and 'scale_loss' {scale_loss}, but the model is "
            "distributed, whose ranks weigh a step by its labelled nodes and make it together: "
            "leave both out, and choose 'batch_size'"
        )
    model.train()
    sampler = sampler_of(loader)
    if sampler is not None and not scale_loss and sampler.by != "loss":
        sampler = None  # Whose weights don't matter.
    scales = scale_loss or sampler is not None
    per_step = _labels_per_step(loader, split, micro_batches) if scales else None
    device = model.device
    objective = Objective(
        model, device, split, _train_mask(loader, split), full_batch, refresh_unlabelled,
        edge_dropout, autocast, loss_fn, view_loss, bank, sampler,
    )  # fmt: skip
    done = Progress() if progress is None else progress
    done.loss = moved_tensor(torch.as_tensor(done.loss, dtype=torch.float32), device)
    of_step = 0  # Labelled nodes of the step so far.
    optimizer.zero_grad()
    with share_cores(leave_cores) as follow_cores:
        for number, batch in enumerate(loader, 1 + done.batches):
            if max_steps is not None and done.steps >= max_steps:  # Before a checkpoint.
                break
            follow_cores()
            count, loss, minimised = objective(batch)
            if loss is not None:
                done.loss = done.loss + loss * count
                done.labelled += count
                of_step += count
            if minimised is not None:
                if count > 0 and micro_batches > 1:
                    minimised = minimised * count  # Divided by those of all, once they are known.
                elif count > 0 and per_step is not None:
                    minimised = minimised * (count / per_step)
                minimised.backward()
            if number % micro_batches and number < _length(loader):
                continue
            if of_step > 0 or (ranks is not None and ranks.is_labelled):
                _step(model, optimizer, grad_norm, per_step or of_step, micro_batches)
            of_step = 0
            done.batches, done.steps = number, done.steps + 1
            if on_step is not None:
                on_step()
            if max_steps is not None and done.steps == max_steps:
                break
    if of_step > 0:  # Of a loader without a length.
        _step(model, optimizer, grad_norm, per_step or of_step, micro_batches)
    if ranks is not None:
        return ranks.mean(float(done.loss), done.labelled)
    return float(done.loss) / max(done.labelled, 1)


def _step(
    model: ScalableGNN,
    optimizer: torch.optim.Optimizer,
    grad_norm: float | None,
    num_labels: float,
    micro_batches: int,
) -> None:
    """One step, by the gradients of the micro-batches before it."""
    if micro_batches > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(num_labels)
    if grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def _train_mask(loader: Iterable[SubData], split: int) -> Tensor | None:
    """Which nodes of the graph to train on, of shape ``[N]``, if a loader has that on the host."""
    data = getattr(getattr(loader, "loader", loader), "data", None)  # Of a PrefetchLoader.
    for name in ("y", "train_mask"):
        if isinstance(data, Data) and data.get(name) is None:
            raise ValueError(
                f"the graph has no {name!r}, which says what to learn: set data.{name}"
            )
    mask = data.get("train_mask") if isinstance(data, Data) else None
    if not isinstance(mask, Tensor) or mask.device.type != "cpu":
        return None
    return split_mask(mask, split)


def _length(loader: Iterable[SubData]) -> float:
    return len(loader) if isinstance(loader, Sized) else math.inf


def _labels_per_step(loader: Iterable[SubData], split: int, micro_batches: int) -> float:
    """The mean number of labelled nodes per step of an epoch."""
    inner = getattr(loader, "loader", loader)  # Of a PrefetchLoader.
    data = getattr(inner, "data", None)
    if data is None or not isinstance(inner, Sized):
        raise ValueError(
            "'scale_loss' is True, but 'loader' doesn't say how many batches and labels it has: "
            "pass a SubgraphLoader"
        )
    steps = max(1, math.ceil(len(inner) / micro_batches))
    return int(split_mask(data.train_mask, split).sum()) / steps


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
    leave_cores: bool = True,
    keep: bool = False,
    run: Run | None = None,
    progress: Progress | None = None,
) -> Run:
    """Trains until there are some epochs, and evaluates after each.

    Args:
        model: The model.
        data: The whole graph, for its labels and masks.
        epoch: Trains one epoch and returns its loss.
        evaluate: Returns every node's output, of shape ``[N, C]``; it may refresh the histories.
        epochs: The number of epochs, those that ``run`` has included.
        split: Which split of the masks to use. (default: ``0``)
        on_epoch: Called after each epoch with the run so far.
        metric: The score; see :func:`gas.training.score`. (default: the usual one for ``data.y``)
        patience: Stop once the validation score has not risen for this many epochs.
            (default: never)
        leave_cores: For the evaluation; see :func:`train_epoch`. (default: ``True``)
        keep: Keep the model and the outputs of the best epoch. (default: ``False``)
        run: Filled as training goes on, which survives an interruption. (default: a new one)
        progress: What ``epoch`` fills; see :func:`train_epoch`. (default: nothing goes on)
    """
    if patience is not None and patience < 1:
        raise ValueError(f"'patience' is {patience}, expected at least 1 epoch")
    run = Run() if run is None else run
    done = Progress() if progress is None else progress
    curves = {key: getattr(run, f"{key}_acc") for key in ("train", "val", "test")}
    masks = {key: split_mask(data[f"{key}_mask"], split).cpu() for key in curves}
    y = data.y.cpu()
    metric = metric or metric_of(y)
    while len(run) < epochs and not run.has_stalled(patience):
        start = time.perf_counter() - done.seconds
        moved = model.moved_bytes - done.moved_bytes
        done.watch(model, start, moved)
        run.loss.append(epoch())
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        run.seconds.append(time.perf_counter() - start)
        run.moved_bytes.append(model.moved_bytes - moved)
        done.reset()
        run.age.append(mean_age(model))
        model.eval()
        with torch.no_grad(), share_cores(leave_cores):
            out = evaluate(model).cpu()
        for key, curve in curves.items():
            curve.append(score(metric, out, y, masks[key]))
        if keep and run.best_epoch == len(run) - 1:
            state = {
                key: value.detach().cpu().clone().contiguous()
                for key, value in model.state_dict().items()
            }
            run.best = Best(run.best_epoch, state, out)
        if on_epoch is not None:
            on_epoch(run)
    return run
