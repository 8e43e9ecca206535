"""Speed and memory of importing tables and arrays into a graph folder.

    python benchmarks/importing.py

The edges of a planted graph, with weights, as text and as arrays, are imported into a folder, each
in a process of its own: the edges of the source over the seconds from its first line to the folder,
and the peak of memory that the process adds to what its libraries take. ``memory`` is what
:func:`gas.datasets.import_graph` may take for reading and sorting; ids and numbers of edges by node
come on top of it. Files of the source are in the system's memory, what is written reaches the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import make_parser, markdown, run_apart, save

from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.datasets import import_graph, write_planted_partition


def write_sources(folder: Path, num_nodes: int) -> int:
    """Write the edges as arrays, and as text; their number."""
    data = write_planted_partition(folder / "arrays", num_nodes, num_features=16)
    src, dst = data.edge_index.numpy()
    (folder / "text").mkdir()
    with (folder / "text" / "edges.csv").open("w") as stream:
        stream.write("source,target\n")
        for first in range(0, len(src), 1 << 20):
            rows = np.stack([src[first : first + (1 << 20)], dst[first : first + (1 << 20)]], 1)
            stream.write("\n".join(f"{a},{b}" for a, b in rows.tolist()) + "\n")
    return len(src)


def measure(source: Path, out: Path, memory: str) -> dict[str, float]:
    """Import once; return the seconds, and the peak bytes of memory beyond the libraries'."""
    reset_peak_rss()
    before = peak_rss_bytes()
    start = time.perf_counter()
    import_graph(source, out, memory=memory, log=False)
    return {"seconds": time.perf_counter() - start, "peak": peak_rss_bytes() - before}


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--nodes", type=int, default=500_000, help="with 20 edges each")
    parser.add_argument("--memory", nargs="*", default=["100MB", "1GB"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_edges = write_sources(folder, args.nodes)
        for kind in ("arrays", "text"):
            for memory in args.memory:
                found = []
                for number in range(args.repeats):
                    out = folder / f"{kind}-{memory}-{number}"
                    found.append(run_apart(measure, folder / kind, out, memory))
                medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
                cases.append({"source": kind, "memory": memory, **medians})
    rows = [
        [
            case["source"],
            case["memory"],
            f"{case['seconds']:.1f} s",
            f"{num_edges / case['seconds'] / 1e6:.2f} M",
            f"{case['peak'] / 2**20:.0f} MiB",
        ]
        for case in cases
    ]
    header = ["source", "memory", "time", "edges per second", "peak, beyond libraries"]
    content = {"nodes": args.nodes, "edges": num_edges, "cases": cases}
    text = f"{args.nodes:,} nodes, {num_edges:,} edges, 16 features\n\n"
    save("importing", content, text + markdown(header, rows))


if __name__ == "__main__":
    main()
