"""Files of tensors in the format of safetensors.

Histories may not fit memory twice: their rows are written, and added to the checksum, in blocks.
The header of a file is checked against its size before memory is allocated.
https://huggingface.co/docs/safetensors is the format.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from gas.native import parse_json

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
METADATA = "__metadata__"
MOST_HEADER = 100 << 20  # As the format has it.
BLOCK = 16 << 20  # Bytes that are read or written at a time.


class CheckpointError(ValueError):
    """Error for a checkpoint that is damaged, incomplete, of another program or a newer version."""


class Blocks(NamedTuple):
    """A tensor in blocks of rows, which needn't fit memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Iterable[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Blocks:
        """Return a tensor in memory as a single block."""
        return cls(tensor.dtype, tuple(tensor.shape), [tensor])

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checksum(NamedTuple):
    """Size and CRC-32 of a written file, to detect changes."""

    nbytes: int
    crc32: int


def write_tensors(
    stream: BinaryIO, tensors: Mapping[str, Tensor | Blocks], metadata: Mapping[str, str]
) -> Checksum:
    """Write tensors, in their order."""
    parts = {k: Blocks.of(t) if isinstance(t, Tensor) else t for k, t in tensors.items()}
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, part in parts.items():
        if part.dtype not in NAMES:
            raise ValueError(
                f"{name!r} is of type {part.dtype}, which a checkpoint can't hold: expected one of "
                f"{', '.join(str(dtype) for dtype in NAMES)}"
            )
        begin, end = end, end + part.nbytes
        header[name] = {
            "dtype": NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # So that values are aligned.
    crc = 0
    for piece in (len(text).to_bytes(8, "little"), text):
        stream.write(piece)
        crc = zlib.crc32(piece, crc)
    for part in parts.values():
        for block in part.blocks:
            flat = block.detach().cpu().contiguous().view(-1)
            view = flat.view(torch.uint8).numpy().data
            stream.write(view)
            crc = zlib.crc32(view, crc)
    return Checksum(8 + len(text) + end, crc)


def checksum(path: Path) -> Checksum:
    """Compute the size and CRC-32 of a file."""
    crc = size = 0
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return Checksum(size, crc)


class _Place(NamedTuple):
    """Type, shape and position of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # In the file.
    nbytes: int


class TensorFile:
    """The tensors of a file, which are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = os.stat(path).st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER):
                raise self._error(f"promises a header of {length:,} bytes in {size:,}")
            self._read_header(stream.read(length), 8 + length, size)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}: it is damaged, or no file of tensors")

    def _read_header(self, text: bytes, start: int, size: int) -> None:
        header = read_json(text, self._error)
        metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._error("has a header without names of tensors")
        self.metadata: dict[str, str] = metadata
        self._places: dict[str, _Place] = {}
        for name, entry in header.items():
            self._places[name] = self._parse_entry(name, entry, start)
        end = start
        for name, place in sorted(self._places.items(), key=lambda item: item[1][2:]):
            if place.begin != end:
                raise self._error(f"has {name!r} at byte {place.begin:,}, expected {end:,}")
            end += place.nbytes
        if end != size:
            raise self._error(f"has {size:,} bytes, expected {end:,}")

    def _parse_entry(self, name: str, entry: Any, start: int) -> _Place:
        """Return the type, shape and position of a tensor, from its entry in the header."""
        entry = entry if isinstance(entry, dict) else {}
        kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"says of {name!r} neither how large it is nor where")
        if not isinstance(kind, str) or kind not in TYPES:
            raise self._error(f"has {name!r} of the type {kind!r}")
        nbytes = math.prod(shape) * TYPES[kind].itemsize
        if offsets[1] - offsets[0] != nbytes:
            raise self._error(f"has {offsets[1] - offsets[0]:,} bytes of {name!r}, not {nbytes:,}")
        return _Place(TYPES[kind], tuple(shape), start + offsets[0], nbytes)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the type and the shape of a tensor."""
        place = self._places.get(name)
        if place is None:
            raise self._error(f"has no {name!r}")
        return place.dtype, place.shape

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        dtype, shape = self.dtype_and_shape(name)
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            with self.path.open("rb") as stream:
                stream.seek(self._places[name].begin)
                self._read_into(stream, out)
        return out

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of a tensor's rows, after the first row's index; they share a buffer."""
        dtype, shape = self.dtype_and_shape(name)
        row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
        buffer = torch.empty(max(1, min(shape[0], BLOCK // row_bytes)), *shape[1:], dtype=dtype)
        with self.path.open("rb") as stream:
            stream.seek(self._places[name].begin)
            for first in range(0, shape[0], buffer.size(0)):
                rows = buffer[: shape[0] - first]
                if rows.numel():
                    self._read_into(stream, rows)
                yield first, rows

    def _read_into(self, stream: BufferedReader, out: Tensor) -> None:
        wanted = out.view(-1).view(torch.uint8).numpy().data
        while wanted:
            read = stream.readinto(wanted[:BLOCK])
            if not read:
                raise self._error("ended while it was read")
            wanted = wanted[read:]


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of valid sizes."""
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**62 for size in value
    )


def read_json(text: bytes, error: Any) -> Any:
    """Parse strict JSON; ``error`` makes the exception for a text."""
    try:
        return parse_json(text)
    except ValueError as reason:
        raise error(f"can't be read as JSON ({reason})") from reason
