"""Time of a training epoch: gas against PyG's ways to train and pyg_autoscale, in one run.

    python benchmarks/epoch_time.py --root data
    python benchmarks/epoch_time.py --device cuda --quick    # a minute, on a generated graph
    python benchmarks/epoch_time.py --device cuda --large    # 2 million nodes, 40 million edges

Every contender of ``contenders.py`` trains the same GCN with the same settings on the same graph;
epochs alternate. A contender whose package can't be imported is listed as not measured, and one
whose first epoch takes longer than ``--slow-seconds`` is timed ``--slow-repeats`` times. Epochs of
NeighborLoader have the training nodes as seeds, those of GraphSAINT a sample of nodes; the others
compute every node.

Training often shares its machine: the last column is gas's epoch while two other processes
keep cores busy, the worst of five runs of half a second or more, and in brackets how many epochs
of one thread on the quiet machine it takes. On a device, that is left out, and all start from
batches in host memory but the full batch.

``--large`` is one generated graph, whose communities are the parts, with histories in host memory
and wide layers; with ``--quick`` it has a tenth of the nodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    add_options,
    busy_processes,
    make_parser,
    markdown,
    mean_time,
    read_options,
    save,
    time_in_turn,
)
from contenders import Case, Graph, in_communities, make_all, makers, prepare
from tqdm import tqdm

CASES = (
    Case("Cora", 2, 16, 40, 10, 0.5),
    Case("FacebookPagePage", 2, 64, 64, 8, 0.3),
    Case("planted:200000", 3, 128, 64, 8, 0.3),
)
# A device computes as fast as it is fed only where there is something to compute.
QUICK = {
    "cpu": Case("planted:10000", 3, 64, 32, 8, 0.3),
    "cuda": Case("planted:200000", 3, 128, 64, 8, 0.3),
}
LARGE = Case("planted:2000000", 3, 256, 64, 8, 0.3)
LARGE_QUICK = Case("planted:200000", 3, 256, 64, 8, 0.3)


BUSY, RUNS, RUN_SECONDS = 2, 5, 0.5


def beside_busy(epoch: Callable[[], object]) -> dict[str, Any]:
    """Measure an epoch of one thread on a quiet machine, and of all threads on a busy one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    epoch()
    quiet = statistics.median(mean_time(epoch, RUN_SECONDS) for _ in range(RUNS))
    torch.set_num_threads(threads)
    with busy_processes(BUSY):
        epoch()
        runs = [mean_time(epoch, RUN_SECONDS) for _ in range(RUNS)]
    return {"quiet_one_thread": quiet, "busy_processes": BUSY, "runs": runs, "worst": max(runs)}


def cases_of(args: argparse.Namespace) -> list[Case]:
    if args.large:
        return [LARGE_QUICK if args.quick else LARGE]
    if args.quick:
        return [QUICK[args.device]]
    return [case for case in CASES if not args.datasets or case.dataset in args.datasets]


def graph_of(args: argparse.Namespace, case: Case) -> Graph:
    if args.large:  # METIS would take minutes.
        return in_communities(int(case.dataset.partition(":")[2]), case.num_parts)
    return prepare(args.root, case)


def cell(name: str, times: dict[str, dict[str, float]], repeats: int) -> str:
    """Return the time of one contender, and its ratio over gas."""
    if name not in times:
        return "not measured"
    mark = "" if times[name]["rounds"] >= repeats else " *"
    median = times[name]["median"]
    ratio = "" if name == "gas" else f" ({median / times['gas']['median']:.2f}x)"
    return f"{1000 * median:.1f} ms{ratio}{mark}"


def main() -> None:
    parser = make_parser(__doc__)
    add_options(parser, "epoch_time")
    parser.add_argument("--repeats", type=int, help="(default: 7, with --quick or --large 3)")
    parser.add_argument("--slow-seconds", type=float, default=20.0)
    parser.add_argument("--slow-repeats", type=int, default=1)
    parser.add_argument("--datasets", nargs="*", help="a part of the cases")
    parser.add_argument("--contenders", nargs="*", default=[], help="some of them, and gas")
    parser.add_argument("--large", action="store_true", help="2 million nodes, 40 million edges")
    args = read_options(parser)
    short = args.quick or args.large
    least = args.repeats or (3 if short else 7)
    beside = args.device == "cpu" and not short
    names = [
        name
        for name in makers(args.device)
        if not args.contenders or name in ("gas", *args.contenders)
    ]

    results: dict[str, object] = {}
    unmeasured: dict[str, str] = {}
    rows = []
    for case in tqdm(cases_of(args)):
        torch.manual_seed(0)
        start = time.perf_counter()
        graph = graph_of(args, case)
        prepared = time.perf_counter() - start
        contenders, reasons = make_all(case, graph, args.device, args.contenders)
        repeats = least if short or graph.data.num_nodes > 100_000 else 3 * least
        times = time_in_turn(
            {name: contender.epoch for name, contender in contenders.items()},
            repeats,
            warm_up=1 if short else 2,
            slow_seconds=args.slow_seconds,
            slow_repeats=args.slow_repeats,
            device=args.device,
        )
        gas_seconds = times["gas"]["median"]
        result: dict[str, object] = {
            "settings": vars(case),
            "nodes": graph.data.num_nodes,
            "edges": graph.data.num_edges,
            "prepared_seconds": prepared,
            "seconds": times,
            "ratio_over_gas": {name: t["median"] / gas_seconds for name, t in times.items()},
            "not_measured": reasons,
        }
        results[case.dataset] = result
        shape = (
            f"GCN {case.num_layers}x{case.hidden_channels}, {case.num_parts} / {case.batch_size}"
        )
        row = [case.dataset, shape, *(cell(name, times, repeats) for name in names)]
        if beside:
            busy = result["beside_busy"] = beside_busy(contenders["gas"].epoch)
            ratio = busy["worst"] / busy["quiet_one_thread"]
            row.append(f"{1000 * busy['worst']:.1f} ms ({ratio:.1f}x)")
        rows.append(row)
        unmeasured.update(reasons)
    columns = ["graph", "model, parts / per batch", *names]
    table = markdown(
        [*columns, "gas under CPU contention (two busy processes)"] if beside else columns, rows
    )
    notes = "In brackets: times the epoch of gas. NeighborLoader: training nodes as seeds."
    if beside:
        notes += (
            " Beside two busy processes: the worst of five runs, in brackets times the epoch of "
            "gas with one thread on the quiet machine."
        )
    if " *" in table:
        notes += f" \\*: slow; epochs timed, without warm-up: {args.slow_repeats}."
    for name, why in unmeasured.items():
        notes += f" {name} was not measured: {why.splitlines()[0][:120]}."
    content = {"median_of": least, "device": args.device, "cases": results}
    save(args.name, content, f"{table}\n\n{notes}")


if __name__ == "__main__":
    main()
