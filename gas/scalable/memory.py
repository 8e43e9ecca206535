"""Memory of a mini-batch in training, and the number of parts for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data

from gas.loader import SubData, SubgraphLoader, num_bytes, tensors_in_memory
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
    batch = batch.to(model.device)
    saved = SavedTensors(model)
    with left_alone(model), model._without_histories(), torch.enable_grad(), saved:
        model.train(training)
        outs = run_forward(model, batch)
        del outs  # While they live, what was saved does.
    return num_bytes(batch) + saved.num_bytes_besides(batch)


class SavedTensors(saved_tensors_hooks):
    """Note the storages that autograd saves for the backward pass in this context.

    Args:
        model: The model, whose parameters don't count.
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

    def num_bytes_besides(self, batch: SubData) -> int:
        """Return the bytes of the storages, those of a mini-batch's tensors left out.

        These are the ones that it has now: features that were read on the way are among them.
        """
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors_in_memory(batch.data)}
        return sum(size for address, size in self._sizes.items() if address not in own)


def run_forward(model: BatchModel, batch: SubData) -> tuple[Tensor, ...]:
    """Compute the outputs of a mini-batch, of its views too, without writing histories.

    A batch with empty ``n_id`` is the whole graph.
    """
    if "views" in batch.data:
        return model.views(batch)
    if batch.n_id.numel():
        return (model(batch, push=False),)
    x, adj_t, kwargs = model.inputs_of(batch.data)
    return (model(x, adj_t, **kwargs),)


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
