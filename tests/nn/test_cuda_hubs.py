"""A row of millions of entries on a CUDA device: its pieces are joined in groups, then by a block.

Features are small integers, whose sums are exact in any order: nothing may be missing, or count
twice.
"""

import pytest
import torch
from adjacencies import make_adjacency

from gas.nn import gat_attention, spmm

DEVICE = "cuda"
ENTRIES = 2_000_000


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("width", [1, 8, 130, 512])
def test_a_row_of_millions_of_entries(width):
    adj = make_adjacency(2, 300, ENTRIES)
    there = adj.to(DEVICE)
    x = torch.randint(-4, 5, (300, width)).float()
    count = torch.bincount(adj.to_edge_index()[0][0], minlength=300)
    wanted = (count[:, None] * x.long()).sum(dim=0).float()
    leaf = x.to(DEVICE).requires_grad_()
    out = spmm(there, leaf)
    out.sum().backward()
    assert torch.equal(out.cpu(), torch.stack([wanted, torch.zeros(width)]))
    assert torch.equal(leaf.grad.cpu(), count[:, None].expand(-1, width).float())
    largest = spmm(there, leaf.detach(), reduce="max")
    assert torch.equal(largest[0].cpu(), x[count > 0].amax(dim=0))

    # Equal scores make attention the mean.
    scores = [torch.zeros(n, 2, device=DEVICE) for n in (300, 2)]
    heads = torch.stack([leaf.detach(), -leaf.detach()], dim=1)
    mean = gat_attention(there, heads, *scores)
    assert torch.allclose(mean[0, 0].cpu() * ENTRIES, wanted, rtol=1e-6, atol=1)
    assert torch.equal(mean[0, 1], -mean[0, 0])
