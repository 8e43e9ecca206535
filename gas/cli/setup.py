"""Preparation of an experiment: its options, its graph and its models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas import native
from gas.cli.graphs import (
    Graph,
    check_labels,
    check_splits,
    model_arguments,
    open_parts,
    remove_edge_features,
    set_real_targets,
    training_subgraph,
)
from gas.cli.settings import MODELS, Settings, check_modes
from gas.datasets import check_parts
from gas.graph import check_data_features, remove_edges, with_csr_features, with_edge_index
from gas.history import Codec
from gas.native import PeakMemory, bytes_of, check_integer, human, resident_kinds
from gas.training import (
    FullBatch,
    Plan,
    activation_bytes,
    baseline,
    check_metric,
    fits_one_batch,
    is_real,
    limit_freed_memory,
    metric_of,
    release_freed_memory,
    split_mask,
)

if TYPE_CHECKING:
    from gas.scalable import Verification


class Setup:
    """Prepare a graph for training a model and evaluating it, and make new models for it.

    The arguments are those of :class:`gas.cli.Experiment`.
    """

    node_type: str | None = None
    """The type of nodes that is predicted, of a heterogeneous graph."""

    def __init__(
        self,
        data: Data,
        out_channels: int,
        model: str,
        settings: Settings,
        *,
        full_batch: bool = False,
        inductive: bool | None = None,
        evaluation: str | None = None,
        refresh: str | None = None,
        layout: str | None = None,
        partition: str = "auto",
        prefetch: bool = False,
        memory_budget: int | None = None,
        memory: int | str | None = None,
        micro_batches: int = 1,
        pack: int | str | None = None,
        augment: Callable[[Data], gas.augment.Augmentation] | None = None,
        evaluate_every: int = 1,
        patience: int | None = None,
        keep_edges: bool = True,
        check: bool = True,
        libraries: int | None = None,
        device: torch.device | str = "cpu",
        log: bool = True,
        training: dict[str, Any] | None = None,
        folder: Path | None = None,
        **histories: Any,
    ) -> None:
        is_mapped = "adj_t" in data and "parts" in data  # From a graph folder.
        fits = not is_mapped and fits_one_batch(data.num_nodes, data.num_edges)
        evaluation = evaluation or ("full" if full_batch or fits else "layerwise")
        # Training doesn't go on with the averaged weights that are evaluated.
        keeps = full_batch or (settings.average_weights and evaluation == "full")
        refresh = refresh or ("none" if keeps else evaluation)
        check_modes(model, evaluation, refresh, full_batch)
        check_integer("evaluate_every", evaluate_every, 1)
        self.cls, self.out_channels, self.folder = MODELS[model], out_channels, folder
        self.settings, self.full_batch, self.training = settings, full_batch, training or {}
        self.evaluation, self.refresh, self.evaluate_every = evaluation, refresh, evaluate_every
        self.memory_budget, self.pack, self.libraries = memory_budget, pack, libraries
        self.augment, self.patience, self.keep_edges, self.log = augment, patience, keep_edges, log
        self.prefetch, self.device, self.histories = prefetch, device, histories
        self.layout = layout or ("fused" if native.computes_on(torch.device(device)) else "csr")
        self.partition = partition
        self.inductive = settings.inductive if inductive is None else inductive
        if is_mapped:
            self._adopt_parts(data)
        data = self._to_supported(data, check)
        self.plan: Plan | None = None
        check_integer("micro_batches", micro_batches, 1)
        self.micro_batches = micro_batches
        if memory is not None:
            self._check_predictable(memory)
        with PeakMemory() as self.peak_before:  # Of planning and preparing, before training.
            self._prepare_within(data, memory, is_mapped)
        self.data = self.eval_graph.data
        self.metric = settings.metric or metric_of(self.data.y)

    def _prepare_within(self, data: Data, memory: int | str | None, is_mapped: bool) -> None:
        """Prepare the graph, with mini-batches and histories that fit the memory, if given."""
        if memory is not None and not is_mapped:
            self.plan = self._plan(data, memory)
            chosen = {"num_parts": self.plan.num_parts, "batch_size": self.plan.batch_size}
            self.settings = self.settings.replace(**chosen)
            self.micro_batches = self.plan.micro_batches
        self.graph, self.eval_graph = self._prepare(data)
        if memory is not None and is_mapped:
            self._fit_memory(bytes_of("memory", memory))
            self.graph, self.eval_graph = self._prepare(data)

    def _adopt_parts(self, data: Data) -> None:
        """Take the parts of a mapped graph, and refuse options that need a graph in memory."""
        for name, given in (
            ("full_batch", self.full_batch),
            ("inductive", self.inductive),
            ("augment", self.augment is not None),
        ):
            if given:
                raise ValueError(
                    f"{name!r} needs a graph in memory, but 'data' is mapped from a graph folder: "
                    "read it by gas.get_data"
                )
        found, wanted = data.parts.numel() - 1, self.settings.num_parts
        if found > 1 and wanted not in (None, found):
            raise ValueError(
                f"'num_parts' is {wanted}, but the graph folder has {found} parts: leave it out, "
                "or give a folder of one part"
            )
        if found > 1:
            if self.partition != "auto":
                raise ValueError(
                    f"'partition' is {self.partition!r}, but the graph folder has {found} parts "
                    "already: leave it out, or give a folder of one part"
                )
            self.settings = self.settings.replace(num_parts=found)

    def _to_supported(self, data: Data, check: bool) -> Data:
        """Check features, labels and parts, and return the graph with supported features."""
        y = data.get("y")
        if self.settings.metric == "r2" and y is not None and y.dim() == 1 and not is_real(y):
            data, self.out_channels = copy.copy(data), 1
            set_real_targets(data, data)
        data = with_csr_features(data)
        gas.models.check_features(data.get("x"))
        if check:
            check_data_features(data)
        check_labels(data)
        check_metric(self.settings.metric, data.y, self.out_channels)
        check_parts(data)
        return remove_edge_features(data)

    def _prepare(self, data: Data) -> tuple[Graph, Graph]:
        """Prepare the graph for training and for evaluation."""
        self.settings = self.settings.for_size(data.num_nodes)
        if self.augment is not None:
            self._check_augment(data)
        check_splits(data)
        fill = self.evaluation if self.refresh == "none" else self.refresh
        if self.inductive:
            trained = self._prepare_graph(training_subgraph(data), {fill})
            return trained, self._prepare_graph(data, {self.evaluation})
        graph = self._prepare_graph(data, {fill, self.evaluation})
        return graph, graph

    def _check_predictable(self, memory: int | str) -> None:
        """Refuse ``memory`` with options that :func:`gas.plan` can't predict."""
        for name, given, why in (
            ("full_batch", self.full_batch, "has no mini-batches to choose"),
            ("memory_budget", self.memory_budget is not None, "splits mini-batches itself"),
            ("augment", self.augment is not None, "makes views, which aren't predicted"),
            ("inductive", self.inductive, "evaluates another graph, which isn't predicted"),
        ):
            if given:
                raise ValueError(
                    f"'memory' is {memory!r}, but '{name}' is given, which {why}: leave one out"
                )

    def _check_augment(self, data: Data) -> None:
        """Refuse ``augment`` where views, or their loss, aren't defined."""
        reason, dropout = "", self.settings.edge_dropout
        if self.full_batch:
            reason = "'full_batch' has no mini-batches: use num_parts=1, which computes the same"
        elif self.inductive:
            reason = (
                "'inductive' evaluates another graph than the one that is augmented: leave one out"
            )
        elif data.y.dim() != 1 or is_real(data.y):
            reason = (
                f"'data.y' is {data.y.dtype} of shape {list(data.y.shape)}, expected one class per "
                "node: leave 'augment' out"
            )
        elif dropout > 0:
            reason = f"'edge_dropout' is {dropout} and views lack edges already: leave one out"
        if reason:
            raise ValueError(f"'augment' is given, but {reason}")

    def _prepare_graph(self, data: Data, modes: set[str]) -> Graph:
        """Partition a graph, and prepare it for what is done in ``modes``, full or layer-wise."""
        num_parts, batch_size = self.settings.num_parts or 1, self.settings.batch_size or 1
        cls, log, perm, ptr = self.cls, self.log, None, None
        options: dict[str, Any]
        if "adj_t" in data:
            data, perm, ptr = open_parts(data, num_parts, self.partition, self.folder, log)
        elif not self.full_batch:
            options = {"num_nodes": data.num_nodes, "method": self.partition, "log": log}
            perm, ptr = gas.metis(data.edge_index, num_parts, **options)
            data = gas.permute(data, perm, log=log)
        raw = None if self.augment is None else data
        if cls.transform is not None:  # It needs the whole graph.
            data = cls.transform(with_edge_index(data))
        loader = inference = parts = None
        if ptr is not None:
            if log:
                parts = gas.partition_report(data, ptr)
                print(parts)
            options = {"layout": self.layout, "log": False, "check": False}
            options["edge_weight"] = cls.needs_weights
            loader = gas.SubgraphLoader(data, ptr, batch_size, shuffle=True, **options)
            if "layerwise" in modes:
                # Cutting batches again takes a few percent of the time to compute them, and no
                # memory.
                options |= {"like": loader, "cache": False}
                inference = gas.EvalSubgraphLoader(data, ptr, batch_size, **options)
        whole = None
        if self.full_batch or "full" in modes:
            whole = FullBatch(data, self.device, self.layout, cls.needs_weights, check=False)
        arguments, shown = model_arguments(self.settings.architecture, data), repr(data)
        if not self.keep_edges and raw is None:
            for each in (loader, inference):
                if each is not None:
                    each.forget_edges()
            data = remove_edges(data) if loader is None else loader.data
        return Graph(perm, raw, data, loader, inference, whole, arguments, shown, parts)

    def _plan(self, data: Data, memory: int | str) -> Plan:
        """Plan batches that fit memory, and adopt the precision and the store of histories."""
        dtype, store = self.histories.get("dtype"), self.histories.get("store")
        with torch.random.fork_rng():
            arguments = model_arguments(self.settings.architecture, data)
            made = self._make_model(1, data.x.size(1), arguments)
        with contextlib.closing(made) as model:
            found = gas.plan(
                data,
                model,
                memory,
                num_parts=self.settings.num_parts,
                batch_size=self.settings.batch_size,
                steps=8,
                dtype=dtype,
                store=store,
                evaluation=self.evaluation,
                evaluate_apart=self.evaluation == "layerwise" and self.refresh == "none",
                layout=self.layout,
                edge_weight=self.cls.needs_weights,
                keep_graph=self.keep_edges,
                method=self.partition,
                log=self.log,
            )
        if found.gives_back:
            limit_freed_memory()
        release_freed_memory()  # The memory that planning needed.
        self.histories = {**self.histories, "dtype": found.dtype, "store": store}
        if found.store != "custom":
            self.histories["store"] = found.store
        if found.store == "host":
            self.histories.pop("path", None)
        return found

    def _fit_memory(self, limit: int) -> None:
        """Choose the store of histories and the mini-batches of a mapped graph.

        Of the memory that is left for mini-batches, half is for the batch before and freed blocks.
        The parts of a step stay as they are, and are split into mini-batches.

        Raises:
            MemoryError: If not even a mini-batch of one part fits.
        """
        loader, num_nodes = self.graph.loader, int(self.graph.data.num_nodes or 0)
        assert loader is not None
        release_freed_memory()  # The memory that preparing the graph needed.
        with torch.random.fork_rng(), contextlib.closing(self.make_model(False)) as model:
            widths = [history.embedding_dim for history in model.histories]
            held = 4 * sum(parameter.nbytes for parameter in model.parameters())  # Of Adam, too.
        codec = Codec.of(self.histories.get("dtype") or "float32")
        held += num_nodes * (4 * len(widths) + 2 * 4 * self.out_channels)  # Ages and outputs.
        left = limit - resident_kinds()[0] - held
        stored, store = num_nodes * sum(map(codec.row_bytes, widths)), self.histories.get("store")
        if store is None:
            store = "host" if stored <= left / 2 else "disk"
        left -= 0 if store == "disk" else stored
        if left < 2:
            raise MemoryError(
                f"'memory' is {human(limit)}, of which {human(int(limit - left))} are taken before "
                "the first mini-batch: raise it, or pass store='disk'"
            )
        self.histories = {**self.histories, "dtype": codec.name, "store": store}
        if store != "disk":
            self.histories.pop("path", None)
        limit_freed_memory()
        largest = int(loader.edges_per_part().argmax())
        with torch.random.fork_rng(), contextlib.closing(self.make_model()) as model:
            need = activation_bytes(model, loader.cut([largest]))  # Several share halo nodes.
        parts = self.settings.batch_size or 1
        sizes = [
            size for size in range(1, parts + 1) if parts % size == 0 and size * need < left / 2
        ]
        if not sizes:
            raise MemoryError(
                f"'memory' is {human(limit)}, of which {human(int(left))} are left for "
                f"mini-batches, but one part needs {human(2 * need)}: raise it, or partition the "
                "graph into more"
            )
        self.settings = self.settings.replace(batch_size=sizes[-1])
        self.micro_batches *= parts // sizes[-1]

    def make_model(self, histories: bool = True) -> gas.models.LayeredGNN:
        """Make a new model, with weights drawn from PyTorch's generator.

        Args:
            histories: Make histories for all nodes, unless training is in full batch; without,
                they have one row. (default: ``True``)
        """
        histories = histories and not self.full_batch
        data = self.graph.data
        options = dict(self.histories) if histories else {}
        if options.get("store") is None:
            options["device"] = self.device
        num_nodes = data.num_nodes if histories else 1
        return self._make_model(num_nodes, data.x.size(1), {**self.graph.arguments, **options})

    def _make_model(
        self, num_nodes: int, in_channels: int, arguments: dict[str, Any]
    ) -> gas.models.LayeredGNN:
        own: dict[str, Any] = {"out_channels": self.out_channels, "prefetch": int(self.prefetch)}
        return self.cls(num_nodes, in_channels, **own, **arguments).to(self.device)

    def verify(self) -> Verification:
        """Compare mini-batches and histories with the uncut graph; see :func:`gas.verify`.

        It takes a new model and the mini-batches of training.

        Raises:
            ValueError: If the experiment has no mini-batches.
        """
        loader = self.graph.loader
        if loader is None:
            raise ValueError("'full_batch' has no mini-batches to verify: leave one of them out")
        with contextlib.closing(self.make_model()) as model:
            return gas.verify(model, loader)

    def baseline(self, split: int = 0) -> float:
        """Return the test score of predicting the most frequent training label for every node."""
        masks = [split_mask(self.data[key], split) for key in ("train_mask", "test_mask")]
        return baseline(self.metric, self.data.y, *masks)

    def to_original_order(self, rows: Tensor) -> Tensor:
        """Return rows of evaluated nodes, of shape ``[N, ...]``, in the original order."""
        perm = self.eval_graph.perm
        return rows if perm is None else torch.empty_like(rows).index_copy_(0, perm, rows)
