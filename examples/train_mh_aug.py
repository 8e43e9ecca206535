"""Trains a graph neural network on views of the graph that MH-Aug samples.

    python examples/train_mh_aug.py                                # a generated graph, no network
    python examples/train_mh_aug.py --dataset Cora --root data
    python examples/train_mh_aug.py --dataset Cora --root data --histories

It trains on the full batch, a graph of one part, or with histories, in mini-batches of some parts.
Prints the test accuracy at the best validation accuracy, and what the chain did. Settings are the
published ones of Cora (and of CiteSeer, for CiteSeer).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.augment import PUBLISHED, Statistics, mh_aug_loss
from gas.datasets import dataset_key, get_data
from gas.native import report_progress
from gas.training import FullBatch, Run, run_epochs, train_epoch

MODELS = {"gcn": gas.models.GCN, "sage": gas.models.GraphSAGE, "gat": gas.models.GAT}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--model", default="gcn", choices=MODELS)
    parser.add_argument("--histories", action="store_true", help="train in mini-batches")
    parser.add_argument("--num-parts", type=int, default=40, help="with --histories (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=10, help="parts per mini-batch")
    parser.add_argument("--undirected", action="store_true", help="drop both directions together")
    parser.add_argument("--num-steps", type=int, default=12, help="transitions per epoch")
    parser.add_argument("--teacher", action="store_true", help="the milder view is a teacher")
    parser.add_argument("--reference-size", type=int, help="temper to a graph of so many nodes")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--patience", type=int, default=200, help="(%(default)s epochs)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    for name in ("epochs", "patience", "num_parts", "batch_size"):
        if getattr(args, name) < 1:
            option, value = name.replace("_", "-"), getattr(args, name)
            parser.error(f"argument --{option} is {value}, expected at least 1")
    args.published = PUBLISHED.get(dataset_key(args.dataset), PUBLISHED["cora"])
    return args


def make_chain(args: argparse.Namespace, raw: Data) -> gas.MHAug:
    """Make a chain that moves on the raw graph: each view is normalised by its own degrees."""
    return gas.MHAug(
        Data(edge_index=raw.edge_index.to(args.device), num_nodes=raw.num_nodes),
        **args.published.chain,
        undirected=args.undirected,
        num_steps=args.num_steps,
        reference_size=args.reference_size,
    )


def make_model(args: argparse.Namespace, raw: Data, num_classes: int) -> gas.ScalableGNN:
    sizes = (8, 8, num_classes, 1) if args.model == "gat" else (64, num_classes)  # And heads.
    cls = MODELS[args.model]
    model = cls(raw.num_nodes, raw.num_features, *sizes, num_layers=2, dropout=0.5)
    return model.to(args.device)


def train(
    args: argparse.Namespace, data: Data, num_classes: int, augments: bool = True
) -> tuple[Run, Statistics]:
    """Train on views of the graph, or, if ``augments`` is false, on the graph alone."""
    torch.manual_seed(args.seed)
    perm, ptr = gas.metis(data.edge_index, args.num_parts if args.histories else 1, log=False)
    raw = gas.permute(data, perm, log=False)
    chain, model = make_chain(args, raw), make_model(args, raw, num_classes)
    loader = gas.SubgraphLoader(
        raw, ptr, args.batch_size, shuffle=True, log=False,
        layout="csr" if "cuda" in args.device else "fused",
        epoch_transform=chain if augments else None, graph_transform=model.transform,
    )  # fmt: skip
    whole = FullBatch(raw if model.transform is None else model.transform(raw), args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def view_loss(*outs_and_labels: Tensor) -> Tensor:
        teacher = chain.previous_is_milder if args.teacher else None
        return mh_aug_loss(*outs_and_labels, **args.published.loss, teacher_is_first=teacher)

    def epoch() -> float:
        return train_epoch(model, loader, optimizer, view_loss=view_loss)

    def evaluate(model: gas.ScalableGNN) -> Tensor:
        out = whole(model, fill=True)  # The histories are exact afterwards.
        if augments:
            chain.update_entropy(out)
        return out

    with torch.no_grad():
        whole(model.eval(), fill=True)  # So that the first epoch reads real embeddings.
    with report_progress("training", args.epochs) as ticker:

        def note(run: Run) -> None:
            ticker.done = len(run)

        run = run_epochs(
            model, raw, epoch, evaluate, args.epochs, on_epoch=note, patience=args.patience
        )
    return run, chain.statistics()


def main() -> None:
    args = parse_args()
    data, _, num_classes = get_data(args.root, args.dataset)
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"'--dataset' is {args.dataset}, expected one with one class per node")
    run, done = train(args, data, num_classes)
    best = run.best_epoch
    how = f"histories, {args.num_parts} parts" if args.histories else "full batch"
    print(f"{args.model} on {args.dataset}, MH-Aug, {how}, {len(run)} epochs")
    print(f"  test accuracy        {100 * run.test_acc[best]:.2f} %")
    print(f"  validation accuracy  {100 * run.val_acc[best]:.2f} %")
    print(f"  transitions          {done.steps}, {100 * done.acceptance_rate:.1f} % accepted")
    print(f"  mean dropped edges   {done.mean_edge_drop:.3f}")
    print(f"  mean masked nodes    {done.mean_node_drop:.3f}")
    print(f"  distinct states      {done.distinct_states}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError, MemoryError) as error:
        sys.exit(f"train_mh_aug.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
