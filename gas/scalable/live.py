"""How much memory the tensors take that a computation makes, while they live."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gas.loader.batch import SubData, held
from gas.native.sparse_rows import is_sparse, parts
from gas.scalable.memory import left_alone

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


class LiveBytes(TorchDispatchMode):
    """In this context, counts the bytes of tensors that operators make, forward and backward.

    * ``now``: the bytes of those that live; ``peak``: the most that there were at once.

    Tensors that were there before don't count, nor do those that other threads make, nor what an
    operator needs for itself alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # By the address of a storage: its bytes, 0 for one that was there before.
        self._size: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator and looks at what it was given and has made."""
        kwargs = kwargs or {}
        for storage in _storages(tree_leaves((args, kwargs))):
            self._enter(storage, 0)
        out = func(*args, **kwargs)
        for storage in _storages(tree_leaves(out)):
            self._enter(storage, storage.nbytes())
        return out

    def _enter(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._size:
            return
        self._size[key] = size
        self._watch[key] = weakref.ref(storage, lambda _: self._leave(key))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _leave(self, key: int) -> None:
        self.now -= self._size.pop(key)
        del self._watch[key]

    def size_of(self, tensors: Iterable[Tensor]) -> int:
        """How many of the bytes that live are those of these tensors."""
        found = {storage._cdata for storage in _storages(tensors)}
        return sum(self._size.get(key, 0) for key in found)


class BatchBytes(NamedTuple):
    """Bytes that one mini-batch takes.

    * ``batch``: its tensors, with what its adjacency has made of itself, without rows that weren't
      read;
    * ``kept``: what autograd keeps besides;
    * ``peak``: the most that there was at once, ``kept`` included and ``batch`` not;
    * ``out``: the outputs.
    """

    batch: int
    kept: int
    peak: int
    out: int


def batch_bytes(model: ScalableGNN, batch: SubData, training: bool = True) -> BatchBytes:
    """Runs a mini-batch, or a full batch, forward and backward, and counts what it takes.

    The model's modes, buffers, gradients and histories, and PyTorch's generators are as before
    afterwards. Rows that are pulled count as kept.

    Args:
        model: The model, on the CPU.
        batch: A mini-batch of its graph; with empty ``n_id`` a full batch.
        training: Run in training mode and backward, otherwise in that of evaluation and without
            gradient. (default: ``True``)
    """
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_alone(model))
        stack.enter_context(torch.set_grad_enabled(training))
        live = stack.enter_context(LiveBytes())
        model.train(training)
        with hooks:
            if "views" in batch.data:
                stack.enter_context(model.without_histories())
                outs = model.views(batch)
            elif batch.n_id.numel():
                outs = (model(batch, push=False),)
            else:  # A full batch, which has no ids.
                x, adj_t, kwargs = model.inputs_of(batch.data)
                outs = (model(x, adj_t, **kwargs),)
        # Other storages may have come to lie where these were until then.
        for tensor in held(batch.data):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        size = sum(out.nbytes for out in outs)
        if training:
            backward(model, outs)
        del outs
        made = live.size_of(held(batch.data))
    num_bytes = batch.n_id.nbytes + sum(tensor.nbytes for tensor in held(batch.data))
    return BatchBytes(num_bytes, sum(kept.values()), max(0, live.peak - made), size)


def backward(model: ScalableGNN, outs: Sequence[Tensor]) -> None:
    """A backward pass that leaves the gradients of the parameters as they are."""
    gradients(model, outs)


def gradients(model: ScalableGNN, outs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the parameters that want one, of some loss; their own stay as they are."""
    loss = torch.stack([out.square().mean() for out in outs]).sum()
    loss = loss + getattr(model, "reg_loss", 0.0)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors on the CPU among some values."""
    for value in values:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        if is_sparse(value):
            yield from _storages(parts(value))
        elif value.layout == torch.strided:
            yield value.untyped_storage()
