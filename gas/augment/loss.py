"""The loss of training with MH-Aug."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
        mask: Which nodes are labelled: of shape ``[nodes]``, bool, or their positions.
            (default: all)
        kl: Weight of the divergence between both states. (default: ``0.5``)
        h: Weight of the entropy of predictions for the original graph. (default: ``0.5``)
        teacher_is_first: Whether ``first`` is the teacher in the divergence, which then is
            ``KL(teacher || student)`` without a gradient towards the teacher. It should be the view
            that drops less: ``augmentation.previous_is_milder``, which may be a tensor.
            (default: no teacher)

    Raises:
        ValueError: If shapes don't fit.
    """
    for name, out in (("first", first), ("second", second)):
        if out.shape != logits.shape:
            raise ValueError(
                f"'{name}' has shape {list(out.shape)}, expected {list(logits.shape)}, that of "
                "'logits': pass outputs for the same nodes"
            )
    labelled = (first, y) if mask is None else (first[mask], y[mask])
    loss = F.cross_entropy(*labelled)
    log_p, log_q = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
    if teacher_is_first is not None:
        is_first = torch.as_tensor(teacher_is_first, device=first.device)
        log_p, log_q = (
            torch.where(is_first, log_p, log_q).detach(),
            torch.where(is_first, log_q, log_p),
        )
    divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1).mean()
    return loss + kl * divergence + h * entropy(logits).mean()
