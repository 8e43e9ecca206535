"""``ScalableGNN``, the base class of models, and what a call of one does."""

from gas.scalable.base import emb_device, free_buffers, idle_bytes, moved_bytes, set_banks
from gas.scalable.call import BANKS, cancel_pulls, read_ahead, start_pulls
from gas.scalable.checks import adjacency, attributes, named_arguments
from gas.scalable.chosen import ChosenNodes, graph_of, is_exact, made_exact, state_of
from gas.scalable.distributed import Distributed, distribute
from gas.scalable.hetero.convert import to_typed
from gas.scalable.hetero.model import HeteroModel
from gas.scalable.inference import compute_dtype
from gas.scalable.memory import SavedTensors, activation_bytes, left_alone, run_forward
from gas.scalable.model import ScalableGNN
from gas.scalable.norms import GraphNorms, is_tracked
from gas.scalable.one_batch import OneBatch
from gas.scalable.pack import is_packed, pack_rows
from gas.scalable.prefetch import PrefetchLoader
from gas.scalable.ranks import Ranks, Traffic
from gas.scalable.verify import Verification, verify

__all__ = [
    "BANKS",
    "ChosenNodes",
    "Distributed",
    "GraphNorms",
    "HeteroModel",
    "OneBatch",
    "PrefetchLoader",
    "Ranks",
    "SavedTensors",
    "ScalableGNN",
    "Traffic",
    "Verification",
    "activation_bytes",
    "adjacency",
    "attributes",
    "cancel_pulls",
    "compute_dtype",
    "distribute",
    "emb_device",
    "read_ahead",
    "free_buffers",
    "graph_of",
    "idle_bytes",
    "is_exact",
    "is_packed",
    "pack_rows",
    "is_tracked",
    "left_alone",
    "made_exact",
    "moved_bytes",
    "named_arguments",
    "run_forward",
    "set_banks",
    "start_pulls",
    "state_of",
    "to_typed",
    "verify",
]
