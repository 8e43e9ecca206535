"""Dropout by a counter-based generator: the native function, and its pure-torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from gas import native
from gas.native import buffers


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Drops elements: ``x / (1 - p)`` where the seed keeps them, 0 elsewhere.

    The same seed drops the same elements, so that nothing has to be stored for the backward pass.

    Args:
        x: A float32 or float64 tensor of any shape, on the CPU.
        p: The probability of dropping an element, in ``[0, 1)``.
        seed: Of the generator, in ``[0, 2^63)``.
    """
    threshold, scale = round(p * 2**32), 1.0 / (1.0 - p)
    x = x.resolve_neg().contiguous()
    if not native.on_cpu(x):
        return _dropout_torch(x, threshold, scale, seed)
    out = buffers.empty(x.size(0), x.size(1), x) if x.dim() == 2 else torch.empty_like(x)
    kernel = getattr(native.C, "dropout_float32" if x.dtype == torch.float32 else "dropout_float64")
    kernel(x.data_ptr(), x.numel(), threshold, scale, seed, out.data_ptr(), torch.get_num_threads())
    return out


def _dropout_torch(x: Tensor, threshold: int, scale: float, seed: int) -> Tensor:
    z = random_bits((x.numel() + 1) // 2, seed, x.device)
    bits = torch.stack([z & 0xFFFFFFFF, _shift(z, 32)], dim=1).view(-1)[: x.numel()]
    factor = (bits >= threshold).to(x.dtype) * scale
    return x * factor.view(x.shape)


def random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """64 random bits for each of ``count`` counters, as int64; ``common/random.h`` in torch."""

    def signed(z: int) -> int:
        return (z + 2**63) % 2**64 - 2**63

    counter = torch.arange(count, device=device) + 1
    z = counter * signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:  # Right, filling with zeros.
    return (z >> bits) & ((1 << (64 - bits)) - 1)
