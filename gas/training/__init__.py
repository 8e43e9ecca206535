"""Training: the epoch loop, metrics, experiments and reports."""

from gas.history.cores import share_cores
from gas.training import results
from gas.training.checkpoints import Checkpoints
from gas.training.experiment import MODELS, Experiment
from gas.training.links import compute_hits, compute_mrr, link_loss, rank_links
from gas.training.loop import FullBatch, Run, fit, loss_of, mean_age, split_mask, train_epoch
from gas.training.machine import Machine
from gas.training.memory import activation_bytes, plan_micro_batches
from gas.training.metrics import (
    METRICS,
    compute_micro_f1,
    compute_r2,
    compute_roc_auc,
    metric_of,
    score,
)
from gas.training.planner import Candidate, Plan, plan
from gas.training.replicas import partition_statistics
from gas.training.settings import Settings
from gas.training.simulator import Simulation, simulate
from gas.training.split import PartitionStatistics

__all__ = [
    "Candidate",
    "Checkpoints",
    "Experiment",
    "FullBatch",
    "METRICS",
    "MODELS",
    "Machine",
    "PartitionStatistics",
    "Plan",
    "Run",
    "Settings",
    "Simulation",
    "activation_bytes",
    "compute_hits",
    "compute_micro_f1",
    "compute_mrr",
    "compute_r2",
    "compute_roc_auc",
    "fit",
    "link_loss",
    "loss_of",
    "mean_age",
    "metric_of",
    "partition_statistics",
    "plan",
    "plan_micro_batches",
    "rank_links",
    "results",
    "score",
    "share_cores",
    "simulate",
    "split_mask",
    "train_epoch",
]
