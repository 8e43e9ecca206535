"""Results of a run: the parameters of the best model, and its predictions for every node."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gas.cli.graphs import describe_inputs
from gas.cli.report import machine, metrics, plot_curves
from gas.native import free_disk, human, replace_file, write_json
from gas.training import Predictions, Run, prediction_columns

if TYPE_CHECKING:
    from gas.cli.experiment import Experiment

MODEL, PREDICTIONS = "model.safetensors", "predictions.parquet"
PACKAGES = {MODEL: "safetensors", PREDICTIONS: "pyarrow"}


def find_missing_packages() -> dict[str, str]:
    """Find the files that can't be written, and return the missing package of each."""
    return {f: name for f, name in PACKAGES.items() if importlib.util.find_spec(name) is None}


def check_disk_space(folder: Path, experiment: Experiment) -> None:
    """Refuse a folder whose disk has no room for the results of a run."""
    with contextlib.closing(experiment.make_model(histories=False)) as model:
        state = sum(value.nbytes for value in model.state_dict().values())
    rows = experiment.data.num_nodes * (64 + 8 * experiment.out_channels)
    needed, free = state + rows + 2**20, free_disk(folder)
    if free < needed:
        raise OSError(
            f"'out' is {str(folder)!r}, on a disk with {human(free)} free, expected "
            f"{human(needed)} for the model and its predictions: name a folder on another"
        )


def best_run_index(runs: Sequence[Run]) -> int:
    """Return the position of the run with the highest validation score, whose model is kept."""
    scores = [max((score for score in run.val_acc if score == score), default=0) for run in runs]
    return scores.index(max(scores))


def write_results(
    folder: Path | str,
    experiment: Experiment,
    runs: Sequence[Run],
    title: str,
    about: dict[str, Any],
) -> list[Path]:
    """Write the results of runs, as far as the packages are installed.

    * ``metrics.json``: the scores of every epoch, and a description of the runs.
    * ``curve.png``: a plot of them.
    * ``model.safetensors``: the parameters of the best epoch by validation, of the best run.
    * ``predictions.parquet``: the predictions of that model; see :func:`predictions`.

    Args:
        folder: The folder to write to.
        experiment: The experiment.
        runs: Its runs; that of :func:`best_run_index` has ``best``.
        title: The title of the plot.
        about: The description of the runs, for ``metrics.json``.

    Returns:
        The files.
    """
    folder, number = Path(folder), best_run_index(runs)
    best = runs[number].best
    assert best is not None
    found = {
        **metrics(runs),
        "baseline": experiment.baseline(),
        "metric": experiment.metric,
        "split": experiment.data.get("split", "given"),
        "kept_run": number,
        "kept_split": runs[number].split,
        "classes": experiment.data.get("classes"),
        "targets": {
            "dtype": str(experiment.data.y.dtype).removeprefix("torch."),
            "shape": list(experiment.data.y.shape[1:]),
        },
        "partition": _describe_partition(experiment),
        "phases": experiment.phases,
        **about,
        "machine": machine(),
    }
    # It is written last: where it exists, all files are of the same run.
    (folder / "metrics.json").unlink(missing_ok=True)
    plot_curves(folder / "curve.png", runs, title, score_name(experiment.metric))
    words: dict[str, Any] = {key: about[key] for key in ("model", "dataset") if key in about}
    words |= experiment.settings.architecture
    words |= describe_inputs(getattr(experiment, "hetero_data", experiment.data))
    words["out_channels"] = experiment.out_channels
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in words.items()}
    columns = predictions(experiment, best.out, runs[number].split)
    state = {key.removeprefix("net."): value for key, value in best.state.items()}
    written = _write_best(folder, state, texts, columns)
    write_json(folder / "metrics.json", found)
    return [folder / "metrics.json", folder / "curve.png", *written]


def _write_best(
    folder: Path, state: dict[str, Tensor], texts: dict[str, str], columns: dict[str, Any]
) -> list[Path]:
    """Write the best model and its predictions, without files whose package isn't installed."""
    absent = find_missing_packages()
    if MODEL not in absent:
        from safetensors.torch import save_file

        with replace_file(folder / MODEL) as file:
            save_file(state, file, texts)
    if PREDICTIONS not in absent:
        write_table(folder / PREDICTIONS, columns)
    return [folder / name for name in PACKAGES if name not in absent]


def write_table(path: Path, columns: dict[str, Any]) -> None:
    """Write columns into a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    with replace_file(path) as file:
        parquet.write_table(pyarrow.table(columns), file)


def _describe_partition(experiment: Experiment) -> dict[str, Any] | None:
    """Return sizes and quality of the parts of the graph; ``None`` for a full batch."""
    parts = experiment.graph.partition
    if parts is None:
        return None
    lists = {"size": parts.size.tolist(), "halo": parts.halo.tolist()}
    names = ("edge_cut", "halo_ratio", "balance")
    return {**lists, **{name: getattr(parts, name) for name in names}}


def score_name(metric: str) -> str:
    """Return the name of a score, with its unit."""
    names = {"accuracy": "accuracy, %", "micro_f1": "micro-F1, %", "roc_auc": "ROC-AUC, %"}
    return {**names, "r2": "R²"}.get(metric, metric)


def predictions(experiment: Experiment, out: Tensor, split: int = 0) -> dict[str, Any]:
    """Return the columns of :func:`gas.predictions`, of outputs in the order of an experiment."""
    in_order = experiment.to_original_order
    return prediction_columns(Predictions(in_order(out), experiment.data, in_order), split)
