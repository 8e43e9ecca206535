"""Redistribution of histories: load a checkpoint of W ranks on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module

from gas.checkpoint.histories import StoredHistory, is_count
from gas.checkpoint.reader import CheckpointReader
from gas.checkpoint.tensors import CheckpointError
from gas.scalable import ModelRanks, ScalableGNN, set_banks, unwrap_loader

if TYPE_CHECKING:
    from gas.graph import Shard
    from gas.history import History

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


class LoadTarget(NamedTuple):
    """The model, graph and ranks that a checkpoint is loaded into."""

    model: Module | None
    ranks: ModelRanks | None
    graph: Graph | None
    histories: bool

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
    def num_rows(self) -> int:
        """Number of rows of the histories."""
        shard = self.shard
        return cast(ScalableGNN, self.model).num_nodes if shard is None else shard.nodes.numel()


class SavedRank(NamedTuple):
    """The checkpoint of one rank, and its description of the graph."""

    files: CheckpointReader
    about: dict[str, Any]


class Redistribution:
    """Move each saved history row to the rank that owns its node now."""

    def __init__(self, sources: Sequence[SavedRank], into: LoadTarget) -> None:
        perms = [self._perm_of(found, len(sources)) for found in sources]
        if into.graph is None or into.graph.perm is None:
            raise ValueError(
                "'loader' isn't given, or its graph has no 'perm', which tells what its nodes were "
                "in the graph that gas.cluster was given: pass one of such a graph, or "
                "histories=False, which leaves them out"
            )
        perm, shard = into.graph.perm, into.shard
        then = sum(each.numel() for each in perms)
        now = perm.numel() if shard is None else shard.num_nodes
        if then != now or perm.numel() != into.num_rows:
            raise ValueError(
                f"'loader' has a graph of {now} nodes, and 'model' is for {into.num_rows} of "
                f"them, but what was saved is of {then}: load the graph and make the model as "
                "they were then, in however many shards"
            )
        seen = torch.zeros(then, dtype=torch.bool)
        for each, found in zip(perms, sources, strict=True):
            if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < then:
                raise CheckpointError(f"{found.files.path} has nodes that don't exist")
            seen[each] = True
        if not bool(seen.all()):
            raise CheckpointError(f"{sources[0].files.path} and others have a node twice")
        row = torch.full((then,), -1)
        row[perm] = torch.arange(perm.numel())
        self._readings = [
            [
                self._read(found, number, history, perm.numel())
                for found, perm in zip(sources, perms, strict=True)
            ]
            for number, history in enumerate(cast(ScalableGNN, into.model).histories)
        ]
        left = len(sources[0].files.manifest["histories"]) - len(self._readings)
        if left:
            raise ValueError(
                f"{sources[0].files.path} has {left} histories that 'model' lacks, those of views "
                "included: make the model as it was, or pass histories=False, which loads the rest"
            )
        self._rows = [row[each] for each in perms]  # The new row of each saved own row.

    @staticmethod
    def _perm_of(found: SavedRank, num_ranks: int) -> Tensor:
        """Return the original nodes of a rank's own rows."""
        perm = found.about.get("perm")
        if num_ranks > 1 and found.about.get("cut") is None:
            raise ValueError(
                f"{found.files.path} is of {num_ranks} ranks that each had the whole graph: load "
                "it with as many, or pass histories=False, which loads the rest"
            )
        if perm is None:
            raise ValueError(
                f"{found.files.path} was saved without a loader of a graph of gas.cluster, which "
                "tells whose its rows are: load it by as many processes as it was saved by, or "
                "pass histories=False, which loads the rest"
            )
        if not isinstance(perm, Tensor) or perm.dtype != torch.int64 or perm.dim() != 1:
            raise CheckpointError(f"{found.files.path} has nodes without numbers: it is damaged")
        return perm

    @staticmethod
    def _read(found: SavedRank, number: int, history: History, num_own: int) -> StoredHistory:
        name = f"history_{number}"
        about = found.files.manifest["histories"].get(name)
        if about is None:
            raise ValueError(
                f"'model' has {name!r}, but {found.files.path} has none: make the model as it was, "
                "or pass histories=False, which loads the rest"
            )
        num_rows = about.get("num_rows") if isinstance(about, dict) else None
        if not is_count(num_rows) or cast(int, num_rows) < num_own:
            raise CheckpointError(f"{found.files.path} has too few rows of {name!r}: it is damaged")
        return found.files.read_history(name, history, num_rows)

    def restore(self, model: ScalableGNN) -> None:
        """Restore the histories of a model, with their ages."""
        set_banks(model, 0)
        for readings, history in zip(self._readings, model.histories, strict=True):
            pushes = max(reading.pushes for reading in readings)
            written_at = torch.zeros(history.num_embeddings, dtype=torch.int32)
            for reading, rows in zip(readings, self._rows, strict=True):
                at = reading.written_at[: rows.numel()]
                at = torch.where(at > 0, at + (pushes - reading.pushes), 0)
                written_at[rows[rows >= 0]] = at[rows >= 0]
            history.restore(self._blocks(readings), written_at, pushes)

    def _blocks(self, readings: Sequence[StoredHistory]) -> Iterator[tuple[Tensor, Tensor]]:
        for reading, rows in zip(readings, self._rows, strict=True):
            for index, values in reading.rows():
                known = index < rows.numel()  # Other rows are replicas.
                to = rows[index[known]]
                order = to.argsort()
                order = order[to[order] >= 0]
                yield to[order], values[known][order]
