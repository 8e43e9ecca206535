"""Graphs and chains: settings that the tests use, and what lists every state of a small one."""

import itertools

import torch
from conftest import random_graph
from torch_geometric.data import Data

import gas

SETTINGS = dict(
    mu_e=0.3, mu_v=0.4, sigma_delta_e=0.25, sigma_delta_v=0.3, a_e=0.2, b_e=0.15, a_v=0.1, b_v=0.3,
    lam1=0.7, lam2=0.8, lam3=1.2, lam4=0.6,
)  # fmt: skip

PAPER = dict(
    mu_e=0.3, mu_v=0.7, sigma_delta_e=0.1, sigma_delta_v=0.01, a_e=10, b_e=1, a_v=1, b_v=1, lam1=5,
    lam2=0.9999, lam3=1, lam4=0.999,
)  # fmt: skip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_chain(data=None, **options):
    data = random_graph() if data is None else data
    return gas.MHAug(data, **{**PAPER, "generator": seeded(), **options})


def follow(chain, steps=30):
    """Return the masks after each step."""
    masks = []
    for _ in range(steps):
        chain.step()
        masks += [chain.edge_mask.clone(), chain.node_mask.clone()]
    return masks


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def path(num_nodes=4):
    """Both directions of each edge: 2 (num_nodes - 1) of them."""
    up = torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)])
    return Data(x=torch.ones(num_nodes, 3), edge_index=torch.cat([up, up.flip(0)], dim=1))


def chain_on(data, **options):
    """Return a chain with entropies that differ from node to node."""
    chain = gas.MHAug(data, generator=seeded(3), **{**SETTINGS, **options})
    chain.update_entropy(torch.randn(data.num_nodes, 3, generator=seeded(5)))
    return chain


def states(chain):
    """Every state of nonzero probability: masks of units, of edges and of nodes."""
    bits = [True, False]
    units = [torch.tensor(mask) for mask in itertools.product(bits, repeat=chain.units.size)]
    nodes = [torch.tensor(mask) for mask in itertools.product(bits, repeat=chain.units.num_nodes)]
    pairs = itertools.product(units, nodes[:-1])  # The last drops every node.
    return [(unit, chain.units.to_edge_mask(unit), node) for unit, node in pairs]


def target(chain):
    """Of every state: log P, how many edges and nodes it drops, and the normalised probability."""
    listed = states(chain)
    log_p = torch.stack([chain.log_prob(edges, nodes) for _, edges, nodes in listed])
    k = [[(~units).sum(), (~nodes).sum()] for units, _, nodes in listed]
    return log_p, torch.tensor(k, dtype=torch.double), log_p.softmax(dim=0)


def number(units, nodes):
    """Return the place of a state in :func:`states`."""
    bits = (~torch.cat([units, nodes])).tolist()
    edges = sum(bit << i for i, bit in enumerate(reversed(bits[: len(units)])))
    masks = sum(bit << i for i, bit in enumerate(reversed(bits[len(units) :])))
    return edges * (2 ** len(nodes) - 1) + masks
