"""Mini-batches of a partitioned graph for Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData

from gas import SubgraphLoader
from gas.training import make_inference_loader

try:
    from lightning import LightningDataModule
except ImportError:
    LightningDataModule = object  # So that the class can be imported; making one raises.


class _TrainingLoader(SubgraphLoader):
    """Loader that Lightning restores."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an epoch with all batches done is over, as Lightning skips it."""
        super().load_state_dict(state)
        order = self.order
        if order.epoch is not None and order.epoch.done == len(order.epoch.batches):
            order.forget()


_HeteroLoader: Any = SubgraphLoader._hetero_class


class _HeteroTrainingLoader(_TrainingLoader, _HeteroLoader):
    """The same for heterogeneous graphs."""


class PartitionData(LightningDataModule):
    """Data module of the mini-batches of a partitioned graph.

    For example::

        graph = gas.cluster(data, num_parts=64, model=model)
        trainer.fit(module, gas.lightning.PartitionData(graph, batch_size=8))

    Training has its parts in random order, validation and test in the order of their nodes. The
    steps of a module get a :class:`gas.SubData`. Steps of validation read the halo's rows from the
    histories, ``self.model(batch, push=False)``; exact scores are those of :func:`gas.evaluate`, in
    ``on_validation_epoch_end``, and exact predictions those of ``model.predict(graph)``.

    Lightning's checkpoints have no histories. With ``trainer.fit(..., ckpt_path=...)``, and in
    validation and test, those of each model in the module are filled with the loaded weights, and
    training goes on with the rest of the epoch that the checkpoint was taken in. After loading one
    yourself, call ``model.refresh(graph)``.

    Args:
        graph: The graph, from :func:`gas.cluster`, or the path of a graph folder.
        batch_size: Parts per mini-batch. (default: ``graph.batch_size``, or ``1``)
        **options: Further arguments of :class:`gas.SubgraphLoader`, for training.

    Raises:
        ImportError: If Lightning is missing.
        ValueError: If the graph or an option is unusable, naming it.
    """

    def __init__(
        self, graph: Data | str | Path, batch_size: int | None = None, **options: Any
    ) -> None:
        if LightningDataModule is object:
            raise ImportError("gas.lightning needs the package: pip install lightning")
        super().__init__()
        options = {"shuffle": True, "log": False, **options}
        kind = _HeteroTrainingLoader if isinstance(graph, HeteroData) else _TrainingLoader
        self.loader = kind(graph, batch_size=batch_size, **options)
        self._in_order = {**options, "batch_size": batch_size, "shuffle": False}

    def train_dataloader(self) -> SubgraphLoader:
        """Return the mini-batches of training."""
        self._fill_histories(norms=True)
        return self.loader

    def val_dataloader(self) -> SubgraphLoader:
        """Return a loader of all nodes in order; outside of training, fill the histories first."""
        if self.trainer is not None and self.trainer.state.fn != "fit":
            self._fill_histories(norms=False)  # Norms keep the statistics of the checkpoint.
        if isinstance(self.loader, _HeteroTrainingLoader):
            return SubgraphLoader(self.loader.hetero_data, **self._in_order)
        return make_inference_loader(self.loader)

    test_dataloader = val_dataloader

    def _fill_histories(self, norms: bool) -> None:
        """Fill the histories, if the trainer has loaded weights from a checkpoint.

        Args:
            norms: Whether running statistics of norms become those of the whole graph.
        """
        if self.trainer is None or self.trainer.ckpt_path is None:
            return
        is_hetero = isinstance(self.loader, _HeteroTrainingLoader)
        for model in self.trainer.lightning_module.modules():
            if hasattr(type(model), "refresh") and hasattr(model, "histories"):
                loader = self.loader if is_hetero else make_inference_loader(self.loader)
                model.refresh(loader, norms=norms, log=False)
