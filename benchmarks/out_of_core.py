"""Training with a memory limit of a third of the data.

    python benchmarks/out_of_core.py --folder /large/disk

A planted graph is written to a folder, its features, edges and histories together three times the
limit. A GCN of 3 layers and 128 channels trains on it for some epochs, each way in a process of its
own that starts with nothing of the files in the system's memory: with everything in memory and no
limit; then, in a group of processes whose memory, with what the system keeps of files for it, is
limited: packed (``model.pack``); packed with rows that most parts read in memory; that again,
killed twice in the middle of an epoch and resumed from the last checkpoint; and histories and
features in mapped files as they are, for one epoch, which takes long enough, or until
``--most`` seconds have gone. All take the same steps, on as many threads: losses and predictions
have to be equal, bit by bit. What is read is counted by the system, beneath its cache; how fast the
disk is, is measured between the ways, by a plain read of a file that isn't in memory.

The limit needs Linux's control groups and the right to make one; without it, nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import make_parser, markdown, save

import gas
from gas.cli.report import peak_rss_bytes
from gas.datasets import write_planted_partition
from gas.graph.cluster import to_original_order
from gas.native.memory import human
from gas.training import train_epoch

WIDTH, FEATURES, LAYERS, DEGREE, MIXING = 128, 128, 3, 10, 0.1
WAYS = ("memory", "packed", "hot", "killed", "mapped")
LIMITED = WAYS[1:]
NAMES = {
    "memory": "all in memory, no limit",
    "mapped": "mapped files",
    "packed": "packed",
    "hot": "packed, hot rows in memory",
    "killed": "the same, killed twice",
}


# One way to train, in a process of its own --------------------------------------------------------


def counted(name: str) -> int:
    """Return the system's counters of this process's reading and writing."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def work(args: argparse.Namespace) -> None:
    """Train, and print a line of JSON after every epoch and at the end."""
    way, folder = args.way, Path(args.folder)
    data = gas.open_graph(folder / "graph", log=False)
    if way == "memory":
        for key in ("x", "adj_t", "y"):
            data[key] = data[key].clone()
    warnings.filterwarnings("ignore", "A history was read before")  # In the first epoch.
    torch.manual_seed(0)
    where: dict[str, Any] = {"store": "host"} if way == "memory" else {"store": "disk"}
    if way != "memory":
        where["path"] = tempfile.mkdtemp(prefix="histories-", dir=folder)
    num_nodes = data.num_nodes
    model = gas.models.GCN(
        num_nodes, FEATURES, WIDTH, int(data.y.max()) + 1, LAYERS, dropout=0.0, **where
    )
    loader = gas.SubgraphLoader(
        data, batch_size=args.batch_size, shuffle=True, cache=False, log=False,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    found: dict[str, Any] = {}
    if way not in ("memory", "mapped"):
        start = time.perf_counter()
        packed = model.pack(loader, args.hot if way in ("hot", "killed") else 0, folder)
        found["pack"] = {"seconds": time.perf_counter() - start, **vars(packed)}
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    done = 0
    if way == "killed" and gas.checkpoint.checkpoints(folder / "checkpoints"):
        start = time.perf_counter()
        done = gas.load(folder / "checkpoints", model, optimizer, loader)["done"]
        found["resumed"] = time.perf_counter() - start
    say(began=done, **found)
    batches = gas.PrefetchLoader(loader, model)
    for epoch in range(done, args.epochs):
        before = {name: counted(name) for name in ("read_bytes", "write_bytes")}
        start = time.perf_counter()
        loss = train_epoch(model, batches, optimizer, leave_cores=False)
        seconds = time.perf_counter() - start
        moved = {name: counted(name) - value for name, value in before.items()}
        if way == "killed":
            gas.save(folder / "checkpoints", model, optimizer, loader, keep=1, done=epoch + 1)
        say(epoch=epoch, loss=loss, seconds=seconds, **moved)
    if way == "mapped":
        return
    start = time.perf_counter()
    out = model.predict(loader)
    seconds = time.perf_counter() - start
    y, mask = (to_original_order(data, data[key]) for key in ("y", "test_mask"))
    say(
        accuracy=float((out.argmax(1) == y)[mask].double().mean()),
        predict=seconds,
        rss=peak_rss_bytes(),
        hit_rate=hit_rate(model),
        outputs=hashlib.sha256(out.numpy().tobytes()).hexdigest(),
    )
    model.close()
    if way != "memory":
        shutil.rmtree(where["path"], ignore_errors=True)


def hit_rate(model: gas.ScalableGNN) -> float | None:
    """Return the share of rows that was found in memory."""
    packed = [p for h in model.histories if (p := getattr(h.store, "packed", None)) is not None]
    asked = sum(one.rows_read for one in packed)
    return sum(one.hot_rows_read for one in packed) / asked if asked else None


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# The limit ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(num_bytes: int | None) -> Iterator[Path | None]:
    """Create a control group of limited memory: processes join by writing their id to a file."""
    if num_bytes is None:
        yield None
        return
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()  # Version 1.
    group = (root / "memory" if first else root) / f"gas-{os.getpid()}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if first else "memory.max"
        (group / limit).write_text(str(num_bytes))
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)  # The system removes a process from its group a little after its end.


def peak_of(group: Path | None) -> int | None:
    """Return the most memory that a group has held, files included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if group is not None and (group / name).exists():
            return int((group / name).read_text())
    return None


def run(args: argparse.Namespace, way: str, limit: int, seed: int) -> dict[str, Any]:
    """Train in one way; return the output of its process."""
    command = [
        sys.executable, __file__, "--way", way, "--folder", str(args.folder),
        "--epochs", str(1 if way == "mapped" else args.epochs), "--hot", str(args.hot),
        "--batch-size", str(args.batch_size),
    ]  # fmt: skip
    epochs: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {"kills": 0}
    chance = random.Random(seed)
    while True:
        forget(args.folder)
        with limited(limit if way in LIMITED else None) as group:

            def join(group: Path | None = group) -> None:
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=join)
            killed = False
            timer = threading.Timer(args.most, process.terminate)
            timer.start()
            for line in process.stdout or ():
                said = json.loads(line)
                if "epoch" in said:
                    epochs[said["epoch"]] = said
                else:
                    rest.update(said)
                if way == "killed" and rest["kills"] < 2 and "epoch" in said:
                    # Anywhere in the next epoch.
                    time.sleep(chance.uniform(0.1, 0.9) * said["seconds"])
                    process.send_signal(signal.SIGKILL)
                    rest["kills"] += 1
                    killed = True
                    break
            process.wait()
            timer.cancel()
            seconds = time.perf_counter() - started
            rest["peak"] = peak_of(group)
        if not killed:
            break
    for path in args.folder.glob("histories-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(args.folder / "checkpoints", ignore_errors=True)
    if process.returncode == -signal.SIGTERM:
        rest["stopped"] = seconds
    elif process.returncode:
        rest["failed"] = process.returncode
    return {"way": way, "epochs": [epochs[number] for number in sorted(epochs)], **rest}


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bandwidth(folder: Path) -> float:
    """Return bytes per second of reading a GiB from the beginning to the end, not from memory."""
    path = folder / "plain"
    if not path.exists():
        with path.open("wb") as stream:
            for _ in range(1024):
                stream.write(os.urandom(1 << 20))
    forget(folder)
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return (1 << 30) / (time.perf_counter() - start)


# All ways -----------------------------------------------------------------------------------------


def generate(folder: Path, num_nodes: int, num_parts: int) -> dict[str, int]:
    """Write the clustered graph; the bytes of what training needs."""
    if not (folder / "graph").exists():
        raw = folder / "raw"
        data = write_planted_partition(
            raw, num_nodes, DEGREE, num_features=FEATURES, mixing=MIXING, noise=12.0
        )
        torch.manual_seed(0)
        drawn = torch.rand(num_nodes)
        data.train_mask, data.test_mask = drawn < 0.5, drawn >= 0.75
        model = gas.models.GCN(1, FEATURES, WIDTH, 2, LAYERS)
        gas.cluster(data, num_parts, model=model, out=folder / "graph", log=True)
        shutil.rmtree(raw)
    data = gas.open_graph(folder / "graph", log=False)
    edges = sum(
        part.nbytes
        for part in (data.adj_t.crow_indices(), data.adj_t.col_indices(), data.adj_t.values())
    )
    histories = (LAYERS - 1) * num_nodes * WIDTH * 4
    return {"features": data.x.nbytes, "edges": edges, "histories": histories}


def table_of(found: list[dict[str, Any]], args: argparse.Namespace) -> str:
    def after_first(one: dict[str, Any]) -> list[dict[str, Any]]:
        return one["epochs"][1:] or one["epochs"]

    def seconds(one: dict[str, Any]) -> float:
        return statistics.median(epoch["seconds"] for epoch in after_first(one))

    first, rows = seconds(found[0]), []
    for one in found:
        if "failed" in one or not one["epochs"]:
            what = f"more than {one['stopped']:.0f} s" if "stopped" in one else "failed"
            rows.append([NAMES[one["way"]], what, *[""] * 8])
            continue
        later = after_first(one)
        read, written = (
            statistics.median(epoch[name] for epoch in later)
            for name in ("read_bytes", "write_bytes")
        )
        rate = statistics.median(
            epoch["read_bytes"] / epoch["seconds"] / one["bandwidth"] for epoch in later
        )
        losses = [epoch["loss"] for epoch in found[0]["epochs"]]
        same = [e["loss"] for e in one["epochs"]] == losses[: len(one["epochs"])]
        same = same and one.get("outputs", found[0]["outputs"]) == found[0]["outputs"]
        rows.append(
            [
                NAMES[one["way"]],
                f"{seconds(one):.1f} s",
                f"{seconds(one) / first:.2f}x",
                human(read),
                human(written),
                f"{100 * rate:.0f} %",
                human(one["peak"]) if one["peak"] else f"{human(one['rss'])} resident",
                f"{100 * one['hit_rate']:.0f} %" if one.get("hit_rate") is not None else "",
                f"{100 * one['accuracy']:.2f} %" if "accuracy" in one else "not measured",
                "equal" if same else "differ",
            ]
        )
    header = [
        "", "epoch", "of the first", "read", "written", "of the disk", "peak", "hits",
        "test accuracy", "losses and outputs",
    ]  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--parts", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--most", type=float, default=900, help="seconds for each way")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hot", type=int, help="bytes (default: a tenth of the limit)")
    parser.add_argument("--folder", type=Path, help="(default: a temporary one)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        work(args)
        return
    with contextlib.ExitStack() as stack:
        if args.folder is None:
            args.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args.folder.mkdir(parents=True, exist_ok=True)
        sizes = generate(args.folder, args.nodes, args.parts)
        limit = sum(sizes.values()) // 3
        args.hot = limit // 10 if args.hot is None else args.hot
        found = []
        for number, way in enumerate(args.ways):
            rate = bandwidth(args.folder)
            one = run(args, way, limit, number)
            one["bandwidth"] = (rate + bandwidth(args.folder)) / 2
            found.append(one)
            print(json.dumps(one), file=sys.stderr)
        (args.folder / "plain").unlink()
    content = {"nodes": args.nodes, "parts": args.parts, "limit": limit, "hot": args.hot, **sizes}
    disk = statistics.median(one["bandwidth"] for one in found)
    text = (
        f"{args.nodes:,} nodes in {args.parts} parts: features {human(sizes['features'])}, edges "
        f"{human(sizes['edges'])}, histories {human(sizes['histories'])}; limit {human(limit)}, "
        f"{human(args.hot)} of it hot rows; the disk reads {human(disk)}/s in order.\n\n"
    )
    save("out_of_core", {**content, "ways": found}, text + table_of(found, args))


if __name__ == "__main__":
    main()
