"""Batches on their way to a CUDA device, beside the computation there.

A batch is copied to pinned memory, from which a GPU copies by itself, and to the device on a stream
of its own, so that it waits for no computation, and the host for no copy. What that takes:

* The pinned copies are let go of at once. They are of PyTorch's allocator of pinned memory, for
  which a copy with ``non_blocking=True`` notes the stream that it runs on: the memory is handed
  out again once that stream has come past the copy. (It does so for its own memory alone; what
  others have pinned would have to be kept until then.)
* The computation's stream waits for an event behind the copies.
* The memory on the device belongs to the stream of the copies, which may use it again as soon as
  nobody refers to it. ``record_stream`` puts that off until the computation has come past what it
  was given by then.
* That stream is one for all loaders, or each would have its own blocks of freed memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gas.graph import Adjacency, layout_of
from gas.loader.batch import SubData, apply, devices
from gas.loader.lazy import read_lazy_rows
from gas.native import is_sparse, parts, sparse_csr

Held = TypeVar("Held", Tensor, Adjacency)


class PendingBatch(NamedTuple):
    """A batch on its way.

    * ``batch``: its tensors are there, and what is in them will be.
    * ``event``: follows the copies; ``None`` if there is nothing to wait for.
    """

    batch: SubData
    event: torch.cuda.Event | None

    def receive(self, device: torch.device) -> SubData:
        """Return the batch for the current stream, which waits for it; the host doesn't."""
        if self.event is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.event)

            def record(value: Any) -> Any:
                for tensor in _dense_tensors(value):
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
                return value

            apply(self.batch.data, record)
        return self.batch


def send_batch(batch: SubData, device: torch.device) -> PendingBatch:
    """Begin to move a batch, from whatever thread, with its rows as they are now."""
    if not _needs_copy(batch, device):
        read_lazy_rows(batch.data)
        return PendingBatch(batch.to(device), None)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        return PendingBatch(to_device(batch, device), stream.record_event())


def to_device(batch: SubData, device: torch.device) -> SubData:
    """Return a batch for the current stream, which copies it in its turn; the host doesn't wait."""
    if not _needs_copy(batch, device):
        return batch.to(device)
    read_lazy_rows(batch.data, pinned=True)
    batch = batch._replace(data=apply(batch.data, _pin))
    return batch.to(device, non_blocking=True)


def tensor_to_device(tensor: Held, device: torch.device) -> Held:
    """Return a tensor without gradient, or an adjacency, for the current stream, as :func:`moved`.

    From memory that isn't pinned, even a copy that doesn't block may wait for what is under way.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return _pin(tensor).to(device, non_blocking=True)


def _needs_copy(batch: SubData, device: torch.device) -> bool:
    """Return whether a batch has to be copied to a GPU."""
    return device.type == "cuda" and not devices(batch.data) <= {device}


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pin(value: Any) -> Any:
    """Return a copy in pinned memory of what lies in the host's and has no gradient to hand on."""
    if isinstance(value, Adjacency):
        return value.apply(_pin)
    if is_sparse(value):
        rowptr, col, entries = map(_pin, parts(value))
        return sparse_csr(rowptr, col, entries, value.size(1))
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.requires_grad
        if not is_plain or value.device.type != "cpu":
            return value
        # PyTorch can't pin elements that share memory, such as those of expand().
        return (value.contiguous() if 0 in value.stride() else value).pin_memory()
    return value.pin_memory()


def _dense_tensors(value: Any) -> Sequence[Tensor]:
    """Return the dense tensors that an attribute is made of."""
    if is_sparse(value):
        return parts(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return [value]
    return layout_of(value).tensors(value)
