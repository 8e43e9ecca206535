"""A module of typed graphs as a model with histories: one for each type of nodes and layer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import HeteroData

from gas.graph import PERM, with_csr_types
from gas.history import Staleness, first_rows, relative_error
from gas.loader import HeteroLoader, batches_in_order, tensor_to_device
from gas.native import report_progress, share_cores
from gas.scalable.call import Reached
from gas.scalable.hetero.layers import Dropouts, around_layers
from gas.scalable.hetero.passes import (
    Filling,
    FullBatch,
    MiniBatch,
    PlannedModel,
    Sweep,
    check_moves,
)
from gas.scalable.hetero.plan import EDGES, given, with_ids
from gas.scalable.inference import fill_layers
from gas.scalable.norms import GraphNorms
from gas.scalable.verify import Verification, tolerance_of

Output = Tensor | dict[str, Tensor]


class HeteroModel(PlannedModel):
    """Scalable model of a module for heterogeneous graphs, from :func:`gas.to_scalable`.

    A batch computes its own nodes exactly, of every type, and reads the embeddings of its halo from
    histories, without gradient. ``net`` is the module, with the same parameters and layers of
    :mod:`gas.nn`; what it computes after a layer it computes for in-batch nodes alone::

        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, num_parts=40)
        for batch in gas.SubgraphLoader(graph, batch_size=4, shuffle=True):
            out = model(batch)["paper"]  # Of the in-batch papers.
            paper = batch["paper"]
            mask = paper.train_mask[: paper.batch_size]
            loss = F.cross_entropy(out[mask], paper.y[: paper.batch_size][mask])

    * ``histories``: all of them; ``plan.places`` says of each its type, width and level.
    * ``num_nodes``: the number of nodes of each type.

    Args:
        net: The module.
        plan: Where histories stand.
        num_nodes: The number of nodes of each type.
        is_narrow: Whether rows of the halo are left out of what layers return. (Otherwise they hold
            nothing, and what ``net`` adds them to has them, too.)
        device: See :class:`gas.ScalableGNN`.
        dtype: See :class:`gas.ScalableGNN`.
        store: See :class:`gas.ScalableGNN`.
        path: See :class:`gas.ScalableGNN`; each type has its files in a folder of its own.
        io: See :class:`gas.ScalableGNN`. (default: ``"concurrent"``)

    Raises:
        ValueError: If an option is unusable, naming it.
        MemoryError: If there is no room for the histories.
    """

    @property
    def io(self) -> str:
        """Mode of transfers: ``"serial"`` or ``"concurrent"``; see :class:`gas.ScalableGNN`."""
        return self._engine.io

    @io.setter
    def io(self, io: str) -> None:
        self._engine.io = check_moves(io)

    @property
    def moved_bytes(self) -> int:
        """Bytes of stored rows that were moved; see :class:`gas.ScalableGNN`."""
        return self._engine.moved_bytes

    def reset_parameters(self) -> None:
        """Draw new weights, as far as the module knows how, and forget the histories."""
        for history in self.histories:
            history.reset_parameters()
        if hasattr(self.net, "reset_parameters"):
            cast(Any, self.net).reset_parameters()

    def staleness(self) -> list[Staleness]:
        """Return the staleness of each history."""
        return self._measure_ages()

    # Calling --------------------------------------------------------------------------------------

    def forward(self, batch: HeteroData, push: bool = True) -> Output:
        """Return the outputs of a mini-batch's own nodes, by type if the module gives them so.

        Args:
            batch: A mini-batch of a loader of the graph.
            push: Whether the in-batch nodes' embeddings are written to the histories.
                (default: ``True``)

        Returns:
            Of each type of shape ``[batch_size, out_channels]``.

        Raises:
            ValueError: If it isn't one, or of another graph.
        """
        self._check(batch)
        return self._run(batch, MiniBatch(self, batch, push))

    def full_batch(self, data: HeteroData, fill: bool = False) -> Output:
        """Return the outputs of all nodes of a graph, in one pass.

        Args:
            data: The graph, as :func:`gas.cluster` has returned it, or as it was before.
            fill: Write the embeddings of all nodes to the histories. (default: ``False``)
        """
        visitor = Filling(self) if fill else FullBatch()
        return self._compute(with_ids(with_csr_types(data)).to(self.device), visitor)

    def _run(self, batch: HeteroData, visitor: MiniBatch) -> Output:
        try:
            with self._norms_watched(), Dropouts() as visitor.dropouts:
                out = self._compute(self._moved(batch), visitor)
            visitor.check_all_read()
        finally:
            visitor.cancel()
        sizes = {kind: batch[kind].batch_size for kind in self.num_nodes}
        if isinstance(out, Tensor):
            return first_rows(out, sizes[str(self.plan.output)])
        return {k: first_rows(value, sizes[k]) for k, value in out.items() if value is not None}

    def _moved(self, batch: HeteroData) -> HeteroData:
        """Return a mini-batch itself, on the model's device; the host doesn't wait.

        Ids stay where histories look, but for those that the module looks up.
        """
        device = self.device
        read = () if PERM in batch.node_stores[0] else self.plan.inputs.values()
        ids = {"n_id", "offset", "count"} - set(read)
        for store in batch.stores:
            keys = [key for key in store if "n_id" not in store or key not in ids]
            if keys:  # Of none it would be all.
                store.apply(lambda value: tensor_to_device(value, device), *keys)
        return batch

    def _compute(self, data: HeteroData, visitor: Any) -> Any:
        arguments = given(data, self.plan.inputs)
        edges = next(arguments[name] for name, key in self.plan.inputs.items() if key == EDGES)
        with around_layers(self.net, edges, visitor):
            return self.net(**arguments)

    def _check(self, batch: Any) -> None:
        if not isinstance(batch, HeteroData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a typed graph: "
                "gas.SubgraphLoader(graph) yields some, graph = gas.cluster(data, num_parts)"
            )
        for kind, size in self.num_nodes.items():
            if kind not in batch.node_types or "offset" not in batch[kind]:
                raise ValueError(
                    f"'batch' has no in-batch nodes of type '{kind}': pass what "
                    "gas.SubgraphLoader(graph) yields, or call model.full_batch(data)"
                )
            for name, kinds in self.plan.kinds.items():
                key = self.plan.inputs[name]
                if kind in kinds and key not in batch[kind]:
                    raise ValueError(
                        f"'batch' has no {key!r} of type '{kind}', with which the module was "
                        "converted"
                    )
            n_id = batch[kind].n_id
            if n_id.numel() and int(n_id.max()) >= size:
                raise ValueError(
                    f"'batch' names the node {int(n_id.max())} of type '{kind}', but the histories "
                    f"are for {size}: convert the module with the graph that it is trained on"
                )

    norms_of_halo: frozenset[str] = frozenset()
    """Batch norms that are given rows of the halo, such as those of encoders."""

    @contextlib.contextmanager
    def _norms_watched(self) -> Iterator[None]:
        """Refuse batch norms in training that are given rows of the halo."""
        with contextlib.ExitStack() as hooks:
            for name in self.norms_of_halo:
                norm = self.net.get_submodule(name)
                check = partial(_check_norm, name)
                hooks.callback(norm.register_forward_pre_hook(check).remove)
            yield

    # Layer-wise inference -------------------------------------------------------------------------

    @torch.no_grad()
    def swept(self, loader: HeteroLoader) -> Output:
        """Return outputs of mini-batches after a sweep per level, in the loader's order.

        Args:
            loader: The mini-batches, which are taken in order.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A history was read before it was filled")
            for _ in range(self.plan.num_levels):
                for batch in batches_in_order(loader):
                    self(batch)
        return self._assembled(loader, MiniBatch)

    @torch.no_grad()
    def predict(
        self, graph: HeteroData | HeteroLoader, batch_size: int | None = None, *, log: bool = True
    ) -> Output:
        """Every node's output, in the order of the graph that :func:`gas.cluster` was given.

        It is layer-wise inference: at the memory of a mini-batch, each history in turn is filled
        with what a full batch gives; those of the same level together.

        Args:
            graph: What :func:`gas.cluster` has returned, or a loader of it.
            batch_size: Parts per mini-batch. (default: that of the last loader of the graph which
                was given one, or ``1``)
            log: Print a line every ten seconds, on standard error. (default: ``True``)

        Returns:
            Of each type of shape ``[num_nodes, out_channels]``, on the CPU.
        """
        with share_cores(getattr(graph, "leave_cores", True)):  # While a loader is made, too.
            loader = self._loader(graph, batch_size)
            out = self._layer_wise(loader, log)
        if isinstance(out, Tensor):
            return in_first_order(loader.hetero_data, str(self.plan.output), out)
        return {kind: in_first_order(loader.hetero_data, kind, rows) for kind, rows in out.items()}

    @torch.no_grad()
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
            graph: What :func:`gas.cluster` has returned, or a loader of it.
            batch_size: See :meth:`predict`.
            norms: Set running statistics of norms in training mode. (default: ``True``)
            log: See :meth:`predict`. (default: ``True``)

        Raises:
            ValueError: If such a norm is given rows of the halo, which is refused in training, too.
        """
        loader = self._loader(graph, batch_size)
        for name in self.norms_of_halo if norms else ():
            _check_norm(name, self.net.get_submodule(name))
        with self._filled(loader, norms, log) as gathered:
            gathered.write()

    def _layer_wise(self, loader: HeteroLoader, log: bool = False) -> Output:
        with self._filled(loader, training=False, log=log):
            return self._assembled(loader, partial(Sweep, level=self.plan.num_levels))

    @contextlib.contextmanager
    def _filled(
        self, loader: HeteroLoader, training: bool, log: bool = False
    ) -> Iterator[GraphNorms]:
        """Fill all histories, and be in evaluation mode in this context."""
        norms = GraphNorms(self.net, training=training)

        def sweep(level: int) -> Iterator[tuple[HeteroData, Output | None]]:
            for batch in batches_in_order(loader):
                out = None
                visitor = Sweep(self, batch, level)
                is_whole = all(batch[k].batch_size == n for k, n in self.num_nodes.items())
                with contextlib.suppress(Reached), norms.batch(is_whole=is_whole):
                    out = self._run(batch, visitor)
                yield batch, out

        def swept(_: int) -> None:
            ticker.done += 1

        what, levels = "Layer-wise inference, layers", self.plan.num_levels
        progress = report_progress(what, levels + 1, log)
        with evaluating(self), norms.installed(), progress as ticker:
            fill_layers(sweep, levels, norms, swept)
            yield norms

    def _loader(self, graph: HeteroData | HeteroLoader, batch_size: int | None) -> HeteroLoader:
        if not isinstance(graph, HeteroData | HeteroLoader):
            raise ValueError(
                f"'graph' is a {type(graph).__name__}, expected a HeteroData that gas.cluster has "
                "returned, or a loader of it"
            )
        loader = graph
        if not isinstance(loader, HeteroLoader):
            graph = copy.copy(graph)  # What is given here isn't to be remembered.
            loader = HeteroLoader(graph, batch_size=batch_size, log=False)
        if loader.types.num_nodes != self.num_nodes:
            raise ValueError(
                f"'graph' has {loader.types.num_nodes} nodes, but the histories are for "
                f"{self.num_nodes}: convert the module with this graph"
            )
        return loader

    def _assembled(self, loader: HeteroLoader, visitor: Callable[..., MiniBatch]) -> Output:
        """Return the outputs of all mini-batches, by type, on the CPU."""
        out: dict[str, Tensor] = {}
        for batch in batches_in_order(loader):
            found = self._run(batch, visitor(self, batch))
            if isinstance(found, Tensor):
                found = {str(self.plan.output): found}
            for kind, rows in found.items():
                if kind not in out:
                    shape = self.num_nodes[kind], *rows.shape[1:]
                    out[kind] = rows.new_zeros(shape, device="cpu")
                out[kind][batch[kind].n_id[: batch[kind].batch_size]] = rows.cpu()
        return out if self.plan.output is None else out[self.plan.output]

    # Verifying ------------------------------------------------------------------------------------

    @torch.no_grad()
    def verified(
        self,
        graph: HeteroData | HeteroLoader,
        batch_size: int | None = None,
        num_nodes: None = None,
        tolerance: float | None = None,
    ) -> Verification:
        """Compare mini-batches with a full batch of the uncut graph; see :func:`gas.verify`.

        Args:
            graph: What :func:`gas.cluster` has returned, or a loader of it.
            batch_size: Parts per mini-batch. (default: that of the last loader of the graph which
                was given one, or ``1``; or the loader's)
            num_nodes: Is refused; all nodes are compared.
            tolerance: The largest relative error that counts as exact. (default: that of
                :func:`gas.verify`)
        """
        if num_nodes is not None:
            raise ValueError(
                f"'num_nodes' is {num_nodes}, but all nodes of a typed graph are compared: leave "
                "it out"
            )
        loader = self._loader(graph, batch_size)
        with contextlib.ExitStack() as after:
            after.enter_context(evaluating(self))
            exact, stale = (after.enter_context(contextlib.closing(self._twin())) for _ in "es")
            expected = exact.full_batch(loader.hetero_data, fill=True)
            swept = stale.swept(loader)
            pairs = zip(stale.histories, exact.histories, strict=True)
            errors = [relative_error(mine.emb, true.emb) for mine, true in pairs]
            outs = [_joined(out) for out in (swept, stale._layer_wise(loader))]
            errors.append(max(relative_error(out, _joined(expected)) for out in outs))
        if tolerance is None:
            tolerance = tolerance_of(self.histories)
        return Verification(tuple(errors), tolerance)

    def _twin(self) -> HeteroModel:
        """Return this model with separate histories, in memory if these are on disk."""
        twin = HeteroModel(
            self.net, self.plan, self.num_nodes, self.is_narrow, io=self.io, **self._options
        )
        twin.norms_of_halo = self.norms_of_halo
        return twin

    def __repr__(self) -> str:
        lines = [f"{type(self.net).__name__}: {len(self.histories)} histories"]
        for number, place in enumerate(self.plan.places):
            lines.append(
                f"history {number}: {self.num_nodes[place.kind]} nodes of '{place.kind}', "
                f"{place.width} wide, read by '{place.layer}'"
                + (" as a mean" if number in self.plan.means.values() else "")
            )
        return "\n  ".join(lines)


def _check_norm(name: str, norm: Module, *_: Any) -> None:
    """Refuse a batch norm in training that is given rows of the halo."""
    if norm.training:
        raise ValueError(
            f"'{name}' is a batch norm that is given rows of the halo, as it stands before the "
            "first layer, or behind one whose input is added to its output: use LayerNorm there"
        )


@contextlib.contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """In this context a module is in evaluation mode, with all below it."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def in_first_order(graph: HeteroData, kind: str, rows: Tensor) -> Tensor:
    """Return rows of a type, of shape ``[N, ...]``, in the order before the clustering."""
    return torch.empty_like(rows).index_copy_(0, graph[kind][PERM], rows)


def _joined(out: Output) -> Tensor:
    """Return all outputs as one row."""
    if isinstance(out, Tensor):
        return out.flatten()
    return torch.cat([out[kind].flatten() for kind in sorted(out) if out[kind] is not None])
