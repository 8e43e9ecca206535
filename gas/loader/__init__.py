"""Mini-batches of a partitioned graph."""

from gas.loader.batch import SubData
from gas.loader.sampler import PartSampler
from gas.loader.subgraph import EvalSubgraphLoader, SubgraphLoader
from gas.loader.typed import HeteroLoader

__all__ = ["EvalSubgraphLoader", "HeteroLoader", "PartSampler", "SubData", "SubgraphLoader"]
