"""Mini-batches of a partitioned graph."""

from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader

__all__ = ["EvalSubgraphLoader", "SubData", "SubgraphLoader"]
