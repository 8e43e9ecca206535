"""Graphs by name, whose adjacency is a ``torch_sparse.SparseTensor``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.typing import WITH_TORCH_SPARSE

from gas.datasets import named

Loaded = tuple[Data, int, int]

# Data sets with another folder than in gas; that of a citation graph has the name as it is typed.
_FOLDERS: dict[str, Callable[[str, str], Data]] = {
    **dict.fromkeys(
        ("cora", "citeseer", "pubmed"),
        lambda root, name: named.load_planetoid(f"{root}/Planetoid", name),
    ),
    "wikics": lambda root, _: named.load_wikics(f"{root}/WIKICS"),
    "yelp": lambda root, _: named.load_standardised("Yelp", f"{root}/YELP"),
}


def get_data(root: str, name: str) -> Loaded:
    """Load a graph with ``adj_t`` from the folders in which that package stores them.

    PPI is the union of its training graphs, and so are CLUSTER and PATTERN. Any other name of
    :func:`gas.get_data` is known, too.

    Args:
        root: The folder of all data sets.
        name: The name of one, in any spelling of case and dashes.

    Returns:
        The graph, its number of features, and its number of classes.

    Raises:
        ImportError: If torch-sparse is missing.
        ValueError: If there is no such data set.
        ConnectionError: If raw files are missing and can't be downloaded; it names them.
    """
    _check_torch_sparse()
    key = named.dataset_key(name)
    if key == "ppi":
        return get_ppi(root)
    if key in ("cluster", "pattern"):
        return get_sbm(root, name)
    load = _FOLDERS.get(key)
    return _to_result(
        named.get_data(root, name, split="all")[0] if load is None else load(root, name)
    )


def get_ppi(root: str, split: str = "train") -> Loaded:
    """Load the union of some graphs of PPI, with a mask ``{split}_mask`` that is true everywhere.

    Args:
        root: The folder of all data sets.
        split: ``"train"``, ``"val"`` or ``"test"``. (default: ``"train"``)
    """
    _check_torch_sparse()
    data = _union(named.load_pyg("PPI", f"{root}/PPI", split))
    data[f"{split}_mask"] = torch.ones(data.num_nodes, dtype=torch.bool)
    return _to_result(data)


def get_sbm(root: str, name: str) -> Loaded:
    """Load the union of the training graphs of CLUSTER or PATTERN.

    Args:
        root: The folder of all data sets.
        name: The name of one of the two.
    """
    _check_torch_sparse()
    # PyG keeps what it has transformed, of all splits, where a script looks for the other two.
    options = {"split": "train", "pre_transform": T.ToSparseTensor()}
    folder = f"{root}/SBM"
    return _to_result(
        _union(named.load_pyg("GNNBenchmarkDataset", folder, name.upper(), **options))
    )


def _check_torch_sparse() -> None:
    if not WITH_TORCH_SPARSE:
        raise ImportError(
            "the graphs of gas.compat have their edges in a torch_sparse.SparseTensor, and "
            "torch-sparse is missing: pip install --no-build-isolation torch-scatter torch-sparse, "
            "or use gas.get_data, whose graphs have an 'edge_index'"
        )


def _union(graphs: Data) -> Data:
    """Return the graphs of one of PyG's ``Batch`` as one graph."""
    return Data.from_dict({key: value for key, value in graphs if key not in ("batch", "ptr")})


def _to_result(data: Data) -> Loaded:
    if "adj_t" not in data:  # Files that a script of there has left hold it already.
        data = T.ToSparseTensor()(data)
    return data, data.num_features, named.num_outputs(data.y)
