"""Fixtures, and the rule that nothing is skipped while its requirement is there.

``@pytest.mark.requires("torch_sparse")`` skips a test where something is missing.
``GAS_TEST_EXPECT`` lists requirements that must not be missing, separated by spaces: CI sets it. A
skip for any other reason is a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas import _native

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


REQUIREMENTS = {
    "native": (_native.C is not None, "gas._C was not built"),
    "torch_sparse": (_installed("torch_sparse"), "torch-sparse is not installed"),
    "kaminpar": (_installed("kaminpar"), "kaminpar is not installed"),
    "tensorboard": (_installed("tensorboard"), "tensorboard is not installed"),
    "matplotlib": (_installed("matplotlib"), "matplotlib is not installed"),
    "shared": (SHARED.is_dir(), "the folder of real graphs, ../shared/data, is missing"),
    "cuda": (torch.cuda.is_available(), "there is no CUDA device"),
    "cuda_kernels": (
        _native.C is not None and _native.C.WITH_CUDA,
        "gas._C was built without CUDA",
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(name): skip where a requirement is missing")
    missing = [
        REQUIREMENTS[name][1]
        for name in os.environ.get("GAS_TEST_EXPECT", "").split()
        if not REQUIREMENTS[name][0]
    ]
    if missing:
        raise pytest.UsageError("GAS_TEST_EXPECT is not met: " + "; ".join(missing))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        present, reason = REQUIREMENTS[marker.args[0]]
        if not present:
            pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        absent = [text for present, text in REQUIREMENTS.values() if not present]
        if not any(text in reason for text in absent):
            report.outcome = "failed"
            report.longrepr = f"skipped although nothing is missing: {reason}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps partitions out of the user's cache."""
    monkeypatch.setenv("GAS_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True, scope="session")
def _hears_ctrl_c() -> None:
    """A shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(12345)


@pytest.fixture
def _idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take part in transfers, however many cores there are."""
    monkeypatch.setattr("gas.history.host.has_idle_cores", lambda: True)
    monkeypatch.setattr("gas.prefetch.has_idle_cores", lambda: True)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the real graphs: PyG writes beside them."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(SHARED, root, dirs_exist_ok=True)
    for path in [root, *root.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o700)
    return root


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
    """A random graph with self-loops, duplicate edges and isolated nodes (the last two)."""
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


def clustered_graph(num_parts: int = 6, **kwargs: Any) -> tuple[Data, Tensor]:
    """A :func:`random_graph` in parts: permuted, and where they begin."""
    data = random_graph(**kwargs)
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=data.num_nodes, log=False)
    return gas.permute(data, perm, log=False), ptr
