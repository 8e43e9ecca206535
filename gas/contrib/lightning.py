"""Mini-batches of a partitioned graph for Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_geometric.data import Data

from gas import EvalSubgraphLoader, SubgraphLoader

try:
    from lightning import LightningDataModule
except ImportError:
    LightningDataModule = object  # So that the class can be imported; making one raises.


class PartitionData(LightningDataModule):
    """Data module of the mini-batches of a partitioned graph.

    For example::

        graph = gas.cluster(data, num_parts=64, model=model)
        trainer.fit(module, gas.lightning.PartitionData(graph, batch_size=8))

    Training has its parts in random order, validation and test in the order of their nodes. The
    steps of a module get a :class:`gas.SubData`. Steps of validation read the halo's rows from the
    histories, ``self.model(batch, push=False)``; exact scores are those of :func:`gas.evaluate`, in
    ``on_validation_epoch_end``, and exact predictions those of ``model.predict(graph)``.

    Lightning's checkpoints have no histories: call ``model.refresh(graph)`` after loading one.

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
        self.loader = SubgraphLoader(graph, batch_size=batch_size, **options)

    def train_dataloader(self) -> SubgraphLoader:
        """Return the mini-batches of training."""
        return self.loader

    def val_dataloader(self) -> EvalSubgraphLoader:
        """Return the mini-batches of all nodes, in order."""
        loader = self.loader
        return EvalSubgraphLoader(
            loader.data, loader.ptr, loader.batch_size or 1, layout=loader.layout,
            edge_weight=loader.edge_weight, like=loader, log=False,
        )  # fmt: skip

    test_dataloader = val_dataloader
