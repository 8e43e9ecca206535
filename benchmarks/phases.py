"""Time of each phase of a training epoch, next to its lower bound.

    python benchmarks/phases.py --root data
    python benchmarks/phases.py --root data --name phases_before    # At another commit.

Two models train in turn: with histories, and on the full batch of the same operators. Phases are
those of ``gas.profile``; what is left of an epoch is Python, dispatch and autograd's own work. The
time of an epoch is that of epochs without the profiler.

The bound of a phase is the larger of its bytes over the bandwidth of a copy and its operations over
the speed of a large dense product, both measured in the same run with as many threads. Bytes are
those that can't be avoided once a batch has been chosen: each row and each entry of a matrix is
read once, each result is written once.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from common import make_parser, markdown, save, time_in_turn
from contenders import (
    Case,
    Contender,
    Graph,
    make_gas,
    make_own_full_batch,
    of_full_batch,
    prepare,
    with_histories,
)
from epoch_time import CASES
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import gas
from gas.native import attention, sparse

GAT_CASE = Case("FacebookPagePage", 2, 64, 64, 8, 0.3)
HEADS = 4

PHASES = (
    *("batches", "features", "dropout", "products", "attention", "dense layers", "pushes"),
    *("waits for rows", "elementwise", "optimizer", "Python"),
)
DENSE = ("aten::mm", "aten::addmm", "aten::bmm")
ENTRY_BYTES = 4 + 4 + 4 + 8 + 4 + 4  # Of an entry its column, id and weight, read and written.
ADAM_BYTES = 7 * 4  # Of a parameter: itself and two moments, read and written, and its gradient.


class Work:
    """The least bytes and operations of each phase of an epoch."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = defaultdict(float)
        self.flops: dict[str, float] = defaultdict(float)

    def counted(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a matrix whose result has a row for each of its rows or columns."""

        def call(m: Any, *args: Any, **kwargs: Any) -> Any:
            out = function(m, *args, **kwargs)
            tensors = out if isinstance(out, tuple) else (out,)
            width = sum(t[0].numel() for t in tensors if t is not None and len(t))
            entries = m.col.numel()
            self.flops[phase] += 2 * entries * width
            self.bytes[phase] += (m.num_rows + min(entries, m.num_cols)) * width * 4 + 8 * entries
            return out

        return call

    def bounds(self, bandwidth: float, peak: float) -> dict[str, float]:
        """Return seconds of each phase, at best."""
        phases = {*self.bytes, *self.flops}
        return {p: max(self.bytes[p] / bandwidth, self.flops[p] / peak) for p in phases}


def count_work(contender: Contender, features: int) -> Work:
    """Train an epoch, and count what can't be avoided of it."""
    work = Work()
    with contextlib.ExitStack() as stack:
        for module, name, phase in (
            (sparse, "multiply", "products"),
            (attention, "attention", "attention"),
            (attention, "attention_backward", "attention"),
        ):
            counted = work.counted(phase, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, counted))
        seen = stack.enter_context(profile(activities=[ProfilerActivity.CPU], with_flops=True))
        contender.epoch()
    dense = [event.flops for event in seen.key_averages() if event.key in DENSE]
    work.flops["dense layers"] = sum(dense)
    work.bytes["optimizer"] = ADAM_BYTES * sum(p.numel() for p in contender.model.parameters())
    rows = 0
    for batch in contender.batches:
        if isinstance(batch.data.adj_t, gas.nn.Adjacency) and batch.n_id.numel():
            work.bytes["batches"] += ENTRY_BYTES * batch.data.adj_t.num_entries
        rows += batch.data.num_nodes
    work.bytes["features"] = 2 * 4 * features * rows
    if any(batch.n_id.numel() for batch in contender.batches):
        moved = sum(h.num_embeddings * h.embedding_dim * 4 for h in contender.model.histories)
        work.bytes["pushes"] = work.bytes["waits for rows"] = moved
    return work


def speeds() -> tuple[float, float]:
    """Measure the bytes per second of a copy and the operations per second of a product."""
    source, to = torch.randn(2, 16 << 20)
    a, b = torch.randn(2, 2048, 2048)
    times = time_in_turn({"copy": lambda: to.copy_(source), "product": lambda: a @ b}, 7, 2)
    return 2 * source.nbytes / times["copy"]["min"], 2 * 2048**3 / times["product"]["min"]


def by_phase(contender: Contender, epochs: int, epoch: float) -> dict[str, float]:
    """Train with the profiler; return seconds of an epoch, which takes ``epoch`` without it."""
    with gas.profile(contender.model) as found:
        for _ in range(epochs):
            contender.epoch()
    seconds = {name: value / epochs for name, value in found.seconds.items() if name != "Python"}
    return {**seconds, "Python": max(0.0, epoch - sum(seconds.values()))}


def cells(seconds: dict[str, float], bounds: dict[str, float]) -> list[str]:
    """Return the phases of one contender, and their bounds."""
    found = []
    for phase in PHASES:
        spent = seconds.get(phase, 0.0)
        bound = f" ({1000 * bounds[phase]:.1f})" if phase in bounds else ""
        found.append(f"{1000 * spent:.1f}{bound}" if spent or bound else "-")
    return found


def make_gat(case: Case, graph: Graph, full_batch: bool) -> Contender:
    """Make a GAT with layers as wide as those of a case's GCN."""
    model = gas.models.GAT(
        graph.data.num_nodes,
        graph.data.num_features,
        case.hidden_channels // HEADS,
        HEADS,
        graph.out_channels,
        1,
        case.num_layers,
        case.dropout,
    )
    return of_full_batch(graph, model) if full_batch else with_histories(case, graph, model)


WORKLOADS: list[tuple[str, Case, Callable[..., Contender], Callable[..., Contender]]] = [
    *(("GCN", case, make_gas, make_own_full_batch) for case in CASES),
    (
        "GAT",
        GAT_CASE,
        lambda case, graph: make_gat(case, graph, False),
        lambda case, graph: make_gat(case, graph, True),
    ),
]


def main() -> None:
    parser = make_parser(__doc__, name="phases")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--datasets", nargs="*", help="a part of the workloads")
    args = parser.parse_args()

    bandwidth, peak = speeds()
    results, rows = [], []
    for kind, case, *makers in tqdm(WORKLOADS):
        if args.datasets is not None and case.dataset not in args.datasets:
            continue
        graph = prepare(args.root, case)
        repeats = args.repeats if graph.data.num_nodes > 100_000 else 5 * args.repeats
        names = ("histories", "full batch")
        plain = {n: make(case, graph) for n, make in zip(names, makers, strict=True)}
        times = time_in_turn({n: c.epoch for n, c in plain.items()}, repeats, 2)
        for name in names:
            epoch = times[name]["median"]
            seconds = by_phase(plain[name], repeats, epoch)
            bounds = count_work(plain[name], graph.data.num_features).bounds(bandwidth, peak)
            found = {"epoch": epoch, "seconds": seconds, "bounds": bounds}
            settings = {"model": kind, "settings": vars(case), "contender": name}
            results.append({**settings, **found})
            label = f"{case.dataset}, {kind} {case.num_layers}x{case.hidden_channels}"
            rows.append([label, name, f"{1000 * epoch:.1f}", *cells(seconds, bounds)])
    table = markdown(["workload", "contender", "epoch", *PHASES], rows)
    notes = (
        "Milliseconds, and in brackets what a phase takes at best; phases were timed in epochs of "
        f"their own, by gas.profile. A copy reads and writes {bandwidth / 1e9:.1f} GB/s, a dense "
        f"product does {peak / 1e9:.0f} GFLOP/s."
    )
    content = {"bytes_per_s": bandwidth, "flops": peak, "workloads": results}
    save(args.name, content, f"{table}\n\n{notes}")


if __name__ == "__main__":
    main()
