"""Copy batches to a CUDA device asynchronously, concurrently with the computation.

A batch is copied to pinned memory, and from there to the device on a separate stream, so that
neither the computation nor the host waits for it:

* References to pinned copies are dropped immediately. PyTorch's allocator of pinned memory records
  the stream of a copy with ``non_blocking=True``, and reuses the memory after that copy. (This
  holds for memory of that allocator only.)
* The stream of the computation waits for an event after the copies.
* The memory on the device belongs to the stream of the copies, which would reuse it as soon as
  there is no reference to it. ``record_stream`` delays that until the computation has used it.
* All loaders share one stream of copies, because each stream has its own blocks of freed memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gas.graph import Adjacency, layout_of
from gas.loader.batch import SubData, apply, find_devices
from gas.loader.lazy import read_lazy_rows
from gas.native import csr_parts, is_sparse, sparse_csr

Held = TypeVar("Held", Tensor, Adjacency)


class PendingBatch(NamedTuple):
    """A batch that is being copied.

    * ``batch``: the batch on the device, whose tensors may not be filled yet.
    * ``event``: recorded after the copies; ``None`` if there is nothing to wait for.
    """

    batch: SubData
    event: torch.cuda.Event | None

    def receive(self, device: torch.device) -> SubData:
        """Return the batch; the current stream waits for the copies, the host doesn't."""
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
    """Gather the rows of a batch, and begin to copy it to a device; any thread may call this."""
    if not _needs_copy(batch, device):
        read_lazy_rows(batch.data)
        return PendingBatch(batch.to(device), None)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        return PendingBatch(to_device(batch, device), stream.record_event())


def to_device(batch: SubData, device: torch.device) -> SubData:
    """Copy a batch to a device on the current stream, without waiting for the copies."""
    if not _needs_copy(batch, device):
        return batch.to(device)
    read_lazy_rows(batch.data, pinned=True)
    batch = batch._replace(data=apply(batch.data, _pin))
    return batch.to(device, non_blocking=True)


def tensor_to_device(tensor: Held, device: torch.device) -> Held:
    """Copy a tensor without gradient, or an adjacency, on the current stream without waiting.

    Copies from memory that isn't pinned may synchronise, even with ``non_blocking=True``.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return _pin(tensor).to(device, non_blocking=True)


def _needs_copy(batch: SubData, device: torch.device) -> bool:
    """Return whether a batch has to be copied to a GPU."""
    return device.type == "cuda" and not find_devices(batch.data) <= {device}


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which batches are copied to a device."""
    return torch.cuda.Stream(device)


def _pin(value: Any) -> Any:
    """Copy plain tensors in host memory that require no gradient to pinned memory."""
    if isinstance(value, Adjacency):
        return value.apply(_pin)
    if is_sparse(value):
        rowptr, col, entries = map(_pin, csr_parts(value))
        return sparse_csr(rowptr, col, entries, value.size(1))
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.requires_grad
        if not is_plain or value.device.type != "cpu":
            return value
        # PyTorch can't pin elements that share memory, such as those of expand().
        return (value.contiguous() if 0 in value.stride() else value).pin_memory()
    return value.pin_memory()


def _dense_tensors(value: Any) -> Sequence[Tensor]:
    """Return the dense tensors of an attribute."""
    if is_sparse(value):
        return csr_parts(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return [value]
    return layout_of(value).tensors(value)
