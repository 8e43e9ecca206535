"""Bandwidth of pulls and pushes in host memory, against a plain copy of the same bytes.

    python benchmarks/bandwidth.py

A pull gathers rows by index, a push scatters them by index or copies contiguous ranges; both are
those of ``gas.History``, checks included. ``pull`` is a call whose result is given up before the
next, so that its memory is used again. The copy is ``Tensor.copy_`` between two buffers of the size
of the rows moved; ``index_select`` is PyTorch's own, as it is called, into a new tensor whose pages
the system has to clear first, and also into a tensor that is used again. GB/s count the bytes of
decoded rows once.
"""

from __future__ import annotations

import argparse

import torch
from common import markdown, save, time_in_turn
from tqdm import tqdm

import gas

TABLE_BYTES = 512 * 2**20
MOVED_BYTES = 64 * 2**20


def measure(width: int, codec: str, ordered: bool, repeats: int) -> dict[str, float]:
    """GB/s of every contender for rows of one width."""
    num_rows, n = TABLE_BYTES // (4 * width), MOVED_BYTES // (4 * width)
    history = gas.History(num_rows, width, dtype=codec)
    history.push(torch.randn(num_rows, width))
    index = torch.randperm(num_rows)[:n]
    index = index.sort().values if ordered else index
    rows, out = torch.randn(n, width), torch.zeros(n, width)
    part = n // 8  # As many ranges as a batch has parts.
    offset, count = [i * (num_rows // 8) for i in range(8)], [part] * 8
    contenders = {
        "copy": lambda: out.copy_(rows),
        "pull": lambda: history.start_pull(index).wait(),
        "push": lambda: history.push(rows, index),
        "push ranges": lambda: history.push(rows[: 8 * part], None, offset, count),
    }
    if codec == "float32":
        table = history.emb
        contenders["index_select, reused"] = lambda: torch.index_select(table, 0, index, out=out)
        contenders["index_select"] = lambda: torch.index_select(table, 0, index)
    times = time_in_turn(contenders, repeats, warm_up=2)
    return {name: n * width * 4 / t["median"] / 1e9 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--codecs", nargs="*", default=["bfloat16", "float16", "int8"])
    parser.add_argument("--codec-widths", type=int, nargs="*", default=[64, 256])
    args = parser.parse_args()

    results = []
    rows = []
    cases = [(w, "float32", ordered) for w in args.widths for ordered in (False, True)]
    cases += [(w, codec, False) for codec in args.codecs for w in args.codec_widths]
    for width, codec, ordered in tqdm(cases):
        speed = measure(width, codec, ordered, args.repeats)
        results.append({"width": width, "codec": codec, "sorted": ordered, "gb_per_s": speed})
        rows.append(
            [
                width,
                codec,
                "sorted" if ordered else "random",
                *(f"{speed[name]:.1f}" for name in ("copy", "pull")),
                f"{speed['pull'] / speed['copy']:.0%}",
                *(
                    f"{speed['pull'] / speed[name]:.1f}x" if name in speed else "-"
                    for name in ("index_select", "index_select, reused")
                ),
                f"{speed['push']:.1f}",
                f"{speed['push ranges']:.1f}",
                f"{speed['push ranges'] / speed['copy']:.0%}",
            ]
        )
    header = [
        "width", "stored as", "index", "copy, GB/s", "pull", "pull / copy", "pull / index_select",
        "pull / index_select, reused", "push by index", "push ranges", "push ranges / copy",
    ]  # fmt: skip
    save("bandwidth", {"table_bytes": TABLE_BYTES, "cases": results}, markdown(header, rows))


if __name__ == "__main__":
    main()
