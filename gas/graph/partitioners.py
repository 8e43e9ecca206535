"""Partitioners: METIS, KaMinPar and random parts, and the choice between them."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gas.graph.edges import Edges
from gas.native import free_memory, human, symmetrize_edges

# The largest weight of an edge for METIS and KaMinPar: far below an overflow of their sums.
MOST_WEIGHT = 2**20
# Bytes that a partitioner takes at its peak for every entry of the undirected graph, without the
# graph. METIS took 87 to 101 in graphs of 1.6 and 8 million entries; KaMinPar 25 in the larger one,
# or 19 compressed, and more in the smaller one. A weight comes on top.
METIS_BYTES, KAMINPAR_BYTES, WEIGHT_BYTES = 110, 30, 20
# For more entries, METIS takes minutes, and KaMinPar is preferred if it is installed.
MOST_METIS_ENTRIES = 20_000_000
# For more entries, KaMinPar compresses the graph: a quarter less memory for a tenth more time.
MOST_PLAIN_ENTRIES = 20_000_000


class Undirected(NamedTuple):
    """Both directions of every edge, once, without self-loops: METIS crashes on anything else.

    ``rowptr`` has shape ``[N + 1]``, int64; ``col`` and ``weight`` have a value for each entry:
    int32 where ids fit, and int64, or ``None``.
    """

    rowptr: Tensor
    col: Tensor
    weight: Tensor | None

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.rowptr.numel() - 1


def undirected_graph(edges: Edges) -> Undirected:
    """Return the graph for partitioners, with ``edges.weight`` from :func:`to_integer_weights`."""
    fits = edges.num_nodes <= torch.iinfo(torch.int32).max
    dtype = torch.int32 if fits else torch.int64
    return Undirected(*symmetrize_edges(edges.src, edges.dst, edges.num_nodes, edges.weight, dtype))


def to_integer_weights(weight: object, num_edges: int) -> Tensor:
    """Convert weights of edges to integers, of shape ``[E]``, int32.

    Integers up to :data:`MOST_WEIGHT` stay as they are. Others are scaled, so that the largest
    becomes that, and rounded up, so that only zeros become zero.
    """
    if not isinstance(weight, Tensor) or weight.is_complex() or weight.dtype == torch.bool:
        what = weight.dtype if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise ValueError(f"'edge_weight' is {what}, expected a tensor of integers or floats")
    if weight.shape not in ((num_edges,), (num_edges, 1)):
        raise ValueError(
            f"'edge_weight' has shape {list(weight.shape)}, expected one weight per edge: "
            f"[{num_edges}]"
        )
    weight = weight.detach().cpu().view(-1)
    wrong = ~(weight >= 0)  # NaN too.
    if weight.is_floating_point():
        wrong |= weight.isinf()
    if bool(wrong.any()):
        edge = int(wrong.nonzero()[0])
        raise ValueError(
            f"'edge_weight' holds {weight[edge].item()} at the edge {edge}: expected finite "
            "numbers, none negative, of how much an edge matters; take their absolute values, or "
            "remove the edge"
        )
    most = weight.max().item() if num_edges else 1
    if most == 0:
        raise ValueError("'edge_weight' is 0 for every edge: give some more, or leave it out")
    if weight.is_floating_point() or most > MOST_WEIGHT:
        weight = (weight.double() / most).mul_(MOST_WEIGHT).ceil_()
    return weight.int()


def pick_method(graph: Undirected) -> tuple[str, str]:
    """Choose a partitioner for a graph and the free memory.

    Returns:
        Its name, and the reason, which is empty for METIS of a graph that it partitions soon.
    """
    entries, free = graph.col.numel(), free_memory()
    weight = 0 if graph.weight is None else WEIGHT_BYTES
    metis_need, kaminpar_need = (entries * (b + weight) for b in (METIS_BYTES, KAMINPAR_BYTES))
    metis_fits = metis_need <= free
    installed = importlib.util.find_spec("kaminpar") is not None
    too_little = f"METIS needs about {human(metis_need)} of memory, {human(free)} are free"
    if metis_fits and entries <= MOST_METIS_ENTRIES:
        return "metis", ""
    if installed and kaminpar_need <= free:
        return (
            "kaminpar",
            f"METIS takes minutes for {entries:,} entries" if metis_fits else too_little,
        )
    if metis_fits:
        return "metis", "KaMinPar isn't installed, which would be faster: pip install kaminpar"
    cure = "free some" if installed else "free some, or pip install kaminpar"
    return "random", f"{too_little}, and KaMinPar {human(kaminpar_need)}: {cure}"


def metis_parts(graph: Undirected, num_parts: int, recursive: bool, seed: int) -> Tensor:
    """Partition by METIS: return the part of every node, of shape ``[N]``; parts may be empty."""
    import pymetis

    _, part = pymetis.part_graph(
        num_parts,
        # Other types are converted element by element.
        pymetis.CSRAdjacency(graph.rowptr.numpy(), graph.col.long().numpy()),
        eweights=None if graph.weight is None else graph.weight.numpy(),
        recursive=recursive,
        options=pymetis.Options(seed=seed),
    )
    return torch.from_numpy(np.asarray(part, dtype=np.int64))


def kaminpar_parts(graph: Undirected, num_parts: int, recursive: bool, seed: int) -> Tensor:
    """Partition by KaMinPar: return the part of every node, ``[N]``; parts may be empty."""
    try:
        import kaminpar
    except ImportError as error:
        raise ImportError("method='kaminpar' needs the package: pip install kaminpar") from error
    compress = graph.col.numel() > MOST_PLAIN_ENTRIES
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "graph.parhip")
        _write_parhip(graph, file)
        loaded = kaminpar.load_graph(file, kaminpar.GraphFileFormat.PARHIP, compress)
    kaminpar.reseed(seed)
    partitioner = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.default_context())
    return torch.tensor(partitioner.compute_partition(loaded, num_parts, 0.03), dtype=torch.long)


def _write_parhip(graph: Undirected, file: str) -> None:
    """Write the ParHIP binary format.

    A version, whose bits say what is left out or has 32 bits; the sizes; the byte offset of each
    row; columns; weights. All are uint64, but for columns of int32.
    """
    no_edge_weights, no_node_weights, small_ids = 1, 2, 8
    width = graph.col.element_size()
    version = (
        (no_edge_weights if graph.weight is None else 0)
        | no_node_weights
        | (small_ids if width == 4 else 0)
    )
    header = np.array([version, graph.num_nodes, graph.col.numel()], dtype=np.uint64)
    offsets = graph.rowptr.numpy() * width + (len(header) + graph.num_nodes + 1) * 8
    with open(file, "wb") as stream:
        for array in (header, offsets, graph.col.numpy()):
            array.tofile(stream)
        if graph.weight is not None:
            graph.weight.numpy().tofile(stream)


def random_parts(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    """Return a random part for every node, of shape ``[N]``; sizes differ by at most 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_nodes, generator=generator) % num_parts
