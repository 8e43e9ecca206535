"""A model on one mini-batch, as a module that only reads the histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gas.loader.batch import SubData
from gas.nn.explained import prepare_layers, with_embeddings

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


class OneBatch(nn.Module):
    """What :meth:`gas.ScalableGNN.at` returns: ``model(batch, push=False)`` of other features.

    Its outputs are those of the in-batch nodes, so ``index=`` of an explainer counts these. It has
    the parameters and the mode of ``model``, and what else ``forward`` takes of ``batch``.
    """

    training = property(lambda self: self.model.training, lambda *_: None)  # The model's.

    def __init__(self, model: ScalableGNN, batch: SubData) -> None:
        if not isinstance(batch, SubData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a "
                "gas.SubgraphLoader"
            )
        super().__init__()
        self.model = model
        self.batch = batch.to(model.device)

    def forward(self, x: Tensor, edge_index: Any, **kwargs: Any) -> Tensor:
        """The outputs of the in-batch nodes, of shape ``[batch_size, out_channels]``.

        Args:
            x: Features of the batch's nodes, halo included.
            edge_index: Its edges, in the loader's layout.
            **kwargs: In place of what the batch has for ``forward``, such as ``edge_weight``.
        """
        prepare_layers(self.model, edge_index)
        _, _, given = self.model.inputs_of(self.batch.data)
        out = self.model(x, edge_index, *self.batch[1:], push=False, **{**given, **kwargs})
        return with_embeddings(self.model, self.batch, out)
