"""Epochs of some parts against epochs of all: their time, and the accuracy after equal time.

    python benchmarks/chosen_parts.py --root data
    python benchmarks/chosen_parts.py --root data --seeds 1 --epochs 2 --dataset planted:2000

Few nodes are labelled: anywhere in the graph, or in the parts of a tenth of it alone. Contenders
train in turn, an epoch each, until each has had the time that ``--epochs`` epochs of all parts take
the first of them. Time is the process's, evaluation aside; every seed draws other labelled nodes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import make_parser, markdown, save
from torch_geometric.data import Data

import gas
from gas.loader import PartSampler
from gas.training import train_epoch

WAYS: dict[str, dict[str, Any] | None] = {
    "all parts": None,
    "by labels": {},
    "by labels, others every 10": {"every": 10},
    "by loss, half, others every 10": {"by": "loss", "share": 0.5, "every": 10},
    "by staleness, half": {"by": "staleness", "share": 0.5},
}
CASES = (  # Where labelled nodes are, the number of parts, and parts per batch.
    ("anywhere", 64, 8),
    ("anywhere", 512, 64),
    ("in a tenth of the parts", 64, 8),
)
AROUND = "around the labelled nodes"


def labelled(graph: Data, number: int, where: str, seed: int) -> torch.Tensor:
    """Return a mask of some nodes, of shape ``[N]``."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.ones(graph.num_nodes, dtype=torch.bool)
    if where != "anywhere":
        num_parts = graph.parts.numel() - 1
        chosen = torch.randperm(num_parts, generator=generator)[: max(1, num_parts // 10)]
        part = torch.repeat_interleave(graph.parts.diff())
        some = torch.isin(part, chosen)
    rows = some.nonzero().view(-1)
    rows = rows[torch.randperm(rows.numel(), generator=generator)[:number]]
    mask = torch.zeros(graph.num_nodes, dtype=torch.bool)
    mask[rows] = True
    return mask


class Contender:
    """A way to train, with a model of its own."""

    def __init__(self, graph: Data, batch_size: int, out: int, way: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.graph, self.rows = graph, graph.train_mask.nonzero().view(-1)
        self.model = gas.models.GraphSAGE(
            graph.num_nodes, graph.x.size(1), 64, out, num_layers=3, dropout=0.3
        )
        # Evaluation has histories of its own: it would refresh those of the training.
        self.twin = self.model.for_graph(graph.num_nodes)
        options = WAYS.get(way)
        sampler = None if options is None else PartSampler(graph, **options)
        self.loader = gas.SubgraphLoader(
            graph, batch_size=batch_size, sampler=sampler, shuffle=sampler is None, log=False
        )
        self.batches: Any = self.loader
        if way == AROUND:
            self.batches = [self.loader.cut_nodes(self.rows)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.model.predict(graph, batch_size=batch_size)  # Fills the histories.
        self.seconds: list[float] = []

    def epoch(self) -> None:
        start = time.process_time()
        train_epoch(self.model, self.batches, self.optimizer)
        self.seconds.append(time.process_time() - start)

    def result(self) -> dict[str, float]:
        out = self.twin.predict(self.graph, batch_size=8)[self.graph.perm]
        right = out.argmax(dim=1) == self.graph.y
        ages = [each.mean_age / len(self.batches) for each in self.model.staleness()]
        return {
            "accuracy": float(right[~self.graph.train_mask].float().mean()),
            "epoch_seconds": statistics.median(self.seconds),
            "epochs": len(self.seconds),
            "age": statistics.fmean(ages),
        }


def run(
    graph: Data, case: tuple[str, int, int], out: int, number: int, seed: int, epochs: int
) -> Any:
    """Train all contenders for the same time."""
    where, _, batch_size = case
    graph.train_mask = labelled(graph, number, where, seed)
    ways = [*WAYS, AROUND]
    contenders = {way: Contender(graph, batch_size, out, way, seed) for way in ways}
    whole = contenders["all parts"]
    for contender in contenders.values():
        contender.epoch()  # Which draws up memory, and makes transposes.
        contender.seconds.clear()
    whole.epoch()
    budget = epochs * whole.seconds[0]
    while left := [each for each in contenders.values() if sum(each.seconds) < budget]:
        for contender in left:
            contender.epoch()
    return {way: contender.result() for way, contender in contenders.items()}


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """Return a row for each contender, of medians over seeds."""
    rows, runs = [], found["runs"]
    where, num_parts, batch_size = found["case"]
    for way in runs[0]:
        middle = {k: statistics.median(r[way][k] for r in runs) for k in runs[0][way]}
        share = [r[way]["epoch_seconds"] / r["all parts"]["epoch_seconds"] for r in runs]
        more = [r[way]["accuracy"] - r["all parts"]["accuracy"] for r in runs]
        better = f"{100 * statistics.median(more):+.1f} ({sum(m > 0 for m in more)} of {len(more)})"
        rows.append([
            f"{found['labelled']} {where}, {num_parts} / {batch_size}", way,
            f"{1000 * middle['epoch_seconds']:.0f} ms", f"{statistics.median(share):.2f}x",
            f"{middle['epochs']:.0f}", f"{middle['age']:.1f}", f"{100 * middle['accuracy']:.1f}",
            "" if way == "all parts" else better,
        ])  # fmt: skip
    return rows


def table(content: dict[str, Any]) -> str:
    """Return all rows as Markdown."""
    header = "labelled, parts / per batch|parts of an epoch|epoch|of all's|epochs|mean age, epochs"
    header += "|accuracy after equal time|over all parts', by seed (seeds that gain)"
    return markdown(header.split("|"), [r for each in content["found"] for r in rows_of(each)])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="planted:20000")
    parser.add_argument("--labelled", type=float, default=0.01, help="fraction of all nodes")
    parser.add_argument("--epochs", type=int, default=15, help="of all parts, for their time")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    data, _, out = gas.get_data(args.root, args.dataset)
    number = max(1, round(args.labelled * data.num_nodes))
    found = []
    for case in CASES:
        graph = gas.cluster(data, min(case[1], data.num_nodes // 8), log=False)
        runs = [run(graph, case, out, number, s, args.epochs) for s in range(args.seeds)]
        found.append({"case": case, "labelled": number, "runs": runs})
        print(*rows_of(found[-1]), sep="\n", flush=True)
    content = {"dataset": args.dataset, "epochs": args.epochs, "found": found}
    save("chosen_parts", content, table(content))


if __name__ == "__main__":
    main()
