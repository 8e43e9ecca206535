"""Mini-batches of a partitioned graph."""

from gas.loader.batch import DRAWN, GRAPH_SIZE, SubData, held, num_bytes, tensors
from gas.loader.evaluation import EvalSubgraphLoader, cut_in_order
from gas.loader.links import LinkLoader
from gas.loader.moving import Sent, moved, moved_tensor, send
from gas.loader.sampler import PartSampler, sampler_of
from gas.loader.subgraph import CACHE_BYTES, SubgraphLoader
from gas.loader.typed import HeteroLoader
from gas.loader.unread import attributes, expect_rows

__all__ = [
    "CACHE_BYTES",
    "DRAWN",
    "EvalSubgraphLoader",
    "GRAPH_SIZE",
    "HeteroLoader",
    "LinkLoader",
    "PartSampler",
    "Sent",
    "SubData",
    "SubgraphLoader",
    "attributes",
    "cut_in_order",
    "expect_rows",
    "held",
    "moved",
    "moved_tensor",
    "num_bytes",
    "sampler_of",
    "send",
    "tensors",
]
