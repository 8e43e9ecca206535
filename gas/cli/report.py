"""Reports of an experiment: ``metrics.json``, ``curve.png``, TensorBoard events."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gas.native import bytes_in_proc, human, replace_file
from gas.training import Run

try:
    import resource
except ImportError:  # Windows.
    resource = None  # type: ignore[assignment]


PER_EPOCH = ("loss", "train_acc", "val_acc", "test_acc", "age", "seconds", "drift")


def reset_peak_rss() -> None:
    """Reset the peak of resident memory, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> float:
    """Return the peak of this process's resident memory, in bytes, since :func:`reset_peak_rss`.

    NaN where the system doesn't report it.
    """
    if (counted := bytes_in_proc("/proc/self/status", "VmHWM")) is not None:
        return counted
    peak = math.nan if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def machine() -> dict[str, Any]:
    """Describe the machine, for tables of results."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": (
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if hasattr(os, "sysconf")
            else None
        ),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_machine(found: dict[str, Any]) -> str:
    """Return the description of :func:`machine` as a line of text."""
    size = found["memory_bytes"]
    memory = f"{human(size)} of memory" if size else "unknown memory"
    gpu = f", {found['gpu']}" if found["gpu"] else ""
    return (
        f"{found['cpu']}, {found['threads']} threads on {found['cores']} cores, {memory}{gpu}, "
        f"torch {found['torch']}"
    )


def _finite_or_none(values: Sequence[float]) -> list[float | None]:
    """Return values for JSON, ``None`` if not finite."""
    return [value if math.isfinite(value) else None for value in values]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, sample standard deviation (0 of one run) and values, ``None`` if not finite."""
    mean = statistics.fmean(values)
    std = statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else mean - mean
    mean_and_std = dict(zip(("mean", "std"), _finite_or_none([mean, std]), strict=True))
    return {**mean_and_std, "values": _finite_or_none(values)}


def metrics(runs: Sequence[Run]) -> dict[str, Any]:
    """Summarise finished runs; accuracies are those of each run's best validation epoch.

    ``epochs`` holds the values of every epoch, of each run.
    """
    chains = [run.chain for run in runs if run.chain]
    accounts = [run.memory for run in runs if run.memory is not None]
    return {
        **({"memory": accounts[0].held} if accounts else {}),
        "test_acc": summary([run.test_acc[run.best_epoch] for run in runs]),
        "val_acc": summary([run.val_acc[run.best_epoch] for run in runs]),
        "train_epoch_seconds": summary([run.epoch_seconds for run in runs]),
        "peak_rss_bytes": summary([run.peak_rss_bytes for run in runs]),
        "peak_own_bytes": summary([run.peak_own_bytes for run in runs]),
        "peak_mapped_bytes": summary([run.peak_mapped_bytes for run in runs]),
        "history_bytes": summary([run.history_bytes for run in runs]),
        "moved_bytes": summary([statistics.fmean(run.moved_bytes or [0]) for run in runs]),
        "best_epoch": summary([run.best_epoch + 1 for run in runs]),
        "final_loss": summary([run.loss[-1] for run in runs]),
        "epochs": [
            {
                **{key: _finite_or_none(getattr(run, key)) for key in PER_EPOCH},
                "layer_age": run.layer_age,
                **({"lr": run.lr} if run.lr else {}),
                **({"metrics": further} if further else {}),
            }
            for run in runs
            for further in [{name: _finite_or_none(curve) for name, curve in run.metrics.items()}]
        ],
        "chain": {key: summary([chain[key] for chain in chains]) for key in (chains or [{}])[0]},
    }


def plot_curves(path: Path, runs: Sequence[Run], title: str, score: str = "accuracy, %") -> None:
    """Draw loss, score and history age over epochs: the mean of the runs and their range.

    Runs that stopped early are drawn as if their last epoch had gone on.
    """
    from matplotlib.figure import Figure  # Not pyplot, whose backend is the caller's.

    panels = {
        "training loss": {"loss": "loss"},
        score: {"train": "train_acc", "validation": "val_acc", "test": "test_acc"},
        "mean age of history rows, pushes": {"age": "age"},
    }
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (label, curves) in zip(axes, panels.items(), strict=True):
        scale = 100.0 if "%" in label else 1.0
        for name, attribute in curves.items():
            longest = max(len(run.loss) for run in runs)
            curves_of_runs = [getattr(run, attribute) for run in runs]
            rows = [curve + curve[-1:] * (longest - len(curve)) for curve in curves_of_runs]
            values = torch.tensor(rows) * scale
            is_known = values.isfinite().all(dim=0)
            epochs, values = 1 + is_known.nonzero().view(-1), values[:, is_known]
            axis.plot(epochs, values.mean(dim=0), label=name, linewidth=1.5)
            if len(runs) > 1:
                low, high = values.amin(dim=0), values.amax(dim=0)
                axis.fill_between(epochs, low, high, alpha=0.2, linewidth=0)
        axis.set_xlabel("epoch")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend(loc="lower right", fontsize=9)
        if "age" in curves:
            axis.set_ylim(0, 1.1 * max(axis.get_ylim()[1], 1e-9))
    figure.suptitle(title, fontsize=11)
    with replace_file(path) as file:
        figure.savefig(file, dpi=120)


def open_events(folder: Path) -> Any:
    """Open a folder for TensorBoard's events, as a ``SummaryWriter``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package: pip install tensorboard") from error
    return SummaryWriter(str(folder))
