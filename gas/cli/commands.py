"""The command ``gas``: its subcommands, made by tyro from the functions below."""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import IO, Annotated, Any, get_type_hints

from torch_geometric.data import Data

import gas
from gas.cli import command, html
from gas.cli.bench import Bench, show, summarise
from gas.cli.doctor import examine, print_findings
from gas.cli.graphs import check_folder_fits, model_arguments, warn_of_one_way_edges
from gas.cli.options import explain_error, print_warnings_as_lines
from gas.cli.parser import MISSING, MODEL_NAMES
from gas.cli.report import describe_machine, machine
from gas.cli.results import write_table
from gas.cli.runs import load_run
from gas.cli.settings import MODELS, Choice, Settings
from gas.datasets import import_graph
from gas.native import check_integer, replace_file, write_json


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``gas``, and exit if it fails.

    Args:
        arguments: The arguments. (default: those of the process)
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        gas._startup.finish_startup()
        _call(given)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        command.end_without_reader()


def _call(given: list[str]) -> None:
    """Call a subcommand, and exit if it fails."""
    if given[:1] == ["train"]:
        if given[1:] and not given[1].startswith("-"):
            given.insert(1, "--dataset")  # The graph stands first, as in other commands.
        command.main(arguments=given[1:], prog="gas train")
        return
    if given == ["--version"]:
        print(gas.__version__)
        return
    if importlib.util.find_spec("tyro") is None:
        sys.exit(f"gas: error: {MISSING}")
    import tyro

    name = given[0] if given else ""
    _name_arguments(tyro.conf.arg)
    shown = _find_shown_names(COMMANDS[name]) if name in COMMANDS else {}
    print_warnings_as_lines(shown)
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="gas",
            description=gas.__doc__,
            args=given,
            config=(tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
        )
        sys.stdout.flush()  # Here errors are one line.
    except BrokenPipeError:
        raise
    except (ValueError, ArithmeticError, OSError, ImportError, MemoryError) as error:
        sys.exit(f"gas {name}: error: {explain_error(error, shown)}")


def train() -> None:
    """Train a model, and write scores, curves, the model and predictions into a folder."""
    # For the list of commands alone: ``main`` calls the program that has these options.


def import_tables(
    source: str,
    out: str,
    /,
    undirected: bool = False,
    columns: tuple[str, ...] = (),
    dtype: str | None = None,
    memory: str = "1GB",
    check: bool = True,
) -> None:
    """Import tables and arrays, which need not fit memory, into a graph folder.

    The same command continues an import that was interrupted.

    Args:
        source: A folder of tables and arrays (nodes.csv, edges.csv, ...), or a file of edges.
        out: The graph folder to write.
        undirected: Add the reverse of each edge that lacks it.
        columns: Names of columns, ROLE=NAME, such as source=payer.
        dtype: The type of stored features, such as bfloat16 or int8.
        memory: The memory for reading and sorting.
        check: Refuse NaN and infinite features.
    """
    options: dict[str, Any] = {
        "columns": _split_columns(columns), "dtype": dtype, "check": check,
    }  # fmt: skip
    found = import_graph(source, out, undirected=undirected, memory=memory, **options)
    print(found)
    if not undirected:
        warn_of_one_way_edges(found)


@dataclass(frozen=True)
class Source:
    """Choose how the graph is opened."""

    undirected: bool = False  # Add the reverse of each edge that lacks it.
    columns: tuple[str, ...] = ()  # Names of columns, ROLE=NAME, such as source=payer.
    root: Path = Path("data")  # The folder of PyG's data sets.
    check: bool = True  # Refuse NaN and infinite features.

    def options(self) -> dict[str, Any]:
        """Return the options of :func:`gas.open_graph`."""
        columns = _split_columns(self.columns)
        return {"undirected": self.undirected, "columns": columns, "check": self.check}


def partition(
    graph: str,
    out: str | None = None,
    /,
    source: Source = Source(),
    num_parts: int = 64,
    method: str = "auto",
) -> None:
    """Partition a graph, print the quality of the partition, and write a graph folder.

    Args:
        graph: A data set by name, or the path of tables or of a graph folder.
        out: The graph folder to write, whose parts are row ranges. Without it, nothing is written.
        source: How the graph is opened.
        num_parts: The number of parts.
        method: The method: metis, kaminpar, random, or auto for the best one installed.
    """
    options = source.options()
    if Path(graph).exists():  # It needs no labels.
        data = gas.open_graph(graph, **options)
    else:
        data = gas.get_data(source.root, graph, **options)[0]
    clustered = gas.cluster(data, num_parts, method=method, out=out, check=source.check)
    print(gas.partition_report(clustered, clustered.parts))


@dataclass(frozen=True)
class Workload(Source):
    """Choose the model, and how the graph is opened."""

    model: Choice[str, MODEL_NAMES] = "gcn"  # The model.
    memory: str | None = None
    """The memory limit of the process, such as 6GB. Without it, what is free."""
    num_layers: int | None = None  # The number of layers. Without it, as gas train.
    hidden_channels: int | None = None  # The width of hidden layers. Without it, as gas train.

    def open(self, graph: str, command: str, **shape: int | None) -> tuple[Data, int, Settings]:
        """Return a graph, its number of outputs, and the settings of the model."""
        check_folder_fits(graph, command)
        data, _, out_channels = gas.get_data(self.root, graph, **self.options())
        shape |= {"num_layers": self.num_layers, "hidden_channels": self.hidden_channels}
        return data, out_channels, Settings.default(self.model).replace(**shape)


def plan(graph: str, /, workload: Workload = Workload()) -> None:
    """Recommend the number of parts, the batch size and the place of histories, with reasons.

    Args:
        graph: A data set by name, or the path of tables or of a graph folder.
        workload: The model, and how the graph is opened.
    """
    data, out_channels, settings = workload.open(graph, "gas plan")
    arguments = model_arguments(settings.architecture, data)
    model = MODELS[workload.model](
        data.num_nodes, data.num_features, out_channels=out_channels, **arguments
    )
    print(explain_error(str(gas.plan(data, model, workload.memory))))  # Options of gas train.


def bench(
    graph: str,
    /,
    workload: Workload = Workload(),
    num_parts: int | None = None,
    batch_size: int | None = None,
    repeats: int = 7,
    json: Path | None = None,
) -> None:
    """Measure training epochs here: full batch, histories, mini-batches without histories.

    They are measured on the CPU, an epoch of each in turn.

    Args:
        graph: A data set by name, or the path of tables or of a graph folder.
        workload: The model, and how the graph is opened.
        num_parts: The number of parts. Without it, that of the best candidate of gas plan with
            several steps per epoch.
        batch_size: Parts per mini-batch. Without it, that of the same candidate.
        repeats: The number of measured epochs for each way of training.
        json: The file to write all numbers into.
    """
    check_integer("repeats", repeats, 1)
    _check_file("--json", json)
    shape, model = {"num_parts": num_parts, "batch_size": batch_size}, workload.model
    signals = command.Signals()
    with signals.handle():
        data, out_channels, settings = workload.open(graph, "gas bench", **shape)
        found = Bench(data, out_channels, model, settings, workload.memory, signals=signals)
        measured, described = summarise(found.measure(repeats)), machine()
        about = f"{model} {dict(settings.architecture)} on {graph}: {data.num_nodes:,} nodes, "
        about += f"{data.num_edges:,} edges; {describe_machine(described)}"
        print(about, found, show(measured), sep="\n\n")
        if json is not None:
            words = {"graph": graph, "model": model, "settings": dataclasses.asdict(settings)}
            write_json(json, {**words, **found.summary(), **measured, "machine": described})
        if signals.received:
            print("Interrupted: these are the epochs that ended before.", file=sys.stderr)


def predict(
    run: Path,
    /,
    graph: str | None = None,
    ids: tuple[str, ...] | None = None,
    out: Path | None = None,
) -> None:
    """Predict nodes with the model of a run, and write or print a table.

    Args:
        run: The folder of the run.
        graph: Another graph than that of the training: tables, or a graph folder.
        ids: The ids of the nodes. Without them, all nodes.
        out: The file to write, .csv or .parquet. Without it, the table is printed.
    """
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out is {out}, expected a file that ends in .csv or .parquet")
    _check_file("--out", out)
    if ids == ():
        raise ValueError("'ids' is empty, expected ids of nodes: leave it out to predict all nodes")
    columns = load_run(run).predict(graph, ids)
    if out is None:
        _write_csv(columns, sys.stdout)
        return
    if out.suffix == ".parquet":
        write_table(out, columns)
    else:
        with replace_file(out) as file, file.open("w", newline="") as stream:
            _write_csv(columns, stream)
    print(f"Wrote {len(columns['node'])} rows into {out}", file=sys.stderr)


def verify(run: Path, /) -> None:
    """Compare the outputs of a run's model on mini-batches with those on the whole graph.

    Args:
        run: The folder of the run.
    """
    found = load_run(run).verify()
    print(found)
    if not found:
        sys.exit(1)


def report(run: Path, other: Path | None = None, /, out: Path | None = None) -> None:
    """Write an HTML report of a run, or of two side by side.

    Args:
        run: The folder of the run.
        other: The folder of a second run.
        out: The file to write. Without it, report.html in the folder of the run.
    """
    _check_file("--out", out)
    print(html.report(run, other, out=out))


def doctor() -> None:
    """Describe the installation and the machine, with what to do about each problem."""
    if print_findings(examine()):
        sys.exit(1)


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train,
    "import": import_tables,
    "partition": partition,
    "plan": plan,
    "bench": bench,
    "predict": predict,
    "verify": verify,
    "report": report,
    "doctor": doctor,
}


def _find_shown_names(function: Callable[..., Any]) -> dict[str, str]:
    """Return how the arguments of a command are typed, by their names."""
    shown: dict[str, str] = {}
    for name, each in inspect.signature(function).parameters.items():
        hint = get_type_hints(function)[name]
        names = [f.name for f in dataclasses.fields(hint)] if is_dataclass(hint) else [name]
        shown |= {each: f"--{each.replace('_', '-')}" for each in names}
        if each.kind is each.POSITIONAL_ONLY:
            shown[name] = name.upper()
    # Functions that commands call have other names for these.
    others = {"dataset": shown.get("graph"), "folder": shown.get("run")}
    return shown | {other: name for other, name in others.items() if name is not None}


@functools.cache
def _name_arguments(arg: Callable[..., Any]) -> None:
    """Show the names of arguments in the help, in place of types such as STR."""
    for function in COMMANDS.values():
        for name, each in inspect.signature(function).parameters.items():
            shown = name.upper() if each.default is each.empty else f"[{name.upper()}]"
            if each.kind is each.POSITIONAL_ONLY or name == "ids":
                shown = "ID [ID ...]" if name == "ids" else shown
                hint = get_type_hints(function)[name]
                function.__annotations__[name] = Annotated[hint, arg(metavar=shown)]


def _split_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return the names of columns by their roles."""
    pairs = [each.partition("=") for each in columns]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("--columns expects ROLE=NAME, such as source=payer")
    return {role: name for role, _, name in pairs}


def _check_file(name: str, path: Path | None) -> None:
    """Refuse a file that an option names and that can't be written, before there is work to lose.

    Raises:
        ValueError: If it is a folder.
        OSError: If its folder takes no files.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{name} is {path}, which is a folder: name a file")
    try:
        with tempfile.TemporaryFile(dir=next(p for p in path.absolute().parents if p.exists())):
            return
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_csv(columns: dict[str, Any], stream: IO[str]) -> None:
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
