"""Overhead of MH-Aug in a training epoch with histories, apart from its forward passes.

    python benchmarks/mh_aug_epoch.py
    python benchmarks/mh_aug_epoch.py --dataset planted:5000 --num-parts 16

Epochs in turn, in one run, with the same model and the same batches: plain training; the loss of
MH-Aug over three passes of the batch as it is, which is what its forward and backward passes cost;
and MH-Aug with some transitions an epoch, by the published settings, which rarely accept on a large
graph, and tempered. What it adds is the difference to three passes, over the plain epoch:
transitions on the whole graph, weights of new states, cutting and masking views.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from common import make_parser, markdown, save, time_in_turn
from torch_geometric.data import Data
from torch_geometric.transforms import GCNNorm

import gas
from gas.augment import PUBLISHED, mh_aug_loss
from gas.datasets import get_data
from gas.training import train_epoch


class Repeated:
    """A loader whose views are the batches themselves."""

    def __init__(self, loader: gas.SubgraphLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[gas.SubData]:
        for batch in self.loader:
            batch.data.views = [copy.copy(batch.data), copy.copy(batch.data)]
            yield batch


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="planted:200000")
    parser.add_argument("--num-parts", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--transitions", type=int, nargs="*", default=[1, 12])
    parser.add_argument("--reference-size", type=int, default=2708, help="see gas.MHAug")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    torch.manual_seed(0)
    data, _, out_channels = get_data(args.root, args.dataset)
    perm, ptr = gas.metis(data.edge_index, args.num_parts, num_nodes=data.num_nodes, log=False)
    data = gas.permute(data, perm, log=False)
    kept = {key: data[key] for key in ("x", "y", "edge_index")}
    data = Data(**kept, train_mask=data.train_mask)
    whole = GCNNorm()(copy.copy(data))
    options = {"batch_size": args.batch_size, "shuffle": True, "log": False, "layout": "fused"}
    view_loss = partial(mh_aug_loss, **PUBLISHED["cora"].loss)

    def training(chain: gas.MHAug | None = None, repeat: bool = False) -> Callable[[], object]:
        loader = gas.SubgraphLoader(
            data, ptr, epoch_transform=chain, graph_transform=GCNNorm(), **options
        )
        model = gas.models.GCN(data.num_nodes, data.num_features, 128, out_channels, 3, 0.3)
        with torch.no_grad():  # No cold start.
            model(whole.x, whole.edge_index, fill=True, edge_weight=whole.edge_weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        batches = Repeated(loader) if repeat else loader
        return lambda: train_epoch(model, batches, optimizer, view_loss=view_loss)

    epochs = {"plain": training(), "three passes": training(repeat=True)}
    chains: dict[str, gas.MHAug] = {}
    for count in args.transitions:
        for way, size in {"published settings": None, "tempered": args.reference_size}.items():
            chains[f"MH-Aug, {way}, transitions: {count}"] = gas.MHAug(
                data, **PUBLISHED["cora"].chain, num_steps=count, reference_size=size
            )
    epochs |= {name: training(chain) for name, chain in chains.items()}
    times = time_in_turn(epochs, args.repeats)
    plain, passes = times["plain"]["median"], times["three passes"]["median"]
    rows = [
        [
            args.dataset,
            name,
            f"{1000 * found['median']:.0f} ms",
            f"{found['median'] / plain:.2f}x",
            f"{(found['median'] - passes) / plain:.1%}" if name in chains else "",
            f"{chains[name].acceptance_rate:.0%}" if name in chains else "",
        ]
        for name, found in times.items()
    ]
    header = ["graph", "training", "epoch", "of plain"]
    header += ["added to three passes, of a plain epoch", "accepted"]
    settings = {name: value for name, value in vars(args).items() if name != "root"}
    save("mh_aug_epoch", {"settings": settings, "seconds": times}, markdown(header, rows))


if __name__ == "__main__":
    main()
