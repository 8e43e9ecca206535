"""Training: the epoch loop, metrics, experiments and reports."""

from gas.training.experiment import MODELS, Experiment
from gas.training.loop import FullBatch, Run, fit, loss_of, mean_age, split_mask, train_epoch
from gas.training.metrics import compute_micro_f1, compute_r2, compute_roc_auc, metric_of, score
from gas.training.settings import Settings

__all__ = [
    "Experiment",
    "FullBatch",
    "MODELS",
    "Run",
    "Settings",
    "compute_micro_f1",
    "compute_r2",
    "compute_roc_auc",
    "fit",
    "loss_of",
    "mean_age",
    "metric_of",
    "score",
    "split_mask",
    "train_epoch",
]
