"""Models that train with historical embeddings, one file each."""

from gas.models.appnp import APPNP
from gas.models.gat import GAT
from gas.models.gcn import GCN
from gas.models.gcn2 import GCN2
from gas.models.gin import GIN
from gas.models.layered import LayeredGNN, check_features
from gas.models.pna import PNA
from gas.models.pna_jk import PNA_JK
from gas.models.sage import GraphSAGE

__all__ = [
    "APPNP",
    "GAT",
    "GCN",
    "GCN2",
    "GIN",
    "GraphSAGE",
    "LayeredGNN",
    "PNA",
    "PNA_JK",
    "check_features",
]
