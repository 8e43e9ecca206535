"""Trains a graph neural network on several processes, each with a shard of the graph.

    torchrun --nproc-per-node 2 examples/train_distributed.py            # a generated graph
    torchrun --nproc-per-node 2 examples/train_distributed.py --dataset Cora --root data

To have processes that die start again, from the newest checkpoint that all have completed::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # Or they find addresses of those that died.
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py --checkpoints run

Two machines, or two terminals of one::

    there="--nnodes 2 --nproc-per-node 1 --master-addr HOST --master-port 29500"
    torchrun $there --node-rank 0 examples/train_distributed.py
    torchrun $there --node-rank 1 examples/train_distributed.py

Every process reads the graph, and keeps its shard; with ``--graph``, a folder that
``gas.cluster(data, num_parts, shards=W, out=folder)`` has written, it reads its shard alone. With
``--checkpoints`` all write one after every epoch, and start from the newest that all have
completed, with as many processes as there are now.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gas
from gas.training import train_epoch

MASKS = ("train_mask", "val_mask", "test_mask")
NETS = {"gcn": GCN, "sage": GraphSAGE, "gat": GAT}


def load(args: argparse.Namespace) -> tuple[Data, gas.ScalableGNN]:
    """Return the graph, in a shard for each process, and a model."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if args.graph is not None:
        graph = gas.open_graph(args.graph, shard=rank)
        num_classes = torch.tensor(int(graph.y.max()) + 1)
        dist.all_reduce(num_classes, dist.ReduceOp.MAX)
        return graph, make_model(args, graph, int(num_classes))
    for turn in (0, 1):  # The first process downloads and cuts, the others find what it kept.
        if (rank > 0) == turn:
            data, _, num_classes = gas.get_data(args.root, args.dataset)
            model = make_model(args, data, num_classes)
            options = {"model": model, "shards": num_ranks, "log": rank == 0}
            graph = gas.cluster(data, args.num_parts, **options)
        dist.barrier()
    return graph, model


def make_model(args: argparse.Namespace, data: Data, num_classes: int) -> gas.ScalableGNN:
    """Convert a model of PyG into one with histories."""
    torch.manual_seed(args.seed)
    sizes = data.num_features, args.hidden_channels, args.num_layers, num_classes
    return gas.to_scalable(NETS[args.model](*sizes, args.dropout), data, dtype=args.dtype)


def accuracies(model: torch.nn.Module, loader: gas.SubgraphLoader) -> list[float]:
    """On the nodes of all ranks for training, validation and test."""
    own = loader.data
    correct = model.predict(loader, gather=False).argmax(dim=1) == own.y[: loader.num_own]
    counts = torch.zeros(3, 2)
    for count, name in zip(counts, MASKS, strict=True):
        mask = own[name][: loader.num_own]
        count += torch.tensor([correct[mask].sum(), mask.sum()])
    dist.all_reduce(counts)
    return (counts[:, 0] / counts[:, 1]).tolist()


def main(args: argparse.Namespace) -> None:
    graph, model = load(args)
    loader = gas.SubgraphLoader(graph, batch_size=args.batch_size, shuffle=True, log=False)
    inference = gas.EvalSubgraphLoader(graph, like=loader, log=False)
    model = gas.distribute(model, graph, overlap=args.overlap, timeout=args.timeout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first = 0
    if args.checkpoints is not None and (args.checkpoints / "newest.json").exists():
        first = gas.load(args.checkpoints, model, optimizer, loader)["epoch"] + 1
    for epoch in range(first, args.epochs):
        start, waited = time.perf_counter(), model.traffic.waited_seconds
        loss = train_epoch(model, loader, optimizer)
        seconds, waited = time.perf_counter() - start, model.traffic.waited_seconds - waited
        scores = accuracies(model, inference)
        if dist.get_rank() == 0:
            shown = " ".join(f"{100 * score:.2f}" for score in scores)
            print(
                f"epoch {epoch}: loss {loss:.4f}, train/val/test {shown} %, {seconds:.2f} s", end=""
            )
            print(f", of which rank 0 waited {waited:.2f} s", flush=True)
        if args.checkpoints is not None:
            gas.save(args.checkpoints, model, optimizer, loader, epoch=epoch)
    print(model.traffic, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dataset", default="planted:2000", help="see gas.get_data")
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--graph", type=Path, help="a folder of a graph that is cut into shards")
    parser.add_argument("--model", choices=NETS, default="gcn")
    parser.add_argument("--num-parts", type=int, default=16, help="a multiple of the processes")
    parser.add_argument(
        "--batch-size", type=int, default=2, help="parts per mini-batch and process"
    )
    parser.add_argument("--hidden-channels", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--dtype", default="float32", help="of histories, and on their way")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--overlap", action="store_true", help="rows travel during a whole step")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds that a rank is waited for"
    )
    parser.add_argument("--checkpoints", type=Path, help="a folder that all processes can write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        main(args)
    finally:
        dist.destroy_process_group()
