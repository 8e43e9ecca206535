"""The contenders: ways to train one GCN on one graph, with equal settings.

All have the same graph, weights of edges and widths, and but for the full batch the same number of
steps per epoch. Those of PyG multiply by a ``torch.sparse_csr`` matrix, pyg_autoscale by a
``torch_sparse.SparseTensor``. They differ in what a step sees:

* ``gas``: some parts and their halo, with histories, through the operators of ``gas.nn``.
* ``gas, converted``: the same of PyG's GCN, by ``gas.to_scalable``.
* ``gas full batch``: the whole graph, in one step per epoch, through the same operators.
* ``PyG full batch``: the whole graph, in one step per epoch.
* ``NeighborLoader``: training nodes as seeds, as its users choose them, and at most 10 sampled
  neighbours of every node in every layer. Other contenders compute nodes without labels as well.
* ``ClusterLoader``: as many of the same parts as gas, without the edges that leave the batch.
* ``GraphSAINT``: random walks with as many steps as the model has layers, from so many roots that
  they visit about as many nodes as gas has in a batch; without its weights of the loss, which take
  many walks before training.
* ``pyg_autoscale``: what gas does, in the package ``torch_geometric_autoscale``.

NeighborLoader needs pyg-lib or torch-sparse, GraphSAINT needs torch-sparse.

On a CUDA device (``DEVICE_MAKERS``) gas prepares batches ahead, with histories in pinned memory or
on the device; PyG's loaders do so in the process that trains, and in several others; and PyG's full
batch runs under ``torch.compile`` as well, which takes no sparse matrix, so by its ``edge_index``.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from common import imports, synchronize
from torch_geometric.data import Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTRandomWalkSampler,
    NeighborLoader,
)
from torch_geometric.nn import GCNConv

import gas
from gas.datasets import get_data, planted_partition
from gas.datasets.masks import with_masks
from gas.training import FullBatch, train_epoch

FAN_OUT = 10


@dataclass(frozen=True)
class Case:
    """A graph and the settings of its GCN."""

    dataset: str
    num_layers: int
    hidden_channels: int
    num_parts: int
    batch_size: int
    dropout: float

    @property
    def num_steps(self) -> int:
        """Steps per epoch of the contenders with mini-batches."""
        return math.ceil(self.num_parts / self.batch_size)


class Graph(NamedTuple):
    """A permuted graph with normalised weights, its parts and its number of classes."""

    data: Data
    ptr: torch.Tensor
    out_channels: int


class Contender(NamedTuple):
    """A model, the batches of an epoch, and a function that trains for one epoch."""

    model: torch.nn.Module
    batches: Iterable[Any]
    epoch: Callable[[], object]


def prepare(root: str, case: Case) -> Graph:
    """Read, normalises, partitions and permute the graph of a case.

    A generated graph has its communities for parts where METIS isn't installed.
    """
    kind, _, size = case.dataset.partition(":")
    if kind == "planted" and not imports("pymetis"):
        return in_communities(int(size), case.num_parts)
    data, _, out_channels = get_data(root, case.dataset)
    return partition(data, case, out_channels)


def partition(data: Data, case: Case, out_channels: int) -> Graph:
    """Normalise, partition and permute a graph."""
    data = T.GCNNorm()(data)
    perm, ptr = gas.metis(data.edge_index, case.num_parts, num_nodes=data.num_nodes, log=False)
    return normalised(gas.permute(data, perm, log=False), ptr, out_channels)


def in_communities(num_nodes: int, num_parts: int) -> Graph:
    """Generate a graph whose parts are ranges of communities, without METIS."""
    data = with_masks(planted_partition(num_nodes, shuffle=False), num_splits=1)
    ptr = torch.arange(num_parts + 1) * num_nodes // num_parts
    return normalised(T.GCNNorm()(data), ptr, int(data.y.max()) + 1)


def normalised(data: Data, ptr: torch.Tensor, out_channels: int) -> Graph:
    # Loaders slice whatever a graph has: it has what training needs, and one split.
    kept = {key: data[key] for key in ("x", "y", "edge_index", "edge_weight")}
    return Graph(Data(**kept, train_mask=data.train_mask), ptr, out_channels)


def own_model(case: Case, graph: Graph, **options: Any) -> gas.ScalableGNN:
    return gas.models.GCN(
        graph.data.num_nodes,
        graph.data.num_features,
        case.hidden_channels,
        graph.out_channels,
        case.num_layers,
        case.dropout,
        **options,
    )


def with_histories(case: Case, graph: Graph, model: gas.ScalableGNN) -> Contender:
    data, ptr, _ = graph
    options: dict[str, Any] = {"log": False, "layout": "fused"}
    loader = gas.SubgraphLoader(data, ptr, case.batch_size, shuffle=True, **options)
    model(loader=gas.EvalSubgraphLoader(data, ptr, case.batch_size, **options))  # No cold start.
    batches = ahead(loader, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return Contender(model, batches, lambda: train_epoch(model, batches, optimizer))


def ahead(loader: gas.SubgraphLoader, model: gas.ScalableGNN) -> Any:
    """Cut batches and move them to the device during the computation."""
    return gas.PrefetchLoader(loader, model) if model.device.type == "cuda" else loader


def make_gas(case: Case, graph: Graph, device: str = "cpu", **options: Any) -> Contender:
    return with_histories(case, graph, own_model(case, graph, **options).to(device))


def make_converted(case: Case, graph: Graph, device: str = "cpu") -> Contender:
    net = PlainGCN(widths_of(case, graph), case.dropout)
    return with_histories(case, graph, gas.to_scalable(net, graph.data).to(device))


def make_own_full_batch(case: Case, graph: Graph, device: str = "cpu") -> Contender:
    return of_full_batch(graph, own_model(case, graph).to(device), device)


def of_full_batch(graph: Graph, model: gas.ScalableGNN, device: str = "cpu") -> Contender:
    batches = FullBatch(graph.data, device, layout="fused")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        return train_epoch(model, batches, optimizer, full_batch=True)

    return Contender(model, batches, epoch)


class PlainGCN(torch.nn.Module):
    """The GCN as a user of PyG writes it."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            GCNConv(i, o, normalize=False) for i, o in itertools.pairwise(widths)
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor, adj_t: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = conv(F.dropout(x, self.dropout, self.training), adj_t).relu()
        return self.convs[-1](F.dropout(x, self.dropout, self.training), adj_t)


class EdgeGCN(PlainGCN):
    """GCN on an ``edge_index``, as ``torch.compile`` takes no sparse matrix."""

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = conv(F.dropout(x, self.dropout, self.training), edge_index, weight).relu()
        return self.convs[-1](F.dropout(x, self.dropout, self.training), edge_index, weight)


def widths_of(case: Case, graph: Graph) -> list[int]:
    hidden = [case.hidden_channels] * (case.num_layers - 1)
    return [graph.data.num_features, *hidden, graph.out_channels]


def plain_training(case: Case, graph: Graph, batches: Iterable[Data], device: str) -> Contender:
    """Train as PyG's examples do; the loss is on the seeds, where a batch has them."""
    model = PlainGCN(widths_of(case, graph), case.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    def epoch() -> None:
        model.train()
        for batch in batches:
            seeds = batch.get("batch_size")
            mask = batch.train_mask[:seeds]
            if not mask.any():
                continue
            optimizer.zero_grad()
            out = model(batch.x, batch.adj_t)[:seeds]
            F.cross_entropy(out[mask], batch.y[:seeds][mask]).backward()
            optimizer.step()

    return Contender(model, batches, epoch)


def make_full_batch(case: Case, graph: Graph, device: str = "cpu") -> Contender:
    return plain_training(case, graph, [FullBatch(graph.data, device).data], device)


def make_compiled(
    case: Case, graph: Graph, device: str = "cpu", backend: str = "inductor"
) -> Contender:
    model = EdgeGCN(widths_of(case, graph), case.dropout).to(device)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    data = graph.data.clone().to(device)
    index = data.train_mask.nonzero().view(-1)

    def epoch() -> None:
        model.train()
        optimizer.zero_grad()
        out = compiled(data.x, data.edge_index, data.edge_weight)
        F.cross_entropy(out[index], data.y[index]).backward()
        optimizer.step()

    return Contender(model, [data], epoch)


def to_adj_t(batch: Data) -> Data:
    """Convert a batch to the layout of the full batch, which stores no message per edge."""
    return T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(batch)


class Moved:
    """A PyG loader whose batches move to the device before they are sorted into matrices."""

    def __init__(self, loader: Iterable[Data], device: str) -> None:
        self.loader = loader
        self.device = device

    def __iter__(self) -> Any:
        return (to_adj_t(batch.to(self.device, non_blocking=True)) for batch in self.loader)


def beside(workers: int, device: str) -> dict[str, Any]:
    """Return the options of a PyG loader with worker processes."""
    pins = device == "cuda"
    return (
        {"num_workers": workers, "persistent_workers": True, "pin_memory": pins} if workers else {}
    )


def make_neighbor(case: Case, graph: Graph, device: str = "cpu", workers: int = 0) -> Contender:
    seeds = math.ceil(int(graph.data.train_mask.sum()) / case.num_steps)
    fan_out = [FAN_OUT] * case.num_layers
    loader = neighbor_loader(graph.data, fan_out, seeds, **beside(workers, device))
    return plain_training(case, graph, Moved(loader, device), device)


def neighbor_loader(
    data: Data, fan_out: list[int], batch_size: int, **options: Any
) -> NeighborLoader:
    loader = NeighborLoader(
        data, fan_out, input_nodes=data.train_mask, batch_size=batch_size, shuffle=True, **options
    )
    next(iter(loader))  # It misses its packages here, not before.
    return loader


class Clusters(ClusterData):
    """PyG's ``ClusterData``, made of an existing partition."""

    def __init__(self, data: Data, ptr: torch.Tensor) -> None:
        self.ptr = ptr
        super().__init__(data, ptr.numel() - 1, log=False)

    def _metis(self, edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(self.num_parts), self.ptr.diff())


def make_cluster(case: Case, graph: Graph, device: str = "cpu", workers: int = 0) -> Contender:
    options = beside(workers, device)
    loader = cluster_loader(graph.data, graph.ptr, case.batch_size, **options)
    return plain_training(case, graph, Moved(loader, device), device)


def cluster_loader(data: Data, ptr: torch.Tensor, batch_size: int, **options: Any) -> ClusterLoader:
    loader = ClusterLoader(Clusters(data, ptr), batch_size=batch_size, shuffle=True, **options)
    next(iter(loader))
    return loader


def make_saint(case: Case, graph: Graph, device: str = "cpu") -> Contender:
    loader = saint_loader(graph.data, case.num_layers, case.num_steps)
    return plain_training(case, graph, Moved(loader, device), device)


def saint_loader(data: Data, walk_length: int, num_steps: int) -> GraphSAINTRandomWalkSampler:
    def walk(roots: int) -> GraphSAINTRandomWalkSampler:
        return GraphSAINTRandomWalkSampler(
            data, batch_size=roots, walk_length=walk_length, num_steps=num_steps, log=False
        )

    nodes = data.num_nodes / num_steps
    roots = math.ceil(nodes / (walk_length + 1))
    visited = next(iter(walk(roots))).num_nodes  # Fewer nodes than steps, because walks meet.
    return walk(math.ceil(roots * nodes / visited))


def make_autoscale(case: Case, graph: Graph) -> Contender:
    from torch_geometric_autoscale import SubgraphLoader
    from torch_geometric_autoscale.models import GCN

    without_pinning()
    data = T.ToSparseTensor(attr="edge_weight")(graph.data.clone())
    loader = SubgraphLoader(data, graph.ptr, batch_size=case.batch_size, shuffle=True, log=False)
    model = GCN(
        data.num_nodes,
        data.num_features,
        case.hidden_channels,
        graph.out_channels,
        case.num_layers,
        dropout=case.dropout,
        device="cpu",
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    def epoch() -> None:
        model.train()
        for batch, batch_size, n_id, offset, count in loader:
            mask = batch.train_mask[:batch_size]
            if not mask.any():
                continue
            optimizer.zero_grad()
            out = model(batch.x, batch.adj_t, batch_size, n_id, offset, count)
            F.cross_entropy(out[mask], batch.y[:batch_size][mask]).backward()
            optimizer.step()

    return Contender(model, loader, epoch)


class AutoscaleLoader:
    """Mini-batches of pyg_autoscale, as those of PyG with the further arguments of its models."""

    def __init__(self, data: Data, ptr: torch.Tensor, batch_size: int) -> None:
        from torch_geometric_autoscale import SubgraphLoader

        without_pinning()
        data = T.ToSparseTensor()(data)
        if data.x.layout != torch.strided:  # It takes rows, which PyTorch has of dense tensors.
            data.x = data.x.to_dense()
        self.loader = SubgraphLoader(data, ptr, batch_size, log=False, shuffle=True)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Data]:
        for batch, *args in self.loader:
            batch.batch_size, batch.args = args[0], args
            yield batch


def to_autoscale(net: torch.nn.Module, num_nodes: int) -> Callable[[Data], torch.Tensor]:
    """Return GraphSAGE on the base class of pyg_autoscale, a function of a mini-batch."""
    from torch_geometric_autoscale import ScalableGNN

    class Autoscale(ScalableGNN):
        def forward(
            self, x: torch.Tensor, adj_t: Any, batch_size: int, *args: torch.Tensor
        ) -> torch.Tensor:
            for conv, norm, history in zip(net.convs, net.norms, self.histories, strict=False):
                x = conv((x, x[:batch_size]), adj_t)
                x = norm(x).relu()
                x = net.dropout(self.push_and_pull(history, x, batch_size, *args))
            return net.convs[-1]((x, x[:batch_size]), adj_t)

    model = Autoscale(num_nodes, net.hidden_channels, net.num_layers, device="cpu")
    return lambda batch: model(batch.x, batch.adj_t, *batch.args)


def without_pinning() -> None:
    """Let pyg_autoscale run without CUDA, although it requests pinned memory."""
    if torch.cuda.is_available():
        return
    empty = torch.empty

    def unpinned(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs)

    torch.empty = unpinned


MAKERS: dict[str, Callable[..., Contender]] = {
    "gas": make_gas,
    "gas, converted": make_converted,
    "gas full batch": make_own_full_batch,
    "PyG full batch": make_full_batch,
    "NeighborLoader": make_neighbor,
    "ClusterLoader": make_cluster,
    "GraphSAINT": make_saint,
    "pyg_autoscale": make_autoscale,
}


# Processes of a loader of PyG; the other cores are for what trains.
WORKERS = max(1, min(8, (os.cpu_count() or 2) // 2))

DEVICE_MAKERS: dict[str, Callable[..., Contender]] = {
    "gas": functools.partial(make_gas, store="pinned"),
    "gas, histories on the device": functools.partial(make_gas, store="device"),
    "gas, converted": make_converted,
    "gas full batch": make_own_full_batch,
    "PyG full batch": make_full_batch,
    "PyG full batch, compiled": make_compiled,
    "NeighborLoader": make_neighbor,
    "NeighborLoader, workers": functools.partial(make_neighbor, workers=WORKERS),
    "ClusterLoader": make_cluster,
    "ClusterLoader, workers": functools.partial(make_cluster, workers=WORKERS),
    "GraphSAINT": make_saint,
}


def makers(device: str) -> dict[str, Callable[..., Contender]]:
    """Return the functions that make each contender on a device."""
    return MAKERS if device == "cpu" else DEVICE_MAKERS


def make_all(
    case: Case, graph: Graph, device: str = "cpu", names: Collection[str] = ()
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Make the contenders; return them, and the reasons why others can't be made.

    Each trains for an epoch on a device, so that one that needs too much of its memory is known;
    how long that took is said at once, for a device that is taken away. Of some ``names``, those
    and gas are made.
    """
    contenders, reasons = {}, {}
    for name, make in makers(device).items():
        if names and name not in ("gas", *names):
            continue
        start = time.perf_counter()
        try:
            # Not kept before it has run: nothing of one that failed may take memory from others.
            contender = make(case, graph) if device == "cpu" else make(case, graph, device)
            if device != "cpu":
                made = time.perf_counter()
                contender.epoch()
                synchronize(device)
                seconds = made - start, time.perf_counter() - made
                print(
                    f"{name}: made in {seconds[0]:.1f} s, first epoch {seconds[1]:.2f} s",
                    file=sys.stderr,
                )
            contenders[name] = contender
        except Exception as error:  # Whatever a package that is absent or broken leads to.
            if name == "gas":
                raise
            reasons[name] = f"{type(error).__name__}: {error}"
        contender = None
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return contenders, reasons
