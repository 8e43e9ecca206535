"""What reading and writing histories adds to a training epoch: Figure 4 of GNNAutoScale.

    python benchmarks/io_overhead.py

A GIN of 4 layers trains on batches of 4,000 nodes. Every node of a batch has the same number of
neighbours inside it; every node of the halo has as many inside it, too, so that the ratio of inter-
to intra-connectivity is the number of halo nodes over that of in-batch nodes. It goes from 0 to 3.

The overhead is the time of an epoch over that with ``io="none"``, which moves nothing. ``serial``
moves rows when the model asks for them, ``concurrent`` starts when the model is called,
``prefetch`` one batch earlier, and ``expected`` has the system read ahead what the next batch will
pull (of packed rows alone), so that rows are those of ``serial``. ``disk`` is a file whose pages
are in memory; for ``cold disk`` the system is told to forget them before every epoch; ``packed`` is
what ``model.pack`` makes of it. All modes of a row are measured in turn; an overhead is the median
over rounds of the ratio within a round. How fast the disk is, is measured in the same run: files
that the system has forgotten, read from the beginning to the end, a MiB at a time. Widths are
compared with float32, codecs at one width and the largest halo.
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

import torch
from common import RESULTS, imports, markdown, save
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
BATCH_NODES = 4000
NUM_BATCHES = 4
NUM_NODES = 50 * BATCH_NODES
AHEAD = ("expected", "prefetch")
MODES = ("none", "serial", "concurrent", "expected", "prefetch")
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
    """What ``model.pack`` does, of these batches; the other parts of the graph read nothing."""
    halos = [batch.n_id[batch.batch_size :] for batch in batches]
    halos += [torch.empty(0, dtype=torch.long)] * (NUM_NODES // BATCH_NODES - len(batches))
    packing = Packing(torch.arange(0, NUM_NODES + 1, BATCH_NODES), halos)
    for history in model.histories:
        history.pack(history.packed_by(packing))


def read_all_halos(model: GIN, batches: list[SubData]) -> tuple[float, int]:
    """Seconds to pull what all batches pull, without computing, and the bytes that are read."""
    make_cold(model)
    before = sum(history.store.packed.moved_bytes for history in model.histories)
    start = time.perf_counter()
    model.expect(batches[0].batch_size, batches[0].n_id)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        if following is not None:  # As PrefetchLoader does.
            model.expect(following.batch_size, following.n_id)
        own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
        for pull in [history.start_pull(halo, 0, own) for history in model.histories]:
            pull.wait()
    seconds = time.perf_counter() - start
    return seconds, sum(h.store.packed.moved_bytes for h in model.histories) - before


def read_in_order(file: int, num_bytes: int) -> float:
    """Seconds to read so many bytes of a file that the system has forgotten, a MiB at a time."""
    forget(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    buffer, begin = bytearray(1 << 20), 0
    start = time.perf_counter()
    while begin < num_bytes:
        begin += os.preadv(file, [buffer], begin)
    return time.perf_counter() - start


def bandwidth(model: GIN, batches: list[SubData], folder: str, rounds: int = 9) -> dict[str, float]:
    """How fast packed rows are pulled, beside a plain read of as many bytes, in turn."""
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
    loader = gas.PrefetchLoader(batches, model) if mode in AHEAD else batches
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
        for mode, style in zip(MODES[1:], ("o-", "s-", "d-", "^-"), strict=True):
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
        rates = case.get("bandwidth")
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
                f"{rates['pulled'] / 2**20:.0f} MiB/s" if rates else "",
                f"{100 * rates['share']:.0f} %" if rates else "",
            ]
        )
    header = [
        "store", "codec", "width", "inter / intra", "moved per batch", "batch, io=none",
        *MODES[1:], "read", "of the disk",
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
    parser.add_argument(
        "--stores", nargs="*", default=["host", "disk", "cold disk", "packed", "cold packed"]
    )
    parser.add_argument("--folder", help="where files lie (default: that of temporary files)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # Codecs are compared at one width, widths with one codec.
    middle = args.widths[len(args.widths) // 2]
    settings = [(w, "float32", ratio) for w in args.widths for ratio in args.ratios]
    settings += [(middle, codec, args.ratios[-1]) for codec in args.codecs if codec != "float32"]
    cases: list[dict[str, object]] = []
    for store, (width, codec, ratio) in tqdm(list(itertools.product(args.stores, settings))):
        torch.manual_seed(0)
        folder = tempfile.mkdtemp(prefix="gas-io-", dir=args.folder)
        place = "host" if store == "host" else "disk"
        model = GIN(width, store=place, dtype=codec, path=None if store == "host" else folder)
        for history in model.histories:
            history.push(torch.randn(NUM_NODES, width))
        model = model.to(device)
        batches = [batch.to(device) for batch in make_batches(width, ratio, args.degree)]
        if "packed" in store:
            pack(model, batches)
        prepare = (lambda model=model: make_cold(model)) if "cold" in store else None
        measured = measure(model, batches, args.seconds, prepare)
        if store == "cold packed":
            measured["bandwidth"] = bandwidth(model, batches, folder)
        row_bytes = model.histories[0].codec.row_bytes(width)
        model.close()
        shutil.rmtree(folder)
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
