"""Generate graphs with planted communities and power-law degrees, in memory or on disk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import map_private
from gas.native import check_flags, check_integer, check_number, make_folder

KEYS = ("edge_index", "x", "y")  # Of a graph that is written to a folder.


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


def _check(
    num_nodes: int,
    avg_degree: float,
    num_classes: int,
    num_features: int,
    community_size: int,
    mixing: float,
    exponent: float,
    noise: float,
) -> None:
    """Refuse unusable arguments of :func:`planted_partition`."""
    check_integer("num_nodes", num_nodes, 1)
    check_integer("num_classes", num_classes, 1)
    check_integer("num_features", num_features, 0)
    check_integer("community_size", community_size, 1)
    for name, value in (("avg_degree", avg_degree), ("noise", noise)):
        check_number(name, value, lambda size: 0 <= size < math.inf, "a number of at least 0")
    check_number("mixing", mixing, lambda share: 0 <= share <= 1, "a fraction in [0, 1]")
    check_number("exponent", exponent, lambda power: 2 < power < math.inf, "a number above 2")


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

    Raises:
        ValueError: If an argument is unusable.
    """
    _check(
        num_nodes, avg_degree, num_classes, num_features, community_size, mixing, exponent, noise
    )
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


@check_flags
def write_planted_partition(
    folder: str | Path,
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
    dtype: torch.dtype = torch.float32,
    block: int = 2**20,
) -> Data:
    """Draw a graph of the model of :func:`planted_partition` into a folder.

    Edges and features are drawn and written in blocks; this takes some 60 bytes of memory per node.
    The folder gets ``edge_index.npy`` of shape ``[2, E]``, int64, ``x.npy`` and ``y.npy``.
    :func:`gas.open_graph` reads it into memory, :func:`open_mapped` maps it. The same arguments
    give the same graph, which differs from that of :func:`planted_partition`.

    Args:
        folder: The folder, which is made if it doesn't exist.
        num_nodes: The number of nodes.
        avg_degree: See :func:`planted_partition`. (default: ``20.0``)
        num_classes: See there. (default: ``16``)
        num_features: See there. (default: ``64``)
        community_size: See there. (default: ``200``)
        mixing: See there. (default: ``0.3``)
        exponent: See there. (default: ``2.5``)
        noise: See there. (default: ``4.0``)
        seed: See there. (default: ``0``)
        dtype: The type of the features: ``torch.float32`` or ``torch.float16``.
            (default: ``torch.float32``)
        block: The number of edges, or features, to draw at a time, which doesn't change the graph.
            (default: ``1048576``)

    Returns:
        The graph, as :func:`open_mapped` returns it.

    Raises:
        ValueError: If an argument is unusable, or the folder has such files already.
    """
    _check(
        num_nodes, avg_degree, num_classes, num_features, community_size, mixing, exponent, noise
    )
    check_integer("seed", seed, 0)
    check_integer("block", block, 1)
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(f"'dtype' is {dtype}, expected torch.float32 or torch.float16")
    folder = Path(folder)
    there = [f"{key}.npy" for key in KEYS if (folder / f"{key}.npy").exists()]
    if there:
        raise ValueError(f"'folder' is {str(folder)!r}, which holds {there[0]}: choose another")
    make_folder("folder", folder)
    # Separate generators, so that the graph doesn't depend on the size of blocks.
    for_nodes, for_src, for_anywhere, for_dst, for_means, for_x = (
        np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(6)
    )

    number = num_communities(num_nodes, num_classes, community_size)
    community = torch.from_numpy(for_nodes.integers(number, size=num_nodes)).sort().values
    uniform = torch.from_numpy(for_nodes.random(num_nodes))
    communities = Communities(community, number, uniform, exponent)
    shuffled = torch.from_numpy(for_nodes.permutation(num_nodes))
    y = torch.empty(num_nodes, dtype=torch.long)
    classes = torch.from_numpy(for_nodes.permutation(number) % num_classes)
    y[shuffled] = classes[community]
    np.save(folder / "y.npy", y.numpy())

    num_pairs = int(num_nodes * avg_degree / 2)
    edges = _BlockWriter(folder / "edge_index.npy", np.dtype(np.int64), (2, 2 * num_pairs))
    for start in range(0, num_pairs, block):
        size = min(block, num_pairs - start)
        drawn = [torch.from_numpy(r.random(size)) for r in (for_src, for_anywhere, for_dst)]
        src, dst = communities.draw((drawn[0], drawn[1], drawn[2]), mixing)
        src, dst = shuffled[src], shuffled[dst]
        for position, ids in enumerate((src, dst, dst, src)):  # Both directions, row by row.
            edges.write(position * num_pairs + start, ids)

    means = torch.from_numpy(for_means.standard_normal((num_classes, num_features), np.float32))
    x = _BlockWriter(folder / "x.npy", means.to(dtype).numpy().dtype, (num_nodes, num_features))
    rows = max(1, block // max(1, num_features))
    for start in range(0, num_nodes, rows):
        own = y[start : start + rows]
        drawn_x = torch.from_numpy(for_x.standard_normal((own.numel(), num_features), np.float32))
        x.write(start * num_features, drawn_x.mul_(noise).add_(means[own]).to(dtype))
    return open_mapped(folder)


def open_mapped(folder: str | Path) -> Data:
    """Map the graph in a folder of ``edge_index.npy``, ``x.npy`` and ``y.npy`` into memory.

    The system reads pages on access, and drops them when memory is short. Changes of the tensors
    stay in memory; the files don't change.

    Raises:
        ValueError: If a file is missing.
    """
    data = Data()
    for key in KEYS:
        file = Path(folder) / f"{key}.npy"
        if not file.exists():
            raise ValueError(f"'folder' is {str(folder)!r}, which has no {key}.npy")
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        start = getattr(array, "offset", 0)
        with file.open("rb") as stream:
            mapped = map_private(stream.fileno(), array.dtype, start, array.shape)
        data[key] = torch.from_numpy(mapped)
    return data


class _BlockWriter:
    """Writer of an ``.npy`` file in blocks, in any order."""

    def __init__(self, file: Path, dtype: np.dtype, shape: tuple[int, int]) -> None:
        self.file, self.itemsize, self.offset = file, dtype.itemsize, 0
        if 0 in shape:  # An empty array can't be mapped.
            np.save(file, np.empty(shape, dtype))
            return
        self.offset = np.lib.format.open_memmap(file, "w+", dtype, shape).offset

    def write(self, start: int, values: Tensor) -> None:
        """Write ``values`` from the element ``start`` on."""
        with self.file.open("r+b") as stream:
            stream.seek(self.offset + start * self.itemsize)
            values.numpy().tofile(stream)
