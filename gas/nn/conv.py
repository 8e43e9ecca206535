"""Base of the fused convolutions: constructors, weights and outputs are those of PyG's.

They take the arguments of PyG's layers, and a :class:`gas.nn.Adjacency` as ``adj_t``, square or
bipartite. Calls that can't be fused run PyG's own code; ``conv.path`` names the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gas.graph import Adjacency, shares_rows, to_dense
from gas.history import Features, Rows
from gas.native import is_sparse
from gas.nn.sparse_features import accept_sparse_features
from gas.nn.spmm import REDUCES

# The hooks of PyG's message passing, in the dictionaries of a layer.
MESSAGE_HOOKS = tuple(
    f"_{method}_forward{kind}_hooks"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("_pre", "")
)


def pyg_class(cls: type) -> type:
    """Return the class of PyG that a class here extends."""
    return next(filter(_is_pyg_class, cls.__mro__))


def _is_pyg_class(cls: type) -> bool:
    return cls.__module__.startswith("torch_geometric.")


@contextlib.contextmanager
def _use_pyg_class(conv: Any) -> Iterator[None]:
    """Give a layer PyG's class in this context: PyG compiles methods from a class's source."""
    cls = type(conv)
    conv.__class__ = pyg_class(cls)
    try:
        yield
    finally:
        conv.__class__ = cls


class FusedConv:
    """A convolution whose aggregation is an operator of :mod:`gas.nn`, such as a sparse product.

    It is mixed into classes of PyG, which the type checker doesn't know.
    """

    aggr: Any
    flow: str
    _explain: bool | None
    path = "pyg: not called yet"
    """The path of the last call: ``"fused"``, or ``"pyg: <reason>"``."""

    _extends_pyg: bool
    """Whether the class directly extends PyG's, so that both aggregate alike."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._extends_pyg = next(filter(_is_pyg_class, cls.__mro__), None) in cls.__bases__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _use_pyg_class(self):
            self.__init__(*args, **kwargs)  # type: ignore[misc]
        if self.takes_sparse:
            accept_sparse_features(self)  # type: ignore[arg-type]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        with _use_pyg_class(self):
            self._set_jittable_templates(raise_on_error)

    takes_pairs = True
    """Whether sources and destinations may be given as a pair, ``(x, x[:batch_size])``."""

    takes_sparse = False
    """Whether it takes sparse features; otherwise they are converted to dense ones."""

    @property
    def multiplies_sparse(self) -> bool:
        """Return whether only the non-zeros of sparse features are multiplied."""
        return self.takes_sparse

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`torch.nn.Module`; takes :class:`Rows` and sparse features for tensors."""
        if isinstance(x, Rows) and self.takes_pairs:
            x = (x, x.own)
        if not self.takes_sparse and has_sparse(x):
            x = to_dense(x)
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]

    @property
    def explain(self) -> bool | None:
        """See :class:`torch_geometric.nn.MessagePassing`."""
        return self._explain

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        MessagePassing.explain.fset(self, explain)
        if not explain:  # PyG's function, which would hide the method of the class.
            self.__dict__.pop("propagate", None)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Aggregate over an :class:`Adjacency`; call PyG's method for other layouts."""
        if not isinstance(edge_index, Adjacency):
            self.path = f"pyg: the adjacency is a {type(edge_index).__name__}"
            kwargs = to_tensors(kwargs)
            return super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        weight = kwargs.get("edge_weight")
        adj = edge_index if weight is None else add_weight(edge_index, weight)
        reason = self._reason_not_fused(adj)
        if reason:
            self.path = f"pyg: {reason}"
            edges, kwargs = self._pyg_inputs(adj, to_tensors(kwargs))
            return super().propagate(edges, **kwargs)  # type: ignore[misc]
        if self.path != "fused":  # Setting an attribute of a module is slow.
            self.path = "fused"
        return self._propagate(adj, **kwargs)

    def _pyg_inputs(self, adj: Adjacency, kwargs: Any) -> tuple[Tensor, Any]:
        """Return the edges and the further arguments of PyG's ``propagate``.

        The edges are a matrix, which PyG multiplies, unless a message for each is needed: for
        hooks, or for extremes, which PyG doesn't compute of a matrix on a GPU.
        """
        has_hooks = any(getattr(self, name) for name in MESSAGE_HOOKS if "_and_" not in name)
        if self.flow != "source_to_target" or not (has_hooks or self._reduce in ("max", "min")):
            return adj.to_torch_sparse(), kwargs
        edges, weight = adj.to_edge_index()
        if "edge_weight" in kwargs:
            kwargs = {**kwargs, "edge_weight": weight}
        return edges, {**kwargs, "size": (adj.size(1), adj.size(0))}

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        """Aggregate over ``adj``."""
        raise NotImplementedError

    def _run_pyg(self, reason: str, x: Any, edges: Any, *args: Any) -> Any:
        """Run PyG's ``forward`` for a reason, on an ``edge_index`` in place of an adjacency.

        Values of the adjacency are left out.
        """
        if isinstance(edges, Adjacency):
            edges, _ = edges.to_edge_index()
        out = super().forward(to_tensors(x), edges, *args)  # type: ignore[misc]
        self.path = f"pyg: {reason}"
        return out

    def _reason_not_fused(self, adj: Adjacency) -> str:
        """Return the reason why the aggregation over ``adj`` can't be fused; "" if it can."""
        if not self._extends_pyg:
            cls = type(self)
            return f"{cls.__name__} may aggregate in another way than {pyg_class(cls)}"
        if self._reduce not in REDUCES:
            return f"aggr={self.aggr!r} is none of {', '.join(REDUCES)}"
        if self.flow != "source_to_target":
            return f"flow={self.flow!r}"
        if self._explain:
            return "an explanation masks its edges"
        for name in MESSAGE_HOOKS:  # A generator would be a Python call for each.
            if getattr(self, name):
                return "message passing has hooks"
        return ""

    @property
    def _reduce(self) -> str:
        aggr = self.aggr
        return ("sum" if aggr == "add" else aggr) if isinstance(aggr, str) else ""


def add_weight(adj: Adjacency, edge_weight: Tensor | None) -> Adjacency:
    """Return an adjacency with the weights of a call, in the order of its entries, as values.

    Raises:
        ValueError: If it has values already, or there is not one weight for each entry.
    """
    if edge_weight is None:
        return adj
    if adj.value is not None:
        raise ValueError(
            "'edge_weight' is given, but the adjacency has values of its own: leave one of them "
            "out, such as by adj.with_value(None)"
        )
    if edge_weight.numel() != adj.num_entries:
        raise ValueError(
            f"'edge_weight' has shape {list(edge_weight.shape)}, expected [{adj.num_entries}]: one "
            "for each entry of the adjacency, in its order"
        )
    return adj.with_value(edge_weight.view(-1))


def has_sparse(x: Any) -> bool:
    """Return whether features, or one of a pair, are a ``torch.sparse_csr`` matrix."""
    for each in x if isinstance(x, tuple) else (x,):
        if isinstance(each, Tensor) and each.layout == torch.sparse_csr:
            return True
    return False


def to_tensors(x: Any) -> Any:
    """Replace each :class:`Rows` in an argument by a tensor."""
    if isinstance(x, Rows):
        return x.tensor()
    if isinstance(x, dict):
        return {name: to_tensors(value) for name, value in x.items()}
    return tuple(map(to_tensors, x)) if type(x) is tuple else x


def apply_rowwise(function: Callable[[Tensor], Tensor], x: Tensor | Rows) -> Tensor:
    """Apply a row-wise function, such as a linear layer."""
    if isinstance(x, Features):
        return function(x.tensor())
    if isinstance(x, Rows):
        return torch.cat([function(x.own), function(x.halo_tensor())])
    return function(x)


def is_leading_view(whole: Tensor | Rows, part: Tensor) -> bool:
    """Return whether ``part`` is a view of the first rows of ``whole``, or its in-batch rows."""
    if isinstance(whole, Rows):
        return part is whole.own
    if is_sparse(whole):
        return is_sparse(part) and shares_rows(whole, part)
    if torch.compiler.is_compiling():
        return False  # Pointers aren't known.
    return (
        whole.requires_grad == part.requires_grad
        and part._base is not None
        and (part._base is whole or part._base is whole._base)
        and whole.data_ptr() == part.data_ptr()
        and whole.stride() == part.stride()
        and part.size(0) <= whole.size(0)
        and part.shape[1:] == whole.shape[1:]
    )
