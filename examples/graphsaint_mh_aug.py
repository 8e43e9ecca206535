"""Trains on GraphSAINT's samples of a graph and of the views that MH-Aug samples.

    python examples/graphsaint_mh_aug.py                           # a generated graph, no network
    python examples/graphsaint_mh_aug.py --dataset Cora --root data

Once an epoch the chain moves on the whole graph; each batch is a set of nodes, with the subgraphs
that it induces in the graph and in both states of the chain. No histories: an edge that leaves the
sample is lost. PyG's sampler needs torch-sparse. Settings of the chain are the published ones.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import GraphSAINTNodeSampler
from torch_geometric.nn import GCN
from torch_geometric.typing import WITH_TORCH_SPARSE
from tqdm import tqdm

import gas
from gas.augment import PUBLISHED, Views, mh_aug_loss
from gas.datasets import dataset_key, get_data


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1000, help="sampled edges per batch")
    parser.add_argument("--batches", type=int, default=4, help="per epoch (%(default)s)")
    parser.add_argument("--num-steps", type=int, default=12, help="transitions per epoch")
    parser.add_argument("--reference-size", type=int, help="temper to a graph of so many nodes")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--hidden-channels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("batch_size", "batches", "epochs", "hidden_channels"):
        if getattr(args, name) < 1:
            option, value = name.replace("_", "-"), getattr(args, name)
            parser.error(f"argument --{option} is {value}, expected at least 1")
    return args


def make_sampler(data: Data, args: argparse.Namespace) -> GraphSAINTNodeSampler:
    """Return a sampler whose batches have the ids of their nodes and edges."""
    named = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    named.train_mask = data.train_mask
    named.n_id = torch.arange(data.num_nodes)
    named.e_id = torch.arange(data.edge_index.size(1))
    return GraphSAINTNodeSampler(named, args.batch_size, args.batches, log=False)


def train_epoch(
    model: torch.nn.Module,
    sampler: GraphSAINTNodeSampler,
    views: Views,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, float],
) -> None:
    model.train()
    views.run()  # The chain moves on the whole graph, before the batches.
    for batch in sampler:
        if not batch.train_mask.any():
            continue
        graphs = [batch, *views.cut(batch, batch.n_id)]
        outs: list[Tensor] = [model(graph.x, graph.edge_index) for graph in graphs]
        loss = mh_aug_loss(*outs, batch.y, batch.train_mask, **weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    args = parse_args()
    if not WITH_TORCH_SPARSE:
        raise ImportError(
            "PyG's GraphSAINT samplers need torch-sparse: pip install --no-build-isolation "
            "torch-scatter torch-sparse, or train with histories, examples/train_mh_aug.py"
        )
    torch.manual_seed(args.seed)
    data, in_channels, num_classes = get_data(args.root, args.dataset)
    if data.y.dim() != 1 or data.y.is_floating_point():
        raise ValueError(f"'--dataset' is {args.dataset}, expected one with one class per node")
    data = copy.copy(data)
    published = PUBLISHED.get(dataset_key(args.dataset), PUBLISHED["cora"])
    chain = gas.MHAug(
        data, **published.chain, num_steps=args.num_steps, reference_size=args.reference_size
    )
    views = Views(chain, data)
    sampler = make_sampler(data, args)
    model = GCN(in_channels, args.hidden_channels, 2, num_classes, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)

    best, test = -1.0, 0.0
    for _ in tqdm(range(args.epochs), unit="epoch", leave=False, disable=None):
        train_epoch(model, sampler, views, optimizer, published.loss)
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        chain.update_entropy(out)
        val = gas.training.compute_micro_f1(out, data.y, data.val_mask)
        if val > best:
            best, test = val, gas.training.compute_micro_f1(out, data.y, data.test_mask)
    done = chain.statistics()
    print(f"GCN on {args.dataset}, GraphSAINT and MH-Aug, {args.epochs} epochs")
    print(f"  test accuracy        {100 * test:.2f} %")
    print(f"  validation accuracy  {100 * best:.2f} %")
    print(f"  transitions          {done.steps}, {100 * done.acceptance_rate:.1f} % accepted")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError, MemoryError) as error:
        sys.exit(f"graphsaint_mh_aug.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
