"""``LayeredGNN``: the base of the models, for ``forward`` and layer-wise inference."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module, ModuleList
from torch_geometric.nn.inits import reset

from gas.history import Features, Rows, first_rows
from gas.nn import (
    Adjacency,
    Neighbours,
    apply_rowwise,
    check_weights,
    dropout,
    relu_dropout,
)
from gas.scalable import (
    ScalableGNN,
    check_constructor,
    check_integer,
    check_number,
    check_probability,
    collect_kwargs,
)

if TYPE_CHECKING:
    from gas.loader import SubData


class LayeredGNN(ScalableGNN):
    """A model whose layers are alike: a convolution, normalisation, a residual, an activation.

    A subclass fills ``lins`` with a first and a last linear layer, if it has them, then ``convs``
    and ``bns`` with :meth:`_add_convs`, and overrides :meth:`_conv` if convolutions have other
    arguments. Histories hold each layer's output after the activation, before dropout.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of the hidden layers, or one width for each of them.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer. (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    needs_weights = False
    """Whether edges need the weights of ``transform``."""

    jumping_knowledge = False
    """Whether the last linear layer takes the outputs of all layers."""

    gains_by_sparse = True
    """Whether the first layers multiply only the non-zeros of sparse features."""

    infers_in_channels = False
    """Infer the width of the input from the first batch if ``in_channels=-1``, as PyG does."""

    _is_static = True
    activation: Callable[[Tensor], Tensor] = staticmethod(torch.relu)

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
        **kwargs: Any,
    ) -> None:
        # All checks come first: histories may be files.
        check_probability("dropout", dropout, below_one=True)
        if in_channels != -1 or not self.infers_in_channels:
            check_integer("in_channels", in_channels, 1)
        check_integer("out_channels", out_channels, 1)
        widths = hidden_channels if isinstance(hidden_channels, Sequence) else [hidden_channels]
        for width in widths:
            check_integer("hidden_channels", width, 1)
        super().__init__(num_nodes, hidden_channels, num_layers, **kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.batch_norm = batch_norm
        self.dropout = dropout
        self.drop_input = drop_input
        self.drop_first = drop_input  # For the input of the first convolution.
        self.residual = residual
        self.lins = ModuleList()
        self.convs = ModuleList()
        self.bns = ModuleList()

    def _add_convs(self, make_conv: Callable[[int, int], Module]) -> None:
        """Add the convolutions, made of their input and output width, and the batch norms.

        Between linear layers all are ``hidden_channels`` wide.
        """
        widths = [self.in_channels, *(h.embedding_dim for h in self.histories), self.out_channels]
        normed = widths[1:-1]
        if self.lins:
            widths = [cast(int, self.hidden_channels)] * (self.num_layers + 1)
            normed = widths[1:]
            self.drop_first = True
        for sizes in itertools.pairwise(widths):
            self.convs.append(make_conv(*sizes))
        if self.batch_norm:
            self.bns.extend(map(BatchNorm1d, normed))

    def _drop(self, x: Any, applies: bool = True) -> Any:
        """Apply dropout in training, if it ``applies`` at all."""
        return dropout(x, self.dropout, self.training and applies)

    @property
    def reg_modules(self) -> ModuleList:
        """Return the modules of the regular weight decay: all but linear layers, or the last."""
        convs = self.convs if self.lins else self.convs[:-1]
        return ModuleList([*convs, *self.bns])

    @property
    def nonreg_modules(self) -> ModuleList:
        """Return the modules that take the other weight decay."""
        return self.lins if self.lins else self.convs[-1:]

    def param_groups(
        self, reg_weight_decay: float, nonreg_weight_decay: float
    ) -> list[dict[str, Any]]:
        """Return the parameters with their weight decay, as an optimizer takes them."""
        groups = (
            (self.reg_modules, reg_weight_decay),
            (self.nonreg_modules, nonreg_weight_decay),
        )
        return [
            {"params": list(modules.parameters()), "weight_decay": decay}
            for modules, decay in groups
            if any(True for _ in modules.parameters())
        ]

    def reset_parameters(self) -> None:
        """Draw new weights and clear the histories."""
        super().reset_parameters()
        for module in (*self.lins, *self.convs, *self.bns):
            reset(module)

    # The model, whole and layer by layer ----------------------------------------------------------

    def forward(
        self,
        x: Tensor | Features,
        adj_t: Any,
        *args: Any,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of the in-batch nodes, or of all; see :class:`gas.ScalableGNN`."""
        check_features(x)
        graph = self._graph(adj_t, edge_weight, args[0] if args else None)
        start: Any = self._start(x)
        first = functools.partial(first_rows, start, graph.batch_size)
        outs = [first()] if self.jumping_knowledge else []
        h = self._drop_rows(0, start)  # Between layers Rows, where they take them.
        in_one_pass = self._drops_in_one_pass(graph)
        for layer, history in enumerate(self.histories):
            h, dropped = self._hidden_layer(layer, h, first, graph, in_one_pass)
            if self.jumping_knowledge:
                outs.append(h)
            h = self.push_and_pull(history, h, *args, rows=graph.supports_rows)
            if dropped is None:
                h = self._drop_rows(layer + 1, h)
            else:
                h = replace(h, own=dropped) if isinstance(h, Rows) else dropped
        last = self.num_layers - 1
        h = self._activate(last, self._layer(last, h, first, graph))
        return self._end(torch.cat([*outs, h], dim=-1) if self.jumping_knowledge else h)

    def forward_layer(
        self,
        layer: int,
        x: Tensor,
        adj_t: Any,
        state: dict[str, Any],
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Compute one layer; see :meth:`gas.ScalableGNN.forward_layer`.

        Outputs of earlier layers are computed again from the features, or read from the histories,
        so that nothing is kept between layers.
        """
        if layer == 0:
            check_features(x)
        batch = state["batch"]
        own = batch.n_id[: batch.batch_size]
        graph = self._graph(adj_t, edge_weight, batch.batch_size)

        def first() -> Tensor:
            return self._start(first_rows(batch.data.x, batch.batch_size))

        if layer == 0:
            x = self._start(x)
        x = self._drop_rows(layer, x)
        out = self._activate(layer, self._layer(layer, x, first, graph))
        if layer < self.num_layers - 1:
            return out
        if self.jumping_knowledge:
            earlier = [history.pull(own).to(out) for history in self.histories]
            out = torch.cat([first(), *earlier, out], dim=-1)
        return self._end(out)

    def _forward_inputs(self, batch: SubData) -> tuple[Tensor | Features, Any, dict[str, Any]]:
        adj_t = batch.data.get("adj_t")
        is_narrow = isinstance(adj_t, Adjacency) and adj_t.size(0) == batch.batch_size
        if not (is_narrow and self._has_private_features):
            return super()._forward_inputs(batch)
        # Input features stay in their store.
        return batch.features(), adj_t, collect_kwargs(self.forward, batch.data)

    @property
    def _has_private_features(self) -> bool:
        """Return whether only layers of gas read the input features, and no hooks or subclasses."""
        return (
            type(self).__module__.startswith("gas.")  # Not a user's subclass.
            and not ("forward" in vars(self) or "inputs_of" in vars(self))
            and not any(m._forward_pre_hooks or m._forward_hooks for m in self.modules())
            and not torch.nn.modules.module._has_any_global_hook()
        )

    @property
    def _supports_sparse_features(self) -> bool:
        return self.gains_by_sparse and self._has_private_features

    def _graph(self, adj_t: Any, edge_weight: Tensor | None, batch_size: int | None) -> Neighbours:
        """Check the edge weights, and return the arguments of layers for a graph."""
        if self.needs_weights:
            check_weights(adj_t, edge_weight)
        return Neighbours(adj_t, edge_weight, batch_size)

    def _start(self, x: Tensor | Rows) -> Any:
        """Transform the input features of each node, by the first linear layer if there is one."""
        if not self.lins:
            return x
        return apply_rowwise(self.lins[0], self._drop(x, self.drop_input)).relu()

    def _hidden_layer(
        self,
        layer: int,
        x: Tensor | Rows,
        first: Callable[[], Tensor],
        graph: Neighbours,
        in_one_pass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's rows to push, and these after dropout if one pass computes both."""
        if not in_one_pass:
            return self._activate(layer, self._layer(layer, x, first, graph)), None
        if not self._own_norms() or self.residual:
            return relu_dropout(self._layer(layer, x, first, graph), self.dropout)
        h = first_rows(self._conv(layer, x, first, graph), graph.batch_size)
        return relu_dropout(h, self.dropout, self.bns[layer])

    def _layer(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        """Compute a layer up to its activation, of shape ``[batch_size, width]``.

        ``first()`` has the rows of _start; those of ``x`` have been dropped.
        """
        # A square batch has empty halo rows: they must not reach the statistics of batch norm.
        h = first_rows(self._conv(layer, x, first, graph), graph.batch_size)
        if not self._has_activation(layer):
            return h
        if self.bns:
            h = self.bns[layer](h)
        if self.residual and h.size(-1) == x.size(-1):
            own = first_rows(x, h.size(0))
            h = h + (own if own.layout == torch.strided else own.to_dense())
        return h

    def _drop_rows(self, layer: int, x: Any) -> Any:
        """Apply dropout to the input of a layer."""
        return self._drop(x, layer > 0 or self.drop_first)

    def _activate(self, layer: int, x: Tensor) -> Tensor:
        """Apply the activation of a layer, if it has one."""
        return self.activation(x) if self._has_activation(layer) else x

    def _has_activation(self, layer: int) -> bool:
        return layer < self.num_layers - 1 or bool(self.lins)

    def _drops_in_one_pass(self, graph: Neighbours) -> bool:
        """Return whether :func:`gas.nn.relu_dropout` is all that happens to rows between layers.

        Only ``push_and_pull`` sees the rows before dropout, and returns them as they are.
        """
        return (
            self.training
            and self.dropout > 0
            and self.activation is torch.relu
            and type(self)._drop_rows is LayeredGNN._drop_rows
            and type(self)._activate is LayeredGNN._activate
            and not self.jumping_knowledge
            and (graph.batch_size is None or graph.supports_rows)
            and getattr(self.push_and_pull, "__func__", None) is ScalableGNN.push_and_pull
            and not torch.compiler.is_compiling()
        )

    def _own_norms(self) -> Iterable[Module]:
        is_own = type(self).__module__.startswith("gas.")  # Not a user's subclass.
        return self.bns if is_own and type(self)._layer is LayeredGNN._layer else ()

    def _conv(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        """Compute the convolution of a layer."""
        return self.convs[layer](graph.layer_input(x), graph.adj_t)

    def _end(self, x: Tensor) -> Tensor:
        """Transform the rows of each node after the last layer."""
        if not self.lins:
            return x
        return self.lins[-1](self._drop(x))


def check_share(name: str, value: float) -> None:
    """Raise ``ValueError`` unless a share is between 0 and 1."""
    check_number(name, value, lambda share: 0 <= share <= 1, "a share in [0, 1]")


def check_features(x: object) -> None:
    """Raise ``ValueError`` unless features are a matrix, with one row for each node."""
    if isinstance(x, Tensor | Rows) and x.dim() == 2:
        return
    found = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is {x!r}"
    raise ValueError(
        f"'x' {found}, expected features of shape [N, F], a row for each node: a number for "
        "each is x.view(-1, 1); where there are none, T.Constant()(data) or T.OneHotDegree(most)"
        "(data) of PyG makes some, of the whole graph"
    )
