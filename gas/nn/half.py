"""What layers make of float16, which no kernel computes in: float32 on the way.

``torch.autocast('cuda')`` makes linear layers give float16, and the layers of PyG multiply that by
weights in float32, so that their messages are float32. What is computed here is given back in the
type that PyG's layers give.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from gas.history.rows import Rows

HALF = torch.float16


def type_of_messages(x: Tensor | Rows, *weights: Tensor) -> torch.dtype:
    """The type of messages that are features times weights: that of ``x``, but for float16."""
    if x.dtype != HALF:
        return x.dtype
    return reduce(torch.promote_types, (weight.dtype for weight in weights), x.dtype)


def wide(kind: torch.dtype) -> torch.dtype:
    """The type that kernels compute results of a type in, and weights have."""
    return torch.float32 if kind in (HALF, torch.bfloat16) else kind
