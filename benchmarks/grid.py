"""Histories against our own full batch: graphs, models, norms and learning rates.

    python benchmarks/grid.py --root data
    python benchmarks/grid.py --root data --graphs AmazonComputers --models SAGE --norms batch

A cell is a graph, a model of PyG (3 layers, 128 channels, dropout .5) and a norm. Our own full
batch is trained at every learning rate, until its validation score has not risen for 60 epochs. Let
B be the best of these scores, and t the seconds to it. Histories then get ``3 t`` seconds at every
rate, by ``gas.fit`` with its defaults, with the parts that ``gas.plan`` prefers among histories;
on smaller graphs, its plan is a full batch. (docs/convergence.md says which runs had a warm-up.)
What counts is whether they reach B less .5 points (without a norm, B less 1.5), and after how many
seconds. Finished runs are saved, and skipped by a later call.

With ``--processor-time`` a second is one of the process's processor time: for one thread on a
machine that has other work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from common import load, make_parser, markdown, save
from time_to_accuracy import (
    BELOW,
    FULL,
    MODELS,
    NORMS,
    Way,
    best_of,
    first_above,
    make_net,
    measure,
    read_graph,
)

import gas

GRAPHS = (
    "AmazonComputers", "FacebookPagePage", "Cornell5", "CoauthorPhysics", "WordNet",
    "planted:200000",
)  # fmt: skip
RATES = ("0.001", "0.003", "0.01")
HISTORIES = "auto"  # Their name in the results.
CURVES = ("val", "test", "loss", "seconds")
GOALS = {"batch": 0.005, "none": 0.015}  # How much less than the full batch's best is enough.
HEADER = (
    "graph, model, norm",
    "full batch: best validation, % (its test)", "at the rate of", "seconds to it",
    "seconds to it less .5",
    "histories: best validation, % (its test)", "at the rate of", "parts / per batch",
    "seconds to the full batch's best less .5", "over the full batch's",
    "as good", "stopped as diverging, at",
)  # fmt: skip

Runs = dict[str, dict[str, Any]]  # Of a case, by contender.


def shorten(cases: dict[str, Runs]) -> None:
    """Remove the curves that no table needs, and round the others."""
    for runs in cases.values():
        for contender, run in runs.items():
            kept = {key: run[key] for key in ("error", "steps", "parts")}
            curves = {key: [round(each, 5) for each in run[key]] for key in CURVES}
            runs[contender] = {**curves, **kept}


def best_rate(cases: dict[str, Runs], cell: str, contender: str) -> str:
    """Return the learning rate at which a contender has the best validation score."""
    return max(RATES, key=lambda rate: max(cases[f"{cell}:{rate}"][contender]["val"]))


def run_cell(cases: dict[str, Runs], root: str, cell: str) -> Iterator[None]:
    """Run what is missing of a cell, and yield after each run."""
    at = {rate: cases.setdefault(f"{cell}:{rate}", {}) for rate in RATES}

    get_data = partial(read_graph, root)
    for rate, runs in at.items():
        if FULL not in runs:
            yield from measure(f"{cell}:{rate}", get_data, 0, runs, [])
    if is_done(cases, cell):
        return
    whole = at[best_rate(cases, cell, FULL)][FULL]
    seconds = 3 * whole["seconds"][best_of(whole)]
    name, kind, norm = cell.rsplit(":", 2)
    data = get_data(name)
    plan = gas.plan(data, gas.to_scalable(make_net(data, kind, norm, 0), data), log=False)
    others = [one for one in plan.candidates if one.steps > 1]
    best = min(others, key=lambda one: one.relative_seconds)
    ways: dict[str, Way] = {HISTORIES: (best.num_parts, best.batch_size, {})}
    for rate, runs in at.items():
        yield from measure(f"{cell}:{rate}", get_data, 0, runs, [HISTORIES], seconds, ways)
    yield


def is_done(cases: dict[str, Runs], cell: str) -> bool:
    """Return whether no run of a cell is missing."""
    return all(HISTORIES in cases.get(f"{cell}:{rate}", {}) for rate in RATES)


def row_of(cases: dict[str, Runs], cell: str) -> tuple[list[str], bool, float]:
    """Return a cell's line, whether histories are as good, and their relative seconds."""
    rates = {each: best_rate(cases, cell, each) for each in (FULL, HISTORIES)}
    full, ours = (cases[f"{cell}:{rate}"][each] for each, rate in rates.items())
    top = best_of(full)
    best = full["val"][top]
    whole, epoch = (first_above(run, best - BELOW) for run in (full, ours))
    assert whole is not None
    norm = cell.rsplit(":", 1)[1]
    is_good = max(ours["val"]) >= best - GOALS[norm]
    ratio = math.inf if epoch is None else ours["seconds"][epoch] / full["seconds"][whole]
    stopped = [rate for rate in RATES if cases[f"{cell}:{rate}"][HISTORIES]["error"]]
    return [
        " ".join(cell.rsplit(":", 2)),
        f"{100 * best:.1f} ({100 * full['test'][top]:.1f})", rates[FULL],
        f"{full['seconds'][top]:.1f}", f"{full['seconds'][whole]:.1f}",
        f"{100 * max(ours['val']):.1f} ({100 * ours['test'][best_of(ours)]:.1f})",
        rates[HISTORIES], ours["parts"],
        "not reached" if epoch is None else f"{ours['seconds'][epoch]:.1f}",
        "" if epoch is None else f"{ratio:.2f}",
        "yes" if is_good else "no", ", ".join(stopped),
    ], is_good, ratio  # fmt: skip


def table(cases: dict[str, Runs]) -> str:
    """Return the finished cells as a table, and what they say together."""
    cells = dict.fromkeys(key.rsplit(":", 1)[0] for key in cases)
    found = {cell: row_of(cases, cell) for cell in cells if is_done(cases, cell)}
    said = []
    for norm, below in GOALS.items():
        good = [each[1] for cell, each in found.items() if cell.endswith(norm)]
        name = {"batch": "BatchNorm", "none": "No norm"}[norm]
        if good:
            said.append(f"{name}, the best less {100 * below:g}: {sum(good)} of {len(good)} cells.")
    ratios = [each[2] for each in found.values() if each[2] < math.inf]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        said.append(
            "Seconds to the full batch's best less .5, over the full batch's: geometric mean of "
            f"the {len(ratios)} of {len(found)} cells that reach it {mean:.2f}, "
            f"at most {max(ratios):.2f}."
        )
    return markdown(HEADER, [each[0] for each in found.values()]) + "\n\n" + " ".join(said)


def main() -> None:
    parser = make_parser(__doc__, name="grid")
    parser.add_argument("--graphs", nargs="*", default=GRAPHS)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--norms", nargs="*", default=list(NORMS), choices=NORMS)
    parser.add_argument(
        "--processor-time", action="store_true", help="for a machine with other work"
    )
    args = parser.parse_args()
    if args.processor_time:
        time.perf_counter = time.process_time
    cases: dict[str, Runs] = load(args.name).get("cases", {})
    for graph in args.graphs:
        for kind in args.models:
            for norm in args.norms:
                for _ in run_cell(cases, args.root, f"{graph}:{kind}:{norm}"):
                    shorten(cases)
                    save(args.name, {"cases": cases}, table(cases))


if __name__ == "__main__":
    main()
