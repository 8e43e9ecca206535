"""Preparation of an experiment: its options, its graph and its models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas import native
from gas.cli.choices import (
    MODELS,
    check_augment,
    check_labels,
    check_modes,
    check_predictable,
    check_splits,
)
from gas.cli.graphs import Graph, model_arguments, prepare_graph, training_subgraph
from gas.cli.settings import Settings
from gas.datasets import check_parts
from gas.graph import check_data_features, with_csr_features
from gas.native import PeakMemory, check_integer
from gas.training import (
    Plan,
    baseline,
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
        partition: str = "metis",
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
        layout = layout or ("fused" if native.computes_on(torch.device(device)) else "csr")
        check_modes(model, evaluation, refresh, full_batch)
        check_integer("evaluate_every", evaluate_every, 1)
        self.cls, self.out_channels, self.folder = MODELS[model], out_channels, folder
        self.settings, self.full_batch, self.training = settings, full_batch, training or {}
        self.evaluation, self.refresh, self.evaluate_every = evaluation, refresh, evaluate_every
        self.memory_budget, self.pack, self.libraries = memory_budget, pack, libraries
        self.augment, self.patience, self.keep_edges, self.log = augment, patience, keep_edges, log
        self.prefetch, self.device, self.histories = prefetch, device, histories
        inductive = settings.inductive if inductive is None else inductive
        if is_mapped:
            self._adopt_parts(data, inductive, memory)
        data = self._to_supported(data, check)
        self.plan: Plan | None = None
        with PeakMemory() as self.peak_before:  # Of planning and preparing, before training.
            if memory is not None:
                self.plan = self._plan(data, memory, inductive, layout, partition)
                chosen = {"num_parts": self.plan.num_parts, "batch_size": self.plan.batch_size}
                self.settings, micro_batches = settings.replace(**chosen), self.plan.micro_batches
            check_integer("micro_batches", micro_batches, 1)
            self.micro_batches = micro_batches
            self.graph, self.eval_graph = self._prepare(data, inductive, layout, partition)
        self.data = self.eval_graph.data
        self.metric = settings.metric or metric_of(self.data.y)

    def _adopt_parts(self, data: Data, inductive: bool, memory: int | str | None) -> None:
        """Take the parts of a mapped graph, and refuse options that need a graph in memory."""
        for name, given in (
            ("full_batch", self.full_batch),
            ("inductive", inductive),
            ("augment", self.augment is not None),
            ("memory", memory is not None),
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
            self.settings = self.settings.replace(num_parts=found)

    def _to_supported(self, data: Data, check: bool) -> Data:
        """Check features, labels and parts, and return the graph with supported features."""
        y = data.get("y")
        if self.settings.metric == "r2" and y is not None and y.dim() == 1 and not is_real(y):
            data, self.out_channels = copy.copy(data), 1
            data.y = data.y.float()
        data = with_csr_features(data)
        gas.models.check_features(data.get("x"))
        if check:
            check_data_features(data)
        check_labels(data)
        check_parts(data)
        return data

    def _prepare(
        self, data: Data, inductive: bool, layout: str, partition: str
    ) -> tuple[Graph, Graph]:
        """Prepare the graph for training and for evaluation."""
        self.settings = settings = self.settings.for_size(data.num_nodes)
        if self.augment is not None:
            check_augment(data, settings, self.full_batch, inductive)
        check_splits(data)
        prepare = partial(
            prepare_graph, cls=self.cls, settings=settings, full_batch=self.full_batch,
            layout=layout, partition=partition, keep_edges=self.keep_edges,
            keep_raw=self.augment is not None, device=self.device, log=self.log,
            folder=self.folder,
        )  # fmt: skip
        fill = self.evaluation if self.refresh == "none" else self.refresh
        if inductive:
            return prepare(training_subgraph(data), {fill}), prepare(data, {self.evaluation})
        graph = prepare(data, {fill, self.evaluation})
        return graph, graph

    def _plan(
        self, data: Data, memory: int | str, inductive: bool, layout: str, partition: str
    ) -> Plan:
        """Plan batches that fit memory, and adopt the precision and the store of histories."""
        check_predictable(
            memory, self.full_batch, self.memory_budget, self.augment is not None, inductive
        )
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
                layout=layout,
                edge_weight=self.cls.needs_weights,
                keep_graph=self.keep_edges,
                method=partition,
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
