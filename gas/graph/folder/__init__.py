"""Graph folders: a clustered graph on disk, in plain arrays that are mapped, and a description."""

from gas.graph.folder.description import NAME, Array, Description, Sparse
from gas.graph.folder.new import NewFolder, lock_folder
from gas.graph.folder.opening import is_graph_folder, mapped_rows, open_folder, open_if_path
from gas.graph.folder.writing import GraphWriter
from gas.io import GrowingArray

__all__ = [
    "NAME",
    "Array",
    "Description",
    "GraphWriter",
    "GrowingArray",
    "NewFolder",
    "Sparse",
    "is_graph_folder",
    "mapped_rows",
    "lock_folder",
    "open_folder",
    "open_if_path",
]
