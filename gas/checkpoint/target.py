"""The target of a checkpoint: what it is loaded into, and the rows of the graph there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor
from torch.nn import Module

from gas.scalable import ModelRanks, ScalableGNN, unwrap_loader

if TYPE_CHECKING:
    from gas.graph import Shard

MIXERS = (0x9E3779B97F4A7C1, 0xC2B2AE3D27D4EB5)  # Spread ids and degrees over 64 bits.


class Graph(NamedTuple):
    """The rows of a loader's graph: their original nodes and degrees."""

    shard: Shard | None
    perm: Tensor | None  # The original node of each row, replicas included.
    degree: Tensor  # The number of edges into each row.

    @classmethod
    def of(cls, loader: Any) -> Graph | None:
        """Return the partition of a loader; ``None`` for loaders of other data."""
        loader = unwrap_loader(loader)
        data, rowptr = getattr(loader, "data", None), getattr(loader, "_rowptr", None)
        if data is None or rowptr is None:
            return None
        perm = data.get("perm")  # As gas.cluster calls it.
        return cls(loader.shard, None if perm is None else perm.cpu().long(), rowptr.diff())

    @property
    def own(self) -> Tensor | None:
        """The original nodes of own rows."""
        return self.perm if self.shard is None or self.perm is None else self.perm[: self.num_own]

    @property
    def num_own(self) -> int:
        """Number of own rows, which come first."""
        return self.degree.numel() if self.shard is None else self.shard.num_own

    @property
    def sum(self) -> int | None:
        """A checksum; its sum over all ranks doesn't depend on the partition of the graph."""
        if self.own is None:
            return None
        node, degree = self.own + 1, self.degree[: self.num_own].cpu().long() + 1
        mixed = (node * MIXERS[0]) ^ (degree * MIXERS[1])
        return int(((mixed ^ (mixed >> 29)) * MIXERS[0]).sum()) % (1 << 63)


@dataclass(frozen=True)
class LoadTarget:
    """The arguments of :func:`gas.load`; ``histories`` is false for models without histories."""

    model: Module | None
    optimizer: Any
    loader: Any
    histories: bool
    random_state: bool
    objects: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """Objects with a state, by their names, the optimizer and the loader included."""
        named = {**self.objects, "optimizer": self.optimizer, "loader": self.loader}
        return {name: each for name, each in named.items() if each is not None}

    @property
    def ranks(self) -> ModelRanks | None:
        """The ranks of the model in distributed training."""
        return self.model.ranks if isinstance(self.model, ScalableGNN) else None

    @cached_property
    def graph(self) -> Graph | None:
        """The graph of the loader."""
        return Graph.of(self.loader)

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self.ranks is None else self.ranks.group.size

    @property
    def is_known(self) -> bool:
        """Return whether the nodes of this process are known."""
        return self.graph is not None or (
            self.ranks is not None and self.ranks.exchange is not None
        )

    @property
    def shard(self) -> Shard | None:
        """Shard of this process; ``None`` for the whole graph."""
        if self.graph is not None:
            return self.graph.shard
        exchange = None if self.ranks is None else self.ranks.exchange
        return None if exchange is None else exchange.shard

    @property
    def num_rows(self) -> int | None:
        """Number of rows that the histories will have; ``None``: as many as now."""
        if self.ranks is None:
            return None
        num_nodes = cast(ScalableGNN, self.model).num_nodes
        return num_nodes if self.shard is None else self.shard.nodes.numel()
