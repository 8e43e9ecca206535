"""Trains on a graph of several types: papers, their authors and venues.

    python examples/train_hetero.py                     # a generated graph, no network
    python examples/train_hetero.py --model sage --num-papers 100000

Any module of PyG's HeteroData is converted: here HGT, or SAGE layers for each type of edges. Venues
have no features, but embeddings, whose gradients are sparse. Parts have about as many nodes of each
type, and each type has a history behind every layer but the last. Topics of papers are told.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, HGTConv, SAGEConv

import gas

TOPICS, FEATURES = 8, 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=("hgt", "sage"), default="hgt")
    parser.add_argument("--num-papers", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--num-parts", type=int, default=16, help="of the graph (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="parts per batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden-channels", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def bibliography(num_papers: int) -> HeteroData:
    """Draw papers of some topics, whose authors, venues and citations mostly are of the same."""
    sizes = {"paper": num_papers, "author": num_papers // 2, "venue": 5 * TOPICS}
    topics = {kind: torch.randint(TOPICS, (size,)) for kind, size in sizes.items()}
    data = HeteroData()
    for kind in ("paper", "author"):
        noise = 2 * torch.randn(sizes[kind], FEATURES)
        data[kind].x = F.one_hot(topics[kind], FEATURES) + noise
    data["venue"].num_nodes = sizes["venue"]
    data["paper"].y = topics["paper"]
    drawn = torch.rand(num_papers)
    data["paper"].train_mask, data["paper"].test_mask = drawn < 0.3, drawn > 0.7
    for src, name, dst, degree in (
        ("author", "writes", "paper", 3),
        ("paper", "cites", "paper", 4),
        ("paper", "appears_in", "venue", 1),
    ):
        ends = [torch.randint(sizes[kind], (20 * degree * num_papers,)) for kind in (src, dst)]
        alike = topics[src][ends[0]] == topics[dst][ends[1]]
        kept = (alike | (torch.rand(len(alike)) < 0.05)).nonzero().view(-1)[: degree * num_papers]
        edges = torch.stack(ends)[:, kept]
        data[src, name, dst].edge_index = edges
        data[dst, f"rev_{name}", src].edge_index = edges.flip(0)
    return data


class Net(torch.nn.Module):
    """Embeddings of venues, encoders of the others, two layers, and scores of papers."""

    def __init__(self, data: HeteroData, model: str, width: int) -> None:
        super().__init__()
        self.venues = torch.nn.Embedding(data["venue"].num_nodes, width, sparse=True)
        kinds = ("paper", "author")
        self.encoders = torch.nn.ModuleDict({k: torch.nn.Linear(FEATURES, width) for k in kinds})
        if model == "hgt":
            layers = [HGTConv(width, width, data.metadata(), heads=2) for _ in range(2)]
        else:
            layers = [
                HeteroConv({kind: SAGEConv(width, width) for kind in data.edge_types})
                for _ in range(2)
            ]
        self.layers = torch.nn.ModuleList(layers)
        self.scores = torch.nn.Linear(width, TOPICS)

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict, n_id_dict: dict[str, Tensor]
    ) -> Tensor:
        h = {kind: self.encoders[kind](x).relu() for kind, x in x_dict.items()}
        h["venue"] = self.venues(n_id_dict["venue"])
        for layer in self.layers:
            h = {kind: F.relu(x) for kind, x in layer(h, edge_index_dict).items()}
        return self.scores(h["paper"])


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    data = bibliography(args.num_papers)
    net = Net(data, args.model, args.hidden_channels)
    model = gas.to_scalable(net, data)
    print(model)
    graph = gas.cluster(data, args.num_parts)
    loader = gas.SubgraphLoader(graph, batch_size=args.batch_size, shuffle=True)

    dense = [p for name, p in net.named_parameters() if not name.startswith("venues")]
    optimizers = [
        torch.optim.Adam(dense, args.lr),
        torch.optim.SparseAdam(net.venues.parameters(), args.lr),
    ]
    model.refresh(graph)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for batch in loader:
            paper = batch["paper"]
            mask, y = (rows[: paper.batch_size] for rows in (paper.train_mask, paper.y))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(batch)[mask], y[mask])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.item() * int(mask.sum())
        if epoch % 5 == 0 or epoch == args.epochs:
            scores = [f"{name} {100 * x:.2f} %" for name, x in gas.evaluate(model, graph).items()]
            loss_of_epoch = total / int(data["paper"].train_mask.sum())
            print(f"epoch {epoch}: loss {loss_of_epoch:.4f}, {', '.join(scores)}")


if __name__ == "__main__":
    main()
