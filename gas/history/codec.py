"""Codecs: the precision of stored rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gas.native import transfer

_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CODEC_NAMES = ("float64", "float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Codec:
    """Precision of stored rows.

    * ``float64``, ``float32``, ``bfloat16``, ``float16``: as numbers of that type, rounded to
      nearest. Relative error of a value: 2^-53, 2^-24, 2^-8, 2^-11.
    * ``int8``: one float32 scale per row, ``max |x| / 127``, and one byte per value. Absolute error
      of a value: ``max |x| / 254``, over the row.
    """

    name: str

    @staticmethod
    def of(dtype: Codec | torch.dtype | str) -> Codec:
        """Return the codec of a ``dtype`` argument.

        Args:
            dtype: Such as ``torch.bfloat16``, ``torch.int8``, ``"bfloat16"``, ``"bf16"``.
        """
        if isinstance(dtype, Codec):
            return dtype
        name = str(dtype).removeprefix("torch.")
        name = _SHORT.get(name, name)
        if name not in CODEC_NAMES:
            raise ValueError(f"'dtype' is {dtype}, expected one of {', '.join(CODEC_NAMES)}")
        return Codec(name)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements of stored rows: bytes for ``int8``."""
        return torch.uint8 if self.name == "int8" else getattr(torch, self.name)

    @property
    def value_dtype(self) -> torch.dtype:
        """The type of rows from ``History.pull``: the stored type, and float32 for ``int8``."""
        return torch.float32 if self.name == "int8" else self.dtype

    def columns(self, width: int) -> int:
        """Return the number of elements of a stored row of ``width`` values."""
        return transfer.num_stored_columns(self.name, width)

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a stored row of ``width`` values."""
        return self.columns(width) * self.dtype.itemsize

    def cast(self, x: Tensor, first_row: int = 0, name: str = "") -> Tensor:
        """Cast rows to the type that is encoded.

        Args:
            x: The rows, of shape ``[n, ...]``.
            first_row: The number of the first. (default: ``0``)
            name: What errors call the rows, such as their file; ``'x'`` without. (default: ``""``)

        Raises:
            ValueError: If a finite value becomes infinite, naming it.
        """
        values = x.to(self.value_dtype)
        lost = None if values is x else values.isinf() & x.isfinite()
        if lost is not None and bool(lost.any()):
            row, *column = place = lost.nonzero()[0].tolist()
            value = x[tuple(place)]
            at = f", column {', '.join(map(str, column))}" if column else ""
            wider = ", or store them as float32" if bool(value.float().isfinite()) else ""
            raise ValueError(
                f"{name or repr('x')} holds {float(value):g} in row {first_row + row}{at}, but "
                f"{self} ends at {torch.finfo(values.dtype).max:g}: scale the features{wider}"
            )
        return values.float() if self.name in transfer.CODECS else values

    def encode(self, x: Tensor) -> Tensor:
        """Encode floating-point rows, of shape ``[n, width]``, as they are stored."""
        if self.name not in transfer.CODECS:
            return x.to(self.dtype)
        return transfer.encode_torch(self.name, x.float())

    def decode(self, rows: Tensor, width: int) -> Tensor:
        """Decode stored rows, of shape ``[n, columns]``, to values of shape ``[n, width]``."""
        if self.name not in transfer.CODECS:
            return rows
        return transfer.decode_torch(self.name, rows, width)

    def __str__(self) -> str:
        return self.name
