"""One experiment: a graph, a model and settings, run from several seeds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree

from gas import models
from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader
from gas.partition import metis, partition_report, permute
from gas.prefetch import PrefetchLoader
from gas.scalable import ScalableGNN
from gas.training.loop import FullBatch, Run, fit, train_epoch
from gas.training.report import peak_rss_bytes, reset_peak_rss
from gas.training.settings import Settings

MODELS = {
    "appnp": models.APPNP,
    "gat": models.GAT,
    "gcn": models.GCN,
    "gcn2": models.GCN2,
    "gin": models.GIN,
    "pna": models.PNA,
    "pna_jk": models.PNA_JK,
    "sage": models.GraphSAGE,
}
REFRESHES = ("none", "full", "layerwise")
EVALUATIONS = ("full", "layerwise")
MOST_FULL_NODES = 100_000  # Up to here the whole graph is evaluated as one batch.


class Experiment:
    """Trains a model on a graph, with histories or in full batch, and evaluates every epoch.

    Args:
        data: The graph, with masks.
        out_channels: The number of outputs of the model.
        model: One of :data:`MODELS`.
        settings: The settings; what they leave open follows from the size of the graph.
        full_batch: Train on the whole graph at once, without histories. (default: ``False``)
        evaluation: ``"full"`` computes the whole graph as one batch, ``"layerwise"`` layer by
            layer. (default: ``"full"`` up to 100,000 nodes, or with ``full_batch``)
        refresh: How all histories are made exact after each epoch: ``"full"``, ``"layerwise"``,
            or ``"none"``. They are filled before the first epoch in any case. (default: as
            ``evaluation``, at no further cost)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"csr"``)
        partition: See :func:`gas.metis`. (default: ``"metis"``)
        prefetch: Start pulls one batch ahead. (default: ``False``)
        patience: See :func:`gas.training.fit`. (default: never stop early)
        device: Where the model computes. (default: ``"cpu"``)
        log: Report on standard error. (default: ``True``)
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
        evaluation: str | None = None,
        refresh: str | None = None,
        layout: str = "csr",
        partition: str = "metis",
        prefetch: bool = False,
        patience: int | None = None,
        device: torch.device | str = "cpu",
        log: bool = True,
        training: dict[str, Any] | None = None,
        **histories: Any,
    ) -> None:
        if evaluation is None:
            small = data.num_nodes <= MOST_FULL_NODES
            evaluation = "full" if full_batch or small else "layerwise"
        refresh = refresh or ("none" if full_batch else evaluation)
        for name, value, known in (
            ("model", model, tuple(MODELS)),
            ("evaluation", evaluation, EVALUATIONS),
            ("refresh", refresh, REFRESHES),
        ):
            if value not in known:
                raise ValueError(f"'{name}' is {value!r}, expected one of {', '.join(known)}")
        if full_batch and (refresh != "none" or evaluation != "full"):
            raise ValueError(
                "'full_batch' is True, which has no histories and no mini-batches: leave "
                "'evaluation' and 'refresh' out"
            )
        self.cls = MODELS[model]
        self.settings = settings = settings.for_size(data.num_nodes)
        self.out_channels = out_channels
        self.full_batch = full_batch
        self.evaluation = evaluation
        self.refresh = refresh
        self.prefetch = prefetch
        self.patience = patience
        self.device = device
        self.training = training or {}
        self.histories = histories

        if self.cls.transform is not None:  # Of the whole graph, before it is cut into parts.
            data = self.cls.transform(data)
        self.loader: SubgraphLoader | None = None
        self.inference: EvalSubgraphLoader | None = None
        if not full_batch:
            perm, ptr = metis(
                data.edge_index,
                settings.num_parts,
                num_nodes=data.num_nodes,
                method=partition,
                log=log,
            )
            data = permute(data, perm, log=log)
            if log:
                print(partition_report(data, ptr), file=sys.stderr)
            batches = {"batch_size": settings.batch_size, "layout": layout, "log": False}
            self.loader = SubgraphLoader(data, ptr, shuffle=True, **batches)
            if "layerwise" in (evaluation, refresh):
                self.inference = EvalSubgraphLoader(data, ptr, **batches)
        self.data = data
        whole = full_batch or "full" in (evaluation, refresh)
        self.whole = FullBatch(data, device, layout) if whole else None

    def make_model(self) -> ScalableGNN:
        """A new model, with weights drawn from PyTorch's generator."""
        architecture = dict(self.settings.architecture)
        if "aggregators" in architecture:
            architecture["deg"] = degree(self.data.edge_index[1], self.data.num_nodes)
        options = dict(self.histories)
        if options.get("store") is None:
            options["device"] = self.device
        model = self.cls(
            self.data.num_nodes,
            self.data.x.size(1),
            out_channels=self.out_channels,
            prefetch=int(self.prefetch),
            **architecture,
            **options,
        )
        return model.to(self.device)

    def run(self, seed: int, split: int = 0, on_epoch: Callable[[Run], None] | None = None) -> Run:
        """Trains one model from a seed and evaluates it after every epoch.

        Args:
            seed: Of PyTorch's generator.
            split: Which split of the masks to use. (default: ``0``)
            on_epoch: Called after each epoch with the run so far.
        """
        torch.manual_seed(seed)
        reset_peak_rss()
        model = self.make_model()
        settings = self.settings
        optimizer = torch.optim.Adam(
            model.param_groups(settings.reg_weight_decay, settings.nonreg_weight_decay),
            lr=settings.lr,
        )

        def epoch() -> float:
            return train_epoch(
                model,
                self._batches(model),
                optimizer,
                split,
                settings.grad_norm,
                self.full_batch,
                edge_dropout=settings.edge_dropout,
                max_steps=settings.max_steps,
                **self.training,
            )

        if not self.full_batch:
            self._fill(model)  # So that the first epoch reads real embeddings.
        run = fit(
            model,
            self.data,
            epoch,
            self._evaluate,
            settings.epochs,
            split,
            on_epoch,
            settings.metric,
            self.patience,
        )
        run.peak_rss_bytes = peak_rss_bytes()
        run.history_bytes = sum(history.store.nbytes for history in model.histories)
        model.close()
        return run

    def _batches(self, model: ScalableGNN) -> Iterable[SubData]:
        if self.whole is not None and self.full_batch:
            return self.whole.batches()
        assert self.loader is not None
        return PrefetchLoader(self.loader, model) if self.prefetch else self.loader

    @torch.no_grad()
    def _fill(self, model: ScalableGNN) -> None:
        model.eval()
        if self.whole is not None:
            self.whole(model, fill=True)
        else:
            model(loader=self.inference)

    def _evaluate(self, model: ScalableGNN) -> Tensor:
        """Every node's output; all histories are exact afterwards, if they are to be."""
        if self.evaluation == "full":
            assert self.whole is not None
            out = self.whole(model, fill=self.refresh == "full")
            if self.refresh == "layerwise":
                model(loader=self.inference)
            return out
        if self.refresh != "none":
            out = model(loader=self.inference)
            if self.refresh == "full":
                self._fill(model)
            return out
        apart = model.for_graph(model.num_nodes)  # Its histories are not those of the training.
        try:
            return apart(loader=self.inference)
        finally:
            apart.close()
