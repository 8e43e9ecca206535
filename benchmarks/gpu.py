"""Build, test, sanitize and benchmark on a GPU, and write a table of the results.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --rehearse

Nothing is installed: CMake, nvcc and the packages of the Python that runs this are used as they
are, and the extension is compiled in place. Each step has a time limit of its own and writes what
it says to a file as it goes; a step that fails keeps only those from running that need it. What is
done isn't done again while the sources are the same, so a run that was broken off is gone on with
by the same command. ``summary.md`` in the folder of results has the table.

``--rehearse`` takes the same steps with the CPU in the GPU's place, where there is none: what isn't
about the device itself can go wrong beforehand then.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CUDA = "/usr/local/cuda/bin"  # Where its tools are, if they aren't on the PATH.
KINDS = (".py", ".cpp", ".cu", ".cuh", ".h")  # Of sources.
GRACE = 10.0  # Seconds in which a step that took too long may say what it has found.
TAIL = 15  # Lines that are shown of a step that failed.

QUICK = ("--quick",)
LARGE = ("--large", "--slow-seconds", "5")  # ClusterLoader takes longer: two epochs of it.
# Of each step the seconds that it may take, its script, and what that is given besides --device and
# --name: on a device, and in a rehearsal.
BENCHMARKS: dict[str, tuple[int, str, tuple[str, ...], tuple[str, ...]]] = {
    "costs": (60, "costs.py", (), ("--megabytes", "1")),  # The next ones take the faster ways.
    "io_overhead": (180, "io_overhead.py", QUICK, QUICK),
    "operators": (240, "operators.py", QUICK, QUICK),
    "bandwidth": (120, "bandwidth.py", QUICK, QUICK),
    "epoch_time": (120, "epoch_time.py", QUICK, QUICK),
    "memory": (150, "memory.py", QUICK, QUICK),
    "epoch_time_large": (300, "epoch_time.py", LARGE, ("--large", "--quick")),
}

PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None}
if torch.cuda.is_available():
    at = torch.cuda.get_device_properties(0)
    found.update(device=at.name, capability=f"{at.major}{at.minor}", bytes=at.total_memory)
print(json.dumps(found))
"""
CHECK = """
from gas import native
assert native.C is not None, "the extension can't be used"
assert native.C.WITH_CUDA, "the extension was built without CUDA"
"""


@dataclass(frozen=True)
class Step:
    """A step of the run, with its time limit in seconds.

    * ``environment``: variables that it needs; ``program``: what has to be on the PATH.
    * ``after``: the step without which it can't be; ``refused``: why it can't be at all.
    """

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    environment: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    after: str | None = "build"
    refused: str | None = None


# The steps ----------------------------------------------------------------------------------------


def build(found: dict[str, Any], rehearse: bool, python: str) -> Step:
    """Compile the extension for the device, in place; a rehearsal replaces none that is there."""
    folder = ROOT / "build" / ("gpu-rehearsal-cmake" if rehearse else "gpu-cmake")
    in_place = not (rehearse and any((ROOT / "gas").glob("_C.*")))
    library = ROOT / "gas" if in_place else folder / "lib"
    with_cuda = not rehearse or shutil.which("nvcc", path=search_path()) is not None
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={python}"),
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library}",
        f"-DGAS_WITH_CUDA={'ON' if with_cuda else 'OFF'}",
        f"-DCMAKE_CUDA_ARCHITECTURES={found.get('capability', '90')}-real",
        "-DCMAKE_CUDA_FLAGS=-lineinfo",  # So that sanitizers can name lines.
    ]
    refused = "Python has no pybind11"
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        configure.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
        refused = None
    if shutil.which("make", path=search_path()) is None:
        configure += ["-G", "Ninja"]
    check = f"import sys; sys.path.insert(0, {str(library)!r}); import _C" if rehearse else CHECK
    commands = (
        configure,
        ("cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)),
        (python, "-c", check),
    )
    seconds = 1200 if rehearse else 300
    return Step("build", seconds, commands, program="cmake", after=None, refused=refused)


def pytest(python: str, rehearse: bool, *arguments: str) -> list[str]:
    """Run the modules of tests that have some for a device; what ages or slows isn't an error."""
    modules = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if 'requires("cuda")' in path.read_text()
    )
    command = [python, "-m", "pytest", *modules, "-q", "-rfE", "--tb=short", *arguments]
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "--continue-on-collection-errors"]
    for kind in ("Deprecation", "PendingDeprecation", "Future"):
        command += ["-W", f"default::{kind}Warning"]
    command += ["-W", "default:gas._C has loaded a second OpenMP runtime:RuntimeWarning"]
    return [*command, "--rehearse"] if rehearse else command


def expected(rehearse: bool) -> dict[str, str]:
    """Return the requirements that tests must not be skipped for."""
    return {} if rehearse else {"GAS_TEST_EXPECT": "native cuda cuda_kernels"}


def tests(out: Path, rehearse: bool, python: str) -> Step:
    """Run every test that needs a device, in half as many processes as cores."""
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    arguments = ("-m", "cuda", "-n", str(workers), "--durations=15", f"--junitxml={out}/tests.xml")
    command = pytest(python, rehearse, *arguments)
    return Step("tests", 900 if rehearse else 180, (command,), expected(rehearse))


def sanitizer(tool: str, rehearse: bool, python: str) -> Step:
    """Return the tests that are small enough, under a tool of compute-sanitizer; our kernels alone.

    PyTorch gives every tensor memory of its own then: rows beyond it would be another's otherwise.
    """
    command = pytest(python, rehearse, "-m", "sanitized")
    if not rehearse:
        options = ["--tool", tool, "--kernel-name", "kns=_ZN3gas"]
        # What PyTorch asks the driver in vain is nothing wrong; calls of ours raise what is.
        options += ["--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]
        command = ["compute-sanitizer", *options, *command]
    return Step(
        tool,
        180,
        (command,),
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **expected(rehearse)},
        None if rehearse else "compute-sanitizer",
    )


def benchmark(name: str, out: Path, rehearse: bool, python: str) -> Step:
    """Return a script of this folder, whose results are put with the others.

    So are the costs, which lead to the faster ways; operators are compared with those of others,
    and not with themselves.
    """
    seconds, script, given, rehearsed = BENCHMARKS[name]
    command = [python, str(ROOT / "benchmarks" / script), "--device", "cpu" if rehearse else "cuda"]
    command += ["--name", str(out / name), *(rehearsed if rehearse else given)]
    cache = out / ("cache-without-costs" if name == "operators" else "cache")
    variables = {"GAS_CACHE_DIR": str(cache)}
    return Step(name, 600 if rehearse else seconds, (command,), variables)


def steps(found: dict[str, Any], out: Path, rehearse: bool) -> list[Step]:
    """Return all of them, in the order in which they are taken."""
    python = sys.executable
    return [
        build(found, rehearse, python),
        tests(out, rehearse, python),
        *(sanitizer(tool, rehearse, python) for tool in ("memcheck", "racecheck")),
        *(benchmark(name, out, rehearse, python) for name in BENCHMARKS),
    ]


# Taking them --------------------------------------------------------------------------------------


def search_path() -> str:
    """Return PATH with the folders of this Python and of CUDA."""
    beside = str(Path(sys.executable).parent)
    return os.pathsep.join([beside, os.environ.get("PATH", os.defpath), CUDA])


def environment(step: Step) -> dict[str, str]:
    """Return the variables that a step sees: gas is imported from here."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PATH": search_path(),
        **step.environment,
    }


def take(step: Step, seconds: float, log: Path) -> str:
    """Run a step and return its outcome."""
    end = time.monotonic() + seconds
    with log.open("w") as stream:
        for command in step.commands:
            stream.write(f"$ {' '.join(command)}\n")
            stream.flush()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(step),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # So that all of its processes can be stopped.
            )
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"stopped after {seconds:.0f} s"
            finally:
                stop(process)
            if code:
                return f"failed, exit status {code}"
    return "ok"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the remaining processes of a step, first by SIGINT, after which pytest sums up."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        if process.poll() is None and number == signal.SIGINT:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def digest(rehearse: bool) -> str:
    """Return a hash of the sources, which results are valid for."""
    found = hashlib.sha256(b"rehearsal" if rehearse else b"")
    files = [ROOT / "CMakeLists.txt"]
    for folder in ("gas", "csrc", "tests", "benchmarks"):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in KINDS]
    for path in sorted(files):
        found.update(f"{path.relative_to(ROOT)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def is_done(taken: dict[str, Any] | None, sources: str, name: str) -> bool:
    """Return whether a step has an outcome that another run wouldn't change."""
    if taken is None or taken["sources"] != sources:
        return False
    return taken["outcome"] == "ok" or (name != "build" and taken["outcome"].startswith("failed"))


def run(
    todo: Sequence[Step],
    out: Path,
    sources: str,
    machine: str,
    again: Sequence[str] = (),
    only: Sequence[str] = (),
    minutes: float | None = None,
) -> int:
    """Take the steps that aren't done; write the summary after each. The exit status."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / "steps.json"
    taken: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for step in todo:
        if only and step.name not in only:
            continue
        if step.name not in again and is_done(taken.get(step.name), sources, step.name):
            print(f"{step.name}: {taken[step.name]['outcome']}, before", flush=True)
            continue
        left = step.seconds if end is None else min(step.seconds, end - time.monotonic())
        log = out / f"{step.name}.log"
        start = time.monotonic()
        outcome = why_not(step, taken, sources, left)
        if outcome is None:
            print(f"{step.name}: at most {left:.0f} s ...", flush=True)
            outcome = take(step, left, log)
            if outcome != "ok":
                print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL:]))
        seconds = time.monotonic() - start
        print(f"{step.name}: {outcome}, {seconds:.0f} s", flush=True)
        taken[step.name] = {"outcome": outcome, "seconds": seconds, "sources": sources}
        write(record, json.dumps(taken, indent=1))
        write(out / "summary.md", summary(todo, taken, out, sources, machine))
    outcomes = [taken[step.name]["outcome"] for step in todo if step.name in taken]
    print(f"\n{table(todo, taken, sources)}\n\nResults: {out}")
    return int(any(outcome != "ok" for outcome in outcomes))


def why_not(step: Step, taken: dict[str, Any], sources: str, left: float) -> str | None:
    """Return the reason why a step can't be taken."""
    if step.after is not None and not is_done(taken.get(step.after), sources, "build"):
        return f"not run: no {step.after} of these sources"
    if step.refused is not None:
        return f"not run: {step.refused}"
    if step.program is not None and shutil.which(step.program, path=search_path()) is None:
        return f"not run: {step.program} is missing"
    return "not run: no time was left" if left < 1 else None


def write(path: Path, text: str) -> None:
    """Write a file atomically, as a run may be interrupted at any time."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)


def table(todo: Sequence[Step], taken: dict[str, Any], sources: str) -> str:
    """Return the outcome of every step, as Markdown."""
    lines = ["| step | at most, s | took, s | outcome |", "|---|---|---|---|"]
    for step in todo:
        found = taken.get(step.name)
        took, outcome = "", "not run yet"
        if found is not None:
            took, outcome = f"{found['seconds']:.0f}", found["outcome"]
            outcome += "" if found["sources"] == sources else " (of other sources)"
        lines.append(f"| {step.name} | {step.seconds:.0f} | {took} | {outcome} |")
    return "\n".join(lines)


def summary(
    todo: Sequence[Step], taken: dict[str, Any], out: Path, sources: str, machine: str
) -> str:
    """Return the table, the machine, and the tables of the benchmarks."""
    parts = [table(todo, taken, sources), f"Machine: {machine}; sources {sources}"]
    for step in todo:
        path = out / f"{step.name}.md"
        if path.exists():
            parts.append(f"## {step.name}\n\n{path.read_text().strip()}")
    return "\n\n".join(parts) + "\n"


def look() -> dict[str, Any]:
    """Describe the device, PyTorch and CUDA, from a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"PyTorch can't be used:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the folder of results (build/gpu)")
    parser.add_argument("--only", nargs="*", default=[], help="of the steps, those alone")
    parser.add_argument("--again", nargs="*", default=[], help="steps to take although done")
    parser.add_argument("--minutes", type=float, help="for all steps together")
    parser.add_argument("--rehearse", action="store_true", help="the CPU in the GPU's place")
    args = parser.parse_args()

    found = look()
    if found["device"] is None and not args.rehearse:
        sys.exit("there is no CUDA device; --rehearse takes the steps with the CPU in its place")
    out = (args.out or ROOT / "build" / ("gpu-rehearsal" if args.rehearse else "gpu")).resolve()
    todo = steps(found, out, args.rehearse)
    names = [step.name for step in todo]
    for name in (*args.only, *args.again):
        if name not in names:
            parser.error(f"there is no step {name!r}, expected some of {', '.join(names)}")
    machine = (
        f"{found['device'] or 'no GPU, a rehearsal'}, {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, PyTorch {found['torch']}, CUDA {found['cuda']}; "
        f"{time.strftime('%Y-%m-%d')}"
    )
    sources = digest(args.rehearse)
    sys.exit(run(todo, out, sources, machine, args.again, args.only, args.minutes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Not without stopping the step.
    main()
