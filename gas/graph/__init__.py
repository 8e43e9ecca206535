"""Graphs: the layouts that an adjacency is held in, edges read and checked, parts."""

from gas.graph.adjacency import Adjacency
from gas.graph.cluster import cluster
from gas.graph.edges import CSR, Edges, read_edges, read_graph, to_csr
from gas.graph.layout import LAYOUTS, drop_edges, layout_of
from gas.graph.links import without_links
from gas.graph.partition import METHODS, metis
from gas.graph.permute import permute
from gas.graph.report import PartitionReport, partition_report

__all__ = [
    "CSR",
    "LAYOUTS",
    "METHODS",
    "Adjacency",
    "Edges",
    "PartitionReport",
    "cluster",
    "drop_edges",
    "layout_of",
    "metis",
    "partition_report",
    "permute",
    "read_edges",
    "read_graph",
    "to_csr",
    "without_links",
]
