"""Mini-batches of a partitioned graph."""

from gas.loader.batch import SubData
from gas.loader.evaluation import EvalSubgraphLoader
from gas.loader.links import LinkLoader
from gas.loader.sampler import PartSampler
from gas.loader.subgraph import SubgraphLoader
from gas.loader.typed import HeteroLoader

__all__ = [
    "EvalSubgraphLoader",
    "HeteroLoader",
    "LinkLoader",
    "PartSampler",
    "SubData",
    "SubgraphLoader",
]
