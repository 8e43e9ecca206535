"""Errors of ``gas.models``."""

import torch

from gas import models
from gas.models.pna import PNAConv
from refusals import first_batch

SIZES = dict(num_nodes=4, in_channels=2, hidden_channels=2, out_channels=2, num_layers=2)


def without_weights(layout):
    data, *args = first_batch(layout=layout)
    adj = data.adj_t if "adj_t" in data else data.edge_index
    models.GCN(**SIZES)(data.x, adj, *args)


def pna(aggregators=("sum",), scalers=("identity",)):
    PNAConv(2, 2, aggregators, scalers, torch.ones(4))


def on(x):
    data, *args = first_batch(layout="fused")
    models.GraphSAGE(**SIZES)(x(data.x), data.adj_t, *args)


CASES = {
    "GAT, an option of other models": lambda t: models.GAT(4, 2, 2, 1, 2, 1, 2, batch_norm=True),
    "GraphSAGE, batch_norm='no'": lambda t: models.GraphSAGE(**SIZES, batch_norm="no"),
    "GraphSAGE, no features": lambda t: on(lambda x: None),
    "GraphSAGE, a number for each node": lambda t: on(lambda x: x[:, 0]),
    "GCN, several widths with linear=True": lambda t: models.GCN(
        **{**SIZES, "hidden_channels": [2]}, linear=True
    ),
    "GCN, every element dropped": lambda t: models.GCN(**SIZES, dropout=1.0),
    "GCN, no normalised weights, csr": lambda t: without_weights("csr"),
    "GCN, no normalised weights, fused": lambda t: without_weights("fused"),
    "GCN, no normalised weights, edge_index": lambda t: without_weights("edge_index"),
    "GCN, a width that is a real number": lambda t: models.GCN(**{**SIZES, "hidden_channels": 2.5}),
    "GIN, negative noise": lambda t: models.GIN(**SIZES, noise=-0.1),
    "PNA, an unknown aggregator": lambda t: pna(aggregators=("sum", "median")),
    "PNA, one scaler as text": lambda t: pna(scalers="identity"),
}
