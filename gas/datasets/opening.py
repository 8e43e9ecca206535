"""``open_graph``: a graph of the user's own, from tables and arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, overload

from torch_geometric.data import Data, HeteroData

from gas.datasets.arrays import check_classes, check_targets
from gas.datasets.directions import one_way_share, with_reverse
from gas.datasets.files import read_archive
from gas.datasets.folder import read_folder
from gas.datasets.hetero import to_hetero_data
from gas.datasets.masks import with_masks
from gas.datasets.types import describe_types
from gas.graph import (
    SHARD,
    SHARDS,
    check_edge_rows,
    check_finite,
    is_graph_folder,
    open_folder,
    read_graph,
    shard_of,
    with_csr_features,
)
from gas.native import check_integer, is_sparse, warn


@overload
def open_graph(
    path: str | Path,
    *,
    undirected: bool = ...,
    columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ...,
    shard: int | None = ...,
    hetero: Literal[False] = ...,
    check: bool = ...,
    log: bool = ...,
) -> Data: ...


@overload
def open_graph(
    path: str | Path,
    *,
    undirected: bool = ...,
    columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ...,
    shard: int | None = ...,
    hetero: Literal[True],
    check: bool = ...,
    log: bool = ...,
) -> HeteroData: ...


@overload
def open_graph(
    path: str | Path,
    *,
    undirected: bool = ...,
    columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ...,
    shard: int | None = ...,
    hetero: bool,
    check: bool = ...,
    log: bool = ...,
) -> Data | HeteroData: ...


def open_graph(
    path: str | Path,
    *,
    undirected: bool = False,
    columns: Mapping[str, str] | None = None,
    num_splits: int | None = 1,
    shard: int | None = None,
    hetero: bool = False,
    check: bool = True,
    log: bool = True,
) -> Data | HeteroData:
    """Open a graph folder, or read a graph from a folder of tables and arrays or from a file.

    A graph folder, which has a ``graph.json``, is what :func:`gas.cluster` has written: it is
    mapped into memory, which takes no time, however large it is. The system reads what is looked
    at, and gives its memory up when there is too little; what is written to its tensors stays in
    memory, the files don't change. Nothing is added to it: ``undirected`` and ``columns`` are
    refused, and no split is made up.

    Any other folder holds ``.csv`` (or ``.tsv``, ``.txt``; packed, ``.csv.gz``), ``.parquet`` or
    ``.npy`` files, which say by their names what they hold:

    * ``edges``: columns ``source`` and ``target`` (or ``src``, ``dst``; ``from``, ``to``; ...), and
      perhaps ``weight`` and ``type``; further numbers are edge attributes. ``edge_index.npy``:
      ``[2, E]``.
    * ``nodes``: columns ``id``, ``label`` and ``split`` (``train``, ``val``, ``test``, or nothing),
      or ``train_mask``, ...; all others that hold numbers, or lists of them, are features. A node
      without a label is of unknown class; labels that are text are classes, by the alphabet. A
      column ``type`` holds types of nodes.
    * or apart: ``x`` (features; sparse ones in ``x.npz``, by ``scipy.sparse.save_npz``), ``y``
      (labels), ``node_id``, ``node_type``, ``split``, ``edge_weight``, ``edge_attr``,
      ``edge_type``; ``train_mask``, ... of bools; ``train_idx``, ... of ids; ``edge_types.txt`` and
      ``node_types.txt``, a name for each number of a type, one a line.

    Ids are any integers or text. Tables without a column ``id``, and arrays, have a row for each
    node in the order of the others; a node without an id has the number of its row, from 0. Where
    nothing is said of nodes, they are those that edges name, in the order of their ids. Names of
    columns may have capitals. A single file holds edges, or is an ``.npz`` or ``.pt`` file, whose
    edges and lists name rows::

        data = gas.open_graph("my_graph", undirected=True)
        model = gas.to_scalable(net, data)

    Args:
        path: The folder, or the file.
        undirected: Add the reverse of every edge that lacks it, with its weight, type and
            attributes. With ``hetero``, a relation between two types of nodes gets another one of
            its reverses, named ``rev_...``. (default: ``False``: messages go from source to target
            alone)
        columns: What columns are called: ``{"source": "payer", "target": "payee"}``; also of
            ``weight``, ``type``, ``id``, ``label``, ``split``; ``edge_type`` and ``node_type``
            where types of edges and nodes are called differently. (default: the names above)
        num_splits: How many random splits are made up where labels come without a split; masks are
            ``[N]`` for one, ``[N, num_splits]`` for several. ``None``: 20 up to 100,000 nodes, else
            one. (default: ``1``)
        shard: Read the local graph of one process into memory, and no more, of a graph folder that
            ``gas.cluster(..., shards=W)`` has written: that of the process with this number, from
            0; see :func:`gas.graph.shards.shard_of`. (default: the whole graph)
        hetero: Return a ``HeteroData``, by the types of nodes and edges. (default: ``False``)
        check: Refuse NaN and infinite features; of a graph folder, look at every id instead.
            (default: ``True``)
        log: Report what was found on standard error. (default: ``True``)

    Returns:
        The graph: ``edge_index``, and what there is of ``x`` (float32), ``y``, ``edge_weight``,
        ``edge_attr``, ``train_mask``, ``val_mask`` and ``test_mask``. ``node_id`` is a NumPy array
        of the nodes' own ids, in the order of rows, which :meth:`gas.ScalableGNN.predict` keeps;
        ``classes`` a list of the names of classes; ``split`` says how a split was made up. Types
        are ``edge_type`` of shape ``[E]`` and ``node_type`` of shape ``[N]``, numbered in the order
        of their names, which ``edge_type_names`` and ``node_type_names`` list. With ``hetero``,
        each type of nodes has its ``x``, ``node_id``, ``y`` and masks, those without a label
        neither of the last; each type of edges has a relation ``(source, type, target)`` for the
        types of nodes that it joins. Of a
        graph folder: what was written, mapped, with ``parts``, ``perm`` and an ``adj_t``, a
        ``torch.sparse_csr`` matrix whose values are the weights, or ones that take no memory.

    Raises:
        ImportError: If a table is to be read and pyarrow is missing.
        ValueError: If the files hold no graph, or it can't be told which, or it is damaged; it
            names the file.
    """
    path = Path(path)
    if num_splits is not None:
        check_integer("num_splits", num_splits, 1)
    if not path.exists():
        raise ValueError(f"'path' is {str(path)!r}, but there is no such file or folder")
    if is_graph_folder(path):
        if undirected or columns:
            given = "undirected" if undirected else "columns"
            raise ValueError(
                f"{given!r} is given with the graph folder {str(path)!r}, which is as it was "
                "written: leave it out"
            )
        if hetero:
            raise ValueError(
                f"'hetero' is True, but {str(path)!r} is a graph folder, whose graph is of one "
                "type: open the tables that it was made of"
            )
        data = open_folder(path, check and shard is None)  # Of a shard, its own are looked at.
        if shard is not None:
            data = shard_of(data, shard)
        if log:
            print(_folder_summary(path, data), file=sys.stderr)
        return data
    if shard is not None:
        raise ValueError(
            f"'shard' is {shard}, but {str(path)!r} is no graph folder: write one, "
            "gas.cluster(data, num_parts, shards=2, out=folder), and open that"
        )
    archive = path.suffix in (".npz", ".pt")
    data = read_archive(path) if archive else read_folder(path, columns or {})
    data = with_csr_features(data)
    edges = read_graph(data)
    check_edge_rows(data, edges.src.numel())
    if edges.num_nodes == 0:
        raise ValueError(
            f"{path} has no nodes, expected at least one: write a row for each edge into its list "
            "of edges, below the names of columns, or one for each node into nodes.csv"
        )
    if check:
        check_finite("x", data.get("x"))
    if undirected and not hetero:
        data = with_reverse(data)
    if "y" in data:
        if not hetero:
            check_targets(data.y)
        check_classes(data.y)
        with_masks(data, num_splits)
    out = to_hetero_data(data, undirected) if hetero else data
    if log:
        lines = [*_summary(path, data), *_list_types(out)]
        print("\n".join(lines), file=sys.stderr)
        _warn_of_surprises(path, data, 0.0 if undirected else one_way_share(edges))
    return out


def _folder_summary(path: Path, data: Data) -> str:
    parts = "" if "parts" not in data else f", {data.parts.numel() - 1} parts"
    shards = "" if SHARDS not in data else f" in {data[SHARDS].numel() - 1} shards"
    how = "mapped" if SHARD not in data else str(data[SHARD])
    return f"{path}: {data.num_nodes:,} nodes, {data.num_edges:,} edges{parts}{shards}, {how}"


def _list_types(data: Data | HeteroData) -> list[str]:
    """Return lines that list the types and say how to use them."""
    if isinstance(data, HeteroData):
        nodes = [f"{data[kind].num_nodes:,} {kind}" for kind in data.node_types]
        edges = [f"{data[kind].num_edges:,} {', '.join(kind)}" for kind in data.edge_types]
        more = f"; and {len(edges) - 10} more" if len(edges) > 10 else ""
        return [f"nodes by type: {', '.join(nodes)}", f"edges: {'; '.join(edges[:10])}{more}"]
    keys = [key for key in ("edge_type", "node_type") if f"{key}_names" in data]
    if not keys:
        return []
    found = [
        f"{describe_types(data[f'{key}_names'], key.removesuffix('_type') + 's')} in data.{key}"
        for key in keys
    ]
    return [
        f"hint: {', '.join(found)}: hetero=True (on the command line --hetero) gives HeteroData, "
        "and models that take 'edge_type' or 'node_type' get them"
    ]


def _warn_of_surprises(path: Path, data: Data, one_way: float) -> None:
    """Warn of probable mistakes: no edges, one direction only, overlapping masks."""
    if data.num_edges == 0:
        warn(f"{path} has no edges: write a row for each below the names of its list of edges")
    if one_way > 0:  # And none was added.
        share = "no edge has" if one_way == 1 else f"{100 * one_way:.3g} % of edges lack"
        loss = ", without which citations and the like lose 6 to 10 points of accuracy"
        warn(
            f"{share} a reverse, and messages go from source to target alone: undirected=True adds "
            f"the reverses{loss if one_way > 0.5 else ''}"
        )
    if "train_mask" in data:
        shared = int((data.val_mask & data.test_mask).view(data.num_nodes, -1).any(dim=1).sum())
        if shared:
            warn(f"'val_mask' and 'test_mask' share {shared} nodes")


def _summary(path: Path, data: Data) -> list[str]:
    """Return lines that describe the graph."""
    found = [f"{data.num_nodes:,} nodes", f"{data.num_edges:,} edges"]
    if "x" in data:
        sparse = ""
        if is_sparse(data.x):
            share = data.x.values().numel() / max(data.x.numel(), 1)
            sparse = f" (sparse, {100 * share:.2g} % stored)"
        found.append(f"{data.x.size(1)} features{sparse}")
    if "y" in data and data.y.dim() == 1 and not data.y.is_floating_point():
        found.append(f"{len(data.get('classes') or range(int(data.y.max()) + 1))} classes")
        unknown = int((data.y < 0).sum())
        found += [f"{unknown:,} nodes without a label"] * (unknown > 0)
    lines = [f"{path}: {', '.join(found)}"]
    if "train_mask" in data:
        masks = [data[f"{part}_mask"].view(data.num_nodes, -1) for part in ("train", "val", "test")]
        sizes = ", ".join(str(int(mask[:, 0].sum())) for mask in masks)
        made_up = f", {data.split}" if "split" in data else ""
        lines.append(f"nodes for training, validation, test: {sizes}{made_up}")
    return lines
