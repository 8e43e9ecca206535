"""The graph of an experiment: its checks, its targets, and what its models are made of."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import degree

from gas import EvalSubgraphLoader, PartitionReport, SubgraphLoader, cluster, open_graph
from gas.graph import (
    MASKS,
    check_nodes,
    entry_rows,
    has_entry,
    is_graph_folder,
    keys_by_row,
    select_rows,
)
from gas.history import is_encoded
from gas.native import free_memory, human, is_sparse, warn
from gas.training import FullBatch, check_known_targets, is_real, known_target_mask

PARTS_FOLDER = "graph"  # The graph folder of a run.
MOST_COUNTED = 2**16  # Edges whose reverses are looked for, in 10 MB.


class Graph(NamedTuple):
    """A graph, prepared for training and evaluation."""

    perm: Tensor | None  # The original row of every node.
    raw: Data | None  # Before the model's transform, on the CPU, if it is augmented.
    data: Data  # After the transform; without edges, unless they are kept.
    loader: SubgraphLoader | None  # Mini-batches, unless it is trained in full batch.
    inference: EvalSubgraphLoader | None  # Mini-batches for layer-wise inference.
    whole: FullBatch | None  # The graph as one batch.
    arguments: dict[str, Any]  # Of the model; see :func:`model_arguments`.
    shown: str  # The graph as text, with its edges.
    partition: PartitionReport | None = None  # Of mini-batches.


def check_folder_fits(path: str | Path, reader: str) -> None:
    """Refuse to read a graph folder into memory that has no room; ``reader`` is what reads it."""
    if not Path(path).exists() or not is_graph_folder(path):
        return
    needed = sum(file.stat().st_size for file in Path(path).glob("*.npy"))
    if needed > free_memory():
        raise ValueError(
            f"{reader} reads the graph folder {path} into memory, which takes "
            f"{human(needed)}, but {human(free_memory())} are free: gas train without such options "
            "leaves features on disk, and --memory limits what it takes"
        )


def check_labels(data: Data) -> None:
    """Refuse missing labels, a single class, labels but 0 and 1, and unknown training labels."""
    y, mask = data.get("y"), data.get("train_mask")
    if y is None:
        raise ValueError("'data' has no 'y': expected classes [N], labels [N, C] or real numbers")
    check_nodes(data, int(data.num_nodes or 0))
    known = known_target_mask(y)
    if y.dim() == 2 and not is_real(y):
        wrong = y[known & (y != 0) & (y != 1)]
        if wrong.numel():
            raise ValueError(
                f"'data.y' has shape {list(y.shape)} and holds {float(wrong.max()):g}, expected 0 "
                "and 1 for several labels, or real numbers of shape [N]"
            )
    if y.dim() == 1 and not is_real(y) and int(y.max()) == 0:
        raise ValueError(
            "'data.y' holds a single class, expected at least two: check the labels, or give real "
            "numbers"
        )
    if mask is not None and mask.numel():
        check_known_targets(y, mask)


def set_real_targets(data: Any, nodes: Any) -> None:
    """Replace integer targets of shape ``[N]`` by real numbers; negative ones, unknown, by NaN.

    The targets are those of ``nodes``: the graph, or its nodes of a type. If the graph has
    ``classes``, which are numbers, they replace their positions.
    """
    classes = getattr(data, "classes", None)
    if classes is None:
        nodes.y = nodes.y.float().masked_fill(nodes.y < 0, math.nan)
        return
    if not are_numbers(classes):
        raise ValueError(
            f"'metric' is r2, but the targets are classes such as {classes[0]!r}: choose accuracy "
            "or micro_f1"
        )
    values = torch.tensor([*map(float, classes), math.nan])
    nodes.y = values[nodes.y.long().clamp(min=-1)]
    del data.classes


def are_numbers(classes: Any) -> bool:
    """Return whether the names of classes are numbers."""
    return all(isinstance(name, numbers.Real) for name in classes)


def check_splits(data: Data, name: str = "data") -> None:
    """Refuse a graph without masks of training, validation and test nodes."""
    for key in MASKS:
        if data.get(key) is None:
            raise ValueError(
                f"{name!r} has no {key!r}, by which models are trained and scored: set it, such as "
                "by PyG's RandomNodeSplit"
            )


def remove_edge_features(data: Data) -> Data:
    """Return a copy of the graph without attributes of edges, except ``edge_weight``.

    No model of the command reads them, and self-loops that a model adds have no values for them.
    """
    out = copy.copy(data)
    for key in keys_by_row(data, [key for key, _ in data])[1]:
        if key != "edge_weight":
            del out[key]
    return out


def count_one_way_edges(data: Data) -> tuple[int, int, str]:
    """Count the edges without a reverse in a mapped graph; of many, some evenly spaced ones count.

    Returns:
        Their number, how many were looked at, and what those are, in words.
    """
    crow, col = data.adj_t.crow_indices(), data.adj_t.col_indices()
    seen = min(col.numel(), MOST_COUNTED)
    edges = torch.arange(seen) * col.numel() // max(seen, 1)
    rows, cols = entry_rows(crow, edges), col[edges].long()
    is_counted = rows != cols
    rows, cols = rows[is_counted], cols[is_counted]
    lacks = rows.numel() - int(has_entry(crow, col, cols, rows).sum())
    return lacks, rows.numel(), "sampled edges" if seen < col.numel() else "edges"


def warn_of_one_way_edges(data: Data) -> None:
    """Warn of edges without a reverse in a mapped graph."""
    lacks, seen, which = count_one_way_edges(data)
    if lacks:
        warn(
            f"{lacks:,} of {seen:,} {which} lack a reverse, and messages go from source "
            "to target alone: undirected=True adds the reverses"
        )


def model_arguments(architecture: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Return the arguments of a model, with ``deg``, the degrees of nodes, if it is a PNA."""
    if "aggregators" not in architecture:
        return dict(architecture)
    if "adj_t" in data:
        deg = data.adj_t.crow_indices().diff().float()
    else:
        deg = degree(data.edge_index[1], data.num_nodes)
    return {**architecture, "deg": deg}


def describe_inputs(data: Any) -> dict[str, Any]:
    """Return the number of features, by type in a ``HeteroData``, and the types of its edges."""
    if not isinstance(data, HeteroData):
        return {"in_channels": 0 if data.get("x") is None else data.x.size(1)}
    widths = {store._key: store.x.size(1) if "x" in store else 0 for store in data.node_stores}
    return {"in_channels": widths, "edge_types": data.edge_types}


def open_parts(
    data: Data, num_parts: int, method: str, folder: Path | None, log: bool
) -> tuple[Data, Tensor, Tensor]:
    """Return a mapped graph of several parts, their original rows, and the first row of each.

    A graph of one part is partitioned into a folder, or opened there if it was before.
    """
    if data.parts.numel() == 2 and num_parts > 1:
        if folder is None:
            raise ValueError(
                "'data' is a mapped graph of one part, expected 'folder' to write its parts into"
            )
        if (folder / "graph.json").is_file():  # Else it may be unfinished, and is written again.
            num_nodes, data = data.num_nodes, open_graph(folder, log=log)
            found = data.parts.numel() - 1
            if (data.num_nodes, found) != (num_nodes, num_parts):
                raise ValueError(
                    f"{folder} holds {data.num_nodes} nodes in {found} parts, expected {num_nodes} "
                    f"in {num_parts}: remove it"
                )
        else:
            data = cluster(data, num_parts, method=method, out=folder, log=log)
    found = copy.copy(data)
    for key in ("parts", "perm", "batch_size"):
        if key in found:
            del found[key]
    return found, data.perm, data.parts


def training_subgraph(data: Data) -> Data:
    """Return the subgraph of the training nodes."""
    mask = data.train_mask
    if mask.dim() > 1:
        raise ValueError(
            f"'inductive' is True, but the graph has {mask.size(1)} splits: choose one, "
            "data.train_mask = data.train_mask[:, k], and the other masks likewise, or give a file "
            "with masks of one split"
        )
    data, x = copy.copy(data), data.x
    is_special = is_sparse(x) or is_encoded(x)  # PyG can't slice the one, and decodes the other.
    if is_special:
        data.num_nodes = x.size(0)
        del data.x
    for key in ("node_id", "classes", "edge_type_names", "node_type_names"):  # No tensors.
        if key in data:
            del data[key]
    out = data.subgraph(mask)
    if is_special:
        out.x = select_rows(x, mask.nonzero().view(-1))
    return out
