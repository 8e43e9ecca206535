"""Historical-embedding training of graph neural networks, on PyTorch and PyG."""

from gas import _startup, augment, models  # noqa: F401 - _startup runs first.
from gas._moved import redirect_moved_names
from gas.augment import MHAug
from gas.checkpoint import load, save
from gas.convert import to_scalable
from gas.datasets import get_data, open_graph
from gas.graph import PartitionReport, cluster, drop_edges, metis, partition_report, permute
from gas.history import History, quantize
from gas.loader import EvalSubgraphLoader, LinkLoader, PartSampler, SubData, SubgraphLoader
from gas.nn import fuse
from gas.scalable import PrefetchLoader, ScalableGNN, distribute, verify
from gas.training import evaluate, fit, plan, predictions, profile, train_epoch

redirect_moved_names()

__version__ = "0.2.0"

__all__ = [
    "EvalSubgraphLoader",
    "History",
    "LinkLoader",
    "MHAug",
    "PartSampler",
    "PartitionReport",
    "PrefetchLoader",
    "ScalableGNN",
    "SubData",
    "SubgraphLoader",
    "__version__",
    "augment",
    "cluster",
    "distribute",
    "drop_edges",
    "evaluate",
    "fit",
    "fuse",
    "get_data",
    "load",
    "load_run",
    "metis",
    "models",
    "open_graph",
    "partition_report",
    "permute",
    "plan",
    "predictions",
    "profile",
    "quantize",
    "report",
    "save",
    "to_scalable",
    "train_epoch",
    "verify",
]
