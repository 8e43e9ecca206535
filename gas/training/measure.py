"""Measure bytes and seconds of mini-batches, and the memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from gas.graph import is_row_per_node, layout_of
from gas.history import Codec, Encoded, StoreFactory
from gas.loader import SubData, iter_tensors, raw_attributes, tensors_in_memory
from gas.native import SHARED, csr_parts, human, is_sparse, resident_bytes, share_cores
from gas.scalable import SavedTensors, ScalableGNN, preserve_state, run_forward

# Least runs of a mini-batch to time it, least seconds of all runs, and most runs. The later half
# counts: it takes some runs until the threads have adapted to other processes.
TIMED, SECONDS, MOST_TIMED = 3, 0.3, 100
LARGE_BLOCK = 1 << 20  # Freed blocks of this size or more go back to the system at once.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # From GNU's malloc.h.


class BatchShape(NamedTuple):
    """The size of a mini-batch: in-batch nodes, halo nodes, edges."""

    own: float
    halo: float
    edges: float

    @staticmethod
    def of(batch: SubData) -> BatchShape:
        """Return the size of a batch."""
        own = batch.batch_size
        return BatchShape(own, batch.n_id.numel() - own, batch.data.e_id.numel())


class LiveTensorBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operators create in this context, forward and backward.

    * ``now``: the bytes of live tensors; ``peak``: the maximum of ``now``.

    Tensors that existed before, those of other threads, and the workspace of operators aren't
    counted.
    """

    only_counts = True  # Kernels run as without this mode.

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # The bytes of each storage by address, 0 for one that existed before.
        self._size: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and register the storages of its arguments and results."""
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # Memory of NumPy's, as of buffer pools.
            for storage in _cpu_storages(tree_leaves((args, kwargs))):
                self._enter(storage, 0)
        out = func(*args, **kwargs)
        for storage in _cpu_storages(tree_leaves(out)):
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
        """Count the live bytes of these tensors."""
        found = {storage._cdata for storage in _cpu_storages(tensors)}
        return sum(self._size.get(key, 0) for key in found)


class BatchBytes(NamedTuple):
    """Bytes that one mini-batch takes.

    * ``batch``: its tensors, with all forms of its adjacency that were used, without rows that
      weren't read;
    * ``kept``: further tensors that autograd keeps;
    * ``peak``: the peak, with ``kept`` and without ``batch``;
    * ``out``: the outputs.
    """

    batch: int
    kept: int
    peak: int
    out: int


def batch_bytes(model: ScalableGNN, batch: SubData, training: bool = True) -> BatchBytes:
    """Run a mini-batch, or a full batch, forward and backward, and count its bytes.

    The model's modes, buffers, gradients and histories, and PyTorch's generators are restored.
    Pulled rows count as kept.

    Args:
        model: The model, on the CPU.
        batch: A mini-batch of its graph; with empty ``n_id`` a full batch.
        training: Run in training mode and backward; otherwise in evaluation mode without gradient.
            (default: ``True``)
    """
    saved = SavedTensors(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_state(model))
        stack.enter_context(torch.set_grad_enabled(training))
        live = stack.enter_context(LiveTensorBytes())
        model.train(training)
        with saved:
            outs = run_forward(model, batch)
        kept = saved.num_bytes_excluding(batch)  # Freed addresses may be used again later.
        size = sum(out.nbytes for out in outs)
        if training:
            gradients(model, outs)
        del outs
        made = live.size_of(tensors_in_memory(batch.data))
    num_bytes = batch.n_id.nbytes + sum(tensor.nbytes for tensor in tensors_in_memory(batch.data))
    return BatchBytes(num_bytes, kept, max(0, live.peak - made), size)


def gradients(model: ScalableGNN, outs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of some loss for the parameters that require one.

    ``grad`` of the parameters isn't changed.
    """
    loss = torch.stack([out.square().mean() for out in outs]).sum()
    loss = loss + getattr(model, "reg_loss", 0.0)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def _cpu_storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors on the CPU among some values."""
    for value in values:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        if is_sparse(value):
            yield from _cpu_storages(csr_parts(value))
        elif value.layout == torch.strided:
            yield value.untyped_storage()


@dataclasses.dataclass(frozen=True)
class BatchCosts:
    """Costs of one mini-batch.

    * ``cut``: seconds to cut it from the graph; ``step``: seconds to run it forward and backward,
      transfers of histories and the correction of stale rows included;
    * ``training``, ``evaluation``: its bytes with and without gradient;
    * ``cached_bytes``: those of the batch in a loader's cache.
    """

    shape: BatchShape
    cut: float
    step: float
    training: BatchBytes
    evaluation: BatchBytes
    cached_bytes: int


def measure(
    model: ScalableGNN,
    cut: Callable[[], SubData],
    codec: Codec,
    store: str | StoreFactory | None,
) -> BatchCosts:
    """Measure the mini-batch that ``cut`` makes, with histories of its nodes alone.

    The model isn't changed.
    """
    first = cut()
    with clone_with_histories(model, first.n_id.numel(), codec, store) as clone:
        size, nodes = first.batch_size, torch.arange(first.n_id.numel())

        def renumber(batch: SubData) -> SubData:
            """Return the batch with ids for histories of its nodes alone."""
            return batch._replace(n_id=nodes, offset=torch.tensor([0]), count=torch.tensor([size]))

        io, clone.io = clone.io, "serial"  # Tensors of other threads aren't counted.
        evaluation = batch_bytes(clone, renumber(cut()), training=False)
        batch = renumber(cut())
        training = batch_bytes(clone, batch)
        cached_bytes = training.batch - _row_bytes(batch)
        del batch
        clone.io = io
        cuts: list[float] = []
        steps: list[float] = []
        has_halo = first.n_id.numel() > size  # Else there are no stale rows.
        with share_cores() as follow, preserve_state(clone), clone._correct_drift(has_halo):
            clone.train()
            while len(steps) < TIMED or (sum(cuts + steps) < SECONDS and len(steps) < MOST_TIMED):
                follow()
                start = time.perf_counter()
                batch = cut()
                cuts.append(time.perf_counter() - start)
                batch = renumber(batch)
                start = time.perf_counter()
                outs = (clone._join_outputs(clone(batch)),)
                gradients(clone, outs)
                steps.append(time.perf_counter() - start)
                del batch, outs
    return BatchCosts(
        BatchShape.of(first),
        _median_of_later_half(cuts),
        _median_of_later_half(steps),
        training,
        evaluation,
        cached_bytes,
    )


def _row_bytes(batch: SubData) -> int:
    """Count the bytes of a batch's node-level rows, which loaders don't cache."""
    return sum(
        value.nbytes
        for key, value in list(raw_attributes(batch.data))
        if isinstance(value, Tensor) and is_row_per_node(batch.data, key)
    )


def _median_of_later_half(seconds: Sequence[float]) -> float:
    """Return the median of the later half of some times."""
    return statistics.median(seconds[len(seconds) // 2 :])


@contextlib.contextmanager
def clone_with_histories(
    model: ScalableGNN, num_nodes: int, codec: Codec, store: str | StoreFactory | None
) -> Iterator[ScalableGNN]:
    """Yield a model with the same weights and other, filled histories of ``num_nodes`` nodes."""
    clone = model.for_graph(1)
    for history in clone.histories:
        history.close()
    clone.num_nodes = num_nodes
    clone._factory = dataclasses.replace(clone._factory, codec=codec, store=store, path=None)
    clone.histories = clone._make_histories()
    clone.buffer_size = None
    try:
        for history in clone.histories:
            history.push(torch.zeros(num_nodes, history.embedding_dim))
        yield clone
    finally:
        clone.close()


def optimizer_seconds(model: ScalableGNN) -> float:
    """Time a step of Adam, with copies of the parameters."""
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    if not parameters:
        return 0.0
    optimizer = torch.optim.Adam(parameters, fused=True)
    seconds = []
    for _ in range(TIMED):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return _median_of_later_half(seconds)


class MemoryAccount:
    """Bytes of host memory by name, in the order in which they were entered.

    Tensors that share a storage count once, for the first name.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._seen: set[int] = set()

    def enter(self, name: str, found: int | Iterable[Any]) -> None:
        """Add bytes, or those of tensors and graphs whose storages weren't entered before."""
        if not isinstance(found, int):
            found = sum(self._new(tensor) for tensor in found)
        self.held[name] = self.held.get(name, 0) + found

    def _new(self, tensor: Any) -> int:
        """Return the bytes of a tensor's storage on the CPU, or 0 if it was counted before."""
        if isinstance(tensor, Data):
            return sum(map(self._new, iter_tensors(tensor)))
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return 0
        if isinstance(tensor, Encoded):
            return sum(map(self._new, tensor.resident_tensors))
        if tensor.layout != torch.strided:
            return sum(self._new(part) for part in layout_of(tensor).tensors(tensor))
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._seen:
            return 0
        self._seen.add(storage.data_ptr())
        return storage.nbytes()

    @property
    def total(self) -> int:
        """The sum of all bytes: the expected peak of the process."""
        return sum(self.held.values())

    def table(self, peak_bytes: float) -> str:
        """Format the account as a table, with the measured peak of the process."""
        rows = [(name, human(size)) for name, size in self.held.items() if size]
        peak = human(int(peak_bytes)) if math.isfinite(peak_bytes) else "unknown"
        rows += [("sum", human(self.total)), ("measured peak", peak)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size:>12}" for name, size in rows)


@functools.cache
def _load_c_library() -> Any:
    """Return the C library, or ``None`` if it isn't GNU's."""
    try:
        library = ctypes.CDLL(None)
        # Raises AttributeError in other C libraries.
        library.malloc_trim, library.mallopt  # noqa: B018
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows.
        return None
    return library


def release_freed_memory() -> int:
    """Return freed memory to the system, and return the bytes that are no longer resident.

    Unless the C library is GNU's, that is only the memory that models share for large products.
    """
    gc.collect()
    before = resident_bytes()
    SHARED.clear()
    if _load_c_library() is not None:
        _load_c_library().malloc_trim(0)
    return max(0, before - resident_bytes())


def limit_freed_memory() -> None:
    """Make this process return large blocks to the system as soon as they are freed.

    Otherwise the C library keeps blocks of up to 32 MiB. Mini-batches differ in size, so that the
    blocks of one don't fit the next, and memory becomes fragmented. In addition, models keep up to
    512 MiB of each type for large products and packed rows. The cost is that the system clears
    every new block. This has no effect on a C library other than GNU's.
    """
    SHARED.most_idle_bytes = 0
    SHARED.clear()
    if _load_c_library() is not None:
        _load_c_library().mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        _load_c_library().mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
