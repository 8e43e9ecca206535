"""Checkpoints: a training that was killed goes on as if it had not been."""

from gas.checkpoint.files import checkpoints, prune
from gas.checkpoint.save_load import finish, load, peek, save
from gas.checkpoint.tensors import CheckpointError

__all__ = ["CheckpointError", "checkpoints", "finish", "load", "peek", "prune", "save"]
