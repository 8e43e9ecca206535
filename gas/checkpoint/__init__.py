"""Checkpoints: save the state of a training, and resume it exactly."""

from gas.checkpoint.files import checkpoints, prune
from gas.checkpoint.save_load import finish, load, peek, save
from gas.checkpoint.tensors import CheckpointError

__all__ = ["CheckpointError", "checkpoints", "finish", "load", "peek", "prune", "save"]
