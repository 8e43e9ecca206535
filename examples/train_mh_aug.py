"""Trains a graph neural network on views of the graph that MH-Aug samples, on the full batch.

    python examples/train_mh_aug.py                                # a generated graph, no network
    python examples/train_mh_aug.py --dataset Cora --root data --runs 10
    python examples/train_mh_aug.py --dataset Cora --root data --runs 10 --vanilla

Prints the test accuracy at the best validation accuracy, and what the chain did. Settings are the
published ones of Cora (and of CiteSeer, for CiteSeer).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from tqdm import tqdm

import gas
from gas.datasets import dataset_key, get_data
from gas.nn import dropout

# In the convention of the paper (Park et al., NeurIPS 2021).
CORA = {
    "mu_e": 0.3, "mu_v": 0.7, "sigma_delta_e": 0.1, "sigma_delta_v": 0.01, "a_e": 10, "b_e": 1,
    "a_v": 1, "b_v": 1, "lam1": 5, "lam2": 0.9999, "lam3": 1, "lam4": 0.999,
}  # fmt: skip
CITESEER = {
    "mu_e": 0.2, "mu_v": 0.5, "sigma_delta_e": 0.005, "sigma_delta_v": 0.1, "a_e": 5, "b_e": 1,
    "a_v": 10, "b_v": 0.1, "lam1": 1, "lam2": 0.9999, "lam3": 10, "lam4": 0.999,
}  # fmt: skip


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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument("--vanilla", action="store_true", help="cross entropy on the graph alone")
    parser.add_argument("--frozen", action="store_true", help="the same loss; no transitions")
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
    args = parser.parse_args()
    for name in ("runs", "epochs", "patience", "hidden_channels"):
        if getattr(args, name) < 1:
            option, value = name.replace("_", "-"), getattr(args, name)
            parser.error(f"argument --{option} is {value}, expected at least 1")
    args.citeseer = dataset_key(args.dataset) == "citeseer"
    if args.kl is None:
        args.kl = 0.2 if args.citeseer else 0.5
    return args


def train(args: argparse.Namespace, data: Data, num_classes: int, seed: int) -> dict[str, float]:
    """One run: test accuracy at the best validation accuracy, and what the chain did."""
    torch.manual_seed(seed)
    data = data.to(args.device)
    masks = (data.train_mask, data.val_mask, data.test_mask)
    train_mask, val_mask, test_mask = (
        mask if mask.dim() == 1 else mask[:, seed % mask.size(1)] for mask in masks
    )
    model = Net(args.model, data.num_features, args.hidden_channels, num_classes, args.dropout)
    model = model.to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    chain = gas.MHAug(
        data,
        **(CITESEER if args.citeseer else CORA),
        undirected=args.undirected,
        num_steps=0 if args.frozen else args.num_steps,
        reference_size=args.reference_size,
    )

    best, test, since = -1.0, 0.0, 0
    for _ in tqdm(range(args.epochs), unit="epoch", leave=False, disable=None):
        model.train()
        optimizer.zero_grad()
        if args.vanilla:
            loss = F.cross_entropy(model(data)[train_mask], data.y[train_mask])
        else:
            second = model(chain(data))
            first = model(chain.apply(data, previous=True))
            teacher = chain.previous_is_milder if args.teacher else None
            loss = gas.augment.mh_aug_loss(
                model(data), first, second, data.y, train_mask,
                kl=args.kl, h=args.h, teacher_is_first=teacher,
            )  # fmt: skip
        loss.backward()
        optimizer.step()

        model.eval()
        with torch.no_grad():
            out = model(data)
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
    data, _, num_classes = get_data(args.root, args.dataset)
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"'--dataset' is {args.dataset}, expected one with one class per node")
    runs, start = [], time.perf_counter()
    for number in range(args.runs):
        run = train(args, data, num_classes, args.seed + number)
        runs.append(run)
        print(f"run {number}: validation {100 * run['val']:.2f} %, test {100 * run['test']:.2f} %")

    def mean(key: str) -> float:
        return statistics.fmean(run[key] for run in runs)

    spread = 100 * statistics.stdev(run["test"] for run in runs) if len(runs) > 1 else 0.0
    how = "vanilla" if args.vanilla else "MH-Aug, frozen" if args.frozen else "MH-Aug"
    print(f"\n{args.model} on {args.dataset}, {how}, {args.runs} run{'s' * (args.runs > 1)}")
    print(f"  test accuracy        {100 * mean('test'):.2f} ± {spread:.2f} %")
    print(f"  validation accuracy  {100 * mean('val'):.2f} %")
    if not (args.vanilla or args.frozen):
        print(f"  transitions          {mean('steps'):.0f}")
        print(f"  accepted             {100 * mean('acceptance_rate'):.1f} %")
        print(f"  mean dropped edges   {mean('mean_edge_drop'):.3f}")
        print(f"  mean masked nodes    {mean('mean_node_drop'):.3f}")
        print(f"  distinct states      {mean('distinct_states'):.0f}")
    print(f"  seconds per run      {(time.perf_counter() - start) / args.runs:.1f}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError, MemoryError) as error:
        sys.exit(f"train_mh_aug.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
