"""Values that a trace can't read: attention weights, and pointers by which messages are reduced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import Proxy
from torch_geometric.typing import WITH_TORCH_SCATTER, torch_scatter
from torch_geometric.utils import scatter, segment

from gas.convert.values.modes import copy_function, replace_functions


class UnreadablePlaceholder:
    """A placeholder that may be passed on; reading it raises an error with a given text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, key: str) -> Any:
        is_special = key[:2] == "__"  # Such as what copy and torch.fx ask for.
        return object.__getattribute__(self, key) if is_special else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(self._text)

    __fx_create_arg__ = __bool__ = __len__ = __iter__ = __getitem__ = __torch_function__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


class AttentionWeights(UnreadablePlaceholder):
    """The edges and attention weights that a layer returns besides its rows."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"it reads the attention weights of '{name}', which are of the edges of a mini-batch "
            "alone: call the layer without return_attention_weights, and after training, read the "
            "weights of the module itself, which has the trained parameters"
        )

    def __iter__(self) -> Iterator[AttentionWeights]:
        return iter((self, self))

    def __getitem__(self, position: int) -> AttentionWeights:
        return self


class RowPointers(UnreadablePlaceholder):
    """Positions at which the entries of each row of a sparse matrix begin.

    Args:
        row: The row of each entry, in any order.
        size: The number of rows.
    """

    def __init__(self, row: Any, size: Any) -> None:
        super().__init__(
            "it reads where the rows of a sparse matrix begin, other than by segment or "
            "segment_csr: take row, col, value = adj_t.coo(), scatter by row, and adj_t.sum(dim=1) "
            "for degrees"
        )
        self.row, self.size = row, size


def _make_segment(function: Any) -> Callable[..., Any]:
    """Make a function that reduces segments, also those of pointers that are traced."""
    copied = copy_function(function)

    def reduce_segments(src: Any, ptr: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(ptr, RowPointers):
            return copied(src, ptr, *args, **kwargs)
        given = inspect.signature(copied).bind(src, ptr, *args, **kwargs).arguments
        return scatter(src, ptr.row, 0, ptr.size, given.get("reduce", "sum"))

    return reduce_segments


def _make_extreme(function: Any, reduce: str) -> Callable[..., Any]:
    """Make ``torch_scatter.scatter_max``, or min, of traced messages, without the positions."""

    def extreme(src: Any, index: Any, dim: int, out: Any, dim_size: Any) -> Any:
        if not isinstance(src, Proxy) or out is not None:
            return function(src, index, dim, out, dim_size)
        return scatter(src, index, dim, dim_size, reduce), None

    return extreme


@contextmanager
def trace_segments() -> Iterator[None]:
    """Let a module that is traced reduce messages by pointers, and by torch-scatter."""
    functions: list[Any] = [segment, *([torch_scatter.segment_csr] if WITH_TORCH_SCATTER else [])]
    made = {each: _make_segment(each) for each in functions}
    with replace_functions(made), ExitStack() as stack:
        if WITH_TORCH_SCATTER:
            operators: Any = torch.ops.torch_scatter
            for reduce in ("min", "max"):
                name = f"scatter_{reduce}"
                extreme = _make_extreme(getattr(operators, name), reduce)
                stack.enter_context(mock.patch.object(operators, name, extreme))
        yield
