"""Cost of a model's mini-batches and messages on a machine: measured, or given by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gas.contrib.simulation.local_ranks import measure_ranks
from gas.native import check_integer, share_cores, warn
from gas.scalable import ScalableGNN, preserve_state
from gas.training import BatchShape, Linear, batch_bytes, clone_with_histories, gradients

if TYPE_CHECKING:
    from gas import SubData, SubgraphLoader

T = TypeVar("T")

SIZES = 5  # Of mini-batches that are measured: of 1, 2, 4, ... parts.
WARM, PER_SIZE = 2, 4  # Mini-batches of each size, the first not counted.
ROUNDS = 3
COPIED = 2**26  # Bytes.
COPIES = 5
POSITIVE = ("bandwidth", "copy_bandwidth", "local_bandwidth")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Cost of the mini-batches of one model on one rank, and of messages.

    Seconds are those to cut a batch and run it forward and backward, with the traffic of histories
    in the rank's own memory. A step takes ``seconds_per_step`` and, for each node, halo node and
    edge of its batch, ``seconds_per_row``, ``seconds_per_halo_row`` and ``seconds_per_edge``.

    Args:
        seconds_per_row: For a node of a batch.
        seconds_per_edge: For an edge.
        bandwidth: Bytes per second that a host sends to others, and receives at the same time.
        latency: Seconds from sending a message to its arrival, without its bytes.
        seconds_per_halo_row: For a node of a batch's halo. (default: ``0.0``)
        seconds_per_step: For a step, however small, with that of the optimizer.
            (default: ``0.0``)
        copy_bandwidth: Bytes per second that a core gathers into messages, sends, receives and
            scatters from them. (default: ``5000000000.0``; an assumption)
        seconds_per_exchange: Processor seconds of a step with other ranks, whatever it sends.
            (default: ``0.0``)
        ranks_per_host: Ranks that share a host's link. (default: ``1``)
        local_bandwidth: Bytes per second between ranks of a host. (default: ``copy_bandwidth``)
        backward_share: The fraction of a step's time in the backward pass, during which rows are
            sent. (default: ``0.5``; an assumption)
        bytes_per_row: What a batch holds at its peak, activations included, for a node.
            (default: ``0.0``)
        bytes_per_halo_row: For a node of its halo. (default: ``0.0``)
        bytes_per_edge: For an edge. (default: ``0.0``)
        bytes_per_step: However small it is. (default: ``0.0``)
        widths: The widths of the histories of the measured model; :func:`simulate` refuses others.
            (default: any)
        measured_fields: The names of the measured fields. (default: ``()``)
        fit_error: The largest relative error of predicted seconds among the mini-batches that were
            measured. (default: ``None``)

    Raises:
        ValueError: If a number can't be, naming it.
    """

    seconds_per_row: float
    seconds_per_edge: float
    bandwidth: float
    latency: float
    seconds_per_halo_row: float = 0.0
    seconds_per_step: float = 0.0
    copy_bandwidth: float = 5e9
    seconds_per_exchange: float = 0.0
    ranks_per_host: int = 1
    local_bandwidth: float | None = None
    backward_share: float = 0.5
    bytes_per_row: float = 0.0
    bytes_per_halo_row: float = 0.0
    bytes_per_edge: float = 0.0
    bytes_per_step: float = 0.0
    widths: tuple[int, ...] | None = None
    measured_fields: tuple[str, ...] = ()
    fit_error: float | None = None

    def __post_init__(self) -> None:
        numbers = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.startswith(("seconds", "bytes", "latency"))
        }
        for name, value in numbers.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"'{name}' is {value}, expected a number from 0 on")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"'{name}' is {value}, expected bytes per second, more than 0: 10 Gbit/s are "
                    "1.25e9; math.inf for what takes no time"
                )
        if not 0 <= self.backward_share <= 1:
            raise ValueError(f"'backward_share' is {self.backward_share}, expected it in [0, 1]")
        check_integer("ranks_per_host", self.ranks_per_host, 1)
        for name in ("widths", "measured_fields"):
            if getattr(self, name) is not None:  # JSON has lists.
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @staticmethod
    def measured(*args: Any, **kwargs: Any) -> Machine:
        """Call :meth:`measure`, which is the new name."""
        warn(
            "Machine.measured is now Machine.measure; the old name works until version 0.3",
            DeprecationWarning,
        )
        return Machine.measure(*args, **kwargs)

    @staticmethod
    def measure(
        model: ScalableGNN,
        loader: SubgraphLoader,
        bandwidth: float,
        latency: float,
        *,
        ranks: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Machine:
        """Measure mini-batches of a model on this machine, on the CPU.

        Mini-batches of 1, 2, 4, ... parts are cut, run forward and backward, with a step of Adam on
        a copy of the parameters and histories of the loader's graph. The coefficients are fitted by
        non-negative least squares. The costs of nodes and edges can be separated only if parts
        differ in edges per node. The network isn't measured. Nothing is changed. It takes a few
        seconds, and includes the load by other processes: for ranks that share caches and memory,
        measure as many at once.

        Args:
            model: The model, on the CPU.
            loader: Mini-batches of a graph of the kind that is simulated.
            bandwidth: Bytes per second of a host's link.
            latency: Seconds of a message without bytes.
            ranks: Also start this many local processes, for half a minute, and measure what
                sending and receiving cost: ``copy_bandwidth`` and ``seconds_per_exchange``.
                Without, only gathering rows in memory is measured.
                (default: ``0``)
            clock: A function that returns seconds. With one thread, ``time.process_time`` counts
                this process alone, also under CPU contention. (default: ``time.perf_counter``)

        Returns:
            A machine; ``dataclasses.replace`` changes what isn't measured.

        Raises:
            ValueError: If the model isn't on the CPU, the graph has fewer than 4 parts, or
                ``ranks`` is no number of several processes.
            RuntimeError: If the processes fail.
        """
        check_model(model)
        if ranks:
            check_integer("ranks", ranks, 2)
        if model.device.type != "cpu":
            raise ValueError(
                f"'model' is on {model.device}, but what is measured is time on the host: measure "
                "with the model on the CPU, or give Machine(...) the seconds of a profile"
            )
        num_parts = loader.ptr.numel() - 1
        if num_parts < 4:
            raise ValueError(
                f"'loader' has {num_parts} parts, expected at least 4: mini-batches of several "
                "sizes are made of them; cut the graph into more"
            )
        chosen = _choose_parts(num_parts)
        codec, store = model._factory.codec, model._factory.store
        with (
            clone_with_histories(model, loader.num_nodes, codec, store) as twin,
            preserve_state(twin),
        ):
            shapes, seconds = _measure_times(twin, loader, chosen, clock)
            held = [_measure_bytes(twin, loader.cut(parts)) for parts in _drop_warm_up(chosen)]
        fit = Linear(shapes, seconds)
        errors = (abs(fit(s) - t) / t for s, t in zip(shapes, seconds, strict=True) if t > 0)
        per_step, per_row, per_halo_row, per_edge = fit.coefficients.tolist()
        sizes = Linear(shapes, held).coefficients.tolist()
        names = ("step", "row", "halo_row", "edge")
        fields = {f"bytes_per_{name}": size for name, size in zip(names, sizes, strict=True)}
        measured = [*(f"seconds_per_{name}" for name in names), *fields, "copy_bandwidth"]
        if ranks:
            wanted = [p.numel() for p in model.parameters() if p.requires_grad]
            cost = measure_ranks(ranks, history_widths(model), wanted)
            fields |= {
                "copy_bandwidth": cost.bandwidth,
                "seconds_per_exchange": cost.seconds_per_exchange,
            }
            measured.append("seconds_per_exchange")
        else:
            fields["copy_bandwidth"] = _measure_copy_bandwidth(clock)
        return Machine(
            per_row,
            per_edge,
            bandwidth,
            latency,
            per_halo_row,
            per_step,
            **fields,
            widths=history_widths(model),
            measured_fields=tuple(measured),
            fit_error=max(errors, default=0.0),
        )

    def step(self, rows: float, halo_rows: float, edges: float, steps: float = 1) -> float:
        """Return the seconds of steps by the total rows, halo rows and edges of their batches."""
        return (
            steps * self.seconds_per_step
            + rows * self.seconds_per_row
            + halo_rows * self.seconds_per_halo_row
            + edges * self.seconds_per_edge
        )

    def batch_bytes(self, rows: float, halo_rows: float, edges: float) -> float:
        """Return the peak bytes of a batch and its computation."""
        return (
            self.bytes_per_step
            + rows * self.bytes_per_row
            + halo_rows * self.bytes_per_halo_row
            + edges * self.bytes_per_edge
        )

    def link_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds to send ``num_bytes`` from each rank to all others."""
        on_host = min(self.ranks_per_host, num_ranks)
        if num_ranks == 1:
            return 0.0
        away = (num_ranks - on_host) / (num_ranks - 1)
        local = self.local_bandwidth or self.copy_bandwidth
        return max(num_bytes * away * on_host / self.bandwidth, num_bytes * (1 - away) / local)

    def ring_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of a ring all-reduce of ``num_bytes`` per rank, without latency."""
        slowest = self.bandwidth
        if num_ranks <= self.ranks_per_host:
            slowest = self.local_bandwidth or self.copy_bandwidth
        return 2 * (num_ranks - 1) / num_ranks * num_bytes / slowest


def check_model(model: object) -> None:
    """Refuse models without histories."""
    if not isinstance(model, ScalableGNN):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN, whose histories are "
            "what ranks send each other: gas.to_scalable(model, data) makes one"
        )


def history_widths(model: ScalableGNN) -> tuple[int, ...]:
    """Return the widths of a model's histories."""
    return tuple(history.embedding_dim for history in model.histories)


def _choose_parts(num_parts: int) -> list[list[int]]:
    """Draw the parts of mini-batches to measure, sorted by size.

    Memory and caches are then as in an epoch: measured just after a batch 16 times as large, a
    batch takes up to 1.8 times as long.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randperm(num_parts, generator=generator)[: 2**i].tolist()
        for i in range(SIZES) if 2**i <= num_parts
        for _ in range(WARM + PER_SIZE)
    ]  # fmt: skip


def _drop_warm_up(measured: list[T]) -> list[T]:
    """Return the measurements without the first ones of every size."""
    return [one for i, one in enumerate(measured) if i % (WARM + PER_SIZE) >= WARM]


def _measure_times(
    model: ScalableGNN, loader: SubgraphLoader, chosen: list[list[int]], clock: Callable[[], float]
) -> tuple[list[BatchShape], list[float]]:
    """Return shapes and training times of mini-batches, the medians of several rounds."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = torch.optim.Adam(copies) if copies else None
    rounds = []
    model.train()
    with share_cores() as follow:
        for _ in range(1 + ROUNDS):  # The first is a warm-up.
            shapes, seconds = [], []
            for parts in chosen:
                follow()
                start = clock()
                batch = loader.cut(parts)
                outs = (model(batch),)
                for copied, gradient in zip(copies, gradients(model, outs), strict=True):
                    copied.grad = gradient
                if optimizer is not None:
                    optimizer.step()
                del outs
                seconds.append(clock() - start)
                shapes.append(BatchShape.of(batch))
                del batch
            rounds.append(_drop_warm_up(seconds))
    medians = [statistics.median(each) for each in zip(*rounds[1:], strict=True)]
    return _drop_warm_up(shapes), medians


def _measure_bytes(model: ScalableGNN, batch: SubData) -> float:
    """Return the bytes of a batch, of the batch before it, and of the computation."""
    io, model.io = model.io, "serial"  # Memory of other threads isn't counted.
    found = batch_bytes(model, batch)
    model.io = io
    return float(2 * found.batch + found.peak)


def _measure_copy_bandwidth(clock: Callable[[], float]) -> float:
    """Measure the bytes per second of gathering rows of 1 KiB."""
    rows = torch.zeros(COPIED // 1024, 256)
    out, index = torch.empty_like(rows), torch.randperm(rows.size(0))
    seconds = []
    for _ in range(COPIES):
        start = clock()
        torch.index_select(rows, 0, index, out=out)
        seconds.append(clock() - start)
    return COPIED / max(min(seconds), 1e-9)
