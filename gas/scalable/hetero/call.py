"""Calls of heterogeneous models, which visit the layers of their module.

They are :class:`gas.scalable.call.Call`: what is exchanged is found by the plan, not by
``push_and_pull``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import dropout
from torch_geometric.data import HeteroData

from gas.graph import PERM, Adjacency, EdgeType
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
from gas.scalable.call import Call, Calls, StopForward
from gas.scalable.hetero.layers import (
    Dropouts,
    FusedCall,
    LayerCall,
    Totals,
    Visitor,
    mean_rows,
)
from gas.scalable.hetero.plan import Plan

IDS = "n_id", "offset", "count"


def check_transfers(io: str) -> str:
    """Refuse ``"none"``, which is for benchmarks of homogeneous graphs."""
    if check_io(io) == "none":
        raise ValueError("'io' is 'none', expected 'serial' or 'concurrent': rows have to be moved")
    return io


class PlannedModel(HistoryModel):
    """A module for heterogeneous graphs with the histories of its plan.

    See :class:`gas.scalable.hetero.HeteroModel`.
    """

    norms_of_halo: frozenset[str] = frozenset()
    """Names of the batch norms that get rows of the halo, such as those of encoders."""

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
        self._calls = Calls()
        self._is_proven = True  # Conversion has run it: it fills every history.

    @property
    def _checkpoint_module(self) -> Module:
        return self.net

    _check_io = staticmethod(check_transfers)


class FullBatchCall(Call, Visitor):
    """A call with a whole graph, which may write the histories."""

    model: PlannedModel

    def __init__(self, model: PlannedModel, data: HeteroData, fill: bool = False) -> None:
        super().__init__(model, data, None, (None, None, None, None), {})
        self.fill = fill

    @property
    def inputs(self) -> tuple[HeteroData]:
        """See :class:`gas.scalable.call.Call`."""
        return (self.x,)

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        position = self.model.plan.reads.get((layer.number, kind))
        if self.fill and position is not None:
            self.push(self.histories[position], x)
        return x

    def mean(self, layer: LayerCall, kind: str, rows: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        if self.fill:
            self.push(self.histories[self.model.plan.means[layer.number, kind]], rows)
        return super().mean(layer, kind, rows)

    def check_all_pushed(self) -> None:
        """See :class:`gas.scalable.call.Call`."""
        for history, place in zip(self.histories, self.model.plan.places, strict=True):
            if history not in self.pushed:
                raise RuntimeError(
                    f"the module didn't call '{place.layer}' with rows of '{place.kind}', as it "
                    "did when it was converted: it depends on what is in the graph"
                )


class MiniBatchCall(FullBatchCall):
    """A call with a mini-batch: pushes in-batch rows and pulls the halo's, once for each history.

    Args:
        model: The model.
        batch: The mini-batch, which is moved to the model's device.
        push: Write the histories. (default: ``True``)
        level: In layer-wise inference, the level of the histories to write, once those below are
            exact; then forward ends. (default: all levels)
    """

    def __init__(
        self, model: PlannedModel, batch: HeteroData, push: bool = True, level: int | None = None
    ) -> None:
        super().__init__(model, batch)
        self.batch, self.pushes, self.layer = True, push, level
        # Before the batch is moved to the device: ids stay on the CPU.
        self._batch = {kind: copy.copy(batch[kind]).cpu(*IDS) for kind in model.num_nodes}
        self._edges = {kind: batch[kind].get("edge_index") for kind in batch.edge_types}
        self._has_loops = any(getattr(each, "add_self_loops", False) for each in model.modules())
        _move_to_device(model, batch)
        self._dropouts = Dropouts()
        self._joined: dict[int, tuple[Tensor, Tensor]] = {}
        # The adjacencies of relations that are multiplied together, by their numbers of rows.
        self._adjacencies: dict[tuple[Any, ...], dict[EdgeType, Adjacency]] = {}
        # By id, which the tensor keeps valid.
        self._firsts: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._left = sum(place.level == level for place in model.plan.places)
        self._pulls: dict[str, BatchPulls] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Start a forward pass's pulls, note its dropout, and refuse norms that see the halo."""
        model, means = self.model, self.model.plan.means.values()
        ahead: dict[str, list[History]] = {kind: [] for kind in model.num_nodes}
        for i, (place, history) in enumerate(zip(model.plan.places, self.histories, strict=True)):
            if model.io == "concurrent" and i not in means and self._is_read(i):
                ahead[place.kind] += [history] * history.supports_overlap
        with self._dropouts, contextlib.ExitStack() as stack:
            for name in model.norms_of_halo:
                norm = model.net.get_submodule(name)
                stack.callback(norm.register_forward_pre_hook(partial(check_norm, name)).remove)
            for kind, own in self._batch.items():
                self._pulls[kind] = BatchPulls(ahead[kind], own.batch_size, own.n_id)
                stack.callback(self._pulls[kind].cancel)
            yield

    def _is_read(self, position: int) -> bool:
        """Return whether the pass reads a history."""
        return self.layer is None or self.model.plan.places[position].level < self.layer

    def own_rows(self, out: Any) -> Any:
        """See :class:`gas.scalable.call.Call`; of each type, if there are several."""
        if isinstance(out, Tensor):
            return first_rows(out, self._batch[str(self.model.plan.output)].batch_size)
        sizes = {kind: store.batch_size for kind, store in self._batch.items()}
        return {k: first_rows(value, sizes[k]) for k, value in out.items() if value is not None}

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        """See :class:`gas.scalable.hetero.layers.Visitor`."""
        position = self.model.plan.reads.get((layer.number, kind))
        self._check(layer)
        if position is None:
            return x
        if position not in self._joined:
            self._joined[position] = x, self._push_and_pull(position, kind, x)
        before, joined = self._joined[position]
        if before is not x:
            raise RuntimeError(
                f"'{layer.name}' reads other rows of '{kind}' than an earlier layer, but read the "
                "same when the module was converted: it depends on what is in the graph"
            )
        return joined

    def _check(self, layer: LayerCall) -> None:
        """Refuse a call of a layer that isn't in the plan."""
        names = self.model.plan.layers
        if layer.number >= len(names) or names[layer.number] != layer.name:
            raise RuntimeError(
                f"the module called '{layer.name}' as its layer {layer.number}, which it didn't "
                f"when it was converted ({', '.join(names)}): it depends on what is in the graph"
            )

    def _push_and_pull(self, position: int, kind: str, x: Tensor) -> Tensor:
        """Push the in-batch rows of a layer's input of a type, and pull the halo's."""
        history, store = self.model.histories[position], self._batch[kind]
        own = first_rows(x, store.batch_size)
        whole, p = self._dropouts.find_input(x)
        self._store(position, first_rows(whole, store.batch_size).detach(), store)
        if not self._is_read(position):
            return torch.cat([own, own.new_zeros(store.n_id.numel() - len(own), own.size(1))])
        out = self._pulls[kind].tensor(history, own)
        if p == 0.0:
            return out
        return torch.cat([own, dropout(out[store.batch_size :].detach(), p)])

    def _store(self, position: int, own: Tensor, store: Any) -> None:
        """Push in-batch rows to a history, if it is to be written."""
        if self.layer not in (None, self.model.plan.places[position].level):
            self.pushed.append(self.histories[position])
            return
        ids = store.n_id[: store.batch_size], store.offset, store.count
        self.push(self.histories[position], own, *ids)
        self._left -= 1
        if self.layer is not None and not self._left:
            raise StopForward

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
        if not self._is_read(position):
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


def _move_to_device(model: PlannedModel, batch: HeteroData) -> None:
    """Move a mini-batch to the model's device, in place and without making the host wait.

    Ids of histories stay on the CPU, unless they are an input of the module.
    """
    device = model.device
    read = () if PERM in batch.node_stores[0] else model.plan.inputs.values()
    ids = set(IDS) - set(read)
    for store in batch.stores:
        keys = [key for key in store if "n_id" not in store or key not in ids]
        if keys:  # Without keys, apply() would move everything.
            store.apply(lambda value: tensor_to_device(value, device), *keys)


def check_norm(name: str, norm: Module, *_: Any) -> None:
    """Refuse a batch norm in training mode that gets rows of the halo."""
    if norm.training:
        raise ValueError(
            f"'{name}' is a batch norm that is given rows of the halo, as it stands before the "
            "first layer, or behind one whose input is added to its output: use LayerNorm there"
        )


def adjacency_of(edges: Tensor, num_rows: int, num_cols: int) -> Adjacency:
    """Return the adjacency of the edges into the first ``num_rows`` nodes."""
    src, dst = edges.contiguous()
    # A loader's edges are sorted; the caller may have changed them.
    if bool((dst[1:] < dst[:-1]).any()):
        dst, order = dst.sort(stable=True)
        src = src[order]
    rowptr = torch.searchsorted(dst, torch.arange(num_rows + 1, device=dst.device))
    src = src[: int(rowptr[-1])]
    return Adjacency(rowptr.int(), src.int(), None, num_cols)
