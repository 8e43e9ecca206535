"""``OneBatch``: a model on one mini-batch, as a module that only reads the histories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gas.loader import SubData
from gas.native import is_sparse
from gas.nn import Masks, forget_masks, prepare_layers, show_embeddings
from gas.scalable.base import preserve_modes
from gas.scalable.call import BatchModel


class OneBatch(nn.Module):
    """Module from :meth:`gas.ScalableGNN.at`: ``model(batch, push=False)`` for other features.

    Its outputs are those of the in-batch nodes, to which ``index=`` of an explainer refers. It has
    the parameters of ``model``, and its mode unless it is set to another. Further arguments of
    ``forward`` are those of ``batch``. Explainers don't change the layers of ``model``.
    """

    training = property(
        lambda self: self.model.training if self._mode is None else self._mode, lambda *_: None
    )

    def __init__(self, model: BatchModel, batch: SubData) -> None:
        if not isinstance(batch, SubData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a "
                "gas.SubgraphLoader"
            )
        super().__init__()
        self._mode: bool | None = None
        self._masks: Masks = {}
        self.model = model
        if is_sparse(batch.data.x):  # Explainers mask each feature, zeros included.
            batch.data.x = batch.data.x.to_dense()
        self.batch = batch.to(model.device)

    def train(self, mode: bool = True) -> OneBatch:
        """Set the mode of this module, which the model has while this module runs."""
        self._mode = None if mode == self.model.training else mode
        forget_masks(self._masks)
        return self

    @contextlib.contextmanager
    def _apply_mode(self) -> Iterator[None]:
        """Put the model into this module's mode in this context."""
        if self._mode is None:
            yield
            return
        with preserve_modes(self.model):
            self.model.train(self._mode)
            yield

    def forward(self, x: Tensor, edge_index: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the in-batch nodes, of shape ``[batch_size, out_channels]``.

        Args:
            x: Features of the batch's nodes, halo included.
            edge_index: Its edges, in the loader's layout.
            **kwargs: Arguments of ``forward`` other than the batch's, such as ``edge_weight``.

        Raises:
            ValueError: If ``x`` is sparse and requires a gradient, or an explainer needs embeddings
                that can't be shown to it.
        """
        if is_sparse(x) and x.requires_grad:
            raise ValueError(
                "'x' is sparse and requires a gradient, which PyTorch doesn't hand on to masks of "
                "it: pass dense rows, those that 'batch.x' has after model.at(batch)"
            )
        with self._apply_mode(), prepare_layers(self.model, edge_index, self._masks):
            _, _, given = self.model.inputs_of(self.batch.data)
            out = self.model(x, edge_index, *self.batch[1:], push=False, **{**given, **kwargs})
            return show_embeddings(self.model, self.batch, out)
