"""Operators and layers that are fast on mini-batches with a halo."""

from gas.nn.dropout import dropout

__all__ = ["dropout"]
