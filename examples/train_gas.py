"""Trains a graph neural network with historical embeddings and reports how it went.

    python examples/train_gas.py                                   # a generated graph, no network
    python examples/train_gas.py --dataset Cora --root data --runs 10
    python examples/train_gas.py --dataset my_graph.npz --num-parts 100 --batch-size 10

Writes ``metrics.json`` and ``curve.png`` into ``--out``. Settings that are not given are the
published ones for the data set, where there are some.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from tqdm import tqdm

import gas
from gas.datasets import dataset_names, get_data
from gas.history.codec import NAMES as CODECS
from gas.history.engine import MODES
from gas.history.tiers import TIERS
from gas.training import FullBatch, Preset, Run, fit, preset, train_epoch
from gas.training.report import (
    EventWriter,
    machine,
    metrics,
    peak_rss_bytes,
    plot_curves,
    reset_peak_rss,
    write_json,
)

MODELS = {"gcn": gas.models.GCN}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=f"data sets: {', '.join(dataset_names())}; planted:NUM_NODES; a .pt or .npz file",
    )
    parser.add_argument("--dataset", default="planted:20000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--model", default="gcn", choices=sorted(MODELS))
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--hidden-channels", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--num-parts", type=int)
    parser.add_argument("--batch-size", type=int, help="parts per mini-batch")
    parser.add_argument("--partition", default="metis", choices=gas.partition.METHODS)
    parser.add_argument("--layout", default="csr", choices=gas.subgraph.LAYOUTS)
    parser.add_argument("--store", default=None, choices=TIERS, help="of histories")
    parser.add_argument("--dtype", default="float32", choices=CODECS, help="of stored histories")
    parser.add_argument("--path", type=Path, help="folder of --store disk (a temporary one)")
    parser.add_argument("--io", default="concurrent", choices=MODES)
    parser.add_argument("--prefetch", action="store_true", help="start pulls a batch ahead")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--full-batch", action="store_true", help="train without mini-batches")
    parser.add_argument(
        "--eval",
        default="auto",
        choices=("auto", "full", "layerwise"),
        help="how to evaluate; auto is full batch up to 100,000 nodes, and with --full-batch",
    )
    parser.add_argument(
        "--no-refresh", action="store_true", help="full-batch evaluation leaves histories alone"
    )
    parser.add_argument("--no-check", action="store_true", help="accept NaN and infinite features")
    parser.add_argument("--tensorboard", action="store_true", help="write events into --out")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder (%(default)s)")
    args = parser.parse_args()
    for name in ("runs", "epochs", "num_layers", "hidden_channels", "num_parts", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            parser.error(f"argument --{option} is {value}, expected at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device is cuda, but PyTorch sees no CUDA device: use cpu")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out is {args.out}, which is a file: name a folder")
    return args


def settings_of(args: argparse.Namespace, num_nodes: int) -> Preset:
    """The published settings with what the command line says instead."""
    base = preset(args.model, args.dataset)
    names = [field.name for field in dataclasses.fields(Preset)]
    given = {name: getattr(args, name, None) for name in names}
    base = dataclasses.replace(base, **{k: v for k, v in given.items() if v is not None})
    num_parts, batch_size = base.parts_for(num_nodes)
    return dataclasses.replace(base, num_parts=num_parts, batch_size=min(batch_size, num_parts))


@dataclasses.dataclass
class Graph:
    """The graph in the forms that training and evaluation take it."""

    data: Data  # Permuted, on the CPU.
    loader: gas.SubgraphLoader | None  # Mini-batches, unless it is trained as a whole.
    inference: gas.EvalSubgraphLoader | None  # Mini-batches to evaluate layer by layer ...
    whole: FullBatch | None  # ... or the graph as one batch.
    in_channels: int
    out_channels: int


def load(args: argparse.Namespace, device: str) -> tuple[Graph, Preset]:
    data, in_channels, out_channels = get_data(args.root, args.dataset, check=not args.no_check)
    num_nodes = data.num_nodes
    settings = settings_of(args, num_nodes)
    data = T.GCNNorm()(data)  # Of the whole graph, before it is cut into parts.
    full = args.full_batch or args.eval == "full"
    full = full or (args.eval == "auto" and num_nodes <= 100_000)
    loader = inference = None
    if not args.full_batch:
        perm, ptr = gas.metis(
            data.edge_index, settings.num_parts, num_nodes=num_nodes, method=args.partition
        )
        data = gas.permute(data, perm)
        print(gas.partition_report(data, ptr))
        options = {"layout": args.layout, "log": False}
        loader = gas.SubgraphLoader(data, ptr, settings.batch_size, shuffle=True, **options)
        if not full:
            inference = gas.EvalSubgraphLoader(data, ptr, settings.batch_size, **options)
    print(data)
    whole = FullBatch(data, device) if full else None
    graph = Graph(data, loader, inference, whole, in_channels, out_channels)
    return graph, settings


def make_model(
    args: argparse.Namespace, settings: Preset, graph: Graph, device: str
) -> gas.ScalableGNN:
    return MODELS[args.model](
        graph.data.num_nodes,
        graph.in_channels,
        settings.hidden_channels,
        graph.out_channels,
        settings.num_layers,
        dropout=settings.dropout,
        drop_input=settings.drop_input,
        batch_norm=settings.batch_norm,
        residual=settings.residual,
        linear=settings.linear,
        device=device if args.store is None else None,
        dtype=args.dtype,
        store=args.store,
        path=args.path,
        io=args.io,
        prefetch=int(args.prefetch),
    ).to(device)


def run_once(
    number: int,
    args: argparse.Namespace,
    settings: Preset,
    graph: Graph,
    device: str,
    on_epoch: Callable[[Run], None],
) -> Run:
    """Trains one model from its seed and evaluates it after every epoch."""
    torch.manual_seed(args.seed + number)
    reset_peak_rss()
    model = make_model(args, settings, graph, device)
    groups = [
        (model.reg_modules, settings.reg_weight_decay),
        (model.nonreg_modules, settings.nonreg_weight_decay),
    ]
    optimizer = torch.optim.Adam(
        [{"params": module.parameters(), "weight_decay": decay} for module, decay in groups],
        lr=settings.lr,
    )

    def evaluate(model: gas.ScalableGNN, fill: bool = not args.no_refresh) -> torch.Tensor:
        if graph.whole is None:
            return model(loader=graph.inference)
        return graph.whole(model, fill=fill and not args.full_batch)

    def epoch() -> float:
        batches = graph.whole.batches() if args.full_batch else graph.loader
        if args.prefetch:
            batches = gas.PrefetchLoader(batches, model)
        return train_epoch(model, batches, optimizer, number, settings.grad_norm, args.full_batch)

    model.eval()
    with torch.no_grad():
        evaluate(model, fill=True)  # So that the first epoch reads real embeddings.
    run = fit(model, graph.data, epoch, evaluate, settings.epochs, number, on_epoch)
    run.peak_rss_bytes = peak_rss_bytes()
    run.history_bytes = sum(history.store.nbytes for history in model.histories)
    model.close()
    return run


def main() -> None:
    args = parse_args()
    importlib.import_module("matplotlib")  # For the plot; missing, it is better missed now.
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    graph, settings = load(args, device)
    args.out.mkdir(parents=True, exist_ok=True)  # What can fail should fail before training.

    runs: list[Run] = []
    with tqdm(total=args.runs * settings.epochs, unit="epoch", disable=None) as progress:
        try:
            for number in range(args.runs):
                folder = args.out / f"events/run{number}"
                events = EventWriter(folder) if args.tensorboard else None

                def on_epoch(run: Run, events: EventWriter | None = events) -> None:
                    best = run.best_epoch
                    progress.set_postfix_str(
                        f"loss {run.loss[-1]:.3f}, val {100 * run.val_acc[best]:.2f}, "
                        f"test {100 * run.test_acc[best]:.2f}"
                    )
                    progress.update()
                    if events is not None:
                        events.write(run)

                runs.append(run_once(number, args, settings, graph, device, on_epoch))
                if events is not None:
                    events.close()
        except KeyboardInterrupt:
            print("\nInterrupted: reporting the runs that ended.", file=sys.stderr)
    if runs:
        report(args, settings, graph, device, runs)
    if len(runs) < args.runs:
        sys.exit(130)


def report(
    args: argparse.Namespace, settings: Preset, graph: Graph, device: str, runs: list[Run]
) -> None:
    """Writes the files and prints the summary."""
    result = metrics(runs)
    how = "full batch" if args.full_batch else f"{settings.num_parts} parts"
    shape = f"{settings.num_layers}x{settings.hidden_channels}"
    title = f"{args.model} {shape} on {args.dataset}, {how}, {len(runs)} run{'s' * (len(runs) > 1)}"
    write_json(
        args.out / "metrics.json",
        {
            **result,
            "dataset": args.dataset,
            "model": args.model,
            "histories": {"store": args.store, "dtype": args.dtype, "io": args.io},
            "training": "full_batch" if args.full_batch else "histories",
            "settings": dataclasses.asdict(settings),
            "seed": args.seed,
            "device": device,
            "machine": machine(),
        },
    )
    plot_curves(args.out / "curve.png", runs, title)

    def percent(key: str) -> str:
        return f"{100 * result[key]['mean']:.2f} ± {100 * result[key]['std']:.2f} %"

    print(f"\n{title}")
    if result["final_loss"]["mean"] is None:
        print("  the loss is not finite: training diverged; try a smaller --lr")
    score = "accuracy" if graph.data.y.dim() == 1 else "micro-F1"  # With several labels per node.
    print(f"  {'test ' + score:<21}{percent('test_acc')}")
    print(f"  {'validation ' + score:<21}{percent('val_acc')}")
    print(f"  training epoch       {1000 * result['train_epoch_seconds']['mean']:.1f} ms")
    stored, moved = result["history_bytes"]["mean"], result["moved_bytes"]["mean"]
    print(
        f"  histories            {stored / 2**20:.1f} MiB, {moved / 2**20:.1f} MiB moved per epoch"
    )
    print(f"  peak memory          {result['peak_rss_bytes']['mean'] / 2**20:.0f} MiB resident")
    print(f"  written              {args.out}/metrics.json, {args.out}/curve.png")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"train_gas.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
