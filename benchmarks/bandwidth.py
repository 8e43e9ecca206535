"""Bandwidth of pulls and pushes in host memory, against a plain copy of the same bytes.

    python benchmarks/bandwidth.py

A pull gathers rows by index, a push scatters them by index or copies contiguous ranges. The copy is
``Tensor.copy_`` between two buffers of the size of the rows moved. Pulls into a buffer that is
reused are listed beside pulls into a new tensor, whose pages the system has to clear first; the
copy and PyTorch's own ``index_select`` are measured in both ways, too. GB/s count the bytes of the
rows once.
"""

from __future__ import annotations

import argparse

import torch
from common import markdown, save, time_in_turn
from tqdm import tqdm

from gas import _native

TABLE_BYTES = 512 * 2**20
MOVED_BYTES = 64 * 2**20


def measure(width: int, ordered: bool, repeats: int) -> dict[str, float]:
    """GB/s of every contender for float32 rows of one width."""
    num_rows, n = TABLE_BYTES // (4 * width), MOVED_BYTES // (4 * width)
    table = torch.randn(num_rows, width)
    index = torch.randperm(num_rows)[:n]
    index = index.sort().values if ordered else index
    rows, out = torch.randn(n, width), torch.zeros(n, width)
    part = n // 8  # As many ranges as a batch has parts.
    ranges = [(i * (num_rows // 8), i * part) for i in range(8)]

    def push_ranges() -> None:
        for to, begin in ranges:
            table[to : to + part] = rows[begin : begin + part]

    times = time_in_turn(
        {
            "copy": lambda: out.copy_(rows),
            "pull": lambda: _native.gather_rows(table, index, out),
            "index_select": lambda: torch.index_select(table, 0, index, out=out),
            "push": lambda: _native.scatter_rows(table, index, rows),
            "push ranges": push_ranges,
            "copy, new": lambda: rows.clone(),
            "pull, new": lambda: _native.gather_rows(table, index),
            "index_select, new": lambda: torch.index_select(table, 0, index),
        },
        repeats,
        warm_up=2,
    )
    return {name: n * width * 4 / t["median"] / 1e9 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512, 1024])
    args = parser.parse_args()

    results = []
    rows = []
    for width in tqdm(args.widths):
        for ordered in (False, True):
            speed = measure(width, ordered, args.repeats)
            results.append({"width": width, "sorted": ordered, "gb_per_s": speed})
            rows.append(
                [
                    4 * width,
                    "sorted" if ordered else "random",
                    *(f"{speed[name]:.1f}" for name in ("copy", "pull", "index_select")),
                    f"{speed['pull'] / speed['copy']:.0%}",
                    f"{speed['pull'] / speed['index_select']:.1f}x",
                    f"{speed['push']:.1f}",
                    f"{speed['push ranges']:.1f}",
                    *(f"{speed[f'{name}, new']:.1f}" for name in ("copy", "pull", "index_select")),
                    f"{speed['pull, new'] / speed['index_select, new']:.1f}x",
                ]
            )
    header = [
        "bytes per row",
        "index",
        "copy, GB/s",
        "pull",
        "index_select",
        "pull / copy",
        "pull / index_select",
        "push by index",
        "push ranges",
        "copy, new tensor",
        "pull, new tensor",
        "index_select, new tensor",
        "pull / index_select, new",
    ]
    save("bandwidth", {"table_bytes": TABLE_BYTES, "cases": results}, markdown(header, rows))


if __name__ == "__main__":
    main()
