"""Time and memory of an epoch by the allocator of the process, where tensors are large.

    python benchmarks/allocators.py --root data
    python benchmarks/allocators.py --root data --nodes 200000 --rounds 1

glibc gives blocks of 32 MiB and more back to the system as soon as they are freed, which clears
each page when it hands it out again. Such blocks are tensors of 65,536 rows of 128 channels. A
GraphSAGE of 3 layers, 128 channels and batch norms is trained by ``gas.train_epoch`` on a planted
graph of 20 edges per node, with histories on 512 parts, 64 per batch, and in our own full batch.
Every process has one allocator, trains one epoch to warm up and then three, of which the median
counts; processes run in turn, and the median of several rounds is in the table. The time of the
system is that of all threads. jemalloc and tcmalloc are those of Debian's packages libjemalloc2 and
libtcmalloc-minimal4, without which they are left out.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from ctypes.util import find_library
from typing import Any

import torch
from common import make_parser, markdown, save
from time_to_accuracy import make_net, read_graph

import gas
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.training import FullBatch, train_epoch

WAYS = {"histories": 512, "full batch": 1}
EPOCHS = 3
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "glibc, huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "glibc, keeping all blocks": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
    "jemalloc, keeping all blocks": {
        "LD_PRELOAD": "jemalloc",
        "MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1",
    },
    "tcmalloc": {"LD_PRELOAD": "tcmalloc_minimal"},
}


def work(root: str, nodes: int, way: str) -> dict[str, float]:
    """Train in this process; return seconds of an epoch, those of the system, and the peak."""
    data = read_graph(root, f"planted:{nodes}")
    model = gas.to_scalable(make_net(data, "SAGE", "batch", 0), data)
    graph = gas.cluster(data, WAYS[way], model=model, log=False, in_place=True)
    is_whole = WAYS[way] == 1
    if is_whole:
        batches: Any = FullBatch(graph, layout="fused")
    else:
        batches = gas.SubgraphLoader(graph, batch_size=64, shuffle=True, log=False)
        model.refresh(graph, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    times, systems = [], []
    for number in range(1 + EPOCHS):
        if number == 1:
            reset_peak_rss()
        start, system = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
        train_epoch(model, batches, optimizer, grad_norm=1.0, full_batch=is_whole)
        times.append(time.perf_counter() - start)
        systems.append(resource.getrusage(resource.RUSAGE_SELF).ru_stime - system)
    found = {"seconds": times, "system": systems}
    middle = {name: statistics.median(each[1:]) for name, each in found.items()}
    return {**middle, "peak": float(peak_rss_bytes())}


def run(root: str, nodes: int, way: str, name: str) -> dict[str, float] | None:
    """Train in a process with an allocator; ``None`` if it isn't installed."""
    chosen = dict(ALLOCATORS[name])
    if "LD_PRELOAD" in chosen:
        library = find_library(chosen["LD_PRELOAD"])
        if library is None:
            return None
        chosen["LD_PRELOAD"] = library
    command = [sys.executable, "-W", "ignore", __file__, "--root", root, "--nodes", str(nodes)]
    done = subprocess.run(
        [*command, "--worker", way], env={**os.environ, **chosen}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__, name="allocators")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=WAYS, help="internal")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.root, args.nodes, args.worker)))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(args.rounds):
        for way in WAYS:
            for name in ALLOCATORS:
                one = run(args.root, args.nodes, way, name)
                if one is not None:
                    found.setdefault(way, {}).setdefault(name, []).append(one)
                    print(way, name, one, flush=True)
    rows = []
    for way, runs in found.items():
        first = statistics.median(one["seconds"] for one in runs["glibc"])
        for name, every in runs.items():
            middle = {key: statistics.median(one[key] for one in every) for key in every[0]}
            ratio = f"{middle['seconds'] / first:.2f}"
            peak = f"{middle['peak'] / 2**30:.2f} GiB"
            rows.append([
                way, name, f"{middle['seconds']:.1f} s", ratio, f"{middle['system']:.1f} s", peak
            ])  # fmt: skip
    header = ["way", "allocator", "epoch", "over glibc's", "of it the system's", "peak"]
    content = {"nodes": args.nodes, "rounds": args.rounds, "found": found}
    save(args.name, content, markdown(header, rows))


if __name__ == "__main__":
    main()
