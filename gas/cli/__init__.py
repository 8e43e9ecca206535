"""Command line: settings, experiments, and the files and summaries that a run leaves."""

from gas.cli.checkpoints import Checkpoints
from gas.cli.choices import MODELS
from gas.cli.command import main
from gas.cli.experiment import Experiment
from gas.cli.report import (
    EventWriter,
    machine,
    metrics,
    peak_rss_bytes,
    reset_peak_rss,
    summary,
)
from gas.cli.results import write_results
from gas.cli.settings import Settings

__all__ = [
    "Checkpoints",
    "EventWriter",
    "Experiment",
    "MODELS",
    "Settings",
    "machine",
    "main",
    "metrics",
    "peak_rss_bytes",
    "reset_peak_rss",
    "summary",
    "write_results",
]
