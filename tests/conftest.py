"""Fixtures, and the rule that nothing is skipped while its requirement is there.

``@pytest.mark.requires("torch_sparse")`` skips a test where something is missing.
``GAS_TEST_EXPECT`` lists requirements that must not be missing, separated by spaces: CI sets it. A
skip for any other reason is a failure. ``--requiring NAME`` runs only the tests that need it.

``pytest -m cuda`` runs the tests that need a GPU. ``--rehearse`` has those that take the fixture
``device`` run on the CPU in its place, so that no slip of theirs costs time on a device.

A bare ``pytest``, as in ``make test``, leaves out the tests marked ``slow``; ``--all`` runs them
too. So does any choice: ``pytest tests/scalable``, a test by name, ``-k``, ``-m`` and
``--requiring`` run all that they name. ``-m "not slow"`` leaves the slow ones out of a choice.
Of a function with many cases, ``slow(fast=3)`` leaves three fast, spread over all of them.

``pytest -n 2`` runs tests in processes of one thread; tests about threads set them themselves.

New memory is poisoned: what was not written is NaN, or -1, in tensors, arrays and C++ alike, and
the largest number of its type in gas's own buffers, which promise finite numbers.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # Before torch is loaded; programs under test inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # The other process has the other core.
# In programs under test: bytes of 0x7f. There and in the processes of xdist: also small pieces of
# memory, which malloc's caches of threads would give back as they were.
os.environ.setdefault("MALLOC_PERTURB_", "128")
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import multiprocessing
import platform
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import gas
from gas import native
from gas.native import BufferPool

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
# Processes that fork from one which has imported what takes seconds, and nothing else; on Windows,
# which has no forks, they start anew.
FORKS = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
if os.name != "nt":
    FORKS.set_forkserver_preload(["conftest", "gas.cli", "matplotlib.pyplot", "tyro"])


def _poison_new_memory() -> bool:
    """Let malloc fill what it returns with bytes of 0xff, where it is the GNU C library's."""
    perturb, byte = -6, 0x100  # M_PERTURB; malloc inverts the lower eight bits.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return platform.libc_ver()[0] == "glibc" and mallopt is not None and mallopt(perturb, byte) == 1


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


REQUIREMENTS = {
    "native": (native.C is not None, "gas._C was not built"),
    "torch_sparse": (_installed("torch_sparse"), "torch-sparse is not installed"),
    "kaminpar": (_installed("kaminpar"), "kaminpar is not installed"),
    "rocksdict": (_installed("rocksdict"), "rocksdict is not installed"),
    "tensorboard": (_installed("tensorboard"), "tensorboard is not installed"),
    "one_graph": (
        tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11),
        "this version of PyTorch breaks graphs where others don't",
    ),
    "captum": (_installed("captum"), "captum is not installed"),
    "pyro": (_installed("pyro"), "pyro-ppl is not installed"),
    "lightning": (_installed("lightning"), "lightning is not installed"),
    "huggingface_hub": (
        _installed("huggingface_hub") and _installed("safetensors"),
        "huggingface_hub or safetensors is not installed",
    ),
    "matplotlib": (_installed("matplotlib"), "matplotlib is not installed"),
    "pyarrow": (_installed("pyarrow"), "pyarrow is not installed"),
    "safetensors": (_installed("safetensors"), "safetensors is not installed"),
    "jinja2": (_installed("jinja2"), "jinja2 is not installed"),
    "mkdocs": (
        _installed("mkdocs") and _installed("mkdocstrings_handlers"),
        "mkdocs, mkdocs-material or mkdocstrings is not installed",
    ),
    "tyro": (_installed("tyro"), "tyro is not installed"),
    "shared": (SHARED.is_dir(), "the folder of real graphs, ../shared/data, is missing"),
    "poison": (_poison_new_memory(), "this C library can't poison new memory"),
    "nvcc": (shutil.which("nvcc") is not None, "nvcc is not on PATH"),
    "cuda": (torch.cuda.is_available(), "there is no CUDA device"),
    "cuda_kernels": (
        native.C is not None and native.C.WITH_CUDA,
        "gas._C was built without CUDA",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow, too")
    parser.addoption(
        "--requiring",
        action="append",
        choices=sorted(REQUIREMENTS),
        help="run only the tests that are skipped where this is missing (can be repeated)",
    )
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="run tests with the fixture 'device' on the CPU, where there is no CUDA device",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(name): skip where a requirement is missing")
    config.addinivalue_line("markers", "cuda: needs a CUDA device (by requires('cuda'))")
    config.addinivalue_line(
        "markers", "slow(fast=0): left out of a bare 'pytest', but for some cases"
    )
    config.addinivalue_line("markers", "sanitized: small enough to run under compute-sanitizer")
    option = config.option
    is_path = config.args_source == pytest.Config.ArgsSource.ARGS
    option.all |= is_path or bool(option.keyword or option.markexpr or option.requiring)
    missing = [
        REQUIREMENTS[name][1]
        for name in os.environ.get("GAS_TEST_EXPECT", "").split()
        if not REQUIREMENTS[name][0]
    ]
    if missing:
        raise pytest.UsageError("GAS_TEST_EXPECT is not met: " + "; ".join(missing))


@pytest.hookimpl(tryfirst=True)  # Before -m chooses.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(marker.args[0] == "cuda" for marker in item.iter_markers("requires")):
            item.add_marker("cuda")
    _unmark_fast_cases(items)
    if not config.getoption("all"):
        _keep(config, items, lambda item: item.get_closest_marker("slow") is None)
    chosen = config.getoption("requiring")
    if chosen:
        _keep(
            config,
            items,
            lambda item: any(m.args[0] in chosen for m in item.iter_markers("requires")),
        )


def _unmark_fast_cases(items: list[pytest.Item]) -> None:
    """Take the mark from so many cases of a function as ``slow(fast=...)`` says."""
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(getattr(item, "function", item), []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("slow")
        fast = mark.kwargs.get("fast", 0) if mark is not None else 0
        for number, item in enumerate(group):
            if (number * fast) // len(group) != ((number - 1) * fast) // len(group):
                item.own_markers = [each for each in item.own_markers if each.name != "slow"]


def _keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]
) -> None:
    """Deselect all tests but those that are wanted."""
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what is there now: a million objects."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    given = item.callspec.params if hasattr(item, "callspec") else {}  # Not by the fixture.
    on_any = "device" in getattr(item, "fixturenames", ()) and "device" not in given
    rehearsed = on_any and item.config.getoption("rehearse")
    for marker in item.iter_markers("requires"):
        if rehearsed and marker.args[0] in ("cuda", "cuda_kernels"):
            continue
        present, reason = REQUIREMENTS[marker.args[0]]
        if not present:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        absent = [text for present, text in REQUIREMENTS.values() if not present]
        if not any(text in reason for text in absent):
            report.outcome = "failed"
            report.longrepr = f"skipped although nothing is missing: {reason}"
    return report


@pytest.fixture
def device() -> torch.device:
    """Return the device of a test: a CUDA device, or the CPU in a rehearsal."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _set_sync_debug_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says once that it is a prototype.
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Raise in this context where PyTorch has the host wait for a device, in any thread."""
    if not torch.cuda.is_available():  # A rehearsal.
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep partitions out of the user's cache."""
    monkeypatch.setenv("GAS_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new buffers with NaN: they hold zeros when they are new, and older rows later."""
    allocate = BufferPool.allocate

    def poisoned(pool: BufferPool, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        info = torch.finfo if dtype.is_floating_point else torch.iinfo
        return allocate(pool, rows, width, dtype).fill_(info(dtype).max)

    monkeypatch.setattr(BufferPool, "allocate", poisoned)


@pytest.fixture(autouse=True, scope="session")
def _hears_ctrl_c() -> None:
    """A shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _code_that_pyg_generates() -> None:
    """Once for each class: without the fused product, if the first of its layers has none."""
    SAGEConv(1, 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(12345)


@pytest.fixture(autouse=True, scope="session")
def _session_threads() -> int:
    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def _no_idle_cores(_session_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test use every core, however many there are and however busy the machine is."""
    torch.set_num_threads(_session_threads)
    monkeypatch.setattr("gas.native.cores.num_cores", torch.get_num_threads)
    monkeypatch.setattr("gas.native.cores.busy_seconds", lambda: None)


@pytest.fixture
def _idle_cores(_no_idle_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take part in transfers."""
    monkeypatch.setattr("gas.native.cores.num_cores", lambda: torch.get_num_threads() + 1)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the real graphs: PyG writes files into their folder."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(SHARED, root, dirs_exist_ok=True)
    for path in [root, *root.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o700)
    return root


@dataclasses.dataclass
class Done:
    """Exit code and output of a script."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a script in this process, in an empty folder: to import PyTorch anew takes seconds."""

    def run(script: Path, *args: object) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, args)])
        code: Any = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        out, err = capsys.readouterr()
        return Done(code, out, err) if isinstance(code, int) else Done(1, out, f"{err}{code}\n")

    return run


def run_forked(script: Path, *args: object, cwd: Path) -> Done:
    """Run a script in a process of its own, as ``python script args`` in a folder does."""
    streams = [str(cwd / f"{name}.txt") for name in ("out", "err")]
    surroundings = (dict(os.environ), str(cwd), streams)
    process = FORKS.Process(target=_become, args=(surroundings, str(script), *map(str, args)))
    process.start()
    try:
        process.join(300)
    finally:
        process.kill()
    out, err = (Path(stream).read_text() for stream in streams)
    assert process.exitcode is not None, f"{script} hangs\n{err}"
    return Done(process.exitcode, out, err)


def _become(surroundings: tuple[dict[str, str], str, list[str]], script: str, *args: str) -> None:
    environment, folder, streams = surroundings
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[:] = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def started(command: list[str], **kwargs: Any) -> Iterator[subprocess.Popen]:
    """A process that hears Ctrl-C, even if we run in the background; it ends with the block."""

    def hear() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, text=True, preexec_fn=hear, **kwargs)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def random_graph(
    num_nodes: int = 60,
    num_edges: int = 240,
    directed: bool = True,
    features: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """Return a random graph with self-loops, duplicate edges and isolated nodes (the last two)."""
    edge_index = torch.randint(max(num_nodes - 2, 1), (2, num_edges))
    edge_index[:, :3] = edge_index[:, 3:6]
    edge_index[1, 6] = edge_index[0, 6]
    if not directed:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return Data(
        x=torch.randn(num_nodes, features, dtype=dtype),
        y=torch.randint(3, (num_nodes,)),
        edge_index=edge_index,
        train_mask=torch.rand(num_nodes) < 0.5,
    )


def clustered_graph(
    num_parts: int = 6, method: str = "metis", **kwargs: Any
) -> tuple[Data, Tensor]:
    """Return a :func:`random_graph` in parts: permuted, and where they begin."""
    data = random_graph(**kwargs)
    options: dict[str, Any] = {"num_nodes": data.num_nodes, "log": False, "method": method}
    perm, ptr = gas.metis(data.edge_index, num_parts, **options)
    return gas.permute(data, perm, log=False), ptr
