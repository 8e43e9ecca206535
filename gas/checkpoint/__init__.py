"""Checkpoints: a training that was killed goes on as if it had not been."""

from gas.checkpoint.errors import CheckpointError
from gas.checkpoint.files import checkpoints, prune
from gas.checkpoint.loading import load, peek
from gas.checkpoint.saving import finish, save

__all__ = ["CheckpointError", "checkpoints", "finish", "load", "peek", "prune", "save"]
