"""Training: the epoch loop, objectives, metrics, and the planning of memory."""

from gas.native import share_cores
from gas.scalable import activation_bytes
from gas.training.callbacks import Callback, MetricLogger
from gas.training.candidates import Candidate, Plan, align_columns
from gas.training.cost import Linear
from gas.training.epochs import run_epochs
from gas.training.evaluation import Predictions, evaluate, prediction_columns, predictions
from gas.training.fit import fit, make_inference_loader
from gas.training.full_batch import FullBatch, fits_one_batch
from gas.training.links import compute_hits, compute_mrr, link_loss, rank_links
from gas.training.loop import train_epoch
from gas.training.measure import (
    BatchShape,
    MemoryAccount,
    batch_bytes,
    clone_with_histories,
    gradients,
    limit_freed_memory,
    release_freed_memory,
)
from gas.training.metrics import (
    METRICS,
    baseline,
    check_known_targets,
    check_metric,
    compute_micro_f1,
    compute_r2,
    compute_roc_auc,
    is_real,
    known_target_mask,
    loss_of,
    metric_of,
    score,
    split_mask,
)
from gas.training.optimizer_hooks import (
    AveragedWeights,
    choose_warm_up,
    raise_rate,
    steps_per_epoch,
)
from gas.training.planner import plan, plan_micro_batches
from gas.training.profile import Profile, profile
from gas.training.record import Progress, Run, divergence_error, find_nonfinite_tensor, mean_age

__all__ = [
    "AveragedWeights",
    "Callback",
    "Candidate",
    "FullBatch",
    "Linear",
    "METRICS",
    "MemoryAccount",
    "MetricLogger",
    "Plan",
    "Predictions",
    "Profile",
    "Progress",
    "Run",
    "BatchShape",
    "activation_bytes",
    "align_columns",
    "baseline",
    "check_known_targets",
    "check_metric",
    "choose_warm_up",
    "batch_bytes",
    "compute_hits",
    "compute_micro_f1",
    "compute_mrr",
    "compute_r2",
    "compute_roc_auc",
    "divergence_error",
    "evaluate",
    "fit",
    "release_freed_memory",
    "gradients",
    "is_real",
    "limit_freed_memory",
    "known_target_mask",
    "link_loss",
    "loss_of",
    "make_inference_loader",
    "mean_age",
    "metric_of",
    "find_nonfinite_tensor",
    "fits_one_batch",
    "plan",
    "plan_micro_batches",
    "prediction_columns",
    "predictions",
    "profile",
    "raise_rate",
    "rank_links",
    "run_epochs",
    "score",
    "share_cores",
    "split_mask",
    "steps_per_epoch",
    "train_epoch",
    "clone_with_histories",
]
