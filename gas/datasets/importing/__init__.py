"""Graphs larger than memory, from tables and arrays or PyG's stores into a graph folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from gas.datasets.folder import check_columns, find_graph_files
from gas.datasets.importing import stages
from gas.datasets.stores import get_stores, import_stores
from gas.graph import NewFolder, cluster, is_graph_folder, open_folder
from gas.history import Codec
from gas.native import bytes_of, check_flags, check_integer

LEAST_MEMORY = 1 << 20


@check_flags
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

    It reads the same files as :func:`gas.open_graph`, except ``.npz`` and ``.pt`` files of whole
    graphs, and writes the same graph, with one part::

        gas.datasets.import_graph("tables", "graph", memory="2GB")
        gas.cluster(gas.open_graph("graph"), num_parts=400, model=model, out="parts")

    Edges and features are read in blocks within ``memory``; edges are sorted by destination on the
    disk, which needs space for them twice. In addition the import takes 24 bytes per node, its id
    (8 bytes; for text, the size of the longest id, twice while sorting), label and masks, and the
    memory of Python and PyTorch. Duplicate edges and self-loops are counted and kept.

    An import that was interrupted or killed continues after its last completed stage when it is
    called again, and writes the same files.

    Args:
        source: The folder of tables and arrays, or a file of edges; see :func:`gas.open_graph`. Or
            PyG's ``(feature_store, graph_store)``, or an object that is both, such as a ``Data``,
            with one type of nodes and edges. Edges of stores are loaded at once, rows of tensors
            in blocks; of the options only ``out``, ``check`` and ``log`` are supported.
        out: The graph folder: new, empty, or left unfinished by an import.
        undirected: See :func:`gas.open_graph`. (default: ``False``)
        columns: See :func:`gas.open_graph`.
        num_splits: See :func:`gas.open_graph`. (default: ``1``)
        dtype: The type in which dense features are stored; see :func:`gas.quantize`.
            (default: float32)
        memory: The bytes for reading and sorting, as a number or like ``"2GB"``.
            (default: ``"1GB"``)
        check: Refuse NaN and infinite features. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)

    Returns:
        The mapped graph, as from :func:`gas.open_graph`; ``imported`` has the numbers of edges
        that were read, of duplicates and of self-loops.

    Raises:
        ImportError: If pyarrow, which reads tables, is missing.
        ValueError: If a file is invalid, or has changed since it was first read.
    """
    stores = get_stores(source)
    if stores is not None:
        if undirected or columns or dtype is not None:
            raise ValueError(
                "'undirected', 'columns' or 'dtype' is given with PyG's stores, which are written "
                "as they are: leave it out"
            )
        if isinstance(source, Data):  # Stores have no attributes of edges.
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
    if is_graph_folder(path) or (path.is_file() and path.suffix in (".npz", ".pt")):
        raise ValueError(
            f"'source' is {str(path)!r}, which holds a whole graph, expected tables of edges: open "
            "it as it is, gas.open_graph(source)"
        )
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
    files = find_graph_files(path)
    with folder.lock():
        stages.GraphImport(folder, path, files, options, codec, size, log).run()
    return open_folder(folder.path, check=False)
