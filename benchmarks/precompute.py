"""Epochs with the first layer's sums over neighbours computed once, against epochs without.

    python benchmarks/precompute.py --root data
    python benchmarks/precompute.py --cases planted:5000:GCN:6:2:32 --epochs 3

A case is a graph, a model of PyG (3 layers, 128 channels, BatchNorm), parts, parts per batch, and
the width of random features that replace those of the graph; 0 keeps them. Epochs are trained in
turn and timed in the process's processor time, so that one thread can be measured on a machine that
has other work. The first epoch, which computes the sums, isn't among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import make_parser, markdown, save, time_in_turn
from time_to_accuracy import make_net, read_graph
from torch_geometric.data import Data

import gas
from gas.training import train_epoch

CASES = (
    "AmazonComputers:GCN:512:64:0",
    "AmazonComputers:SAGE:512:64:0",
    "AmazonComputers:GCN:1:1:0",
    "AmazonComputers:SAGE:1:1:0",
    "planted:100000:GCN:64:8:128",
    "planted:100000:SAGE:64:8:128",
    "planted:100000:SAGE:64:8:512",
    "Cornell5:SAGE:512:64:128",
)
HEADER = ["graph, model, parts, per batch, features", "without", "with", "with / without", "sums"]


def contender(
    data: Data, case: str, precompute: bool
) -> tuple[Callable[[], object], gas.SubgraphLoader]:
    """Return an epoch of training, and its loader."""
    _, kind, num_parts, batch_size, _ = case.rsplit(":", 4)
    model = gas.to_scalable(make_net(data, kind, "batch", 0), data)
    graph = gas.cluster(data, int(num_parts), model=model, log=False)
    loader = gas.SubgraphLoader(
        graph, batch_size=int(batch_size), shuffle=True, precompute=precompute, log=False
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    model.refresh(graph)
    return lambda: train_epoch(model, loader, optimizer), loader


def main() -> None:
    parser = make_parser(__doc__, name="precompute")
    parser.add_argument("--cases", nargs="*", default=CASES, help="graph:model:parts:batch:width")
    parser.add_argument("--epochs", type=int, default=9, help="timed epochs")
    args = parser.parse_args()
    cases, rows = {}, []
    for case in args.cases:
        name, *_, width = case.rsplit(":", 4)
        data = read_graph(args.root, name)
        if int(width):
            data.x = torch.randn(data.num_nodes, int(width))
        without, _ = contender(data, case, False)
        with_sums, loader = contender(data, case, True)
        found = time_in_turn(
            {"without": without, "with": with_sums}, args.epochs, clock=time.process_time
        )
        sums = sum(table.nbytes for table in loader.feature_sums.tensors())
        cases[case] = {**found, "bytes": sums}
        old, new = (found[each]["median"] for each in ("without", "with"))
        rows.append([
            case.replace(":", " "), f"{1e3 * old:.0f} ms", f"{1e3 * new:.0f} ms",
            f"{new / old:.2f}", f"{sums / 2**20:.0f} MiB",
        ])  # fmt: skip
        save(args.name, {"cases": cases}, markdown(HEADER, rows))


if __name__ == "__main__":
    main()
