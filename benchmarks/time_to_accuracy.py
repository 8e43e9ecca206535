"""Seconds of training until a model is about as good as our own full batch gets.

    python benchmarks/time_to_accuracy.py --root data
    python benchmarks/time_to_accuracy.py --root data --cases AmazonComputers:SAGE:none:0.005
    python benchmarks/time_to_accuracy.py --root data --cases AmazonComputers:SAGE-8:batch:0.005
    python benchmarks/time_to_accuracy.py --root data --cases planted:1000000:SAGE:batch:0.01 \
        --contenders histories "PyG, ClusterLoader" "PyG, NeighborLoader 10, 10, 10" \
        --epochs 40 --seconds 90 --name time_to_accuracy_large
    LD_PRELOAD=libtcmalloc_minimal.so.4 python benchmarks/time_to_accuracy.py --root data \
        --cases planted:5000000:SAGE:batch:0.01 --contenders histories \
        "PyG, NeighborLoader 10, 10, 10" --memory 20 --epochs 12 --seconds 150 \
        --name time_to_accuracy_memory

A case is a graph, a model of PyG (3 layers, ``SAGE-8``: 8, 128 channels, dropout .5), a norm and a
learning rate; nodes are split 60/20/20 from seed 0. Our own full batch runs until its validation
score has not risen for 60 epochs. Histories then get three times the seconds that it took to its
best. Seconds are those of training epochs, without evaluation; the second number is with
evaluation, which also sets the statistics of norms. Every finished run is saved, and skipped by a
later call.

Histories are trained by ``gas.fit`` without warm-up, on 512 parts, an eighth of the graph per step;
some contenders change one of these, and ``auto`` has all defaults. The others are PyG: its full
batch, NeighborLoader with 1,024 seeds, ClusterLoader on the same parts, and GraphSAINT's random
walks of about an eighth of the graph. They multiply by a ``torch.sparse_csr`` matrix where that is
faster than an ``edge_index``, and are evaluated as histories are: averaged weights, and the whole
graph's statistics of norms, layer by layer if it is large; so is pyg_autoscale. Loaders of more
than 16 steps per epoch are evaluated every 16 steps. Contenders from papers are in
``from_papers.py``.

With ``--memory`` each contender has a process of its own, whose own memory may take so many GiB,
and its peak from after the graph was read, evaluations included, is in the table. Histories by
which the contenders of PyG are evaluated are files. Where our own full batch doesn't fit, scores
are compared with the best of all contenders.

With ``--processor-time`` a second is one of the process's processor time: for one thread on a
machine that has other work.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from common import limit_memory, load, make_parser, markdown, mean_time, run_apart, save
from contenders import (
    AutoscaleLoader,
    cluster_loader,
    neighbor_loader,
    saint_loader,
    to_adj_t,
    to_autoscale,
)
from from_papers import FROM_PAPERS, Make
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gas
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.scalable import refresh_and_predict
from gas.training import (
    AveragedWeights,
    FullBatch,
    Run,
    fits_one_batch,
    make_inference_loader,
    release_freed_memory,
    run_epochs,
)

MODELS = {"GCN": GCN, "SAGE": GraphSAGE, "GAT": GAT}
NORMS = {"none": None, "batch": "batch_norm"}
CASES = (
    "AmazonComputers:SAGE:batch:0.005",
    "AmazonComputers:GCN:batch:0.01",
    "AmazonComputers:SAGE:none:0.005",
    "AmazonComputers:GCN:none:0.003",
)
Way = tuple[int | str, int | None, dict[str, Any]]  # Parts, parts per batch, options of gas.fit.
PLAIN = {"warm_up": 0}  # The default of models with batch norms.
CONTENDERS: dict[str, Way] = {
    "histories": (512, 64, PLAIN),
    **{f"1/{share} of the graph per step": (512, 512 // share, PLAIN) for share in (2, 4, 16, 32)},
    "64 parts": (64, 8, PLAIN),
    "no clipping": (512, 64, {**PLAIN, "grad_norm": None}),
    "stale rows as they are": (512, 64, {**PLAIN, "correct_drift": False}),
    "weights of the last step": (512, 64, {**PLAIN, "average_weights": False}),
    "auto": ("auto", None, {}),
    "with warm-up": (512, 64, {"warm_up": 40}),
}
LAYERS, EIGHTH = 3, 8
Loader = Callable[[Data, Tensor], Any]  # Of a graph, and where its parts begin.
OF_PYG: dict[str, Loader] = {
    "PyG, full batch": lambda data, _: [data],
    "PyG, NeighborLoader 10, 10, 10": lambda data, _: neighbor_loader(data, [10] * LAYERS, 1024),
    "PyG, NeighborLoader 15, 10, 5": lambda data, _: neighbor_loader(data, [15, 10, 5], 1024),
    "PyG, ClusterLoader": lambda data, ptr: cluster_loader(data, ptr, 512 // EIGHTH),
    "PyG, GraphSAINT": lambda data, _: saint_loader(data, LAYERS, EIGHTH),
    "pyg_autoscale": lambda data, ptr: AutoscaleLoader(data, ptr, 512 // EIGHTH),
}
PAPERS_WAY: Way = (512, 64, PLAIN)
FULL = "full batch"
FOLDERS = ("WordNet", "Cornell5")  # Graph folders below the root.
MOST_EPOCHS, PATIENCE = 300, 60
MOST_STEPS = 16  # Of PyG's loaders between two evaluations.
BELOW = 0.005  # The score that counts is this much below the best of the full batch.


def read_graph(root: str, name: str) -> Data:
    """Return a graph by its name, split 60/20/20."""
    if name in FOLDERS:
        data = gas.open_graph(Path(root) / name, log=False)
    else:
        data, _, _ = gas.get_data(root, name)
    set_masks(data)
    return data


class TimeIsUpError(Exception):
    """Ends a run."""


def set_masks(data: Data) -> None:
    """Split the nodes that have a label, 60/20/20, from seed 0."""
    known = (data.y.view(-1) >= 0).nonzero().view(-1)
    known = known[torch.randperm(known.numel(), generator=torch.Generator().manual_seed(0))]
    ends = [int(0.6 * known.numel()), int(0.8 * known.numel()), known.numel()]
    for name, first, end in zip(("train", "val", "test"), [0, *ends[:2]], ends, strict=True):
        data[f"{name}_mask"] = torch.zeros(data.num_nodes, dtype=torch.bool)
        data[f"{name}_mask"][known[first:end]] = True


class Stopwatch:
    """Follows a run, and ends it after some seconds of training, ``before`` it included."""

    def __init__(self, seconds: float, steps: int, before: float = 0.0) -> None:
        self.seconds, self.steps, self.before = seconds, steps, before
        self.run, self.wall, self.error = Run(), list[float](), ""
        self.start = time.perf_counter()

    def __call__(self, run: Run) -> None:
        self.run = run
        self.wall.append(time.perf_counter() - self.start)
        if self.before + sum(run.seconds) >= self.seconds:
            raise TimeIsUpError

    def follow(self, train: Callable[[], object]) -> dict[str, Any]:
        """Train, and return the curves."""
        try:
            train()
        except TimeIsUpError:
            pass
        except FloatingPointError as error:
            self.error = str(error)
        run = self.run
        return {
            "val": run.val_acc, "test": run.test_acc, "loss": run.loss,
            "drift": [each if math.isfinite(each) else None for each in run.drift],
            "seconds": torch.tensor(run.seconds).cumsum(0).add(self.before).tolist(),
            "wall": self.wall, "error": self.error, "steps": self.steps,
        }  # fmt: skip


def train(
    data: Data,
    net: torch.nn.Module,
    lr: float,
    way: Way,
    seconds: float,
    make: Make | None = None,
    epochs: int | None = None,
    in_place: bool = False,
) -> dict[str, Any]:
    """Train in one way for some seconds of training epochs, and return the curves.

    A full batch ends after ``epochs``, by default 300. What ``make`` computes of the graph, for a
    contender from a paper, counts as training. ``in_place`` overwrites the graph.
    """
    epochs = MOST_EPOCHS if epochs is None else epochs
    num_parts, batch_size, options = way
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_parts, model=model, log=False, in_place=in_place)
    found, batch_size = graph.parts.numel() - 1, batch_size or graph.batch_size
    start = time.perf_counter()
    if make is not None:
        model, graph, more = make(model, net, graph)
        options = {**options, **more}
    before = time.perf_counter() - start
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    watch = Stopwatch(seconds, -(-found // batch_size), before)
    run = watch.follow(lambda: gas.fit(
        model, graph, optimizer, epochs if num_parts == 1 else 100 * MOST_EPOCHS,
        batch_size=batch_size, patience=PATIENCE if num_parts == 1 else None,
        keep_best=False, log=False, on_epoch=watch, **options,
    ))  # fmt: skip
    return {**run, "parts": f"{found} / {batch_size}"}


def train_as_pyg(
    data: Data,
    net: torch.nn.Module,
    lr: float,
    make_loader: Loader,
    seconds: float,
    in_place: bool = False,
) -> dict[str, Any]:
    """Train the module itself on the batches of a loader of PyG."""
    # A model of the same weights, for evaluation, whose histories don't count within a limit.
    model = gas.to_scalable(net, data, store="disk" if in_place else None)
    in_place &= model.transform is None
    graph = gas.cluster(data, 512, model=model, log=False, in_place=in_place)
    parts = graph if model.transform is None else gas.cluster(data, 512, log=False)
    predict = make_predictor(graph)
    kept = ("x", "y", "edge_index", "train_mask")
    batches = make_loader(Data(**{key: parts[key] for key in kept}), parts.parts)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    steps = min(len(batches), MOST_STEPS)
    endless = chain.from_iterable(repeat(batches))
    average = AveragedWeights(model, optimizer, steps)
    if isinstance(batches, AutoscaleLoader):
        run_net = to_autoscale(net, data.num_nodes)
    else:
        run_net = faster_call(net, next(iter(batches)))

    def epoch() -> float:
        net.train()
        losses = []
        for batch in islice(endless, steps):
            optimizer.zero_grad()
            seeds = batch.get("batch_size")
            mask = batch.train_mask[:seeds]
            out = run_net(batch)[:seeds]
            loss = torch.nn.functional.cross_entropy(out[mask], batch.y.view(-1)[:seeds][mask])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    watch = Stopwatch(seconds, steps)
    return watch.follow(lambda: run_epochs(
        model, graph, epoch, predict, 100 * MOST_EPOCHS, on_epoch=watch, average=average
    ))  # fmt: skip


def make_predictor(graph: Data) -> Callable[[gas.ScalableGNN], Tensor]:
    """Make a function that computes every node's output, with the whole graph's statistics."""
    if fits_one_batch(graph.num_nodes, graph.num_edges):
        full = FullBatch(graph)
        return lambda model: full.refresh_and_predict(model.train())
    inference = make_inference_loader(gas.SubgraphLoader(graph, batch_size=64, log=False))
    return lambda model: refresh_and_predict(model.train(), inference)


def faster_call(net: torch.nn.Module, batch: Data) -> Callable[[Data], Tensor]:
    """Return a call of the module on a batch, with edges in the form in which it is faster."""

    def index_of(batch: Data) -> Any:
        return batch.edge_index

    def matrix_of(batch: Data) -> Any:
        return to_adj_t(copy.copy(batch)).adj_t

    def seconds(get_edges: Callable[[Data], Any]) -> float:
        def step() -> None:
            net.train()(batch.x, get_edges(batch)).sum().backward()

        step()
        return mean_time(step, 1.0)

    if isinstance(net, GAT):  # Attention takes no matrix of PyTorch.
        return lambda batch: net(batch.x, batch.edge_index)
    with torch.no_grad():  # A matrix has no edge twice.
        out, other = (net.eval()(batch.x, edges(batch)) for edges in (index_of, matrix_of))
    is_same = torch.allclose(out, other, atol=1e-4)
    get_edges = min(index_of, matrix_of, key=seconds) if is_same else index_of
    return lambda batch: net(batch.x, get_edges(batch))


def make_net(data: Data, kind: str, norm: str, seed: int) -> torch.nn.Module:
    """Make a model of PyG for a graph, such as ``"SAGE"``, or ``"SAGE-8"`` of 8 layers."""
    torch.manual_seed(seed)
    name, _, layers = kind.partition("-")
    return MODELS[name](
        data.num_features, 128, int(layers or LAYERS), int(data.y.max()) + 1, dropout=0.5,
        norm=NORMS[norm],
    )  # fmt: skip


def best_of(run: dict[str, Any]) -> int:
    """Return the epoch of the best validation score, from 0."""
    return max(range(len(run["val"])), key=run["val"].__getitem__)


def first_above(run: dict[str, Any], score: float) -> int | None:
    """Return the first epoch, from 0, whose validation score is at least ``score``."""
    return next((epoch for epoch, found in enumerate(run["val"]) if found >= score), None)


def measure(
    case: str,
    get_data: Callable[[str], Data],
    seed: int,
    runs: dict[str, Any],
    contenders: Iterable[str] = (*CONTENDERS, *OF_PYG, *FROM_PAPERS),
    most_seconds: float | None = None,
    ways: Mapping[str, Way] | None = None,
    epochs: int | None = None,
    memory: float | None = None,
) -> Iterator[None]:
    """Run the contenders of a case in turn that have no run yet, and yield after each.

    They get ``most_seconds``, by default three times what our own full batch takes to its best.
    Those from papers are for GraphSAGE alone.
    """
    if memory is None:
        data = get_data(case.rsplit(":", 3)[0])
        start = partial(run_contender, case, lambda name: data, seed, ways, epochs)
    else:
        start = partial(run_within, int(memory * 2**30), case, get_data, seed, ways, epochs)
    if FULL not in runs:
        runs[FULL] = start(FULL, float("inf"))
        yield
    if most_seconds is None:
        most_seconds = 3 * runs[FULL]["seconds"][best_of(runs[FULL])]
    for contender in contenders:
        if contender in FROM_PAPERS and ":SAGE" not in case:
            continue
        if contender not in runs:
            runs[contender] = start(contender, most_seconds)
            yield


def run_contender(
    case: str,
    get_data: Callable[[str], Data],
    seed: int,
    ways: Mapping[str, Way] | None,
    epochs: int | None,
    contender: str,
    seconds: float,
    in_place: bool = False,
) -> dict[str, Any]:
    """Train one contender of a case; see :func:`measure`."""
    name, kind, norm, lr = case.rsplit(":", 3)
    data = get_data(name)
    net = make_net(data, kind, norm, seed)
    if contender in OF_PYG:
        return train_as_pyg(data, net, float(lr), OF_PYG[contender], seconds, in_place)
    if contender in FROM_PAPERS:
        return train(data, net, float(lr), PAPERS_WAY, seconds, FROM_PAPERS[contender])
    way = (ways or CONTENDERS).get(contender, (1, 1, {}))
    return train(data, net, float(lr), way, seconds, None, epochs, in_place)


def run_within(
    memory: int, case: str, get_data: Callable[[str], Data], *arguments: Any
) -> dict[str, Any]:
    """Train one contender in a process of its own that may take so many bytes."""
    options: dict[str, Any] = {"initializer": limit_memory, "initargs": (memory,)}
    try:
        return run_apart(run_and_measure, case, get_data, *arguments, **options)
    except (MemoryError, OSError, RuntimeError) as error:  # Also of a process that was killed.
        if "memory" not in str(error) and "terminated" not in str(error):
            raise
        return {"val": [], "test": [], "error": "out of memory"}


def run_and_measure(case: str, get_data: Callable[[str], Data], *arguments: Any) -> dict[str, Any]:
    """Train one contender, and return its peak of memory with its curves."""
    data = get_data(case.rsplit(":", 3)[0])
    release_freed_memory()
    reset_peak_rss()
    run = run_contender(case, lambda name: data, *arguments, in_place=True)
    return {**run, "peak": peak_rss_bytes()}


def rows_of(case: str, runs: dict[str, Any]) -> list[list[object]]:
    """Return the lines of a case in the table."""
    best = max(runs[FULL]["val"] or [max(run["val"], default=0.0) for run in runs.values()])
    whole = first_above(runs[FULL], best - BELOW)
    rows: list[list[object]] = []
    for contender, run in runs.items():
        name = " ".join(case.rsplit(":", 4))
        if not run["val"]:
            rows.append([name, contender, *[""] * 9, run["error"], ""])
            continue
        epoch, top = first_above(run, best - BELOW), best_of(run)
        reached = ["not reached"] * 4
        if epoch is not None:
            seconds, steps = run["seconds"][epoch], (epoch + 1) * run["steps"]
            reached = [f"{seconds:.1f} s", f"{run['wall'][epoch]:.1f} s", "", f"{steps}"]
            if whole is not None:
                reached[2] = f"{seconds / runs[FULL]['seconds'][whole]:.2f}"
                reached[3] += f" ({steps / (whole + 1):.1f})"
        last = run["val"][-10:]
        peak = f"{run['peak'] / 2**30:.1f} GiB" if "peak" in run else ""
        rows.append([
            name, contender, *reached, f"{100 * run['val'][top]:.1f}",
            f"{100 * run['test'][top]:.1f}", f"{100 * min(last):.1f} to {100 * max(last):.1f}",
            f"{len(run['val'])}", "diverged" if run["error"] else "", peak,
        ])  # fmt: skip
    return rows


def main() -> None:
    every = (*CONTENDERS, *OF_PYG, *FROM_PAPERS)
    parser = make_parser(__doc__, name="time_to_accuracy")
    parser.add_argument("--cases", nargs="*", default=CASES, help="graph:model:norm:lr")
    parser.add_argument("--contenders", nargs="*", default=every, choices=every)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, help="of each contender (default: 3 times the full batch's)"
    )
    parser.add_argument(
        "--epochs", type=int, default=MOST_EPOCHS,
        help="upper bound of those of the full batch (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=float, help="GiB of each contender, in a process of its own"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="for a machine with other work"
    )
    args = parser.parse_args()
    if args.processor_time:
        time.perf_counter = time.process_time

    get_data = partial(read_graph, args.root)
    cases = load(args.name).get("cases", {})
    for case in args.cases:
        runs = cases.setdefault(f"{case}:seed {args.seed}", {})
        header = "graph, model, norm, lr, seed|contender|to the full batch's best less .5"
        header += "|with evaluation|over the full batch's|steps (over the full batch's)"
        header += "|best validation, %|its test, %|last ten, %|epochs|end|peak"
        given = case, get_data, args.seed, runs, args.contenders, args.seconds, None, args.epochs
        for _ in chain(measure(*given, args.memory), [None]):
            lines = [line for each, done in cases.items() for line in rows_of(each, done)]
            save(args.name, {"cases": cases}, markdown(header.split("|"), lines))


if __name__ == "__main__":
    main()
