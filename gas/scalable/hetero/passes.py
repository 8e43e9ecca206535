"""Visitors of the layers of a heterogeneous module: full batch, mini-batch and sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import dropout
from torch_geometric.data import HeteroData

from gas.graph import Adjacency, EdgeType
from gas.history import (
    BatchPulls,
    Codec,
    History,
    HistoryFactory,
    StoreFactory,
    TransferEngine,
    check_io,
    first_rows,
)
from gas.loader import tensor_to_device
from gas.nn import share_products
from gas.scalable.base import HistoryModel
from gas.scalable.call import StopForward
from gas.scalable.hetero.layers import Dropouts, FusedCall, LayerCall, Visitor
from gas.scalable.hetero.plan import Place, Plan
from gas.scalable.hetero.semantic import Totals, mean_rows


def check_transfers(io: str) -> str:
    """Refuse ``"none"``, which is for benchmarks of homogeneous graphs."""
    if check_io(io) == "none":
        raise ValueError("'io' is 'none', expected 'serial' or 'concurrent': rows have to be moved")
    return io


class PlannedModel(HistoryModel):
    """A module for heterogeneous graphs with the histories of its plan.

    See :class:`gas.scalable.hetero.HeteroModel`.
    """

    def __init__(
        self,
        net: Module,
        plan: Plan,
        num_nodes: dict[str, int],
        is_narrow: bool,
        *,
        device: torch.device | str | None = None,
        dtype: Codec | torch.dtype | str = torch.float32,
        store: str | StoreFactory | None = None,
        path: str | Path | None = None,
        io: str = "concurrent",
    ) -> None:
        super().__init__()
        self.net = net
        self.training = net.training
        self.plan, self.num_nodes, self.is_narrow = plan, num_nodes, is_narrow
        self._engine = TransferEngine(check_transfers(io))
        self._options: dict[str, Any] = {"device": device, "dtype": dtype, "store": store}
        codec, made = Codec.of(dtype), dict[int, History]()
        for number, (kind, size) in enumerate(num_nodes.items()):
            mine = [i for i, place in enumerate(plan.places) if place.kind == kind]
            widths = [plan.places[i].width for i in mine]
            factory = HistoryFactory(widths, device, codec, store, path)
            made |= zip(mine, factory.make(size, self._engine, f"type_{number}"), strict=True)
        ours = torch.nn.ModuleList(made[i] for i in range(len(plan.places)))
        self.histories = cast("Sequence[History]", ours)
        self.view_histories = None  # Heterogeneous graphs have no views.
        self.totals = Totals()  # Of the histories whose mean is read.

    @property
    def _checkpoint_module(self) -> Module:
        return self.net

    _check_io = staticmethod(check_transfers)


class FillingPass(Visitor):
    """A full batch that writes the histories."""

    def __init__(self, model: PlannedModel) -> None:
        self._model = model

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        position = self._model.plan.reads.get((layer.number, kind))
        if position is not None:
            self._model.histories[position].push(x)
        return x

    def mean(self, layer: LayerCall, kind: str, rows: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        self._model.histories[self._model.plan.means[layer.number, kind]].push(rows)
        return super().mean(layer, kind, rows)


@dataclass(frozen=True)
class OwnNodes:
    """The nodes of a type in a mini-batch; ids are on the CPU."""

    batch_size: int
    n_id: Tensor
    offset: Tensor
    count: Tensor


class MiniBatch(Visitor):
    """A mini-batch: pushes in-batch rows and pulls those of the halo, once for each history."""

    def __init__(self, model: PlannedModel, batch: HeteroData, push: bool = True) -> None:
        self.model, self._push = model, push
        # Before the batch is moved to the device: ids stay on the CPU.
        self._batch = {kind: _own_nodes(batch[kind]) for kind in model.num_nodes}
        self._edges = {kind: batch[kind].get("edge_index") for kind in batch.edge_types}
        self._has_loops = any(getattr(each, "add_self_loops", False) for each in model.modules())
        self.dropouts: Dropouts | None = None
        self._pulls = {kind: self._start_pulls(kind) for kind in model.num_nodes}
        self._joined: dict[int, tuple[Tensor, Tensor]] = {}
        # The adjacencies of relations that are multiplied together, by their numbers of rows.
        self._adjacencies: dict[tuple[Any, ...], dict[EdgeType, Adjacency]] = {}
        self._firsts: dict[
            tuple[str, int], tuple[Tensor, Tensor]
        ] = {}  # By id, which the tensor keeps valid.

    def _start_pulls(self, kind: str) -> BatchPulls:
        """Start the pulls of a type's histories."""
        plan = self.model.plan
        joined = set(range(len(plan.places))) - set(plan.means.values())
        places = [(plan.places[i], self.model.histories[i]) for i in sorted(joined)]
        mine = [h for place, h in places if place.kind == kind and self._is_read(place)]
        ahead = [h for h in mine if self.model.io == "concurrent" and h.supports_overlap]
        store = self._batch[kind]
        return BatchPulls(ahead, store.batch_size, store.n_id)

    def _is_read(self, place: Place) -> bool:
        """Return whether the pass reads a history."""
        return True

    def cancel(self) -> None:
        """Cancel the pulls that weren't used."""
        for pulls in self._pulls.values():
            pulls.cancel()

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        position = self.model.plan.reads.get((layer.number, kind))
        self._check(layer)
        if position is None:
            return x
        if position not in self._joined:
            self._joined[position] = x, self._exchange(position, kind, x)
        before, joined = self._joined[position]
        if before is not x:
            raise RuntimeError(
                f"'{layer.name}' reads other rows of '{kind}' than an earlier layer, but read the "
                "same when the module was converted: it depends on what is in the graph"
            )
        return joined

    def check_all_read(self) -> None:
        """Refuse a pass that skipped a history, whose rows would be stale."""
        for position, place in enumerate(self.model.plan.places):
            if position not in self._joined:
                raise RuntimeError(
                    f"the module didn't call '{place.layer}' with rows of '{place.kind}', as it "
                    "did when it was converted: it depends on what is in the graph"
                )

    def _check(self, layer: LayerCall) -> None:
        """Refuse a call of a layer that isn't in the plan."""
        names = self.model.plan.layers
        if layer.number >= len(names) or names[layer.number] != layer.name:
            raise RuntimeError(
                f"the module called '{layer.name}' as its layer {layer.number}, which it didn't "
                f"when it was converted ({', '.join(names)}): it depends on what is in the graph"
            )

    def _exchange(self, position: int, kind: str, x: Tensor) -> Tensor:
        """Return the rows of a layer's input: in-batch rows, and the halo's of the history."""
        history, store = self.model.histories[position], self._batch[kind]
        own = first_rows(x, store.batch_size)
        assert self.dropouts is not None
        whole, p = self.dropouts.find_input(x)
        self._store(position, first_rows(whole, store.batch_size).detach(), store)
        if not self._is_read(self.model.plan.places[position]):
            return torch.cat([own, own.new_zeros(store.n_id.numel() - len(own), own.size(1))])
        out = self._pulls[kind].tensor(history, own)
        if p == 0.0:
            return out
        return torch.cat([own, dropout(out[store.batch_size :].detach(), p)])

    def _store(self, position: int, own: Tensor, store: OwnNodes) -> None:
        """Push in-batch rows to a history."""
        if self._push:
            history, size = self.model.histories[position], store.batch_size
            history.push(own, store.n_id[:size], store.offset, store.count)

    def fused_inputs(self, call: FusedCall) -> tuple[Any, Any]:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        source, target, kind = call.source, call.target, call.kind
        if target is not None:
            target = self._first_rows(kind[2], target)
        sizes = {kind: self._batch[kind[2]].batch_size if target is None else target.size(0)}
        if sizes[kind] == self._num_rows(kind[2]):  # Only then the plan's shared relations apply.
            kinds = self.model.plan.shared_relations.get(call.number, (kind,))
            sizes = {each: self._num_rows(each[2]) for each in kinds}
        key = tuple(sizes.items())
        if key not in self._adjacencies:
            adjs = [self._adjacency(k, n, source) for k, n in sizes.items()]
            together = zip(sizes, share_products(adjs), strict=True)
            self._adjacencies[key] = dict(together)
        adj = self._adjacencies[key][kind]
        return ((source, target) if call.layer.takes_pairs else source), adj

    def _adjacency(self, kind: EdgeType, num_rows: int, source: Tensor) -> Adjacency:
        """Return the edges of a relation, computed on the CPU, on the device of the rows.

        On a device, computing their number would make the host wait.
        """
        adj = adjacency_of(self._edges[kind], num_rows, source.size(0))
        if adj.device == source.device:
            return adj
        if self._has_loops and kind[0] == kind[2]:
            adj.with_self_loops()
        return tensor_to_device(adj, source.device)

    def _num_rows(self, kind: str) -> int:
        """Return the number of rows of a type that layers compute."""
        store = self._batch[kind]
        return store.batch_size if self.model.is_narrow else store.n_id.numel()

    def _first_rows(self, kind: str, x: Tensor) -> Tensor:
        """Return the rows of a type that layers compute, cached to add their gradients once."""
        key = kind, id(x)
        if key not in self._firsts:
            self._firsts[key] = x, first_rows(x, self._num_rows(kind))
        return self._firsts[key][1]

    def mean(self, layer: LayerCall, kind: str, rows: Tensor) -> Tensor:
        """Return the mean of in-batch rows, with gradient, and the history of other nodes."""
        position = self.model.plan.means.get((layer.number, kind))
        if position is None:
            raise RuntimeError(
                f"'{layer.name}' weighs several relations into '{kind}', which it didn't when the "
                "module was converted: it depends on what is in the graph"
            )
        history, store = self.model.histories[position], self._batch[kind]
        own = first_rows(rows, store.batch_size)
        self._joined[position] = own, own
        if not self._is_read(self.model.plan.places[position]):
            self._store(position, own.detach(), store)
            return mean_rows(kind, own)
        n_id = store.n_id[: store.batch_size]
        total = tensor_to_device(self.model.totals.of(position, history), own.device)
        others = total - history.pull(n_id).to(total).sum(0)
        self._store(position, own.detach(), store)
        stored = history.pull(n_id).to(total).sum(0)  # Rounded by the history.
        self.model.totals.set(position, history, others + stored)
        return (others.to(own) + own.sum(0)) / self.model.num_nodes[kind]

    def output(self, layer: LayerCall, kind: str, out: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        return first_rows(out, self._batch[kind].batch_size) if self.model.is_narrow else out


class Sweep(MiniBatch):
    """Layer-wise inference: writes the histories of one level, once those below are exact."""

    def __init__(self, model: PlannedModel, batch: HeteroData, level: int) -> None:
        self._level = level
        super().__init__(model, batch)
        self._left = sum(place.level == level for place in model.plan.places)

    def _is_read(self, place: Place) -> bool:
        return place.level < self._level

    def _store(self, position: int, own: Tensor, store: OwnNodes) -> None:
        if self.model.plan.places[position].level != self._level:
            return
        super()._store(position, own, store)
        self._left -= 1
        if not self._left:
            raise StopForward


def _own_nodes(store: Any) -> OwnNodes:
    """Return the nodes of a mini-batch's store of a type."""
    return OwnNodes(store.batch_size, store.n_id.cpu(), store.offset.cpu(), store.count.cpu())


def adjacency_of(edges: Tensor, num_rows: int, num_cols: int) -> Adjacency:
    """Return the adjacency of the edges into the first ``num_rows`` nodes."""
    src, dst = edges.contiguous()
    if bool(
        (dst[1:] < dst[:-1]).any()
    ):  # A loader's edges are sorted; the caller may have changed them.
        dst, order = dst.sort(stable=True)
        src = src[order]
    rowptr = torch.searchsorted(dst, torch.arange(num_rows + 1, device=dst.device))
    src = src[: int(rowptr[-1])]
    return Adjacency(rowptr.int(), src.int(), None, num_cols)
