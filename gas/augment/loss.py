"""The loss of training with MH-Aug, and published settings of the loss and the chain.

Source: Park et al., *Metropolis-Hastings Data Augmentation for Graph Neural Networks*, NeurIPS
2021, and its code, in the convention of the paper: ``lam2`` and ``lam4`` are 1 minus the options of
that code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.augment.units import check_not_negative
from gas.native import on_host


class PublishedSettings(NamedTuple):
    """Settings for one data set: of :class:`gas.MHAug`, and of :func:`gas.augment.mh_aug_loss`."""

    chain: dict[str, float]
    loss: dict[str, float]


PUBLISHED = {
    "cora": PublishedSettings(
        {
            "mu_e": 0.3, "mu_v": 0.7, "sigma_delta_e": 0.1, "sigma_delta_v": 0.01,
            "a_e": 10, "b_e": 1, "a_v": 1, "b_v": 1,
            "lam1": 5, "lam2": 0.9999, "lam3": 1, "lam4": 0.999,
        },
        {"kl": 0.5, "h": 0.5},
    ),
    "citeseer": PublishedSettings(
        {
            "mu_e": 0.2, "mu_v": 0.5, "sigma_delta_e": 0.005, "sigma_delta_v": 0.1,
            "a_e": 5, "b_e": 1, "a_v": 10, "b_v": 0.1,
            "lam1": 1, "lam2": 0.9999, "lam3": 10, "lam4": 0.999,
        },
        {"kl": 0.2, "h": 0.5},
    ),
}  # fmt: skip
"""Settings by the name of a data set; start with those of Cora for others."""


def entropy(logits: Tensor) -> Tensor:
    """Compute the entropy of each prediction ``softmax(logits)``, in nats, of shape ``[nodes]``."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def mh_aug_loss(
    logits: Tensor,
    first: Tensor,
    second: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    kl: float = 0.5,
    h: float = 0.5,
    teacher_is_first: bool | Tensor | None = None,
) -> Tensor:
    """Compute ``CE(f(G^t), y) + kl KL(f(G^t) || f(G^t+1)) + h H(f(G))``.

    Cross entropy is the mean over labelled nodes, the others over all rows; pass those of in-batch
    nodes alone. Gradients reach all three outputs, but for those of a teacher.

    Source: Park et al., *Metropolis-Hastings Data Augmentation for Graph Neural Networks*, NeurIPS
    2021.

    Args:
        logits: Outputs for the original graph, of shape ``[nodes, classes]``.
        first: Outputs for the previous state of the chain, of the same shape.
        second: Outputs for its present state, of the same shape.
        y: Classes, of shape ``[nodes]``.
        mask: Which nodes are labelled: of shape ``[nodes]``, bool, or their positions. Without
            any, as in some mini-batches, there is no cross entropy. (default: all)
        kl: Weight of the divergence between both states. (default: ``0.5``)
        h: Weight of the entropy of predictions for the original graph. (default: ``0.5``)
        teacher_is_first: Whether ``first`` is the teacher in the divergence, which then is
            ``KL(teacher || student)`` without a gradient towards the teacher. It should be the view
            that drops less: ``augmentation.previous_is_milder``, which may be a tensor.
            (default: no teacher)

    Raises:
        ValueError: If shapes don't fit, a weight is negative or NaN, ``teacher_is_first`` is no
            truth value, or, on the CPU, a labelled node has no class.
    """
    check_not_negative(kl=kl, h=h)
    for name, out in (("first", first), ("second", second)):
        if out.shape != logits.shape:
            raise ValueError(
                f"'{name}' has shape {list(out.shape)}, expected {list(logits.shape)}, that of "
                "'logits': pass outputs for the same nodes"
            )
    loss = _cross_entropy(first, y, mask)
    log_p, log_q = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
    if teacher_is_first is not None:
        is_bool = isinstance(teacher_is_first, bool) or (
            isinstance(teacher_is_first, Tensor)
            and teacher_is_first.dtype == torch.bool
            and teacher_is_first.numel() == 1
        )
        if not is_bool:
            raise ValueError(
                f"'teacher_is_first' is {teacher_is_first!r}, expected True, False or None"
            )
        is_first = torch.as_tensor(teacher_is_first, device=first.device)
        log_p, log_q = (
            torch.where(is_first, log_p, log_q).detach(),
            torch.where(is_first, log_q, log_p),
        )
    divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1).mean()
    return loss + kl * divergence + h * entropy(logits).mean()


def _cross_entropy(out: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean cross entropy of labelled nodes, 0 without any."""
    if y.shape != out.shape[:1] or y.is_floating_point():
        raise ValueError(
            f"'y' is {y.dtype} of shape {list(y.shape)}, expected classes of shape "
            f"{list(out.shape[:1])}"
        )
    if mask is not None and mask.dtype == torch.bool and mask.shape != y.shape:
        raise ValueError(f"'mask' has shape {list(mask.shape)}, expected {list(y.shape)}")
    if mask is not None:
        out, y = out[mask], y[mask]
    wrong = y[(y < 0) | (y >= out.size(-1))] if on_host(y) else y[:0]
    if wrong.numel():
        raise ValueError(
            f"'y' holds {int(wrong[0])}, expected classes from 0 to {out.size(-1) - 1}: leave "
            "nodes without a class out of 'mask'"
        )
    return F.cross_entropy(out, y.long(), reduction="mean" if y.numel() else "sum")
