"""Errors about pairs of nodes."""

import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GCN
from torch_geometric.sampler import NegativeSampling

import gas
from gas.graph import remove_links
from gas.loader import LinkLoader
from gas.training import link_loss, rank_links
from refusals import HALVES, load, ring

PAIR = torch.tensor([[0], [2]])
ROWS = torch.eye(4)


def links(data=None, **options):
    data = ring(edge_label_index=PAIR) if data is None else data
    return LinkLoader(data, HALVES, log=False, **options)


def of_other_pairs(t):
    links().load_state_dict(links(ring(edge_label_index=PAIR.flip(0))).state_dict())


CASES = {
    "LinkLoader, no pairs": lambda t: links(ring()),
    "LinkLoader, pairs of three": lambda t: links(ring(edge_label_index=torch.ones(3, 2).long())),
    "LinkLoader, an empty list of pairs": lambda t: links(ring(edge_label_index=PAIR[:, :0])),
    "LinkLoader, a node that isn't there": lambda t: links(ring(edge_label_index=PAIR + 2)),
    "LinkLoader, pairs that are a list": lambda t: links(ring(edge_label_index=[0, 1])),
    "LinkLoader, edges of the graph": lambda t: links(ring(edge_label_index=ring().edge_index)),
    "LinkLoader, labels of others": lambda t: links(
        ring(edge_label_index=PAIR, edge_label=torch.ones(2))
    ),
    "LinkLoader, triplets of no link": lambda t: links(
        ring(edge_label_index=PAIR, edge_label=torch.zeros(1)), neg_sampling="triplet"
    ),
    "LinkLoader, a typed graph": lambda t: links(HeteroData()),
    "LinkLoader, kept batches": lambda t: links(cache=True),
    "LinkLoader, negatives of some sort": lambda t: links(neg_sampling="hard"),
    "LinkLoader, negatives by weight": lambda t: links(
        neg_sampling=NegativeSampling("binary", dst_weight=torch.ones(4))
    ),
    "LinkLoader, a pool of some sort": lambda t: links(neg_pool="parts"),
    "LinkLoader, a state of other pairs": of_other_pairs,
    "remove_links, a prepared graph": lambda t: remove_links(
        gas.to_scalable(GCN(2, 2, 2), ring()).prepare(ring()), PAIR
    ),
    "remove_links, every edge": lambda t: remove_links(ring(), ring().edge_index),
    "link_loss, a batch of no pairs": lambda t: link_loss(ROWS, next(iter(load()))),
    "LinkLoader, a state of other draws": lambda t: links().load_state_dict(
        links(neg_pool="batch").state_dict()
    ),
    "LinkLoader, a triplet of a node that all know": lambda t: next(
        iter(links(ring(edge_label_index=torch.tensor([[0], [2]])), neg_sampling="triplet"))
    ),
    "rank_links, a number for each node": lambda t: rank_links(ROWS[:, 0], PAIR),
    "rank_links, whole outputs": lambda t: rank_links(ROWS.long(), PAIR),
    "rank_links, broken ids": lambda t: rank_links(ROWS, PAIR.float()),
    "rank_links, pairs of three": lambda t: rank_links(ROWS, torch.ones(3, 2).long()),
    "rank_links, scores that are NaN": lambda t: rank_links(ROWS * torch.nan, PAIR),
    "rank_links, scores of some": lambda t: rank_links(
        ROWS, PAIR, score=lambda src, every: src[:, :2]
    ),
}
