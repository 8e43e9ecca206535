"""Trains on several processes by Lightning's DDP strategy, and predicts on all of them.

    python examples/lightning_ddp.py                               # a generated graph, no network
    python examples/lightning_ddp.py --shards
    python examples/lightning_ddp.py --dataset Cora --root data --devices 4

Lightning starts the processes, each of which runs this script. It gives each of them some of the
parts of the graph; rows that one pushes to the histories go to all others. With --shards the graph
is cut into as many shards first: a process has the parts and rows of its own shard, and what its
nodes read of others.
"""

from __future__ import annotations

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--shards", action="store_true", help="a shard for each process")
    parser.add_argument("--num-parts", type=int, default=16, help="of the graph (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="parts per batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden-channels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


class Classifier(lightning.LightningModule):
    """A model with histories, on one of the processes."""

    def __init__(self, model: gas.ScalableGNN, graph: Data, batch_size: int, lr: float) -> None:
        super().__init__()
        self.model, self.graph, self.batch_size, self.lr = model, graph, batch_size, lr

    def setup(self, stage: str) -> None:
        """Distribute the model: processes are connected, and the model isn't wrapped yet."""
        if self.model.ranks is None:
            gas.distribute(self.model, wrap=False)  # Lightning wraps this module, not the model.

    def on_fit_start(self) -> None:
        """Return all processes have the same weights now."""
        self.model.refresh(self.graph)

    def train_dataloader(self) -> gas.SubgraphLoader:
        return gas.SubgraphLoader(self.graph, batch_size=self.batch_size, shuffle=True, log=False)

    def training_step(self, batch: gas.SubData, batch_idx: int) -> Tensor:
        out, own = self.model(batch), batch.own
        return F.cross_entropy(out[own.train_mask], own.y[own.train_mask])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.lr)


def main() -> None:
    args = parse_args()
    lightning.seed_everything(0, verbose=False)
    data, in_channels, out_channels = gas.get_data(args.root, args.dataset)
    net = GraphSAGE(in_channels, args.hidden_channels, 2, out_channels, dropout=0.5)
    model = gas.to_scalable(net, data)
    shards = args.devices if args.shards else 1
    graph = gas.cluster(data, args.num_parts, model=model, shards=shards, log=False)
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=args.devices,
        use_distributed_sampler=not args.shards,  # The parts of a shard aren't shared out again.
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(model, graph, args.batch_size, args.lr))
    accuracy = gas.evaluate(model, graph)["test"]  # On all processes, as they do it together.
    if trainer.is_global_zero:
        print(f"processes      {trainer.world_size}\ntest accuracy  {100 * accuracy:.2f} %")


if __name__ == "__main__":
    main()
