"""The history."""

from gas import History

__all__ = ["History"]
