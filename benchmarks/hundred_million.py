"""A hundred million edges on one machine: generated on disk, cut into parts, and trained on.

    python benchmarks/hundred_million.py --root data            # 1 to 100 million edges
    python benchmarks/hundred_million.py --nodes 50000 500000   # up to 10 million

Planted graphs (20 edges per node, 64 features) are cut into parts of 3,125 nodes by METIS and by
KaMinPar; then a GCN of 3 layers and 128 channels trains for two epochs, histories in memory, 8
parts per batch, on the parts of the first method that could cut it. Every step has a process of its
own: one that fails, or takes more than ``--memory`` GiB, is a row of the table. A peak is of all
memory that was resident, with pages of mapped files, which the system could have taken back. The
exponent is the slope of the logarithm of the time over that of the number of edges, by least
squares: 1 is linear. Training's time is that of the last epoch.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import limit_memory, make_parser, markdown, run_apart, save

import gas
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.datasets import open_mapped, write_planted_partition
from gas.training import train_epoch

SIZES = (50_000, 200_000, 1_000_000, 5_000_000)
METHODS = ("metis", "kaminpar")
PART_NODES, PARTS_PER_BATCH = 3125, 8
AVG_DEGREE = 20  # Stored edges per node.
EPOCHS = 2


# Steps, each in a process of its own --------------------------------------------------------------


class Stages:
    """Time and peak resident memory of each stage of a step."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        reset_peak_rss()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.found[name] = {"seconds": seconds, "peak_bytes": peak_rss_bytes()}


def generate(folder: str, num_nodes: int) -> dict[str, Any]:
    stages = Stages()
    with stages("generate"), tempfile.TemporaryDirectory(dir=Path(folder).parent) as temporary:
        write_planted_partition(f"{temporary}/graph", num_nodes, AVG_DEGREE)
        os.replace(f"{temporary}/graph", folder)
    return {"stages": stages.found}


def partition(folder: str, num_parts: int, method: str) -> dict[str, Any]:
    """Partition the graph, and save the parts in its folder."""
    stages, data = Stages(), open_mapped(folder)
    with stages("partition"):
        perm, ptr = gas.metis(
            data.edge_index,
            num_parts,
            num_nodes=data.num_nodes,
            method=method,
            cache=False,
            log=False,
        )
    np.savez(Path(folder) / f"{method}.npz", perm=perm.numpy(), ptr=ptr.numpy())
    part = torch.empty_like(perm)
    part[perm] = torch.repeat_interleave(torch.arange(num_parts), ptr.diff())
    blocks = (row.split(2**24) for row in data.edge_index)
    cut = sum(int((part[src] != part[dst]).sum()) for src, dst in zip(*blocks, strict=True))
    balance = float(ptr.diff().max()) * num_parts / data.num_nodes
    return {"stages": stages.found, "cut": cut / data.num_edges, "balance": balance}


def train(folder: str, method: str) -> dict[str, Any]:
    """Train on the parts that ``method`` made."""
    stages = Stages()
    with np.load(Path(folder) / f"{method}.npz") as parts:
        perm, ptr = torch.from_numpy(parts["perm"]), torch.from_numpy(parts["ptr"])
    with stages("permute"):
        data = gas.permute(open_mapped(folder), perm, log=False)
        generator = torch.Generator().manual_seed(0)
        data.train_mask = torch.rand(data.num_nodes, generator=generator) < 0.5
    torch.manual_seed(0)
    with stages("model"):
        model = gas.models.GCN(
            data.num_nodes, data.num_features, 128, int(data.y.max()) + 1, 3, 0.3
        )
    with stages("normalise"):
        data = model.prepare(data)
    with stages("loader"):
        batches = gas.SubgraphLoader(
            data, ptr, PARTS_PER_BATCH, shuffle=True, layout="fused", log=False
        )
    del data, perm
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    warnings.filterwarnings("ignore", "A history was read before it was filled")  # In epoch 1.
    losses = []
    for epoch in range(EPOCHS):
        with stages(f"epoch {epoch + 1}"):
            losses.append(train_epoch(model, batches, optimizer))
    histories = sum(history.store.nbytes for history in model.histories)
    return {"stages": stages.found, "losses": losses, "history_bytes": histories}


def alone(memory: int, step: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a step in a process of its own; return its result, or the reason of its failure."""
    try:
        return run_apart(step, *arguments, initializer=limit_memory, initargs=(memory,))
    except Exception as error:  # Absent packages, and processes that ran out of memory.
        return {"not_measured": f"{type(error).__name__}: {error}".splitlines()[0]}


# Tables -------------------------------------------------------------------------------------------


def measure(folder: Path, num_nodes: int, memory: int) -> dict[str, Any]:
    """Return all steps for a graph of one size."""
    num_parts = max(1, round(num_nodes / PART_NODES))
    edges = num_nodes * AVG_DEGREE
    result: dict[str, Any] = {"nodes": num_nodes, "edges": edges, "parts": num_parts}
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        result["generate"] = alone(memory, generate, str(folder), num_nodes)
    for method in METHODS:
        result[method] = alone(memory, partition, str(folder), num_parts, method)
    done = [method for method in METHODS if "stages" in result[method]]
    result["train"] = (
        alone(memory, train, str(folder), done[0]) if done else {"not_measured": "no parts"}
    )
    return result


def exponent(edges: list[int], seconds: list[float]) -> float:
    """Return the slope of a line through the logarithms."""
    return float(np.polyfit(np.log(edges), np.log(seconds), 1)[0])


def seconds_of(cell: dict[str, Any]) -> float:
    """Return the time of a step's last stage."""
    return list(cell["stages"].values())[-1]["seconds"]


def peak_of(cell: dict[str, Any]) -> float:
    return max(stage["peak_bytes"] for stage in cell["stages"].values())


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def row_of(result: dict[str, Any], step: str) -> list[str]:
    cell = result[step]
    first = [f"{result['edges'] / 1e6:.1f}M", f"{result['nodes']:,}", step]
    if "not_measured" in cell:
        return [*first, f"not measured: {cell['not_measured']}", *[""] * 3]
    seconds, peak = seconds_of(cell), peak_of(cell)
    per_edge = f"{peak / result['edges']:.0f}"
    cut = f"{cell['cut']:.1%}" if "cut" in cell else ""
    return [*first, f"{seconds:.1f} s", gibibytes(peak), per_edge, cut]


def stage_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the memory of each stage of training on the largest graph."""
    return [
        [
            f"{result['edges'] / 1e6:.1f}M",
            name,
            f"{stage['seconds']:.1f} s",
            gibibytes(stage["peak_bytes"]),
            f"{stage['peak_bytes'] / result['edges']:.0f}",
        ]
        for name, stage in result["train"]["stages"].items()
    ]


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--root", default="data", help="where graphs are kept, 2.9 GB the largest")
    parser.add_argument("--nodes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--memory", type=float, default=20.0, help="GiB that a process may take")
    args = parser.parse_args()

    results = []
    for nodes in args.nodes:
        folder = Path(args.root) / f"planted_disk_{nodes}"
        results.append(measure(folder, nodes, int(args.memory * 2**30)))
        print(results[-1], flush=True)
    steps = [step for step in ("generate", *METHODS, "train") if any(step in r for r in results)]
    rows = [row_of(result, step) for step in steps for result in results if step in result]
    header = ["edges", "nodes", "step", "seconds", "peak", "bytes per edge", "edges cut"]
    tables = [markdown(header, rows)]
    trained = [result for result in results if "stages" in result["train"]]
    if trained:
        header = ["edges", "stage of training", "seconds", "peak", "bytes per edge"]
        tables.append(markdown(header, stage_rows(trained[-1])))
    exponents = {}
    for step in steps:
        cells = [r for r in results if "stages" in r.get(step, {})]
        if len(cells) > 1:
            times = [seconds_of(r[step]) for r in cells]
            exponents[step] = exponent([r["edges"] for r in cells], times)
    if exponents:
        told = ", ".join(f"{step} {value:.2f}" for step, value in exponents.items())
        tables.append(f"Exponents of time over edges: {told}.")
    save(
        "hundred_million",
        {"memory_gib": args.memory, "results": results, "exponents": exponents},
        "\n\n".join(tables),
    )


if __name__ == "__main__":
    main()
