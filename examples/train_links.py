"""Predicts links: which pages of a graph will refer to each other.

    python examples/train_links.py                      # a generated graph, no network
    python examples/train_links.py --dataset FacebookPagePage --root data --num-parts 64

A tenth of the edges is held out for testing, and of the others 30 % are told to the model, which
sees the rest as paths of messages, and pairs of nodes that no edge joins. After training, each held
out edge is ranked among all nodes that its first node might be linked with instead. An edge and its
reverse are told or held out together, also of a directed graph that has both: the score of a pair
is the same in both directions, so that one would tell the other.
"""

from __future__ import annotations

import argparse

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import RandomLinkSplit

import gas
from gas.loader import LinkLoader
from gas.training import compute_hits, compute_mrr, link_loss, rank_links

TEST, VAL, TOLD = 0.1, 0.05, 0.3  # Shares of all edges, and of those that are trained on.


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", default="planted:2000", help="(%(default)s)")
    parser.add_argument("--root", default="data", help="folder of the graphs (%(default)s)")
    parser.add_argument("--loss", choices=("binary", "triplet"), default="binary")
    parser.add_argument("--negatives", type=int, default=1, help="per edge (%(default)s)")
    parser.add_argument("--num-parts", type=int, default=16, help="of the graph (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="parts per batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden-channels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def split_links(data: Data, undirected: bool) -> tuple[Data, Data, Data]:
    """Draw edges to tell and to hold out, together with their reverses.

    Returns:
        The graphs to train, to validate and to test on: their edges are paths of messages, their
        ``edge_label_index`` the edges to predict, of an undirected graph one of both directions.
    """
    if undirected:
        split = RandomLinkSplit(
            num_val=VAL,
            num_test=TEST,
            is_undirected=True,
            disjoint_train_ratio=TOLD,
            add_negative_train_samples=False,
            neg_sampling_ratio=0.0,
        )
        return split(data)
    edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    low, high = edges.aminmax(dim=0)
    _, pair, size = (low * data.num_nodes + high).unique(return_inverse=True, return_counts=True)
    num_both = int((size[pair] > 1).sum())
    print(f"{num_both} edges have their reverse, with which they are told or held out together")
    order = torch.randperm(size.numel())
    last = torch.empty_like(order)  # The number of edges up to a pair, in the order of pairs.
    last[order] = size[order].cumsum(0)
    num_test, num_val = int(TEST * edges.size(1)), int(VAL * edges.size(1))
    num_told = int(TOLD * (edges.size(1) - num_test - num_val))
    ends = torch.tensor([num_test, num_val, num_told]).cumsum(0)
    drawn = torch.bucketize(last, ends)[pair]  # 0 for testing, 1 for validation, 2 to tell.
    graphs = []
    for number in (2, 1, 0):
        graph = gas.graph.remove_links(data, edges[:, drawn <= number])
        graph.edge_label_index = edges[:, drawn == number]
        graphs.append(graph)
    return tuple(graphs)


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    data, in_channels, _ = gas.get_data(args.root, args.dataset)
    data = data.coalesce()  # Of two equal edges none tells the other.
    undirected = data.is_undirected()
    print(f"{'undirected' if undirected else 'directed'}, {data.num_edges} edges")
    train, val, test = split_links(data, undirected)

    hidden = args.hidden_channels
    net = GraphSAGE(in_channels, hidden, num_layers=2, out_channels=hidden)
    model = gas.to_scalable(net, train)
    graph = gas.cluster(train, args.num_parts, model=model)
    loader = LinkLoader(
        graph,
        batch_size=args.batch_size,
        shuffle=True,
        neg_sampling=NegativeSampling(args.loss, args.negatives),
    )
    optimizer = torch.optim.Adam(model.parameters(), args.lr)

    # Evaluated on more edges than are trained on: the same weights, histories of their own.
    def evaluate(data, others) -> str:
        out = model.for_graph(data.num_nodes).predict(
            gas.cluster(data, args.num_parts, model=model, log=False)
        )
        ranks = rank_links(out, data.edge_label_index, known=others, undirected=undirected)
        hits = ", ".join(f"Hits@{k} {compute_hits(ranks, k):.4f}" for k in (10, 50))
        return f"MRR {compute_mrr(ranks):.4f}, {hits}"

    model.refresh(graph)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for batch in loader:
            loss = link_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch.input_id.numel()
        if epoch % 5 == 0 or epoch == args.epochs:
            loss_of_epoch = total / train.edge_label_index.size(1)
            score = evaluate(val, val.edge_index)
            print(f"epoch {epoch}: loss {loss_of_epoch:.4f}, validation {score}")
    print(f"test: {evaluate(test, test.edge_index)}")
    chance = torch.log(torch.tensor(float(data.num_nodes))) / data.num_nodes
    print(f"(An order drawn at random has an MRR of about {chance:.4f}.)")


if __name__ == "__main__":
    main()
