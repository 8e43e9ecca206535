"""Objective of training: the loss of a mini-batch's labelled nodes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.graph import drop_edges_and_rows, is_row_per_edge
from gas.loader import PartSampler, SubData, tensor_to_device, to_device
from gas.scalable import ScalableGNN
from gas.training.metrics import is_real


def split_mask(mask: Tensor, split: int) -> Tensor:
    """Return the mask of one split, of shape ``[N]``; runs beyond the last split start over."""
    return mask if mask.dim() == 1 else mask[:, split % mask.size(1)]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Return the usual loss for targets ``y``, the mean over its rows.

    Cross entropy for classes of shape ``[n]``, binary cross entropy for labels of shape ``[n, C]``,
    squared error for real numbers of shape ``[n]`` or ``[n, 1]``.

    Raises:
        ValueError: If labels have another shape than the outputs.
    """
    if is_real(y):
        return F.mse_loss(out.view(-1), y.view(-1).to(out.dtype))
    if y.dim() == 2:
        if y.shape != out.shape:
            raise ValueError(
                f"'y' has shape {list(y.shape)}, but outputs have {list(out.shape)}: expected "
                "labels [n, C], or classes [n], data.y = data.y.view(-1)"
            )
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    return F.cross_entropy(out, y.long())


@dataclass(frozen=True)
class Objective:
    """The loss of one mini-batch after the other, by a model; see :func:`gas.training.train_epoch`.

    ``mask`` says which nodes of the graph to train on, of shape ``[N]``, if that is known on the
    host; ``sampler`` weighs the parts of a mini-batch, if any does.
    """

    model: ScalableGNN
    device: torch.device  # The model's, which takes a while to find.
    split: int
    mask: Tensor | None
    full_batch: bool
    refresh_unlabelled: bool
    edge_dropout: float
    autocast: torch.dtype | None
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    view_loss: Callable[..., Tensor]
    bank: str
    sampler: PartSampler | None

    def __call__(self, batch: SubData) -> tuple[int, Tensor | None, Tensor | None]:
        """Run the model forward.

        Returns:
            The number of labelled nodes, their mean loss, detached, and what is to be minimised:
            ``None`` where there is nothing.
        """
        index = _labelled(batch, self.split, self.mask)
        count = index.numel()
        is_ranked = getattr(self.model, "ranks", None) is not None
        trains = count > 0 or is_ranked
        if not trains and not self.refresh_unlabelled:
            return count, None, None
        has_views = trains and "views" in batch.data
        batch = to_device(batch, self.device)
        with torch.set_grad_enabled(trains), _autocast(self.device, self.autocast):
            outs = self._forward(batch, has_views)
        if not trains:
            return count, None, None
        if count == 0:  # The others wait for a gradient, which isn't looked at.
            return count, None, torch.stack([out.sum() for out in outs]).mul(0.0).sum()
        index = tensor_to_device(index, self.device)
        y = batch.data.y[: batch.batch_size]
        if self.autocast is not None:
            outs = tuple(out.float() for out in outs)
        if self.sampler is not None:
            loss, weighted = self._by_parts(self.sampler, batch, outs, y, index, has_views)
        elif has_views:
            loss = weighted = self.view_loss(*outs, y, index)
        else:
            loss = weighted = self.loss_fn(outs[0][index], y[index])
        return count, loss.detach(), weighted + getattr(self.model, "reg_loss", 0.0)

    def _forward(self, batch: SubData, has_views: bool) -> tuple[Tensor, ...]:
        """Compute the outputs of the in-batch nodes, of the batch itself and then of its views."""
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
            adj_t, rows = drop_edges_and_rows(adj_t, rows, edge_dropout)
            kwargs = {**kwargs, **rows}
        if self.full_batch:
            return (model(x, adj_t, **kwargs),)
        fewer = copy.copy(batch.data)
        fewer["adj_t" if "adj_t" in fewer else "edge_index"] = adj_t
        for key, value in kwargs.items():
            fewer[key] = value
        return (model(batch._replace(data=fewer)),)

    def _by_parts(
        self,
        sampler: PartSampler,
        batch: SubData,
        outs: tuple[Tensor, ...],
        y: Tensor,
        index: Tensor,
        has_views: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss of labelled nodes, plain and by the weights of their parts."""
        if has_views:
            raise ValueError(
                f"the loader has {sampler}, which weighs parts by themselves, but its batches have "
                "views, whose loss is that of all parts together: leave 'epoch_transform' out, or "
                "take by='labels' without 'scale_loss'"
            )
        counts = sampler.labelled_in(batch)
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


def _labelled(batch: SubData, split: int, mask: Tensor | None) -> Tensor:
    """Return the in-batch nodes to train on, of shape ``[labelled]``.

    Of a batch on a device they are found by the graph's mask, for which nobody waits.
    """
    own, nodes = batch.data.train_mask[: batch.batch_size], batch.n_id[: batch.batch_size]
    if own.device.type == "cpu" or mask is None or nodes.device != mask.device:
        mask = split_mask(own, split)
    else:
        mask = mask[nodes]
    return mask.nonzero().view(-1)


def _autocast(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)
