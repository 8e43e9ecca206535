"""float16 in layers: kernels compute in float32 instead.

Under ``torch.autocast('cuda')``, linear layers return float16, and PyG's layers multiply it by
weights in float32, so that their messages are float32. Results here have the dtype of PyG's.
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
