"""The history."""

from gas.history import History

__all__ = ["History"]
