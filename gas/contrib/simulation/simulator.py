"""Predicted time, messages and memory of an epoch of many ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_geometric.data import Data

from gas.contrib.simulation.machine import Machine, check_model, history_widths
from gas.contrib.simulation.partition import PartitionStatistics, count_split
from gas.native import check_integer, human
from gas.scalable import ModelRanks

if TYPE_CHECKING:
    from gas import ScalableGNN

EDGE_BYTES, ROW_BYTES = 12, 8  # In a loader: a column, an id and a weight; a row pointer.
AGE_BYTES = 4  # Of a row of a history.
ID_BYTES = 8  # Of a replica, and of a row in the list for a subscriber.
ADAM = 4  # Copies of the parameters: they, gradients, and two moments.


@dataclass(frozen=True)
class Simulation:
    """Prediction of an epoch of ``W`` ranks; made by :func:`simulate`.

    Seconds and bytes are those of an epoch, and of the rank that takes or has most.

    * ``num_ranks``; ``steps``: mini-batches of a rank;
    * ``compute_seconds``: of the slowest rank; ``mean_compute_seconds``: if all had the same work;
    * ``waiting_seconds``: for the largest of ``W`` mini-batches that are computed at once;
    * ``copy_seconds``: of a core, to gather, send, receive and scatter rows;
    * ``history_seconds``: sending rows of histories, of which ``history_latency_seconds`` is the
      latency of the messages;
    * ``gradient_seconds``, ``gradient_latency_seconds``: the same for gradients;
    * ``hidden_seconds``: the part of ``history_seconds`` that overlaps with computing;
    * ``history_bytes``: rows of histories of the rank that sends most; ``header_bytes``,
      ``gradient_bytes``: further bytes that a rank sends;
    * ``total_history_bytes``: rows of histories of all ranks, replicas times the bytes of their
      rows; ``total_bytes``: all bytes that they send;
    * ``start_bytes``: features that all ranks send once, before the first epoch;
    * ``memory``: bytes by purpose;
    * ``one_rank_seconds``: an epoch of one rank, if it could hold the graph;
    * ``statistics``, ``machine``: the inputs of the prediction.

    ``print(simulation)`` shows a table, and names the measured inputs.
    """

    num_ranks: int
    steps: int
    compute_seconds: float
    mean_compute_seconds: float
    waiting_seconds: float
    copy_seconds: float
    history_seconds: float
    history_latency_seconds: float
    gradient_seconds: float
    gradient_latency_seconds: float
    hidden_seconds: float
    history_bytes: int
    header_bytes: int
    gradient_bytes: int
    total_history_bytes: int
    total_bytes: int
    start_bytes: int
    memory: dict[str, int]
    one_rank_seconds: float
    statistics: PartitionStatistics
    machine: Machine

    @property
    def communication_seconds(self) -> float:
        """Return the time of messages of histories and gradients, hidden or not."""
        return self.history_seconds + self.gradient_seconds

    @property
    def epoch_seconds(self) -> float:
        """Return the time of an epoch."""
        own = self.compute_seconds + self.waiting_seconds + self.copy_seconds
        return own + self.communication_seconds - self.hidden_seconds

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of the rank that sends most."""
        return self.history_bytes + self.header_bytes + self.gradient_bytes

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of a rank, without Python and its libraries."""
        return sum(self.memory.values())

    @property
    def speed_up(self) -> float:
        """Return the time of an epoch of one rank over that of these ranks."""
        return self.one_rank_seconds / max(self.epoch_seconds, 1e-300)

    @property
    def parts_of_time(self) -> dict[str, float]:
        """Return the seconds of an epoch by the resource that they are spent on.

        Copying rows into and out of messages counts as bandwidth.
        """
        shown = 1 - self.hidden_seconds / max(self.history_seconds, 1e-300)
        latency = shown * self.history_latency_seconds + self.gradient_latency_seconds
        uneven = self.compute_seconds - self.mean_compute_seconds + self.waiting_seconds
        rest = self.epoch_seconds - self.mean_compute_seconds - uneven - latency
        return {
            "compute": self.mean_compute_seconds,
            "imbalance": uneven,
            "bandwidth": max(0.0, rest),
            "latency": latency,
        }

    @property
    def limit(self) -> str:
        """Return the resource that takes most time: compute, imbalance, bandwidth or latency."""
        parts = self.parts_of_time
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        rows = [
            ("ranks", f"{self.num_ranks:,}, {self.steps:,} steps each"),
            ("epoch", _format_seconds(self.epoch_seconds)),
            ("  compute, slowest rank", _format_seconds(self.compute_seconds)),
            ("  waiting for uneven batches", _format_seconds(self.waiting_seconds)),
            ("  copying rows", _format_seconds(self.copy_seconds)),
            ("  sending histories", _format_seconds(self.history_seconds)),
            ("  of which hidden", _format_seconds(self.hidden_seconds)),
            ("  sending gradients", _format_seconds(self.gradient_seconds)),
            ("speed-up over one rank", f"{self.speed_up:.2f}, limited by {self.limit}"),
            ("sent by a rank", human(self.sent_bytes)),
            ("  histories", human(self.history_bytes)),
            ("sent by all ranks", human(self.total_bytes)),
            ("  before the first epoch", human(self.start_bytes)),
            ("memory of a rank", human(self.memory_bytes)),
            *((f"  {name}", human(size)) for name, size in self.memory.items() if size),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, "", *self._describe_sources()])

    def _describe_sources(self) -> list[str]:
        """Return lines that name the measured and the assumed numbers."""
        measured = self.machine.measured_fields
        error = self.machine.fit_error
        told = ["Predicted, not measured."]
        if self.statistics.is_extrapolated:
            told.append("The partition is extrapolated: no graph was partitioned this way.")
        told.append(f"Measured: {', '.join(measured) or 'nothing'}; the rest is given.")
        if error is not None:
            told.append(f"The fit is off by up to {100 * error:.0f} % on the measured batches.")
        if (
            not any(name.startswith("bytes_per") for name in measured)
            and "batch" not in self.memory
        ):
            told.append("What a mini-batch holds is not known, and not part of the memory.")
        return told


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def simulate(
    partition: Data | str | Path | PartitionStatistics,
    model: ScalableGNN,
    machine: Machine,
    *,
    batch_size: int = 1,
    overlap: bool = False,
) -> Simulation:
    """Predict the time of an epoch of many ranks, and each rank's messages and memory.

    Nothing is run, and no process is started. In every step each rank computes a mini-batch of its
    own parts; the rows of it that other ranks hold as replicas go to them, for all histories in one
    message; gradients are summed in a ring. Messages take ``latency + bytes / bandwidth``: those of
    an exchange among all ``W`` ranks ``W - 1`` times the former, one after another, and a ring
    ``2 (W - 1)`` times, and ``2 (W - 1) / W`` times the bytes (Thakur, Rabenseifner, Gropp,
    *Optimization of Collective Communication Operations in MPICH*, IJHPCA 2005: pairwise exchange,
    and the ring for long messages). In every step ranks wait for the largest of ``W`` mini-batches,
    whose edges and halo are taken as ``sqrt(2 ln W)`` standard deviations above the mean. The
    slowest rank is one that has the most rows, edges and replicas of all: an upper bound::

        machine = Machine.measure(model, loader, bandwidth=1.25e9, latency=50e-6)
        statistics = partition_statistics(graph)  # Of gas.cluster(..., shards=4).
        print(simulate(statistics, model, machine))

    A rank's memory holds features and histories of its rows and replicas, edges once (no other
    copy of the graph), four copies of the parameters, two messages of a step each way, and a
    mini-batch. Up to 15 bytes that fill up each message aren't counted.

    Args:
        partition: A clustered graph with ``shards``, or its folder; or its statistics, counted,
            written by hand, or extrapolated (:meth:`PartitionStatistics.extrapolate`).
        model: The model, with its histories and parameters.
        machine: The cost of computing and sending.
        batch_size: Parts of a rank per mini-batch. (default: ``1``)
        overlap: Whether rows are sent during a whole step, and read one step later, rather than
            during the backward pass; see :func:`gas.distribute`. (default: ``False``)

    Raises:
        ValueError: If an argument is unusable, naming it.
    """
    check_model(model)
    if not isinstance(machine, Machine):
        raise ValueError(
            f"'machine' is a {type(machine).__name__}, expected a gas.contrib.simulation.Machine: "
            "Machine.measure(model, loader, bandwidth, latency) measures one"
        )
    check_integer("batch_size", batch_size, 1)
    widths = history_widths(model)
    if machine.widths is not None and machine.widths != widths:
        raise ValueError(
            f"'machine' was measured with histories of widths {list(machine.widths)}, and those of "
            f"'model' are {list(widths)}: measure with this model"
        )
    counted = partition
    if not isinstance(counted, PartitionStatistics):
        counted = count_split(counted, "partition")
    codec = model._factory.codec
    row_bytes = sum(codec.row_bytes(width) for width in widths)
    parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return _Simulator(
        counted, machine, row_bytes, len(widths), parameters, batch_size, overlap
    ).run()


@dataclass(frozen=True)
class _Simulator:
    """The inputs of a simulation."""

    counted: PartitionStatistics
    machine: Machine
    row_bytes: int
    num_histories: int
    parameter_bytes: int
    batch_size: int
    overlap: bool

    def run(self) -> Simulation:
        s, machine, ranks = self.counted, self.machine, self.counted.num_ranks
        steps = math.ceil(math.ceil(s.num_parts / ranks) / self.batch_size)
        rows, halo, edges = s.num_nodes / ranks, s.halo / ranks, s.num_edges / ranks
        most = (rows * s.rows_balance, halo * s.edges_balance, edges * s.edges_balance)
        compute = machine.step(*most, steps)
        uneven = s.part_spread / math.sqrt(self.batch_size) * math.sqrt(2 * math.log(ranks))
        waiting = machine.step(0, *most[1:], 0) * uneven if steps > 1 else 0.0

        sent = s.replicas / ranks * s.sent_balance * self.row_bytes
        received = s.replicas / ranks * s.replicas_balance * self.row_bytes
        headers = ModelRanks.header_bytes((ranks - 1) * steps, s.ranges / ranks)
        hops = (ranks - 1) * machine.latency * steps
        if not self.row_bytes:  # Nothing to send.
            headers = hops = 0.0
        history_latency = 2 * hops  # Headers first, then rows.
        under_way = machine.link_seconds(max(sent, received) + headers, ranks) + history_latency
        ring = machine.ring_seconds(self.parameter_bytes, ranks) * steps
        gradient_latency = 2 * (ranks - 1) * machine.latency * steps if self.parameter_bytes else 0
        gradients = 2 * (ranks - 1) / ranks * self.parameter_bytes * steps
        copying = (sent + received) / machine.copy_bandwidth
        if ranks > 1:
            copying += machine.seconds_per_exchange * steps
        beside = 1.0 if self.overlap else machine.backward_share
        hidden = min(under_way, beside * compute)
        all_histories = s.replicas * self.row_bytes
        return Simulation(
            num_ranks=ranks,
            steps=steps,
            compute_seconds=compute,
            mean_compute_seconds=machine.step(rows, halo, edges, steps),
            waiting_seconds=waiting,
            copy_seconds=copying,
            history_seconds=under_way,
            history_latency_seconds=history_latency,
            gradient_seconds=ring + gradient_latency,
            gradient_latency_seconds=gradient_latency,
            hidden_seconds=hidden,
            history_bytes=round(sent),
            header_bytes=round(headers),
            gradient_bytes=round(gradients),
            total_history_bytes=all_histories,
            total_bytes=all_histories + round((headers + gradients) * ranks),
            start_bytes=s.replicas * s.feature_bytes,
            memory=self.memory(most, (sent + received) / steps),
            one_rank_seconds=machine.step(
                s.num_nodes, s.halo, s.num_edges, math.ceil(s.num_parts / self.batch_size)
            ),
            statistics=s,
            machine=machine,
        )

    def memory(self, most: tuple[float, float, float], messages: float) -> dict[str, int]:
        """Return a rank's bytes by purpose, for its rows, halo rows, edges and messages."""
        s, (own, halo, edges) = self.counted, most
        replicas = s.replicas / s.num_ranks * s.replicas_balance
        sent = s.replicas / s.num_ranks * s.sent_balance
        batch = self.batch_size * s.num_ranks / s.num_parts  # Of a rank's rows.
        size = min(1.0, batch * (1 + 3 * s.part_spread / math.sqrt(self.batch_size)))
        found = {
            "features": (own + replicas) * s.feature_bytes,
            "histories": (own + replicas) * (self.row_bytes + AGE_BYTES * self.num_histories),
            "edges": edges * EDGE_BYTES + own * ROW_BYTES,
            "lists of replicas": (replicas + sent) * ID_BYTES,
            "parameters and optimizer": ADAM * self.parameter_bytes,
            "messages": 2 * messages,
            "batch": self.machine.batch_bytes(own * size, halo * size, edges * size),
        }
        return {name: round(size) for name, size in found.items() if size}
