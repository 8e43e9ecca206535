"""What PyG's convolutions on the fused operators share: same constructors, weights and outputs.

Each takes what PyG's takes, and an :class:`gas.nn.Adjacency` as ``adj_t``, square or bipartite.
What it can't fuse goes PyG's own way, and ``conv.path`` says which it took and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gas.graph.adjacency import Adjacency
from gas.graph.features import dense, shares_rows
from gas.history.features import Features
from gas.history.rows import Rows
from gas.native.sparse_rows import is_sparse

REDUCES = ("sum", "mean", "max", "min")


def pyg_class(cls: type) -> type:
    """The class of PyG that a class here extends."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("torch_geometric."))


@contextlib.contextmanager
def _as_pyg(conv: Any) -> Iterator[None]:
    """Makes a layer an object of PyG's class: PyG compiles methods from a class's source."""
    cls = type(conv)
    conv.__class__ = pyg_class(cls)
    try:
        yield
    finally:
        conv.__class__ = cls


class FusedConv:
    """A convolution whose aggregation is an operator of :mod:`gas.nn`, such as a sparse product.

    It stands in front of a class of PyG, which the type checker doesn't see behind it.
    """

    aggr: Any
    flow: str
    path = "pyg: not called yet"
    """``"fused"``, or ``"pyg: <reason>"``: the way the last call took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _as_pyg(self):
            self.__init__(*args, **kwargs)  # type: ignore[misc]
        if self.takes_sparse:
            from gas.nn.sparse_features import take_sparse  # By the operator of layers like this.

            # Whatever mixes this in is a Module.
            take_sparse(self)  # type: ignore[arg-type]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        with _as_pyg(self):
            self._set_jittable_templates(raise_on_error)

    takes_pairs = True
    """Whether sources and destinations may be given apart, ``(x, x[:batch_size])``."""

    takes_sparse = False
    """Whether it takes sparse features, which others are given as dense ones."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`torch.nn.Module`; takes :class:`Rows` and sparse features for tensors."""
        if isinstance(x, Rows) and self.takes_pairs:
            x = (x, x.own)
        if _any_sparse(x) and not self.takes_sparse:
            x = dense(x)
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Aggregates over an :class:`Adjacency`; leaves everything else to PyG."""
        if not isinstance(edge_index, Adjacency):
            self.path = f"pyg: the adjacency is a {type(edge_index).__name__}"
            kwargs = put_together(kwargs)
            return super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        reason = self._unsupported(kwargs)
        if reason:
            self.path = f"pyg: {reason}"
            adj, kwargs = edge_index.to_torch_sparse(), put_together(kwargs)
            return super().propagate(adj, size=size, **kwargs)  # type: ignore[misc]
        self.path = "fused"
        return self._propagate(edge_index, **kwargs)

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        """Aggregates over ``adj``."""
        raise NotImplementedError

    def _unsupported(self, kwargs: dict[str, Any]) -> str:
        """Why the aggregation can't be fused; empty if it can."""
        if pyg_class(type(self)) not in type(self).__bases__:
            return (
                f"{type(self).__name__} may aggregate in another way than {pyg_class(type(self))}"
            )
        if self._reduce not in REDUCES:
            return f"aggr={self.aggr!r} is none of {', '.join(REDUCES)}"
        if kwargs.get("edge_weight") is not None:
            return "'edge_weight' is given, but an Adjacency has values of its own"
        if self.flow != "source_to_target":
            return f"flow={self.flow!r}"
        if getattr(self, "explain", None):
            return "an explanation masks its edges"
        return ""

    @property
    def _reduce(self) -> str:
        return {"add": "sum"}.get(self.aggr, self.aggr) if isinstance(self.aggr, str) else ""


def _any_sparse(x: Any) -> bool:
    return any(map(is_sparse, x)) if isinstance(x, tuple) else is_sparse(x)


def put_together(x: Any) -> Any:
    """Tensors of the :class:`Rows` in an argument, for what takes tensors alone."""
    if isinstance(x, Rows):
        return x.tensor()
    if isinstance(x, dict):
        return {name: put_together(value) for name, value in x.items()}
    return tuple(map(put_together, x)) if type(x) is tuple else x


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor | Rows) -> Tensor:
    """``function(x)`` of a function that treats each row alike, such as a linear layer."""
    if isinstance(x, Features):
        return function(x.tensor())
    if isinstance(x, Rows):
        return torch.cat([function(x.own), function(x.pulled())])
    return function(x)


def is_front(whole: Tensor | Rows, part: Tensor) -> bool:
    """Whether a tensor is a view of the first rows of another, or the batch's own rows of it."""
    if isinstance(whole, Rows):
        return part is whole.own
    if is_sparse(whole):
        return is_sparse(part) and shares_rows(whole, part)
    if torch.compiler.is_compiling():
        return False  # It can't look at memory.
    return (
        whole.requires_grad == part.requires_grad
        and part._base is not None
        and (part._base is whole or part._base is whole._base)
        and whole.data_ptr() == part.data_ptr()
        and whole.stride() == part.stride()
        and part.size(0) <= whole.size(0)
        and part.shape[1:] == whole.shape[1:]
    )
