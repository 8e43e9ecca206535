"""Train one epoch; compute the loss of a mini-batch's labelled nodes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import PREPARED, drop_edges_and_rows, is_row_per_edge
from gas.loader import (
    LinkLoader,
    PartSampler,
    SubData,
    find_sampler,
    tensor_to_device,
    to_device,
    unwrap_loader,
)
from gas.native import check_flags, check_integer, check_probability, share_cores
from gas.scalable import HeteroModel, ScalableGNN
from gas.training.metrics import (
    check_known_targets,
    check_usual_loss,
    counted_targets,
    ignored_class,
    loss_of,
    split_mask,
)
from gas.training.record import Progress, divergence_error, find_nonfinite_loss

CHECKED = 10_000  # Targets that are looked at before each epoch.


@check_flags
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
    correct_drift: bool = False,
    max_steps: int | None = None,
    autocast: torch.dtype | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
    view_loss: Callable[..., Tensor] | None = None,
    bank: str = "original",
    leave_cores: bool = True,
    progress: Progress | None = None,
    on_step: Callable[[], None] | None = None,
) -> float:
    """Train on every batch once, and return the mean loss per labelled node.

    A model's ``reg_loss`` (see :class:`gas.models.GIN`) is added to the loss. Batches with views
    (``SubgraphLoader(..., epoch_transform=...)``) are trained by ``view_loss``; batches without
    labelled nodes only update the histories.

    Args:
        model: The model.
        loader: The mini-batches.
        optimizer: Steps once per ``micro_batches`` batches.
        split: The split of ``train_mask``. (default: ``0``)
        grad_norm: Clip the norm of the gradient to this. (default: no clipping)
        full_batch: The batch is the whole graph, without histories. (default: ``False``)
        refresh_unlabelled: Run batches without labelled nodes forward, without gradient, so that
            their rows in the histories don't become stale. (default: ``True``)
        micro_batches: Accumulate the gradients of this many batches before each step, with the
            memory of one: the gradient is that of the mean over all their labelled nodes. (A loss
            with weights of classes is the mean of a batch by these, and counts by its nodes.)
            (default: ``1``)
        scale_loss: Weigh each step by its number of labelled nodes, relative to the mean over the
            epoch's steps, so that every labelled node has the same weight. The weights of a
            :class:`gas.PartSampler` are applied, too; a sampler by loss always applies
            them. Needs a loader with a length.
            (default: a step is the mean over its labelled nodes, however few)
        edge_dropout: Drop each edge of a batch with this probability; see :func:`gas.drop_edges`.
            (default: ``0.0``)
        correct_drift: Move the halo's stale rows by how far the batch's own rows have moved since
            they were stored, so that training without a norm doesn't oscillate; see
            :class:`gas.history.DriftCorrection`. Rows of views, and of several ranks, are left as
            they are. (default: ``False``)
        max_steps: End the epoch after this many steps. (default: every batch)
        autocast: The dtype of :class:`torch.autocast` for the forward pass. (default: no autocast)
        loss_fn: The mean loss of outputs and targets. (default: :func:`loss_of`)
        view_loss: The loss of batches with views, of the outputs for the original graph and for
            each view, the targets, and the positions of labelled nodes.
            (default: that of the loader's augmentation, :func:`gas.augment.mh_aug_loss`)
        bank: The histories of views; see :meth:`gas.ScalableGNN.views`.
            (default: ``"original"``)
        leave_cores: Leave busy cores to other processes by using fewer of PyTorch's threads; see
            :func:`gas.training.share_cores`. PyTorch may then round sums differently, unless it
            has one thread from the start. (default: ``True``)
        progress: The progress of an epoch that continues after a checkpoint; it is updated, and
            ``loader`` yields the remaining batches. (default: a new epoch)
        on_step: Called after every step, such as to write a checkpoint. (default: nothing)

    Raises:
        FloatingPointError: If a loss isn't finite, naming the epoch, if ``progress`` has it, and
            the batch, from 1: on the CPU before it changes the weights; on a GPU, and with several
            ranks, at the end of the epoch, so that no step waits for it.
        ValueError: If an argument is unusable, naming it, or ``model`` is of a heterogeneous graph.
    """
    ranks = getattr(model, "ranks", None)
    check_options(
        grad_norm, micro_batches, max_steps, autocast, loss_fn, ranks, scale_loss, edge_dropout
    )
    _check_given(model, loader, optimizer, split, loss_fn, view_loss)
    sampler, per_step = _loss_weights_of(loader, split, micro_batches, scale_loss, loss_fn)
    mask, device = _train_mask(loader, split, loss_fn, sampler), model.train().device
    objective = Objective(
        model, device, split, mask, full_batch, refresh_unlabelled, edge_dropout, autocast,
        loss_fn, view_loss or getattr(unwrap_loader(loader), "view_loss", None), bank, sampler,
    )  # fmt: skip
    done = Progress() if progress is None else progress
    of_step = 0  # Labelled nodes of the current step so far.
    stops_at_once = device.type == "cpu" and ranks is None
    losses: list[tuple[int, Tensor]] = []  # Of each batch.
    optimizer.zero_grad()
    with share_cores(leave_cores) as follow_cores, model._correct_drift(correct_drift) as drift:
        for number, batch in _number_batches(loader, done, max_steps, follow_cores):
            count, loss, minimised = objective(batch)
            if loss is not None:
                done.add(loss, count)
                of_step += count
                losses.append((number, loss))
            if minimised is not None:
                if stops_at_once and not math.isfinite(value := minimised.detach().item()):
                    raise divergence_error(done.epoch, number, value)
                _weigh_loss(minimised, count, micro_batches, per_step).backward()
            if number % micro_batches and not (isinstance(loader, Sized) and number >= len(loader)):
                continue
            if of_step > 0 or (ranks is not None and ranks.has_labels):
                _take_step(model, optimizer, grad_norm, per_step or of_step, micro_batches)
            of_step = 0
            _count_step(done, number, on_step)
    if of_step > 0:  # The last step of a loader without a length.
        _take_step(model, optimizer, grad_norm, per_step or of_step, micro_batches)
        _count_step(done, number, on_step)
    done.drift = drift.mean()
    return _mean_loss(done, ranks, losses)


def _number_batches(
    loader: Iterable[SubData],
    done: Progress,
    max_steps: int | None,
    follow_cores: Callable[[], None],
) -> Iterator[tuple[int, SubData]]:
    """Yield the batches of an epoch until it has enough steps, with their numbers from 1."""
    for number, batch in enumerate(loader, 1 + done.batches):
        if max_steps is not None and done.steps >= max_steps:  # Before a checkpoint.
            return
        follow_cores()
        yield number, batch
        if max_steps is not None and done.steps == max_steps:
            return


def _count_step(done: Progress, number: int, on_step: Callable[[], None] | None) -> None:
    """Record that a step was taken after batch ``number``, and call ``on_step``."""
    done.batches, done.steps = number, done.steps + 1
    if on_step is not None:
        on_step()


def _weigh_loss(loss: Tensor, count: int, micro_batches: int, per_step: float | None) -> Tensor:
    """Weigh the loss of a batch by its labelled nodes, for micro-batches and ``scale_loss``."""
    if count > 0 and micro_batches > 1:
        return loss * count  # _take_step divides by the labelled nodes of all.
    if count > 0 and per_step is not None:
        return loss * (count / per_step)
    return loss


def _mean_loss(done: Progress, ranks: Any, losses: Sequence[tuple[int, Tensor]]) -> float:
    """Return the mean loss of an epoch over all ranks; ``losses`` are those of its batches.

    Raises:
        FloatingPointError: If it isn't finite.
    """
    total = float(done.loss)
    mean = total / max(done.labelled, 1) if ranks is None else ranks.mean(total, done.labelled)
    if not math.isfinite(mean):
        raise divergence_error(done.epoch, *(find_nonfinite_loss(losses) or (None, mean)))
    return mean


def check_options(
    grad_norm: Any,
    micro_batches: int = 1,
    max_steps: int | None = None,
    autocast: Any = None,
    loss_fn: Any = loss_of,
    ranks: Any = None,
    scale_loss: bool = False,
    edge_dropout: float = 0.0,
) -> None:
    """Refuse unusable options of :func:`train_epoch`, and those that ranks don't support."""
    if grad_norm is not None and not (isinstance(grad_norm, int | float) and grad_norm > 0):
        raise ValueError(
            f"'grad_norm' is {grad_norm!r}, expected a number above 0, or None, which doesn't clip"
        )
    check_probability("edge_dropout", edge_dropout, below_one=True)
    check_integer("micro_batches", micro_batches, 1)
    if max_steps is not None:
        check_integer("max_steps", max_steps, 1)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(
            f"'autocast' is {autocast!r}, expected a type of 16 bits, such as torch.bfloat16"
        )
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise ValueError(
            f"the loss is {loss_fn!r}, expected a function of outputs and targets, or a module, "
            "such as torch.nn.CrossEntropyLoss()"
        )
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ValueError(
            "the loss has reduction='sum', expected the mean, by which batches of different sizes "
            "are averaged: reduction='mean'"
        )
    if ranks is not None and (micro_batches > 1 or scale_loss):
        raise ValueError(
            f"'micro_batches' is {micro_batches} and 'scale_loss' {scale_loss}, but the model is "
            "distributed, whose ranks weigh a step by its labelled nodes and make it together: "
            "leave both out, and choose 'batch_size'"
        )


def check_loader(loader: Any, loss_fn: Any, view_loss: Any) -> None:
    """Refuse what isn't a loader of mini-batches, or whose batches have another loss."""
    if isinstance(loader, Data) or not isinstance(loader, Iterable):
        raise ValueError(
            f"'loader' is a {type(loader).__name__}, expected mini-batches: "
            "gas.SubgraphLoader(graph, shuffle=True)"
        )
    inner = unwrap_loader(loader)
    if isinstance(inner, LinkLoader):
        raise ValueError(
            "'loader' is a gas.LinkLoader, whose batches have pairs, and this trains on labels of "
            "nodes: write the loop with gas.training.link_loss(model(batch), batch)"
        )
    has_loss = view_loss is None and getattr(inner, "view_loss", None) is not None
    if has_loss and loss_fn is not loss_of:
        raise ValueError(
            "a loss is given, but 'loader' has an augmentation, and the loss of views takes the "
            "outputs of all of them: pass it as 'view_loss', such as gas.augment.mh_aug_loss"
        )


def check_homogeneous(model: object) -> None:
    """Refuse a model for heterogeneous graphs, for which a node type would have to be chosen."""
    if isinstance(model, HeteroModel):
        raise ValueError(
            "'model' is a HeteroModel, whose mini-batches have labels by the type of nodes: write "
            "the loop of your own, out = model(batch), as examples/train_hetero.py does"
        )


def check_trainable(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if :func:`train_epoch` can't train this model with this optimizer.

    Raises:
        ValueError: If ``model`` isn't a module, is a ``HeteroModel``, returns several values, or
            has no parameter that requires a gradient; if ``optimizer`` isn't an optimizer, needs a
            closure, or holds no parameter of the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a model with histories: convert it, "
            "gas.to_scalable(net, data)"
        )
    check_homogeneous(model)
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"'optimizer' is a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "'optimizer' is LBFGS, which evaluates the loss several times in a step, by a closure: "
            "pass one that doesn't, such as torch.optim.Adam"
        )
    if not getattr(model, "_returns_rows", True):
        raise _several_values_error()
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if not trained and any(True for _ in model.parameters()):
        raise ValueError(
            "'model' has no parameter that requires a gradient, and nothing would be learnt: "
            "model.requires_grad_(), or of some layers alone"
        )
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained and not trained & has:
        raise ValueError(
            f"'optimizer' has {len(has)} parameters, none of which is the model's: make it of this "
            "model, after it was converted or copied, as "
            f"torch.optim.{type(optimizer).__name__}(model.parameters(), lr=...)"
        )


def _several_values_error() -> ValueError:
    return ValueError(
        "'model' returns several values, and the loss is that of one: write the loop of your own, "
        "out = model(batch), or take a model that returns one tensor"
    )


def _take_step(
    model: ScalableGNN,
    optimizer: torch.optim.Optimizer,
    grad_norm: float | None,
    num_labels: float,
    micro_batches: int,
) -> None:
    """Take one step, with the accumulated gradients of its micro-batches."""
    # The optimizer's, learned features among them; gradients of others aren't cleared.
    given = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    in_model = [each for each in model.parameters() if given.pop(id(each), None) is not None]
    # Ranks average the model's gradients alone: others would give each a norm of its own.
    trained = in_model if getattr(model, "ranks", None) else [*in_model, *given.values()]
    if micro_batches > 1:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.div_(num_labels)
    if grad_norm is not None:
        _clip(trained, grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def _clip(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Clip the norm of gradients as PyTorch does, but also of sparse ones, as an Embedding has."""
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad = grad.coalesce()  # Its values are summed by row.
            grad = grad.values()
        if grad is not None:
            grads.append(grad)
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)


def _check_given(
    model: Any, loader: Any, optimizer: Any, split: int, loss_fn: Any, view_loss: Any
) -> None:
    """Refuse what can't be trained, graphs without labels or masks, and labels that don't fit."""
    check_trainable(model, optimizer)
    check_loader(loader, loss_fn, view_loss)
    data = getattr(unwrap_loader(loader), "data", None)
    for name in ("y", "train_mask"):
        if isinstance(data, Data) and data.get(name) is None:
            raise ValueError(
                f"the graph has no {name!r}, which says what to learn: set data.{name}"
            )
    if loss_fn is loss_of and isinstance(data, Data) and data.y.device.type == "cpu":
        check_usual_loss(data.y[:CHECKED])
    if isinstance(data, Data) and data.y.device.type == data.train_mask.device.type == "cpu":
        check_known_targets(data.y, split_mask(data.train_mask, split), view_loss or loss_fn)


def _train_mask(
    loader: Any, split: int, loss_fn: Any, sampler: PartSampler | None
) -> Tensor | None:
    """Return the mask of training nodes, of shape ``[N]``, if a loader has it on the CPU."""
    data = getattr(unwrap_loader(loader), "data", None)
    mask = data.get("train_mask") if isinstance(data, Data) else None
    if not isinstance(mask, Tensor) or mask.device.type != "cpu":
        return None
    return _exclude_ignored(split_mask(mask, split), cast(Data, data).y, loss_fn, sampler)


def _exclude_ignored(mask: Tensor, y: Tensor, loss_fn: Any, sampler: PartSampler | None) -> Tensor:
    """Return a mask of nodes without those that the loss ignores, which a sampler doesn't know."""
    if sampler is not None or y.dim() != 1 or ignored_class(loss_fn) is None:
        return mask
    return mask & counted_targets(y, loss_fn).to(mask.device)


def _check_broadcast(out: Tensor, y: Tensor) -> None:
    """Refuse outputs ``[n, 1]`` for real targets ``[n]``: PyTorch's losses compare all with all."""
    if y.is_floating_point() and y.dim() == 1 and out.dim() == 2 and out.size(1) == 1:
        raise ValueError(
            f"'data.y' has shape [{y.size(0)}] and the outputs {list(out.shape)}, which a loss "
            f"broadcasts to [{y.size(0)}, {y.size(0)}]: set data.y = data.y.view(-1, 1), or leave "
            "'loss' out"
        )


def _loss_weights_of(
    loader: Iterable[SubData], split: int, micro_batches: int, scale_loss: bool, loss_fn: Any
) -> tuple[PartSampler | None, float | None]:
    """Return the sampler whose weights correct the loss, if any.

    With it, the mean number of labelled nodes per step, if the loss is scaled by it.
    """
    sampler = find_sampler(loader)
    if not scale_loss and (sampler is None or sampler.by != "loss"):
        return None, None  # Weights of other samplers don't apply.
    inner = unwrap_loader(loader)
    data = getattr(inner, "data", None)
    if data is None or not isinstance(inner, Sized):
        raise ValueError(
            "'scale_loss' is True, but 'loader' doesn't say how many batches and labels it has: "
            "pass a SubgraphLoader"
        )
    steps = max(1, math.ceil(len(inner) / micro_batches))
    mask = _exclude_ignored(split_mask(data.train_mask, split), data.y, loss_fn, sampler)
    return sampler, int(mask.sum()) / steps


@dataclass(frozen=True)
class Objective:
    """The loss of a model on a mini-batch; see :func:`gas.training.train_epoch`.

    ``mask`` is the mask of training nodes, of shape ``[N]``, if it is on the CPU; ``sampler``
    weighs the parts of a mini-batch, if it isn't ``None``.
    """

    model: ScalableGNN
    device: torch.device  # The model's, which is slow to find for each batch.
    split: int
    mask: Tensor | None
    full_batch: bool
    refresh_unlabelled: bool
    edge_dropout: float
    autocast: torch.dtype | None
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    view_loss: Callable[..., Tensor] | None
    bank: str
    sampler: PartSampler | None

    def __call__(self, batch: SubData) -> tuple[int, Tensor | None, Tensor | None]:
        """Run the model forward.

        Returns:
            The number of labelled nodes, their mean loss, detached, and the loss to minimise, or
            ``None`` in their place.
        """
        index = self._find_labelled(batch)
        count = index.numel()
        is_ranked = getattr(self.model, "ranks", None) is not None
        trains = count > 0 or is_ranked
        if not trains and not self.refresh_unlabelled:
            return count, None, None
        has_views = trains and "views" in batch.data
        if has_views and self.view_loss is None:
            raise ValueError(
                "batches have views, but 'loader' has no augmentation that gives their loss: pass "
                "'view_loss', such as gas.augment.mh_aug_loss"
            )
        batch = to_device(batch, self.device)
        casts: Any = nullcontext()
        if self.autocast is not None:
            casts = torch.autocast(self.device.type, self.autocast)
        with torch.set_grad_enabled(trains), casts:
            outs = self._forward(batch, has_views)
        if not isinstance(outs[0], Tensor):
            raise _several_values_error()
        if not trains:
            return count, None, None
        if count == 0:  # The other ranks wait for a gradient, whose weight is 0.
            return count, None, torch.stack([out.sum() for out in outs]).mul(0.0).sum()
        index = tensor_to_device(index, self.device)
        y = batch.data.y[: batch.batch_size]
        if (getattr(self.loss_fn, "__module__", None) or "").startswith("torch."):
            _check_broadcast(outs[0], y)  # Losses of the user's own may take either shape.
        if self.autocast is not None:
            outs = tuple(out.float() for out in outs)
        if self.sampler is not None:
            loss, weighted = self._loss_by_parts(self.sampler, batch, outs, y, index, has_views)
        elif has_views and self.view_loss is not None:
            loss = weighted = self.view_loss(*outs, y, index)
        else:
            loss = weighted = self.loss_fn(outs[0][index], y[index])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            found = f"has shape {list(loss.shape)}" if is_tensor else f"is {loss!r}"
            raise ValueError(
                f"the loss {found}, expected one number, the mean: such as "
                "torch.nn.CrossEntropyLoss(reduction='mean')"
            )
        if not weighted.requires_grad:
            raise ValueError(
                "the loss has no gradient: compute it from the outputs without .detach(), .item() "
                "or NumPy, and train outside of torch.no_grad() and torch.inference_mode()"
            )
        return count, loss.detach(), weighted + getattr(self.model, "reg_loss", 0.0)

    def _find_labelled(self, batch: SubData) -> Tensor:
        """Return the positions of the in-batch nodes to train on, of shape ``[num_labelled]``.

        For a batch on a device the mask of the whole graph is used, so that the host doesn't wait.
        """
        own, nodes = batch.data.train_mask[: batch.batch_size], batch.n_id[: batch.batch_size]
        if own.device.type != "cpu" and self.mask is not None and nodes.device == self.mask.device:
            return self.mask[nodes].nonzero().view(-1)
        mask, y = split_mask(own, self.split), batch.data.y[: batch.batch_size]
        return _exclude_ignored(mask, y, self.loss_fn, self.sampler).nonzero().view(-1)

    def _forward(self, batch: SubData, has_views: bool) -> tuple[Tensor, ...]:
        """Compute the outputs of the in-batch nodes, for the batch itself and then its views."""
        model, edge_dropout = self.model, self.edge_dropout
        if has_views and edge_dropout > 0:
            raise ValueError(
                f"'edge_dropout' is {edge_dropout}, but batches have views, which lack edges "
                "already: use one of both"
            )
        if has_views:
            return model.views(batch, self.bank)
        if not self.full_batch and edge_dropout == 0:
            return (model(batch),)
        x, adj_t, kwargs = model.inputs_of(batch.data)
        if edge_dropout > 0:
            rows = {key: value for key, value in kwargs.items() if is_row_per_edge(batch.data, key)}
            for key, value in rows.items():
                if key.startswith(PREPARED) and value.is_floating_point() and value.dim() == 1:
                    raise ValueError(
                        f"'edge_dropout' is {edge_dropout}, but some layers take other weights of "
                        f"edges than 'edge_weight', {key!r}, which it doesn't scale: leave it out, "
                        "or take layers that all normalise in one way"
                    )
            adj_t, rows = drop_edges_and_rows(adj_t, rows, edge_dropout)
            kwargs = {**kwargs, **rows}
        if self.full_batch:
            return (model(x, adj_t, **kwargs),)
        fewer = copy.copy(batch.data)
        fewer["adj_t" if "adj_t" in fewer else "edge_index"] = adj_t
        for key, value in kwargs.items():
            fewer[key] = value
        return (model(batch._replace(data=fewer)),)

    def _loss_by_parts(
        self,
        sampler: PartSampler,
        batch: SubData,
        outs: tuple[Tensor, ...],
        y: Tensor,
        index: Tensor,
        has_views: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss of labelled nodes, unweighted and weighted by their parts."""
        if has_views:
            raise ValueError(
                f"the loader has {sampler}, which weighs parts by themselves, but its batches have "
                "views, whose loss is that of all parts together: leave 'epoch_transform' out, or "
                "take by='labels' without 'scale_loss'"
            )
        counts = sampler.count_labelled(batch)
        if sum(counts) != index.numel():
            raise ValueError(
                f"the mini-batch has {index.numel()} labelled nodes, but the loader's {sampler} "
                f"knows of {sum(counts)}, in the split {sampler.split}: choose 'split' as the "
                "sampler's, and make another if 'train_mask' has changed"
            )
        rows = [
            self.loss_fn(out, target).expand(target.size(0))
            for out, target in zip(
                outs[0][index].split(counts), y[index].split(counts), strict=True
            )
            if target.size(0)
        ]
        loss = torch.cat(rows)
        sampler.report(batch, loss)
        weight = tensor_to_device(sampler.weight(batch), loss.device) * sampler.labelled.sum()
        return loss.mean(), (weight * loss).mean()
