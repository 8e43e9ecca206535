"""``gas train --hetero``: GraphSAGE for each relation of a heterogeneous graph from tables."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

import gas
from gas.cli.experiment import Experiment
from gas.cli.graphs import Graph, check_splits
from gas.cli.parser import SHAPE, Options
from gas.cli.settings import ARCHITECTURES, Settings
from gas.datasets import num_outputs
from gas.training import Progress, divergence_error, loss_of, split_mask

# Options that have an effect with --hetero.
OPTIONS = (
    *SHAPE, "hetero", "dataset", "undirected", "columns", "model", "num_parts", "batch_size",
    "epochs", "lr", "grad_norm", "metric", "seed", "out", "overwrite", "debug", "root", "config",
    "runs", "tensorboard", "verify", "partition", "evaluate_every", "patience", "device", "check",
    "store", "dtype", "path", "io",
)  # fmt: skip


class HeteroSAGE(torch.nn.Module):
    """A linear layer for each type of nodes, GraphSAGE for each relation, scores of one type.

    Args:
        data: The graph; each node type has features.
        kind: The node type to predict.
        hidden_channels: The width of embeddings.
        out_channels: The number of outputs.
        num_layers: The number of layers.
        dropout: The probability of dropping an element of an embedding.
    """

    def __init__(
        self,
        data: HeteroData,
        kind: str,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        widths = [data[name].x.size(1) for name in data.node_types]
        self.encoders = torch.nn.ModuleList(Linear(width, hidden_channels) for width in widths)
        self.kinds = list(data.node_types)
        self.convs = torch.nn.ModuleList(
            HeteroConv(
                {kind: SAGEConv(hidden_channels, hidden_channels) for kind in data.edge_types}
            )
            for _ in range(num_layers)
        )
        self.scores = Linear(hidden_channels, out_channels)

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]
    ) -> Tensor:
        """Return the scores of the nodes to predict, of shape ``[n, out_channels]``."""
        encoders = zip(self.kinds, self.encoders, strict=True)
        h = {kind: encoder(x_dict[kind]).relu() for kind, encoder in encoders}
        for conv in self.convs:
            out = {kind: x.relu() for kind, x in conv(h, edge_index_dict).items()}
            out = {kind: torch.dropout(x, self.dropout, self.training) for kind, x in out.items()}
            h = {**h, **out}  # Some types may have no incoming relation.
        return self.scores(h[self.kind])


class HeteroExperiment(Experiment):
    """Train :class:`HeteroSAGE` on a heterogeneous graph.

    ``data`` are the nodes of the type that is predicted, ``node_type``.

    Args:
        hetero_data: The graph; each type has features, and one has labels and masks.
        settings: The settings.
        seed: The seed of the partition. (default: ``0``)
        **options: Those of :class:`gas.cli.Experiment` that are among :data:`OPTIONS`.

    Raises:
        ValueError: If a type has no features, not one type has labels, or that type has no masks.
    """

    def __init__(
        self, hetero_data: HeteroData, settings: Settings, seed: int = 0, **options: Any
    ) -> None:
        self.node_type = _find_target_type(hetero_data)
        self.hetero_data, self._seed = copy.copy(hetero_data), seed
        architecture = {**ARCHITECTURES["sage"], **settings.architecture}
        shape = {key: architecture[key] for key in SHAPE}
        settings = dataclasses.replace(
            settings, architecture=shape, correct_drift=False, warm_up=0, average_weights=False
        )
        named = {
            key: getattr(hetero_data, key)
            for key in ("classes", "split")
            if hasattr(hetero_data, key)
        }
        target = Data(**hetero_data[self.node_type].to_dict(), **named)
        check_splits(target, f"hetero_data[{self.node_type!r}]")
        options["evaluation"] = "layerwise"
        super().__init__(target, num_outputs(target.y), "sage", settings, **options)

    def _prepare(self, data: Data) -> tuple[Graph, Graph]:
        """Partition the heterogeneous graph."""
        whole, log = self.hetero_data, self.log
        whole[self.node_type].y = data.y
        self.settings = settings = self.settings.for_size(int(whole.num_nodes or 0))
        parts: Any = settings.num_parts
        clustered = gas.cluster(whole, parts, method=self.partition, seed=self._seed, log=log)
        loader: Any = gas.SubgraphLoader(
            clustered, batch_size=settings.batch_size, shuffle=True, log=False
        )
        report = gas.partition_report(loader.data, loader.ptr)
        graph = Graph(None, None, data, loader, loader, None, {}, repr(whole), report)
        return graph, graph

    def make_model(self, histories: bool = True) -> Any:
        """Make a new model, with weights drawn from PyTorch's generator."""
        return make_model(
            self.hetero_data, str(self.node_type), self.out_channels, self.settings.architecture,
            self.device, **self.histories,
        )  # fmt: skip

    def _run(self, model: Any, evaluator: Any, split: int, *others: Any, **named: Any) -> None:
        if split == 0 and self.log:
            print(model)
        super()._run(model, evaluator, split, *others, **named)

    def _make_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.net.parameters(), self.settings.lr)

    def _train_epoch(
        self, model: Any, batches: Any, optimizer: Any, split: int, **options: Any
    ) -> float:
        """Take a step for each mini-batch with training nodes, and return their mean loss."""
        progress: Progress = options["progress"]
        grad_norm = self.settings.grad_norm
        model.train()
        total, count = 0.0, 0
        for number, batch in enumerate(itertools.islice(batches, options.get("max_steps")), 1):
            progress.steps = number
            store = batch[self.node_type]
            mask = split_mask(store.train_mask[: store.batch_size], split)
            size, y = int(mask.sum()), store.y[: store.batch_size]
            out = model(batch)  # Also without labels, to update the histories.
            if not size:
                continue
            rows = mask.nonzero().view(-1)
            loss = loss_of(out[rows.to(out.device)], y[rows.to(y.device)].to(out.device))
            value = loss.detach().item()
            if not math.isfinite(value):
                raise divergence_error(progress.epoch or 1, number, value)
            optimizer.zero_grad()
            loss.backward()
            if grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
            optimizer.step()
            total, count = total + size * value, count + size
        return total / max(count, 1)

    def _evaluate(self, model: Any, evaluator: Any) -> Tensor:
        return model.predict(self.graph.loader)


def open_types(args: Options) -> HeteroData:
    """Open the tables of the command line as a heterogeneous graph."""
    if not Path(args.dataset).exists():
        raise ValueError(
            f"'--dataset' is {args.dataset}, but '--hetero' reads types from tables: give the "
            "path of a folder with edges.csv and nodes.csv"
        )
    return gas.open_graph(
        args.dataset, undirected=args.undirected, columns=args.column_names(), hetero=True,
        check=args.check,
    )  # fmt: skip


def make_model(
    data: HeteroData,
    node_type: str,
    out_channels: int,
    architecture: Mapping[str, Any],
    device: torch.device | str = "cpu",
    **histories: Any,
) -> Any:
    """Convert a new :class:`HeteroSAGE` for a graph, with options of :func:`gas.to_scalable`."""
    net = HeteroSAGE(data, node_type, out_channels=out_channels, **architecture).to(device)
    return gas.to_scalable(net, data, **histories)


def _find_target_type(data: HeteroData) -> str:
    """Return the node type to predict."""
    for name in data.node_types:
        if "x" not in data[name]:
            raise ValueError(
                f"nodes of type {name!r} have no features, which --hetero needs: give columns of "
                "numbers in nodes.csv, or x.npy"
            )
    kinds = [name for name in data.node_types if "y" in data[name]]
    if len(kinds) != 1:
        raise ValueError(
            f"--hetero predicts one type of nodes, but {', '.join(kinds) or 'none'} of "
            f"{', '.join(data.node_types)} has labels: give a column 'label' in nodes.csv with "
            "labels of one type"
        )
    return kinds[0]
