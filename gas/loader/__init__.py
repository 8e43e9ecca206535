"""Mini-batches of a partitioned graph."""

from gas.loader.batch import SubData
from gas.loader.subgraph import EvalSubgraphLoader, SubgraphLoader

__all__ = ["EvalSubgraphLoader", "SubData", "SubgraphLoader"]
