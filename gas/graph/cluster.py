"""A graph made ready for mini-batches: transformed as a whole, cut into parts, renumbered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.edges import check_edge_rows, read_graph
from gas.graph.features import with_csr_features
from gas.graph.partition import find_parts
from gas.graph.permute import PARTS, permute
from gas.native.memory import bytes_of

PERM = "perm"


class Model(Protocol):
    """What a graph is cut for, such as a :class:`gas.ScalableGNN`."""

    def prepare(self, data: Data) -> Data:
        """The graph as layers take it."""

    def parts_within(self, memory: int, cut: Callable[[int], Data]) -> int:
        """Into how many parts the graph is to be cut for a mini-batch of one to fit."""


def cluster(
    data: Data,
    num_parts: int | str,
    *,
    model: Model | None = None,
    memory: int | str | None = None,
    recursive: bool = False,
    edge_weight: Tensor | None = None,
    method: str = "metis",
    seed: int = 0,
    cache: bool | str | Path = True,
    log: bool = True,
    in_place: bool = False,
) -> Data:
    """Cuts a graph into parts for mini-batches, and renumbers its nodes so that each is one range.

    It is :meth:`gas.ScalableGNN.prepare`, :func:`gas.metis` and :func:`gas.permute` in one::

        graph = gas.cluster(data, num_parts=40, model=model)
        loader = gas.SubgraphLoader(graph, batch_size=10, shuffle=True)

    Args:
        data: The graph; it is not modified. Its features ``x`` may be sparse, a matrix of
            ``torch.sparse`` or SciPy.
        num_parts: The number of parts, between 1 and the number of nodes. No part is empty.
            ``"auto"``: few enough for ``memory``.
        model: Whose transform of the whole graph is applied first, such as the normalisation of
            :class:`gas.models.GCN`; give the graph as it was before. (default: no transform)
        memory: With ``num_parts="auto"``, how many bytes a mini-batch of one part may take in
            training, as a number or like ``"2GB"`` (10^9 bytes each; ``"2GiB"``: 2^30): its
            tensors, and what autograd keeps for the backward pass. It is measured, with ``model``,
            on the part with most edges; parameters, optimizer and histories come on top.
            :func:`gas.plan` is for all that the process takes.
        recursive: See :func:`gas.metis`.
        edge_weight: See :func:`gas.metis`; of the edges of ``data``, as it was given. Those that it
            holds itself are for its model, and don't matter to the parts.
        method: See :func:`gas.metis`.
        seed: See :func:`gas.metis`.
        cache: See :func:`gas.metis`.
        log: Report progress on standard error. (default: ``True``)
        in_place: Write to the tensors of ``data``, which is of no use afterwards; see
            :func:`gas.permute`. (default: ``False``)

    Returns:
        The graph with its nodes, masks, lists of node ids (``train_idx``, ...) and edges
        renumbered, and ``parts``, of shape ``[num_parts + 1]``: part ``p`` is the nodes
        ``parts[p]`` to ``parts[p + 1] - 1``; and ``perm``, of shape ``[N]``: the row of ``data``
        that each node was.

    Raises:
        ValueError: If the graph or an argument is unusable, or the graph is clustered already.
        MemoryError: If ``memory`` is too little for one node.
    """
    if (num_parts == "auto") != (memory is not None) or (memory is not None and model is None):
        raise ValueError(
            f"'num_parts' is {num_parts!r} and 'memory' {memory}: expected num_parts='auto' with "
            "both 'memory', the bytes of a mini-batch, and 'model', or a number of parts alone"
        )
    if memory is not None:
        memory = bytes_of("memory", memory)
    for key in (PARTS, PERM):
        if key in data:
            raise ValueError(
                f"'data' has {key!r} already, which gas.cluster sets: pass the graph as it was "
                "before, or rename the attribute"
            )
    data = with_csr_features(data)
    check_edge_rows(data, data.num_edges)  # A transform may add edges that have none.
    given = None if edge_weight is None else read_graph(data, edge_weight=False)
    if model is not None:
        data = model.prepare(data)
    edges = given or read_graph(data, edge_weight=False)

    def cut(num_parts: Any, log: bool = False, in_place: bool = False) -> Data:
        perm, parts = find_parts(edges, num_parts, recursive, log, edge_weight, method, seed, cache)
        out = permute(data, perm, log, in_place=in_place)
        out[PERM], out[PARTS] = perm, parts
        return out

    if isinstance(memory, int) and model is not None:
        num_parts = model.parts_within(memory, cut)
        if log:
            print(f"{num_parts} parts", file=sys.stderr)
    return cut(num_parts, log, in_place)


def in_first_order(data: Data, rows: Tensor) -> Tensor:
    """Rows of a clustered graph's nodes, of shape ``[N, ...]``, as the graph was before."""
    return torch.empty_like(rows).index_copy_(0, data[PERM].to(rows.device), rows)
