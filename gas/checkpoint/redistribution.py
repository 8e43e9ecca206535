"""Redistribution of histories: load a checkpoint of W ranks on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gas.checkpoint.histories import StoredHistory, is_count
from gas.checkpoint.reader import CheckpointReader
from gas.checkpoint.target import LoadTarget
from gas.checkpoint.tensors import CheckpointError
from gas.scalable import ScalableGNN, set_banks

if TYPE_CHECKING:
    from gas.history import History


class Redistribution:
    """Move each saved history row to the rank that owns its node now."""

    def __init__(self, sources: Sequence[CheckpointReader], into: LoadTarget) -> None:
        perms = [self._read_perm(source, len(sources)) for source in sources]
        if into.graph is None or into.graph.perm is None:
            raise ValueError(
                "'loader' isn't given, or its graph has no 'perm', which tells what its nodes were "
                "in the graph that gas.cluster was given: pass one of such a graph, or "
                "histories=False, which leaves them out"
            )
        perm, shard, model = into.graph.perm, into.shard, cast(ScalableGNN, into.model)
        num_rows = model.num_nodes if into.num_rows is None else into.num_rows
        then = sum(each.numel() for each in perms)
        now = perm.numel() if shard is None else shard.num_nodes
        if then != now or perm.numel() != num_rows:
            raise ValueError(
                f"'loader' has a graph of {now} nodes, and 'model' is for {num_rows} of "
                f"them, but what was saved is of {then}: load the graph and make the model as "
                "they were then, in however many shards"
            )
        seen = torch.zeros(then, dtype=torch.bool)
        for each, found in zip(perms, sources, strict=True):
            if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < then:
                raise CheckpointError(f"{found.path} has nodes that don't exist")
            seen[each] = True
        if not bool(seen.all()):
            raise CheckpointError(f"{sources[0].path} and others have a node twice")
        row = torch.full((then,), -1)
        row[perm] = torch.arange(perm.numel())
        self._readings = [
            [
                self._read(found, number, history, perm.numel())
                for found, perm in zip(sources, perms, strict=True)
            ]
            for number, history in enumerate(model.histories)
        ]
        left = len(sources[0].manifest["histories"]) - len(self._readings)
        if left:
            raise ValueError(
                f"{sources[0].path} has {left} histories that 'model' lacks, those of views "
                "included: make the model as it was, or pass histories=False, which loads the rest"
            )
        self._rows = [row[each] for each in perms]  # The new row of each saved own row.

    @staticmethod
    def _read_perm(source: CheckpointReader, num_ranks: int) -> Tensor:
        """Return the id in the original graph of each row that a rank has saved."""
        perm = source.about.get("perm")
        if num_ranks > 1 and source.about.get("cut") is None:
            raise ValueError(
                f"{source.path} was saved by {num_ranks} ranks that each had the whole graph: load "
                "it with as many ranks, or pass histories=False, which loads the rest"
            )
        if perm is None:
            raise ValueError(
                f"{source.path} was saved without a loader, which tells to which nodes the rows of "
                "histories belong: load it with as many ranks as have saved it, or pass "
                "histories=False, which loads the rest"
            )
        if not isinstance(perm, Tensor) or perm.dtype != torch.int64 or perm.dim() != 1:
            raise CheckpointError(f"'perm' of {source.path} isn't a list of nodes: it is damaged")
        return perm

    @staticmethod
    def _read(
        found: CheckpointReader, number: int, history: History, num_own: int
    ) -> StoredHistory:
        name = f"history_{number}"
        about = found.manifest["histories"].get(name)
        if about is None:
            raise ValueError(
                f"'model' has {name!r}, but {found.path} has none: make the model as it was, "
                "or pass histories=False, which loads the rest"
            )
        num_rows = about.get("num_rows") if isinstance(about, dict) else None
        if not is_count(num_rows) or cast(int, num_rows) < num_own:
            raise CheckpointError(f"{found.path} has too few rows of {name!r}: it is damaged")
        return found.read_history(name, history, num_rows)

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
