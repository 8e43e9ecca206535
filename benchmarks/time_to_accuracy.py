"""Seconds of training until a model is about as good as our own full batch gets.

    python benchmarks/time_to_accuracy.py --root data
    python benchmarks/time_to_accuracy.py --root data --cases AmazonComputers:SAGE:none:0.005

A case is a graph, a model of PyG (3 layers, 128 channels, dropout .5), a norm and a learning rate;
nodes are split 60/20/20 from seed 0. Our own full batch runs until its validation score has not
risen for 60 epochs. Histories then get three times the seconds that it took to its best. Seconds
are those of training epochs, without evaluation; the second number is with evaluation, which also
sets the statistics of norms. Every finished run is saved, and skipped by a later call.

Histories are trained by ``gas.fit`` as it is, on 512 parts, an eighth of the graph per step. Other
contenders change one of these.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from common import load, markdown, save
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gas
from gas.training import Run

MODELS = {"GCN": GCN, "SAGE": GraphSAGE, "GAT": GAT}
NORMS = {"none": None, "batch": "batch_norm"}
CASES = (
    "AmazonComputers:SAGE:batch:0.005",
    "AmazonComputers:GCN:batch:0.01",
    "AmazonComputers:SAGE:none:0.005",
    "AmazonComputers:GCN:none:0.003",
)
Way = tuple[int, int, dict[str, Any]]  # Parts, parts per batch, options of gas.fit.
CONTENDERS: dict[str, Way] = {
    "histories": (512, 64, {}),
    **{f"1/{share} of the graph per step": (512, 512 // share, {}) for share in (2, 4, 16, 32)},
    "64 parts": (64, 8, {}),
    "no clipping": (512, 64, {"grad_norm": None}),
    "stale rows as they are": (512, 64, {"correct_drift": False}),
    "weights of the last step": (512, 64, {"average_weights": False}),
}
FULL = "full batch"
FOLDERS = ("WordNet", "Cornell5")  # Graph folders below the root.
MOST_EPOCHS, PATIENCE = 300, 60
BELOW = 0.005  # The score that counts is this much below the best of the full batch.


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


def train(data: Data, net: torch.nn.Module, lr: float, way: Way, seconds: float) -> dict[str, Any]:
    """Train in one way for some seconds of training epochs, and return the curves."""
    num_parts, batch_size, options = way
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_parts, model=model, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    start, record, wall = time.perf_counter(), Run(), []

    def after_epoch(run: Run) -> None:
        nonlocal record
        record = run
        wall.append(time.perf_counter() - start)
        if sum(run.seconds) >= seconds:
            raise TimeIsUpError

    end = ""
    try:
        gas.fit(
            model, graph, optimizer, MOST_EPOCHS if num_parts == 1 else 100 * MOST_EPOCHS,
            batch_size=batch_size, patience=PATIENCE if num_parts == 1 else None,
            keep_best=False, log=False, on_epoch=after_epoch, **options,
        )  # fmt: skip
    except TimeIsUpError:
        pass
    except FloatingPointError as error:
        end = str(error)
    trained = torch.tensor(record.seconds).cumsum(0).tolist()
    return {
        "val": record.val_acc, "test": record.test_acc, "loss": record.loss,
        "drift": [each if math.isfinite(each) else None for each in record.drift],
        "seconds": trained, "wall": wall, "error": end, "steps": -(-num_parts // batch_size),
    }  # fmt: skip


def first_above(run: dict[str, Any], score: float) -> int | None:
    """Return the first epoch, from 0, whose validation score is at least ``score``."""
    return next((epoch for epoch, found in enumerate(run["val"]) if found >= score), None)


def measure(
    case: str,
    get_data: Callable[[str], Data],
    seed: int,
    runs: dict[str, Any],
    contenders: Iterable[str] = CONTENDERS,
) -> Iterator[None]:
    """Run the contenders of a case in turn that have no run yet, and yield after each."""
    name, kind, norm, lr = case.rsplit(":", 3)
    data = get_data(name)

    def start(way: Way, seconds: float) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = MODELS[kind](
            data.num_features, 128, 3, int(data.y.max()) + 1, dropout=0.5, norm=NORMS[norm]
        )
        return train(data, net, float(lr), way, seconds)

    if FULL not in runs:
        runs[FULL] = start((1, 1, {}), float("inf"))
        yield
    best = max(range(len(runs[FULL]["val"])), key=runs[FULL]["val"].__getitem__)
    for contender in contenders:
        if contender not in runs:
            runs[contender] = start(CONTENDERS[contender], 3 * runs[FULL]["seconds"][best])
            yield


def rows_of(case: str, runs: dict[str, Any]) -> list[list[object]]:
    """Return the lines of a case in the table."""
    best = max(runs[FULL]["val"])
    whole = first_above(runs[FULL], best - BELOW)
    rows: list[list[object]] = []
    for contender, run in runs.items():
        epoch, top = (
            first_above(run, best - BELOW),
            max(range(len(run["val"])), key=run["val"].__getitem__),
        )
        reached = ["not reached"] * 4
        if epoch is not None and whole is not None:
            seconds, of = run["seconds"][epoch], runs[FULL]["seconds"][whole]
            steps = (epoch + 1) * run["steps"]
            reached = [f"{seconds:.1f} s", f"{run['wall'][epoch]:.1f} s", f"{seconds / of:.2f}"]
            reached.append(f"{steps} ({steps / (whole + 1):.1f})")
        last = run["val"][-10:]
        rows.append([
            " ".join(case.rsplit(":", 4)), contender, *reached, f"{100 * run['val'][top]:.1f}",
            f"{100 * run['test'][top]:.1f}", f"{100 * min(last):.1f} to {100 * max(last):.1f}",
            f"{len(run['val'])}", "diverged" if run["error"] else "",
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--cases", nargs="*", default=CASES, help="graph:model:norm:lr")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="time_to_accuracy", help="of the results, or a path")
    args = parser.parse_args()

    def get_data(name: str) -> Data:
        if name in FOLDERS:
            data = gas.open_graph(Path(args.root) / name, log=False)
        else:
            data, _, _ = gas.get_data(args.root, name)
        set_masks(data)
        return data

    cases = load(args.name).get("cases", {})
    for case in args.cases:
        runs = cases.setdefault(f"{case}:seed {args.seed}", {})
        header = "graph, model, norm, lr, seed|contender|to the full batch's best less .5"
        header += "|with evaluation|over the full batch's|steps (over the full batch's)"
        header += "|best validation, %|its test, %|last ten, %|epochs|end"
        for _ in chain(measure(case, get_data, args.seed, runs, args.contenders), [None]):
            lines = [line for each, done in cases.items() for line in rows_of(each, done)]
            save(args.name, {"cases": cases}, markdown(header.split("|"), lines))


if __name__ == "__main__":
    main()
