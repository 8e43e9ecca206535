"""Generated graphs of any size: planted communities with power-law degrees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data


def planted_partition(
    num_nodes: int,
    avg_degree: float = 20.0,
    num_classes: int = 16,
    num_features: int = 64,
    community_size: int = 200,
    mixing: float = 0.3,
    exponent: float = 2.5,
    noise: float = 4.0,
    seed: int = 0,
) -> Data:
    """Draws an undirected graph with planted communities and power-law degrees.

    The degree-corrected block model (Karrer and Newman, Physical Review E 83, 2011): each node has
    a weight from a power law; an edge takes its first end by weight, and its second by weight too,
    within the same community or, with probability ``mixing``, anywhere. A class is several
    communities. Features are noisy class means, so that a node's neighbours tell its class better
    than its own features do. The same arguments give the same graph.

    Args:
        num_nodes: The number of nodes.
        avg_degree: Stored edges per node; both directions of an edge are stored.
            (default: ``20.0``)
        num_classes: The number of classes. (default: ``16``)
        num_features: Features per node. (default: ``64``)
        community_size: Nodes per community, on average. (default: ``200``)
        mixing: The fraction of edges whose second end may lie anywhere. (default: ``0.3``)
        exponent: Exponent of the degree distribution, above 2. (default: ``2.5``)
        noise: Standard deviation of the features around their class mean, whose elements have a
            standard deviation of 1. (default: ``4.0``)
        seed: Seed of the generator. (default: ``0``)

    Returns:
        A graph with ``x``, ``y`` and ``edge_index``, self-loops and duplicates possible.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.double)

    num_communities = max(min(num_classes, num_nodes), num_nodes // community_size)
    # Nodes are drawn sorted by community, so that a community is one range of cumulative weights.
    community = torch.randint(num_communities, (num_nodes,), generator=generator).sort().values
    largest = max(1.0, num_nodes**0.5)  # A cap keeps hubs from exceeding the expected degree.
    weight = (1.0 - uniform(num_nodes)).pow(-1.0 / (exponent - 1.0)).clamp_(max=largest)
    total = weight.cumsum(0)
    first = torch.searchsorted(community, torch.arange(num_communities))
    last = torch.searchsorted(community, torch.arange(num_communities), right=True)
    padded = torch.nn.functional.pad(total, (1, 0))

    num_pairs = int(num_nodes * avg_degree / 2)
    src = torch.searchsorted(total, uniform(num_pairs) * total[-1]).clamp_(max=num_nodes - 1)
    anywhere = uniform(num_pairs) < mixing
    own = community[src]
    low = torch.where(anywhere, 0.0, padded[first[own]])
    high = torch.where(anywhere, total[-1], padded[last[own]])
    dst = torch.searchsorted(total, low + uniform(num_pairs) * (high - low))
    dst.clamp_(max=num_nodes - 1)

    shuffled = torch.randperm(num_nodes, generator=generator)
    edge_index = shuffled[torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])]
    y = torch.empty(num_nodes, dtype=torch.long)
    classes = torch.randperm(num_communities, generator=generator) % num_classes
    y[shuffled] = classes[community]
    means = torch.randn(num_classes, num_features, generator=generator)
    x = torch.randn(num_nodes, num_features, generator=generator).mul_(noise).add_(means[y])
    return Data(x=x, y=y, edge_index=edge_index)
