"""Time of a training epoch: gas against PyG's ways to train and pyg_autoscale, in one run.

    python benchmarks/epoch_time.py --root data

Every contender of ``contenders.py`` trains the same GCN with the same settings on the same graph;
epochs alternate. A contender whose package can't be imported is listed as not measured, and one
whose first epoch takes longer than ``--slow-seconds`` is timed ``--slow-repeats`` times. Epochs of
NeighborLoader have the training nodes as seeds, those of GraphSAINT a sample of nodes; the others
compute every node.

Nobody trains on an empty machine: the last column is gas's epoch while two other processes
keep cores busy, the worst of five runs of half a second or more, and in brackets how many epochs
of one thread on the quiet machine it takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import busy_processes, markdown, mean_time, save, time_in_turn
from contenders import MAKERS, Case, make_all, prepare
from tqdm import tqdm

CASES = (
    Case("Cora", 2, 16, 40, 10, 0.5),
    Case("FacebookPagePage", 2, 64, 64, 8, 0.3),
    Case("planted:200000", 3, 128, 64, 8, 0.3),
)


BUSY, RUNS, RUN_SECONDS = 2, 5, 0.5


def beside_busy(epoch: Callable[[], object]) -> dict[str, Any]:
    """Seconds of an epoch of one thread when all is quiet, and of all threads when it isn't."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    epoch()
    quiet = statistics.median(mean_time(epoch, RUN_SECONDS) for _ in range(RUNS))
    torch.set_num_threads(threads)
    with busy_processes(BUSY):
        epoch()
        runs = [mean_time(epoch, RUN_SECONDS) for _ in range(RUNS)]
    return {"quiet_one_thread": quiet, "busy_processes": BUSY, "runs": runs, "worst": max(runs)}


def cell(name: str, times: dict[str, dict[str, float]], repeats: int) -> str:
    """The time of one contender, and its ratio over gas."""
    if name not in times:
        return "not measured"
    mark = "" if times[name]["rounds"] >= repeats else " *"
    median = times[name]["median"]
    ratio = "" if name == "gas" else f" ({median / times['gas']['median']:.2f}x)"
    return f"{1000 * median:.1f} ms{ratio}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slow-seconds", type=float, default=20.0)
    parser.add_argument("--slow-repeats", type=int, default=1)
    parser.add_argument("--datasets", nargs="*", help="a part of the cases")
    parser.add_argument("--name", default="epoch_time", help="of the results")
    args = parser.parse_args()

    results: dict[str, object] = {}
    rows = []
    for case in tqdm([c for c in CASES if not args.datasets or c.dataset in args.datasets]):
        torch.manual_seed(0)
        graph = prepare(args.root, case)
        contenders, reasons = make_all(case, graph)
        repeats = args.repeats if graph.data.num_nodes > 100_000 else 3 * args.repeats
        times = time_in_turn(
            {name: contender.epoch for name, contender in contenders.items()},
            repeats,
            warm_up=2,
            slow_seconds=args.slow_seconds,
            slow_repeats=args.slow_repeats,
        )
        busy = beside_busy(contenders["gas"].epoch)
        gas_seconds = times["gas"]["median"]
        results[case.dataset] = {
            "settings": vars(case),
            "seconds": times,
            "ratio_over_gas": {name: t["median"] / gas_seconds for name, t in times.items()},
            "not_measured": reasons,
            "beside_busy": busy,
        }
        shape = (
            f"GCN {case.num_layers}x{case.hidden_channels}, {case.num_parts} / {case.batch_size}"
        )
        worst = f"{1000 * busy['worst']:.1f} ms ({busy['worst'] / busy['quiet_one_thread']:.1f}x)"
        cells = [cell(name, times, repeats) for name in MAKERS]
        rows.append([case.dataset, shape, *cells, worst])
    header = ["graph", "model, parts / per batch", *MAKERS, "gas beside two busy processes"]
    table = markdown(header, rows)
    notes = (
        "In brackets: times the epoch of gas. NeighborLoader: training nodes as seeds. Beside two "
        "busy processes: the worst of five runs, in brackets times the epoch of gas with one "
        "thread on the quiet machine."
    )
    if " *" in table:
        notes += f" \\*: slow; epochs timed, without warm-up: {args.slow_repeats}."
    save(args.name, {"median_of": args.repeats, "cases": results}, f"{table}\n\n{notes}")


if __name__ == "__main__":
    main()
