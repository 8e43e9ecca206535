"""Graphs by name, from files, and generated."""

from gas.datasets.files import load_graph
from gas.datasets.folder import find_feature_names
from gas.datasets.importing import import_graph
from gas.datasets.masks import check_parts, gen_masks, index2mask
from gas.datasets.named import (
    dataset_key,
    dataset_names,
    get_data,
    num_outputs,
    undo_clustering,
)
from gas.datasets.opening import open_graph
from gas.datasets.planted import open_mapped, planted_partition, write_planted_partition
from gas.datasets.stores import FolderStore

__all__ = [
    "FolderStore",
    "check_parts",
    "dataset_key",
    "dataset_names",
    "gen_masks",
    "get_data",
    "import_graph",
    "index2mask",
    "load_graph",
    "num_outputs",
    "open_graph",
    "open_mapped",
    "planted_partition",
    "write_planted_partition",
    "find_feature_names",
    "undo_clustering",
]
