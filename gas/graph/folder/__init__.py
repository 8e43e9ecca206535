"""Graph folders: a clustered graph on disk, in plain arrays that are mapped, and a description."""

from gas.graph.folder.description import NAME, Array, Description, Sparse
from gas.graph.folder.new import NewFolder, only_writer
from gas.graph.folder.opening import is_graph_folder, mapped_rows, open_folder, opened
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
    "only_writer",
    "open_folder",
    "opened",
]
