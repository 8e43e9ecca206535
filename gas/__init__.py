"""Historical-embedding training of graph neural networks, on PyTorch and PyG."""

import sys

from gas import augment, graph, models
from gas.augment import MHAug
from gas.checkpoint import load, save
from gas.convert import to_scalable
from gas.datasets import files, gen_masks, get_data, open_graph, planted
from gas.graph import PartitionReport, cluster, drop_edges, metis, partition_report, permute
from gas.history import History, encode
from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader
from gas.nn import fuse
from gas.scalable import PrefetchLoader, ScalableGNN, distribute, prefetch, verify
from gas.training import compute_micro_f1, plan, simulate

dropout = drop_edges  # As scripts for the first system call it.

# Modules by the names that they had before 0.2.
_MOVED = {"partition": graph, "subgraph": graph, "prefetch": prefetch, "planted": planted}
for _name, _module in {**_MOVED, "graph_file": files}.items():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _module

__version__ = "0.1.0"

__all__ = [
    "EvalSubgraphLoader",
    "History",
    "MHAug",
    "PartitionReport",
    "PrefetchLoader",
    "ScalableGNN",
    "SubData",
    "SubgraphLoader",
    "__version__",
    "augment",
    "cluster",
    "compute_micro_f1",
    "distribute",
    "drop_edges",
    "dropout",
    "encode",
    "fuse",
    "gen_masks",
    "get_data",
    "load",
    "metis",
    "models",
    "open_graph",
    "partition_report",
    "permute",
    "plan",
    "save",
    "simulate",
    "to_scalable",
    "verify",
]
