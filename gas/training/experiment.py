"""One experiment: a graph, a model and settings, run from several seeds."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree

from gas import models, native
from gas.augment import Augmentation, MHAug
from gas.datasets.masks import check_parts
from gas.graph.features import with_csr_features
from gas.loader import SubData, SubgraphLoader
from gas.models.layered import check_features
from gas.native.checks import check_integer
from gas.scalable import PrefetchLoader, verify
from gas.scalable.model import ScalableGNN
from gas.scalable.verify import Verification
from gas.training.about import about_of
from gas.training.account import account_of
from gas.training.checkpoints import Checkpoints
from gas.training.choices import (
    MODELS,
    check_augment,
    check_labels,
    check_modes,
    check_predictable,
    check_splits,
)
from gas.training.freed import give_back_freed
from gas.training.graphs import prepare_graph, training_nodes
from gas.training.loop import fit, split_mask, train_epoch
from gas.training.memory import plan_micro_batches
from gas.training.metrics import baseline, is_real, metric_of
from gas.training.planner import Plan, plan
from gas.training.report import peak_rss_bytes, reset_peak_rss
from gas.training.run import Progress, Run
from gas.training.settings import Settings

MOST_FULL_NODES = 20_000  # Up to here the whole graph is evaluated as one batch.


class Experiment:
    """Trains a model on a graph, with histories or in full batch, and evaluates every epoch.

    Args:
        data: The graph, with masks.
        out_channels: The number of outputs of the model.
        model: One of :data:`MODELS`.
        settings: The settings; what they leave open follows from the size of the graph.
        full_batch: Train on the whole graph at once, without histories. (default: ``False``)
        inductive: Train on the graph of the training nodes alone, evaluate on all of it; of a union
            of graphs, these are the graphs that are trained on. (default: as the settings say)
        evaluation: ``"full"`` computes the whole graph as one batch, ``"layerwise"`` layer by
            layer; without a refresh, or inductively, in another set of histories.
            (default: ``"full"`` up to 20,000 nodes, or with ``full_batch``)
        refresh: How all histories are made exact after each epoch: ``"full"``, ``"layerwise"``,
            or ``"none"``. They are filled before the first epoch in any case. (default: as
            ``evaluation``, at no further cost)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"fused"`` on the CPU, and on a GPU that
            the extension was compiled for; ``"csr"`` elsewhere)
        partition: See :func:`gas.metis`. (default: ``"metis"``)
        prefetch: Start pulls one batch ahead. (default: ``False``)
        memory_budget: Split mini-batches so that the tensors of one take at most this many bytes;
            see :func:`gas.training.plan_micro_batches`. (default: never split)
        memory: Choose parts, batches and how histories are stored, as far as settings and arguments
            leave them open, so that the process takes at most this: bytes, or like ``"6GB"``. What
            was chosen is in ``plan``; see :func:`gas.plan`. (default: what settings say)
        micro_batches: How many mini-batches make a step of the optimizer; see
            :func:`gas.training.train_epoch`. (default: ``1``, or as ``memory`` asks for)
        pack: Arrange histories on disk, and features there, by what batches read, with so many
            bytes of rows in memory: a number, or like ``"2GB"``, or ``"auto"``, what ``memory``
            leaves. It does nothing where ``memory`` or ``store="auto"`` found that histories fit
            memory. See :meth:`gas.ScalableGNN.pack`. (default: don't)
        augment: Makes an augmentation of a graph, such as
            ``functools.partial(gas.MHAug, mu_e=0.3, ...)``; each run has its own. Batches then have
            views; see ``view_loss`` of :func:`gas.training.train_epoch`. MH-Aug takes its entropies
            from each evaluation. (default: none)
        patience: See :func:`gas.training.fit`. (default: never stop early)
        keep_edges: Leave ``edge_index`` and weights in ``data``, though batches have copies.
            (default: ``True``)
        libraries: Write an account of memory into each run: the bytes that were resident before the
            graph was there. (default: no account)
        device: Where the model computes. (default: ``"cpu"``)
        log: Report. (default: ``True``)
        training: Further arguments of :func:`gas.training.train_epoch`.
        **histories: ``store``, ``dtype``, ``path`` and ``io`` of :class:`gas.ScalableGNN`.

    Raises:
        ValueError: If an argument is unusable, naming it.
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
        augment: Callable[[Data], Augmentation] | None = None,
        patience: int | None = None,
        keep_edges: bool = True,
        libraries: int | None = None,
        device: torch.device | str = "cpu",
        log: bool = True,
        training: dict[str, Any] | None = None,
        **histories: Any,
    ) -> None:
        if evaluation is None:
            small = data.num_nodes <= MOST_FULL_NODES
            evaluation = "full" if full_batch or small else "layerwise"
        refresh = refresh or ("none" if full_batch else evaluation)
        layout = layout or ("fused" if native.computes_on(torch.device(device)) else "csr")
        check_modes(model, evaluation, refresh, full_batch)
        self.cls = MODELS[model]
        self.out_channels = out_channels
        self.settings = settings
        self.full_batch = full_batch
        self.evaluation = evaluation
        self.refresh = refresh
        self.prefetch = prefetch
        self.memory_budget = memory_budget
        self.pack = pack
        self.augment = augment
        self.patience = patience
        self.keep_edges = keep_edges
        self.libraries = libraries
        self.log = log
        self.device = device
        self.training = training or {}
        self.histories = histories

        y = data.get("y")
        if settings.metric == "r2" and y is not None and y.dim() == 1 and not is_real(y):
            data, self.out_channels = copy.copy(data), 1
            data.y = data.y.float()
        inductive = settings.inductive if inductive is None else inductive
        data = with_csr_features(data)
        check_features(data.get("x"))
        check_labels(data.y)
        check_parts(data)
        self.plan: Plan | None = None
        if memory is not None:
            self.plan = self._plan(data, memory, inductive, layout, partition, log)
            settings = settings.but(num_parts=self.plan.num_parts, batch_size=self.plan.batch_size)
            micro_batches = self.plan.micro_batches
        check_integer("micro_batches", micro_batches, 1)
        self.micro_batches = micro_batches
        self.settings = settings = settings.for_size(data.num_nodes)
        fill = evaluation if refresh == "none" else refresh
        if augment is not None:
            check_augment(data, settings, full_batch, inductive)
        check_splits(data)
        prepare = partial(
            prepare_graph, cls=self.cls, settings=settings, full_batch=full_batch, layout=layout,
            partition=partition, keep_edges=keep_edges, keep_raw=augment is not None,
            device=device, log=log,
        )  # fmt: skip
        if inductive:
            self.graph = prepare(training_nodes(data), {fill})
            self.eval_graph = prepare(data, {evaluation})
        else:
            self.graph = self.eval_graph = prepare(data, {fill, evaluation})
        self.data = self.eval_graph.data
        self.metric = settings.metric or metric_of(self.data.y)
        self.peak_before = 0.0  # Of resident memory, before the latest run.

    def _plan(
        self,
        data: Data,
        memory: int | str,
        inductive: bool,
        layout: str,
        partition: str,
        log: bool,
    ) -> Plan:
        """What fits memory; takes up how histories are stored."""
        check_predictable(
            memory, self.full_batch, self.memory_budget, self.augment is not None, inductive
        )
        dtype, store = self.histories.get("dtype"), self.histories.get("store")
        with torch.random.fork_rng():
            deg = None
            if "aggregators" in self.settings.architecture:
                deg = degree(data.edge_index[1], data.num_nodes)
            made = self._new_model(1, data.x.size(1), deg)
        with contextlib.closing(made) as model:
            found = plan(
                data,
                model,
                memory,
                num_parts=self.settings.num_parts,
                batch_size=self.settings.batch_size,
                dtype=dtype,
                store=store,
                evaluation=self.evaluation,
                evaluate_apart=self.evaluation == "layerwise" and self.refresh == "none",
                layout=layout,
                edge_weight=self.cls.needs_weights,
                keep_graph=self.keep_edges,
                method=partition,
                log=log,
            )
        self.histories = {**self.histories, "dtype": found.dtype, "store": store}
        if found.store != "custom":
            self.histories["store"] = found.store
        if found.store == "host":
            self.histories.pop("path", None)
        return found

    def make_model(self, histories: bool = True) -> models.LayeredGNN:
        """A new model, with weights drawn from PyTorch's generator.

        Args:
            histories: Make those of the graph; else they are for one node, of no use.
                (default: unless it trains in full batch)
        """
        histories = histories and not self.full_batch
        data = self.graph.data
        options = dict(self.histories) if histories else {}
        if options.get("store") is None:
            options["device"] = self.device
        num_nodes = data.num_nodes if histories else 1
        return self._new_model(num_nodes, data.x.size(1), self.graph.degree, **options)

    def _new_model(
        self, num_nodes: int, in_channels: int, deg: Tensor | None, **options: Any
    ) -> models.LayeredGNN:
        architecture = dict(self.settings.architecture)
        if "aggregators" in architecture:
            architecture["deg"] = deg
        model = self.cls(
            num_nodes,
            in_channels,
            out_channels=self.out_channels,
            prefetch=int(self.prefetch),
            **architecture,
            **options,
        )
        return model.to(self.device)

    def verify(self) -> Verification:
        """Compares mini-batches and histories with the uncut graph; see :func:`gas.verify`.

        It is done with a new model and the mini-batches of the training.

        Raises:
            ValueError: If the experiment has no mini-batches.
        """
        loader = self.graph.loader
        if loader is None:
            raise ValueError("'full_batch' has no mini-batches to verify: leave one of them out")
        with contextlib.closing(self.make_model()) as model:
            return verify(model, loader)

    def baseline(self, split: int = 0) -> float:
        """The test score of predicting for every node what most training nodes have."""
        masks = [split_mask(self.data[key], split) for key in ("train_mask", "test_mask")]
        return baseline(self.metric, self.data.y, *masks)

    def in_first_order(self, rows: Tensor) -> Tensor:
        """Rows of nodes that are evaluated, of shape ``[N, ...]``, as the graph was given."""
        perm = self.eval_graph.perm
        return rows if perm is None else torch.empty_like(rows).index_copy_(0, perm, rows)

    def run(
        self,
        seed: int,
        split: int = 0,
        on_epoch: Callable[[Run], None] | None = None,
        keep: bool = False,
        run: Run | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Run:
        """Trains one model from a seed and evaluates it after every epoch.

        Args:
            seed: Of PyTorch's generator.
            split: Which split of the masks to use. (default: ``0``)
            on_epoch: Called after each epoch with the run so far.
            keep: Keep the model and the outputs of the best epoch. (default: ``False``)
            run: Filled as training goes on, which survives an interruption. (default: a new one)
            checkpoints: When to write them, and whether to go on from one. (default: none)
        """
        run = Run() if run is None else run
        torch.manual_seed(seed)
        give_back_freed()  # What preparing the graph took.
        self.peak_before = max(self.peak_before, peak_rss_bytes())
        reset_peak_rss()
        with contextlib.ExitStack() as open_models:
            model = self.make_model()
            open_models.callback(model.close)
            apart: ScalableGNN = model  # The one that evaluates.
            if self.evaluation == "layerwise" and not self._refreshes_by_evaluating:
                apart = model.for_graph(self.data.num_nodes)
                open_models.callback(apart.close)
            if checkpoints is not None:
                open_models.enter_context(checkpoints.heard())
            try:
                about = about_of(self, seed, split)
                self._run(model, apart, split, on_epoch, keep, run, checkpoints, about)
            finally:
                run.peak_rss_bytes = run.peak_rss_bytes or peak_rss_bytes()
                if not self.full_batch:
                    run.history_bytes = sum(history.store.nbytes for history in model.histories)
        return run

    @property
    def _refreshes_by_evaluating(self) -> bool:
        """Whether the histories that evaluation writes are those of the training."""
        return self.eval_graph is self.graph and self.refresh != "none"

    def _run(
        self,
        model: models.LayeredGNN,
        apart: ScalableGNN,
        split: int,
        on_epoch: Callable[[Run], None] | None,
        keep: bool,
        run: Run,
        checkpoints: Checkpoints | None,
        about: dict[str, Any],
    ) -> None:
        settings = self.settings
        optimizer = torch.optim.Adam(
            model.param_groups(settings.reg_weight_decay, settings.nonreg_weight_decay),
            lr=settings.lr,
            fused=True,  # A small model's step takes a third of the time.
        )
        self._pack(model)
        resumes = checkpoints is not None and checkpoints.resumes
        if not self.full_batch and not resumes:
            self._refresh(model)  # So that the first epoch reads real embeddings.
        augmentation = self._make_augmentation()
        batches, micro_batches = self._batches(model, augmentation)
        progress = Progress()
        if checkpoints is not None:
            checkpoints.start(model, optimizer, batches, run, progress, about, self.graph.perm)

        def epoch() -> float:
            return train_epoch(
                model,
                batches,
                optimizer,
                split,
                settings.grad_norm,
                self.full_batch,
                micro_batches=micro_batches,
                edge_dropout=settings.edge_dropout,
                max_steps=settings.max_steps,
                progress=progress,
                on_step=None if checkpoints is None else checkpoints.after_step,
                **self.training,
            )

        def ended(run: Run) -> None:
            if on_epoch is not None:
                on_epoch(run)
            if checkpoints is not None:
                checkpoints.after_epoch()

        def evaluate(model: ScalableGNN) -> Tensor:
            out = self._evaluate(model, apart)
            for one in (model, apart):
                one.free_buffers()  # Of other rows than training pulls.
            if isinstance(augmentation, MHAug):
                augmentation.update_entropy(out)
            return out

        try:
            fit(
                model, self.data, epoch, evaluate, settings.epochs, split, ended, self.metric,
                self.patience, self.training.get("leave_cores", True), keep, run, progress,
            )  # fmt: skip
            if checkpoints is not None:
                checkpoints.end()
        finally:
            if isinstance(augmentation, MHAug):
                run.chain = augmentation.statistics()._asdict()
        if self.libraries is not None:
            run.peak_rss_bytes = peak_rss_bytes()
            outputs = [] if run.best is None else [run.best.out]
            run.memory = account_of(self, model, apart, optimizer, self.libraries, outputs)

    def _pack(self, model: ScalableGNN) -> None:
        """Arranges what lies on disk by what batches read."""
        loader, histories = self.graph.loader, model.histories
        chosen = self.plan is not None or self.histories.get("store") == "auto"
        if self.pack is None or loader is None or not histories:
            return
        if chosen and histories[0].store.tier != "disk":
            return
        memory = self.pack
        if memory == "auto":
            memory = 0 if self.plan is None else self.plan.hot_bytes
        packed = model.pack(loader, memory, self.histories.get("path"))
        if self.log:
            print(f"Packed: {packed}", file=sys.stderr)
        x = loader.mapped_features()
        if x is not None and x.packed is not None and self.graph.inference is not None:
            self.graph.inference.use_features(x)

    def _make_augmentation(self) -> Augmentation | None:
        """An augmentation of the graph, where the model computes."""
        if self.augment is None:
            return None
        raw = self.graph.raw
        assert raw is not None
        edge_index = raw.edge_index.to(self.device)
        return self.augment(Data(edge_index=edge_index, num_nodes=raw.num_nodes))

    def _batches(
        self, model: ScalableGNN, augmentation: Augmentation | None = None
    ) -> tuple[Iterable[SubData], int]:
        """The batches of an epoch, and how many of them make a step."""
        graph, batches = self.graph, self.graph.loader
        if batches is not None:
            batches.forget_epoch()  # Of a run that went on from a checkpoint, to its end.
        micro_batches = self.micro_batches
        if graph.whole is not None and batches is None:
            return graph.whole, 1
        assert batches is not None
        if augmentation is not None:
            batches = self._loader(batches, batches.batch_size or 1, augmentation)
        if self.memory_budget is not None:
            size, micro_batches = plan_micro_batches(model, batches, self.memory_budget)
            batches = self._loader(batches, size, augmentation)
        return (PrefetchLoader(batches, model) if self.prefetch else batches), micro_batches

    def _loader(
        self, like: SubgraphLoader, batch_size: int, augmentation: Augmentation | None
    ) -> SubgraphLoader:
        """The mini-batches of another size, or with views."""
        return SubgraphLoader(
            self.graph.data if augmentation is None else self.graph.raw,
            like.ptr,
            batch_size,
            shuffle=True,
            layout=like.layout,
            edge_weight=self.cls.needs_weights,
            epoch_transform=augmentation,
            graph_transform=None if augmentation is None else self.cls.transform,
            like=like if augmentation is None else None,
            log=False,
        )

    @torch.no_grad()
    def _refresh(self, model: ScalableGNN) -> None:
        """Makes all histories exact."""
        model.eval()
        layerwise = self.refresh == "layerwise" or self.graph.whole is None
        if layerwise:
            model(loader=self.graph.inference)
        elif self.graph.whole is not None:
            self.graph.whole(model, fill=True)

    def _evaluate(self, model: ScalableGNN, apart: ScalableGNN) -> Tensor:
        """Every node's output; all histories are exact afterwards, if they are to be."""
        refreshed = self._refreshes_by_evaluating and self.refresh == self.evaluation
        if self.evaluation == "full" and self.eval_graph.whole is not None:
            out = self.eval_graph.whole(model, fill=refreshed)
        else:
            out = apart(loader=self.eval_graph.inference)
        if self.refresh != "none" and not refreshed:
            self._refresh(model)
        return out
