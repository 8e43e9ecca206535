"""Folders of runs: what ``gas train`` has written, opened again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch_geometric.data import Data
from torch_geometric.utils import degree

import gas
from gas.cli.choices import MODELS
from gas.cli.results import MODEL
from gas.cli.settings import Settings
from gas.datasets import undo_clustering
from gas.graph import is_graph_folder, with_csr_features
from gas.io import read_json


class SavedRun:
    """A finished run: its settings, its scores, and the model of its best epoch.

    * ``folder``: the folder of the run.
    * ``metrics``: the contents of its ``metrics.json``.
    * ``settings``: the settings of the training.

    Args:
        folder: The folder.

    Raises:
        ValueError: If it holds no run, or one that can't be opened, naming the reason.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "metrics.json"
        if not path.exists():
            raise ValueError(
                f"'folder' is {str(folder)!r}, which has no metrics.json: give the folder that "
                "'gas train --out' has written"
            )
        self.metrics: dict[str, Any] = read_json(path)
        if self.metrics.get("model") not in MODELS:
            raise ValueError(
                f"'folder' is {str(folder)!r}, whose model is {self.metrics.get('model')!r}, "
                f"expected one of {', '.join(MODELS)}: models of --hetero are loaded by "
                "safetensors.torch.load_file"
            )
        if "graph" not in self.metrics:
            raise ValueError(
                f"'folder' is {str(folder)!r}, a run of gas 0.1, which doesn't say how its graph "
                "was opened: train it again"
            )
        self.settings = Settings(**self.metrics["settings"])

    def __repr__(self) -> str:
        scores = (
            f"{name[:-4]} {self.metrics[name]['mean']:.4f}" for name in ("val_acc", "test_acc")
        )
        return (
            f"{self.metrics['model']} on {self.metrics['dataset']}, {self.folder}: "
            f"{self.metrics['metric']} {', '.join(scores)}"
        )

    def open_graph(self, path: str | Path | None = None) -> Data:
        """Open the graph of the training, or another one in the same way.

        Args:
            path: A data set by name, or the path of tables or of a graph folder.
                (default: the graph of the training)

        Raises:
            ValueError: If the graph can't be read.
        """
        options = dict(self.metrics["graph"])
        root, check, own = (options.pop(name) for name in ("root", "check", "path"))
        if path is None:
            name = own or self.metrics["dataset"]
            data = gas.get_data(root, name, check, split="all", **options)[0]
        elif is_graph_folder(path):
            data = undo_clustering(gas.open_graph(path))
        elif Path(path).exists():  # It may have no labels, and no masks.
            data = gas.open_graph(
                path, undirected=options["undirected"], columns=options["columns"], check=check
            )
        else:
            data = gas.get_data(root, str(path), check, split="all", **options)[0]
        features = self.metrics["features"]
        if features["dtype"] or features["store"]:
            data.x = gas.quantize(data.x, features["dtype"] or "float32", features["store"])
        return with_csr_features(data)

    def make_model(self, data: Data) -> gas.models.LayeredGNN:
        """Make the model of the best epoch, for a graph.

        Args:
            data: The graph.

        Raises:
            ImportError: If safetensors is missing.
            ValueError: If the run has kept no model, or the graph has other features.
        """
        path = self.folder / MODEL
        if importlib.util.find_spec("safetensors") is None:
            raise ImportError(f"{path} needs the package safetensors: pip install safetensors")
        if not path.exists():
            raise ValueError(
                f"'folder' is {str(self.folder)!r}, which has no {MODEL}: the run was trained "
                "without the package safetensors; train it again"
            )
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            words = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        widths = {name: json.loads(words[name]) for name in ("in_channels", "out_channels")}
        found = 0 if data.get("x") is None else data.x.size(1)
        if found != widths["in_channels"]:
            raise ValueError(
                f"'graph' has {found} features, expected {widths['in_channels']}, as in training"
            )
        architecture = dict(self.settings.architecture)
        if "aggregators" in architecture:
            architecture["deg"] = degree(data.edge_index[1], data.num_nodes)
        cls = MODELS[self.metrics["model"]]
        model = cls(int(data.num_nodes or 0), **widths, **architecture)
        model.load_state_dict(state)
        return model.eval()

    def predict(
        self, path: str | Path | None = None, ids: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Predict every node, or some, of the graph of the training or of another.

        Classes have the names of the training.

        Args:
            path: See :meth:`open_graph`.
            ids: The ids of the nodes, as in ``node_id``; rows if the graph has none.
                (default: all nodes)

        Returns:
            Columns by name; see :func:`gas.predictions`.

        Raises:
            ValueError: If the graph doesn't fit the model, or has no node of an id.
        """
        data = self.open_graph(path)
        if self.metrics["classes"] is not None:
            data.classes = self.metrics["classes"]
        with contextlib.closing(self.make_model(data)) as model:
            graph = gas.cluster(data, self._num_parts(data), model=model, log=False)
            columns = gas.predictions(model, graph, split=self.metrics["kept_split"], log=False)
        return columns if ids is None else _select_ids(columns, ids)

    def verify(self) -> Any:
        """Compare mini-batches of the model with the uncut graph; see :func:`gas.verify`."""
        data = self.open_graph()
        with contextlib.closing(self.make_model(data)) as model:
            return gas.verify(
                model, gas.cluster(data, self._num_parts(data), model=model, log=False)
            )

    def _num_parts(self, data: Data) -> int:
        return (
            self.settings.replace(num_parts=None).for_size(int(data.num_nodes or 0)).num_parts or 1
        )


def load_run(folder: str | Path) -> SavedRun:
    """Open the folder of a run of ``gas train``.

    ``gas.load_run("runs").predict()`` predicts with the model of the best epoch::

        run = gas.load_run("runs")
        table = pandas.DataFrame(run.predict("tables_of_new_nodes"))

    Args:
        folder: The folder.

    Raises:
        ValueError: If it holds no run.
    """
    return SavedRun(folder)


def _select_ids(columns: dict[str, Any], ids: Sequence[Any]) -> dict[str, Any]:
    """Return the rows of some nodes, in the order of their ids."""
    known = np.asarray(columns["node"]).astype(str).tolist()
    row_of = {name: row for row, name in enumerate(known)}
    missing = [each for each in ids if str(each) not in row_of]
    if missing:
        raise ValueError(
            f"'ids' has {missing[0]!r}, which is no node of the graph, expected ids such as "
            f"{known[0]!r}"
        )
    rows = [row_of[str(each)] for each in ids]
    return {
        name: [values[row] for row in rows] if isinstance(values, list) else values[rows]
        for name, values in columns.items()
    }
