"""Growth of the time of a training epoch with the graph, for batches of the same size.

    python benchmarks/scaling.py                 # 0.1 to 20 million edges, 24 GiB of memory
    python benchmarks/scaling.py --nodes 5000 20000

A GCN trains on planted graphs (20 edges per node) whose parts have 3,125 nodes, 8 of them per
batch. The exponent is the slope of the logarithm of an epoch's time over that of the number of
edges, by least squares: 1 is linear. A graph of at most 8 parts is one batch, without a halo: the
second exponent leaves those out.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from common import markdown, save, time_in_turn
from contenders import Case, make_gas, partition
from tqdm import tqdm

from gas.datasets.planted import planted_partition

PART_NODES = 3125
PARTS_PER_BATCH = 8


def exponent(edges: list[int], seconds: list[float]) -> float:
    """Return the slope of a line through the logarithms."""
    return float(np.polyfit(np.log(edges), np.log(seconds), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = [5_000, 20_000, 50_000, 200_000, 1_000_000]
    parser.add_argument("--nodes", type=int, nargs="*", default=sizes)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    results = []
    for nodes in tqdm(args.nodes):
        torch.manual_seed(0)
        parts = max(1, round(nodes / PART_NODES))
        case = Case(f"planted:{nodes}", 3, 128, parts, min(PARTS_PER_BATCH, parts), 0.3)
        data = planted_partition(nodes)
        data.train_mask = torch.ones(nodes, dtype=torch.bool)
        graph = partition(data, case, int(data.y.max()) + 1)
        epoch = make_gas(case, graph).epoch
        seconds = time_in_turn({"gas": epoch}, args.repeats, warm_up=2)["gas"]
        results.append({"nodes": nodes, "edges": data.num_edges, "parts": parts, **seconds})
    edges, seconds = [r["edges"] for r in results], [r["median"] for r in results]
    several = [i for i, r in enumerate(results) if r["parts"] > PARTS_PER_BATCH]
    exponents = {"all": exponent(edges, seconds)} if len(results) > 1 else {}
    if len(several) > 1:
        exponents["several batches"] = exponent(
            *([v[i] for i in several] for v in (edges, seconds))
        )
    rows = [
        [
            f"{r['nodes']:,}",
            f"{r['edges'] / 1e6:.2f}M",
            r["parts"],
            f"{1000 * r['median']:.1f} ms",
            f"{r['edges'] / r['median'] / 1e6:.1f}M",
        ]
        for r in results
    ]
    table = markdown(["nodes", "edges", "parts", "epoch", "edges per second"], rows)
    told = ", ".join(f"{name} {value:.2f}" for name, value in exponents.items())
    save("scaling", {"results": results, "exponent": exponents}, f"{table}\n\nExponent: {told}.")


if __name__ == "__main__":
    main()
