"""``PrefetchLoader``: prepare the next batch while the current one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch_geometric.data import Data

from gas.graph import Adjacency, Uses
from gas.history import BatchPulls
from gas.loader import Epoch, PendingBatch, SubData, SubgraphLoader, prefetch_rows, send_batch
from gas.native import has_idle_cores, share_cores
from gas.scalable.call import cancel_pulls, read_ahead, start_pulls
from gas.scalable.inference import plain_loader
from gas.scalable.model import ScalableGNN
from gas.scalable.pack import is_packed


class PrefetchLoader:
    """Prepare batches ahead of a model, in the order of a loader.

    A thread cuts the next batch from the graph, with the transpose if the model's layers have
    needed it so far, and moves it to the model's device, unless the computation keeps all cores
    busy. A GPU copies it from pinned memory on a separate stream, for which the current stream
    waits when the batch is yielded. Packed rows (:meth:`gas.ScalableGNN.pack`) are read ahead in
    any case. For a model with ``prefetch=1``, the pulls of its halo start as well, before the
    current batch pushes anything: those rows can be one step older than without prefetching, and
    are the same in every run. Nothing is prepared beyond the end of an epoch; leaving the loop
    cancels the prepared batch::

        for batch, *args in gas.PrefetchLoader(loader, model):
            out = model(batch.x, batch.adj_t, *args)

    Args:
        loader: The batches, such as :class:`gas.SubgraphLoader`.
        model: The model that computes them, one after the other.

    Raises:
        ValueError: If ``model`` isn't a :class:`gas.ScalableGNN`.
    """

    def __init__(self, loader: Iterable[SubData], model: ScalableGNN) -> None:
        if not hasattr(model, "forward_layer"):
            raise ValueError(
                f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN: for others, "
                "such as those of heterogeneous graphs, loop over the loader itself"
            )
        if isinstance(loader, Data):
            raise ValueError("'loader' is a graph, expected gas.SubgraphLoader(graph)")
        self.loader = loader
        self.model = model
        # The forms of an adjacency that layers have used, by whether gradients were enabled.
        self._uses: dict[bool, Uses] = {}

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def plain_loader(self) -> PrefetchLoader:
        """Return the same batches without views; see :meth:`gas.SubgraphLoader.plain_loader`."""
        return PrefetchLoader(plain_loader(self.loader), self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader up to the last batch that was yielded.

        Pulls of the next batch, with a model's ``prefetch=1``, aren't part of it.
        """
        return cast(Any, self.loader).state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """See :meth:`gas.SubgraphLoader.check_state`."""
        cast(Any, self.loader).check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`gas.SubgraphLoader.load_state_dict`."""
        cast(Any, self.loader).load_state_dict(state)

    def __iter__(self) -> Iterator[SubData]:
        learned = self.loader.trainable if isinstance(self.loader, SubgraphLoader) else []
        if learned and torch.is_grad_enabled():
            raise ValueError(
                f"{learned[0]!r} of the graph requires a gradient, but a PrefetchLoader reads rows "
                "before the optimizer has changed them: loop over the loader itself"
            )
        leave_cores = getattr(self.loader, "leave_cores", True)
        order = self.loader.order if isinstance(self.loader, SubgraphLoader) else None
        before, mine = None if order is None else order.received, None
        try:
            with share_cores(leave_cores) as follow_cores:
                for batch in self._prefetch_batches():
                    mine = mine or (None if order is None else order.received)
                    if mine is not None:
                        mine.done += 1
                    follow_cores()
                    yield batch
        finally:
            if order is not None and order.received is mine:
                order.received = before

    def _prefetch_batches(self) -> Iterator[SubData]:
        """Yield batches, and prepare the next one meanwhile."""
        model = self.model
        batches = iter(self.loader)
        uses_thread = model.device.type != "cpu" or has_idle_cores()
        has_grad = torch.is_grad_enabled()
        # The first batch is cut in the caller's thread, so that samplers draw random numbers there.
        sent = self._next(batches, self._uses.get(has_grad) if uses_thread else None)
        if isinstance(self.loader, SubgraphLoader) and sent is not None:
            # The loader is one batch ahead of the batches that were yielded.
            order = self.loader.order
            if order.epoch is not None:
                order.received = Epoch(order.epoch.batches, order.epoch.done - 1)
        thread = ThreadPoolExecutor(1, thread_name_prefix="gas-prefetch") if uses_thread else None
        ahead: deque[Callable[[], PendingBatch | None]] = deque()
        pulls: deque[BatchPulls] = deque()  # Of the current batch and the one after it.

        def prepare() -> None:
            if thread is None and is_packed(model):
                begun = self._begin(batches)  # Starts reading ahead.
                ahead.append(lambda: self._finish(begun))
            elif thread is None:
                ahead.append(lambda: self._next(batches))
            else:
                ahead.append(thread.submit(self._next, batches, self._uses.get(has_grad)).result)

        try:
            if sent is not None:
                prepare()
            while sent is not None:
                current = sent.receive(model.device)
                if not model.prefetch:
                    yield current
                    self._note_uses(current, has_grad)
                sent = ahead.popleft()()
                if sent is not None:
                    prepare()
                if model.prefetch:
                    if sent is not None:
                        pulls.append(start_pulls(model, sent.batch))
                    yield current
                    self._note_uses(current, has_grad)
                    while len(pulls) > 1:  # The caller may have skipped a batch.
                        cancel_pulls(model, pulls.popleft())
        finally:
            for started in pulls:
                cancel_pulls(model, started)
            if thread is not None:
                thread.shutdown(cancel_futures=True)

    def _note_uses(self, computed: SubData, has_grad: bool) -> None:
        """Store the forms of the adjacency that layers used, to prepare them for later batches."""
        adj = computed.data.get("adj_t")
        if isinstance(adj, Adjacency):
            self._uses[has_grad] = adj.uses

    def _next(self, batches: Iterator[SubData], uses: Uses | None = None) -> PendingBatch | None:
        """Cut the next batch and send it to the device; ``None`` after the last."""
        return self._finish(self._begin(batches), uses)

    def _begin(self, batches: Iterator[SubData]) -> SubData | None:
        """Cut the next batch, and start reading its rows on disk ahead."""
        batch = next(batches, None)
        if batch is not None:
            read_ahead(self.model, batch.batch_size, batch.n_id)
            prefetch_rows(batch.data)
        return batch

    def _finish(self, batch: SubData | None, uses: Uses | None = None) -> PendingBatch | None:
        """Send a batch to the device, with the forms of its adjacency that layers use."""
        if batch is None:
            return None
        graphs = (batch.data, *(batch.data.get("views") or ()))
        for adj in (graph.get("adj_t") for graph in graphs):
            if isinstance(adj, Adjacency) and uses is not None:
                adj.prepare(uses)  # On the CPU; they are sent with the batch.
        return send_batch(batch, self.model.device)

    def __repr__(self) -> str:
        return f"PrefetchLoader({self.loader!r})"
