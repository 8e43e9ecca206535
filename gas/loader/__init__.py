"""Mini-batches of a partitioned graph."""

from gas.loader.batch import (
    GRAPH_SIZE,
    NODE_ORDER,
    OF_BATCH,
    RNG_FINGERPRINT,
    SubData,
    find_node_order,
    iter_tensors,
    num_bytes,
    tensors_in_memory,
)
from gas.loader.batch_sampler import Epoch
from gas.loader.cache import CACHE_BYTES
from gas.loader.evaluation import EvalSubgraphLoader, batches_in_order
from gas.loader.hetero import HeteroLoader
from gas.loader.lazy import prefetch_rows, raw_attributes
from gas.loader.links import LinkLoader
from gas.loader.part_sampler import PartSampler, find_sampler, unwrap_loader
from gas.loader.subgraph import SubgraphLoader
from gas.loader.transfer import PendingBatch, send_batch, tensor_to_device, to_device

__all__ = [
    "CACHE_BYTES",
    "Epoch",
    "EvalSubgraphLoader",
    "GRAPH_SIZE",
    "NODE_ORDER",
    "OF_BATCH",
    "HeteroLoader",
    "LinkLoader",
    "PartSampler",
    "PendingBatch",
    "RNG_FINGERPRINT",
    "SubData",
    "SubgraphLoader",
    "batches_in_order",
    "find_node_order",
    "find_sampler",
    "unwrap_loader",
    "tensors_in_memory",
    "num_bytes",
    "prefetch_rows",
    "send_batch",
    "raw_attributes",
    "tensor_to_device",
    "iter_tensors",
    "to_device",
]
