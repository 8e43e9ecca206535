"""Read graphs from ``.npz`` and ``.pt`` files, without unpickling code."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import AttrType, EdgeStorage, GlobalStorage, NodeStorage

from gas.datasets.arrays import bool_mask, check_targets, load_arrays, tensor_of, to_targets
from gas.datasets.roles import number_array
from gas.graph import MASKS, to_csr_features, to_float32_features
from gas.history import Codec

# Types in a Data object that ``torch.load`` may create, besides those that PyTorch and PyG allow.
SAFE_GLOBALS = [AttrType, DataEdgeAttr, DataTensorAttr, EdgeStorage, GlobalStorage, NodeStorage]
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # PyTorch has no maximum of them.
CACHE = "_cached_attr"  # A cache of edge-level attributes, which PyG recreates.


def load_graph(path: str | Path) -> Data:
    """Read a graph from a file, without ever unpickling code.

    * ``.npz``: arrays ``x`` ``[N, F]``, ``y`` ``[N]`` and ``edge_index`` ``[2, E]``; optionally
      ``edge_weight`` ``[E]`` and ``train_mask``, ``val_mask``, ``test_mask``.
    * ``.pt``: a PyG ``Data`` object or a dictionary of such tensors, from ``torch.save``.

    Features become float32. ``y`` holds a class per node, where -1 means unknown, or is ``[N, C]``
    with several labels per node.

    Raises:
        ValueError: If the file can't be read, or lacks a part of the graph.
    """
    data = read_archive(Path(path))
    check_targets(data.y)
    return data


def read_archive(path: Path) -> Data:
    """Read a graph from a file as :func:`load_graph` does, but accept NaN targets."""
    content = _read_npz(path) if path.suffix == ".npz" else _read_pt(path)
    if isinstance(content, dict) and not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path} holds a dictionary without names: expected x, y and edge_index")
    data = content if isinstance(content, Data) else Data.from_dict(content)
    if isinstance(data.get("edge_index"), Tensor) and data.edge_index.dtype in UNSIGNED:
        data.edge_index = data.edge_index.long()
    for key in ("x", "y"):
        if not isinstance(data.get(key), Tensor):
            raise ValueError(f"{path} holds no {key!r}: expected the arrays x, y and edge_index")
    if "edge_index" not in data and "adj_t" not in data:
        raise ValueError(f"{path} holds no 'edge_index': expected the arrays x, y and edge_index")
    if data.x.dim() != 2:
        raise ValueError(
            f"'x' has shape {list(data.x.shape)}, expected [N, F]: a row for each node"
        )
    if data.x.is_complex():
        raise ValueError(f"'x' of {path.name} is {data.x.dtype}, expected real numbers")
    if data.x.layout == torch.strided:
        data.x = Codec("float32").cast(data.x, name=f"'x' of {path.name}")
    else:
        # Others than float64 fit float32, but sums of duplicates may not fit their own type.
        x = data.x if data.x.dtype == torch.float64 else data.x.float()
        data.x = to_float32_features(to_csr_features(x), f"'x' of {path.name}")
    data.y = to_targets(data.y)
    if isinstance(data.get("num_nodes"), Tensor):
        data.num_nodes = int(data.num_nodes)
    for key in MASKS:
        if key in data:
            data[key] = bool_mask(data[key], key)
    return data


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        arrays = load_arrays(path)
    except Exception as error:  # zipfile, zlib and NumPy may raise any error.
        if "pickle" not in str(error).lower():
            raise ValueError(_explain_unreadable(path, error)) from error
        raise ValueError(
            f"{path} holds pickled objects, which are never loaded because they can run code, or "
            "no arrays: save plain arrays, np.savez(path, x=x, y=y, edge_index=edge_index)"
        ) from error
    content: dict[str, Any] = {}
    for key, array in arrays.items():
        if key in ("edge_type", "node_type") and array.dtype.kind == "U":
            content[key], content[f"{key}_names"] = number_array(array, path)
        else:
            content[key] = tensor_of(array, key)
    return content


def _plain_dict(*_: object) -> dict[object, object]:
    """Stand for the defaultdict of PyG's cache, which newer PyTorch doesn't unpickle."""
    return {}


@contextlib.contextmanager
def _safe_globals() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` load PyG's types of graphs in this context."""
    before = torch.serialization.get_safe_globals()
    others = [known for known in before if known is not defaultdict]
    torch.serialization.clear_safe_globals()
    try:
        cache = (_plain_dict, "collections.defaultdict")
        with torch.serialization.safe_globals([*others, *SAFE_GLOBALS, cache]):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def _read_pt(path: Path) -> Data | dict[str, Tensor]:
    try:
        with _safe_globals():
            content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load may raise any error.
        foreign = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
        if foreign is None:
            raise ValueError(_explain_unreadable(path, error)) from error
        raise ValueError(
            f"{path} holds a pickled {foreign[1]}, which is never loaded because it can run code: "
            "save a PyG Data object or a dictionary of tensors"
        ) from error
    if not isinstance(content, (Data, dict)):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, expected a PyG Data object or a dictionary"
        )
    if isinstance(content, Data):
        for store in content.stores:
            store.__dict__.pop(CACHE, None)
    return content


def _explain_unreadable(path: Path, error: Exception) -> str:
    """Return the text of an error for an unreadable file."""
    reason = str(error).strip().split("\n")[0]
    if "weights_only" in reason:  # PyTorch advises to unpickle code.
        reason = "not written by torch.save"
    return f"{path} is truncated or no graph file ({type(error).__name__}: {reason}): save it again"
