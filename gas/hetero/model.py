"""A module of typed graphs as a model with histories: one for each type of nodes and layer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import HeteroData

from gas.graph.typed import PERM
from gas.hetero.layers import Dropouts, around_layers
from gas.hetero.passes import Filling, FullBatch, MiniBatch, Reached, Sweep
from gas.hetero.plan import EDGES, Plan, given
from gas.hetero.semantic import Totals
from gas.history import Codec, History, TransferEngine
from gas.history.engine import check_io
from gas.history.factory import HistoryFactory
from gas.history.rows import first_rows
from gas.history.staleness import Staleness, measure, relative_error
from gas.history.store import StoreFactory
from gas.loader.moving import moved_tensor
from gas.loader.typed import HeteroLoader
from gas.scalable.verify import Verification, tolerance_of

Output = Tensor | dict[str, Tensor]


class HeteroModel(Module):
    """What :func:`gas.to_scalable` makes of a module of typed graphs.

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
        self._engine = TransferEngine(_checked_io(io))
        self._options: dict[str, Any] = {"device": device, "dtype": dtype, "store": store}
        codec, made = Codec.of(dtype), dict[int, History]()
        for number, (kind, size) in enumerate(num_nodes.items()):
            mine = [i for i, place in enumerate(plan.places) if place.kind == kind]
            widths = [plan.places[i].width for i in mine]
            factory = HistoryFactory(widths, device, codec, store, path)
            made |= zip(mine, factory.make(size, self._engine, f"type_{number}"), strict=True)
        ours = torch.nn.ModuleList(made[i] for i in range(len(plan.places)))
        self.histories = cast("Sequence[History]", ours)
        self.totals = Totals()  # Of those whose mean is read.

    view_histories: None = None  # Views are of graphs of one type.

    @property
    def plain(self) -> Module:
        """What has the weights by the names that they have in the module: itself."""
        return self.net

    @property
    def device(self) -> torch.device:
        """Where the parameters live, and with them the computation."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def io(self) -> str:
        """How rows are moved: ``"serial"`` or ``"concurrent"``; see :class:`gas.ScalableGNN`."""
        return self._engine.io

    @io.setter
    def io(self, io: str) -> None:
        self._engine.io = _checked_io(io)

    def reset_parameters(self) -> None:
        """Draws new weights, as far as the module knows how, and forgets the histories."""
        for history in self.histories:
            history.reset_parameters()
        if hasattr(self.net, "reset_parameters"):
            cast(Any, self.net).reset_parameters()

    def staleness(self) -> list[Staleness]:
        """How old the rows of each history are."""
        return [measure(number, history) for number, history in enumerate(self.histories)]

    def close(self) -> None:
        """Writes what is under way, closes the stores and ends the transfer engine's workers."""
        with contextlib.ExitStack() as everything:
            everything.callback(self._engine.close)
            for history in self.histories:
                everything.callback(history.close)

    # Calling --------------------------------------------------------------------------------------

    def forward(self, batch: HeteroData, push: bool = True) -> Output:
        """The outputs of a mini-batch's own nodes, by type if the module gives them so.

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
        """The outputs of all nodes of a graph, in one pass.

        Args:
            data: The graph, as :func:`gas.cluster` has returned it, or as it was before.
            fill: Write the embeddings of all nodes to the histories. (default: ``False``)
        """
        visitor = Filling(self) if fill else FullBatch()
        return self._compute(with_ids(data).to(self.device), visitor)

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
        """A mini-batch itself, on the model's device; the host doesn't wait.

        Ids stay where histories look, but for those that the module looks up.
        """
        device = self.device
        read = () if PERM in batch.node_stores[0] else self.plan.inputs.values()
        ids = {"n_id", "offset", "count"} - set(read)
        for store in batch.stores:
            keys = [key for key in store if "n_id" not in store or key not in ids]
            if keys:  # Of none it would be all.
                store.apply(lambda value: moved_tensor(value, device), *keys)
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
        """Refuses batch norms in training that are given rows of the halo."""

        def check(name: str, layer: Module, _: tuple[Any, ...]) -> None:
            if layer.training:
                raise ValueError(
                    f"'{name}' is a batch norm that is given rows of the halo, as it stands before "
                    "the first layer, or behind one whose input is added to its output: use "
                    "LayerNorm there"
                )

        with contextlib.ExitStack() as hooks:
            for name in self.norms_of_halo:
                norm = self.net.get_submodule(name)
                hooks.callback(norm.register_forward_pre_hook(partial(check, name)).remove)
            yield

    # Layer-wise inference -------------------------------------------------------------------------

    @torch.no_grad()
    def swept(self, loader: HeteroLoader) -> Output:
        """What mini-batches give after a sweep for each level, in the order of the loader's graph.

        Args:
            loader: The mini-batches, which are taken in order.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A history was read before it was filled")
            for _ in range(self.plan.num_levels):
                for batch in self._in_order(loader):
                    self(batch)
        return self._assembled(loader, MiniBatch)

    @torch.no_grad()
    def predict(self, graph: HeteroData | HeteroLoader, batch_size: int = 1) -> Output:
        """Every node's output, in the order of the graph that :func:`gas.cluster` was given.

        It is layer-wise inference: at the memory of a mini-batch, each history in turn is filled
        with what a full batch gives; those of the same level together.

        Args:
            graph: What :func:`gas.cluster` has returned, or a loader of it.
            batch_size: Parts per mini-batch. (default: ``1``)

        Returns:
            Of each type of shape ``[num_nodes, out_channels]``, on the CPU.
        """
        loader = self._loader(graph, batch_size)
        out = self._layer_wise(loader)
        if isinstance(out, Tensor):
            return in_first_order(loader.typed, str(self.plan.output), out)
        return {kind: in_first_order(loader.typed, kind, rows) for kind, rows in out.items()}

    def _layer_wise(self, loader: HeteroLoader) -> Output:
        with evaluating(self):
            for level in range(self.plan.num_levels):
                for batch in self._in_order(loader):
                    with contextlib.suppress(Reached):
                        self._run(batch, Sweep(self, batch, level))
            return self._assembled(loader, partial(Sweep, level=self.plan.num_levels))

    def _loader(self, graph: HeteroData | HeteroLoader, batch_size: int) -> HeteroLoader:
        if not isinstance(graph, HeteroData | HeteroLoader):
            raise ValueError(
                f"'graph' is a {type(graph).__name__}, expected a HeteroData that gas.cluster has "
                "returned, or a loader of it"
            )
        loader = graph
        if not isinstance(loader, HeteroLoader):
            loader = HeteroLoader(loader, batch_size=batch_size, log=False)
        if loader.types.num_nodes != self.num_nodes:
            raise ValueError(
                f"'graph' has {loader.types.num_nodes} nodes, but the histories are for "
                f"{self.num_nodes}: convert the module with this graph"
            )
        return loader

    def _in_order(self, loader: HeteroLoader) -> Iterator[HeteroData]:
        num_parts, size = loader.ptr.numel() - 1, loader.batch_size or 1
        for first in range(0, num_parts, size):
            yield loader.cut(range(first, min(first + size, num_parts)))

    def _assembled(self, loader: HeteroLoader, visitor: Callable[..., MiniBatch]) -> Output:
        """The outputs of all mini-batches, by type, on the CPU."""
        out: dict[str, Tensor] = {}
        for batch in self._in_order(loader):
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
        """Compares mini-batches with a full batch of the uncut graph; see :func:`gas.verify`.

        Args:
            graph: What :func:`gas.cluster` has returned, or a loader of it.
            batch_size: Parts per mini-batch. (default: ``1``, or the loader's)
            num_nodes: Is refused; all nodes are compared.
            tolerance: The largest relative error that counts as exact. (default: that of
                :func:`gas.verify`)
        """
        if num_nodes is not None:
            raise ValueError(
                f"'num_nodes' is {num_nodes}, but all nodes of a typed graph are compared: leave "
                "it out"
            )
        loader = self._loader(graph, batch_size or 1)
        with contextlib.ExitStack() as after:
            after.enter_context(evaluating(self))
            exact, stale = (after.enter_context(contextlib.closing(self._twin())) for _ in "es")
            expected = exact.full_batch(loader.typed, fill=True)
            swept = stale.swept(loader)
            pairs = zip(stale.histories, exact.histories, strict=True)
            errors = [relative_error(mine.emb, true.emb) for mine, true in pairs]
            outs = [_joined(out) for out in (swept, stale._layer_wise(loader))]
            errors.append(max(relative_error(out, _joined(expected)) for out in outs))
        if tolerance is None:
            tolerance = tolerance_of(self.histories)
        return Verification(tuple(errors), tolerance)

    def _twin(self) -> HeteroModel:
        """This model with histories of its own, in memory where these are on disk."""
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


def _checked_io(io: str) -> str:
    """Refuses a mode that moves nothing, which is for benchmarks of graphs of one type."""
    if check_io(io) == "none":
        raise ValueError("'io' is 'none', expected 'serial' or 'concurrent': rows have to be moved")
    return io


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


def with_ids(data: HeteroData) -> HeteroData:
    """A whole graph with the ids of its nodes and edges, which mini-batches have."""
    out = copy.copy(data)
    for kind in data.node_types:
        size = out[kind].num_nodes = int(data[kind].num_nodes or 0)
        out[kind].n_id = torch.arange(size)
    for kind in data.edge_types:
        out[kind].e_id = torch.arange(data[kind].edge_index.size(1))
    return out


def in_first_order(graph: HeteroData, kind: str, rows: Tensor) -> Tensor:
    """Rows of a clustered graph's nodes of a type, of shape ``[N, ...]``, as it was before."""
    return torch.empty_like(rows).index_copy_(0, graph[kind][PERM], rows)


def _joined(out: Output) -> Tensor:
    """All outputs as one row."""
    if isinstance(out, Tensor):
        return out.flatten()
    return torch.cat([out[kind].flatten() for kind in sorted(out) if out[kind] is not None])
