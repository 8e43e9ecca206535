"""Command line: settings, experiments, and the files and summaries that a run leaves."""

from gas.cli.checkpoints import Checkpoints
from gas.cli.command import main as train
from gas.cli.commands import main
from gas.cli.experiment import Experiment
from gas.cli.report import machine, metrics, peak_rss_bytes, reset_peak_rss, summary
from gas.cli.results import write_results
from gas.cli.runs import SavedRun, load_run
from gas.cli.settings import MODELS, Settings

__all__ = [
    "Checkpoints",
    "Experiment",
    "MODELS",
    "SavedRun",
    "Settings",
    "load_run",
    "machine",
    "main",
    "metrics",
    "peak_rss_bytes",
    "reset_peak_rss",
    "summary",
    "train",
    "write_results",
]
