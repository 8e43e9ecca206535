"""Work of a model on one of many ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gas.distributed import HEADER_BYTES, RANGE_BYTES, Exchange, Group
from gas.graph import SHARD, Shard
from gas.history import Codec, History
from gas.loader import GRAPH_SIZE, RNG_FINGERPRINT, SubData
from gas.scalable.base import HistoryModel

Weight = str | Callable[[SubData], float] | None
LABELLED = "train_mask"  # What counts unless told.
ROWS = 65536  # What is copied at once.


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows sent by a rank so far, and its waiting time.

    ``sent_bytes`` are those of mini-batches, ``inference_bytes`` those of layer-wise inference.
    ``bound_bytes`` is the least that an epoch sends: each row once to each rank that holds it.
    """

    rank: int
    steps: int
    sent_bytes: int
    inference_bytes: int
    bound_bytes: int
    waited_seconds: float


class Ranks:
    """Connects a model to the same model on other ranks.

    Which rows go where is known with the first mini-batch: of a shard, those that other ranks hold;
    of a whole graph, all of them.

    Args:
        group: The ranks.
        overlap: See :func:`gas.distribute`.
        codec: How rows travel. (default: as they are stored)
        weight: See :func:`gas.distribute`.
    """

    def __init__(
        self, group: Group, overlap: bool, codec: Codec | None = None, weight: Weight = None
    ) -> None:
        self.group, self.overlap, self.codec, self.weight = group, overlap, codec, weight
        self.exchange: Exchange | None = None

    def bind(self, model: HistoryModel, shard: Shard | None) -> Exchange:
        """Has the model's histories hold what this rank needs, once.

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
            _hold(model, shard)
        pool = model._engine.pool
        self.exchange = Exchange(self.group, shard, self.overlap, self.codec, pool)
        return self.exchange

    def bind_to(self, model: HistoryModel, n_id: Tensor) -> None:
        """Bind the model to the graph of a batch; see :meth:`bind`.

        Raises:
            ValueError: If it isn't known which graph that is.
        """
        if hasattr(n_id, GRAPH_SIZE):
            self.bind(model, getattr(n_id, SHARD, None))
        elif self.exchange is None:
            raise ValueError(
                "'n_id' isn't the tensor that a loader has yielded, which tells what it has of the "
                "graph: pass batch.n_id itself, no copy, or gas.distribute(model, graph)"
            )

    def _check(self, model: HistoryModel, shard: Shard | None) -> None:
        graph = "one without shards"
        if shard is not None:
            graph = f"{shard.fingerprint} in {shard.num_ranks} shards"
        self.group.check_alike(
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
        """Before a batch reads or writes histories; see :meth:`gas.distributed.Exchange.begin`."""
        assert self.exchange is not None
        if offset is None or count is None:
            raise ValueError(
                "'offset' and 'count' are missing, by which ranks say what they send: pass all "
                "that the loader yields, model(batch) or model(batch.x, batch.adj_t, *args)"
            )
        weight = self._weigh(batch, int(count.sum())) if torch.is_grad_enabled() else 0.0
        ranges = list(zip(offset.tolist(), count.tolist(), strict=True))
        self.exchange.begin(ranges, weight, getattr(n_id, RNG_FINGERPRINT, 0))

    def _weigh(self, batch: SubData | None, size: int) -> float:
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
        """After the batch's rows have been pushed; see :meth:`gas.distributed.Exchange.end`."""
        assert self.exchange is not None
        self.exchange.end(histories)

    def weighed(self, out: Any) -> Any:
        """Return the outputs of a batch, whose gradient is multiplied on its way back.

        The mean of all ranks' gradients is then that of the step. Of a batch that counts nothing,
        the gradient isn't looked at, be it NaN.
        """
        exchange = self.exchange
        if exchange is None or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        share = self.group.size * exchange.weight / exchange.weights if exchange.weight else 0.0
        out = out.view_as(out)  # Whoever has the tensor itself, such as a layer, isn't concerned.
        out.register_hook(lambda grad: grad * share if share else torch.zeros_like(grad))
        return out

    def fail(self) -> None:
        """Return the batch's forward pass has failed."""
        if self.exchange is not None:
            self.exchange.fail()

    def forget(self) -> None:
        """Take in what is on its way, before all rows are forgotten or computed anew."""
        if self.exchange is not None:
            self.exchange.take_in()

    def close(self) -> None:
        """Give the connections back."""
        self.group.close()

    @property
    def is_labelled(self) -> bool:
        """Return whether the last step has labels on any rank."""
        return self.exchange is not None and self.exchange.weights > 0

    def mean(self, total: float, count: int) -> float:
        """Return the mean of numbers of which every rank has added up some."""
        found = self.group.gather_json([total, count], "adding up the loss")
        return sum(total for total, _ in found) / max(sum(count for _, count in found), 1)

    # Layer-wise inference -------------------------------------------------------------------------

    def swept(self, history: History, layer: int) -> None:
        """After every batch was pushed to the history of a layer."""
        if self.exchange is not None and self.exchange.shard is not None:
            self.exchange.layer(history, layer)

    def share_buffers(self, model: HistoryModel) -> None:
        """Give all ranks the buffers of rank 0, such as means of a batch normalisation."""
        for name, buffer in model.named_buffers():
            self.group.broadcast(buffer, f"sending the buffer {name}")

    def every_row(self, rows: Tensor) -> Tensor:
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
        """Return the traffic so far."""
        exchange, waited = self.exchange, self.group.waited
        if exchange is None:
            return Traffic(self.group.rank, 0, 0, 0, 0, waited)
        bound = exchange.lower_bound(histories)
        steps, layers = exchange.sent_bytes
        return Traffic(self.group.rank, exchange.steps, steps, layers, bound, waited)


def _hold(model: HistoryModel, shard: Shard) -> None:
    """Give a model histories of the rows of a shard, with what was known of them."""
    if model.num_nodes == shard.nodes.numel():
        return
    old, before = model.histories, model.num_nodes
    model.num_nodes = shard.nodes.numel()
    try:  # The files of the old ones are open.
        made = model._make_histories(f"shard_of_{shard.num_ranks}")
    except BaseException:
        model.num_nodes = before
        raise
    for full, mine in zip(old, made, strict=True):
        known = full.written[shard.nodes].nonzero().view(-1)
        for rows in known.split(ROWS):
            mine.push(full.pull(shard.nodes[rows]), rows)
    model._factory.discard(old)
    model.histories = made


def check_connected(n_id: Tensor) -> None:
    """Refuse a batch of a shard for a model that knows no other ranks.

    Raises:
        ValueError: If it is one.
    """
    if hasattr(n_id, SHARD):
        raise of_one_shard("'n_id'")


def of_one_shard(name: str) -> ValueError:
    """Return the error of a model that computes on one shard alone."""
    return ValueError(
        f"{name} is of one shard of a graph, whose halo is computed by other ranks: connect them, "
        "gas.distribute(model), or load the whole graph in one process"
    )


def check_alone(model: HistoryModel, what: str) -> None:
    """Refuse what isn't done on many ranks.

    Raises:
        ValueError: If the model is connected to others, naming ``what``.
    """
    if model.ranks is not None:
        raise ValueError(
            f"{what} isn't done by a model that gas.distribute has connected to other ranks: use "
            "model.for_graph(num_nodes) in one process, which shares the weights"
        )
