"""Generate graphs larger than memory: write them in blocks, and map them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.planted import Communities, num_communities
from gas.graph import map_private
from gas.native import check_integer, make_folder

KEYS = ("edge_index", "x", "y")


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
    """Draw a graph of the model of :func:`gas.datasets.planted.planted_partition` into a folder.

    Edges and features are drawn and written in blocks; this takes some 60 bytes of memory per node.
    The folder gets ``edge_index.npy`` of shape ``[2, E]``, int64, ``x.npy`` and ``y.npy``.
    :func:`gas.open_graph` reads it into memory, :func:`open_mapped` maps it. The same arguments
    give the same graph, which differs from that of :func:`planted_partition`.

    Args:
        folder: The folder, which is made if it doesn't exist.
        num_nodes: The number of nodes.
        avg_degree: See :func:`gas.datasets.planted.planted_partition`. (default: ``20.0``)
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
    check_integer("num_nodes", num_nodes, 1)
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
