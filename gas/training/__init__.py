"""Training: the epoch loop, metrics, reports and published settings."""

from gas.training.loop import FullBatch, Run, fit, loss_of, mean_age, split_mask, train_epoch
from gas.training.metrics import compute_micro_f1
from gas.training.presets import PRESETS, Preset, preset

__all__ = [
    "FullBatch",
    "PRESETS",
    "Preset",
    "Run",
    "compute_micro_f1",
    "fit",
    "loss_of",
    "mean_age",
    "preset",
    "split_mask",
    "train_epoch",
]
