"""Link prediction: score and time of an epoch, against PyG's LinkNeighborLoader and full batches.

    python benchmarks/links.py --root data

A tenth of the edges is held out, of which some are ranked among all nodes, other links of their
first nodes left out; 5 % more are for selecting the epoch by its MRR. Of the others 30 % are told
(``RandomLinkSplit`` with a ``disjoint_train_ratio``), along the rest messages run. Everyone trains
the same GraphSAGE of PyG with the same binary loss, as many epochs, from the same seeds, and is
evaluated in full batch.

* ``gas``: ``LinkLoader``, converted by ``to_scalable``; second nodes drawn from the whole graph.
* ``gas, in-batch``: drawn from the parts of the batch.
* ``gas, few parts``: an eighth as many parts, and of these in a batch: fewer communities.
* ``gas, random parts``: parts of nodes from anywhere.
* ``gas, full batch``, ``PyG, full batch``: as many steps an epoch, each with the whole graph and as
  many pairs as gas has in a batch; one of them through the layers of ``gas.nn``.
* ``LinkNeighborLoader``: as many steps an epoch, 10 neighbours of every node and layer.

Epochs alternate. ``--note`` is printed with the table.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import imports, make_parser, markdown, save, time_in_turn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import RandomLinkSplit

import gas
from gas.loader import LinkLoader
from gas.training import FullBatch, compute_hits, compute_mrr, link_loss, rank_links

LAYERS, FAN_OUT = 2, 10


@dataclass(frozen=True)
class Case:
    """A graph and how it is cut."""

    dataset: str
    hidden_channels: int
    num_parts: int
    batch_size: int


CASES = (Case("FacebookPagePage", 64, 512, 64), Case("planted:20000", 64, 512, 64))


@dataclass
class Contender:
    """Makes an epoch of steps, and has the weights."""

    net: torch.nn.Module
    epoch: Callable[[], object]


def bce(out: Tensor, pairs: Tensor, label: Tensor) -> Tensor:
    scores = (out[pairs[0]] * out[pairs[1]]).sum(1)
    return F.binary_cross_entropy_with_logits(scores, label)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_gas(
    case: Case,
    train: Data,
    net: torch.nn.Module,
    pool: str = "graph",
    join: int = 1,
    method: str = "metis",
) -> Contender:
    model = gas.to_scalable(net, train)
    graph = gas.cluster(train, case.num_parts // join, model=model, log=False, method=method)
    size = case.batch_size // join
    loader = LinkLoader(graph, batch_size=size, shuffle=True, log=False, neg_pool=pool)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model.predict(graph)

    def epoch() -> None:
        model.train()
        for batch in loader:
            step(optimizer, link_loss(model(batch), batch))

    return Contender(net, epoch)


def make_full_batch(case: Case, train: Data, net: torch.nn.Module, fused: bool) -> Contender:
    layers = gas.fuse(net) if fused else net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    steps = case.num_parts // case.batch_size
    pairs = train.edge_label_index
    graph = Data(x=train.x, edge_index=train.edge_index)
    adj = FullBatch(graph, layout="fused").data.adj_t if fused else train.edge_index

    def epoch() -> None:
        net.train()
        for which in torch.randperm(pairs.size(1)).chunk(steps):
            size = which.numel()
            drawn = torch.stack([torch.randint(train.num_nodes, (size,)) for _ in range(2)])
            label = torch.cat([torch.ones(size), torch.zeros(size)])
            out = layers(train.x, adj)
            step(optimizer, bce(out, torch.cat([pairs[:, which], drawn], 1), label))

    return Contender(net, epoch)


def make_neighbors(case: Case, train: Data, net: torch.nn.Module) -> Contender:
    steps = case.num_parts // case.batch_size
    loader = LinkNeighborLoader(
        train,
        num_neighbors=[FAN_OUT] * LAYERS,
        edge_label_index=train.edge_label_index,
        neg_sampling=NegativeSampling("binary"),
        batch_size=-(-train.edge_label_index.size(1) // steps),
        shuffle=True,
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def epoch() -> None:
        net.train()
        for batch in loader:
            out = net(batch.x, batch.edge_index)
            step(optimizer, bce(out, batch.edge_label_index, batch.edge_label))

    return Contender(net, epoch)


def contenders(case: Case, train: Data, seed: int) -> dict[str, Contender]:
    torch.manual_seed(seed)
    hidden = case.hidden_channels
    first = GraphSAGE(train.num_features, hidden, num_layers=LAYERS, out_channels=hidden)

    def net() -> torch.nn.Module:
        return copy.deepcopy(first)

    found = {
        "gas": make_gas(case, train, net()),
        "gas, in-batch": make_gas(case, train, net(), pool="batch"),
        "gas, few parts": make_gas(case, train, net(), join=8),
        "gas, random parts": make_gas(case, train, net(), method="random"),
        "gas, full batch": make_full_batch(case, train, net(), fused=True),
        "PyG, full batch": make_full_batch(case, train, net(), fused=False),
    }
    if imports("torch_sparse") or imports("pyg_lib"):
        found["LinkNeighborLoader"] = make_neighbors(case, train, net())
    return found


@torch.no_grad()
def ranks(net: torch.nn.Module, data: Data) -> Tensor:
    net.eval()
    out = net(data.x, data.edge_index)
    return rank_links(out, data.edge_label_index, known=data.edge_index, undirected=True)


def scores(contender: Contender, val: Data, test: Data, epochs: int) -> dict[str, float]:
    """Return the scores of the epoch selected by validation; every fifth epoch is evaluated."""
    best, found = -1.0, {}
    for number in range(1, epochs + 1):
        contender.epoch()
        if number % 5 and number < epochs:
            continue
        mrr = compute_mrr(ranks(contender.net, val))
        if mrr > best:
            best, of_test = mrr, ranks(contender.net, test)
            found = {"mrr": compute_mrr(of_test), "hits_50": compute_hits(of_test, 50)}
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--links", type=int, default=2000, help="that are ranked (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--note", default="", help="printed with the table")
    args = parser.parse_args()

    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for case in CASES:
        data, _, _ = gas.get_data(args.root, case.dataset)
        data = Data(x=data.x, edge_index=data.edge_index).coalesce()
        torch.manual_seed(0)
        train, val, test = RandomLinkSplit(
            0.05,
            0.1,
            is_undirected=True,
            disjoint_train_ratio=0.3,
            add_negative_train_samples=False,
            neg_sampling_ratio=0.0,
        )(data)
        for part in (val, test):
            part.edge_label_index = part.edge_label_index[:, : args.links]
        made = contenders(case, train, 0)
        times = time_in_turn({n: c.epoch for n, c in made.items()}, args.repeats, warm_up=2)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for seed in range(args.seeds):
            for name, contender in contenders(case, train, seed).items():
                torch.manual_seed(seed)
                found[name].append(scores(contender, val, test, args.epochs))
                print(case.dataset, seed, name, found[name][-1], flush=True)
        results[case.dataset] = {"epoch_seconds": times, "scores": found}
        of_gas = times["gas"]["median"]
        for name in ["gas", *(name for name in made if name != "gas")]:
            cells = [
                f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"
                for key in ("mrr", "hits_50")
                for values in [[each[key] for each in found[name]]]
            ]
            seconds = times[name]["median"]
            time = f"{1000 * seconds:.0f} ms", f"{seconds / of_gas:.2f}x"
            rows.append([case.dataset if name == "gas" else "", name, *time, *cells])
        if "LinkNeighborLoader" not in made:
            rows.append(["", "LinkNeighborLoader", "not measured", "", "", ""])
    header = ["graph", "contender", "epoch", "over gas", "MRR", "Hits@50"]
    about = (
        f"GraphSAGE {LAYERS}x64, {args.epochs} epochs, {args.seeds} seeds, {args.links} links; "
        f"epochs: median of {args.repeats}, in turn. {args.note}"
    ).strip()
    content = {"seeds": args.seeds, "epochs": args.epochs, "note": args.note, "results": results}
    save("links", content, f"{markdown(header, rows)}\n\n{about}")


if __name__ == "__main__":
    main()
