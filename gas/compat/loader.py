"""Mini-batches of a partitioned graph."""

from gas import EvalSubgraphLoader, SubData, SubgraphLoader

__all__ = ["EvalSubgraphLoader", "SubData", "SubgraphLoader"]
