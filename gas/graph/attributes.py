"""Attributes that ``gas.cluster`` adds to a graph, and attributes that hold node ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PERM = "perm"  # The row of the original graph of each node.
PARTS = "parts"  # The first row of each part.
BATCH_SIZE = "batch_size"  # The parts per mini-batch of the last loader, the default of others.
SHARDS = "shards"  # Of a graph for several processes, the first row of each shard.
SHARD = "shard"  # Of the local graph of a process, a :class:`Shard`.
# Lists of node ids; "train_idx" is OGB's, the others are as common.
NODE_LISTS = re.compile(r"(train|val|valid|validation|test|unlabell?ed)_(idx|index|ids?|nodes?)")


def is_node_list(key: str, value: object) -> bool:
    """Return whether an attribute of a graph is a tensor of node ids, by its name."""
    if not isinstance(value, Tensor) or NODE_LISTS.fullmatch(key) is None:
        return False
    return value.dim() == 1 and value.dtype in (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows and edges of the whole graph in a local graph; its attribute ``shard``.

    Tensors are int64, and on the CPU.

    * ``rank``: which shard it is, the rank of its process.
    * ``bounds``: the first row of every shard in the whole graph, of shape ``[W + 1]``.
    * ``replicas``: the nodes of other shards that have an edge into a node of this one, each once:
      rows of the whole graph, increasing, of shape ``[R]``.
    * ``edges``: which edge of the whole graph each local edge is, of shape ``[E]``, as ``e_id`` of
      mini-batches of the whole graph counts them.
    * ``fingerprint``: tells whether others have cut the same graph in the same way.
    """

    rank: int
    bounds: Tensor
    replicas: Tensor
    edges: Tensor
    fingerprint: int

    @property
    def num_ranks(self) -> int:
        """The number of shards, W."""
        return self.bounds.numel() - 1

    @cached_property
    def begin(self) -> int:
        """The first of its rows in the whole graph."""
        return int(self.bounds[self.rank])

    @cached_property
    def end(self) -> int:
        """The row after its last."""
        return int(self.bounds[self.rank + 1])

    @property
    def num_own(self) -> int:
        """Number of own nodes, without replicas: the first rows of the local graph."""
        return self.end - self.begin

    @cached_property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph."""
        return int(self.bounds[-1])

    @cached_property
    def nodes(self) -> Tensor:
        """The row of the whole graph of each local row, of shape ``[num_own + R]``."""
        return torch.cat([torch.arange(self.begin, self.end), self.replicas])

    @cached_property
    def replica_ptr(self) -> Tensor:
        """Ranges of replicas by owner, of shape ``[W + 1]``.

        Those of the shard ``r`` are ``replicas[replica_ptr[r] : replica_ptr[r + 1]]``.
        """
        return torch.searchsorted(self.replicas, self.bounds)

    def __repr__(self) -> str:
        return (
            f"Shard({self.rank} of {self.num_ranks}, nodes={self.num_own}, "
            f"replicas={self.replicas.numel()}, edges={self.edges.numel()})"
        )
