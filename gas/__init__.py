"""Historical-embedding training of graph neural networks, on PyTorch and PyG."""

from gas import augment, models
from gas.augment import MHAug
from gas.datasets import gen_masks, get_data
from gas.history import History
from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader
from gas.nn import fuse
from gas.partition import PartitionReport, metis, partition_report, permute
from gas.prefetch import PrefetchLoader
from gas.scalable import ScalableGNN
from gas.subgraph import dropout
from gas.training import compute_micro_f1

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
    "compute_micro_f1",
    "dropout",
    "fuse",
    "gen_masks",
    "get_data",
    "metis",
    "models",
    "partition_report",
    "permute",
]
