"""Accuracy without the graph, and without features: an MLP, and label propagation.

    python benchmarks/baselines.py --root data

A graph neural network is worth its edges where it beats both. Nodes are split as in
``time_to_accuracy.py``. The MLP has the width, depth, dropout and norm of its models and is trained
for as long as its validation score rises; label propagation takes the number of steps and the
weight of its neighbours that are best on the validation nodes.
"""

from __future__ import annotations

import copy
import itertools
import statistics

import torch
from common import load, make_parser, markdown, save
from time_to_accuracy import FOLDERS, LAYERS, read_graph
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import MLP, LabelPropagation

GRAPHS = ("AmazonComputers", "FacebookPagePage", "CoauthorPhysics", *FOLDERS)
STEPS, ALPHAS = (1, 2, 5, 10, 50), (0.5, 0.9, 0.99)
RATE, MOST_EPOCHS, PATIENCE = 0.005, 1000, 60
SPLITS = ("val", "test")

Scores = tuple[float, float]  # Of the validation and the test nodes.


def accuracies(out: torch.Tensor, data: Data) -> Scores:
    """Return the shares of validation and test nodes whose highest output is right."""
    right = out.argmax(dim=1) == data.y.view(-1)
    val, test = (float(right[data[f"{split}_mask"]].double().mean()) for split in SPLITS)
    return val, test


def train_mlp(data: Data, seed: int) -> Scores:
    """Train an MLP on all training nodes at once; return the scores of its best epoch."""
    torch.manual_seed(seed)
    widths = data.num_features, 128, int(data.y.max()) + 1
    net = MLP(in_channels=widths[0], hidden_channels=widths[1], out_channels=widths[2],
              num_layers=LAYERS, dropout=0.5, norm="batch_norm")  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    x = data.x if data.x.layout == torch.strided else data.x.to_dense()
    mask, y = data.train_mask, data.y.view(-1)
    best, last = (0.0, 0.0), 0
    for epoch in range(MOST_EPOCHS):
        net.train()
        optimizer.zero_grad()
        cross_entropy(net(x[mask]), y[mask]).backward()
        optimizer.step()
        with torch.no_grad():
            scores = accuracies(net.eval()(x), data)
        if scores[0] > best[0]:
            best, last = scores, epoch
        if epoch - last >= PATIENCE:
            break
    return best


def propagate_labels(data: Data) -> Scores:
    """Propagate the labels of the training nodes; return the scores of the best settings."""
    labelled = copy.copy(data)
    labelled.y = data.y.view(-1).clamp(min=0)  # Unknown ones are negative, and in no mask.

    def scores(steps: int, alpha: float) -> Scores:
        propagation = LabelPropagation(steps, alpha)
        return accuracies(propagation(labelled.y, data.edge_index, data.train_mask), data)

    return max(itertools.starmap(scores, itertools.product(STEPS, ALPHAS)))


def main() -> None:
    parser = make_parser(__doc__, name="baselines")
    parser.add_argument("--graphs", nargs="*", default=GRAPHS)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    graphs = load(args.name).get("graphs", {})
    for name in args.graphs:
        data = read_graph(args.root, name)
        runs = [train_mlp(data, seed) for seed in range(args.seeds)]
        graphs[name] = {"mlp": runs, "propagation": propagate_labels(data)}
        rows = [
            [
                graph, f"{100 * statistics.mean(test for _, test in found['mlp']):.1f}",
                f"{100 * found['propagation'][1]:.1f}",
            ]
            for graph, found in graphs.items()
        ]  # fmt: skip
        header = ["graph", f"MLP, test %, mean of {args.seeds} seeds", "label propagation, test %"]
        save(args.name, {"graphs": graphs, "seeds": args.seeds}, markdown(header, rows))


if __name__ == "__main__":
    main()
