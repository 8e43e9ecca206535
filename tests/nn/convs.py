"""Convolutions in pairs: PyG's, and ours with its weights."""

import torch
import torch_geometric.nn as pyg

from gas import nn


def mlp(*layers):
    return torch.nn.Sequential(torch.nn.Linear(10, 4), *layers)


CONVS = {
    "GCNConv": ((5, 4), {"normalize": False}),
    "GCNConv normalised": ((5, 4), {}),
    "GCNConv improved": ((5, 4), {"improved": True, "bias": False}),
    "SAGEConv": ((5, 4), {}),
    "SAGEConv max": ((5, 4), {"aggr": "max", "normalize": True}),
    "SAGEConv project": ((5, 4), {"aggr": "sum", "project": True, "root_weight": False}),
    "GINConv": ((torch.nn.Linear(5, 4),), {"train_eps": True, "eps": 0.3}),
    "GraphConv": ((5, 4), {}),
    "GraphConv mean": ((5, 4), {"aggr": "mean"}),
    "GATConv": ((5, 4), {"heads": 2, "add_self_loops": False}),
    "GATConv loops": ((5, 4), {"heads": 3, "concat": False, "negative_slope": 0.1}),
    "GATConv residual": ((5, 4), {"heads": 2, "residual": True, "bias": False}),
    "GATv2Conv": ((5, 4), {"heads": 2, "add_self_loops": False}),
    "GATv2Conv loops": ((5, 4), {"heads": 3, "concat": False, "negative_slope": -0.1}),
    "GATv2Conv residual": (((5, 5), 4), {"heads": 2, "residual": True, "bias": False}),
    "GATv2Conv shared": ((5, 4), {"heads": 2, "share_weights": True}),
    "GCN2Conv": ((5, 0.2, 0.5, 2), {"normalize": False}),
    "GCN2Conv normalised": ((5, 0.2, 0.5, 2), {"shared_weights": False}),
    "SimpleConv": ((), {"aggr": "sum"}),
    "EdgeConv": ((mlp(torch.nn.ReLU()),), {}),
    "EdgeConv linear": ((pyg.Linear(10, 4, bias=False),), {"aggr": "min"}),
    "EdgeConv sum": ((mlp(torch.nn.ELU(0.5)),), {"aggr": "sum"}),
    "EdgeConv mean": ((mlp(torch.nn.LeakyReLU()),), {"aggr": "mean"}),
    "EdgeConv mean linear": ((mlp(),), {"aggr": "mean"}),
    "GMMConv": ((5, 4, 1, 3), {}),
    "GMMConv sum": (((5, 5), 2, 1, 2), {"aggr": "sum", "bias": False}),
}
WEIGHTED = ("GCNConv", "GraphConv", "GCN2Conv", "SimpleConv", "GMMConv")


def pair(name):
    """PyG's layer, and ours with its weights."""
    args, options = CONVS[name]
    cls = name.split()[0]
    theirs = getattr(pyg, cls)(*args, **options).double()
    ours = getattr(nn, cls)(*args, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def call(conv, x, adj, weight=None):
    extra = () if weight is None else (weight,)
    if isinstance(conv, pyg.GMMConv) and weight is not None:
        extra = (weight[:, None],)  # One coordinate.
    if isinstance(conv, pyg.GCN2Conv):
        front = x[0] if isinstance(x, tuple) else x
        return conv(front, front.flip(1), adj, *extra)
    if isinstance(conv, pyg.GCNConv) and isinstance(x, tuple):
        x = x[0]
    return conv(x, adj, *extra)
