"""Memory of a mini-batch in training, and the number of parts for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.loader import SubData, SubgraphLoader, held, num_bytes
from gas.native import human
from gas.scalable.call import BatchModel

FIRST_NODES = 5_000  # Of a part, the first to be measured: small enough for any machine.
TOO_LARGE = 1.1  # By how much the number of parts grows while one of them doesn't fit.


def activation_bytes(model: BatchModel, batch: SubData, training: bool = True) -> int:
    """Return bytes that training holds for one mini-batch: its tensors, and what autograd keeps.

    Those of its views are included.

    The model runs forward once, without reading or writing histories; its buffers, such as the
    statistics of batch norm, and PyTorch's generators are as before afterwards. Weights, optimizer
    and what the backward pass needs for itself come on top.

    Args:
        model: The model.
        batch: A mini-batch of its graph.
        training: Run the model in training mode, otherwise in that of evaluation.
            (default: ``True``)
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
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with left_alone(model), model._without_histories(), torch.enable_grad(), hooks:
        model.train(training)
        if "views" in batch.data:
            outs = model.views(batch)
        elif batch.n_id.numel():
            outs = (model(batch),)
        else:  # A full batch, which has no ids.
            x, adj_t, kwargs = model.inputs_of(batch.data)
            outs = (model(x, adj_t, **kwargs),)
        del outs  # While they live, what was kept does.
    for tensor in held(batch.data):  # Those that were read on the way, too.
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return num_bytes(batch) + sum(kept.values())


def parts_within(model: BatchModel, memory: int, cut: Callable[[int], Data]) -> int:
    """Return the number of parts such that a mini-batch of one, the one with most edges, fits.

    Args:
        model: The model.
        memory: The most that :func:`activation_bytes` may be.
        cut: Cuts the model's graph into so many parts.

    Returns:
        Few parts, at most a tenth too many for the estimate that a part's bytes follow its size.

    Raises:
        MemoryError: If not even a part of one node fits.
    """
    num_parts = math.ceil(model.num_nodes / FIRST_NODES)
    need = _largest(model, cut(num_parts))
    guess = min(max(math.ceil(num_parts * need / memory), 1), model.num_nodes)
    while True:
        need = _largest(model, cut(guess))
        if need <= memory:
            return guess
        if guess == model.num_nodes:
            raise MemoryError(
                f"'memory' is {human(memory)}, but a single node and its neighbours take "
                f"{human(need)}: raise it, or make the model narrower"
            )
        guess = min(math.ceil(guess * max(TOO_LARGE, min(need / memory, 2.0))), model.num_nodes)


def _largest(model: BatchModel, graph: Data) -> int:
    loader = SubgraphLoader(graph, layout="fused", log=False)
    return activation_bytes(model, loader.cut([int(loader.edges_per_part().argmax())]))


@contextmanager
def left_alone(model: BatchModel) -> Iterator[None]:
    """Restore a model's modes and buffers afterwards, and PyTorch's generators."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
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
