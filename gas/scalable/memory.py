"""Memory of a mini-batch in training, and the number of parts for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data

from gas.graph import PartitionOptions
from gas.loader import SubData, SubgraphLoader, num_bytes, tensors_in_memory
from gas.native import human
from gas.scalable.base import preserve_modes
from gas.scalable.call import BatchModel

FIRST_NODES = 5_000  # Nodes of the first part that is measured: it fits any machine.
GROWTH = 1.1  # Least factor by which the number of parts grows until one part fits.


def activation_bytes(model: BatchModel, batch: SubData, training: bool = True) -> int:
    """Return the bytes of a mini-batch in training: its tensors, and those saved for backward.

    Its views are included. The model runs forward once, without reading or writing histories; its
    buffers, such as the statistics of batch norm, and PyTorch's generators are restored. Weights,
    optimizer and temporary tensors of the backward pass aren't counted.

    Args:
        model: The model.
        batch: A mini-batch of its graph.
        training: Run the model in training mode, otherwise in evaluation mode.
            (default: ``True``)
    """
    batch = batch.to(model.device)
    saved = SavedTensors(model)
    with preserve_state(model), model._disable_transfers(), torch.enable_grad(), saved:
        model.train(training)
        outs = run_forward(model, batch)
        del outs  # They keep the saved tensors.
    return num_bytes(batch) + saved.num_bytes_excluding(batch)


class SavedTensors(saved_tensors_hooks):
    """Record the storages that autograd saves for the backward pass in this context.

    Args:
        model: The model, whose parameters aren't counted.
    """

    def __init__(self, model: BatchModel) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self._sizes: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def num_bytes_excluding(self, batch: SubData) -> int:
        """Return the bytes of the storages, except those of a mini-batch's tensors.

        Features that the batch has read during forward are among its tensors.
        """
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors_in_memory(batch.data)}
        return sum(size for address, size in self._sizes.items() if address not in own)


def run_forward(model: BatchModel, batch: SubData) -> tuple[Tensor, ...]:
    """Compute the outputs of a mini-batch and its views, without writing histories.

    A batch with empty ``n_id`` is a full batch.
    """
    if "views" in batch.data:
        with model._disable_transfers():  # A call of views has no read-only mode.
            return model.views(batch)
    if batch.n_id.numel():
        return (model._join_outputs(model(batch, push=False)),)
    x, adj_t, kwargs = model.inputs_of(batch.data)
    return (model._join_outputs(model(x, adj_t, **kwargs)),)


def plan_parts(model: BatchModel, data: Data, options: PartitionOptions) -> tuple[int, int]:
    """Return the parts, and parts per mini-batch, that :func:`gas.plan` chooses for a model."""
    store: Any = model._factory.store
    if not callable(store) and len(model.histories):
        store = model.histories[0].store.tier  # They lie there already.
    plan = type(model)._planner(
        data, model, dtype=model._factory.codec, store=store, method=options.method,
        seed=options.seed, cache=options.cache, log=options.log,
    )  # fmt: skip
    if options.log:
        print(plan.why, file=sys.stderr)
    return plan.num_parts, plan.batch_size


def parts_within(model: BatchModel, memory: int, cut: Callable[[int], Data]) -> int:
    """Return a number of parts such that a mini-batch of the part with most edges fits.

    Args:
        model: The model.
        memory: The upper bound of :func:`activation_bytes`.
        cut: Cuts the model's graph into that many parts.

    Returns:
        The number of parts, which is the least or up to a tenth larger if bytes are proportional to
        the size of a part.

    Raises:
        MemoryError: If not even a part of one node fits.
    """
    num_parts = math.ceil(model.num_nodes / FIRST_NODES)
    need = _largest_batch_bytes(model, cut(num_parts))
    guess = min(max(math.ceil(num_parts * need / memory), 1), model.num_nodes)
    while True:
        need = _largest_batch_bytes(model, cut(guess))
        if need <= memory:
            return guess
        if guess == model.num_nodes:
            raise MemoryError(
                f"'memory' is {human(memory)}, but a single node and its neighbours take "
                f"{human(need)}: raise it, or make the model narrower"
            )
        guess = min(math.ceil(guess * max(GROWTH, min(need / memory, 2.0))), model.num_nodes)


def _largest_batch_bytes(model: BatchModel, graph: Data) -> int:
    """Return the bytes of a mini-batch of the part with most edges."""
    loader = SubgraphLoader(graph, layout="fused", log=False)
    return activation_bytes(model, loader.cut([int(loader.edges_per_part().argmax())]))


@contextmanager
def preserve_state(model: BatchModel) -> Iterator[None]:
    """Restore a model's modes and buffers, and PyTorch's generators, after this context."""
    dense = (buffer for buffer in model.buffers() if buffer.layout == torch.strided)
    buffers = [(buffer, buffer.clone()) for buffer in dense]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), preserve_modes(model):
        try:
            yield
        finally:
            if "reg_loss" in vars(model):
                vars(model)["reg_loss"] = 0.0  # Otherwise it keeps the graph of autograd.
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):  # Some may be the graph's own tensors.
                        buffer.copy_(before)
