"""Attention layers on batches: rows that are sources and destinations are transformed once."""

import torch
from adjacencies import make_adjacency

from gas import nn


def test_the_rows_of_a_batch_are_transformed_once():
    adj = make_adjacency(7, 19, 40)
    conv = nn.GATConv(5, 4, add_self_loops=False)
    calls = []
    conv.lin.register_forward_hook(lambda m, args, out: calls.append(out.size(0)))
    x = torch.randn(19, 5, requires_grad=True)
    together = conv((x, x[:7]), adj)
    assert calls == [19]
    apart = conv((x, x[:7].clone()), adj)
    assert calls == [19, 19, 7]
    assert torch.allclose(together, apart)
    conv((x, x.detach()[:7]), adj)  # Which gets no gradient: not the same rows.
    assert calls[-2:] == [19, 7]


def test_shared_weights_transform_the_rows_of_a_batch_once():
    adj = make_adjacency(7, 19, 40)
    conv = nn.GATv2Conv(5, 4, share_weights=True, add_self_loops=False)
    calls = []
    conv.lin_l.register_forward_hook(lambda m, args, out: calls.append(out.size(0)))
    x = torch.randn(19, 5, requires_grad=True)
    together = conv((x, x[:7]), adj)
    assert calls == [19]
    apart = conv((x, x[:7].clone()), adj)
    assert calls == [19, 19, 7]
    assert torch.allclose(together, apart)
