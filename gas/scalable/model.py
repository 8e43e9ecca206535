"""``ScalableGNN``: the base class of models that train with historical embeddings.

Source: Fey, Lenssen, Weichert, Leskovec, *GNNAutoScale: Scalable and Expressive GNNs via
Historical Embeddings*, ICML 2021.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.chosen import ChosenNodes, predict_nodes
from gas.graph.folder import opened
from gas.graph.folder.opening import check_is_graph
from gas.graph.shards import SHARD
from gas.history import Codec, History, TransferEngine
from gas.history.batch import BatchPulls
from gas.history.engine import check_io
from gas.history.factory import HistoryFactory
from gas.history.features import Features
from gas.history.rows import Rows
from gas.history.staleness import Staleness, measure
from gas.history.store import StoreFactory
from gas.loader import SubgraphLoader
from gas.loader.batch import SubData
from gas.native.checks import check_integer
from gas.native.compiler import apart, between
from gas.scalable.call import Calls, adjacency, check_halo, named_arguments
from gas.scalable.exact import Watch
from gas.scalable.exchange import exchange_in_graph, exchange_now
from gas.scalable.inference import layer_wise, predict_every_node
from gas.scalable.memory import parts_within
from gas.scalable.one_batch import OneBatch
from gas.scalable.pack import Packed, pack
from gas.scalable.ranks import Ranks
from gas.scalable.run import arrange, run
from gas.scalable.views import run_views

Model = TypeVar("Model", bound="ScalableGNN")


class ScalableGNN(torch.nn.Module):
    """Base class of models that train on mini-batches with historical embeddings.

    A subclass writes ``forward`` as it would for the full graph, and passes the output of every
    layer but the last through :meth:`push_and_pull`::

        class GNN(gas.ScalableGNN):
            def forward(self, x, adj_t, *args):
                for conv, history in zip(self.convs[:-1], self.histories):
                    x = conv(x, adj_t).relu()
                    x = self.push_and_pull(history, x, *args)
                return self.convs[-1](x, adj_t)

    A batch computes its own nodes exactly and reads the halo's embeddings from the histories,
    without gradient. Batches write the histories in training and in evaluation mode alike.

    Args:
        num_nodes: The number of nodes of the graph.
        hidden_channels: The width of every history, or one width for each of them.
        num_layers: The number of layers; there are ``num_layers - 1`` histories.
        pool_size: Upper bound of the pulls under way at once, each of which has a buffer, and of
            the pinned buffers for a GPU that can't read a store itself. Those of a batch that is
            prefetched all begin together. (default: one pull for every history, two pinned buffers)
        buffer_size: Upper bound of the rows of a buffer, which are those of a batch's halo: a batch
            with a larger one is refused. (default: as large as a batch needs)
        device: Where the histories live. (default: the CPU)
        dtype: How the histories store rows; see :class:`gas.History`. (default: ``torch.float32``)
        store: Where they store them: ``"device"``, ``"pinned"``, ``"host"``, ``"disk"``, ``"auto"``
            or a function; see :class:`gas.History`. ``"auto"`` says on standard error what it
            picked. (default: the CPU's memory, pinned where there is a GPU, or ``device``)
        path: A directory for ``store="disk"``; histories found there are opened with their rows.
            Where ``torch.distributed`` has been initialised with several processes, each has its
            files in ``rank_0``, ``rank_1``, ... of it. (default: a temporary directory)
        io: ``"serial"`` moves rows when the forward pass asks for them. ``"concurrent"`` starts the
            pulls of all histories when the model is called, so that they run beside the
            computation where it leaves a core or the store is slow; results are equal, bit by bit.
            ``"none"`` moves nothing, which is wrong on purpose: the upper bound for benchmarks. May
            be set later. (default: ``"concurrent"``)
        prefetch: With a :class:`gas.PrefetchLoader`, how many batches ahead pulls may start, 0 or
            1. With 1 a batch doesn't see what the batch before it pushes: its rows can be one step
            older. (default: ``0``)

    Raises:
        ValueError: If an argument is unusable, naming it.
        MemoryError: If there is no room for the histories; nothing has been allocated then.
    """

    def __init__(
        self,
        num_nodes: int,
        hidden_channels: int | Sequence[int],
        num_layers: int,
        pool_size: int | None = None,
        buffer_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: Codec | torch.dtype | str = torch.float32,
        store: str | StoreFactory | None = None,
        path: str | Path | None = None,
        io: str = "concurrent",
        prefetch: int = 0,
    ) -> None:
        super().__init__()
        check_integer("num_nodes", num_nodes, 1)
        check_integer("num_layers", num_layers, 1)
        for name, bound in (("pool_size", pool_size), ("buffer_size", buffer_size)):
            if bound is not None:
                check_integer(name, bound, 1)
        widths = _widths(hidden_channels, num_layers)
        check_integer("prefetch", prefetch, 0, 1, "0 or 1")
        self.num_nodes = num_nodes
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.pool_size = pool_size
        self.buffer_size = buffer_size
        self.prefetch = prefetch
        self._engine = TransferEngine(pool_size=pool_size)
        self.io = io
        self._factory = HistoryFactory(widths, device, Codec.of(dtype), store, path)
        self.histories = self._make_histories()
        self.view_histories: Sequence[Sequence[History]] | None = None  # A bank for each view.
        self._calls = Calls()
        self._watch: Watch | None = None
        self._takes_fused: bool | None = None  # Not looked at yet.
        self._is_proven = False  # A batch has gone through forward and filled every history.
        self._ahead: list[tuple[Tensor, BatchPulls]] = []
        self._chosen: ChosenNodes | None = None
        self.ranks: Ranks | None = None

    def _make_histories(self, folder: str = "") -> Sequence[History]:
        made = torch.nn.ModuleList(self._factory.make(self.num_nodes, self._engine, folder))
        return cast("Sequence[History]", made)

    def _all_histories(self) -> Iterator[History]:
        """The histories, those of views included."""
        yield from itertools.chain(self.histories, *(self.view_histories or ()))

    def for_graph(self: Model, num_nodes: int, path: str | Path | None = None) -> Model:
        """This model on another graph: the same weights, with histories of their own.

        Weights are shared, not copied: training either trains both, and ``train()`` and ``eval()``
        of either set the mode of the layers of both. Use it to evaluate on a graph that wasn't
        trained on, or to train on several::

            test_model = model.for_graph(test_data.num_nodes)
            out = test_model(loader=gas.EvalSubgraphLoader(test_data, test_ptr))

        Args:
            num_nodes: The number of nodes of the other graph.
            path: A directory for its histories, with ``store="disk"``. (default: a temporary one)

        Raises:
            ValueError: If ``num_nodes`` is no number of nodes.
        """
        check_integer("num_nodes", num_nodes, 1)
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__getstate__())
        for name, value in self.__dict__.items():  # Hooks; not the weights, which are shared.
            if isinstance(value, dict) and name not in ("_parameters", "_buffers"):
                twin.__dict__[name] = copy.copy(value)
        twin.num_nodes = num_nodes
        twin._engine = TransferEngine(self.io, self.pool_size)
        twin._factory = dataclasses.replace(self._factory, path=path)
        twin._modules.pop("view_histories", None)
        twin.view_histories = None
        twin.histories = twin._make_histories()
        return twin

    @property
    def io(self) -> str:
        """How rows are moved: ``"serial"``, ``"concurrent"`` or ``"none"``."""
        return self._engine.io

    @io.setter
    def io(self, io: str) -> None:
        self._engine.io = check_io(io)
        if io == "none":
            warnings.warn(
                "io='none' moves no rows of histories: results are wrong, on purpose, as the upper "
                "bound for benchmarks",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def without_histories(self) -> Iterator[None]:
        """In this context nothing is read from the histories or written to them.

        Outputs are wrong then; it is for measuring what a forward pass takes.
        """
        io, self._engine.io = self.io, "none"
        try:
            yield
        finally:
            self._engine.io = io

    @property
    def moved_bytes(self) -> int:
        """Bytes of stored rows that were pulled from the histories and pushed to them so far.

        Those that :mod:`gas.nn` reads where they are stored aren't moved.
        """
        return self._engine.moved_bytes

    @property
    def idle_bytes(self) -> int:
        """The bytes of buffers for rows of histories that wait for their next use."""
        return self._engine.pool.idle_bytes

    def free_buffers(self) -> None:
        """Gives up these buffers, such as before other batches than the last ones."""
        self._engine.pool.clear()

    def close(self) -> None:
        """Writes what is under way, closes the stores and ends the transfer engine's workers."""
        with contextlib.ExitStack() as everything:  # What fails keeps nothing from being closed.
            everything.callback(self._engine.close)
            if self.ranks is not None:
                everything.callback(self.ranks.close)
            for history in self._all_histories():
                everything.callback(history.close)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_ahead": [],
            "_chosen": None,
            "_calls": Calls(),
            "_watch": None,
            "ranks": None,
        }  # Those are this model's.

    @property
    def plain(self) -> torch.nn.Module:
        """What has the weights by the names that a checkpoint gives them: this model."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the parameters live, and with them the computation."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def emb_device(self) -> torch.device:
        """Where the histories live."""
        return self.histories[0].device if self.histories else torch.device("cpu")

    def reset_parameters(self) -> None:
        """Forgets the histories; subclasses reset their parameters as well."""
        if self.ranks is not None:
            self.ranks.forget()
        for history in self._all_histories():
            history.reset_parameters()

    def staleness(self, loader: Iterable[SubData] | None = None) -> list[Staleness]:
        """Measures how stale each history is.

        Args:
            loader: Batches for layer-wise inference, to compare histories with exact embeddings.
                This costs one inference and another set of histories. The reference is what
                layer-wise inference gives on these batches, not the uncut graph: whether the model
                is right on batches at all, :func:`gas.verify` says. (default: ages only)
        """
        if loader is None:
            return [measure(layer, history) for layer, history in enumerate(self.histories)]
        if self.ranks is not None:
            self.ranks.bind(self, getattr(loader, SHARD, None))
        exact = self.for_graph(self.num_nodes)
        exact.ranks = self.ranks
        try:
            layer_wise(exact, loader)
            pairs = zip(self.histories, exact.histories, strict=True)
            return [measure(layer, stale, true) for layer, (stale, true) in enumerate(pairs)]
        finally:
            exact.close()

    _is_static = False
    """Whether ``forward`` does the same of every batch, whatever is in it."""

    # Calling --------------------------------------------------------------------------------------

    @between
    def __call__(
        self,
        x: Tensor | SubData | None = None,
        adj_t: Any = None,
        batch_size: int | None = None,
        n_id: Tensor | None = None,
        offset: Tensor | None = None,
        count: Tensor | None = None,
        *,
        loader: Iterable[SubData] | None = None,
        fill: bool = False,
        push: bool = True,
        views: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model on a mini-batch, on the full graph, or layer by layer over a loader.

        * ``model(batch)`` returns the ``[batch_size, out_channels]`` outputs of the in-batch nodes;
          the batch is pushed to the histories and its halo pulled. ``forward`` is given what the
          batch has of its parameters: see :meth:`inputs_of`.
        * ``model(batch.x, batch.adj_t, *args)`` is the same, of a batch taken apart.
        * ``model(x, adj_t)`` is plain full batch and leaves the histories alone; with ``fill=True``
          it writes them.
        * ``model(loader=loader)`` computes every node's output layer by layer, in evaluation mode
          and without gradient, at the memory of one batch. It returns ``[num_nodes, out_channels]``
          on the CPU and leaves the histories equal to the full-batch hidden states.

        Args:
            x: A mini-batch, or node features, of shape ``[N, F]`` or
                ``[batch_size + halo, F]``.
            adj_t: The adjacency, in any layout that the model's layers take.
            batch_size: The number of in-batch nodes, which come first.
            n_id: Global ids of in-batch nodes, then of the halo, of shape
                ``[batch_size + halo]``.
            offset: First global row of each part in the batch.
            count: Number of nodes of each part in the batch.
            loader: Batches that cover every node once, to compute layer by layer.
            fill: Write the histories from a full batch. (default: ``False``)
            push: Write the rows of a mini-batch to the histories. Without, nothing is changed, for
                explanations, perturbed inputs or several passes with dropout; the halo's rows are
                read as they are, however old. (default: ``True``)
            views: Also run the views of a mini-batch, with these histories: it is
                :meth:`views` for what wraps the model, such as ``DistributedDataParallel``.
                (default: no views)
            **kwargs: Passed on to ``forward``, such as ``edge_weight``.
        """
        if loader is not None:
            return self._infer(loader, x, adj_t, fill, push, kwargs)
        if views is not None:
            return self.views(cast(SubData, x), views)
        where = (batch_size, n_id, offset, count)
        call, args, kwargs = arrange(self, x, adj_t, where, fill, push, kwargs)
        return run(self, call, *args, **kwargs)

    @apart
    def _infer(
        self,
        loader: Iterable[SubData],
        x: object,
        adj_t: object,
        fill: bool,
        push: bool,
        kwargs: dict[str, Any],
    ) -> Tensor:
        if x is not None or adj_t is not None or fill or kwargs or not push:
            raise ValueError("'loader' brings its own batches: pass nothing else with it")
        return layer_wise(self, loader)

    def views(self, batch: SubData, bank: str = "original") -> tuple[Tensor, ...]:
        """Runs the model on a mini-batch and on each of its views.

        Batches have views if they come from a loader with an augmentation,
        ``SubgraphLoader(..., epoch_transform=gas.MHAug(...))``.

        Args:
            batch: The mini-batch.
            bank: Which histories the views have. ``"original"``: those of the original graph, which
                the batch itself writes and views only read; each is pulled once for all of them.
                ``"per_view"``: a set of histories for each view, which it reads and writes. They
                are made when they are first needed, as copies, and take as much memory again per
                view. (default: ``"original"``)

        Returns:
            The outputs of the in-batch nodes, each of shape ``[batch_size, out_channels]``: of the
            batch itself, then of its views.

        Raises:
            ValueError: If the batch has no views, or an argument is unusable.
        """
        return run_views(self, batch, bank)

    def at(self, batch: SubData) -> OneBatch:
        """This model on one mini-batch, as a module of ``x`` and ``edge_index`` that only reads.

        It is for what takes such a module and calls it often, with features and edges of its own
        making, such as :class:`torch_geometric.explain.Explainer`, and captum. Nothing is written
        to the histories; the halo's rows are read as they are. See :class:`gas.scalable.OneBatch`.

        Args:
            batch: The mini-batch.
        """
        return OneBatch(self, batch)

    @overload
    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = ...,
        n_id: Tensor | None = ...,
        offset: Tensor | None = ...,
        count: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = ...,
        n_id: Tensor | None = ...,
        offset: Tensor | None = ...,
        count: Tensor | None = ...,
        *,
        rows: bool,
    ) -> Tensor | Rows: ...

    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = None,
        n_id: Tensor | None = None,
        offset: Tensor | None = None,
        count: Tensor | None = None,
        *,
        rows: bool = False,
    ) -> Tensor | Rows:
        """Pushes the in-batch rows of a layer's output and pulls the halo's.

        Args:
            history: One of ``self.histories``.
            x: The layer's output, of shape ``[rows, width]``; rows after the first ``batch_size``
                are replaced.
            batch_size: See :meth:`__call__`; this and the rest are what ``forward`` was given.
            n_id: See :meth:`__call__`.
            offset: See :meth:`__call__`.
            count: See :meth:`__call__`.
            rows: Return :class:`gas.history.Rows` of a batch, which the layers of :mod:`gas.nn`
                take: sums and means read the halo's rows from the history itself, nothing walks the
                halo's edges backward, and :func:`gas.nn.dropout` spares the halo.
                (default: ``False``)

        Returns:
            The in-batch rows, with gradient, then the halo's rows, without: of shape
            ``[batch_size + halo, width]``, a tensor that is the caller's. On a full batch, ``x``.
        """
        exchange = exchange_in_graph if torch.compiler.is_compiling() else exchange_now
        return exchange(self, history, x, batch_size, n_id, offset, count, rows)

    def start_pulls(self, batch: SubData) -> BatchPulls:
        """Starts the pulls of a batch that will be computed after the next one.

        Rows are those at this call, of every history, whatever ``pool_size`` is: a pull that began
        later would see what was pushed until then. :class:`gas.PrefetchLoader` calls this; without
        it, calling the model starts the pulls.
        """
        if self.ranks is not None:
            self.ranks.bind_to(self, batch.n_id)
        check_halo(batch.batch_size, batch.n_id, self.buffer_size)
        pulls = BatchPulls(self.histories, batch.batch_size, batch.n_id)
        self._ahead.append((batch.n_id, pulls))
        return pulls

    def cancel_pulls(self, pulls: BatchPulls) -> None:
        """Takes back what :meth:`start_pulls` started, unless the model has used it."""
        self._ahead = [item for item in self._ahead if item[1] is not pulls]
        pulls.cancel()

    def _take_ahead(self, n_id: Tensor) -> BatchPulls | None:
        for position, (ids, pulls) in enumerate(self._ahead):
            if ids is n_id:
                del self._ahead[position]
                return pulls
        return None

    def inputs_of(self, data: Data) -> tuple[Tensor, Any, dict[str, Any]]:
        """What ``forward`` takes of a batch, in any layout.

        Returns:
            The features, the adjacency (``adj_t`` or ``edge_index``), and what the batch has of the
            other parameters that ``forward`` names: ``edge_weight``, ``edge_attr``, ``pos``, ...
        """
        return data.x, adjacency(data), named_arguments(self.forward, data)

    def _given(self, batch: SubData) -> tuple[Tensor | Features, Any, dict[str, Any]]:
        """What ``forward`` is given of a batch; the features where they lie, if it takes them."""
        return self.inputs_of(batch.data)

    # On disk --------------------------------------------------------------------------------------

    def pack(
        self, loader: SubgraphLoader, memory: int | str = 0, path: str | Path | None = None
    ) -> Packed:
        """Arranges rows on disk by what a loader's batches read, so that few long reads find them.

        A batch's halo is spread over the whole graph: where rows have to be read from a disk, each
        costs a page of 4 KiB. Afterwards the files of ``store="disk"`` have beside them, in files
        without a name, a copy of every row for each part that reads it, those of a part together;
        whoever pushes a row writes its copies. So are features ``x`` of a graph folder, or of
        ``gas.encode(..., store="disk")``. Rows that most parts read can be kept in memory. Results
        are equal, bit by bit::

            model = gas.models.GCN(..., store="disk", path="/fast/disk")
            loader = gas.SubgraphLoader("graph", batch_size=4, shuffle=True)
            print(model.pack(loader, memory="2GB"))

        It pays where the files are larger than memory. Copies take about as much disk as rows times
        the nodes of a part's halo over its own, and pushes write as much more. Batches of other
        parts are read as before. A copy of the model, and histories that are made later, aren't
        packed. Calling it again replaces what was arranged, once there was room for both. Where
        features were packed, ``loader.data`` is a graph of its own: go on with the loader, or that.

        Args:
            loader: Its parts are what is arranged for, however batches combine them.
            memory: The bytes of rows kept in memory, of all histories and features together, as a
                number or like ``"2GB"``: those that most parts read. :func:`gas.plan` says what is
                left, ``plan.hot_bytes``. (default: ``0``)
            path: A directory for copies of features, as large as they. (default: that of temporary
                files)

        Returns:
            What was arranged: its bytes, and the share of rows that is found in memory.

        Raises:
            ValueError: If histories aren't on disk, the graph has another number of nodes, or
                ``path`` is no directory; nothing has changed then, nor after the others.
            MemoryError: If there is no room for ``memory`` bytes.
            OSError: If the disk has no room for the copies.
        """
        if self.ranks is not None:
            self.ranks.bind(self, loader.shard)
        return pack(list(self._all_histories()), loader, memory, path)

    @property
    def is_packed(self) -> bool:
        """Whether :meth:`pack` has arranged the histories."""
        return any(history.is_packed for history in self.histories)

    def expect(self, batch_size: int, n_id: Tensor) -> None:
        """Has the system read ahead what a batch will pull of packed histories.

        Nothing waits for it; rows are those at the time when they are pulled. Calling the model
        does it, and :class:`gas.PrefetchLoader` for the next batch.

        Args:
            batch_size: See :meth:`__call__`.
            n_id: See :meth:`__call__`.
        """
        if self.is_packed:
            n_id = n_id.cpu()
            own, halo = n_id[:batch_size], n_id[batch_size:]
            for history in self.histories:
                history.expect(halo, own)

    # Graphs ---------------------------------------------------------------------------------------

    transform: BaseTransform | None = None
    """What the whole graph has to go through before it is cut into parts, such as ``GCNNorm()``."""

    def prepare(self, data: Data) -> Data:
        """The whole graph as the model's layers take it, after :attr:`transform`.

        :func:`gas.cluster` calls it, ``gas.cluster(data, num_parts, model=model)``.

        Args:
            data: The graph; it is not modified.
        """
        if self.transform is not None and SHARD in data:
            raise ValueError(
                "'data' is a shard, which doesn't know all neighbours of its replicas: prepare the "
                "whole graph, gas.cluster(data, num_parts, shards=2, model=model)"
            )
        return data if self.transform is None else self.transform(copy.copy(data))

    def parts_within(self, memory: int, cut: Callable[[int], Data]) -> int:
        """Into how many parts the graph is cut by ``gas.cluster(data, "auto", memory=...)``.

        Args:
            memory: The bytes that a mini-batch of one part may take in training.
            cut: Cuts the graph into so many parts.

        Raises:
            MemoryError: If they are too few for one node.
        """
        return parts_within(self, memory, cut)

    def predict(
        self,
        graph: Data | SubgraphLoader | str | Path,
        batch_size: int = 1,
        *,
        gather: bool = True,
        nodes: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Every node's output, in the order of the graph that :func:`gas.cluster` was given.

        It is layer-wise inference, ``model(loader=...)``, and leaves the histories equal to the
        full-batch hidden states.

        Args:
            graph: What :func:`gas.cluster` has returned, a loader of it, or the path of its folder.
            batch_size: Parts per mini-batch. (default: ``1``)
            gather: Of a model of :func:`gas.distribute`, return the outputs of all nodes on every
                rank; without, each has those of its own nodes, of shape ``[num_own,
                out_channels]``, in the order of the loader. (default: ``True``)
            nodes: Only these nodes' outputs, of shape ``[B, out_channels]``, by their ids in that
                graph: from one mini-batch around them, with rows of histories for their neighbours,
                which stay as they are. Exact if nothing has changed since all were predicted;
                otherwise a warning says how old the rows are. The first call makes a loader of the
                graph, which the next ones take, or give your own. (default: all)
            **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

        Returns:
            Of shape ``[num_nodes, out_channels]``, on the CPU.

        Raises:
            ValueError: If the graph isn't clustered.
            IndexError: If one of ``nodes`` doesn't exist.
        """
        graph = opened(graph, "graph")
        check_is_graph(graph, "graph")
        if nodes is not None:
            return predict_nodes(self, graph, nodes, kwargs)
        return predict_every_node(self, graph, batch_size, gather, kwargs)

    # Layer-wise inference -------------------------------------------------------------------------

    def forward_layer(self, layer: int, x: Tensor, adj_t: Any, state: dict[str, Any]) -> Tensor:
        """Computes one layer, for inference in a single pass over the data. Optional.

        Without it, inference runs ``forward`` up to each history in turn, which is right for every
        model and costs about ``num_layers / 2`` times as much.

        Args:
            layer: The layer, from 0.
            x: Input features for the first layer, else the rows of history ``layer - 1``, of shape
                ``[batch_size + halo, width]``.
            adj_t: The batch's adjacency.
            state: Kept per batch between layers; what is put here for every batch takes memory.
                ``state["batch"]`` is the batch itself, a :class:`gas.SubData`, during the call:
                features to compute something of again, or ids to pull from an earlier history.

        Any other parameter, such as ``edge_weight`` or ``pos``, here and in ``forward``, is given
        what the batch has under its name.

        Returns:
            What is pushed to history ``layer``, or the output of the model; rows after the first
            ``batch_size`` are ignored.
        """
        raise NotImplementedError

    @property
    def has_forward_layer(self) -> bool:
        """Whether the model computes one layer alone, by :meth:`forward_layer`."""
        return type(self).forward_layer is not ScalableGNN.forward_layer


def _widths(hidden_channels: int | Sequence[int], num_layers: int) -> list[int]:
    """The width of every history."""
    if isinstance(hidden_channels, Sequence):
        widths = list(hidden_channels)
    else:
        widths = [hidden_channels] * (num_layers - 1)
    for width in widths:
        check_integer("hidden_channels", width, 0)
    if len(widths) != num_layers - 1:
        raise ValueError(
            f"'hidden_channels' has {len(widths)} widths, expected one for each of the "
            f"{num_layers - 1} histories of {num_layers} layers"
        )
    return widths
