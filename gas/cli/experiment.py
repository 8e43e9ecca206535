"""One experiment: a graph, a model and settings, run from several seeds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.cli.account import measure_memory
from gas.cli.checkpoints import Checkpoints, describe_run
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.cli.setup import Setup
from gas.native import PeakMemory
from gas.scalable import free_buffers, is_tracked, refresh_and_predict
from gas.training import (
    AveragedWeights,
    Progress,
    Run,
    choose_warm_up,
    plan_micro_batches,
    raise_rate,
    release_freed_memory,
    run_epochs,
    steps_per_epoch,
    train_epoch,
)

MOST_PROFILED = 4  # Steps whose time is measured by phase.


class Experiment(Setup):
    """Train a model on a graph, with histories or in full batch, and evaluate it.

    Args:
        data: The graph, with masks.
        out_channels: The number of outputs of the model.
        model: One of :data:`MODELS`.
        settings: The settings; missing ones are derived from the size of the graph.
        full_batch: Train on the whole graph at once, without histories. (default: ``False``)
        inductive: Train on the subgraph of the training nodes, and evaluate on the whole graph.
            (default: as in the settings)
        evaluation: ``"full"`` computes the whole graph as one batch, ``"layerwise"`` layer by
            layer; without a refresh, or if ``inductive``, in a second set of histories.
            (default: ``"full"`` up to 20,000 nodes and 3 million edges, or with ``full_batch``)
        refresh: How all histories are made exact after each epoch: ``"full"``, ``"layerwise"``,
            or ``"none"``. They are always filled before the first epoch. (default: as
            ``evaluation``, which costs nothing extra; ``"none"`` where that is ``"full"`` and
            weights are averaged)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"fused"`` on the CPU and on GPUs that
            the extension was compiled for, ``"csr"`` elsewhere)
        partition: See :func:`gas.metis`. (default: ``"auto"``)
        prefetch: Start pulls one batch ahead. (default: ``False``)
        memory_budget: Split mini-batches so that the tensors of one take at most this many bytes;
            see :func:`gas.training.plan_micro_batches`. (default: never split)
        memory: The memory of the process, in bytes or like ``"6GB"``. Parts, batches and the
            storage of histories are chosen to fit, unless settings or arguments give them. The
            choice is in ``plan``; see :func:`gas.plan`. (default: no limit)
        micro_batches: How many mini-batches make a step of the optimizer; see
            :func:`gas.training.train_epoch`. (default: ``1``, or as ``memory`` requires)
        pack: Pack histories and features on disk in the order in which batches read them, and keep
            this many bytes of rows in memory: a number, or like ``"2GB"``, or ``"auto"`` for what
            ``memory`` leaves. Histories that fit in memory aren't packed. See
            :meth:`gas.ScalableGNN.pack`. (default: no packing)
        augment: A function that makes an augmentation of a graph, such as
            ``functools.partial(gas.MHAug, mu_e=0.3, ...)``; it is called once for each run. Batches
            then have views; see ``view_loss`` of :func:`gas.training.train_epoch`. Each evaluation
            updates the entropies of MH-Aug. (default: none)
        evaluate_every: See :func:`gas.fit`. (default: ``1``)
        patience: See :func:`gas.training.run_epochs`. (default: never stop early)
        keep_edges: Keep ``edge_index`` and weights in ``data``, besides the copies in batches.
            (default: ``True``)
        check: Refuse NaN and infinite features. (default: ``True``)
        libraries: The resident bytes before the graph was loaded. If given, each run has an account
            of its memory. (default: no account)
        device: The device of the model. (default: ``"cpu"``)
        log: Print progress. (default: ``True``)
        folder: Where a mapped graph of one part is written as mapped parts; see
            :func:`gas.datasets.get_data`. (default: none)
        training: Further arguments of :func:`gas.training.train_epoch`.
        **histories: ``store``, ``dtype``, ``path`` and ``io`` of :class:`gas.ScalableGNN`.

    Raises:
        ValueError: If an argument is unusable, naming it.
    """

    phases: dict[str, Any] | None = None
    """Seconds of some steps by phase, see :func:`gas.profile`, after a run that keeps its model."""

    def run(
        self,
        seed: int,
        split: int = 0,
        on_epoch: Callable[[Run], None] | None = None,
        keep: bool = False,
        run: Run | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Run:
        """Train one model from a seed, and evaluate it every ``evaluate_every`` epochs.

        Args:
            seed: The seed of PyTorch's generator.
            split: Which split of the masks to use. (default: ``0``)
            on_epoch: Called after each epoch with the run so far.
            keep: Keep the model and the outputs of the best epoch, and measure the time of a few
                more steps by phase, for ``phases``. (default: ``False``)
            run: Filled during training, so that it survives an interruption. (default: a new one)
            checkpoints: The schedule of checkpoints. (default: none)
        """
        run = Run() if run is None else run
        run.split = split
        torch.manual_seed(seed)
        release_freed_memory()  # The memory that preparing the graph needed.
        reset_peak_rss()
        with contextlib.ExitStack() as open_models:
            peak = open_models.enter_context(PeakMemory())
            model = self.make_model()
            open_models.callback(model.close)
            warm_up = choose_warm_up(model, self.settings.warm_up)
            self.settings = self.settings.replace(warm_up=warm_up)
            evaluator: gas.ScalableGNN = model
            if self.evaluation == "layerwise" and not self._refreshes_by_evaluating:
                evaluator = model.for_graph(self.data.num_nodes)
                open_models.callback(evaluator.close)
            if checkpoints is not None:
                open_models.enter_context(checkpoints.delay_signals())
            try:
                about = describe_run(self, seed, split)
                self._run(model, evaluator, split, on_epoch, keep, run, checkpoints, about, peak)
            finally:
                record_peaks(run, peak)
                if not self.full_batch:
                    run.history_bytes = sum(history.store.nbytes for history in model.histories)
        return run

    @property
    def _refreshes_by_evaluating(self) -> bool:
        """Return whether evaluation writes the histories that training reads."""
        return self.eval_graph is self.graph and self.refresh != "none"

    def _run(
        self,
        model: gas.models.LayeredGNN,
        evaluator: gas.ScalableGNN,
        split: int,
        on_epoch: Callable[[Run], None] | None,
        keep: bool,
        run: Run,
        checkpoints: Checkpoints | None,
        about: dict[str, Any],
        peak: PeakMemory,
    ) -> None:
        settings, graph, progress = self.settings, self.graph, Progress()
        optimizer = self._make_optimizer(model)
        self._pack(model)
        if not self.full_batch and (checkpoints is None or not checkpoints.resumes):
            self._refresh(model)  # The first epoch then reads embeddings instead of zeros.
        augmentation = self._make_augmentation()
        batches, micro_batches = self._make_batches(model, augmentation)
        steps = steps_per_epoch(batches, micro_batches, settings.max_steps)
        average = AveragedWeights(model, optimizer, steps if settings.average_weights else 1)
        if checkpoints is not None:
            checkpoints.start(model, optimizer, batches, run, progress, about, graph.perm, average)

        epoch = partial(
            self._train_epoch, model, batches, optimizer, split, micro_batches=micro_batches,
            max_steps=settings.max_steps, progress=progress,
            on_step=None if checkpoints is None else checkpoints.after_step,
        )  # fmt: skip

        def finish_epoch(run: Run) -> None:
            if on_epoch is not None:
                on_epoch(run)
            if checkpoints is not None:
                checkpoints.after_epoch()

        def evaluate(model: gas.ScalableGNN) -> Tensor:
            out = self._evaluate(model, evaluator)
            if isinstance(augmentation, gas.MHAug):
                augmentation.update_entropy(out)
            return out

        try:
            warm_up = 0 if self.full_batch else settings.warm_up or 0
            with raise_rate(optimizer, warm_up, progress, steps):
                run_epochs(
                    model, self.data, epoch, evaluate, settings.epochs, split, finish_epoch,
                    self.metric, self.patience, self.training.get("leave_cores", True), keep, run,
                    progress, average, evaluate_every=self.evaluate_every,
                )  # fmt: skip
            if checkpoints is not None:
                checkpoints.end()
        finally:
            if isinstance(augmentation, gas.MHAug):
                run.chain = augmentation.statistics()._asdict()
        record_peaks(run, peak)  # Before more is computed to measure memory and time.
        if self.libraries is not None:
            run.memory = measure_memory(self, model, evaluator, optimizer, self.libraries, run)
        if keep:
            self._measure_phases(model, epoch, len(run) * steps)

    def _train_epoch(
        self, model: Any, batches: Any, optimizer: Any, split: int, **options: Any
    ) -> float:
        """Train one epoch, and return its mean loss."""
        settings = self.settings
        return train_epoch(
            model, batches, optimizer, split, settings.grad_norm, self.full_batch,
            edge_dropout=settings.edge_dropout, correct_drift=settings.correct_drift,
            **options, **self.training,
        )  # fmt: skip

    def _measure_phases(
        self, model: gas.ScalableGNN, epoch: Callable[..., float], trained: float
    ) -> None:
        """Measure the time of some more steps by phase, of at most a tenth of those trained."""
        if trained < 10:
            return
        progress, most = Progress(), int(min(max(1, trained / 100), MOST_PROFILED))
        with contextlib.suppress(ValueError):  # The caller profiles: nothing is lost but this.
            with gas.profile(model) as found:
                epoch(max_steps=most, progress=progress, on_step=None)
            self.phases = {**found.summary(), "steps": progress.steps}

    def _make_optimizer(self, model: gas.models.LayeredGNN) -> torch.optim.Optimizer:
        settings = self.settings
        return torch.optim.Adam(
            model.param_groups(settings.reg_weight_decay, settings.nonreg_weight_decay),
            lr=settings.lr,
            fused=True,  # A small model's step takes a third of the time.
        )

    def _pack(self, model: gas.ScalableGNN) -> None:
        """Arrange rows on disk in the order in which batches read them."""
        loader, histories = self.graph.loader, model.histories
        chosen = self.plan is not None or self.histories.get("store") == "auto"
        if self.pack is None or loader is None or not histories:
            return
        if chosen and histories[0].store.tier != "disk":
            return
        memory = self.pack
        if memory == "auto":
            memory = 0 if self.plan is None else self.plan.hot_bytes
        packed = model.pack(loader, memory, self.histories.get("path"), self.log)
        if self.log:
            print(f"Packed: {packed}", file=sys.stderr)
        x = loader.get_mapped_features()
        if x is not None and x.packed is not None and self.graph.inference is not None:
            self.graph.inference.use_features(x)

    def _make_augmentation(self) -> gas.augment.Augmentation | None:
        """Make an augmentation of the graph, on the device of the model."""
        if self.augment is None:
            return None
        raw = self.graph.raw
        assert raw is not None
        edge_index = raw.edge_index.to(self.device)
        return self.augment(Data(edge_index=edge_index, num_nodes=raw.num_nodes))

    def _make_batches(
        self, model: gas.ScalableGNN, augmentation: gas.augment.Augmentation | None = None
    ) -> tuple[Iterable[gas.SubData], int]:
        """Return the batches of an epoch, and the number of batches per step."""
        batches, micro_batches = self.graph.loader, self.micro_batches
        if batches is None:
            assert self.graph.whole is not None
            return self.graph.whole, 1
        batches.order.forget()  # A resumed run may have left one unfinished.
        if augmentation is not None:
            batches = self._make_loader(batches, batches.parts_per_batch, augmentation)
        if self.memory_budget is not None:
            size, micro_batches = plan_micro_batches(model, batches, self.memory_budget)
            batches = self._make_loader(batches, size, augmentation)
        return (gas.PrefetchLoader(batches, model) if self.prefetch else batches), micro_batches

    def _make_loader(
        self,
        like: gas.SubgraphLoader,
        batch_size: int,
        augmentation: gas.augment.Augmentation | None,
    ) -> gas.SubgraphLoader:
        """Make a loader of mini-batches of another size, or with views."""
        return gas.SubgraphLoader(
            self.graph.data if augmentation is None else self.graph.raw,
            like.ptr,
            batch_size,
            shuffle=True,
            layout=like.layout,
            edge_weight=self.cls.needs_weights,
            epoch_transform=augmentation,
            graph_transform=None if augmentation is None else self.cls.transform,
            like=like if augmentation is None else None,
            check=False,
            log=False,
        )

    def _refresh(self, model: gas.ScalableGNN, evaluator: gas.ScalableGNN | None = None) -> None:
        """Refresh histories and running statistics; with ``evaluator``, the statistics alone."""
        if self.refresh != "layerwise" and self.graph.whole is not None:
            self.graph.whole.refresh(model, fill=evaluator is None)
            return
        assert self.graph.inference is not None
        if evaluator is None or evaluator.num_nodes == model.num_nodes:
            (evaluator or model).refresh(self.graph.inference)
            return
        with contextlib.closing(model.for_graph(model.num_nodes)) as twin:  # Of another graph.
            twin.refresh(self.graph.inference)

    def _evaluate(self, model: gas.ScalableGNN, evaluator: gas.ScalableGNN) -> Tensor:
        """Compute every node's output, and refresh the histories if ``refresh`` says so.

        Running statistics of batch norms become those of the training graph, except in full-batch
        training, where they are averages over steps, as in PyG.
        """
        fills = self._refreshes_by_evaluating and self.refresh == self.evaluation
        refreshes = self.refresh != "none"
        model.train()
        has_norms = not self.full_batch and any(is_tracked(module) for module in model.modules())
        is_alike = self.refresh in ("none", self.evaluation) and self.eval_graph is self.graph
        whole = self.eval_graph.whole if self.evaluation == "full" else None
        if has_norms and is_alike:  # One inference does both.
            if whole is not None:
                out = whole.refresh_and_predict(model, fills)
            else:
                assert self.graph.inference is not None
                out = refresh_and_predict(evaluator, self.graph.inference)
            model.eval()
        else:
            if has_norms:
                self._refresh(model, None if refreshes else evaluator)
            model.eval()
            if whole is not None:
                out = whole(model, fill=fills)
            else:
                out = evaluator(loader=self.eval_graph.inference)
            if refreshes and not fills and not has_norms:
                self._refresh(model)
        for one in (model, evaluator):
            free_buffers(one)  # Training pulls batches of other sizes.
        return out


def record_peaks(run: Run, peak: PeakMemory) -> None:
    """Write the peaks of memory into a run, unless it has them already."""
    if not run.peak_rss_bytes:
        peak.sample()
        run.peak_rss_bytes = peak_rss_bytes()
        run.peak_own_bytes, run.peak_mapped_bytes = peak.own, peak.mapped
