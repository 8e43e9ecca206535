"""What reading and writing histories adds to a training epoch: Figure 4 of GNNAutoScale.

    python benchmarks/io_overhead.py

A GIN of 4 layers trains on batches of 4,000 nodes. Every node of a batch has the same number of
neighbours inside it; every node of the halo has as many inside it, too, so that the ratio of inter-
to intra-connectivity is the number of halo nodes over that of in-batch nodes. It goes from 0 to 3.

The overhead is the time of an epoch over that with ``io="none"``, which moves nothing. ``serial``
moves rows when the model asks for them, ``concurrent`` starts when the model is called, and
``prefetch`` one batch earlier. ``disk`` is a file whose pages are in memory; for ``cold disk`` the
system is told to forget them before every epoch. All four modes of a row are measured in turn; an
overhead is the median over rounds of the ratio within a round. Widths are compared with float32,
codecs at one width and the largest halo.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from common import RESULTS, imports, markdown, save
from torch_geometric.data import Data
from torch_geometric.nn import GINConv
from tqdm import tqdm

import gas
from gas.graph.layout import find_layout
from gas.history import DiskStore
from gas.loader import SubData
from gas.native.graph import coo_to_csr

NUM_LAYERS = 4
BATCH_NODES = 4000
NUM_BATCHES = 4
NUM_NODES = 50 * BATCH_NODES
MODES = ("none", "serial", "concurrent", "prefetch")
MADV_DONTNEED = 4


class GIN(gas.ScalableGNN):
    """A graph isomorphism network as wide at the input and output as inside."""

    def __init__(self, width: int, **kwargs: object) -> None:
        super().__init__(NUM_NODES, width, NUM_LAYERS, **kwargs)
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


def make_batches(width: int, ratio: float, degree: int) -> list[SubData]:
    """Batches whose halo is spread over the whole graph."""
    halo = round(ratio * BATCH_NODES)
    batches = []
    for number in range(NUM_BATCHES):
        first = number * BATCH_NODES
        elsewhere = torch.randperm(NUM_NODES - BATCH_NODES)[:halo].sort().values
        elsewhere += BATCH_NODES * (elsewhere >= first)
        inside = torch.randint(BATCH_NODES, (BATCH_NODES, degree))
        into = torch.randint(BATCH_NODES, (halo * degree,))
        row = torch.cat([torch.arange(BATCH_NODES).repeat_interleave(degree), into])
        col = torch.arange(BATCH_NODES, BATCH_NODES + halo).repeat_interleave(degree)
        rowptr, col, _ = coo_to_csr(row, torch.cat([inside.view(-1), col]), BATCH_NODES)
        adj_t = find_layout("csr").make(rowptr, col, None, BATCH_NODES + halo)
        data = Data(x=torch.randn(BATCH_NODES + halo, width), adj_t=adj_t)
        n_id = torch.cat([torch.arange(first, first + BATCH_NODES), elsewhere])
        offset, count = torch.tensor([first]), torch.tensor([BATCH_NODES])
        batches.append(SubData(data, BATCH_NODES, n_id, offset, count))
    return batches


def make_cold(model: GIN) -> None:
    """Writes what is only in memory, and has the system forget what it keeps of the files."""
    for history in model.histories:
        history.wait()
        store = history.store
        assert isinstance(store, DiskStore)
        store.flush()
        address = ctypes.c_void_p(store.table.data_ptr())
        if ctypes.CDLL(None).madvise(address, ctypes.c_size_t(store.nbytes), MADV_DONTNEED):
            raise OSError("madvise failed")
        file = os.open(store.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def run_epoch(model: GIN, batches: list[SubData], mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That "none" is wrong.
        model.io = "concurrent" if mode == "prefetch" else mode
    model.prefetch = int(mode == "prefetch")
    loader = gas.PrefetchLoader(batches, model) if mode == "prefetch" else batches
    for batch, *args in loader:
        model(batch.x, batch.adj_t, *args).sum().backward()
    for history in model.histories:
        history.wait()
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    model: GIN, batches: list[SubData], seconds: float, prepare: Callable[[], None] | None
) -> dict[str, object]:
    """The seconds of an epoch in every mode, in turn for some time, and overheads over "none"."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    end = None
    while end is None or time.perf_counter() < end or len(times["none"]) < 5:
        for mode in MODES:
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
            for mode in MODES[1:]
        },
    }


def plot(cases: list[dict[str, object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def key(case: dict[str, object]) -> tuple[object, ...]:
        return case["store"], case["width"]

    chosen = [case for case in cases if case["codec"] == "float32"]
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
        for mode, style in zip(MODES[1:], ("o-", "s-", "^-"), strict=True):
            overhead = [100 * c["overhead"][mode] for c in lines]
            axis.plot([c["ratio"] for c in lines], overhead, style, label=mode, markersize=4)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_title(f"{store}, width {width}", fontsize=10)
        if row == len(stores) - 1:
            axis.set_xlabel("inter- / intra-connectivity")
        if column == 0:
            axis.set_ylabel("overhead, %")
    axes[0][0].legend(fontsize=8)
    figure.savefig(RESULTS / "io_overhead.png", dpi=130)


def table_of(cases: list[dict[str, object]], device: str) -> str:
    """The table; tiers that need a GPU are listed as not measured where there is none."""
    rows = []
    for case in cases:
        overheads = [f"{100 * case['overhead'][mode]:+.0f} %" for mode in MODES[1:]]
        moved = (NUM_LAYERS - 1) * BATCH_NODES * (1 + case["ratio"]) * case["row_bytes"] / 2**20
        rows.append(
            [
                case["store"],
                case["codec"],
                case["width"],
                f"{case['ratio']:g}",
                f"{moved:.1f} MiB",
                f"{1000 * case['seconds']['none'] / NUM_BATCHES:.1f} ms",
                *overheads,
            ]
        )
    header = [
        "store", "codec", "width", "inter / intra", "moved per batch", "batch, io=none",
        "serial", "concurrent", "prefetch",
    ]  # fmt: skip
    if device == "cpu":
        rows += [[store, *["not measured"] * (len(header) - 1)] for store in ("device", "pinned")]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=6, help="for each row")
    parser.add_argument("--degree", type=int, default=5, help="the paper's is 60")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--ratios", type=float, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--codecs", nargs="*", default=["float32", "bfloat16", "float16", "int8"])
    parser.add_argument("--stores", nargs="*", default=["host", "disk", "cold disk"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # Codecs are compared at one width, widths with one codec.
    middle = args.widths[len(args.widths) // 2]
    settings = [(w, "float32", ratio) for w in args.widths for ratio in args.ratios]
    settings += [(middle, codec, args.ratios[-1]) for codec in args.codecs if codec != "float32"]
    cases: list[dict[str, object]] = []
    for store, (width, codec, ratio) in tqdm(list(itertools.product(args.stores, settings))):
        torch.manual_seed(0)
        model = GIN(width, store=store.removeprefix("cold "), dtype=codec)
        for history in model.histories:
            history.push(torch.randn(NUM_NODES, width))
        model = model.to(device)
        batches = [batch.to(device) for batch in make_batches(width, ratio, args.degree)]
        prepare = (lambda model=model: make_cold(model)) if store == "cold disk" else None
        measured = measure(model, batches, args.seconds, prepare)
        row_bytes = model.histories[0].codec.row_bytes(width)
        model.close()
        cases.append(
            {
                "store": store,
                "codec": codec,
                "width": width,
                "ratio": ratio,
                "row_bytes": row_bytes,
                **measured,
            }
        )
    content = {"degree": args.degree, "num_layers": NUM_LAYERS, "device": device, "cases": cases}
    save("io_overhead", content, table_of(cases, device))
    if imports("matplotlib"):
        plot(cases)


if __name__ == "__main__":
    main()
