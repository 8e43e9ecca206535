"""Replays a graph in time order: nodes arrive with their edges, and the model follows.

    python examples/grow_graph.py                       # a generated graph, no network
    python examples/grow_graph.py --dataset planted:50000 --hidden-channels 64

Half of the nodes are there to begin with, and a model is trained on them. The others arrive in
batches, each with the edges to nodes that are there. After each batch they are predicted: by the
model as it is, with histories that were refreshed where something changed; after some steps on
batches around the new nodes; and by a model that is trained anew on the whole graph of that time.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.contrib.dynamic import DynamicGraph


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:3000", help="(%(default)s)")
    parser.add_argument("--root", default="data", help="folder of the graphs (%(default)s)")
    parser.add_argument("--arrivals", type=int, default=5, help="batches (%(default)s)")
    parser.add_argument("--num-parts", type=int, default=16, help="to begin with (%(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="of a training (%(default)s)")
    parser.add_argument("--hidden-channels", type=int, default=32)
    return parser.parse_args()


def train(model, loader, epochs: int, optimizer) -> None:
    model.train()
    for _ in range(epochs):
        for batch in loader:
            own = batch.own
            if own.train_mask.any():
                loss = F.cross_entropy(model(batch)[own.train_mask], own.y[own.train_mask])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                with torch.no_grad():
                    model(batch)


def trained(data: Data, out_channels: int, args: argparse.Namespace):
    """Partition a graph, and train a new model on it."""
    net = GraphSAGE(data.num_features, args.hidden_channels, 2, out_channels, dropout=0.3)
    model = gas.to_scalable(net, data)
    live = DynamicGraph(data, args.num_parts, model=model, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.refresh(live.graph)
    train(model, live.loader(batch_size=4, shuffle=True, log=False), args.epochs, optimizer)
    model.refresh(live.graph)
    return model, live, optimizer


def right(out: Tensor, data: Data, nodes: Tensor) -> float:
    return 100 * float((out.argmax(1) == data.y[nodes]).float().mean())


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    data, _, out_channels = gas.get_data(args.root, args.dataset)
    data.train_mask = torch.rand(data.num_nodes) < 0.3
    data = Data(x=data.x, y=data.y, edge_index=data.edge_index, train_mask=data.train_mask)
    # Nodes arrive in the order of their ids; an edge, with the later of its ends.
    arrival = data.edge_index.max(dim=0).values
    half = data.num_nodes // 2
    bounds = torch.linspace(half, data.num_nodes, args.arrivals + 1).long().tolist()

    def until(end: int) -> Data:
        rows = {key: data[key][:end] for key in ("x", "y", "train_mask")}
        return Data(**rows, edge_index=data.edge_index[:, arrival < end])

    model, live, optimizer = trained(until(half), out_channels, args)
    print("new nodes | refreshed       | trained on      | trained anew    (accuracy, seconds)")
    for begin, end in itertools.pairwise(bounds):
        start = time.perf_counter()
        new = live.update(
            {key: data[key][begin:end] for key in ("x", "y", "train_mask")},
            data.edge_index[:, (arrival >= begin) & (arrival < end)],
        )
        live.update_histories()  # Rows of histories that changed, and no others.
        out = model.predict(live.graph, nodes=new)
        unseen = ~data.train_mask[new]
        cells = [(right(out[unseen], data, new[unseen]), time.perf_counter() - start)]

        batch = live.loader(log=False).cut_nodes(live.graph.perm.argsort()[new])
        train(model, [batch] * 5, 1, optimizer)  # Some steps on the new nodes.
        model.eval()
        out = model.predict(live.graph)
        cells.append((right(out[new[unseen]], data, new[unseen]), time.perf_counter() - start))

        start = time.perf_counter()
        anew, its, _ = trained(until(end), out_channels, args)
        out = anew.predict(its.graph)
        cells.append((right(out[new[unseen]], data, new[unseen]), time.perf_counter() - start))
        row = " | ".join(f"{score:5.2f} %, {seconds:5.2f} s" for score, seconds in cells)
        print(f"{end - begin:9} | {row}")


if __name__ == "__main__":
    main()
