"""``ScalableGNN``: the base class of models that train with historical embeddings.

Source: Fey, Lenssen, Weichert, Leskovec, *GNNAutoScale: Scalable and Expressive GNNs via
Historical Embeddings*, ICML 2021.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.graph import SHARD, check_is_graph, open_if_path
from gas.history import (
    Codec,
    HistoryFactory,
    Staleness,
    StoreFactory,
    TransferEngine,
    measure_staleness,
)
from gas.loader import SubData, SubgraphLoader
from gas.native import check_integer, disable_compile, explain_missing_cuda, report_progress
from gas.scalable.base import widths_of
from gas.scalable.call import BatchModel, Calls
from gas.scalable.chosen import predict_nodes
from gas.scalable.former import FormerNames
from gas.scalable.inference import layer_wise, loader_of, predict_every_node, refresh
from gas.scalable.memory import parts_within
from gas.scalable.one_batch import OneBatch
from gas.scalable.pack import Packed, pack

Model = TypeVar("Model", bound="ScalableGNN")


class ScalableGNN(FormerNames, BatchModel):
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
        widths = widths_of(hidden_channels, num_layers)
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
        self.view_histories = None
        self._calls = Calls()
        self._ahead = []
        self._chosen = None
        self.ranks = None

    def _apply(self: Model, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        with explain_missing_cuda("the model"):  # Raised by the first tensor: nothing has moved.
            return super()._apply(fn, recurse)

    def for_graph(self: Model, num_nodes: int, path: str | Path | None = None) -> Model:
        """Return this model for another graph: shared weights, separate histories.

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

    def close(self) -> None:
        """Write what is under way, close the stores and end the transfer engine's workers."""
        with contextlib.ExitStack() as everything:  # What fails keeps nothing from being closed.
            everything.callback(super().close)
            if self.ranks is not None:
                everything.callback(self.ranks.close)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_ahead": [],
            "_chosen": None,
            "_calls": Calls(),
            "_watch": None,
            "ranks": None,
        }  # Those are this model's.

    def reset_parameters(self) -> None:
        """Forget the histories; subclasses reset their parameters as well."""
        if self.ranks is not None:
            self.ranks.forget()
        for history in self._all_histories():
            history.reset_parameters()

    def staleness(self, loader: Iterable[SubData] | None = None) -> list[Staleness]:
        """Measure how stale each history is.

        Args:
            loader: Batches for layer-wise inference, to compare histories with exact embeddings.
                This costs one inference and another set of histories. The reference is what
                layer-wise inference gives on these batches, not the uncut graph: whether the model
                is right on batches at all, :func:`gas.verify` says. (default: ages only)
        """
        if loader is None:
            return self._measure_ages()
        if self.ranks is not None:
            self.ranks.bind(self, getattr(loader, SHARD, None))
        exact = self.for_graph(self.num_nodes)
        exact.ranks = self.ranks
        try:
            layer_wise(exact, loader)
            pairs = zip(self.histories, exact.histories, strict=True)
            return [measure_staleness(layer, *pair) for layer, pair in enumerate(pairs)]
        finally:
            exact.close()

    @disable_compile
    def _infer(self, loader: Iterable[SubData]) -> Tensor:
        return layer_wise(self, loader)

    def at(self, batch: SubData) -> OneBatch:
        """Return a read-only module of ``x`` and ``edge_index`` for one mini-batch.

        It is for what takes such a module and calls it often, with features and edges of its own
        making, such as :class:`torch_geometric.explain.Explainer`, and captum. Nothing is written
        to the histories; the halo's rows are read as they are. See :class:`gas.scalable.OneBatch`.

        Args:
            batch: The mini-batch; its ``x`` is dense afterwards, as explainers mask every feature.
        """
        return OneBatch(self, batch)

    # On disk --------------------------------------------------------------------------------------

    def pack(
        self,
        loader: SubgraphLoader,
        memory: int | str = 0,
        path: str | Path | None = None,
        log: bool = True,
    ) -> Packed:
        """Arrange rows on disk by what a loader's batches read, so that few long reads find them.

        A batch's halo is spread over the whole graph: where rows have to be read from a disk, each
        costs a page of 4 KiB. Afterwards the files of ``store="disk"`` have beside them, in files
        without a name, a copy of every row for each part that reads it, those of a part together;
        whoever pushes a row writes its copies. So are features ``x`` of a graph folder, or of
        ``gas.quantize(..., store="disk")``. Rows that most parts read can be kept in memory.
        Results are equal, bit by bit::

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
            log: Print a line every ten seconds, on standard error. (default: ``True``)

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
        with report_progress("Packing rows on disk", log=log):
            return pack(list(self._all_histories()), loader, memory, path)

    # Graphs ---------------------------------------------------------------------------------------

    transform: BaseTransform | None = None
    """What the whole graph has to go through before it is cut into parts, such as ``GCNNorm()``."""

    def prepare(self, data: Data) -> Data:
        """Return the whole graph as the model's layers take it, after :attr:`transform`.

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
        batch_size: int | None = None,
        *,
        gather: bool = True,
        nodes: Tensor | None = None,
        ids: Any = None,
        log: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Every node's output, in the order of the graph that :func:`gas.cluster` was given.

        It is layer-wise inference, ``model(loader=...)``, and leaves the histories equal to the
        full-batch hidden states.

        Args:
            graph: What :func:`gas.cluster` has returned, a loader of it, or the path of its folder.
            batch_size: Parts per mini-batch. (default: that of the last loader of the graph which
                was given one, ``graph.batch_size``, or ``1``)
            gather: Of a model of :func:`gas.distribute`, return the outputs of all nodes on every
                rank; without, each has those of its own nodes, of shape ``[num_own,
                out_channels]``, in the order of the loader. (default: ``True``)
            nodes: Only these nodes' outputs, of shape ``[B, out_channels]``, by their ids in that
                graph: from one mini-batch around them, with rows of histories for their neighbours,
                which stay as they are. Exact if nothing has changed since all were predicted;
                otherwise a warning says how old the rows are. The first call makes a loader of the
                graph, which the next ones take, or give your own. (default: all)
            ids: The same of the nodes with these ids, of the graph's ``node_id``: a list, which may
                repeat some. (default: all)
            log: Print a line every ten seconds, on standard error. (default: ``True``)
            **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

        Returns:
            Of shape ``[num_nodes, out_channels]``, on the CPU.

        Raises:
            ValueError: If the graph isn't clustered, or has no node with one of ``ids``.
            IndexError: If one of ``nodes`` doesn't exist.
        """
        graph = open_if_path(graph, "graph")
        check_is_graph(graph, "graph")
        if nodes is not None or ids is not None:
            return predict_nodes(self, graph, nodes, ids, kwargs)
        return predict_every_node(self, graph, batch_size, gather, log, kwargs)

    def refresh(
        self,
        graph: Data | SubgraphLoader | str | Path,
        batch_size: int | None = None,
        *,
        norms: bool = True,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill the histories and set the running statistics of batch norms, by the whole graph.

        It is layer-wise inference, without dropout. Batch norms that are in training mode, as all
        are unless the model is in evaluation mode, normalise by the statistics of all nodes, as in
        a full batch; their running statistics become those that one step of a full batch with
        momentum 1 would store. In mini-batches, they are those of the last few batches, each of a
        few clusters: call it before training, and before each evaluation or saving of the weights::

            model.train()
            model.refresh(graph)
            pred = model.predict(graph)

        Without such norms it costs less than :meth:`predict`; each of them takes the computation of
        Without such norms it costs less than :meth:`predict`; each of them takes the computation of
        its layer once more. After an error, running statistics are as they were. In evaluation mode
        none are set, which a warning says.

        Args:
            graph: See :meth:`predict`.
            batch_size: See :meth:`predict`.
            norms: Set running statistics; without, all norms take those that they have, as in
                :meth:`predict`. (default: ``True``)
            log: See :meth:`predict`. (default: ``True``)
            **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

        Raises:
            ValueError: If the graph isn't clustered, a norm is given a single row, or one in
                training mode is PyG's ``HeteroBatchNorm``.
            RuntimeError: If the order of norms depends on the mini-batch.
        """
        graph = open_if_path(graph, "graph")
        check_is_graph(graph, "graph")
        refresh(self, loader_of(graph, batch_size, kwargs, "refresh"), norms, log)
