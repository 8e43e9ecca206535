"""Error of stored rows, by layer and epoch of training, with BatchNorm and without a norm.

    python benchmarks/staleness.py --root data

A GraphSAGE of PyG (3 layers, 128 channels) is trained by ``gas.fit`` on 512 parts, 64 per batch, at
a learning rate of .005. After each epoch, the rows of each history are compared with rows that are
computed of the whole graph with the weights of now: ``|h - h*| / |h*|``, Frobenius norms. There is
no dropout, whose noise stored rows would have, too. Rows that were computed with the statistics of
a batch differ even if the weights don't change: three epochs at a learning rate of 0 tell how much.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import make_parser, markdown, save
from time_to_accuracy import LAYERS, NORMS, read_graph
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.history import relative_error
from gas.training import Run


def measure(
    data: Data, norm: str, lr: float, num_parts: int, batch_size: int, epochs: int, seed: int
) -> dict[str, Any]:
    """Train a model, and return its scores and its histories' errors after each epoch."""
    torch.manual_seed(seed)
    num_classes = int(data.y.max()) + 1
    net = GraphSAGE(data.num_features, 128, LAYERS, num_classes, norm=NORMS[norm])
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_parts, model=model, log=False)
    exact = model.for_graph(graph.num_nodes)
    errors = list[list[float]]()

    def compare(_: Run) -> None:
        with torch.random.fork_rng():  # Training goes on as without the comparison.
            exact.train().refresh(graph, batch_size, log=False)
        pairs = zip(model.histories, exact.histories, strict=True)
        errors.append([relative_error(stored.emb, true.emb) for stored, true in pairs])

    run = gas.fit(  # Averages are only evaluated: without them, the model has the weights of now.
        model, graph, torch.optim.Adam(model.parameters(), lr=lr), epochs,
        batch_size=batch_size, average_weights=False, keep_best=False, log=False, on_epoch=compare,
    )  # fmt: skip
    return {"errors": errors, "age": run.layer_age, "drift": run.drift, "val": run.val_acc}


def rows_of(runs: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table: errors after some epochs, and with fixed weights."""
    rows = []
    for norm, run in runs.items():
        for layer, errors in enumerate(zip(*run["errors"], strict=True), 1):
            shown = [errors[epoch - 1] for epoch in (1, 5, 10, 20, 40) if epoch <= len(errors)]
            fixed = run["fixed"]["errors"][-1][layer - 1]
            cells = [*shown, statistics.median(errors), max(errors), fixed]
            rows.append([norm, str(layer), *(f"{error:.3f}" for error in cells)])
    return rows


def main() -> None:
    parser = make_parser(__doc__, name="staleness")
    parser.add_argument("--graph", default="AmazonComputers")
    parser.add_argument("--parts", type=int, nargs=2, default=(512, 64), help="all, and per batch")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data, runs = read_graph(args.root, args.graph), {}
    for norm in NORMS:
        runs[norm] = measure(data, norm, 0.005, *args.parts, args.epochs, args.seed)
        runs[norm]["fixed"] = measure(data, norm, 0.0, *args.parts, 3, args.seed)
    epochs = [f"epoch {epoch}" for epoch in (1, 5, 10, 20, 40) if epoch <= args.epochs]
    table = markdown(
        ["norm", "layer", *epochs, "median", "largest", "weights fixed"], rows_of(runs)
    )
    save(args.name, {"graph": args.graph, "runs": runs}, table)


if __name__ == "__main__":
    main()
