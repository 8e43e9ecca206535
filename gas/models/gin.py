"""The graph isomorphism network, with the regulariser for its histories."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Identity, Linear, Module, ModuleList, ReLU, Sequential
from torch_geometric.nn.inits import reset

from gas.history import Features, Rows, first_rows
from gas.models.layered import LayeredGNN
from gas.nn import GINConv, Neighbours
from gas.scalable import check_constructor


class GIN(LayeredGNN):
    """A graph isomorphism network (Xu et al., ICLR 2019) with historical embeddings.

    Sums over neighbours amplify the error of old embeddings, so that GNNAutoScale adds a
    regulariser: after a forward pass in training mode, ``reg_loss`` holds the mean over rows of
    ``|f(h) - f(h + eps)|`` with ``eps ~ N(0, noise^2)``, averaged over the layers ``f`` but the
    first; add it to the loss. Edges have no weights; load a graph that has some with
    ``edge_weight=False``. Histories hold the output of each layer after the activation.

    Source: Fey et al., *GNNAutoScale*, ICML 2021, section 3.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of the hidden layers, or one width for each of them.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer and inside each layer's perceptron.
            (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        train_eps: Learn the weight of a node's own embedding. (default: ``True``)
        noise: Standard deviation of the regulariser's noise; 0 switches it off.
            (default: ``0.0``; published: ``0.1``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    gains_by_sparse = False

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int | Sequence[int],
        out_channels: int,
        num_layers: int,
        dropout: float = 0.0,
        drop_input: bool = True,
        batch_norm: bool = False,
        residual: bool = False,
        train_eps: bool = True,
        noise: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if not 0 <= noise < math.inf:
            raise ValueError(f"'noise' is {noise}, expected a standard deviation of at least 0")
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        self.noise = noise
        self.reg_loss: Tensor | float = 0.0
        self.mlps = ModuleList()
        is_deep = num_layers > 1

        def make_conv(i: int, o: int) -> GINConv:
            # The last perceptron is as wide inside as its input, or few classes are a bottleneck.
            inner = i if is_deep and len(self.mlps) == num_layers - 1 else o
            norm = BatchNorm1d(inner) if batch_norm else Identity()
            self.mlps.append(Sequential(Linear(i, inner), norm, ReLU(), Linear(inner, o)))
            return GINConv(Identity(), train_eps=train_eps)

        self._add_convs(make_conv)

    @property
    def reg_modules(self) -> ModuleList:
        """Return the modules that take the regular weight decay: all but the last perceptron."""
        return ModuleList([*self.convs, *self.mlps[:-1], *self.bns])

    @property
    def nonreg_modules(self) -> ModuleList:
        """Return the modules that take the other weight decay."""
        return self.mlps[-1:]

    def reset_parameters(self) -> None:
        """Draw new weights and reset the histories."""
        super().reset_parameters()
        reset(self.mlps)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reg_loss": 0.0}  # It keeps a batch's graph of autograd.

    def forward(
        self,
        x: Tensor | Features,
        adj_t: Any,
        *args: Any,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of the in-batch nodes, or of all, and set ``reg_loss``."""
        self.reg_loss = 0.0
        return super().forward(x, adj_t, *args, edge_weight=edge_weight)

    def _conv(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        conv, mlp = self.convs[layer], self.mlps[layer]

        def apply_layer(h: Tensor | Rows) -> Tensor:
            # The empty rows of a square batch must not reach the statistics of batch norm.
            return mlp(first_rows(conv(graph.layer_input(h), graph.adj_t), graph.batch_size))

        out = apply_layer(x)
        if self.training and self.noise > 0 and layer > 0:
            whole = x.tensor() if isinstance(x, Rows) else x
            with _freeze_running_stats(mlp):
                noisy = apply_layer(whole + self.noise * torch.randn_like(whole))
            distance = torch.linalg.vector_norm(noisy - out, dim=-1)
            self.reg_loss = self.reg_loss + distance.mean() / (self.num_layers - 1)
        return out


@contextlib.contextmanager
def _freeze_running_stats(module: Module) -> Iterator[None]:
    """Keep running statistics of batch norms unchanged, for a second pass over a batch."""
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm1d)]
    before = [norm.track_running_stats for norm in norms]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm, tracks in zip(norms, before, strict=True):
            norm.track_running_stats = tracks
