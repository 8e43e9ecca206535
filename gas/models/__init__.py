"""Models that train with historical embeddings, one file each."""

from gas.models.gcn import GCN

__all__ = ["GCN"]
