"""``ModelRanks``: the connection of a model to the same model on other ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gas.graph import SHARD, Shard
from gas.history import Codec, History, copy_written_rows
from gas.loader import GRAPH_SIZE, RNG_FINGERPRINT, SubData
from gas.scalable.base import HistoryModel
from gas.scalable.distributed import HEADER_BYTES, RANGE_BYTES, Exchange, Group

Weight = str | Callable[[SubData], float] | None
LABELLED = "train_mask"  # The default weight.


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows sent by a rank so far, and its waiting time.

    ``sent_bytes`` are those of mini-batches, ``inference_bytes`` those of layer-wise inference.
    ``bound_bytes`` is the least for an epoch: each row is sent once to each rank with a replica.
    """

    rank: int
    steps: int
    sent_bytes: int
    inference_bytes: int
    bound_bytes: int
    waited_seconds: float


class ModelRanks:
    """Connect a model to the same model on other ranks.

    With the first mini-batch it is known which rows are sent: of a shard, those of which other
    ranks have replicas; of a whole graph, all of them.

    Args:
        group: The ranks.
        overlap: See :func:`gas.distribute`.
        codec: The precision in which rows are sent. (default: that of the histories)
        weight: See :func:`gas.distribute`.
    """

    def __init__(
        self, group: Group, overlap: bool, codec: Codec | None = None, weight: Weight = None
    ) -> None:
        self.group, self.overlap, self.codec, self.weight = group, overlap, codec, weight
        self.exchange: Exchange | None = None

    def bind(self, model: HistoryModel, shard: Shard | None) -> Exchange:
        """Make the model's histories hold the rows that this rank needs, at the first call.

        Raises:
            RankError: If the ranks have other graphs.
            ValueError: If the model is of another graph, or its batches are of two.
        """
        if self.exchange is not None:
            mine = self.exchange.shard
            if (shard is None) != (mine is None) or (
                shard is not None and mine is not None and shard.fingerprint != mine.fingerprint
            ):
                raise ValueError(
                    "the batch is of another graph, or cut otherwise, than the first one: use "
                    "gas.distribute(model.for_graph(num_nodes)) for each"
                )
            return self.exchange
        self._check(model, shard)
        if shard is not None:
            _move_to_shard(model, shard)
        pool = model._engine.pool
        self.exchange = Exchange(self.group, shard, self.overlap, self.codec, pool)
        return self.exchange

    def bind_batch(self, model: HistoryModel, n_id: Tensor) -> None:
        """Bind the model to the graph of a batch; see :meth:`bind`.

        Raises:
            ValueError: If the graph isn't known.
        """
        if hasattr(n_id, GRAPH_SIZE):
            self.bind(model, getattr(n_id, SHARD, None))
        elif self.exchange is None:
            raise ValueError(
                "'n_id' isn't the tensor that a loader has yielded, which tells what it has of the "
                "graph: pass batch.n_id itself, no copy, or gas.distribute(model, graph)"
            )

    def _check(self, model: HistoryModel, shard: Shard | None) -> None:
        """Refuse a graph that other ranks don't have, or that doesn't fit the model."""
        graph = "one without shards"
        if shard is not None:
            graph = f"{shard.fingerprint} in {shard.num_ranks} shards"
        self.group.check_equal_on_ranks(
            {
                "the graph": graph,
                "histories of": ", ".join(
                    f"{history.embedding_dim} of {history.codec}" for history in model.histories
                ),
            }
        )
        if shard is not None and shard.num_ranks != self.group.size:
            raise ValueError(
                f"the graph has {shard.num_ranks} shards, but there are {self.group.size} ranks: "
                f"cut it with gas.cluster(data, num_parts, shards={self.group.size})"
            )
        if shard is not None and model.num_nodes not in (shard.num_nodes, shard.nodes.numel()):
            raise ValueError(
                f"the model's histories are for {model.num_nodes} nodes, but the graph has "
                f"{shard.num_nodes}, and this rank {shard.nodes.numel()} of them: make the model "
                "with num_nodes=graph.num_nodes"
            )

    # A step ---------------------------------------------------------------------------------------

    def begin(
        self, n_id: Tensor, offset: Tensor | None, count: Tensor | None, batch: SubData | None
    ) -> None:
        """Begin a step, before histories are used; see :meth:`Exchange.begin`."""
        assert self.exchange is not None
        if offset is None or count is None:
            raise ValueError(
                "'offset' and 'count' are missing, by which ranks say what they send: pass all "
                "that the loader yields, model(batch) or model(batch.x, batch.adj_t, *args)"
            )
        weight = self._batch_weight(batch, int(count.sum())) if torch.is_grad_enabled() else 0.0
        ranges = list(zip(offset.tolist(), count.tolist(), strict=True))
        self.exchange.begin(ranges, weight, getattr(n_id, RNG_FINGERPRINT, 0))

    def _batch_weight(self, batch: SubData | None, size: int) -> float:
        """Return the weight of a batch in the gradient."""
        if self.weight is None:
            return 1.0
        if batch is None:
            return float(size)
        if callable(self.weight):
            weight = float(self.weight(batch))
        else:
            mask = batch.data.get(self.weight)
            if mask is None and self.weight == LABELLED:
                return float(size)
            if mask is None or mask.dim() != 1:
                found = "the graph hasn't" if mask is None else f"has shape {list(mask.shape)}"
                raise ValueError(
                    f"'weight' is {self.weight!r}, which {found}: expected one value per node; "
                    "pass a function, such as "
                    f"weight=lambda batch: int(batch.own.{self.weight}[:, 0].sum())"
                )
            weight = float(mask[: batch.batch_size].sum())
        if not 0 <= weight < math.inf:
            raise ValueError(f"'weight' gives {weight} for a batch, expected a number from 0 on")
        return weight

    def end(self, histories: Sequence[History]) -> None:
        """End a step, after a batch's pushes; see :meth:`Exchange.end`."""
        assert self.exchange is not None
        self.exchange.end(histories)

    def weigh_gradient(self, out: Any) -> Any:
        """Return a batch's outputs with a hook that multiplies their gradient by its weight.

        The mean of all ranks' gradients is then that of the step. The gradient of a batch without
        weight is ignored, even if it is NaN.
        """
        exchange = self.exchange
        if exchange is None or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        share = self.group.size * exchange.weight / exchange.weights if exchange.weight else 0.0
        out = out.view_as(out)  # The hook must not affect other users of the tensor itself.
        out.register_hook(lambda grad: grad * share if share else torch.zeros_like(grad))
        return out

    def fail(self) -> None:
        """Tell the other ranks that the batch's forward pass has failed."""
        if self.exchange is not None:
            self.exchange.fail()

    def receive_pending(self) -> None:
        """Receive the rows that are on their way, before histories are reset or recomputed."""
        if self.exchange is not None:
            self.exchange.receive_messages()

    @property
    def has_labels(self) -> bool:
        """Return whether the last step has labels on any rank."""
        return self.exchange is not None and self.exchange.weights > 0

    def mean(self, total: float, count: int) -> float:
        """Return the mean over all ranks, from the sum and the count on each."""
        found = self.group.gather_json([total, count], "adding up the loss")
        return sum(total for total, _ in found) / max(sum(count for _, count in found), 1)

    # Layer-wise inference -------------------------------------------------------------------------

    def exchange_layer(self, history: History, layer: int) -> None:
        """Send a layer's rows, after every batch was pushed, to the ranks with replicas of them."""
        if self.exchange is not None and self.exchange.shard is not None:
            self.exchange.exchange_layer(history, layer)

    def share_buffers(self, model: HistoryModel) -> None:
        """Copy the buffers of rank 0 to all ranks, such as statistics of a batch norm."""
        for name, buffer in model.named_buffers():
            self.group.broadcast(buffer, f"sending the buffer {name}")

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather the own rows of all ranks, in the order of the whole graph."""
        assert self.exchange is not None
        if self.exchange.shard is None:
            return rows
        return torch.cat(self.group.gather(rows, "collecting what all ranks computed"))

    @staticmethod
    def header_bytes(messages: float, ranges: float) -> float:
        """Return the bytes that messages have besides rows.

        Args:
            messages: The number of messages; each has a header.
            ranges: The number of ranges of rows in them; each is announced.
        """
        return messages * HEADER_BYTES + ranges * RANGE_BYTES

    def traffic(self, histories: Sequence[History]) -> Traffic:
        """Return the rows sent so far, and the waiting time."""
        exchange, waited = self.exchange, self.group.waited
        if exchange is None:
            return Traffic(self.group.rank, 0, 0, 0, 0, waited)
        bound = exchange.lower_bound(histories)
        steps, layers = exchange.sent_bytes
        return Traffic(self.group.rank, exchange.steps, steps, layers, bound, waited)


def _move_to_shard(model: HistoryModel, shard: Shard) -> None:
    """Replace a model's histories by those of a shard's rows, and copy the rows written so far."""
    if model.num_nodes == shard.nodes.numel():
        return
    old, num_nodes = model.histories, model.num_nodes
    model.num_nodes = shard.nodes.numel()
    try:  # The old histories' files are still open, so these have a folder of their own.
        made = model._make_histories(f"shard_of_{shard.num_ranks}")
    except BaseException:
        model.num_nodes = num_nodes
        raise
    for full, mine in zip(old, made, strict=True):
        copy_written_rows(full, mine, shard.nodes)
    model._factory.discard(old)
    model.histories = made


def check_connected(n_id: Tensor) -> None:
    """Refuse a batch of a shard for a model that isn't connected to other ranks.

    Raises:
        ValueError: If it is one.
    """
    if hasattr(n_id, SHARD):
        raise one_shard_error("'n_id'")


def one_shard_error(name: str) -> ValueError:
    """Return the error of a model that isn't connected to the ranks of other shards."""
    return ValueError(
        f"{name} is of one shard of a graph, whose halo is computed by other ranks: connect them, "
        "gas.distribute(model), or load the whole graph in one process"
    )


def check_single_process(model: HistoryModel, what: str) -> None:
    """Refuse a call that needs one process.

    Raises:
        ValueError: If the model is connected to other ranks; ``what`` names the call.
    """
    if model.ranks is not None:
        raise ValueError(
            f"{what} isn't done by a model that gas.distribute has connected to other ranks: use "
            "model.for_graph(num_nodes) in one process, which shares the weights"
        )
