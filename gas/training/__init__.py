"""Training: the epoch loop, objectives, metrics, and the planning of memory."""

from gas.native import share_cores
from gas.scalable import activation_bytes
from gas.training.cost import Candidate, Linear
from gas.training.evaluation import Predictions, evaluate, prediction_columns, predictions
from gas.training.fit import Progress, Run, divergence_error, fit, mean_age, name_not_finite
from gas.training.full_batch import FullBatch
from gas.training.links import compute_hits, compute_mrr, link_loss, rank_links
from gas.training.loop import train_epoch
from gas.training.measure import (
    MemoryAccount,
    Shape,
    batch_bytes,
    give_back_freed,
    gradients,
    keep_little_freed,
    twin_with_histories,
)
from gas.training.metrics import (
    METRICS,
    baseline,
    compute_micro_f1,
    compute_r2,
    compute_roc_auc,
    is_real,
    known_targets,
    loss_of,
    metric_of,
    score,
    split_mask,
)
from gas.training.planner import Plan, plan, plan_micro_batches

__all__ = [
    "Candidate",
    "FullBatch",
    "Linear",
    "METRICS",
    "MemoryAccount",
    "Plan",
    "Predictions",
    "Progress",
    "Run",
    "Shape",
    "activation_bytes",
    "baseline",
    "batch_bytes",
    "compute_hits",
    "compute_micro_f1",
    "compute_mrr",
    "compute_r2",
    "compute_roc_auc",
    "divergence_error",
    "evaluate",
    "fit",
    "give_back_freed",
    "gradients",
    "is_real",
    "keep_little_freed",
    "known_targets",
    "link_loss",
    "loss_of",
    "mean_age",
    "metric_of",
    "name_not_finite",
    "plan",
    "plan_micro_batches",
    "prediction_columns",
    "predictions",
    "rank_links",
    "score",
    "share_cores",
    "split_mask",
    "train_epoch",
    "twin_with_histories",
]
