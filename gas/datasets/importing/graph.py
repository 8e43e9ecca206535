"""``import_graph``: from tables and arrays, or PyG's stores, into a graph folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from gas.datasets.folder import check_columns, files_of
from gas.datasets.importing import stages
from gas.datasets.stores import import_stores, stores_of
from gas.graph import NewFolder, cluster, open_folder
from gas.history import Codec
from gas.native import bytes_of, check_integer

LEAST_MEMORY = 1 << 20


def import_graph(
    source: Any,
    out: str | Path,
    *,
    undirected: bool = False,
    columns: Mapping[str, str] | None = None,
    num_splits: int | None = 1,
    dtype: Codec | torch.dtype | str | None = None,
    memory: int | str = "1GB",
    check: bool = True,
    log: bool = True,
) -> Data:
    """Import a graph that need not fit memory from tables and arrays into a graph folder.

    It reads what :func:`gas.open_graph` reads, but for ``.npz`` and ``.pt`` files of whole graphs,
    and makes the same graph of it, of one part::

        gas.datasets.import_graph("tables", "graph", memory="2GB")
        gas.cluster(gas.open_graph("graph"), num_parts=400, model=model, out="parts")

    Edges and features are read some at a time, and edges are sorted by destination on the disk,
    which needs room for them twice: ``memory`` is for that. On top come 24 bytes for each node, its
    id (8 bytes; of text, those of the longest one, once more while they are sorted), label and
    masks, and what Python and PyTorch take anyhow. Duplicate edges and loops are counted and stay.

    An import that was interrupted, or killed, goes on after the last stage that it had finished
    when it is called again, and writes the same files as one that wasn't.

    Args:
        source: The folder of tables and arrays, or a file of edges; see :func:`gas.open_graph`. Or
            PyG's ``(feature_store, graph_store)``, or an object that is both, such as a ``Data``:
            of one type of nodes and edges. Those give all edges at once; rows of tensors are asked
            for some at a time. None of the options is for them, but ``out``, ``check`` and
            ``log``.
        out: The graph folder, which isn't there yet, or empty, or was left unfinished.
        undirected: See :func:`gas.open_graph`. (default: ``False``)
        columns: See :func:`gas.open_graph`.
        num_splits: See :func:`gas.open_graph`. (default: ``1``)
        dtype: How features are stored; see :func:`gas.quantize`. Sparse ones stay as they are.
            (default: as float32)
        memory: How many bytes reading and sorting may take, as a number or like ``"2GB"``.
            (default: ``"1GB"``)
        check: Refuse NaN and infinite features. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)

    Returns:
        The graph, mapped, as :func:`gas.open_graph` returns it; ``imported`` says how many edges
        were read, and how many of all are duplicates and loops.

    Raises:
        ImportError: If a table is to be read and pyarrow is missing.
        ValueError: If the files hold no graph, or have changed since they were first read.
    """
    stores = stores_of(source)
    if stores is not None:
        if undirected or columns or dtype is not None:
            raise ValueError(
                "'undirected', 'columns' or 'dtype' is given with PyG's stores, which are written "
                "as they are: leave it out"
            )
        if isinstance(source, Data):  # Which has attributes of edges, too.
            return cluster(source, 1, out=out, log=log, check=check)
        stored = NewFolder(out, "gas.datasets.import_graph, from stores")
        return import_stores(*stores, stored, check)
    if not isinstance(source, str | Path):
        raise ValueError(
            f"'source' is a {type(source).__name__}, expected a path, or PyG's "
            "(feature_store, graph_store)"
        )
    path, size = Path(source), bytes_of("memory", memory)
    check_integer("memory", size, LEAST_MEMORY, expected="1 MiB at least, such as '1GB'")
    if num_splits is not None:
        check_integer("num_splits", num_splits, 1)
    if not path.exists():
        raise ValueError(f"'source' is {str(path)!r}, but there is no such file or folder")
    check_columns(columns or {})
    codec = None if dtype is None else Codec.of(dtype)
    folder = NewFolder(out, "gas.datasets.import_graph")
    options = {
        "undirected": undirected,
        "columns": dict(columns or {}),
        "num_splits": num_splits,
        "dtype": None if codec is None else codec.name,
        "check": check,
    }
    stages.GraphImport(folder, path, files_of(path), options, codec, size, log).run()
    return open_folder(folder.path, check=False)
