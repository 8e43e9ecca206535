"""``HeteroModel``: a module for heterogeneous graphs with a history for each type and layer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gas.graph import to_original_order, with_hetero_csr_features
from gas.history import relative_error
from gas.loader import NODE_ORDER, HeteroLoader, batches_in_order, find_node_order
from gas.native import check_flags, share_cores, skip_frame
from gas.scalable.base import moved_bytes, preserve_modes
from gas.scalable.call import StopForward, run_call
from gas.scalable.checks import check_order
from gas.scalable.hetero.call import FullBatchCall, MiniBatchCall, PlannedModel, check_norm
from gas.scalable.hetero.layers import visit_layers
from gas.scalable.hetero.plan import EDGES, add_ids, collect_inputs
from gas.scalable.inference import SweepOutputs, fill_layers
from gas.scalable.norms import GraphNorms
from gas.scalable.verify import Verification, tolerance_of

Output = Tensor | dict[str, Tensor]


class HeteroModel(PlannedModel):
    """Scalable model of a module for heterogeneous graphs, from :func:`gas.to_scalable`.

    A batch computes the in-batch nodes of every type exactly, and reads the embeddings of its halo
    from histories, without gradient. ``net`` is the module, with the same parameters and layers of
    :mod:`gas.nn`; after a layer it computes the in-batch nodes alone::

        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, num_parts=40)
        for batch in gas.SubgraphLoader(graph, batch_size=4, shuffle=True):
            out = model(batch)["paper"]  # Of the in-batch papers.
            paper = batch["paper"]
            mask = paper.train_mask[: paper.batch_size]
            loss = F.cross_entropy(out[mask], paper.y[: paper.batch_size][mask])

    * ``histories``: the histories; ``plan.places`` has the type, width and level of each.
    * ``num_nodes``: the number of nodes of each type.

    Args:
        net: The module.
        plan: The places of the histories.
        num_nodes: The number of nodes of each type.
        is_narrow: Whether outputs of layers have no rows of the halo. (Otherwise these are empty.)
        device: See :class:`gas.ScalableGNN`.
        dtype: See :class:`gas.ScalableGNN`.
        store: See :class:`gas.ScalableGNN`.
        path: See :class:`gas.ScalableGNN`; each type has its files in a folder of its own.
        io: See :class:`gas.ScalableGNN`. (default: ``"concurrent"``)

    Raises:
        ValueError: If an option is unusable, naming it.
        MemoryError: If there is no room for the histories.
    """

    moved_bytes = property(moved_bytes)

    def reset_parameters(self) -> None:
        """Reset the histories, and the weights if the module has ``reset_parameters``."""
        super().reset_parameters()
        if hasattr(self.net, "reset_parameters"):
            cast(Any, self.net).reset_parameters()

    # Calling --------------------------------------------------------------------------------------

    @skip_frame
    def __call__(self, batch: HeteroData, push: bool = True) -> Output:
        """Compute the outputs of the in-batch nodes, by type if the module returns a dictionary.

        Args:
            batch: A mini-batch of a loader of the graph.
            push: Write the in-batch nodes' embeddings to the histories. (default: ``True``)

        Returns:
            For each type of shape ``[batch_size, out_channels]``.

        Raises:
            ValueError: If it isn't a mini-batch of the graph.
        """
        self._check(batch)
        return run_call(MiniBatchCall(self, batch, push))

    def full_batch(self, data: HeteroData, fill: bool = False) -> Output:
        """Compute the outputs of all nodes of a graph, in one pass.

        Args:
            data: The graph, before or after :func:`gas.cluster`.
            fill: Write the embeddings of all nodes to the histories. Mini-batches read these if
                ``data`` is their graph, after clustering. (default: ``False``)

        Returns:
            For each type of shape ``[num_nodes, out_channels]``.

        Raises:
            ValueError: If the graph has other attributes than the converted one.
        """
        self._check_attributes(data)
        data = add_ids(with_hetero_csr_features(data)).to(self.device)
        if fill:  # Before clustering, it is no order of mini-batches.
            self._calls.order = find_node_order(data) or (sum(self.num_nodes.values()), 0)
        return run_call(FullBatchCall(self, data, fill))

    def forward(self, data: HeteroData) -> Any:
        """Run the module on a graph, in the current call of the model."""
        call = self._calls.running.call
        if call is None:  # It wasn't called through the model itself.
            return self(data)
        arguments = collect_inputs(data, self.plan.inputs)
        edges = next(arguments[name] for name, key in self.plan.inputs.items() if key == EDGES)
        with visit_layers(self.net, edges, call):
            return self.net(**arguments)

    def _check(self, batch: Any) -> None:
        """Refuse a mini-batch of another graph."""
        if not isinstance(batch, HeteroData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a "
                "heterogeneous graph: gas.SubgraphLoader(graph) yields some, graph = "
                "gas.cluster(data, num_parts)"
            )
        self._check_attributes(batch)
        for kind, size in self.num_nodes.items():
            if kind not in batch.node_types or "offset" not in batch[kind]:
                raise ValueError(
                    f"'batch' has no in-batch nodes of type '{kind}': pass what "
                    "gas.SubgraphLoader(graph) yields, or call model.full_batch(data)"
                )
            n_id = batch[kind].n_id
            if n_id.numel() and int(n_id.max()) >= size:
                raise ValueError(
                    f"'batch' names the node {int(n_id.max())} of type '{kind}', but the histories "
                    f"are for {size}: convert the module with the graph that it is trained on"
                )
        check_order(self, getattr(batch[next(iter(self.num_nodes))].n_id, NODE_ORDER, None))

    def _check_attributes(self, data: HeteroData) -> None:
        """Refuse a graph, or a mini-batch of it, with other attributes than the converted graph."""
        self._check_missing_attributes(data)
        known = {kind: data[kind] for kind in (*data.node_types, *data.edge_types)}
        for name, kinds in self.plan.kinds.items():
            key = self.plan.inputs[name]
            for kind in sorted(kinds, key=str) if key not in ("n_id", "e_id") else ():
                if key not in known.get(kind, ()):
                    none = ", torch.empty(2, 0, dtype=torch.long) for no edges"
                    raise ValueError(
                        f"the graph has no {key!r} of type {kind!r}, with which the module was "
                        f"converted: set it{none if key == EDGES else ''}"
                    )
                width, value = kinds[kind], known[kind][key]
                if isinstance(value, Tensor) and width is not None and value.shape[1:] != (width,):
                    raise ValueError(
                        f"{key!r} of type {kind!r} has shape {list(value.shape)}, but the module "
                        f"was converted with a graph in which it has {width} columns: convert it "
                        "with this graph, or give the attribute that shape"
                    )

    def _check_missing_attributes(self, data: HeteroData) -> None:
        """Refuse an attribute that the module takes, and that the converted graph lacked."""
        for name in self.plan.lacked:
            if any(name in store for store in data.stores):
                raise ValueError(
                    f"the graph has {name!r}, which the module takes, but it was converted with a "
                    "graph that had none: give gas.to_scalable this graph, or leave the attribute "
                    "out"
                )

    # Layer-wise inference -------------------------------------------------------------------------

    @torch.no_grad()
    def run_sweeps(self, loader: HeteroLoader) -> Output:
        """Return the outputs of mini-batches, in order, after a sweep over them per level."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A history was read before it was filled")
            for _ in range(self.plan.num_levels):
                for batch in batches_in_order(loader):
                    self(batch)
        return self._assemble((batch, self(batch)) for batch in batches_in_order(loader))

    @torch.no_grad()
    @check_flags
    def predict(
        self,
        graph: HeteroData | HeteroLoader,
        batch_size: int | None = None,
        *,
        log: bool = True,
        **unsupported: Any,
    ) -> Output:
        """Compute every node's output, in the order of the graph before :func:`gas.cluster`.

        It is layer-wise inference in mini-batches: the histories of one level after the other are
        filled with the full-batch hidden states.

        Args:
            graph: The graph of :func:`gas.cluster`, or a loader of it.
            batch_size: Parts per mini-batch. (default: that of the last loader of the graph which
                was given one, or ``1``)
            log: Print a line every ten seconds, on standard error. (default: ``True``)
            **unsupported: Other arguments of :meth:`gas.ScalableGNN.predict` raise an error.

        Returns:
            For each type of shape ``[num_nodes, out_channels]``, on the CPU.
        """
        for name in unsupported:
            raise ValueError(
                f"{name!r} is given, which models of heterogeneous graphs don't have: predict all "
                "nodes, and take rows of the result"
            )
        with share_cores(getattr(graph, "leave_cores", True)):  # Also while the loader is made.
            loader = self._loader(graph, batch_size)
            out = self._infer(loader, log)
        if isinstance(out, Tensor):
            return to_original_order(loader.hetero_data[str(self.plan.output)], out)
        return {
            kind: to_original_order(loader.hetero_data[kind], rows) for kind, rows in out.items()
        }

    @torch.no_grad()
    @check_flags
    def refresh(
        self,
        graph: HeteroData | HeteroLoader,
        batch_size: int | None = None,
        *,
        norms: bool = True,
        log: bool = True,
    ) -> None:
        """Fill the histories and set the running statistics of batch norms, by the whole graph.

        See :meth:`gas.ScalableGNN.refresh`.

        Args:
            graph: See :meth:`predict`.
            batch_size: See :meth:`predict`.
            norms: Set running statistics of norms in training mode. (default: ``True``)
            log: See :meth:`predict`. (default: ``True``)

        Raises:
            ValueError: If such a norm gets rows of the halo, which is refused in training, too.
        """
        loader = self._loader(graph, batch_size)
        for name in self.norms_of_halo if norms else ():
            check_norm(name, self.net.get_submodule(name))
        with self._fill_histories(loader, norms, log) as (_, statistics):
            statistics.write()

    def _infer(self, loader: HeteroLoader, log: bool = False) -> Output:
        """Compute the outputs of all nodes by layer-wise inference, in the order of the loader."""
        with self._fill_histories(loader, training=False, log=log) as (sweep, _):
            return self._assemble(sweep(self.plan.num_levels))

    @contextlib.contextmanager
    def _fill_histories(
        self, loader: HeteroLoader, training: bool, log: bool = False
    ) -> Iterator[tuple[Callable[[int], SweepOutputs[HeteroData, Output]], GraphNorms]]:
        """Fill all histories; the model is in evaluation mode in this context."""
        norms = GraphNorms(self.net, training=training)
        self._calls.order = loader.node_order

        def sweep(level: int) -> SweepOutputs[HeteroData, Output]:
            for batch in batches_in_order(loader):
                out, call = None, MiniBatchCall(self, batch, level=level)
                is_whole = all(batch[k].batch_size == n for k, n in self.num_nodes.items())
                with contextlib.suppress(StopForward), norms.watch_batch(is_whole=is_whole):
                    out = run_call(call)
                yield batch, out

        with fill_layers(self, sweep, self.plan.num_levels, norms, log):
            yield sweep, norms

    def _loader(self, graph: HeteroData | HeteroLoader, batch_size: int | None) -> HeteroLoader:
        """Return a loader of a graph, or the given loader."""
        if not isinstance(graph, HeteroData | HeteroLoader):
            raise ValueError(
                f"'graph' is a {type(graph).__name__}, expected a HeteroData that gas.cluster has "
                "returned, or a loader of it"
            )
        loader = graph
        if not isinstance(loader, HeteroLoader):
            graph = copy.copy(graph)  # The loader remembers its batch size in the graph.
            loader = HeteroLoader(graph, batch_size=batch_size, log=False)
        elif batch_size is not None:
            raise ValueError(
                "'batch_size' given with a loader, which has its own: pass the graph, "
                "model.predict(graph, ...)"
            )
        self._check_attributes(loader.hetero_data)
        if loader.types.num_nodes != self.num_nodes:
            raise ValueError(
                f"'graph' has {loader.types.num_nodes} nodes, but the histories are for "
                f"{self.num_nodes}: convert the module with this graph"
            )
        return loader

    def _assemble(self, outputs: SweepOutputs[HeteroData, Output]) -> Output:
        """Copy the outputs of all mini-batches into tensors on the CPU, by type."""
        out: dict[str, Tensor] = {}
        for batch, found in outputs:
            if isinstance(found, Tensor):
                found = {str(self.plan.output): found}
            for kind, rows in (found or {}).items():
                if kind not in out:
                    shape = self.num_nodes[kind], *rows.shape[1:]
                    out[kind] = rows.new_zeros(shape, device="cpu")
                out[kind][batch[kind].n_id[: batch[kind].batch_size]] = rows.cpu()
        return out if self.plan.output is None else out[self.plan.output]

    @torch.no_grad()
    def _verify(
        self,
        graph: HeteroData | HeteroLoader,
        batch_size: int | None = None,
        num_nodes: None = None,
        tolerance: float | None = None,
    ) -> Verification:
        """Compare mini-batches with a full batch of the uncut graph; see :func:`gas.verify`."""
        if num_nodes is not None:
            raise ValueError(
                f"'num_nodes' is {num_nodes}, but all nodes of a heterogeneous graph are "
                "compared: leave it out"
            )
        loader = self._loader(graph, batch_size)
        with preserve_modes(self, False), contextlib.ExitStack() as stack:
            exact, stale = (stack.enter_context(contextlib.closing(self._clone())) for _ in "es")
            expected = _concatenate(exact.full_batch(loader.hetero_data, fill=True))
            swept = _concatenate(stale.run_sweeps(loader))
            pairs = zip(stale.histories, exact.histories, strict=True)
            errors = [relative_error(mine.emb, true.emb) for mine, true in pairs]
            inferred = _concatenate(stale._infer(loader))
            errors.append(max(relative_error(out, expected) for out in (swept, inferred)))
        if tolerance is None:
            tolerance = tolerance_of(self.histories)
        return Verification(tuple(errors), tolerance)

    def _clone(self) -> HeteroModel:
        """Return a model of the same module with separate histories."""
        model = HeteroModel(
            self.net, self.plan, self.num_nodes, self.is_narrow, io=self.io, **self._options
        )
        model.norms_of_halo = self.norms_of_halo
        return model

    def __repr__(self) -> str:
        lines = [f"{type(self.net).__name__}: {len(self.histories)} histories"]
        for number, place in enumerate(self.plan.places):
            lines.append(
                f"history {number}: {self.num_nodes[place.kind]} nodes of '{place.kind}', "
                f"{place.width} wide, read by '{place.layer}'"
                + (" as a mean" if number in self.plan.means.values() else "")
            )
        return "\n  ".join(lines)


def _concatenate(out: Output) -> Tensor:
    """Return the outputs of all types as one vector."""
    if isinstance(out, Tensor):
        return out.flatten()
    return torch.cat([out[kind].flatten() for kind in sorted(out) if out[kind] is not None])
