"""Trainings of ``mh_aug_accuracy.py``: MH-Aug over several seeds, and ways to compare it with.

    python benchmarks/mh_aug_train.py                              # a generated graph, no network
    python benchmarks/mh_aug_train.py --dataset Cora --root data --runs 10
    python benchmarks/mh_aug_train.py --dataset Cora --root data --runs 10 --vanilla
    python benchmarks/mh_aug_train.py --dataset Cora --root data --runs 10 --histories

It trains on the full batch, or with histories, in mini-batches of some parts of the graph. Prints
the test accuracy at the best validation accuracy, and what the chain did. Settings are the
published ones of Cora (and of CiteSeer, for CiteSeer).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from tqdm import tqdm

import gas
from gas.augment import PUBLISHED, mh_aug_loss
from gas.cli import summary
from gas.datasets import dataset_key, get_data
from gas.native import write_json
from gas.nn import dropout


class Net(torch.nn.Module):
    """Two convolutions, each after dropout; weights of edges follow from the view's degrees."""

    def __init__(self, model: str, in_channels: int, hidden: int, out_channels: int, p: float):
        super().__init__()
        heads = 8 if model == "gat" else 1
        make = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}[model]
        wide = {"heads": heads, "dropout": p} if model == "gat" else {}
        last = {"dropout": p} if model == "gat" else {}
        self.first = make(in_channels, hidden // heads, **wide)
        self.second = make(hidden, out_channels, **last)
        self.act = F.elu if model == "gat" else F.relu
        self.p = p

    def forward(self, data: Data) -> Tensor:
        x = dropout(data.x, self.p, self.training)
        x = self.act(self.first(x, data.edge_index))
        return self.second(dropout(x, self.p, self.training), data.edge_index)


class FullBatch:
    """Trains on the whole graph at once."""

    def __init__(self, args: argparse.Namespace, data: Data, num_classes: int) -> None:
        self.data = data
        size = (args.hidden_channels, num_classes)
        self.model = Net(args.model, data.num_features, *size, args.dropout).to(args.device)
        self.chain = make_chain(args, data)

    def losses(self, args: argparse.Namespace, train_mask: Tensor) -> Iterator[Tensor]:
        """Yield the losses of an epoch's steps: of one."""
        data, chain = self.data, self.chain
        if args.vanilla:
            yield F.cross_entropy(self.model(data)[train_mask], data.y[train_mask])
            return
        second = self.model(chain(data))
        first = self.model(chain.apply(data, previous=True))
        yield view_loss(args, chain, self.model(data), first, second, data.y, train_mask)

    def evaluate(self) -> Tensor:
        """Every node's output."""
        return self.model(self.data)


class Histories:
    """Trains on mini-batches of the graph's parts, with the halo from histories."""

    def __init__(self, args: argparse.Namespace, data: Data, num_classes: int) -> None:
        data = data.cpu()
        perm, ptr = gas.metis(data.edge_index, args.num_parts, num_nodes=data.num_nodes, log=False)
        raw = gas.permute(data, perm, log=False)
        heads = {"hidden_heads": 8, "out_heads": 1} if args.model == "gat" else {}
        cls = {"gcn": gas.models.GCN, "sage": gas.models.GraphSAGE, "gat": gas.models.GAT}[
            args.model
        ]
        self.model = cls(
            data.num_nodes,
            data.num_features,
            hidden_channels=args.hidden_channels // heads.get("hidden_heads", 1),
            out_channels=num_classes,
            num_layers=2,
            dropout=args.dropout,
            **heads,
        ).to(args.device)
        # The chain moves on the raw graph; each view is normalised by its own degrees.
        self.chain = make_chain(args, raw)
        self.loader = gas.SubgraphLoader(
            raw,
            ptr,
            args.batch_size,
            shuffle=True,
            log=False,
            layout="csr" if "cuda" in args.device else "fused",
            epoch_transform=None if args.vanilla else self.chain,
            graph_transform=cls.transform,
        )
        whole = raw if cls.transform is None else cls.transform(raw)
        self.whole = gas.training.FullBatch(whole, args.device)
        self.whole(self.model.eval(), fill=True)  # So that the first epoch reads real embeddings.
        self.data = whole

    def losses(self, args: argparse.Namespace, train_mask: Tensor) -> Iterator[Tensor]:
        """Yield the losses of an epoch's steps, one for each batch."""
        for batch in self.loader:
            own = batch.n_id[: batch.batch_size]
            data, mask = batch.to(args.device).data, train_mask[own.to(train_mask.device)]
            y = data.y[: batch.batch_size]
            if args.vanilla:
                out = self.model(data.x, data.adj_t, *batch[1:])
                if mask.any():
                    yield F.cross_entropy(out[mask], y[mask])
            elif mask.any():
                yield view_loss(args, self.chain, *self.model.views(batch), y, mask)

    def evaluate(self) -> Tensor:
        """Every node's output; the histories are exact afterwards."""
        return self.whole(self.model, fill=True)


def make_chain(args: argparse.Namespace, data: Data) -> gas.MHAug:
    return gas.MHAug(
        data,
        **args.published.chain,
        undirected=args.undirected,
        num_steps=0 if args.frozen else args.num_steps,
        reference_size=args.reference_size,
    )


def view_loss(args: argparse.Namespace, chain: gas.MHAug, *outs_and_labels: Tensor) -> Tensor:
    teacher = chain.previous_is_milder if args.teacher else None
    return mh_aug_loss(*outs_and_labels, kl=args.kl, h=args.h, teacher_is_first=teacher)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument("--vanilla", action="store_true", help="cross entropy on the graph alone")
    parser.add_argument("--frozen", action="store_true", help="the same loss; no transitions")
    parser.add_argument("--histories", action="store_true", help="train in mini-batches")
    parser.add_argument("--num-parts", type=int, default=40, help="with --histories (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=10, help="parts per mini-batch")
    parser.add_argument("--undirected", action="store_true", help="drop both directions together")
    parser.add_argument("--num-steps", type=int, default=12, help="transitions per epoch")
    parser.add_argument("--kl", type=float, help="weight of the divergence between both views")
    parser.add_argument("--h", type=float, default=0.5, help="weight of the entropy (%(default)s)")
    parser.add_argument("--teacher", action="store_true", help="the milder view is a teacher")
    parser.add_argument("--reference-size", type=int, help="temper to a graph of so many nodes")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--patience", type=int, default=200, help="(%(default)s epochs)")
    parser.add_argument("--hidden-channels", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the figures of all runs to this JSON file")
    args = parser.parse_args()
    for name in ("runs", "epochs", "patience", "hidden_channels", "num_parts", "batch_size"):
        if getattr(args, name) < 1:
            option, value = name.replace("_", "-"), getattr(args, name)
            parser.error(f"argument --{option} is {value}, expected at least 1")
    args.published = PUBLISHED.get(dataset_key(args.dataset), PUBLISHED["cora"])
    if args.kl is None:
        args.kl = args.published.loss["kl"]
    return args


def train(args: argparse.Namespace, data: Data, num_classes: int, seed: int) -> dict[str, float]:
    """One run: test accuracy at the best validation accuracy, and what the chain did."""
    torch.manual_seed(seed)
    training = (Histories if args.histories else FullBatch)(args, data.to(args.device), num_classes)
    model, chain, data = training.model, training.chain, training.data.to(args.device)
    masks = (data.train_mask, data.val_mask, data.test_mask)
    train_mask, val_mask, test_mask = (
        mask if mask.dim() == 1 else mask[:, seed % mask.size(1)] for mask in masks
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)

    best, test, since = -1.0, 0.0, 0
    for _ in tqdm(range(args.epochs), unit="epoch", leave=False, disable=None):
        model.train()
        for loss in training.losses(args, train_mask):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            out = training.evaluate()
        if not args.vanilla:
            chain.update_entropy(out)
        correct = out.argmax(dim=-1) == data.y
        val = float(correct[val_mask].float().mean())
        since += 1
        if val > best:
            best, test, since = val, float(correct[test_mask].float().mean()), 0
        if since >= args.patience:
            break
    return {"val": best, "test": test, **chain.statistics()._asdict()}


def main() -> None:
    args = parse_args()
    data, _, num_classes = get_data(args.root, args.dataset, split="all")
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"'--dataset' is {args.dataset}, expected one with one class per node")
    runs, start = [], time.perf_counter()
    for number in range(args.runs):
        run = train(args, data, num_classes, args.seed + number)
        runs.append(run)
        print(f"run {number}: validation {100 * run['val']:.2f} %, test {100 * run['test']:.2f} %")

    seconds = (time.perf_counter() - start) / args.runs
    of = {key: summary([run[key] for run in runs]) for key in runs[0]}
    test, val = of["test"], of["val"]
    how = "vanilla" if args.vanilla else "MH-Aug, frozen" if args.frozen else "MH-Aug"
    how += f", histories, {args.num_parts} parts" if args.histories else ""
    print(f"\n{args.model} on {args.dataset}, {how}, {args.runs} run{'s' * (args.runs > 1)}")
    print(f"  test accuracy        {100 * test['mean']:.2f} ± {100 * test['std']:.2f} %")
    print(f"  validation accuracy  {100 * val['mean']:.2f} %")
    if not (args.vanilla or args.frozen):
        print(f"  transitions          {of['steps']['mean']:.0f}")
        print(f"  accepted             {100 * of['acceptance_rate']['mean']:.1f} %")
        print(f"  mean dropped edges   {of['mean_edge_drop']['mean']:.3f}")
        print(f"  mean masked nodes    {of['mean_node_drop']['mean']:.3f}")
        print(f"  distinct states      {of['distinct_states']['mean']:.0f}")
    print(f"  seconds per run      {seconds:.1f}")
    if args.out is not None:
        write_json(args.out, of)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError, MemoryError) as error:
        sys.exit(f"mh_aug_train.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
