"""``train_gas.py --hetero``: GraphSAGE for each relation of a heterogeneous graph from tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

import gas
from gas.cli import results
from gas.cli.checkpoints import Checkpoints
from gas.cli.choices import check_labels
from gas.cli.parser import Options
from gas.cli.report import metrics
from gas.datasets import num_outputs
from gas.native import write_json
from gas.training import (
    SPLITS,
    Predictions,
    Progress,
    Run,
    divergence_error,
    loss_of,
    metric_of,
    prediction_columns,
    run_epochs,
    split_mask,
)

# Options that have an effect with --hetero.
OPTIONS = (
    "hetero", "dataset", "undirected", "columns", "model", "num_layers", "hidden_channels",
    "dropout", "num_parts", "batch_size", "epochs", "lr", "metric", "seed", "device", "partition",
    "store", "dtype", "path", "io", "check", "out", "overwrite", "debug", "root", "config",
    "runs", "patience", "tensorboard",
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


class HeteroExperiment:
    """Train :class:`HeteroSAGE` on the tables of the command line."""

    def __init__(self, args: Options) -> None:
        path = Path(args.dataset)
        if not path.exists():
            raise ValueError(
                f"'--dataset' is {args.dataset}, but '--hetero' reads types from tables: give the "
                "path of a folder with edges.csv and nodes.csv"
            )
        data = gas.open_graph(
            path,
            undirected=args.undirected,
            columns=args.column_names(),
            hetero=True,
            check=args.check,
        )
        self.args, self.data, self.kind = args, data, _find_target_type(data)
        check_labels(cast(Data, data[self.kind]))
        sizes = (int(data[name].num_nodes or 0) for name in data.node_types)
        self.settings = settings = args.settings().for_size(sum(sizes))
        shape = ("hidden_channels", "num_layers", "dropout")
        self.shape = {key: settings.architecture[key] for key in shape}
        self.metric = settings.metric or metric_of(data[self.kind].y)

    def run(
        self,
        seed: int,
        split: int = 0,
        on_epoch: Callable[[Run], None] | None = None,
        keep: bool = False,
        run: Run | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Run:
        """Train one model from a seed; see :meth:`gas.cli.Experiment.run`."""
        run, progress = Run() if run is None else run, Progress()
        run.split = split
        args, settings, kind = self.args, self.settings, self.kind
        torch.manual_seed(seed)
        out_channels = num_outputs(self.data[kind].y)
        net = HeteroSAGE(self.data, kind, out_channels=out_channels, **self.shape).to(args.device)
        store = args.store if args.store != "auto" else None
        options: dict[str, Any] = {"store": store, "dtype": args.dtype, "path": args.path}
        model = cast(Any, gas.to_scalable(net, self.data, io=args.io, **options))
        with contextlib.closing(model):
            if seed == args.seed:
                print(model)
            parts = settings.num_parts or 1
            graph = gas.cluster(self.data, parts, method=args.partition, seed=args.seed)
            batches = {"batch_size": settings.batch_size, "shuffle": True, "log": False}
            loader = cast(Any, gas.SubgraphLoader)(graph, **batches)
            optimizer = torch.optim.Adam(net.parameters(), settings.lr)
            model.refresh(graph)

            def epoch() -> float:
                return _train_epoch(model, loader, optimizer, kind, progress.epoch or 1, split)

            run_epochs(
                model, cast(Data, self.data[kind]), epoch, lambda model: model.predict(graph),
                settings.epochs, split, on_epoch, self.metric, args.patience, True, keep, run,
                progress,
            )  # fmt: skip
            run.history_bytes = sum(history.store.nbytes for history in model.histories)
        return run

    def write(
        self, runs: Sequence[Run], failed: list[dict[str, Any]], interrupted: bool
    ) -> dict[str, Any]:
        """Write scores, curves, the best model and its predictions for every node.

        Returns:
            The contents of ``metrics.json``.
        """
        args, settings, number = self.args, self.settings, results.best_run_index(runs)
        run = runs[number]
        kept = run.best_epoch
        curves = {"loss": run.loss, "seconds": run.seconds, "train": run.train_acc,
                  "val": run.val_acc, "test": run.test_acc}  # fmt: skip
        epochs = [dict(zip(curves, row, strict=True)) for row in zip(*curves.values(), strict=True)]
        found = metrics(runs)
        said = {
            "dataset": args.dataset, "model": "sage, a layer for each relation",
            "node_type": self.kind, "edge_types": [list(each) for each in self.data.edge_types],
            "metric": self.metric, "seed": args.seed,
            "settings": {**self.shape, "lr": settings.lr, "num_parts": settings.num_parts,
            "batch_size": settings.batch_size}, "best_epoch": kept + 1,
            **{f"{part}_score": epochs[kept][part] for part in SPLITS}, "epochs": epochs,
            "test_acc": found["test_acc"], "val_acc": found["val_acc"], "kept_run": number,
            "interrupted": interrupted, "failed": failed,
        }  # fmt: skip
        (args.out / "metrics.json").unlink(missing_ok=True)
        title = f"sage for each relation on {args.dataset}, {len(runs)} run{'s' * (len(runs) > 1)}"
        results.plot_curves(args.out / "curve.png", runs, title, results.score_name(self.metric))
        self._write_best(run)
        write_json(args.out / "metrics.json", said)
        print(
            f"\nBest epoch by validation, {kept + 1}: test {self.metric} {run.test_acc[kept]:.4f}"
        )
        if len(runs) > 1:
            mean, std = (found["test_acc"][key] for key in ("mean", "std"))
            print(f"Of {len(runs)} runs: test {self.metric} {mean:.4f} ± {std:.4f}")
        return said

    def _write_best(self, run: Run) -> None:
        """Write the weights of the best epoch, and its predictions for every node."""
        best, stored = run.best, dict(self.data[self.kind].items())
        assert best is not None
        state = {key.removeprefix("net."): value for key, value in best.state.items()}
        if "classes" in self.data:
            stored["classes"] = self.data.classes
        columns = prediction_columns(Predictions(best.out, stored, lambda rows: rows), run.split)
        texts = {"model": "gas.cli.hetero.HeteroSAGE"}
        results.write_best(self.args.out, state, texts, columns)


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


def _train_epoch(
    model: Any, loader: Any, optimizer: torch.optim.Optimizer, kind: str, epoch: int, split: int = 0
) -> float:
    """Take a step for each mini-batch with training nodes, and return their mean loss."""
    model.train()
    total, count = 0.0, 0
    for number, batch in enumerate(loader, 1):
        store = batch[kind]
        mask = split_mask(store.train_mask[: store.batch_size], split)
        size, y = int(mask.sum()), store.y[: store.batch_size]
        out = model(batch)  # Also without labels, to update the histories.
        if not size:
            continue
        rows = mask.nonzero().view(-1)
        loss = loss_of(out[rows.to(out.device)], y[rows.to(y.device)].to(out.device))
        value = loss.detach().item()
        if not math.isfinite(value):
            raise divergence_error(epoch, number, value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + size * value, count + size
    return total / max(count, 1)
