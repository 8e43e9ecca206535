"""Generate graphs with planted communities and power-law degrees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data


class Communities:
    """Nodes sorted by community, with power-law weights, from which edges are drawn.

    Args:
        community: The community of each node, of shape ``[N]``, int64, sorted.
        num_communities: The number of communities.
        uniform: A uniform number for each node, of shape ``[N]``, double.
        exponent: Exponent of the degree distribution, above 2.
    """

    def __init__(
        self, community: Tensor, num_communities: int, uniform: Tensor, exponent: float
    ) -> None:
        largest = max(1.0, community.numel() ** 0.5)  # Limits the degree of hubs.
        weight = (1.0 - uniform).pow(-1.0 / (exponent - 1.0)).clamp_(max=largest)
        self.community, self.total = community, weight.cumsum(0)
        # As nodes are sorted, a community is one range of cumulative weights.
        padded = torch.nn.functional.pad(self.total, (1, 0))
        number = torch.arange(num_communities)
        self.low = padded[torch.searchsorted(community, number)]
        self.high = padded[torch.searchsorted(community, number, right=True)]

    def draw(self, uniform: tuple[Tensor, Tensor, Tensor], mixing: float) -> tuple[Tensor, Tensor]:
        """Draw both ends of edges by weight, the second from the same community or all nodes.

        Args:
            uniform: Three uniform numbers for each edge, double: for the first end, for the choice
                of all nodes, and for the second end.
            mixing: The fraction of edges whose second end is drawn from all nodes.
        """
        last = self.total.numel() - 1
        src = torch.searchsorted(self.total, uniform[0] * self.total[-1]).clamp_(max=last)
        anywhere, own = uniform[1] < mixing, self.community[src]
        low = torch.where(anywhere, 0.0, self.low[own])
        high = torch.where(anywhere, self.total[-1], self.high[own])
        dst = torch.searchsorted(self.total, low + uniform[2] * (high - low)).clamp_(max=last)
        return src, dst


def num_communities(num_nodes: int, num_classes: int, community_size: int) -> int:
    """Return the number of communities, at least one for every class."""
    return max(min(num_classes, num_nodes), num_nodes // community_size)


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
    *,
    shuffle: bool = True,
) -> Data:
    """Draw an undirected graph with planted communities and power-law degrees.

    The degree-corrected block model (Karrer and Newman, Physical Review E 83, 2011): each node has
    a weight from a power law; both ends of an edge are drawn by weight, the second one within the
    same community or, with probability ``mixing``, from all nodes. A class has several
    communities. Features are noisy class means, so that the neighbours of a node predict its class
    better than its own features. The same arguments give the same graph.

    Args:
        num_nodes: The number of nodes.
        avg_degree: Stored edges per node; both directions of an edge are stored.
            (default: ``20.0``)
        num_classes: The number of classes. (default: ``16``)
        num_features: Features per node. (default: ``64``)
        community_size: Nodes per community, on average. (default: ``200``)
        mixing: The fraction of edges whose second end is any node. (default: ``0.3``)
        exponent: Exponent of the degree distribution, above 2. (default: ``2.5``)
        noise: Standard deviation of the features around their class mean, whose elements have a
            standard deviation of 1. (default: ``4.0``)
        seed: Seed of the generator. (default: ``0``)
        shuffle: Number the nodes at random. Otherwise nodes are sorted by community, so that ranges
            of nodes are good parts. (default: ``True``)

    Returns:
        A graph with ``x``, ``y`` and ``edge_index``, which may have self-loops and duplicates.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.double)

    number = num_communities(num_nodes, num_classes, community_size)
    community = torch.randint(number, (num_nodes,), generator=generator).sort().values
    communities = Communities(community, number, uniform(num_nodes), exponent)
    num_pairs = int(num_nodes * avg_degree / 2)
    drawn = (uniform(num_pairs), uniform(num_pairs), uniform(num_pairs))
    src, dst = communities.draw(drawn, mixing)

    shuffled = torch.randperm(num_nodes, generator=generator)  # Also drawn without shuffling.
    if not shuffle:
        shuffled = torch.arange(num_nodes)
    edge_index = shuffled[torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])]
    y = torch.empty(num_nodes, dtype=torch.long)
    classes = torch.randperm(number, generator=generator) % num_classes
    y[shuffled] = classes[community]
    means = torch.randn(num_classes, num_features, generator=generator)
    x = torch.randn(num_nodes, num_features, generator=generator).mul_(noise).add_(means[y])
    return Data(x=x, y=y, edge_index=edge_index)
