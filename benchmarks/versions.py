"""Time of a training epoch against another version of gas, in turn.

    git worktree add ../other COMMIT                # and build its extension there
    python benchmarks/versions.py --other ../other --root data

``make regression COMMIT=...`` does both for two of the cases, and fails where training is slower.

The same script runs in both, with what both know. A set is three processes on one core, of which
one at a time trains an epoch: the other version, the same once more, and this one. Its ratios are
those of median times on the processor. Processes of one version differ by more than the versions
may; by how much, the other version over itself says, whose true ratio is 1. Therefore many sets are
run, and the median of their ratios is given with an interval that covers it in 95 % of cases (from
the order of the ratios, without an assumption of their distribution).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.nn

import gas

HERE = Path(__file__).resolve().parent
# Graph, model, layers, width, parts, parts of a batch.
CASES = {
    "Cora, GCN 2x16": ("Cora", "GCN", 2, 16, 40, 10),
    "planted:50000, GCN 3x64": ("planted:50000", "GCN", 3, 64, 64, 8),
    "planted:50000, PyG's GraphSAGE 3x64": ("planted:50000", "GraphSAGE", 3, 64, 64, 8),
    "planted:50000, PyG's GAT 3x64": ("planted:50000", "GAT", 3, 64, 64, 8),
}


def make_epoch(case: str, root: str) -> Callable[[], None]:
    """Return an epoch of training with histories, by what has been public for long."""
    dataset, name, num_layers, width, num_parts, batch_size = CASES[case]
    torch.manual_seed(0)
    data, in_channels, out_channels = gas.get_data(root, dataset)
    data.train_mask = data.train_mask.view(data.num_nodes, -1)[:, 0]  # Of the first split.
    if name == "GCN":
        sizes = (data.num_nodes, in_channels, width, out_channels, num_layers)
        model = gas.models.GCN(*sizes, dropout=0.5)
    else:
        net = getattr(torch_geometric.nn, name)
        net = net(in_channels, width, num_layers, out_channels, dropout=0.5)
        model = gas.to_scalable(gas.fuse(net), data)
    graph = gas.cluster(data, num_parts, model=model, log=False)
    loader = gas.SubgraphLoader(
        graph, batch_size=batch_size, shuffle=True, layout="fused", log=False
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.predict(graph, layout="fused")

    def epoch() -> None:
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            out, size = model(batch), batch.batch_size
            mask = batch.train_mask[:size]
            loss = F.cross_entropy(out[mask], batch.y[:size][mask], reduction="sum")
            (loss / max(int(mask.sum()), 1)).backward()
            optimizer.step()

    return epoch


def work(case: str, root: str) -> None:
    """Train so many epochs for each line of the input, and print their seconds."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    epoch = make_epoch(case, root)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(int(line)):
            epoch()
        print((time.process_time() - start) / int(line), flush=True)


class Worker:
    """A process that trains with one version; a context manager."""

    def __init__(self, checkout: Path, case: str, root: str) -> None:
        command = [sys.executable, "-W", "ignore", str(HERE / "versions.py"), "--root", root]
        self.process = subprocess.Popen(
            [*command, "--worker", case],
            env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )

    def __enter__(self) -> Callable[[int], float]:
        return self.seconds

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def seconds(self, epochs: int) -> float:
        """Return the seconds of one epoch, measured over several."""
        print(epochs, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def one_set(checkouts: dict[str, Path], case: str, root: str, rounds: int) -> dict[str, float]:
    """Return the median time of an epoch in each of three processes, in seconds."""
    with (
        Worker(checkouts["other"], case, root) as other,
        Worker(checkouts["other"], case, root) as again,
        Worker(checkouts["this"], case, root) as this,
    ):
        runs = {"other": other, "again": again, "this": this}
        first = max(run(2) for run in runs.values())
        epochs = max(1, math.ceil(0.1 / first))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            order = list(runs) if number % 2 == 0 else list(runs)[::-1]
            for name in order:
                times[name].append(runs[name](epochs))
    return {name: statistics.median(each) for name, each in times.items()}


def median_of(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median, and the two ratios that contain the true one in 95 % of cases."""
    ordered, size = sorted(ratios), len(ratios)
    rank, outside = 0, 0.5**size
    while 2 * outside <= 0.05:  # Of a binomial distribution, the share outside of these ranks.
        rank += 1
        outside += math.comb(size, rank) * 0.5**size
    if rank == 0:
        raise SystemExit(f"--sets {size} are too few for an interval: take 6 or more.")
    return statistics.median(ordered), ordered[rank - 1], ordered[-rank]


def slower_cases(ratios: dict[str, list[float]], limit: float) -> list[str]:
    """List the cases of which the whole interval of the ratio exceeds the limit."""
    return [case for case, each in ratios.items() if median_of(each)[1] > limit]


def main() -> int:
    """Measure all cases; return 1 if one of them is slower than ``--limit`` allows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--other", type=Path, help="a checkout of the other version, built")
    parser.add_argument("--root", default="data")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sets", type=int, default=12, help="of processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of a set (%(default)s)")
    parser.add_argument(
        "--limit",
        type=float,
        help="save nothing, and fail where the interval is above this ratio",
    )
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.root)
        return 0
    if args.other is None or not (args.other / "gas").is_dir():
        raise SystemExit(f"--other {args.other} isn't a checkout of gas.")

    from common import markdown, save  # Of this version.

    checkouts = {"other": args.other.resolve(), "this": HERE.parent}
    root = str(Path(args.root).resolve())
    kept, rows = {}, []
    for case in args.cases:
        sets = [one_set(checkouts, case, root, args.rounds) for _ in range(args.sets)]
        kept[case] = sets
        cells = [case, f"{1e3 * statistics.median(each['other'] for each in sets):.1f} ms"]
        for name in ("again", "this"):
            middle, low, high = median_of([each[name] / each["other"] for each in sets])
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        rows.append(cells)
        print(json.dumps(cells), flush=True)
    if args.limit is not None:
        ratios = {case: [s["this"] / s["other"] for s in sets] for case, sets in kept.items()}
        slower = slower_cases(ratios, args.limit)
        print(f"slower than {args.limit} times the other: {', '.join(slower) or 'none'}")
        return int(bool(slower))
    commits = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True
        ).stdout.strip()
        for name, path in checkouts.items()
    }
    header = ["graph, model", f"epoch, {commits['other']}", "the same again", f"{commits['this']}"]
    content = {"commits": commits, "sets": args.sets, "rounds": args.rounds, "seconds": kept}
    notes = (
        f"Ratios over the first column, the median of {args.sets} sets of processes and its 95 % "
        f"interval. One thread."
    )
    save("versions", content, f"{markdown(header, rows)}\n\n{notes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
