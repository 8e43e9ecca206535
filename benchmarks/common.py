"""Helpers of the benchmarks: timing in turn, tables, results with the machine described."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gas.cli.report import describe_machine, machine
from gas.native import write_json

try:
    import resource
except ImportError:  # Windows: nothing keeps a process from taking more.
    resource = None  # type: ignore[assignment]  # mypy takes the name for the module.

RESULT = "result: "  # Before what the first of some processes prints.
RESULTS = Path(__file__).resolve().parent / "results"


def make_parser(doc: str, name: str | None = None, root: bool = True) -> argparse.ArgumentParser:
    """Make the parser of a script.

    Args:
        doc: The docstring of the script, whose first paragraph says what it measures.
        name: The name of its results, which ``--name`` changes. (default: no such option)
        root: Whether it reads data sets, from the folder ``--root``. (default: ``True``)
    """
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    if root:
        parser.add_argument("--root", default="data", help="the folder of PyG's data sets")
    if name is not None:
        parser.add_argument("--name", default=name, help="of the results, or a path for them")
    return parser


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options common to all scripts that can measure a CUDA device."""
    parser.set_defaults(script=name)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="only what takes about a minute")
    parser.add_argument(
        "--name",
        help="of the results, or a path for them elsewhere (default: of script and options)",
    )


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line with these options and their consequences."""
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device")
    if args.name is None:
        parts = {
            "large": vars(args).get("large"),
            "quick": args.quick,
            "cuda": args.device == "cuda",
        }
        args.name = "_".join([args.script, *(part for part, given in parts.items() if given)])
    return args


def synchronize(device: str) -> None:
    """Wait until a device has finished all work; nothing to do on the CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def imports(package: str) -> bool:
    """Return whether a package that only some machines have can be imported.

    Some are there, but their libraries don't fit this PyTorch: those raise OSError or RuntimeError.
    """
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def time_in_turn(
    contenders: dict[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    calls: int = 1,
    slow_seconds: float = math.inf,
    slow_repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "cpu",
) -> dict[str, dict[str, float]]:
    """Time functions A B A B ..., so that a machine whose speed drifts is fair to all.

    Args:
        contenders: The functions by name.
        repeats: Timed rounds.
        warm_up: Rounds before, not timed. (default: ``1``)
        calls: Calls per round; a round's time is their mean. (default: ``1``)
        slow_seconds: A function whose first round takes longer is slow: it is timed from that round
            on, without warm-up. (default: no limit)
        slow_repeats: Timed rounds of slow functions. (default: ``1``)
        clock: Seconds; ``time.process_time`` leaves out what other processes take. (default:
            ``time.perf_counter``)
        device: What the functions compute on; a round ends when it has done everything.
            (default: ``"cpu"``)

    Returns:
        For each name the median, minimum and maximum in seconds, and the number of timed rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    slow: set[str] = set()
    for number in range(warm_up + repeats):
        for name, function in contenders.items():
            if name in slow and len(times[name]) >= slow_repeats:
                continue
            synchronize(device)
            start = clock()
            for _ in range(calls):
                function()
            synchronize(device)
            seconds = (clock() - start) / calls
            if number == 0 and seconds > slow_seconds:
                slow.add(name)
            if number >= warm_up or name in slow:
                times[name].append(seconds)
    return {
        name: {"median": statistics.median(t), "min": min(t), "max": max(t), "rounds": len(t)}
        for name, t in times.items()
    }


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep ``count`` cores busy with processes that compute nothing useful."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_apart(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in a process of its own; ``options`` are those of its executor."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, **options) as process:
        return process.submit(function, *arguments).result()


def limit_memory(memory: int) -> None:
    """Limit the bytes of memory of this process, and let the system kill it before any other."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def run_ranks(script: str, ranks: int, *options: str) -> Any:
    """Run a script by torchrun, in processes of one thread; return what :func:`say_result` said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ranks), script, *options], capture_output=True, text=True, env=environment
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not told:
        raise RuntimeError(done.stderr)
    return json.loads(told[0].removeprefix(RESULT))


def say_result(found: Any) -> None:
    """Gather what each process of torchrun has found; the first prints it, and all end."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    if torch.distributed.get_rank() == 0:
        print(f"{RESULT}{json.dumps(every)}", flush=True)
    torch.distributed.destroy_process_group()


def mean_time(function: Callable[[], object], at_least: float) -> float:
    """Return the mean seconds of a call, over calls that take ``at_least`` seconds together."""
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < at_least:
        function()
        calls += 1
    return (time.perf_counter() - start) / calls


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def save(name: str, content: dict[str, Any], table: str) -> None:
    """Write ``NAME.json`` and ``NAME.md``, in ``results`` unless NAME is a path, and print."""
    where = machine()
    date = datetime.date.today().isoformat()
    write_json(RESULTS / f"{name}.json", {"machine": where, "date": date, **content})
    described = f"{describe_machine(where)}, Python {where['python']}; {date}"
    (RESULTS / f"{name}.md").write_text(f"{table}\n\nMachine: {described}\n")
    print(f"\n{table}\n\n{described}")


def load(name: str) -> dict[str, Any]:
    """Read ``results/NAME.json``; return an empty dictionary if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
