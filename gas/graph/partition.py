"""Partitions: which nodes share a mini-batch.

METIS puts neighbours into the same part. Fewer halo rows then have to be moved, and those that
remain are fresher (Fey et al., ICML 2021, Section 3). After :func:`gas.permute`, every part is one
contiguous range of rows, so a push is one copy per part.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gas.graph.edges import CSR, Edges, read_edges
from gas.native.checks import check_integer
from gas.native.graph import coo_to_csr

METHODS = ("metis", "kaminpar", "random")


def metis(
    edge_index: Any,
    num_parts: int,
    recursive: bool = False,
    log: bool = True,
    *,
    num_nodes: int | None = None,
    method: str = "metis",
    seed: int = 0,
    cache: bool | str | Path = True,
) -> tuple[Tensor, Tensor]:
    """Partitions a graph into parts of about equal size with few edges between them.

    Edge directions, duplicate edges and self-loops don't matter to the partition. The result is
    cached on disk by the graph's hash, so that it is computed once.

    Args:
        edge_index: ``edge_index`` of shape ``[2, E]``, or ``adj_t``.
        num_parts: The number of parts, between 1 and the number of nodes. No part is empty.
        recursive: Bisect recursively instead of k-way partitioning; METIS only.
            (default: ``False``)
        log: Report progress on standard error. (default: ``True``)
        num_nodes: The number of nodes. (default: what ``edge_index`` says)
        method: ``"metis"``; ``"kaminpar"``, which is parallel and needs ``pip install
            gas[kaminpar]``; or ``"random"``, for graphs that neither can hold.
            (default: ``"metis"``)
        seed: Seed of the partitioner. (default: ``0``)
        cache: Whether to cache results, or the folder to cache them in. (default: ``True``, in
            ``$GAS_CACHE_DIR`` or ``~/.cache/gas``)

    Returns:
        ``perm`` of shape ``[N]``: the old id of every new node, for :func:`gas.permute`; and
        ``ptr`` of shape ``[num_parts + 1]``: part ``p`` is the new nodes ``ptr[p]`` to
        ``ptr[p + 1] - 1``.

    Raises:
        ValueError: If the graph or the number of parts is unusable.
    """
    if method not in METHODS:
        raise ValueError(f"'method' is {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    edges = read_edges(edge_index, num_nodes)
    edges = Edges(edges.src.cpu(), edges.dst.cpu(), None, edges.num_nodes)
    _check_num_parts(num_parts, edges.num_nodes)
    if num_parts == 1:
        return torch.arange(edges.num_nodes), torch.tensor([0, edges.num_nodes])

    start = time.perf_counter()
    file = None
    if cache and method != "random":
        folder = cache_dir() if cache is True else Path(cache)
        file = folder / "partitions" / f"{_hash(edges, num_parts, recursive, method, seed)}.npy"
    part = _load(file, edges.num_nodes, num_parts)
    if part is None:
        if log:
            print(f"Computing {num_parts} parts with {method} ...", end=" ", file=sys.stderr)
            sys.stderr.flush()
        part = _fill_empty(_PARTITIONERS[method](edges, num_parts, recursive, seed), num_parts)
        if log:
            print(f"done [{time.perf_counter() - start:.2f} s]", file=sys.stderr)
        _save(file, part)
    elif log:
        print(f"Found {num_parts} parts in {file}", file=sys.stderr)

    ptr = torch.zeros(num_parts + 1, dtype=torch.long)
    torch.cumsum(torch.bincount(part, minlength=num_parts), 0, out=ptr[1:])
    return torch.sort(part, stable=True).indices, ptr


def _check_num_parts(num_parts: int, num_nodes: int) -> None:
    check_integer("num_parts", num_parts, 1)
    if num_parts > max(num_nodes, 1):
        raise ValueError(
            f"'num_parts' is {num_parts}, but the graph has {num_nodes} nodes: ask for at most one "
            "part per node"
        )


# Partitioners -------------------------------------------------------------------------------------


def _undirected(edges: Edges) -> CSR:
    """Both directions of every edge, once, without self-loops: METIS crashes on anything else."""
    both = Edges(
        torch.cat([edges.src, edges.dst]), torch.cat([edges.dst, edges.src]), None, edges.num_nodes
    )
    rowptr, col, perm = coo_to_csr(both.dst, both.src, both.num_nodes)
    row = both.dst[perm]
    keep = row != col
    keep[1:] &= (row[1:] != row[:-1]) | (col[1:] != col[:-1])
    kept = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    return CSR(kept[rowptr], col[keep], None)


def _metis(edges: Edges, num_parts: int, recursive: bool, seed: int) -> Tensor:
    import pymetis

    graph = _undirected(edges)
    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(graph.rowptr.numpy(), graph.col.numpy()),
        recursive=recursive,
        options=pymetis.Options(seed=seed),
    )
    return torch.from_numpy(np.asarray(part, dtype=np.int64))


def _kaminpar(edges: Edges, num_parts: int, recursive: bool, seed: int) -> Tensor:
    try:
        import kaminpar
    except ImportError as error:
        raise ImportError("method='kaminpar' needs the package: pip install kaminpar") from error
    graph = _undirected(edges)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "graph.parhip")
        _write_parhip(graph, file)
        loaded = kaminpar.load_graph(file, kaminpar.GraphFileFormat.PARHIP)
    kaminpar.reseed(seed)
    partitioner = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.default_context())
    return torch.tensor(partitioner.compute_partition(loaded, num_parts, 0.03), dtype=torch.long)


def _write_parhip(graph: CSR, file: str) -> None:
    """Writes the ParHIP binary format: version, sizes, byte offsets of rows, columns, as uint64."""
    unweighted_64_bit = 3
    num_nodes, num_edges = graph.rowptr.numel() - 1, graph.col.numel()
    header = np.array([unweighted_64_bit, num_nodes, num_edges], dtype=np.uint64)
    offsets = (graph.rowptr.numpy() + len(header) + num_nodes + 1) * 8
    with open(file, "wb") as stream:
        for array in (header, offsets.astype(np.uint64), graph.col.numpy().astype(np.uint64)):
            array.tofile(stream)


def _random(edges: Edges, num_parts: int, recursive: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(edges.num_nodes, generator=generator) % num_parts


_PARTITIONERS = {"metis": _metis, "kaminpar": _kaminpar, "random": _random}


def _fill_empty(part: Tensor, num_parts: int) -> Tensor:
    """Gives every empty part half of the part that is largest then."""
    count = torch.bincount(part, minlength=num_parts)
    for empty in (count == 0).nonzero().view(-1).tolist():
        largest = int(count.argmax())
        nodes = (part == largest).nonzero().view(-1)
        moved = nodes[: nodes.numel() // 2]
        part[moved] = empty
        count[largest] -= moved.numel()
        count[empty] = moved.numel()
    return part


# Cache --------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where results are kept between runs: ``$GAS_CACHE_DIR``, or ``gas`` in the user's cache."""
    if "GAS_CACHE_DIR" in os.environ:
        return Path(os.environ["GAS_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gas"


def _hash(edges: Edges, *settings: object) -> str:
    digest = hashlib.blake2b(repr((edges.num_nodes, *settings)).encode(), digest_size=16)
    for ids in (edges.src, edges.dst):
        digest.update(ids.contiguous().numpy().data)
    return digest.hexdigest()


def _load(file: Path | None, num_nodes: int, num_parts: int) -> Tensor | None:
    """Reads a cached partition; an unreadable or unfitting one counts as absent."""
    if file is None or not file.exists():
        return None
    try:
        with file.open("rb") as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        part = torch.from_numpy(array.astype(np.int64))
    except Exception:  # Whatever damaged bytes lead to.
        return None
    if part.shape != (num_nodes,) or bool((part < 0).any()):
        return None
    count = torch.bincount(part, minlength=num_parts)
    return part if count.numel() == num_parts and bool((count > 0).all()) else None


def _save(file: Path | None, part: Tensor) -> None:
    if file is None:
        return
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".npy")
        with os.fdopen(handle, "wb") as stream:
            np.save(stream, part.numpy().astype(np.int32))
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(
            f"the partition could not be cached in {file.parent} ({error}): set GAS_CACHE_DIR to a "
            "writable folder, or pass cache=False",
            stacklevel=3,
        )
