"""Bandwidth of pulls and pushes, against a plain copy of the same bytes.

    python benchmarks/bandwidth.py
    python benchmarks/bandwidth.py --device cuda --quick    # a minute

A pull gathers rows by index, a push scatters them by index or copies contiguous ranges; both are
those of ``gas.History``, checks included. ``pull`` is a call whose result is given up before the
next, so that its memory is used again. The copy is ``Tensor.copy_`` between two buffers of the size
of the rows moved; ``index_select`` is PyTorch's own, as it is called, into a new tensor whose pages
the system has to clear first, and also into a tensor that is used again. GB/s count the bytes of
decoded rows once.

On a CUDA device rows go between a store and the device: the copy is one between pinned memory and
the device, in the direction of the rows, or within the device for a store there. ``pull`` gets its
index as loaders yield it, in host memory, ``ids there`` one that is on the device already. A call
ends when the device has done everything.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from common import add_options, make_parser, markdown, read_options, save, time_in_turn
from tqdm import tqdm

import gas

# Of a table, and of the rows that a call moves: several times what the caches hold.
TABLE_BYTES = {"cpu": 512 * 2**20, "cuda": 2**30}
MOVED_BYTES = {"cpu": 64 * 2**20, "cuda": 128 * 2**20}
PARTS = 8  # As many ranges as a batch has parts.
GOAL, GOAL_BYTES = 0.85, 512  # Of the bandwidth of a copy, for rows of so many bytes and more.


def ranges_of(n: int, num_rows: int) -> tuple[list[int], list[int]]:
    """Return offsets and counts of as many rows, spread over the table."""
    return [i * (num_rows // PARTS) for i in range(PARTS)], [n // PARTS] * PARTS


def index_of(n: int, num_rows: int, ordered: bool) -> torch.Tensor:
    index = torch.randperm(num_rows)[:n]
    return index.sort().values if ordered else index


def sizes(width: int, device: str) -> tuple[int, int]:
    """Return rows of a table, and of a call: as many for each part."""
    part = MOVED_BYTES[device] // (4 * width * PARTS)
    return TABLE_BYTES[device] // (4 * width), part * PARTS


def rates(times: dict[str, dict[str, float]], num_bytes: int) -> dict[str, float]:
    """Return GB/s of every contender."""
    return {name: num_bytes / t["median"] / 1e9 for name, t in times.items()}


def measure(width: int, codec: str, ordered: bool, repeats: int) -> dict[str, float]:
    """Return GB/s of every contender in host memory, for rows of one width."""
    num_rows, n = sizes(width, "cpu")
    history = gas.History(num_rows, width, dtype=codec)
    history.push(torch.randn(num_rows, width))
    index = index_of(n, num_rows, ordered)
    rows, out = torch.randn(n, width), torch.zeros(n, width)
    offset, count = ranges_of(n, num_rows)
    contenders = {
        "copy": lambda: out.copy_(rows),
        "pull": lambda: history.start_pull(index).wait(),
        "push": lambda: history.push(rows, index),
        "push ranges": lambda: history.push(rows, None, offset, count),
    }
    if codec == "float32":
        table = history.emb
        contenders["index_select, reused"] = lambda: torch.index_select(table, 0, index, out=out)
        contenders["index_select"] = lambda: torch.index_select(table, 0, index)
    return rates(time_in_turn(contenders, repeats, warm_up=2), rows.nbytes)


def measure_device(
    store: str, width: int, codec: str, ordered: bool, repeats: int, device: str
) -> dict[str, float]:
    """Return GB/s between a store and a device, and of plain copies that way."""
    num_rows, n = sizes(width, device)
    history = gas.History(num_rows, width, dtype=codec, store=store).to(device)
    history.push(torch.randn(num_rows, width, device=device))
    history.wait()
    index = index_of(n, num_rows, ordered)
    on_device = index.to(device)
    rows, out = (torch.randn(n, width, device=device) for _ in range(2))
    offset, count = ranges_of(n, num_rows)
    other = rows.clone() if store == "device" else rows.cpu()
    if store != "device" and device == "cuda":
        other = other.pin_memory()

    def push(index: torch.Tensor | None, *where: list[int]) -> None:
        history.push(rows, index, *where)
        history.wait()  # A worker may have to write.

    contenders = {
        "copy in": lambda: out.copy_(other, non_blocking=True),
        "copy out": lambda: other.copy_(rows, non_blocking=True),
        "pull": lambda: history.start_pull(index).wait(),
        "pull, ids there": lambda: history.start_pull(on_device).wait(),
        "push": lambda: push(index),
        "push ranges": lambda: push(None, offset, count),
    }
    if store == "device" and codec == "float32":
        table = history.emb
        contenders["index_select"] = lambda: torch.index_select(table, 0, on_device, out=out)
    found = rates(time_in_turn(contenders, repeats, warm_up=2, device=device), rows.nbytes)
    history.close()
    return found


def row_of(speed: dict[str, float]) -> list[str]:
    """Return a row of the table of host memory."""
    return [
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


def device_row_of(speed: dict[str, float]) -> list[str]:
    """Return a row of the table of a device."""
    selected = speed.get("index_select")
    return [
        f"{speed['copy in']:.1f}",
        f"{speed['pull']:.1f}",
        f"{speed['pull'] / speed['copy in']:.0%}",
        f"{speed['pull, ids there']:.1f}",
        f"{speed['pull, ids there'] / speed['copy in']:.0%}",
        f"{speed['pull, ids there'] / selected:.2f}x" if selected else "-",
        f"{speed['copy out']:.1f}",
        f"{speed['push']:.1f}",
        f"{speed['push ranges']:.1f}",
        f"{speed['push ranges'] / speed['copy out']:.0%}",
    ]


HEADER = [
    "copy, GB/s", "pull", "pull / copy", "pull / index_select", "pull / index_select, reused",
    "push by index", "push ranges", "push ranges / copy",
]  # fmt: skip
DEVICE_HEADER = [
    "copy to the device, GB/s", "pull", "pull / copy", "ids there", "ids there / copy",
    "ids there / index_select", "copy from the device, GB/s", "push by index", "push ranges",
    "push ranges / copy",
]  # fmt: skip


def goal(results: list[dict[str, Any]]) -> str:
    """Compare pinned memory with its goal."""
    found = [
        case["gb_per_s"]["pull, ids there"] / case["gb_per_s"]["copy in"]
        for case in results
        if (case["store"], case["codec"]) == ("pinned", "float32")
        and 4 * case["width"] >= GOAL_BYTES
    ]
    if not found:
        return ""
    return (
        f"\n\nPinned, float32, rows of {GOAL_BYTES} bytes and more, ids there: {min(found):.0%} of "
        f"a copy at least. The goal is {GOAL:.0%}."
    )


def main() -> None:
    parser = make_parser(__doc__, root=False)
    add_options(parser, "bandwidth")
    parser.add_argument("--repeats", type=int, help="(default: 11, with --quick 5)")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--codecs", nargs="*", default=["bfloat16", "float16", "int8"])
    parser.add_argument("--codec-widths", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--stores", nargs="*", default=["device", "pinned", "host"])
    args = read_options(parser)
    if args.quick:
        args.widths, args.codecs, args.codec_widths = [16, 128, 512], ["int8"], [256]
    repeats = args.repeats or (5 if args.quick else 11)
    on_device = args.device != "cpu"

    results = []
    rows = []
    orders = (False,) if on_device and args.quick else (False, True)
    cases = [(w, "float32", ordered) for w in args.widths for ordered in orders]
    cases += [(w, codec, False) for codec in args.codecs for w in args.codec_widths]
    stores = args.stores if on_device else ["host"]
    for store, (width, codec, ordered) in tqdm(list(itertools.product(stores, cases))):
        if on_device:
            speed = measure_device(store, width, codec, ordered, repeats, args.device)
            cells = [store, *device_row_of(speed)]
        else:
            speed = measure(width, codec, ordered, repeats)
            cells = row_of(speed)
        kind = {"store": store, "width": width, "codec": codec, "sorted": ordered}
        results.append({**kind, "gb_per_s": speed})
        rows.append(
            [4 * width if on_device else width, codec, "sorted" if ordered else "random", *cells]
        )
    if on_device:
        header = ["bytes of a row", "stored as", "index", "store", *DEVICE_HEADER]
    else:
        header = ["width", "stored as", "index", *HEADER]
    content = {
        "table_bytes": TABLE_BYTES[args.device],
        "moved_bytes": MOVED_BYTES[args.device],
        "cases": results,
    }
    save(args.name, content, markdown(header, rows) + goal(results))


if __name__ == "__main__":
    main()
