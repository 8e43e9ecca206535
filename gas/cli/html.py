"""The report of a run, or of two side by side: one HTML page that needs nothing else."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gas.cli.report import metrics
from gas.cli.results import score_name
from gas.cli.runs import SavedRun, load_run
from gas.native import check_path, human, replace_file
from gas.training import Run

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
NONE = "-"
MOST_CURVES = 4  # Histories whose staleness is drawn as curves.
PHASES = (
    "A step of training, of some after the last epoch. The profiler slows small steps down. "
    "Python is the rest: Python, dispatch and autograd."
)


class Figure(NamedTuple):
    """A figure, as SVG."""

    title: str
    svg: str


class Table(NamedTuple):
    """A table with a column for each run; ``compares`` marks rows whose cells differ."""

    heading: str
    rows: Sequence[Sequence[str]]
    compares: bool = False
    note: str = ""


def report(
    run: str | Path | SavedRun | Run,
    other: str | Path | SavedRun | Run | None = None,
    *,
    out: str | Path | None = None,
) -> Path:
    """Write the report of a run: curves, staleness, time and memory, partition, settings, machine.

    ::

        gas.report("runs")  # A folder of gas train: writes runs/report.html.
        gas.report("runs", "other_runs")  # Side by side.
        gas.report(gas.fit(model, graph, optimizer, 50))  # Writes report.html.

    Args:
        run: The folder of a run of ``gas train``, a :class:`gas.cli.SavedRun`, or the record that
            :func:`gas.fit` returns.
        other: A second run to compare with. (default: none)
        out: The file to write. (default: ``report.html`` in the folder of the run, or here)

    Returns:
        The file.

    Raises:
        ImportError: If Jinja2 or Matplotlib is missing.
        ValueError: If an argument is no path or run, a folder holds no run, or a record no epoch.
    """
    check_path("run", run, "a folder", (SavedRun, Run))
    check_path("other", run if other is None else other, "a folder", (SavedRun, Run))
    check_path("out", "" if out is None else out, "a file")
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"a report needs the package {package}: pip install 'gas-gnn[cli]'")
    import jinja2

    given = [run] if other is None else [run, other]
    names = [f"run {number}" for number in (1, 2)]
    if not any(isinstance(each, Run) for each in given):
        paths = [_folder(each) for each in given]
        short = len({path.name for path in paths}) == len(paths)
        names = [path.name if short else str(path) for path in paths]
        names = [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]
    found = {name: _read(each) for name, each in zip(names, given, strict=False)}
    path = Path(out) if out is not None else _folder(run) / "report.html"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text()).render(
        title=" and ".join(map(_describe, found.values())),
        warnings=list(itertools.chain.from_iterable(map(_warnings, found.values()))),
        figures=list(_draw_figures(found)),
        runs=list(found),
        tables=_make_tables(found),
    )
    with replace_file(path) as file:
        file.write_text(page)
    return path


def _folder(run: Any) -> Path:
    return Path("" if isinstance(run, Run) else getattr(run, "folder", run))


def _read(run: Any) -> dict[str, Any]:
    """Return the contents of a run's ``metrics.json``, or of a record."""
    if not isinstance(run, Run):
        return (run if isinstance(run, SavedRun) else load_run(run)).metrics
    if len(run) == 0:
        raise ValueError("'run' has no epoch: give the record of a training that has ended one")
    return {**metrics([run]), "metric": run.metric}


def _describe(found: Mapping[str, Any]) -> str:
    is_fit = "model" not in found
    return "A run of gas.fit" if is_fit else f"{found['model']} on {Path(found['dataset']).name}"


def _warnings(found: Mapping[str, Any]) -> list[str]:
    """Return the warnings of a report: runs that diverged, and an interrupted training."""
    failed = [
        f"Run {each['run'] + 1} diverged: {each['reason']}" for each in found.get("failed", ())
    ]
    return failed + ["The training was interrupted."] * bool(found.get("interrupted"))


# Tables -------------------------------------------------------------------------------------------


def _make_tables(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a report."""

    def collect(make: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> Sequence[Sequence[str]]:
        columns = [make(each) for each in found.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        return [[name, *(column.get(name, NONE) for column in columns)] for name in names]

    held = "At the peak of training, as --memory-report accounts for it."
    return [
        Table("Results", collect(_results)),
        Table("Time by phase", collect(_phases), note=PHASES),
        Table("Partition", collect(_partition)),
        Table("Memory by component", collect(_memory), note=held),
        Table("Settings", collect(_settings), compares=True),
        Table("Machine", collect(_machine), compares=True),
    ]


def _results(found: Mapping[str, Any]) -> dict[str, str]:
    label, _, unit = score_name(found.get("metric", "accuracy")).partition(", ")

    def mean(key: str, scale: float = 1.0, form: str = ".2f") -> str:
        value = found[key]["mean"]
        if value is None:
            return NONE
        std = found[key]["std"] if len(found[key]["values"]) > 1 else None
        spread = "" if std is None else f" ± {scale * std:{form}}"
        return f"{scale * value:{form}}{spread}"

    scale = 100 if unit else 1
    rows = {
        f"test {label}{', ' * bool(unit)}{unit}": mean("test_acc", scale),
        f"validation {label}{', ' * bool(unit)}{unit}": mean("val_acc", scale),
        "best epoch": mean("best_epoch", 1, ".0f"),
        "epochs": str(len(found["epochs"][0]["loss"])),
        "time of an epoch, ms": mean("train_epoch_seconds", 1000, ".1f"),
        "histories": _bytes(found["history_bytes"]["mean"]),
        "rows moved per epoch": _bytes(found["moved_bytes"]["mean"]),
    }
    for kind, text in (("own", "the process's own"), ("rss", "with mapped files")):
        if peak := found[f"peak_{kind}_bytes"]["mean"]:
            rows[f"peak memory, {text}"] = _bytes(peak)
    return rows


def _bytes(value: float | None) -> str:
    return NONE if value is None else human(int(value))


def _partition(found: Mapping[str, Any]) -> dict[str, str]:
    if not (parts := found.get("partition")):
        return {}
    return {
        "parts": str(len(parts["size"])),
        "parts per mini-batch": str(found["settings"]["batch_size"]),
        "edges between parts": f"{100 * parts['edge_cut']:.1f} %",
        "halo nodes per node": f"{parts['halo_ratio']:.2f}",
        "largest part / mean": f"{parts['balance']:.2f}",
    }


def _step_seconds(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by phase, the longest first."""
    phases = found.get("phases")
    if not phases or not phases["steps"]:
        return {}
    seconds = sorted(phases["seconds"].items(), key=lambda one: -one[1])
    return {name: value / phases["steps"] for name, value in seconds}


def _phases(found: Mapping[str, Any]) -> dict[str, str]:
    seconds, measured = _step_seconds(found), found.get("phases") or {}
    whole, overlap = sum(seconds.values()) or 1.0, measured.get("overlap")
    rows = {n: f"{1000 * t:.2f} ms, {100 * t / whole:.0f} %" for n, t in seconds.items()}
    for name in rows.keys() & measured.get("bytes", {}).keys():  # Older runs have none.
        rows[name] += f", {human(measured['bytes'][name] // measured['steps'])}"
    if rows and overlap is not None:
        rows["transfers hidden behind the computation"] = f"{100 * overlap:.0f} %"
    return rows and {**rows, "all": f"{1000 * whole:.2f} ms"}


def _memory(found: Mapping[str, Any]) -> dict[str, str]:
    """Return what held memory in training, as text."""
    return {name: human(size) for name, size in found.get("memory", {}).items() if size}


def _settings(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings, those of the model among them."""
    settings = dict(found.get("settings", {}))
    keys = ("dataset", "model", "node_type", "training", "augment", "seed")
    named = {key: found.get(key) for key in keys}
    groups = {f"{group}: {key}": value for group in ("histories", "features", "graph")
              for key, value in found.get(group, {}).items()}  # fmt: skip
    flat = {**named, **settings.pop("architecture", {}), **settings, **groups}
    return {key: str(value) for key, value in flat.items() if value not in (None, {}, [])}


def _machine(found: Mapping[str, Any]) -> dict[str, str]:
    machine = dict(found.get("machine", {}))
    if memory := machine.pop("memory_bytes", None):
        machine["memory"] = human(memory)
    return {key: str(value) for key, value in machine.items() if value is not None}


# Figures ------------------------------------------------------------------------------------------


def _draw_figures(found: Mapping[str, Any]) -> Any:
    """Yield the figures of a report."""
    kept = {name: each["epochs"][each.get("kept_run", 0)] for name, each in found.items()}
    label = score_name(next(iter(found.values())).get("metric", "accuracy"))
    yield _draw_curves(
        "Training loss", "epoch", {name: _points(run["loss"]) for name, run in kept.items()}
    )
    scale = 100.0 if "%" in label else 1.0
    by_time = {
        name: _points(run["val_acc"], list(itertools.accumulate(run["seconds"])), scale)
        for name, run in kept.items()
    }
    if len({each.get("metric") for each in found.values()}) == 1:
        yield _draw_scores(f"Score: {label}", kept, "acc", scale)
        title = f"Validation {label}, by time of training"
        yield _draw_curves(title, "seconds of training", by_time)
    further = {name: {**run, **run.get("metrics", {})} for name, run in kept.items()}
    keys = (key for run in kept.values() for key in run.get("metrics", {}))
    for name in dict.fromkeys(key.partition("_")[2] for key in keys):  # Without the split.
        yield _draw_scores(f"Further metric: {name}", further, name)
    rates = {name: _points(run["lr"]) for name, run in kept.items() if run.get("lr")}
    if any(len(set(values)) > 1 for _, values in rates.values()):
        yield _draw_curves("Learning rate", "epoch", rates)
    drift = {name: _points(run["drift"], scale=100.0) for name, run in kept.items() if run["drift"]}
    if any(math.isfinite(value) for _, values in drift.values() for value in values):
        yield _draw_curves("Staleness: how far stored rows move between pushes, %", "epoch", drift)
    for name, run in kept.items():
        ages = run.get("layer_age")
        if ages and ages[0]:
            yield _draw_staleness("Staleness" + f" of {name}" * (len(kept) > 1), ages)
    for name, each in found.items():
        if each.get("partition"):
            yield _draw_partition("Partition" + f" of {name}" * (len(kept) > 1), each["partition"])
    yield _draw_curves(
        "Time of each epoch, without evaluation, s", "epoch",
        {name: _points(run["seconds"]) for name, run in kept.items()}, from_zero=True,
    )  # fmt: skip
    phases = {name: seconds for name, each in found.items() if (seconds := _step_seconds(each))}
    if phases:
        yield _draw_phases(phases)


def _points(
    values: Sequence[float | None], at: Sequence[float] | None = None, scale: float = 1.0
) -> tuple[Sequence[float], list[float]]:
    """Return the coordinates of a curve, without values that aren't finite."""
    places = range(1, len(values) + 1) if at is None else at
    points = [(place, scale * value) for place, value in zip(places, values, strict=True)
              if value is not None and math.isfinite(value)]  # fmt: skip
    return [place for place, _ in points], [value for _, value in points]


def _new_figure(along: str, is_whole: bool = True) -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(6, 3.4), layout="constrained")
    axis = figure.add_subplot(xlabel=along)
    axis.locator_params(axis="x", integer=is_whole)
    return figure, axis


def _draw_curves(
    title: str, along: str, curves: Mapping[str, Any], num_colors: int = 0, from_zero: bool = False
) -> Figure:
    """Draw curves; with ``num_colors``, later ones have the colors of the first, and dashes."""
    figure, axis = _new_figure(along, along == "epoch")
    for number, (name, (places, values)) in enumerate(curves.items()):
        is_later = bool(num_colors) and number >= num_colors
        axis.plot(
            places, values, label=name, linewidth=1.5, marker="." if len(values) < 3 else None,
            color=f"C{number % num_colors if num_colors else number}",
            linestyle="--" if is_later else "-",
        )  # fmt: skip
    axis.set(title=title)
    if from_zero:
        axis.set_ylim(0, 1.1 * max(axis.get_ylim()[1], 1e-9))
    axis.grid(alpha=0.3)
    if len(curves) > 1:
        axis.legend(fontsize=9)
    return Figure(title, _to_svg(figure))


def _draw_scores(title: str, kept: Mapping[str, Any], score: str, scale: float = 1.0) -> Figure:
    """Draw a score of the splits; of several runs, those of validation and test alone."""
    several = len(kept) > 1
    names = {"train": "training", "val": "validation", "test": "test"}
    curves = {
        " ".join([run] * several + [name]): _points(one[f"{split}_{score}"], scale=scale)
        for split, name in names.items()
        for run, one in kept.items()
        if one.get(f"{split}_{score}") and not (several and split == "train")
    }
    return _draw_curves(title, "epoch", curves, len(kept) if several else 0)


def _draw_phases(phases: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the milliseconds of a step by phase, a bar for each run."""
    figure, axis = _new_figure("", is_whole=False)
    names = list(dict.fromkeys(name for each in phases.values() for name in each))
    height = 0.8 / len(phases)
    for number, (run, seconds) in enumerate(phases.items()):
        places = [row + (number - (len(phases) - 1) / 2) * height for row in range(len(names))]
        values = [1000 * seconds.get(name, 0.0) for name in names]
        axis.barh(places, values, height, label=run)
    axis.set(title="Time of a step by phase, ms", yticks=range(len(names)), yticklabels=names)
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    if len(phases) > 1:
        axis.legend(fontsize=9)
    return Figure("Time of a step by phase", _to_svg(figure))


def _draw_staleness(title: str, ages: Sequence[Sequence[float]]) -> Figure:
    """Draw the mean age of each history's rows over the epochs."""
    rows = list(map(list, zip(*ages, strict=True)))
    title = f"{title}: mean age of rows, in pushes"
    if len(rows) <= MOST_CURVES:
        curves = {f"history {number}": _points(row) for number, row in enumerate(rows)}
        return _draw_curves(title, "epoch", curves, from_zero=True)
    figure, axis = _new_figure("epoch")
    shown = axis.imshow(
        rows, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0,
        extent=(0.5, len(ages) + 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    axis.set(title=title, ylabel="history")
    axis.set_yticks(range(len(rows)))
    figure.colorbar(shown, ax=axis)
    return Figure(title, _to_svg(figure))


def _draw_partition(title: str, parts: Mapping[str, Any]) -> Figure:
    """Draw own and halo nodes of each part."""
    figure, axis = _new_figure("parts, ordered by their halo")
    order = sorted(range(len(parts["size"])), key=lambda part: parts["halo"][part])
    size, halo = ([parts[key][part] for part in order] for key in ("size", "halo"))
    axis.stackplot(range(len(order)), size, halo, labels=["own nodes", "halo nodes"], step="mid")
    axis.set(title=f"{title}: nodes of each part", ylim=(0, None))
    axis.legend(fontsize=9, loc="upper left")
    return Figure(title, _to_svg(figure))


def _to_svg(figure: Any) -> str:
    """Return a figure as an ``svg`` element, the same each time."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "gas"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
