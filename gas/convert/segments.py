"""Values that a trace can't read: attention weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Unread:
    """A value that may be named, but not read.

    Args:
        text: The error of what reads it.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, key: str) -> Any:
        is_special = key[:2] == "__"  # Such as what copy and torch.fx ask for.
        return object.__getattribute__(self, key) if is_special else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(self._text)

    __fx_create_arg__ = __bool__ = __len__ = __iter__ = __getitem__ = __torch_function__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


class AttentionWeights(Unread):
    """The edges and attention weights that a layer returns besides its rows.

    Args:
        name: The name of the layer.
    """

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
