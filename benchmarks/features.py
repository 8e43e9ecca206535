"""Accuracy, bytes, error and time of an epoch by how features are stored: ``gas.quantize``.

    python benchmarks/features.py --root data

The GCN of ``accuracy.py`` on Cora and FacebookPagePage, trained for fewer epochs from a few seeds,
with features as they are and in each codec; and two converted GINEConv layers on a generated graph
whose edges say more of a node's class than its own features do: there both ``x`` and ``edge_attr``
are encoded. Scores are of one thread, with which features as they are and in float32 give the same;
the model is selected by validation accuracy. The error is that of layer-wise inference
with the weights of a model that was trained on the features as they are, relative to its outputs.
Epochs alternate. ``--note`` is printed with the table, such as what else the machine did.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from common import make_parser, markdown, save, time_in_turn
from contenders import Case, Contender, Graph, make_gas, prepare, with_histories
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.cli import Experiment, Settings
from gas.history import relative_error

FILES = Path(__file__).resolve().parent
GRAPHS = {
    "Cora": (Case("Cora", 2, 16, 40, 10, 0.5), "paper_small/cora_gcn.yaml"),
    "FacebookPagePage": (
        Case("FacebookPagePage", 2, 64, 64, 8, 0.3),
        "other/facebookpagepage_gcn.yaml",
    ),
}
EDGES = Case("planted:5000", 2, 32, 20, 4, 0.0)
WAYS = {
    "as they are": None,
    "float32": ("float32", "host"),
    "bfloat16": ("bfloat16", "host"),
    "float16": ("float16", "host"),
    "int8": ("int8", "host"),
    "int8, disk": ("int8", "disk"),
}


def encoded(data: Data, way: tuple[str, str] | None) -> Data:
    """Return a graph with its features stored in a way."""
    out = copy.copy(data)
    for key in ("x", "edge_attr") if way is not None else ():
        if key in out:
            out[key] = gas.quantize(out[key], *way)
    return out


def stored_bytes(data: Data) -> int:
    found = [data[key] for key in ("x", "edge_attr") if key in data]
    return sum(x.store.nbytes if isinstance(x, gas.history.Encoded) else x.nbytes for x in found)


def inferred(model: gas.ScalableGNN, graph: Graph) -> Tensor:
    return model(loader=gas.EvalSubgraphLoader(graph.data, graph.ptr, layout="fused", log=False))


def experiment_scores(root: str, name: str, epochs: int, seeds: int) -> dict[str, list[float]]:
    """Return the test accuracies of the epochs selected by validation."""
    data, _, out_channels = gas.get_data(root, name, split="all")
    settings = Settings.load(FILES / GRAPHS[name][1])[0].replace(epochs=epochs)
    scores: dict[str, list[float]] = {}
    for way, how in WAYS.items():
        experiment = Experiment(encoded(data, how), out_channels, "gcn", settings, log=False)
        runs = [experiment.run(seed, seed) for seed in range(seeds)]
        scores[way] = [run.test_acc[run.best_epoch] for run in runs]
    return scores


class Net(torch.nn.Module):
    """Two layers of GINEConv."""

    def __init__(self, width: int, edge_width: int, hidden: int, out_channels: int) -> None:
        super().__init__()
        self.first = pyg.GINEConv(torch.nn.Linear(width, hidden), edge_dim=edge_width)
        self.last = pyg.GINEConv(torch.nn.Linear(hidden, out_channels), edge_dim=edge_width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def graph_with_edge_features() -> Graph:
    """Return a planted graph; each edge has a noisy mean of its target's class."""
    data, _, out_channels = gas.get_data("data", EDGES.dataset)
    random = torch.Generator().manual_seed(0)
    means = torch.randn(out_channels, 16, generator=random)
    noise = torch.randn(data.num_edges, 16, generator=random)
    data.edge_attr = means[data.y[data.edge_index[1]]] + 8 * noise
    perm, ptr = gas.metis(data.edge_index, EDGES.num_parts, num_nodes=data.num_nodes, log=False)
    data = gas.permute(data, perm, log=False)
    kept = {key: data[key] for key in ("x", "y", "edge_index", "edge_attr")}
    masks = {f"{part}_mask": data[f"{part}_mask"] for part in ("train", "val")}
    return Graph(Data(**kept, **masks, test_mask=data.test_mask), ptr, out_channels)


def make_converted(graph: Graph) -> Contender:
    net = Net(graph.data.num_features, 16, EDGES.hidden_channels, graph.out_channels)
    return with_histories(EDGES, graph, gas.to_scalable(net, graph.data))


def edge_scores(graphs: dict[str, Graph], epochs: int, seeds: int) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for way, graph in graphs.items():
        scores[way] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            contender = make_converted(graph)
            best = (-1.0, 0.0)
            for _ in range(epochs):
                contender.epoch()
                right = inferred(contender.model, graph).argmax(1) == graph.data.y
                val, test = (
                    float(right[graph.data[f"{part}_mask"]].float().mean())
                    for part in ("val", "test")
                )
                best = max(best, (val, test), key=lambda pair: pair[0])
            scores[way].append(best[1])
    return scores


def compare(
    graphs: dict[str, Graph], make: Callable[[Graph], Contender], repeats: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return errors of the outputs, and seconds of an epoch."""
    contenders = {}
    for way, graph in graphs.items():
        torch.manual_seed(0)
        contenders[way] = make(graph)
    times = time_in_turn({way: c.epoch for way, c in contenders.items()}, repeats, warm_up=2)
    trained = contenders["as they are"].model.eval()
    expected = inferred(trained, graphs["as they are"])
    errors = {way: relative_error(inferred(trained, g), expected) for way, g in graphs.items()}
    return errors, times


def main() -> None:
    parser = make_parser(__doc__, name="features")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--note", default="", help="printed with the table")
    args = parser.parse_args()

    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    threads = torch.get_num_threads()
    for name in (*GRAPHS, "edge features"):
        if name in GRAPHS:
            case = GRAPHS[name][0]
            first = prepare(args.root, case)
        else:
            case, first = EDGES, graph_with_edge_features()
        graphs = {way: first._replace(data=encoded(first.data, how)) for way, how in WAYS.items()}
        torch.set_num_threads(1)
        if name in GRAPHS:
            scores = experiment_scores(args.root, name, args.epochs, args.seeds)
            make: Callable[[Graph], Contender] = partial(make_gas, case)
        else:
            scores = edge_scores(graphs, args.epochs // 3, args.seeds)
            make = make_converted
        torch.set_num_threads(threads)
        errors, times = compare(graphs, make, args.repeats)
        results[name] = {}
        for way, graph in graphs.items():
            found = {
                "test_acc": scores[way],
                "bytes": stored_bytes(graph.data),
                "relative_error": errors[way],
                "epoch_seconds": times[way],
            }
            results[name][way] = found
            mean, sd = statistics.mean(scores[way]), statistics.pstdev(scores[way])
            rows.append(
                [
                    name if way == "as they are" else "",
                    way,
                    f"{100 * mean:.2f} ± {100 * sd:.2f}",
                    f"{found['bytes'] / 2**20:.2f} MiB",
                    f"{errors[way]:.1e}",
                    f"{1000 * times[way]['median']:.1f} ms",
                ]
            )
    header = ["graph", "features", "test accuracy, %", "features' bytes", "error", "epoch"]
    about = (
        f"{args.seeds} seeds, {args.epochs} epochs (edge features: {args.epochs // 3}). "
        f"Epochs: median of {args.repeats}. {args.note}"
    ).strip()
    content = {"seeds": args.seeds, "epochs": args.epochs, "note": args.note, "results": results}
    save(args.name, content, f"{markdown(header, rows)}\n\n{about}")


if __name__ == "__main__":
    main()
