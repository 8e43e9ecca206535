"""A partitioned graph, and what is in its batches."""

import pytest
import torch
from conftest import random_graph

import gas
from gas.loader import batch as sub_data

LAYOUTS = [
    "csr",
    "edge_index",
    pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
]


def make(num_parts=6, **kwargs):
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    data.edge_attr = torch.arange(data.num_edges).view(-1, 1) * 10
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=data.num_nodes, log=False)
    data = gas.permute(data, perm, log=False)
    return data, ptr


def dense_of(data, layout, weighted=True):
    """Return the batch's adjacency as a dense matrix [rows, columns]."""
    if layout in ("csr", "fused"):
        adj = data.adj_t if layout == "csr" else data.adj_t.to_torch_sparse()
        return adj.to_dense()
    if layout == "sparse_tensor":  # Whose to_dense keeps one of several duplicates.
        row, col, value = data.adj_t.coo()
        return torch.zeros(data.adj_t.sizes()).index_put_((row, col), value, accumulate=True)
    out = torch.zeros(data.num_nodes, data.num_nodes)
    value = data.edge_weight if weighted else torch.ones(data.edge_index.size(1))
    return out.index_put_((data.edge_index[1], data.edge_index[0]), value, accumulate=True)


def everything(batch):
    return [*batch[2:], *sub_data.iter_tensors(batch.data)]
