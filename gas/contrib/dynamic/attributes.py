"""Attributes of nodes and edges of a dynamic graph: checks, new rows, and changed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import (
    PARTS,
    WEIGHT,
    check_ids,
    implicit_ones,
    is_row_per_edge,
    is_row_per_node,
    to_csr_features,
)
from gas.native import (
    MOST_INT32,
    csr_parts,
    first_sparse_rows,
    gather_sparse_rows,
    is_sparse,
    sparse_csr,
)

IDS = "node_id"
EDGES = ("edge_index", "adj_t", WEIGHT, "num_nodes", PARTS)
ROWS = 1024  # Sparse rows to compare at once.


def empty_rows(table: Tensor) -> Tensor:
    """Return an empty table in the layout of another."""
    return first_sparse_rows(table, 0) if is_sparse(table) else table[:0]


def to_layout(key: str, rows: Any, table: Tensor) -> Any:
    """Convert rows of new nodes to the layout of the graph's, sparse or dense."""
    is_tensor = isinstance(rows, Tensor)
    if is_sparse(table):
        if is_tensor and rows.layout == torch.strided and rows.dim() == 2:
            rows = rows.to_sparse_csr()
        made = to_csr_features(rows, key)
        return made if is_tensor else made.to(table.dtype)
    return rows.to_dense() if is_tensor and rows.layout != torch.strided else rows


def append_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Append rows to a table."""
    if not is_sparse(table):
        return torch.cat([table, rows])
    pairs = zip(csr_parts(table), csr_parts(rows), strict=True)
    (rowptr, more), (col, new_col), values = pairs
    kind = rowptr.dtype if rowptr[-1] + more[-1].long() <= MOST_INT32 else torch.int64
    rowptr = torch.cat([rowptr.to(kind), more[1:].to(kind) + rowptr[-1].to(kind)])
    col = torch.cat([col.to(kind), new_col.to(kind)])
    return sparse_csr(rowptr, col, torch.cat(values), table.size(1))


def make_missing_labels(
    given: Mapping[str, Any], table: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """Make the labels of new nodes that have none: -1, or NaN for real numbers."""
    y = table.get("y")
    if y is None or "y" in given or y.dtype in (torch.bool, torch.uint8):
        return {}
    for key, mask in given.items():
        if key.endswith("_mask") and isinstance(mask, Tensor) and bool(mask.any()):
            raise ValueError(
                f"{key!r} of 'nodes' has nodes without a label: pass their 'y', or leave them out "
                "of the mask"
            )
    fill = float("nan") if y.is_floating_point() else -1
    return {"y": y.new_full((count, *y.shape[1:]), fill)}


def complete_rows(
    given: Mapping[str, Any], table: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """Check the rows of ``count`` new nodes, and add defaults for missing attributes."""
    if not count:
        defaults = {key: empty_rows(value) for key, value in table.items()}
    else:
        defaults = {
            key: value.new_zeros(count, *value.shape[1:])
            for key, value in table.items()
            if key.endswith("_mask")
        } | make_missing_labels(given, table, count)
    return check_rows("nodes", {**defaults, **given}, table, count)


def extend_ids(known: Any, ids: Any, count: int) -> Any:
    """Append the ids of new nodes to those of the graph."""
    if ids is None:
        raise ValueError(
            f"'nodes' has no {IDS!r}, by which the graph names its nodes: pass an id for each of "
            f"the {count}, or remove {IDS!r} from the graph"
        )
    before, new = np.asarray(known), np.asarray(ids)
    if not new.size:
        new = before[:0]
    are_alike = _id_kind(new) == _id_kind(before) != "others"
    if are_alike and before.dtype.kind in "iu":
        kept = new.astype(before.dtype)
        if kept.tolist() == new.tolist():
            new = kept
        are_alike = np.result_type(before, new).kind in "iu"  # Other types would round ids.
    if new.shape != (count,) or not are_alike:
        raise ValueError(
            f"{IDS!r} of 'nodes' is {new.dtype} of shape {list(new.shape)}, expected {count} ids "
            f"like those of the graph, which are {before.dtype}"
        )
    distinct, counts = np.unique(new, return_counts=True)
    twice = np.concatenate([distinct[counts > 1], distinct[np.isin(distinct, before)]])
    if len(twice):
        raise ValueError(f"{IDS!r} of 'nodes' has {twice[0].item()!r} twice, or the graph has it")
    longer = np.concatenate([before, new])
    return longer.tolist() if isinstance(known, list) else longer


def _id_kind(ids: np.ndarray) -> str:
    """Return ``"integers"``, ``"text"`` or ``"others"``."""
    if ids.dtype.kind in "iu":
        return "integers"
    is_text = ids.dtype.kind == "U" or (
        ids.dtype.kind == "O" and all(isinstance(value, str) for value in ids.flat)
    )
    return "text" if is_text else "others"


def find_differing_rows(old: Tensor, new: Tensor) -> Tensor:
    """Return the old rows that have changed; NaN equals NaN."""
    if not is_sparse(old):
        new = new[: old.size(0)]
        differs = old != new
        if old.is_floating_point():  # NaN marks nodes without a label.
            differs &= ~(old.isnan() & new.isnan())
        return differs.view(old.size(0), -1).any(1).nonzero().view(-1)
    found = []
    for rows in torch.arange(old.size(0)).split(ROWS):
        before, after = (gather_sparse_rows(x, rows).to_dense() for x in (old, new))
        found.append(rows[(before != after).any(1)])
    return torch.cat(found)


def check_rows(
    name: str, given: Mapping[str, Tensor], table: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """Check the new rows of each attribute of a table, and return them.

    Raises:
        ValueError: If an attribute is missing, is new, or has other rows.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"'{name}' is a {type(given).__name__}, expected a dictionary of tensors, such as "
            "{'edge_attr': ...}"
        )
    wrong = sorted(given.keys() ^ table.keys()) if count or given else []
    if wrong:
        what = "lacks" if wrong[0] in table else "has"
        raise ValueError(
            f"'{name}' {what} {wrong[0]!r}, expected {', '.join(sorted(table)) or 'nothing'}: what "
            f"the graph has for each {'node' if name == 'nodes' else 'edge'}"
        )
    for key, rows in given.items():
        shape = [count, *table[key].shape[1:]]
        if not isinstance(rows, Tensor) or list(rows.shape) != shape:
            found: Any = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"{key!r} of '{name}' is {found}, expected a tensor of shape {shape}")
        if rows.dtype != table[key].dtype:
            raise ValueError(
                f"{key!r} of '{name}' is {rows.dtype}, expected {table[key].dtype}, as the graph "
                f"has it: pass {key}.to({table[key].dtype})"
            )
    return {k: given[k] if k in given else empty_rows(value) for k, value in table.items()}


def check_classes(new: Tensor, known: Tensor, num_classes: int) -> None:
    """Refuse new nodes whose class is none of the graph's, if it has labels.

    Args:
        new: The ``y`` of the new nodes.
        known: That of the graph, of the same type.
        num_classes: How many there are at least, by names or by outputs of the model.
    """
    if new.dim() != 1 or new.is_floating_point() or new.dtype == torch.bool:
        return
    largest, most = (int(y.max()) if y.numel() else -1 for y in (new, known))
    most = max(most, num_classes - 1)
    if largest > most >= 0:
        raise ValueError(
            f"'y' of 'nodes' holds the class {largest}, expected at most {most}, the last class of "
            "the graph, or -1 without a label"
        )


def check_row_counts(data: Data, nodes: Mapping[str, Any], edges: Mapping[str, Tensor]) -> None:
    """Refuse attributes with as many rows as there are both nodes and edges."""
    for key, _ in data:
        if key in EDGES:
            continue
        are = is_row_per_node(data, key), is_row_per_edge(data, key)
        if are != (key in nodes, key in edges):
            raise ValueError(
                f"'{key}' has {len(data[key])} rows, and the graph would have {data.num_nodes} "
                f"nodes and {data.num_edges} edges, so that their meaning is ambiguous: take it "
                "out of the graph, or add one node more"
            )


def set_edges(data: Data, rowptr: Tensor, col: Tensor, edges: Mapping[str, Tensor]) -> None:
    """Set the adjacency of a graph, and its edge attributes."""
    weight, num_nodes = edges.get(WEIGHT), rowptr.numel() - 1
    value = implicit_ones(col.numel()) if weight is None else weight
    data.num_nodes = num_nodes
    data.adj_t = sparse_csr(rowptr.to(col.dtype), col, value, num_nodes)
    for key, rows in edges.items():
        if key != WEIGHT:
            data[key] = rows


def check_pairs(name: str, pairs: Tensor | None, num_nodes: int) -> Tensor:
    """Check edges between known nodes; return them as int64, of shape ``[2, E]``."""
    if pairs is None:
        return torch.empty(2, 0, dtype=torch.long)
    is_tensor = isinstance(pairs, Tensor)
    are_ids = is_tensor and pairs.dtype in (torch.int64, torch.int32)
    if not are_ids or pairs.dim() != 2 or pairs.size(0) != 2:
        what = f"{pairs.dtype} of shape {list(pairs.shape)}" if is_tensor else type(pairs).__name__
        raise ValueError(f"'{name}' is {what}, expected ids of nodes of shape [2, E]")
    add = " or add the nodes, by 'nodes'" if name == "edge_index" else ""
    check_ids(pairs, num_nodes, name, cure=f"correct the ids{add}")
    return pairs.long()
