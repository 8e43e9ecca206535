"""Folders of runs: what ``gas train`` has written, opened again."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import gas
from gas.cli.graphs import (
    PARTS_FOLDER,
    are_numbers,
    count_one_way_edges,
    describe_inputs,
    model_arguments,
    set_real_targets,
)
from gas.cli.hetero import make_model
from gas.cli.results import MODEL
from gas.cli.settings import MODELS, Settings
from gas.datasets import find_feature_names, undo_clustering
from gas.graph import MASKS, is_graph_folder, with_csr_features, with_edge_index
from gas.native import check_path, read_json
from gas.training import known_target_mask

# Entries of metrics.json about the graph: how it was opened.
OF_GRAPH = (
    "path", "root", "check", "undirected", "columns", "sparse_features", "feature_names",
)  # fmt: skip


class SavedRun:
    """A finished run: its settings, its scores, and the model of its best epoch.

    * ``folder``: the folder of the run.
    * ``metrics``: the contents of its ``metrics.json``.
    * ``settings``: the settings of the training.
    * ``node_type``: the type of nodes that is predicted, of a heterogeneous graph, else ``None``.

    Args:
        folder: The folder.

    Raises:
        ValueError: If it is no path, or holds no run, or one that can't be opened, naming the
            reason.
    """

    def __init__(self, folder: str | Path) -> None:
        check_path("folder", folder, "a folder that 'gas train --out' has written")
        self.folder = Path(folder)
        path = self.folder / "metrics.json"
        if not path.exists():
            raise ValueError(
                f"'folder' is {str(folder)!r}, which has no metrics.json: give the folder that "
                "'gas train --out' has written"
            )
        found = read_json(path)
        self.metrics: dict[str, Any] = found if isinstance(found, dict) else {}
        if self.metrics.get("model") not in MODELS:
            raise ValueError(
                f"'folder' is {str(folder)!r}, whose model is {self.metrics.get('model')!r}, "
                f"expected one of {', '.join(MODELS)}: it is of another version of gas, train it "
                "again"
            )
        self.node_type: str | None = self.metrics.get("node_type")
        try:
            self._graph = {name: self.metrics["graph"][name] for name in OF_GRAPH}
            self._targets, self._features = self.metrics["targets"], self.metrics["features"]
            self._classes, self._split = self.metrics["classes"], self.metrics["kept_split"]
            self.settings = Settings(**self.metrics["settings"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"'folder' is {str(folder)!r}, whose metrics.json is of another version of gas "
                f"({error}): train it again"
            ) from error

    def __repr__(self) -> str:
        scores = (
            f"{name[:-4]} {self.metrics[name]['mean']:.4f}" for name in ("val_acc", "test_acc")
        )
        return (
            f"{self.metrics['model']} on {self.metrics['dataset']}, {self.folder}: "
            f"{self.metrics['metric']} {', '.join(scores)}"
        )

    def open_graph(self, path: str | Path | None = None) -> Any:
        """Open the graph of the training, or another one in the same way.

        Args:
            path: A data set by name, or the path of tables or of a graph folder.
                (default: the graph of the training)

        Returns:
            A ``Data``; a ``HeteroData`` if the training used one.

        Raises:
            ValueError: If the graph can't be read.
        """
        options = dict(self._graph)
        root, check, own = (options.pop(name) for name in ("root", "check", "path"))
        names = options.pop("feature_names")
        if path is None and own is not None and not Path(own).exists():
            raise ValueError(
                f"the graph of the training, {own}, has moved: move it back, or train again"
            )
        data: Any
        if self.node_type is None and (path is None or not Path(path).exists()):
            name = str(path) if path is not None else own or self.metrics["dataset"]
            split: Any = 0 if self.settings.inductive else "all"
            options["columns"] = options["columns"] if path is None else {}  # It is no table.
            data = gas.get_data(root, name, check, split=split, **options)[0]
        elif self.node_type is None and is_graph_folder(str(path)):
            data = gas.open_graph(str(path))
            lacks, seen, which = count_one_way_edges(data) if options["undirected"] else (0, 0, "")
            if lacks:
                raise ValueError(
                    f"'graph' is {str(path)!r}, in which {lacks:,} of {seen:,} {which} lack a "
                    "reverse, but the training added it: import it anew, by gas import --undirected"
                )
            data = undo_clustering(data)
        else:  # It may have no labels, and no masks.
            columns, given = options["columns"], str(own if path is None else path)
            hetero = self.node_type is not None
            data = gas.open_graph(
                given, undirected=options["undirected"], columns=columns, hetero=hetero,
                check=check, log=path is not None,
            )  # fmt: skip
            found = find_feature_names(given, columns)
            if names is not None and found is not None:
                for store in data.node_stores:
                    store.x = _order_features(store.x, names, found)
        nodes = self._find_targets(data)
        if path is not None:
            self._convert_targets(data, nodes)
        else:
            self._set_kind_of_targets(data, nodes)
        features = self._features
        if features["dtype"] or features["store"]:
            data.x = gas.quantize(data.x, features["dtype"] or "float32", features["store"])
        return data if isinstance(data, HeteroData) else with_csr_features(data)

    def _find_targets(self, data: Any) -> Any:
        """Return what has the targets of a graph: itself, or its nodes of the predicted type."""
        if self.node_type is None:
            return data
        if self.node_type not in data.node_types:
            raise ValueError(
                f"'graph' has no nodes of type {self.node_type!r}, which the model predicts, but "
                f"{', '.join(data.node_types)}"
            )
        return data[self.node_type]

    def _open_parts(self) -> Data | None:
        """Open the partitioned graph of the run, with its features mapped from disk.

        Returns:
            The graph; ``None`` if it was in memory, its features were encoded or in a store, or no
            folder of it with several parts is left.
        """
        features, own = self._features, self._graph["path"]
        if features["dtype"] or features["store"] or own is None or not is_graph_folder(own):
            return None
        for folder in (self.folder / PARTS_FOLDER, Path(own)):
            if is_graph_folder(folder):
                data = gas.get_data("", str(folder), check=False, split="all", in_place=True)[0]
                if data.parts.numel() > 2:
                    return data
        return None

    def _set_kind_of_targets(self, data: Any, nodes: Any) -> None:
        """Replace integer targets by real numbers, if those of the training were replaced."""
        is_real = getattr(torch, self._targets["dtype"]).is_floating_point
        if is_real and nodes.y.dim() == 1 and not nodes.y.is_floating_point():
            set_real_targets(data, nodes)

    def _convert_targets(self, data: Any, nodes: Any) -> None:
        """Convert another graph's targets to the type, shape and classes of the training.

        Those that it lacks, and classes that the training doesn't have, are unknown. Masks that
        were drawn at random are left out.
        """
        kind, classes = getattr(torch, self._targets["dtype"]), self._classes
        unknown = math.nan if kind.is_floating_point else -1
        if "made up" in str(getattr(data, "split", "")):
            del data.split
            for name in MASKS:
                nodes.pop(name, None)
        if "y" in nodes and are_numbers(getattr(data, "classes", None) or []):
            self._set_kind_of_targets(data, nodes)
        y, own = nodes.get("y", None), getattr(data, "classes", None) or []
        is_same = (
            y is not None
            and list(y.shape[1:]) == self._targets["shape"]
            and (kind.is_floating_point or not y.is_floating_point())
            and bool(own) == bool(classes)
        )
        if not is_same:
            nodes.y = torch.full(
                (int(nodes.num_nodes or 0), *self._targets["shape"]), unknown, dtype=kind
            )
        elif classes is not None:
            codes = torch.tensor([classes.index(c) if c in classes else -1 for c in own])
            nodes.y = torch.where(y < 0, y, codes[y.clamp(min=0)]).to(kind)
        else:
            nodes.y = y.to(kind)
        if classes is not None:
            data.classes = classes
        elif own:
            del data.classes

    def make_model(self, data: Any) -> Any:
        """Load the model of the best epoch, in evaluation mode, for a graph.

        Args:
            data: The graph, of :meth:`open_graph`.

        Returns:
            A model of :mod:`gas.models`, or a converted :class:`gas.cli.hetero.HeteroSAGE`.

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
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file

        try:
            with safe_open(path, "pt") as file:
                words = file.metadata()
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): train the run again") from error
        for name, value in describe_inputs(data).items():
            found = json.dumps(value)
            what = f"{found} features" if name == "in_channels" else f"the edge types {found}"
            if found != words[name]:  # Types are compared in their order, too.
                raise ValueError(f"'graph' has {what}, expected {words[name]}, as in training")
        out_channels, shape = json.loads(words["out_channels"]), self.settings.architecture
        if self.node_type is not None:
            model = make_model(data, self.node_type, out_channels, shape)
            model.net.load_state_dict(state)
            return model.eval()
        model = MODELS[self.metrics["model"]](
            int(data.num_nodes or 0),
            in_channels=json.loads(words["in_channels"]),
            out_channels=out_channels,
            **model_arguments(shape, data),
        )
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
        mapped = self._open_parts() if path is None else None
        data = self.open_graph(path) if mapped is None else mapped
        with contextlib.closing(self.make_model(data)) as model:
            if mapped is None:
                usual = dataclasses.replace(self.settings, num_parts=None, batch_size=None)
                num_parts = usual.for_size(int(data.num_nodes or 0)).num_parts or 1
                graph = gas.cluster(data, num_parts, model=model, log=False)
            else:  # Its features stay on disk.
                graph = data if model.transform is None else model.prepare(with_edge_index(data))
            columns = gas.predictions(model, graph, split=self._split, log=False)
        if not bool(known_target_mask(self._find_targets(data).y).any()):
            columns.pop("label", None)
        return columns if ids is None else _select_ids(columns, ids, self.node_type)

    def verify(self) -> Any:
        """Compare mini-batches of the model with the uncut graph; see :func:`gas.verify`."""
        data = self.open_graph()
        with contextlib.closing(self.make_model(data)) as model:
            num_parts = min(self.settings.num_parts or 1, int(data.num_nodes or 0))
            return gas.verify(model, gas.cluster(data, num_parts, model=model, log=False))


def load_run(folder: str | Path) -> SavedRun:
    """Open the folder of a run of ``gas train``.

    ``gas.load_run("runs").predict()`` predicts with the model of the best epoch::

        run = gas.load_run("runs")
        table = pandas.DataFrame(run.predict("tables_of_new_nodes"))

    Args:
        folder: The folder.

    Raises:
        ValueError: If it is no path, or holds no run.
    """
    return SavedRun(folder)


def _order_features(x: Tensor, names: Sequence[str], found: Sequence[str]) -> Tensor:
    """Return features in the order of the columns of the training."""
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"'graph' has no column {missing[0]!r}, which is a feature in training: expected the "
            f"columns {', '.join(names)}"
        )
    if list(names) == list(found):
        return x
    if x.size(1) != len(found):
        raise ValueError(
            f"'graph' has the columns {', '.join(found)}, some with several numbers, expected them "
            f"in the order of the training: {', '.join(names)}"
        )
    return x[:, [found.index(name) for name in names]]


def _select_ids(
    columns: dict[str, Any], ids: Sequence[Any], node_type: str | None
) -> dict[str, Any]:
    """Return the rows of some nodes, in the order of their ids."""
    known = np.asarray(columns["node"]).astype(str).tolist()
    row_of = {name: row for row, name in enumerate(known)}
    missing = [each for each in ids if str(each) not in row_of]
    if missing:
        of_type = "" if node_type is None else f" of type {node_type!r}"
        raise ValueError(
            f"'ids' has {missing[0]!r}, which is no node of the graph{of_type}, expected ids such "
            f"as {known[0]!r}"
        )
    rows = [row_of[str(each)] for each in ids]
    return {
        name: [values[row] for row in rows] if isinstance(values, list) else values[rows]
        for name, values in columns.items()
    }
