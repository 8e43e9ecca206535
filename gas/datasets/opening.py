"""``open_graph``: open a graph folder, or read a graph from tables and arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, overload

from torch_geometric.data import Data, HeteroData

from gas.datasets.arrays import check_classes, check_targets
from gas.datasets.edges import one_way_share, with_reverse
from gas.datasets.files import read_archive
from gas.datasets.folder import read_folder
from gas.datasets.hetero import to_hetero_data
from gas.datasets.masks import with_masks
from gas.graph import (
    MASKS,
    SHARD,
    SHARDS,
    check_edge_rows,
    check_finite,
    is_graph_folder,
    known_target_mask,
    open_folder,
    read_graph,
    shard_of,
    with_csr_features,
)
from gas.native import check_flags, check_integer, check_path, is_sparse, warn


@overload
def open_graph(
    path: str | Path, *, undirected: bool = ..., columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ..., shard: int | None = ..., hetero: Literal[False] = ...,
    check: bool = ..., log: bool = ...,
) -> Data: ...  # fmt: skip


@overload
def open_graph(
    path: str | Path, *, undirected: bool = ..., columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ..., shard: int | None = ..., hetero: Literal[True],
    check: bool = ..., log: bool = ...,
) -> HeteroData: ...  # fmt: skip


@overload
def open_graph(
    path: str | Path, *, undirected: bool = ..., columns: Mapping[str, str] | None = ...,
    num_splits: int | None = ..., shard: int | None = ..., hetero: bool, check: bool = ...,
    log: bool = ...,
) -> Data | HeteroData: ...  # fmt: skip


@check_flags
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

    A graph folder, which has a ``graph.json``, is written by :func:`gas.cluster`. It is mapped into
    memory, which takes no time, whatever its size. The system reads pages on access, and drops
    them when memory is short. Changes of its tensors stay in memory; the files don't change. The
    graph is returned as it was written: ``undirected`` and ``columns`` are refused, and no split
    is drawn.

    Any other folder has ``.csv`` (or ``.tsv``, ``.txt``; compressed, ``.csv.gz``), ``.parquet`` or
    ``.npy`` files, with names by their content:

    * ``edges``: columns ``source`` and ``target`` (or ``src``, ``dst``; ``from``, ``to``; ...), and
      perhaps ``weight`` and ``type``; further numbers are edge attributes. ``edge_index.npy``:
      ``[2, E]``.
    * ``nodes``: columns ``id``, ``label`` and ``split`` (``train``, ``val``, ``test``, or empty),
      or ``train_mask``, ...; all other columns of numbers, or of lists of numbers, are features. A
      node without a label is of unknown class; text labels are classes in alphabetical order. A
      column ``type`` has types of nodes.
    * or separate files: ``x`` (features; sparse ones in ``x.npz``, by ``scipy.sparse.save_npz``),
      ``y`` (labels), ``node_id``, ``node_type``, ``split``, ``edge_weight``, ``edge_attr``,
      ``edge_type``; ``train_mask``, ... of bools; ``train_idx``, ... of ids; ``edge_types.txt`` and
      ``node_types.txt``, a line with the name of each type.

    Ids are any integers or text. Tables without a column ``id``, and arrays, have a row for each
    node in the order of the other files; without ids, nodes are numbered from 0. If no file lists
    the nodes, they are those in edges, in the order of their ids. Names of columns are
    case-insensitive. A single file has edges, or is an ``.npz`` or ``.pt`` file of a graph::

        data = gas.open_graph("my_graph", undirected=True)
        model = gas.to_scalable(net, data)

    Args:
        path: The folder, or the file.
        undirected: Add missing reverses of edges, with weights, types and attributes. With
            ``hetero``, a relation between two types of nodes gets a reverse relation ``rev_...``.
            (default: ``False``: messages are passed from source to target only)
        columns: Names of columns: ``{"source": "payer", "target": "payee"}``; also of
            ``weight``, ``type``, ``id``, ``label``, ``split``; ``edge_type`` and ``node_type``
            if types of edges and nodes have different names. (default: the names above)
        num_splits: The number of random splits, if there are labels without a split; masks are
            ``[N]`` for one, ``[N, num_splits]`` for several. ``None``: 20 up to 100,000 nodes, else
            one. (default: ``1``)
        shard: Read only the local graph of the process with this number, from 0, into memory, from
            a graph folder of ``gas.cluster(..., shards=W)``; see :func:`gas.graph.shard_of`.
            (default: the whole graph)
        hetero: Return a ``HeteroData``, by the types of nodes and edges. (default: ``False``)
        check: Refuse NaN and infinite features; of a graph folder, check every id instead.
            (default: ``True``)
        log: Print a summary on standard error. (default: ``True``)

    Returns:
        The graph: ``edge_index``, and as far as they exist ``x`` (float32), ``y``,
        ``edge_weight``, ``edge_attr``, ``train_mask``, ``val_mask`` and ``test_mask``. ``node_id``
        is a NumPy array of the ids of nodes, in the order of rows; ``classes`` is a list of the
        names of classes; ``split`` describes a random split. Types are ``edge_type`` of shape
        ``[E]`` and ``node_type`` of shape ``[N]``, numbered in the order of their names,
        ``edge_type_names`` and ``node_type_names``. With ``hetero``, each type of nodes has ``x``,
        ``node_id``, and, if it has labels, ``y`` and masks; each type of edges is a relation
        ``(source, type, target)`` for each pair of node types that it connects. A graph folder
        gives the mapped graph, with ``parts``, ``perm`` and an ``adj_t``, a ``torch.sparse_csr``
        matrix whose values are the weights, or ones that take no memory.

    Raises:
        ImportError: If pyarrow, which reads tables, is missing.
        ValueError: If a file is invalid, ambiguous or damaged, naming it.
    """
    check_path("path", path, "a graph folder, or of tables or a file of a graph")
    path = Path(path)
    if num_splits is not None:
        check_integer("num_splits", num_splits, 1)
    if not path.exists():
        raise ValueError(f"'path' is {str(path)!r}, but there is no such file or folder")
    if is_graph_folder(path):
        _check_unused(path, undirected=undirected, columns=columns, hetero=hetero)
        data = open_folder(path, check and shard is None)  # shard_of checks the ids of a shard.
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
    if archive and columns:
        raise ValueError(
            f"'columns' is given with {str(path)!r}, whose arrays have the names of a graph's "
            "attributes: leave it out"
        )
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
        if archive and not hetero:
            check_targets(data.y)
        check_classes(data.y)
        with_masks(data, num_splits)
    out = to_hetero_data(data, undirected) if hetero else data
    if log:
        lines = [*_summary(path, data), *_list_types(out)]
        print("\n".join(lines), file=sys.stderr)
        _warn_of_surprises(path, data, 0.0 if undirected else one_way_share(edges))
    return out


def _check_unused(path: Path, *, undirected: bool, columns: object, hetero: bool) -> None:
    """Refuse options that aren't supported for graph folders."""
    if hetero:
        raise ValueError(
            f"'hetero' is True, but {str(path)!r} is a graph folder, whose graph is of one "
            "type: open the tables that it was made of"
        )
    if undirected or columns:
        given = "undirected" if undirected else "columns"
        raise ValueError(
            f"{given!r} is given with the graph folder {str(path)!r}, which is as it was "
            "written: leave it out"
        )


def _folder_summary(path: Path, data: Data) -> str:
    """Return a line that describes the graph of a folder."""
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
    counts = {key: len(data[f"{key}_names"]) for key in keys}
    found = [
        f"{count} type{'s' * (count != 1)} of {key.removesuffix('_type')}s in data.{key}"
        for key, count in counts.items()
    ]
    return [
        f"hint: {', '.join(found)}: hetero=True (on the command line --hetero) gives HeteroData, "
        "and models that take 'edge_type' or 'node_type' get them"
    ]


def _warn_of_surprises(path: Path, data: Data, one_way: float) -> None:
    """Warn of probable mistakes: no edges, one direction only, overlapping masks."""
    if data.num_edges == 0:
        warn(f"{path} has no edges: write a row for each below the names of its list of edges")
    if one_way > 0:
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
    if "y" in data and data.y.dim() == 1:
        if not data.y.is_floating_point():
            count = len(data.get("classes") or range(int(data.y.max()) + 1))
            found.append(f"{count} class{'es' * (count != 1)}")
        unknown = int((~known_target_mask(data.y)).sum())
        found += [f"{unknown:,} nodes without a label"] * (unknown > 0)
    lines = [f"{path}: {', '.join(found)}"]
    if "train_mask" in data:
        masks = [data[key].view(data.num_nodes, -1) for key in MASKS]
        sizes = ", ".join(str(int(mask[:, 0].sum())) for mask in masks)
        made_up = f", {data.split}" if "split" in data else ""
        lines.append(f"nodes for training, validation, test: {sizes}{made_up}")
    return lines
