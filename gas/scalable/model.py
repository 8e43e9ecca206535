"""``ScalableGNN``: the base class of models that train with historical embeddings.

Source: Fey et al., *GNNAutoScale*, ICML 2021, arXiv 2106.05609.
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

from gas.graph import SHARD, PartitionOptions, check_is_graph, open_if_path
from gas.history import (
    Codec,
    HistoryFactory,
    Staleness,
    StoreFactory,
    TransferEngine,
    measure_staleness,
)
from gas.loader import SubData, SubgraphLoader, unwrap_loader
from gas.native import check_integer, disable_compile, explain_missing_cuda, report_progress
from gas.scalable.base import history_widths
from gas.scalable.call import BatchModel, Calls
from gas.scalable.checks import apply_transform, check_order
from gas.scalable.deprecated import DeprecatedNames
from gas.scalable.inference import loader_of, predict_every_node, refresh, run_inference
from gas.scalable.memory import parts_within, plan_parts
from gas.scalable.node_predictor import predict_nodes
from gas.scalable.one_batch import OneBatch
from gas.scalable.pack import PackingSummary, pack

Model = TypeVar("Model", bound="ScalableGNN")


class ScalableGNN(DeprecatedNames, BatchModel):
    """Base class of models that train on mini-batches with historical embeddings.

    Its ``forward`` passes the output of every layer but the last through :meth:`push_and_pull`.
    Layers with a root term (SAGE, GIN, GAT) take the rows of sources and targets, GCNConv ``x``::

        class GNN(gas.ScalableGNN):
            def forward(self, x, adj_t, *args):
                batch_size = args[0]  # None on a full batch.
                for conv, history in zip(self.convs[:-1], self.histories):
                    x = conv((x, x[:batch_size]), adj_t).relu()
                    x = self.push_and_pull(history, x, *args)
                return self.convs[-1]((x, x[:batch_size]), adj_t)

    A batch computes the in-batch nodes exactly and reads the halo's embeddings from the histories,
    without gradient. Batches write the histories both in training and in evaluation mode.

    Args:
        num_nodes: The number of nodes of the graph.
        hidden_channels: The width of every history, or one width for each of them.
        num_layers: The number of layers; there are ``num_layers - 1`` histories.
        pool_size: Upper bound of the number of simultaneous pulls, each of which has a buffer, and
            of the pinned buffers for a GPU that can't read a store itself. Pulls of a prefetched
            batch all start together. (default: 2)
        buffer_size: Upper bound of the rows of a buffer, which are those of a batch's halo: a batch
            with a larger halo is refused. (default: as large as a batch needs)
        device: The device of the histories. (default: the CPU)
        dtype: The precision of the histories; see :class:`gas.History`.
            (default: ``torch.float32``)
        store: The place of the histories: ``"device"``, ``"pinned"``, ``"host"``, ``"disk"``,
            ``"auto"`` or a function; see :class:`gas.History`. ``"auto"`` prints its choice on
            standard error. (default: the CPU's memory, pinned if there is a GPU, or ``device``)
        path: A directory for ``store="disk"`` or ``"auto"``; histories found there are opened with
            their rows. Of several ranks, each has its files in ``rank_0``, ``rank_1``, ... of it.
            (default: a temporary directory)
        io: ``"serial"`` moves rows when the forward pass needs them. ``"concurrent"`` starts pulls
            when the model is called, so that they overlap with the computation if a core is idle or
            the store is slow; results are bitwise equal. ``"none"`` moves nothing: results are
            wrong, for benchmarks. (default: ``"concurrent"``)
        prefetch: With a :class:`gas.PrefetchLoader`, the number of batches ahead for which pulls
            may start, 0 or 1. With 1 a batch doesn't see the rows pushed by the batch before it:
            its rows can be one step older. (default: ``0``)

    Raises:
        ValueError: If an argument is unusable, naming it.
        MemoryError, OSError: If memory or disk has no room for the histories; none is made then.
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
        widths = history_widths(hidden_channels, num_layers)
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
        self._started_pulls = []
        self._node_predictor = None
        self.ranks = None

    def _apply(self: Model, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        with explain_missing_cuda("the model"):  # The first tensor raises: nothing has moved.
            return super()._apply(fn, recurse)

    def for_graph(self: Model, num_nodes: int, path: str | Path | None = None) -> Model:
        """Return this model for another graph: shared weights, separate histories.

        Weights are shared, not copied: training one model trains both, and ``train()`` and
        ``eval()`` of one set the mode of the layers of both. Use it to evaluate on another graph
        than the training graph, or to train on several::

            test_model = model.for_graph(test_data.num_nodes)
            out = test_model(loader=gas.EvalSubgraphLoader(test_data, test_ptr))

        Args:
            num_nodes: The number of nodes of the other graph.
            path: A directory for its histories, with ``store="disk"``. (default: a temporary one)

        Raises:
            ValueError: If ``num_nodes`` is no number of nodes.
        """
        check_integer("num_nodes", num_nodes, 1)
        model = self.__class__.__new__(self.__class__)
        model.__dict__.update(self.__getstate__(), _calls=Calls())
        for name, value in self.__dict__.items():  # Copies hooks, not the shared weights.
            if isinstance(value, dict) and name not in ("_parameters", "_buffers"):
                model.__dict__[name] = copy.copy(value)
        model.num_nodes = num_nodes
        model._engine = TransferEngine(self.io, self.pool_size)
        model._factory = dataclasses.replace(self._factory, path=path)
        model._modules.pop("view_histories", None)
        model.view_histories = None
        model.histories = model._make_histories()
        return model

    def close(self) -> None:
        """Finish pending transfers, close the stores and stop the transfer engine's workers."""
        with contextlib.ExitStack() as stack:  # An error in one of them doesn't skip the others.
            stack.callback(super().close)
            if self.ranks is not None:
                stack.callback(self.ranks.group.close)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without those that belong to this model alone."""
        return {
            **super().__getstate__(),
            "_started_pulls": [],
            "_node_predictor": None,
            "_calls": Calls(self._calls.order),
            "_watch": None,
            "ranks": None,
        }

    def reset_parameters(self) -> None:
        """Reset the histories; subclasses reset their parameters as well."""
        if self.ranks is not None:
            self.ranks.receive_pending()
        super().reset_parameters()

    def staleness(self, loader: Iterable[SubData] | None = None) -> list[Staleness]:
        """Return a :class:`gas.history.Staleness` for each history, in the order of layers.

        Args:
            loader: Batches for layer-wise inference, to compare histories with exact embeddings.
                This costs an inference and another set of histories. The reference are these
                batches, not the whole graph, which :func:`gas.verify` checks. (default: ages only)
        """
        if loader is None:
            return super().staleness()
        if self.ranks is not None:
            self.ranks.bind(self, getattr(loader, SHARD, None))
        check_order(self, getattr(unwrap_loader(loader), "node_order", None))
        exact = self.for_graph(self.num_nodes)
        exact.ranks = self.ranks
        try:
            run_inference(exact, loader)
            pairs = zip(self.histories, exact.histories, strict=True)
            return [measure_staleness(layer, *pair) for layer, pair in enumerate(pairs)]
        finally:
            exact.close()

    @disable_compile
    def _infer(self, loader: Iterable[SubData]) -> Tensor:
        return run_inference(self, loader)

    def at(self, batch: SubData) -> OneBatch:
        """Return a read-only module of ``x`` and ``edge_index`` for one mini-batch.

        It is for libraries that call such a module many times with other features and edges, such
        as :class:`torch_geometric.explain.Explainer` and captum. Nothing is written to the
        histories; the halo's rows are read as they are. See :class:`gas.scalable.OneBatch`.

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
    ) -> PackingSummary:
        """Copy rows on disk so that a batch reads them in few long reads.

        A batch's halo is spread over the whole graph: each row read from a disk costs a page of
        4 KiB. This adds to the files of ``store="disk"``, in unnamed files, a copy of every row for
        each part that reads it, with the rows of a part together; each push of a row also writes
        its copies. Features ``x`` of a graph folder, or of ``gas.quantize(..., store="disk")``, are
        packed, too. Rows that most parts read can be kept in memory. Results are bitwise equal::

            model = gas.models.GCN(..., store="disk", path="/fast/disk")
            loader = gas.SubgraphLoader("graph", batch_size=4, shuffle=True)
            print(model.pack(loader, memory="2GB"))

        It is useful if the files are larger than memory. The copies multiply the disk space, and
        the bytes written by pushes, by about the ratio of halo nodes to in-batch nodes of a part.
        Batches of other parts are read as before. A copy of the model, and histories that are made
        later, aren't packed. Calling it again replaces the copies, and needs room for both. If
        features were packed, ``loader.data`` is a new graph: continue with the loader, or with it.

        Args:
            loader: The loader, for whose parts rows are copied; batches may combine them freely.
            memory: The bytes of rows kept in memory, of all histories and features together, as a
                number or like ``"2GB"``: those that most parts read. ``plan.hot_bytes`` of
                :func:`gas.plan` is a suitable value. (default: ``0``)
            path: A directory for copies of features, which are as large as these. (default: that of
                temporary files)
            log: Print a line every ten seconds, on standard error. (default: ``True``)

        Returns:
            A summary: the bytes of the copies, and the share of rows that is kept in memory.

        Raises:
            ValueError: If histories aren't on disk, the graph has another number of nodes, or
                ``path`` is no directory; after any error, nothing has changed.
            MemoryError: If there is no room for ``memory`` bytes.
            OSError: If the disk has no room for the copies.
        """
        if self.ranks is not None:
            self.ranks.bind(self, loader.shard)
        with report_progress("Packing rows on disk", log=log):
            return pack(list(self._all_histories()), loader, memory, path)

    # Graphs ---------------------------------------------------------------------------------------

    transform: BaseTransform | None = None
    """The transform of the whole graph before it is cut into parts, such as ``GCNNorm()``."""

    def prepare(self, data: Data) -> Data:
        """Apply :attr:`transform`, if there is one, to the whole graph, and return the result.

        :func:`gas.cluster` calls it, ``gas.cluster(data, num_parts, model=model)``.

        Args:
            data: The graph, not a shard; it is not modified.
        """
        if self.transform is not None and SHARD in data:
            raise ValueError(
                "'data' is a shard, which doesn't know all neighbours of its replicas: prepare the "
                "whole graph, gas.cluster(data, num_parts, shards=2, model=model)"
            )
        return data if self.transform is None else apply_transform(self.transform, data)

    def _plan_parts(self, data: Data, options: PartitionOptions) -> tuple[int, int]:
        return plan_parts(self, data, options)

    def parts_within(self, memory: int, cut: Callable[[int], Data]) -> int:
        """Return the number of parts for ``gas.cluster(data, "auto", memory=...)``.

        Args:
            memory: The bytes that a mini-batch of one part may take in training.
            cut: Cuts the graph into that many parts.

        Raises:
            MemoryError: If ``memory`` is too small for one node.
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
        """Compute every node's output, in the order of the graph before :func:`gas.cluster`.

        It is layer-wise inference, ``model(loader=...)``. Afterwards the histories equal the
        full-batch hidden states.

        Args:
            graph: The graph of :func:`gas.cluster`, a loader of it, or the path of its folder.
            batch_size: Parts per mini-batch. (default: that of the last loader of the graph which
                was given one, ``graph.batch_size``, or ``1``)
            gather: For a model of :func:`gas.distribute`, return the outputs of all nodes on every
                rank; ``False`` returns those of the rank's own nodes, of shape ``[num_own,
                out_channels]``, in the order of the loader. (default: ``True``)
            nodes: Compute only these nodes' outputs, of shape ``[B, out_channels]``, by their rows
                in that graph: from one mini-batch around them, with rows of histories for their
                neighbours. The histories aren't changed. Outputs are exact if nothing has changed
                since all nodes were predicted; otherwise a warning names the age of the rows. The
                first call makes a loader of the graph for all further calls, unless ``graph`` is a
                loader. (default: all)
            ids: The same for nodes with these ids of the graph's ``node_id``: a list, which may
                contain repetitions. (default: all)
            log: Print a line every ten seconds, on standard error. (default: ``True``)
            **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

        Returns:
            Of shape ``[num_nodes, out_channels]``, on the CPU.

        Raises:
            ValueError: If the graph isn't clustered, or has no node with one of ``ids``.
            IndexError: If one of ``nodes`` doesn't exist.
        """
        graph = open_if_path(graph, "graph")
        check_is_graph(graph, "graph", or_loader=True)
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

        It is layer-wise inference, without dropout. Batch norms that are in training mode normalise
        by the statistics of all nodes, as in a full batch; their running statistics become those
        that one step of a full batch with momentum 1 would store. Mini-batch training leaves the
        statistics of the last few batches, each of a few clusters: call this before training, and
        before the model is evaluated or saved::

            model.train()
            model.refresh(graph)
            pred = model.predict(graph)

        Without such norms it costs less than :meth:`predict`; each of them costs another
        computation of its layer. After an error, running statistics are unchanged. In evaluation
        mode none are set, and a warning is given.

        Args:
            graph: See :meth:`predict`.
            batch_size: See :meth:`predict`.
            norms: Set running statistics; ``False`` normalises by the present ones, as in
                :meth:`predict`. (default: ``True``)
            log: See :meth:`predict`. (default: ``True``)
            **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

        Raises:
            ValueError: If the graph isn't clustered, a norm is given a single row, or one in
                training mode is PyG's ``HeteroBatchNorm``.
            RuntimeError: If the order of norms depends on the mini-batch.
        """
        graph = open_if_path(graph, "graph")
        check_is_graph(graph, "graph", or_loader=True)
        refresh(self, loader_of(graph, batch_size, kwargs, "model.refresh(graph, ...)"), norms, log)
