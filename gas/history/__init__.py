"""Histories: where embeddings wait for the batches that need them."""

from gas.history.history import History

__all__ = ["History"]
