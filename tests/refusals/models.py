"""Errors of ``gas.models``."""

import torch

from gas import models
from gas.models.pna import PNAConv
from refusals import first_batch

DEGREES = torch.ones(4)
SIZES = dict(num_nodes=4, in_channels=2, hidden_channels=2, out_channels=2, num_layers=2)


def without_weights(layout):
    data, *args = first_batch(layout=layout)
    adj = data.adj_t if "adj_t" in data else data.edge_index
    models.GCN(**SIZES)(data.x, adj, *args)


def pna(aggregators=("sum",), scalers=("identity",), deg=DEGREES):
    PNAConv(2, 2, aggregators, scalers, deg)


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
    "GCN, features that are a real number": lambda t: models.GCN(**{**SIZES, "in_channels": 2.0}),
    "GCN, features of unknown width with linear=True": lambda t: models.GCN(
        **{**SIZES, "in_channels": -1}, linear=True
    ),
    "GCN, no width": lambda t: models.GCN(**{**SIZES, "hidden_channels": 0}),
    "GAT, several widths": lambda t: models.GAT(4, 2, [2], 1, 2, 1, 2),
    "GAT, no heads": lambda t: models.GAT(4, 2, 2, 1, 2, 0, 2),
    "APPNP, several widths": lambda t: models.APPNP(**{**SIZES, "hidden_channels": [2]}),
    "APPNP, a negative share": lambda t: models.APPNP(**SIZES, alpha=-1),
    "GCN2, several widths": lambda t: models.GCN2(**{**SIZES, "hidden_channels": [2]}),
    "GCN2, more than all": lambda t: models.GCN2(**SIZES, alpha=2),
    "GraphSAGE, no aggregation": lambda t: models.GraphSAGE(**SIZES, aggr=None),
    "GCN2, no theta": lambda t: models.GCN2(**SIZES, theta=None),
    "GCN2, a negative theta": lambda t: models.GCN2(**SIZES, theta=-5),
    "GraphSAGE, an unknown aggregation": lambda t: models.GraphSAGE(**SIZES, aggr="middle"),
    "GCN, every element dropped": lambda t: models.GCN(**SIZES, dropout=1.0),
    "GCN, no normalised weights, csr": lambda t: without_weights("csr"),
    "GCN, no normalised weights, fused": lambda t: without_weights("fused"),
    "GCN, no normalised weights, edge_index": lambda t: without_weights("edge_index"),
    "GCN, a width that is a real number": lambda t: models.GCN(**{**SIZES, "hidden_channels": 2.5}),
    "GIN, negative noise": lambda t: models.GIN(**SIZES, noise=-0.1),
    "GIN, noise that is no number": lambda t: models.GIN(**SIZES, noise=float("nan")),
    "PNA, degrees in a list": lambda t: pna(deg=[1, 1]),
    "PNA, no edges": lambda t: pna(deg=torch.zeros(2)),
    "PNA_JK, several widths": lambda t: models.PNA_JK(
        4, 2, [2], 2, 2, ["sum"], ["identity"], DEGREES
    ),
    "PNA, an unknown aggregator": lambda t: pna(aggregators=("sum", "median")),
    "PNA, one scaler as text": lambda t: pna(scalers="identity"),
}
