"""I/O overhead of histories in a training epoch: Figure 4 of GNNAutoScale.

    python benchmarks/io_overhead.py
    python benchmarks/io_overhead.py --device cuda --quick    # a minute

A GIN of 4 layers trains on batches of 4,000 nodes, or ``--nodes``. Every node of a batch has the
same number of neighbours inside it; every node of the halo has as many inside it, too, so that the
ratio of inter- to intra-connectivity is the number of halo nodes over that of in-batch nodes. It
goes from 0 to 3.

The overhead is the time of an epoch over that with ``io="none"``, which moves nothing. ``serial``
moves rows when the model needs them, ``concurrent`` starts when the model is called,
``prefetch`` one batch earlier, and ``expected`` has the system read ahead what the next batch will
pull (of packed rows alone), so that rows are those of ``serial``. ``disk`` is a file whose pages
are in memory; for ``cold disk`` the system is told to forget them before every epoch; ``packed`` is
what ``model.pack`` makes of it. All modes of a row are measured in turn; an overhead is the median
over rounds of the ratio within a round. How fast the disk is, is measured in the same run: files
that the system has forgotten, read from the beginning to the end, a MiB at a time. Widths are
compared with float32, codecs at one width and the largest halo.

On a CUDA device the layers are those of ``gas.nn``: the faster they are, the more histories add.
Batches are moved there beforehand (``batches``: there), or by ``gas.PrefetchLoader`` in all modes,
``none`` included (moved).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import (
    RESULTS,
    add_options,
    imports,
    make_parser,
    markdown,
    read_options,
    save,
    synchronize,
)
from torch_geometric.data import Data
from torch_geometric.nn import GINConv
from tqdm import tqdm

import gas
from gas.graph.layout import find_layout
from gas.history import DiskStore
from gas.history.packing import Packing
from gas.loader import SubData
from gas.native.graph import coo_to_csr

NUM_LAYERS = 4
NUM_BATCHES = 4
GRAPH_BATCHES = 50  # As large as the graph.
AHEAD = ("expected", "prefetch")
MODES = ("none", "serial", "concurrent", "expected", "prefetch")
ON_DEVICE = ("none", "serial", "concurrent", "prefetch")  # Where nothing is packed.
# Batches are trained on so many times in an epoch: on a device one is over before a thread starts.
TIMES = {"cpu": 1, "cuda": 4}
MADV_DONTNEED = 4


class GIN(gas.ScalableGNN):
    """GIN with equal input, hidden and output widths."""

    def __init__(self, num_nodes: int, width: int, **kwargs: object) -> None:
        super().__init__(num_nodes, width, NUM_LAYERS, **kwargs)
        self.convs = torch.nn.ModuleList(
            GINConv(
                torch.nn.Sequential(
                    torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
                )
            )
            for _ in range(NUM_LAYERS)
        )

    def forward(self, x: torch.Tensor, adj_t: torch.Tensor, *args: object) -> torch.Tensor:
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv((x, x[: args[0]]), adj_t).relu()
            x = self.push_and_pull(history, x, *args)
        return self.convs[-1]((x, x[: args[0]]), adj_t)


def make_batches(
    nodes: int, width: int, ratio: float, degree: int, layout: str = "csr"
) -> list[SubData]:
    """Return batches of so many nodes, whose halo is spread over the whole graph."""
    halo = round(ratio * nodes)
    batches = []
    for number in range(NUM_BATCHES):
        first = number * nodes
        elsewhere = torch.randperm((GRAPH_BATCHES - 1) * nodes)[:halo].sort().values
        elsewhere += nodes * (elsewhere >= first)
        inside = torch.randint(nodes, (nodes, degree))
        into = torch.randint(nodes, (halo * degree,))
        row = torch.cat([torch.arange(nodes).repeat_interleave(degree), into])
        col = torch.arange(nodes, nodes + halo).repeat_interleave(degree)
        rowptr, col, _ = coo_to_csr(row, torch.cat([inside.view(-1), col]), nodes)
        adj_t = find_layout(layout).make(rowptr, col, None, nodes + halo)
        data = Data(x=torch.randn(nodes + halo, width), adj_t=adj_t)
        n_id = torch.cat([torch.arange(first, first + nodes), elsewhere])
        offset, count = torch.tensor([first]), torch.tensor([nodes])
        batches.append(SubData(data, nodes, n_id, offset, count))
    return batches


def make_cold(model: GIN) -> None:
    """Write dirty pages, and drop the files from the page cache."""
    for history in model.histories:
        history.wait()
        store = history.store
        assert isinstance(store, DiskStore)
        address = ctypes.c_void_p(store.table.data_ptr())
        if ctypes.CDLL(None).madvise(address, ctypes.c_size_t(store.nbytes), MADV_DONTNEED):
            raise OSError("madvise failed")
        file = os.open(store.path, os.O_RDONLY)
        forget(file)
        os.close(file)
        if store.packed is not None:
            forget(store.packed.file)


def forget(file: int) -> None:
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def pack(model: GIN, batches: list[SubData]) -> None:
    """Pack rows as ``model.pack`` does for these batches; other parts of the graph read nothing."""
    halos = [batch.n_id[batch.batch_size :] for batch in batches]
    halos += [torch.empty(0, dtype=torch.long)] * (GRAPH_BATCHES - len(batches))
    nodes = batches[0].batch_size
    packing = Packing(torch.arange(0, GRAPH_BATCHES * nodes + 1, nodes), halos)
    for history in model.histories:
        history.store.packed = gas.scalable.pack_rows(history, packing)


def read_all_halos(model: GIN, batches: list[SubData]) -> tuple[float, int]:
    """Pull the halo of every batch without computing; return the seconds and the bytes read."""
    make_cold(model)
    before = sum(history.store.packed.moved_bytes for history in model.histories)
    start = time.perf_counter()
    gas.scalable.read_ahead(model, batches[0].batch_size, batches[0].n_id)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        if following is not None:  # As PrefetchLoader does.
            gas.scalable.read_ahead(model, following.batch_size, following.n_id)
        own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
        for pull in [history.start_pull(halo, 0, own) for history in model.histories]:
            pull.wait()
    seconds = time.perf_counter() - start
    return seconds, sum(h.store.packed.moved_bytes for h in model.histories) - before


def read_in_order(file: int, num_bytes: int) -> float:
    """Read a file that is not in the page cache, a MiB at a time; return the seconds."""
    forget(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    buffer, begin = bytearray(1 << 20), 0
    start = time.perf_counter()
    while begin < num_bytes:
        begin += os.preadv(file, [buffer], begin)
    return time.perf_counter() - start


def bandwidth(model: GIN, batches: list[SubData], folder: str, rounds: int = 9) -> dict[str, float]:
    """Measure pulls of packed rows against a plain read of as many bytes, in turn."""
    model.io = "concurrent"
    _, num_bytes = read_all_halos(model, batches)
    rates: dict[str, list[float]] = {"pulled": [], "in_order": []}
    with tempfile.TemporaryFile(dir=folder) as stream:
        for _ in range(-(-num_bytes // 2**20)):
            stream.write(os.urandom(2**20))
        stream.flush()
        for _ in range(rounds if num_bytes else 0):
            rates["pulled"].append(num_bytes / read_all_halos(model, batches)[0])
            rates["in_order"].append(num_bytes / read_in_order(stream.fileno(), num_bytes))
    if not num_bytes:
        return {}
    shares = [a / b for a, b in zip(rates["pulled"], rates["in_order"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"bytes": num_bytes, "share": statistics.median(shares), **medians}


def run_epoch(model: GIN, batches: list[SubData], mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That "none" is wrong.
        model.io = "concurrent" if mode in AHEAD else mode
    model.prefetch = int(mode == "prefetch")
    there = batches[0].data.x.device == model.device
    loader = gas.PrefetchLoader(batches, model) if mode in AHEAD or not there else batches
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args).sum().backward()
    for history in model.histories:
        history.wait()
    synchronize(model.device.type)


def measure(
    model: GIN,
    batches: list[SubData],
    seconds: float,
    prepare: Callable[[], None] | None,
    modes: tuple[str, ...] = MODES,
) -> dict[str, object]:
    """Measure an epoch in every mode in turn, and the overheads over "none"."""
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    end = None
    while end is None or time.perf_counter() < end or len(times["none"]) < 5:
        for mode in modes:
            if prepare is not None and mode != "none":
                prepare()
            start = time.perf_counter()
            run_epoch(model, batches, mode)
            if end is not None:
                times[mode].append(time.perf_counter() - start)
        if end is None:  # The first round warms up.
            end = time.perf_counter() + seconds
    return {
        "rounds": len(times["none"]),
        "seconds": {mode: statistics.median(values) for mode, values in times.items()},
        "overhead": {
            mode: statistics.median(
                a / b - 1 for a, b in zip(times[mode], times["none"], strict=True)
            )
            for mode in modes[1:]
        },
    }


def plot(cases: list[dict[str, object]], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def key(case: dict[str, object]) -> tuple[object, ...]:
        return case["store"], case["width"]

    of_all = {"codec": "float32", "batches": "there", "nodes": cases[0]["nodes"]}
    chosen = [case for case in cases if of_all.items() <= case.items()]
    panels = sorted({key(case) for case in chosen}, key=str)
    columns = sorted({width for _, width in panels})
    stores = list(dict.fromkeys(case["store"] for case in chosen))
    figure, axes = plt.subplots(
        len(stores), len(columns), figsize=(3.2 * len(columns), 2.6 * len(stores)), squeeze=False,
        sharex=True, sharey="row", layout="constrained",
    )  # fmt: skip
    for (row, store), (column, width) in itertools.product(enumerate(stores), enumerate(columns)):
        axis = axes[row][column]
        lines = [case for case in chosen if key(case) == (store, width)]
        for mode, style in zip(lines[0]["overhead"], ("o-", "s-", "d-", "^-"), strict=False):
            overhead = [100 * c["overhead"][mode] for c in lines]
            axis.plot([c["ratio"] for c in lines], overhead, style, label=mode, markersize=4)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_title(f"{store}, width {width}", fontsize=10)
        if row == len(stores) - 1:
            axis.set_xlabel("inter- / intra-connectivity")
        if column == 0:
            axis.set_ylabel("overhead, %")
    axes[0][0].legend(fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


def table_of(cases: list[dict[str, object]]) -> str:
    """Return the table; columns that no case has something to say of are left out."""
    rows = []
    for case in cases:
        rates = case.get("bandwidth")
        overheads = {mode: f"{100 * share:+.0f} %" for mode, share in case["overhead"].items()}
        moved = (NUM_LAYERS - 1) * case["nodes"] * (1 + case["ratio"]) * case["row_bytes"] / 2**20
        rows.append(
            {
                "store": case["store"],
                "codec": case["codec"],
                "nodes": f"{case['nodes']:,}",
                "width": case["width"],
                "inter / intra": f"{case['ratio']:g}",
                "batches": case["batches"],
                "moved per batch": f"{moved:.1f} MiB",
                "batch, io=none": f"{1000 * case['seconds']['none'] / case['batch_count']:.2f} ms",
                **overheads,
                "read": f"{rates['pulled'] / 2**20:.0f} MiB/s" if rates else "",
                "of the disk": f"{100 * rates['share']:.0f} %" if rates else "",
            }
        )
    header = [key for key in rows[0] if any(row[key] != "" for row in rows)]
    return markdown(header, [[row[key] for key in header] for row in rows])


def goal(cases: list[dict[str, object]]) -> str:
    """Compare pinned memory with its goal; return nothing without pinned memory."""
    found = [
        case["overhead"]["concurrent"]
        for case in cases
        if case["store"] == "pinned" and case["codec"] == "float32" and case["ratio"] <= 2
    ]
    if not found:
        return ""
    return (
        f"\n\nPinned, float32, up to 2 and concurrent: {100 * max(found):+.1f} % at most. The goal "
        "is 5 %."
    )


class Setting(NamedTuple):
    """Settings of a row."""

    store: str
    width: int
    codec: str
    ratio: float
    nodes: int
    batches: str = "there"


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the rows: codecs are compared at one width, widths with one codec."""
    if args.quick:
        return quick_settings(args)
    middle = args.widths[len(args.widths) // 2]
    kinds = [(w, "float32", ratio) for w in args.widths for ratio in args.ratios]
    kinds += [(middle, codec, args.ratios[-1]) for codec in args.codecs if codec != "float32"]
    ways = ("there", "moved") if args.device == "cuda" else ("there",)
    return [
        Setting(store, *kind, nodes, way)
        for store, nodes, kind, way in itertools.product(args.stores, args.nodes, kinds, ways)
    ]


def quick_settings(args: argparse.Namespace) -> list[Setting]:
    """Return rows of one width, and a few of larger batches and those that a loader moves."""
    if args.device == "cpu":
        return [Setting(store, 16, "float32", 1.0, 400) for store in ("host", "packed")]
    stores = ("device", "pinned", "host")
    rows = [
        Setting(store, 256, "float32", ratio, 4000) for store in stores for ratio in (0.0, 1.0, 2.0)
    ]
    rows += [Setting("pinned", 64, "float32", 2.0, 4000), Setting("pinned", 256, "int8", 2.0, 4000)]
    rows += [Setting("pinned", 256, "float32", 2.0, 32_000, way) for way in ("there", "moved")]
    return rows + [Setting("disk", 256, "float32", 1.0, 4000)]


def make_model(setting: Setting, device: str, folder: str) -> GIN:
    """Return a model whose histories have been written."""
    files = setting.store not in ("device", "pinned", "host")
    place, path = ("disk", folder) if files else (setting.store, None)
    num_nodes = GRAPH_BATCHES * setting.nodes
    model = GIN(num_nodes, setting.width, store=place, dtype=setting.codec, path=path)
    if device == "cuda":
        model = gas.nn.fuse(model)
    model = model.to(device)
    rows = torch.randn(num_nodes, setting.width, device=device)
    for history in model.histories:
        history.push(rows)
        history.wait()
    return model


def main() -> None:
    parser = make_parser(__doc__, root=False)
    add_options(parser, "io_overhead")
    parser.add_argument("--seconds", type=float, help="for each row (default: 6, --quick 1)")
    parser.add_argument("--degree", type=int, help="(default: 5, on a device 60 as the paper's)")
    parser.add_argument("--nodes", type=int, nargs="*", default=[4000], help="of a batch")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--ratios", type=float, nargs="*", help="(default: 0 1 2 3)")
    parser.add_argument("--codecs", nargs="*", default=["float32", "bfloat16", "float16", "int8"])
    parser.add_argument("--stores", nargs="*", help="(default: all that the device can have)")
    parser.add_argument("--folder", help="folder of the files (default: that of temporary files)")
    args = read_options(parser)
    device, times = args.device, TIMES[args.device]
    degree = args.degree or (60 if device == "cuda" else 5)
    seconds = args.seconds or (1.0 if args.quick else 6.0)
    args.ratios = args.ratios or [0.0, 1.0, 2.0, 3.0]
    files = ["disk", "cold disk", "packed", "cold packed"]
    args.stores = args.stores or [
        *(["device", "pinned"] if device == "cuda" else []),
        "host",
        *files,
    ]

    cases: list[dict[str, object]] = []

    def write() -> None:
        content = {"degree": degree, "num_layers": NUM_LAYERS, "device": device, "cases": cases}
        save(args.name, content, f"{table_of(cases)}{goal(cases)}")

    for setting in tqdm(settings_of(args)):
        torch.manual_seed(0)
        folder = tempfile.mkdtemp(prefix="gas-io-", dir=args.folder)
        store, layout = setting.store, "csr" if device == "cpu" else "fused"
        model = make_model(setting, device, folder)
        batches = make_batches(setting.nodes, setting.width, setting.ratio, degree, layout)
        if setting.batches == "there":
            batches = [batch.to(device) for batch in batches]
        if "packed" in store:
            pack(model, batches)
        prepare = (lambda model=model: make_cold(model)) if "cold" in store else None
        modes = MODES if device == "cpu" or "packed" in store else ON_DEVICE
        measured = measure(model, batches * times, seconds, prepare, modes)
        if store == "cold packed":
            measured["bandwidth"] = bandwidth(model, batches, folder)
        row_bytes = model.histories[0].codec.row_bytes(setting.width)
        model.close()
        shutil.rmtree(folder)
        batch_count = len(batches) * times
        cases.append(
            {**setting._asdict(), "row_bytes": row_bytes, "batch_count": batch_count, **measured}
        )
        if args.quick:  # A time limit may end it.
            write()
    write()
    if imports("matplotlib") and not args.quick:
        plot(cases, args.name)


if __name__ == "__main__":
    main()
