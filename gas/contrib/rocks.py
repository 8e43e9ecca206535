"""Persistent feature rows in a RocksDB, which may be written during training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gas
from gas.native import check_index, check_integer, check_range, make_folder

ABOUT = b"about"  # The key of the description; keys of rows have eight bytes.
BLOCK_ROWS = 65536  # Rows that are read or written together.


class RocksStore(gas.history.Store):
    """Store of rows in a RocksDB, in the folder ``path``; unwritten rows are zeros.

    Rows may be written at any time, from any thread of one process, and survive a crash.

    Args:
        num_rows: The number of rows.
        columns: The number of elements of a row.
        dtype: Their type.
        path: The folder, which is made if it doesn't exist.
        codec: The name of the encoding of rows. (default: the type's name)

    Raises:
        ImportError: If rocksdict is missing.
        ValueError: If the folder holds other rows, naming them, or is open already.
    """

    tier = "rocksdb"

    def __init__(
        self,
        num_rows: int,
        columns: int,
        dtype: torch.dtype,
        path: str | Path,
        codec: str | None = None,
    ) -> None:
        super().__init__(num_rows, columns, dtype)
        self.path = Path(path)
        self._process = os.getpid()
        self._db = _open_database(self.path)
        name = codec or str(dtype).removeprefix("torch.")
        mine = {"rows": num_rows, "columns": columns, "codec": name}
        there = self._db.get(ABOUT)
        if there is None:
            self._db[ABOUT] = json.dumps(mine).encode()
        elif json.loads(there) != mine:
            self.close()
            raise ValueError(
                f"'path' is {str(path)!r}, which holds {_describe_rows(json.loads(there))}, "
                f"expected {_describe_rows(mine)}: name another folder"
            )

    def read(self, index: Tensor, out: Tensor) -> None:
        """See :class:`gas.history.Store`."""
        self._check_process()
        size = self.columns * self.dtype.itemsize
        missing = bytes(size)
        to = out.view(torch.uint8) if size else out
        for first, keys in _key_blocks(index):
            rows = self._db[keys]
            held = b"".join(missing if row is None else row for row in rows)
            block = torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else None
            if block is not None:
                to[first : first + len(keys)] = block.view(len(keys), size)

    def write(self, index: Tensor, rows: Tensor) -> None:
        """Write rows into the database, a key each; see :class:`gas.history.Store`."""
        from rocksdict import WriteBatch

        self._check_process()
        held = rows.detach().cpu().to(self.dtype).contiguous().view(torch.uint8).numpy()
        for first, keys in _key_blocks(index):
            batch = WriteBatch(raw_mode=True)
            for key, row in zip(keys, held[first : first + len(keys)], strict=True):
                batch.put(key, row.tobytes())
            self._db.write(batch)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the RocksDB in {str(self.path)!r} was opened by another process, which alone may "
                "read it: leave 'num_workers' out"
            )

    def flush(self) -> None:
        """Write the rows that are only in memory and in the log to files."""
        self._db.flush()

    def close(self) -> None:
        """Close the database, so that another process may open it."""
        self._db.close()

    def __reduce__(self) -> Any:
        raise TypeError("rows in a RocksDB can't be pickled: one process alone may open it")


def _open_database(path: Path) -> Any:
    try:
        from rocksdict import Options, Rdict
    except ImportError as error:
        raise ImportError("rows in a RocksDB need the package: pip install rocksdict") from error
    make_folder("path", path.parent)
    try:
        return Rdict(str(path), Options(raw_mode=True))
    except Exception as error:  # rocksdict raises no other class.
        raise ValueError(
            f"'path' is {str(path)!r}, which can't be opened as a RocksDB ({error}): close it "
            "where it is open, or name another folder"
        ) from error


def _key_blocks(index: Tensor) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the position of the first key of each block, and its keys, in the order of rows."""
    for first in range(0, index.numel(), BLOCK_ROWS):
        held = index[first : first + BLOCK_ROWS].cpu().numpy().astype(">u8").tobytes()
        yield first, [held[at : at + 8] for at in range(0, len(held), 8)]


def _describe_rows(said: Any) -> str:
    return f"{said['rows']} rows of {said['columns']} as {said['codec']}"


def open_rows(
    path: str | Path,
    num_rows: int,
    width: int,
    dtype: gas.history.Codec | torch.dtype | str = "float32",
) -> gas.history.Encoded:
    """Open features in a RocksDB, or create them, as :func:`gas.quantize` returns them.

    ::

        data.x = open_rows("features", data.num_nodes, 64)
        for batch in gas.SubgraphLoader(data, ptr):  # Reads the current rows.
            ...
            write_rows(data.x, batch.n_id[: batch.batch_size], values)

    Rows have the order of the graph's nodes: partition and permute it first. Loaders with workers
    or with ``cache=True`` don't see later writes.

    Args:
        path: The folder of the database.
        num_rows: The number of rows.
        width: The number of values of a row.
        dtype: The storage type; see :class:`gas.history.Codec`. (default: ``"float32"``)

    Raises:
        ImportError: If rocksdict is missing.
        ValueError: If the folder holds other rows, naming them, or is open already.
    """
    check_integer("num_rows", num_rows, 0)
    check_integer("width", width, 1)
    codec = gas.history.Codec.of(dtype)
    store = RocksStore(num_rows, codec.columns(width), codec.dtype, path, f"{codec} x {width}")
    return gas.history.Encoded.of(store, codec, width, "disk")


def write_rows(x: gas.history.Encoded, index: Tensor, rows: Tensor) -> None:
    """Write rows of features in a RocksDB; later reads return them.

    Args:
        x: The features, from :func:`open_rows`.
        index: Which rows, of shape ``[n]``, int64.
        rows: Their values, of shape ``[n, width]``.

    Raises:
        ValueError: If ``x`` is something else, or the shapes don't fit.
        IndexError: If a row doesn't exist.
    """
    if not isinstance(x, gas.history.Encoded) or not isinstance(x.store, RocksStore):
        kind = f"a {type(x).__name__}"
        raise ValueError(f"'x' is {kind}, expected what gas.contrib.rocks.open_rows has returned")
    check_index("index", index)
    check_range("index", index, x.size(0))
    if rows.shape != (index.numel(), x.size(1)):
        raise ValueError(
            f"'rows' has shape {list(rows.shape)}, expected [{index.numel()}, {x.size(1)}]"
        )
    x.store.write(index, x.codec.encode(rows.detach().cpu()))
