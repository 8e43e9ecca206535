"""Balance of labelled nodes and classes over the parts, and the edges that it cuts.

    python benchmarks/balance.py --root data
    python benchmarks/balance.py --root data --seeds 1 --datasets planted:2000

METIS alone against nodes moved after it, by ``gas.cluster(..., balance=...)``: labelled nodes, or
those of each class as well. Medians over seeds of METIS and, where a fraction of all nodes is
labelled, of these.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import make_parser, markdown, save
from torch import Tensor
from torch_geometric.data import Data

import gas

CASES = (  # The graph, the parts, and the fraction of labelled nodes, or none: the public split.
    ("planted:20000", 64, 0.01),
    ("planted:20000", 64, 0.5),
    ("planted:200000", 64, 0.01),
    ("Cora", 40, None),
    ("FacebookPagePage", 64, 0.01),
    ("FacebookPagePage", 64, 0.5),
)
WAYS = ("no", "labelled", "labelled, by class")


def largest(part: Tensor, of: Tensor, num_parts: int) -> float:
    """Return the most nodes of a set that a part has, over the mean."""
    return int(torch.bincount(part[of], minlength=num_parts).max()) * num_parts / int(of.sum())


def measure(data: Data, num_parts: int, way: str, seed: int) -> dict[str, float]:
    """Cut the graph in one way."""
    balance = {"no": None, "labelled": data.train_mask}.get(way, "train_mask")
    gas.cluster(data, num_parts, seed=seed, log=False)  # METIS's result is cached then.
    start = time.perf_counter()
    graph = gas.cluster(data, num_parts, seed=seed, log=False, balance=balance)
    seconds = time.perf_counter() - start
    report = gas.partition_report(graph, graph.parts)
    part = torch.repeat_interleave(graph.parts.diff())
    labelled = graph.train_mask
    classes = [labelled & (graph.y == y) for y in graph.y[labelled].unique()]
    return {
        "cut": report.edge_cut,
        "halo": report.halo_ratio,
        "nodes": report.balance,
        "labelled": largest(part, labelled, num_parts),
        "class": max(largest(part, each, num_parts) for each in classes),
        "class_mean": min(int(each.sum()) for each in classes) / num_parts,
        "seconds": seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--datasets", nargs="*", help="graphs whose cases to run")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.datasets or case[0] in args.datasets]
    cases = cases or [(name, 16, 0.1) for name in args.datasets]
    found, rows = [], []
    for name, num_parts, fraction in cases:
        data, _, _ = gas.get_data(args.root, name)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in range(args.seeds):
            if fraction is not None:
                generator = torch.Generator().manual_seed(seed)
                data.train_mask = torch.rand(data.num_nodes, generator=generator) < fraction
            for way in WAYS:
                runs[way].append(measure(data, num_parts, way, seed))
        found.append({"case": [name, num_parts, fraction], "runs": runs})
        for way in WAYS:
            middle = {k: statistics.median(r[k] for r in runs[way]) for k in runs[way][0]}
            rows.append([
                f"{name}, {num_parts} parts", int(data.train_mask.sum()), way,
                f"{100 * middle['cut']:.1f} %", f"{middle['halo']:.2f}", f"{middle['nodes']:.2f}",
                f"{middle['labelled']:.2f}", f"{middle['class']:.2f}",
                f"{middle['class_mean']:.1f}", f"{middle['seconds']:.2f} s",
            ])  # fmt: skip
    header = "graph|labelled|balanced|edges cut|halo per node|largest part, of the mean|of labelled"
    header += "|of a class|nodes of the smallest class per part|time after METIS"
    save("balance", {"found": found}, markdown(header.split("|"), rows))


if __name__ == "__main__":
    main()
