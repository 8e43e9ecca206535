"""Accuracy of ``gas.plan``: predicted and measured memory and time, and its choice.

    python benchmarks/plan.py --root data

On each of four graphs, five ways to cut it are trained, each in a process of its own, as
``train_gas.py`` does: the peak of resident memory in training and the median time of an epoch are
next to what ``gas.plan`` predicted, which has run in another process. Then what it chooses within
two amounts of memory is trained as well, if it is none of the five, and compared with the fastest
of all that were measured to fit: without a limit, and within the median of the five peaks. All
make eight steps per epoch, or accumulate to as many.

Histories on disk aren't in it: pages of the file that the system keeps count as resident.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import make_parser, markdown, run_apart, save
from torch_geometric.data import Data
from tqdm import tqdm

import gas
from gas.cli import Experiment, Settings
from gas.datasets.planted import planted_partition
from gas.native.memory import human

UNLIMITED = "1TB"


@dataclass(frozen=True)
class Case:
    """A graph, a model, and ways to cut it: parts, parts per batch, how histories are stored."""

    dataset: str
    model: str
    num_layers: int
    hidden_channels: int
    ways: tuple[tuple[int, int, str], ...]

    @property
    def settings(self) -> Settings:
        return Settings.default(self.model).replace(
            num_layers=self.num_layers, hidden_channels=self.hidden_channels
        )

    def __str__(self) -> str:
        return f"{self.dataset}, {self.model} {self.num_layers}x{self.hidden_channels}"


FLOAT = "float32"
WAYS = ((8, 1, FLOAT), (32, 4, FLOAT), (64, 8, FLOAT), (64, 2, FLOAT), (64, 8, "bfloat16"))
CASES = (
    Case(
        "Cora", "gcn", 2, 64,
        ((8, 1, FLOAT), (16, 2, FLOAT), (16, 1, FLOAT), (8, 1, "bfloat16"), (16, 2, "bfloat16")),
    ),
    Case("FacebookPagePage", "gat", 2, 8, WAYS),
    Case("planted:200000", "gcn", 3, 128, WAYS),
    Case("dense:50000", "sage", 3, 128, WAYS),
)  # fmt: skip


def load(root: str, name: str) -> tuple[Data, int]:
    """Return a graph with masks, and the number of its classes; ``dense`` has 88 edges per node."""
    if not name.startswith("dense:"):
        data, _, out_channels = gas.get_data(root, name)
        return data, out_channels
    data = planted_partition(int(name.partition(":")[2]), avg_degree=88.0)
    masks = gas.datasets.gen_masks(data.y, 500, 500)
    data.train_mask, data.val_mask, data.test_mask = masks
    data.train_mask = ~(data.val_mask | data.test_mask)
    return data, 16


# One measurement, in a process of its own ---------------------------------------------------------


def predict(root: str, case: Case) -> list[dict[str, Any]]:
    """Return the predictions of every candidate."""
    found = []
    for dtype in (FLOAT, "bfloat16"):
        data, out_channels = load(root, case.dataset)
        experiment = Experiment(
            data, out_channels, case.model, case.settings, memory=UNLIMITED, dtype=dtype,
            keep_edges=False, log=False,
        )  # fmt: skip
        assert experiment.plan is not None
        found += [vars(one) for one in experiment.plan.candidates]
        del experiment, data
    return found


def train(root: str, case: Case, way: tuple[int, int, str], epochs: int) -> dict[str, Any]:
    """Return peak and median time of an epoch."""
    data, out_channels = load(root, case.dataset)
    parts, batch_size, dtype = way
    settings = case.settings.replace(num_parts=parts, batch_size=batch_size, epochs=epochs)
    experiment = Experiment(
        data, out_channels, case.model, settings, keep_edges=False, log=False, dtype=dtype,
        store="host",
    )  # fmt: skip
    del data
    run = experiment.run(seed=0, keep=True)
    return {"peak_bytes": run.peak_rss_bytes, "epoch_seconds": run.epoch_seconds}


# Tables -------------------------------------------------------------------------------------------


def key(one: dict[str, Any]) -> tuple[int, int, str]:
    return one["num_parts"], one["batch_size"], one["dtype"]


def look_at(args: argparse.Namespace, case: Case) -> tuple[list[dict[str, Any]], list[dict]]:
    """Return the sweep of a graph, and the plan's choice."""
    candidates = [one for one in run_apart(predict, args.root, case) if one["store"] == "host"]
    predicted = {key(one): one for one in candidates}
    measured: dict[tuple[int, int, str], dict[str, Any]] = {}

    def measure(way: tuple[int, int, str]) -> dict[str, Any]:
        if way not in measured:
            measured[way] = run_apart(train, args.root, case, way, args.epochs)
        return measured[way]

    for way in tqdm(case.ways, desc=str(case)):
        measure(way)
    sweep = [
        {"case": str(case), "way": way, "predicted": predicted[way], "measured": measured[way]}
        for way in case.ways
    ]
    chosen = []
    exact = [way for way in case.ways if way[2] == FLOAT]
    middle = statistics.median(measured[way]["peak_bytes"] for way in exact)
    for limit in (float("inf"), middle):
        fit = [x for x in candidates if x["dtype"] == FLOAT and x["peak_bytes"] <= limit]
        if not fit:
            chosen.append({"case": str(case), "limit": limit, "way": None})
            continue
        best = key(min(fit, key=lambda x: (x["epoch_seconds"], x["peak_bytes"])))
        seconds = measure(best)["epoch_seconds"]
        others = [w for w in exact if measured[w]["peak_bytes"] <= limit]
        least = min(measured[w]["epoch_seconds"] for w in others)
        chosen.append(
            {
                "case": str(case), "limit": limit if limit < float("inf") else None, "way": best,
                "peak_bytes": measured[best]["peak_bytes"], "over_best": seconds / least,
            }
        )  # fmt: skip
    return sweep, chosen


def sweep_row(one: dict[str, Any]) -> list[str]:
    parts, batch_size, dtype = one["way"]
    wanted, found = one["predicted"], one["measured"]
    cells = [one["case"], str(parts), str(batch_size), dtype]
    for name, show in (("peak_bytes", human), ("epoch_seconds", "{:.3g} s".format)):
        cells += [show(wanted[name]), show(found[name]), f"{wanted[name] / found[name] - 1:+.0%}"]
    return cells


def chosen_row(one: dict[str, Any]) -> list[str]:
    limit = "none" if one["limit"] is None else human(int(one["limit"]))
    if one["way"] is None:
        return [one["case"], limit, "nothing fits", "", ""]
    parts, batch_size, _ = one["way"]
    peak = human(int(one["peak_bytes"]))
    return [one["case"], limit, f"{parts} / {batch_size}", peak, f"{one['over_best']:.2f}x"]


def error(one: dict[str, Any], name: str) -> float:
    return abs(one["predicted"][name] / one["measured"][name] - 1)


def main() -> None:
    parser = make_parser(__doc__, name="plan")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--datasets", nargs="*", help="a part of the cases")
    args = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())

    sweep, chosen = [], []
    for case in CASES:
        if args.datasets is None or case.dataset in args.datasets:
            rows, choices = look_at(args, case)
            sweep += rows
            chosen += choices
    summary = []
    for name in ("peak_bytes", "epoch_seconds"):
        errors = [error(one, name) for one in sweep]
        summary.append([name, f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"])
    tables = [
        markdown(
            ["graph, model", "parts", "per batch", "histories", "peak, predicted", "measured",
             "error", "epoch, predicted", "measured", "error"],
            [sweep_row(one) for one in sweep],
        ),
        markdown(["error", "median", "largest"], summary),
        markdown(
            ["graph, model", "memory", "chosen: parts / per batch", "its peak",
             "its epoch over the fastest that fits"],
            [chosen_row(one) for one in chosen],
        ),
    ]  # fmt: skip
    save(args.name, {"epochs": args.epochs, "sweep": sweep, "chosen": chosen}, "\n\n".join(tables))


if __name__ == "__main__":
    main()
