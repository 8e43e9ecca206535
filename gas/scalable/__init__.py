"""``ScalableGNN``, the base class of models: calls, inference, exactness and verification."""

from gas.loader import unwrap_loader
from gas.native import check_integer, check_names, check_number, check_probability
from gas.scalable.arguments import check_constructor
from gas.scalable.base import (
    emb_device,
    free_buffers,
    idle_bytes,
    moved_bytes,
    preserve_modes,
    set_banks,
)
from gas.scalable.call import BANKS, cancel_pulls, read_ahead, start_pulls
from gas.scalable.checks import adjacency, attributes, collect_kwargs
from gas.scalable.distributed import Exchange, Group, RankError
from gas.scalable.distributed.distribute import Distributed, distribute
from gas.scalable.distributed.ranks import ModelRanks, Traffic
from gas.scalable.hetero.convert import to_hetero_model
from gas.scalable.hetero.model import HeteroModel
from gas.scalable.inference import compute_dtype, refresh_and_predict
from gas.scalable.memory import SavedTensors, activation_bytes, preserve_state, run_forward
from gas.scalable.model import ScalableGNN
from gas.scalable.node_predictor import (
    NodePredictor,
    NotedState,
    graph_of,
    has_state,
    is_exact,
    mark_exact,
    note_state,
    state_fingerprint,
)
from gas.scalable.norms import GraphNorms, has_equal_variances, is_tracked
from gas.scalable.one_batch import OneBatch
from gas.scalable.pack import is_packed, pack_rows
from gas.scalable.prefetch import PrefetchLoader
from gas.scalable.verify import Verification, verify

__all__ = [
    "BANKS",
    "NodePredictor",
    "NotedState",
    "Distributed",
    "Exchange",
    "Group",
    "RankError",
    "GraphNorms",
    "HeteroModel",
    "OneBatch",
    "PrefetchLoader",
    "ModelRanks",
    "SavedTensors",
    "ScalableGNN",
    "Traffic",
    "Verification",
    "activation_bytes",
    "adjacency",
    "attributes",
    "cancel_pulls",
    "check_constructor",
    "check_integer",
    "check_names",
    "check_number",
    "check_probability",
    "compute_dtype",
    "distribute",
    "emb_device",
    "free_buffers",
    "graph_of",
    "has_equal_variances",
    "has_state",
    "idle_bytes",
    "is_exact",
    "is_packed",
    "pack_rows",
    "is_tracked",
    "preserve_state",
    "mark_exact",
    "moved_bytes",
    "note_state",
    "collect_kwargs",
    "preserve_modes",
    "read_ahead",
    "refresh_and_predict",
    "run_forward",
    "set_banks",
    "start_pulls",
    "state_fingerprint",
    "to_hetero_model",
    "verify",
    "unwrap_loader",
]
