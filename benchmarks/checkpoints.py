"""Cost of checkpoints: writing them, also during training, and reading them.

    python benchmarks/checkpoints.py

A GCN of three layers of 128 trains on planted graphs, with histories in memory and in a file. All
of a graph take their turns in one run: an epoch; a checkpoint after it (all rows have changed); one
after a single batch (few have); an epoch beside which a checkpoint is written, and the call that
began it; and reading one. Writing waits for the disk. The bound is the time of reading the same
bytes once and writing them to a file that is synced, in the same run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import make_parser, markdown, save
from tqdm import tqdm

import gas
from gas.datasets.planted import planted_partition
from gas.training import train_epoch


def training(nodes: int, store: str) -> tuple[Any, ...]:
    """Return a model, its optimizer and its loader."""
    torch.manual_seed(0)
    data = planted_partition(nodes)
    data.train_mask = torch.ones(nodes, dtype=torch.bool)
    model = gas.models.GCN(nodes, data.x.size(1), 128, int(data.y.max()) + 1, 3, store=store)
    graph = gas.cluster(data, 64, model=model, log=False)
    loader = gas.SubgraphLoader(graph, batch_size=8, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model.predict(graph)
    return model, optimizer, loader


def size(path: Path) -> int:
    """Return the bytes of a checkpoint that no other shares."""
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)


def plain_copy(path: Path, to: Path) -> None:
    """Read the files of a checkpoint, and write them to one that is synced."""
    with to.open("wb") as out:
        for file in path.iterdir():
            with file.open("rb") as stream:
                shutil.copyfileobj(stream, out, 1 << 24)
        out.flush()
        os.fsync(out.fileno())
    to.unlink()


def measure(nodes: int, store: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Return seconds, the medians of some rounds, and bytes."""
    model, optimizer, loader = parts = training(nodes, store)
    times: dict[str, list[float]] = {}
    numbers: dict[str, Any] = {"nodes": nodes, "store": store}

    def clock(name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def epoch() -> None:
        train_epoch(model, loader, optimizer)

    def beside() -> None:
        written = clock("call", lambda: gas.save(folder, *parts, keep=2, background=True))
        epoch()
        written.result()

    epoch()
    for _ in tqdm(range(repeats), desc=f"{nodes:,} nodes, {store}", leave=False):
        clock("epoch", epoch)
        path = clock("save", lambda: gas.save(folder, *parts, keep=2))
        numbers["bytes"] = size(path)
        clock("copy", lambda path=path: plain_copy(path, folder / "copy"))
        batch = next(iter(loader))
        with torch.no_grad():
            model(batch)
        path = clock("few", lambda: gas.save(folder, *parts, keep=2))
        numbers["few_bytes"] = size(path)
        clock("beside", beside)
        clock("load", lambda: gas.load(folder, *parts))
    model.close()
    return {**numbers, **{name: statistics.median(values) for name, values in times.items()}}


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--nodes", type=int, nargs="*", default=[20_000, 200_000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where to write (a temporary one)")
    args = parser.parse_args()

    results = []
    for nodes in args.nodes:
        for store in ("host", "disk"):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                results.append(measure(nodes, store, args.repeats, Path(folder)))
    rows = [
        [
            f"{r['nodes']:,}",
            r["store"],
            f"{r['bytes'] / 2**20:.0f} MiB",
            f"{1000 * r['epoch']:.0f} ms",
            f"{1000 * r['save']:.0f} ms ({100 * r['save'] / r['epoch']:.0f} %)",
            f"{1000 * r['copy']:.0f} ms",
            f"{1000 * r['few']:.0f} ms, {r['few_bytes'] / 2**20:.0f} MiB",
            f"{100 * r['call'] / r['epoch']:.0f} %",
            f"+{100 * (r['beside'] / r['epoch'] - 1):.0f} %",
            f"{1000 * r['load']:.0f} ms",
        ]
        for r in results
    ]
    header = [
        "nodes", "histories", "checkpoint", "epoch", "written in place (of an epoch)",
        "copy of the same bytes", "after one batch", "beside: the call", "beside: the epoch",
        "read",
    ]  # fmt: skip
    save("checkpoints", {"results": results}, markdown(header, rows))


if __name__ == "__main__":
    main()
