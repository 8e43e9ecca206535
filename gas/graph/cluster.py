"""Prepare a graph for mini-batches: transform it as a whole, partition it, renumber its nodes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph.attributes import BATCH_SIZE, PARTS, PERM, PREPARED, SHARD, SHARDS
from gas.graph.balance import find_classes
from gas.graph.edges import Edges, check_edge_rows, read_graph, with_edge_index
from gas.graph.features import check_data_features, with_csr_features, with_sparse_features
from gas.graph.folder.new import NewFolder
from gas.graph.folder.opening import check_is_graph, open_folder
from gas.graph.folder.writing import GraphWriter
from gas.graph.hetero import cluster_heterogeneous
from gas.graph.partition import PartitionOptions, find_parts, find_shards, round_num_parts
from gas.graph.permute import permute_edges
from gas.graph.versions import remember_original
from gas.native import bytes_of, check_flags, check_integer, check_path


class Model(Protocol):
    """Model that a graph is clustered for, such as a :class:`gas.ScalableGNN`."""

    def prepare(self, data: Data) -> Data:
        """Return the graph as layers take it."""

    def parts_within(self, memory: int, cut: Callable[[int], Data]) -> int:
        """Return the number of parts for which a mini-batch of one part fits into memory."""

    def _plan_parts(self, data: Data, options: PartitionOptions) -> tuple[int, int]:
        """Return the number of parts, and of parts per mini-batch, for the best training."""


@check_flags
def cluster(
    data: Data,
    num_parts: int | str,
    shards: int = 1,
    *,
    model: Model | None = None,
    memory: int | str | None = None,
    recursive: bool = False,
    edge_weight: Tensor | None = None,
    method: str = "auto",
    seed: int = 0,
    cache: bool | str | Path = True,
    log: bool = True,
    in_place: bool = False,
    out: str | Path | None = None,
    balance: str | Tensor | None = None,
    check: bool = True,
    sparse_features: bool | str = "auto",
) -> Data:
    """Partition a graph for mini-batches, and renumber its nodes so that each part is one range.

    It combines :meth:`gas.ScalableGNN.prepare`, :func:`gas.metis` and :func:`gas.permute`::

        graph = gas.cluster(data, num_parts=40, model=model)
        loader = gas.SubgraphLoader(graph, batch_size=10, shuffle=True)

    Args:
        data: The graph; it is not modified, unless ``in_place``. Its features ``x`` may be sparse,
            a matrix of ``torch.sparse`` or SciPy. A ``HeteroData`` is partitioned as one graph;
            each part gets about equally many nodes of every type, and of those in its
            ``train_mask``. Each type then has ``parts`` and ``perm``. ``shards``, ``"auto"``,
            ``edge_weight``, ``in_place``, ``out``, ``balance`` and ``sparse_features`` are not
            supported for it.
        num_parts: The number of parts, between 1 and the number of nodes. No part is empty.
            A multiple of ``shards``. ``"auto"``: what :func:`gas.plan` expects to be best for
            ``model``, on the CPU, in the memory that is free, ``batch_size`` of the graph included;
            it may be a single part, a full batch. With ``memory``, the smallest number for which a
            mini-batch of one part fits it; ``batch_size`` of the graph is then 1.
        shards: The number of processes for distributed training. The graph is partitioned into
            so many shards, and each of these into equally many parts, so that few edges connect
            processes. (default: ``1``)
        model: The model whose transform of the whole graph is applied first, such as the
            normalisation of :class:`gas.models.GCN`; pass the graph without it. The result is for
            this model alone: another one would see its edges and weights. A model of
            :func:`gas.to_scalable` is checked on some nodes of the graph. (default: no transform)
        memory: With ``num_parts="auto"``, how many bytes a mini-batch of one part may take in
            training, as a number or like ``"2GB"`` (10^9 bytes each; ``"2GiB"``: 2^30): its
            tensors, and those that autograd saves for the backward pass. It is measured, with
            ``model``, on the part with most edges; parameters, optimizer and histories come on top.
            :func:`gas.plan` limits the memory of the whole process.
        recursive: See :func:`gas.metis`.
        edge_weight: See :func:`gas.metis`; one for each edge of ``data``. ``data.edge_weight`` is
            for the model, and does not influence the parts.
        method: See :func:`gas.metis`. (default: ``"auto"``)
        seed: See :func:`gas.metis`.
        cache: See :func:`gas.metis`.
        log: Report progress on standard error. (default: ``True``)
        in_place: Overwrite the tensors of ``data``, which can't be used afterwards; see
            :func:`gas.permute`. (default: ``False``)
        out: A folder to write the graph into, array by array, instead of into memory: a new or
            an empty folder, or one that such a call left unfinished. It is durable when this
            returns. (default: none)
        balance: Classes of nodes that are balanced among parts: ``"train_mask"``, or the name of
            another mask, for the nodes in it and those of each class in ``y``; or classes of nodes,
            by name or as a tensor, see :func:`gas.metis`. Where many nodes are in the mask and
            neighbours have the same class, classes cost many more cut edges: pass
            ``data.train_mask`` itself, which balances the mask alone. (default: nodes)
        check: Refuse NaN and infinite values in ``x`` and ``edge_attr``; in those mapped from a
            graph folder only if ``out`` is given, since they were checked when it was written.
            (default: ``True``)
        sparse_features: Keep ``x`` as a ``torch.sparse_csr`` matrix, whose non-zeros alone are
            multiplied. ``"auto"``: if fewer than one in thirty of its values isn't zero, and
            ``model`` is one of :mod:`gas.models` or :func:`gas.to_scalable` whose layers gain by
            it; ``log`` reports it, and ``graph.x.is_sparse_csr`` is then true. PyTorch can neither
            index such a matrix nor deep-copy it: read rows of ``graph.x.to_dense()``, and copy a
            graph by ``graph.clone()``. ``False`` leaves ``x`` as it is. (default: ``"auto"``)

    Returns:
        The graph with its nodes, masks, lists of node ids (``train_idx``, ...) and edges
        renumbered, and ``parts``, of shape ``[num_parts + 1]``: part ``p`` is the nodes
        ``parts[p]`` to ``parts[p + 1] - 1``; and ``perm``, of shape ``[N]``: the row of ``data``
        that each node was. Loaders add ``batch_size``, the default of later loaders, ``predict``
        and :func:`gas.verify`. With several shards it has ``shards``, of shape ``[shards + 1]``:
        the first row of each; see :func:`gas.graph.shard_of`. With ``out``, the graph
        is that of :func:`gas.open_graph` for the folder: mapped, with an ``adj_t`` of compressed
        rows, whose values are the weights, in place of ``edge_index`` and ``edge_weight``, and with
        attributes of edges in the order of its entries. A graph of one part may be partitioned
        again; ``perm`` then refers to the original graph.

    Raises:
        ValueError: If the graph or an argument is unusable, or the graph is clustered already; if
            features aren't finite, or ``model`` isn't exact on it; if ``out`` isn't empty, or an
            attribute can't be written into it.
        OSError: If the disk of ``out`` is too small.
        MemoryError: If ``memory`` is too little for one node, or nothing fits the free memory.
    """
    check_is_graph(data)
    memory = _check_arguments(num_parts, shards, model, memory, in_place, out)
    options = PartitionOptions(recursive, method, seed, cache, log)
    if isinstance(data, HeteroData):
        _check_typed(
            num_parts, model, shards=shards > 1, memory=memory, out=out, edge_weight=edge_weight,
            in_place=in_place, balance=balance, sparse_features=sparse_features is True,
        )  # fmt: skip
        return cluster_heterogeneous(data, num_parts, options, check)
    _check_model(model)
    folder = None if out is None else NewFolder(out, "gas.cluster")
    original = data
    data, before = _remove_parts(data)
    classes = None if balance is None else find_classes(data, balance)
    data = with_csr_features(data)
    if check:
        check_data_features(data, with_mapped=folder is not None)
    supports_sparse = getattr(model, "_supports_sparse_features", False)
    data = with_sparse_features(data, sparse_features, supports_sparse, log)
    check_edge_rows(data, data.num_edges)  # A transform may add edges that have none.
    batch_size = None if memory is None else 1  # A mini-batch of one part is what fits.
    if num_parts == "auto" and memory is None and model is not None:
        num_parts, batch_size = model._plan_parts(data, options)
    weighted = None if edge_weight is None else read_graph(data)
    if model is not None:
        if "edge_index" in data:  # Transforms of PyG don't check its ids.
            read_graph(data)
        data = _prepare(data, model)
    edges = read_graph(data)
    if batch_size is not None:
        data = copy.copy(data)
        data[BATCH_SIZE] = batch_size
    writer = None if folder is None else GraphWriter(folder, data, edges)
    cut = weighted or edges
    partition = _Partition(data, before, edges, cut, shards, options, edge_weight, classes)
    if isinstance(memory, int) and model is not None:
        count = model.parts_within(memory, partition.cut_sample)
        num_parts = round_num_parts(count, shards, edges.num_nodes)
        if log:
            print(f"{num_parts} parts", file=sys.stderr)
    if writer is None or folder is None:
        graph = partition.cut(num_parts, log, in_place)
        if before is None and not in_place:
            remember_original(graph, original)
        return graph
    writer.write(*partition.find(num_parts, log), before, log)
    return open_folder(folder.path, check=False)


def _check_arguments(
    num_parts: int | str,
    shards: int,
    model: Model | None,
    memory: int | str | None,
    in_place: bool,
    out: str | Path | None,
) -> int | None:
    """Refuse arguments that contradict each other; return ``memory`` in bytes, if it is given."""
    check_integer("shards", shards, 1)
    if out is not None:
        check_path("out", out, "a folder")
    is_auto = num_parts == "auto"
    if (memory is not None and not is_auto) or (is_auto and model is None):
        raise ValueError(
            f"'num_parts' is {num_parts!r} and 'memory' {memory}: expected num_parts='auto' with "
            "'model', and perhaps 'memory', the bytes of a mini-batch, or a number of parts alone"
        )
    if is_auto and memory is None and shards > 1:
        raise ValueError(
            f"'num_parts' is 'auto' and 'shards' {shards}, but the planner knows a single process: "
            "pass 'memory', the bytes of a mini-batch, or a number of parts"
        )
    limit = None if memory is None else bytes_of("memory", memory)
    if in_place and out is not None:
        raise ValueError(
            "'in_place' is True, but the graph is written into 'out', not into memory: leave one "
            "of them out"
        )
    return limit


def _check_model(model: object, needed: str = "prepare") -> None:
    """Refuse a model without histories, such as a class, or a model of PyG."""
    if model is not None and (isinstance(model, type) or not hasattr(model, needed)):
        what = model if isinstance(model, type) else type(model)
        raise ValueError(
            f"'model' is {what.__name__}, expected a model with histories: one of gas.models, or "
            "gas.to_scalable(net, data)"
        )


def _check_typed(num_parts: int | str, model: object, **arguments: object) -> None:
    """Refuse arguments that aren't supported for heterogeneous graphs."""
    if num_parts == "auto":
        raise ValueError(
            "'num_parts' is 'auto', which gas.cluster doesn't have for heterogeneous graphs: give "
            "a number"
        )
    _check_model(model, "histories")
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name!r} is given, which gas.cluster doesn't have for heterogeneous graphs: "
                "leave it out"
            )


def _prepare(data: Data, model: Any) -> Data:
    """Apply the transform of a model; return the graph itself if it changes nothing."""
    is_as_it_is = getattr(model, "transform", model) is None
    listed = data if is_as_it_is else with_edge_index(data)
    prepared = model.prepare(listed)
    given = listed.get("edge_weight")
    is_negative = given is not None and bool((given < 0).any())
    for key, value in prepared.to_dict().items():
        if key == "edge_weight":
            is_bad = ~torch.isfinite(value)
        elif key.startswith(PREPARED) and is_negative:  # Layers may sort out what is infinite.
            is_bad = torch.isnan(value)
        else:
            continue
        if bool(is_bad.any()):
            raise ValueError(
                f"{key!r} is NaN or infinite after the normalisation of 'model', although weights "
                "were finite: those of the edges into a node sum up to less than 0; give weights "
                "of at least 0, or build the layers with normalize=False"
            )
    if hasattr(model, "check_on_sample"):
        model.check_on_sample(data)
    return data if prepared is listed else prepared


@dataclass(frozen=True)
class _Partition:
    """Partitions a graph into any number of parts.

    ``before`` are the original rows of its nodes, ``edges`` its edges, ``to_cut`` the edges that
    are partitioned, with the weights ``edge_weight``.
    """

    data: Data
    before: Tensor | None
    edges: Edges
    to_cut: Edges
    shards: int
    options: PartitionOptions
    edge_weight: Tensor | None
    balance: Tensor | None

    def find(self, num_parts: Any, log: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the order of nodes, the first of each part and, of several, of each shard."""
        how = self.options._replace(log=log), self.edge_weight, self.balance
        if self.shards == 1:
            return *find_parts(self.to_cut, num_parts, *how), None
        return find_shards(self.to_cut, num_parts, self.shards, *how)

    def cut(self, num_parts: Any, log: bool = False, in_place: bool = False) -> Data:
        """Partition and renumber the graph."""
        perm, parts, bounds = self.find(num_parts, log)
        out = permute_edges(self.data, self.edges, perm, log, in_place)
        out[PERM], out[PARTS] = perm if self.before is None else self.before[perm], parts
        if bounds is not None:
            out[SHARDS] = bounds
        return out

    def cut_sample(self, num_parts: int) -> Data:
        """Partition the graph into about so many parts, to measure its mini-batches."""
        out = self.cut(round_num_parts(num_parts, self.shards, self.edges.num_nodes))
        if SHARDS in out:  # Every process measures all parts, so that the results agree.
            del out[SHARDS]
        return out


def _remove_parts(data: Data) -> tuple[Data, Tensor | None]:
    """Return a graph of one part without ``parts`` and ``perm``, and its ``perm``."""
    if BATCH_SIZE in data:  # Of other parts, or of a mini-batch of PyG's.
        data = copy.copy(data)
        del data[BATCH_SIZE]
    parts, perm = data.get(PARTS), data.get(PERM)
    of_shards = SHARD if SHARD in data else SHARDS if SHARDS in data else None
    if parts is None and perm is None and of_shards is None:
        return data, None
    is_whole = perm is not None and isinstance(parts, Tensor) and parts.numel() == 2
    if of_shards is not None or not is_whole:
        if of_shards is None and perm is not None and isinstance(parts, Tensor):
            raise ValueError(
                f"'data' is clustered already, into {parts.numel() - 1} parts: pass the graph as "
                "it was before gas.cluster"
            )
        found = of_shards or (PARTS if PARTS in data else PERM)
        raise ValueError(
            f"'data' has {found!r} already, which gas.cluster sets: "
            "pass the graph as it was before, or rename the attribute"
        )
    data = copy.copy(data)
    del data[PARTS], data[PERM]
    return data, perm


def to_original_order(data: Data, rows: Tensor) -> Tensor:
    """Return rows of a clustered graph's nodes, of shape ``[N, ...]``, as the graph was before.

    Raises:
        ValueError: If it is the graph of one process, which lacks the other nodes.
    """
    if SHARD in data:
        raise ValueError(
            "'data' is the graph of one process, a shard of a graph, which has no rows for the "
            "nodes of others: pass the whole graph, to a process of its own"
        )
    return torch.empty_like(rows).index_copy_(0, data[PERM].to(rows.device), rows)
