"""Planning how much of a mini-batch fits into memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gas.history.memory import human
from gas.loader import SubgraphLoader
from gas.loader.batch import SubData, num_bytes, tensors
from gas.scalable.model import ScalableGNN


def activation_bytes(model: ScalableGNN, batch: SubData) -> int:
    """Bytes that training holds for one mini-batch: its tensors, and what autograd keeps.

    Those of its views are included.

    The model runs forward once, without reading or writing histories; its buffers, such as the
    statistics of batch norm, and PyTorch's generators are as before afterwards. Weights, optimizer
    and what the backward pass needs for itself come on top.

    Args:
        model: The model.
        batch: A mini-batch of its graph.
    """
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = batch.to(model.device)
    own |= {tensor.untyped_storage().data_ptr() for tensor in tensors(batch.data)}
    with _left_alone(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()
        if "views" in batch.data:
            outs = model.views(batch)
        else:
            x, adj_t, kwargs = model.inputs_of(batch.data)
            outs = (model(x, adj_t, *batch[1:], **kwargs),)
        del outs  # While they live, what was kept does.
    return num_bytes(batch) + sum(kept.values())


def plan_micro_batches(
    model: ScalableGNN, loader: SubgraphLoader, budget_bytes: int
) -> tuple[int, int]:
    """Splits a loader's mini-batches into micro-batches that fit a budget of memory.

    A micro-batch has a divisor of the parts; the gradients of several are accumulated before each
    step, with ``train_epoch(..., micro_batches=...)``. The halo between the micro-batches of one
    step comes from the histories.

    Args:
        model: The model.
        loader: The loader of mini-batches.
        budget_bytes: The most that :func:`activation_bytes` may be, of the parts with most edges.

    Returns:
        Parts per micro-batch, and micro-batches per step.

    Raises:
        MemoryError: If not even one part fits.
    """
    if budget_bytes < 1:
        raise ValueError(f"'budget_bytes' is {budget_bytes}, expected a number of bytes")
    parts = loader.batch_size or 1
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    need = 0
    for size in (size for size in range(parts, 0, -1) if parts % size == 0):
        need = activation_bytes(model, loader.cut(largest[:size].tolist()))
        if need <= budget_bytes:
            return size, parts // size
    raise MemoryError(
        f"'budget_bytes' is {budget_bytes}, but one part needs {human(need)}: cut the graph into "
        "more parts, or raise the budget"
    )


@contextmanager
def _left_alone(model: ScalableGNN) -> Iterator[None]:
    """Runs a model without history traffic, and restores its modes, buffers and generators."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), model.without_histories():
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            if "reg_loss" in vars(model):
                vars(model)["reg_loss"] = 0.0  # It holds on to the graph of autograd.
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
