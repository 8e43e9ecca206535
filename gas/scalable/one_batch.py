"""A model on one mini-batch, as a module that only reads the histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gas.loader.batch import SubData

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


class OneBatch(torch.nn.Module):
    """What :meth:`gas.ScalableGNN.at` returns: ``model(batch, push=False)`` of other features.

    * ``model``: the model, whose parameters and mode it has.
    * ``batch``: the mini-batch, which has the rest of what ``forward`` takes.

    Its outputs are those of the in-batch nodes, so ``index=`` of an explainer counts these.
    """

    def __init__(self, model: ScalableGNN, batch: SubData) -> None:
        if not isinstance(batch, SubData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a "
                "gas.SubgraphLoader"
            )
        super().__init__()
        self.model = model
        self.batch = batch.to(model.device)
        self.training = model.training  # Who restores it afterwards restores the model's.

    def forward(self, x: Tensor, edge_index: Any, **kwargs: Any) -> Tensor:
        """The outputs of the in-batch nodes, of shape ``[batch_size, out_channels]``.

        Args:
            x: Features of the batch's nodes, halo included.
            edge_index: Its edges, in the loader's layout.
            **kwargs: In place of what the batch has for ``forward``, such as ``edge_weight``.
        """
        _, _, given = self.model.inputs_of(self.batch.data)
        where = self.batch[1:]
        return self.model(x, edge_index, *where, push=False, **{**given, **kwargs})
