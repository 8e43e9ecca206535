"""Dropout by a counter-based generator: the native functions, and their pure-torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.checks import check_index
from gas.native.matrix import run_typed
from gas.native.rows import gather_rows
from gas.native.transfer import CODECS, Job, empty


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Drop elements: return ``x / (1 - p)`` for those that are kept, else 0.

    The same seed drops the same elements, so that nothing has to be stored for the backward pass.

    Args:
        x: A float32 or float64 tensor of any shape, on the CPU.
        p: The probability of dropping an element, in ``[0, 1)``.
        seed: The seed of the generator, in ``[0, 2^63)``.
    """
    threshold, scale = round(p * 2**32), 1.0 / (1.0 - p)
    x = x.resolve_neg().contiguous()
    if not native.on_cpu(x):
        return _dropout_torch(x, threshold, scale, seed)
    out = _empty(x)
    run_typed("dropout", x, x, x.numel(), threshold, scale, seed, out)
    return out


def relu_dropout(x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """Compute ``x.relu()`` and ``dropout(x.relu(), p, seed)``, on the CPU in one pass."""
    threshold, scale = round(p * 2**32), 1.0 / (1.0 - p)
    x = x.resolve_neg().contiguous()
    if not native.on_cpu(x):
        relu = x.relu()
        return relu, _dropout_torch(relu, threshold, scale, seed)
    relu, out = _empty(x), _empty(x)
    run_typed("relu_dropout", x, x, x.numel(), threshold, scale, seed, relu, out)
    return relu, out


def relu_dropout_backward(grad: Tensor, dropped: Tensor, p: float) -> Tensor:
    """Compute the gradient towards ``x`` of :func:`relu_dropout`, whose last output is given."""
    scale = 1.0 / (1.0 - p)
    if not native.on_cpu(grad, dropped):
        return torch.where(dropped == 0, 0.0, grad * scale)
    grad = grad.resolve_neg().contiguous()
    out = _empty(grad)
    run_typed("relu_dropout_backward", grad, grad, dropped, grad.numel(), scale, out)
    return out


def norm_relu_dropout(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, p: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Compute :func:`relu_dropout` of ``(x - mean) * scale + shift``, on the CPU in one pass.

    Args:
        x: A float32 or float64 matrix, of shape ``[rows, width]``.
        mean: The mean of each column, of shape ``[width]`` and the type of ``x``.
        scale: The factor of each column, like ``mean``.
        shift: What is added to each column, like ``mean``.
        p: The probability of dropping an element, in ``[0, 1)``.
        seed: The seed of the generator, in ``[0, 2^63)``.
    """
    if not native.on_cpu(x):
        return relu_dropout((x - mean) * scale + shift, p, seed)
    x, *columns = (each.resolve_neg().contiguous() for each in (x, mean, scale, shift))
    relu, out = _empty(x), _empty(x)
    options = round(p * 2**32), 1.0 / (1.0 - p), seed
    run_typed("norm_relu_dropout", x, x, *x.shape, *columns, *options, relu, out)
    return relu, out


def norm_relu_dropout_backward(
    grad: Tensor,
    dropped: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a batch norm before :func:`relu_dropout`.

    Args:
        grad: The gradient towards ``dropped``.
        dropped: The last output of :func:`norm_relu_dropout`.
        x: Its input, of shape ``[rows, width]``.
        mean: The mean of each column.
        inverse: One over the standard deviation of each column.
        weight: The weight of each column.
        p: The probability of dropping an element.

    Returns:
        The gradients towards ``x``, and the norm's weight and bias.
    """
    is_native, factor = native.on_cpu(grad, dropped, x), 1.0 / (1.0 - p)
    if is_native:
        x, out = x.resolve_neg().contiguous(), _empty(x)
        given = grad.resolve_neg().contiguous(), dropped, x, *x.shape, mean
        sums = x.new_empty(2, x.size(1), dtype=torch.float64)
        run_typed("norm_relu_dropout_sums", x, *given, factor, sums)
    else:
        out = relu_dropout_backward(grad, dropped, p)
        sums = torch.stack([out, out * (x - mean)]).sum(1, dtype=torch.float64)
    scale, (total, product) = inverse * weight, sums
    slope, shift = (-(scale / x.size(0) * each).to(x) for each in (inverse**2 * product, total))
    if is_native:
        run_typed("norm_relu_dropout_backward", x, *given, scale, slope, shift, factor, out)
    else:
        out = out * scale + (x - mean) * slope + shift
    return out, (product * inverse).to(x), total.to(x)


def _empty(x: Tensor) -> Tensor:
    return empty(x.size(0), x.size(1), x) if x.dim() == 2 else torch.empty_like(x)


def gather_dropout(table: Tensor, index: Tensor, p: float, seed: int) -> Tensor:
    """Compute ``dropout(gather_rows(table, index), p, seed)``, on the CPU in one pass."""
    if not native.on_cpu(table, index) or not table.is_contiguous() or table.is_neg():
        return dropout(gather_rows(table, index), p, seed)
    check_index("index", index)
    index = index.contiguous()
    out = empty(index.numel(), table.size(1), table)
    rows = table, table.size(0), table.size(1), index, index.numel()
    options = round(p * 2**32), 1.0 / (1.0 - p), seed
    run_typed("gather_dropout", table, *rows, *options, out)
    return out


def gather_decode(table: Tensor, codec: str, width: int, index: Tensor) -> Tensor:
    """Decode rows of a table of stored rows: float32, of shape ``[n, width]``.

    Args:
        table: The stored rows, contiguous, of shape ``[N, columns]``, on the CPU.
        codec: The codec of the rows, a key of ``CODECS``.
        width: The width of decoded rows.
        index: The rows to read, of shape ``[n]``, int64.
    """
    out = empty(index.numel(), width, table.new_empty(0, dtype=torch.float32))
    Job.pull(table, index.contiguous(), out, codec, width).run()
    return out


def gather_decode_dropout(
    table: Tensor, codec: str, width: int, index: Tensor, p: float, seed: int
) -> Tensor:
    """Compute ``dropout(gather_decode(table, codec, width, index), p, seed)`` in one pass."""
    if not native.on_cpu(table, index):
        return dropout(gather_decode(table, codec, width, index), p, seed)
    check_index("index", index)
    index = index.contiguous()
    out = empty(index.numel(), width, table.new_empty(0, dtype=torch.float32))
    rows = table, table.size(0), width, index, index.numel()
    options = round(p * 2**32), 1.0 / (1.0 - p), seed
    native.run("gather_decode_dropout", table.device, CODECS[codec], *rows, *options, out)
    return out


def _dropout_torch(x: Tensor, threshold: int, scale: float, seed: int) -> Tensor:
    z = random_bits((x.numel() + 1) // 2, seed, x.device)
    bits = torch.stack([z & 0xFFFFFFFF, _shift(z, 32)], dim=1).view(-1)[: x.numel()]
    factor = (bits >= threshold).to(x.dtype) * scale
    return x * factor.view(x.shape)


def random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """Return 64 random bits for each of ``count`` counters, as int64, as ``common/random.h``."""

    def to_signed(z: int) -> int:
        return (z + 2**63) % 2**64 - 2**63

    counter = torch.arange(count, device=device) + 1
    z = counter * to_signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shift(z, 30)) * to_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * to_signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:  # Right, filling with zeros.
    return (z >> bits) & ((1 << (64 - bits)) - 1)
