"""float16 in layers: no kernel computes in it, so that they compute in float32.

``torch.autocast('cuda')`` makes linear layers give float16, and the layers of PyG multiply that by
weights in float32, so that their messages are float32. What is computed here is given back in the
type that PyG's layers give.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from gas.history import Rows

HALF = torch.float16


def message_dtype(x: Tensor | Rows, *weights: Tensor) -> torch.dtype:
    """Return the dtype of features times weights: that of ``x``, except for float16."""
    if x.dtype != HALF:
        return x.dtype
    return reduce(torch.promote_types, (weight.dtype for weight in weights), x.dtype)


def compute_dtype(kind: torch.dtype) -> torch.dtype:
    """Return the dtype of weights and of results in kernels that are given ``kind``."""
    return torch.float32 if kind in (HALF, torch.bfloat16) else kind
