"""A model on one mini-batch, as a module that only reads the histories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gas.loader import SubData
from gas.native import is_sparse
from gas.nn import Masks, forget_masks, prepare_layers, show_embeddings
from gas.scalable.call import BatchModel


class OneBatch(nn.Module):
    """Module from :meth:`gas.ScalableGNN.at`: ``model(batch, push=False)`` for other features.

    Its outputs are those of the in-batch nodes, so ``index=`` of an explainer counts these. It has
    the parameters and the mode of ``model``, unless it is set to another, and what else ``forward``
    takes of ``batch``. Explainers leave nothing behind in the layers of ``model``.
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
        if is_sparse(batch.data.x):  # Explainers mask each feature, a zero like others.
            batch.data.x = batch.data.x.to_dense()
        self.batch = batch.to(model.device)

    def train(self, mode: bool = True) -> OneBatch:
        """Set the mode of this module, and that of the model while this module runs."""
        self._mode = None if mode == self.model.training else mode
        forget_masks(self._masks)
        return self

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[None]:
        """Give the model this module's mode in this context."""
        if self._mode is None:
            yield
            return
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(self._mode)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def forward(self, x: Tensor, edge_index: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the in-batch nodes, of shape ``[batch_size, out_channels]``.

        Args:
            x: Features of the batch's nodes, halo included.
            edge_index: Its edges, in the loader's layout.
            **kwargs: In place of what the batch has for ``forward``, such as ``edge_weight``.

        Raises:
            ValueError: If ``x`` is sparse and takes a gradient, or an explainer can't be shown what
                it looks at.
        """
        if is_sparse(x) and x.requires_grad:
            raise ValueError(
                "'x' is sparse and requires a gradient, which PyTorch doesn't hand on to masks of "
                "it: pass dense rows, those that 'batch.x' has after model.at(batch)"
            )
        with self._in_mode(), prepare_layers(self.model, edge_index, self._masks):
            _, _, given = self.model.inputs_of(self.batch.data)
            out = self.model(x, edge_index, *self.batch[1:], push=False, **{**given, **kwargs})
            return show_embeddings(self.model, self.batch, out)
