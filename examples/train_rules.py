"""Edits a graph neural network by feedback rules: nodes of some kind are to get another class.

    python examples/train_rules.py                              # a generated graph, no network
    python examples/train_rules.py --num-nodes 20000 --runs 5 --quota 1

Rules contradict the labels of the nodes that they cover. Compared are training on the labels
alone, on labels that the rules have corrected, and on these and examples that the rules add,
drawn from labelled and unlabelled nodes and kept where they help held-out nodes. Told of test
nodes, after the last epoch: the agreement with the rules where they cover, and the accuracy
elsewhere, mean and standard deviation.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.contrib.rules import Rule, RuleOversampling

RULES = [
    Rule(lambda data: data.x[:, 0] > 6, 0),
    Rule(lambda data: (data.x[:, 1] < -3) & (data.x[:, 2] > 2), 1),
]
WAYS = {  # What becomes of training nodes that rules cover, and whether examples are added.
    "labels alone": ("keep", False),
    "labels corrected": ("relabel", False),
    "and oversampled": ("relabel", True),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-nodes", type=int, default=3000, help="(%(default)s)")
    parser.add_argument("--num-parts", type=int, default=12, help="of the graph (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="parts per batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--every", type=int, default=2, help="epochs per proposal (%(default)s)")
    parser.add_argument("--fraction", type=float, default=0.1, help="of examples per proposal")
    parser.add_argument("--quota", type=float, default=0.5, help="of examples in all (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="with other seeds (%(default)s)")
    args = parser.parse_args()
    for name in ("runs", "epochs", "every"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name} is {getattr(args, name)}, expected at least 1")
    return args


def train(args: argparse.Namespace, data: Data, seed: int, way: str) -> tuple[float, float, int]:
    """Of test nodes, agreement with rules and accuracy elsewhere; how many examples were kept."""
    torch.manual_seed(seed)
    num_classes = int(data.y.max()) + 1
    net = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=num_classes, dropout=0.3)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, args.num_parts, model=model, log=False)
    drawn = torch.rand(graph.num_nodes)
    train_mask, held_out, test_mask = drawn < 0.15, (drawn > 0.15) & (drawn < 0.3), drawn > 0.7
    conflicts, oversampled = WAYS[way]
    rules = RuleOversampling(
        graph,
        RULES,
        train_mask,
        held_out,
        pool=~held_out & ~test_mask,  # Unlabelled nodes, too: a rule says what they are.
        num_classes=num_classes,
        fraction=args.fraction if oversampled else 0,
        quota=args.quota,
        conflicts=conflicts,
    )
    loader = gas.SubgraphLoader(graph, batch_size=args.batch_size, shuffle=True, log=False)
    inference = gas.EvalSubgraphLoader(graph, batch_size=args.batch_size, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    out = model(loader=inference)  # Fills the histories; in the order of the graph.

    rules.update(out)
    for epoch in range(1, args.epochs + 1):
        rules.run()  # Nothing while examples are being tried.
        model.train()
        for batch in loader:
            weight, target = rules.examples(batch.n_id[: batch.batch_size])
            if weight.any():
                losses = F.cross_entropy(model(batch), target, reduction="none")
                optimizer.zero_grad()
                ((weight * losses).sum() / weight.sum()).backward()
                optimizer.step()
        out = model(loader=inference)
        if epoch % args.every == 0:
            rules.update(out)
    return *rules.score(out, test_mask), rules.num_examples


def main() -> None:
    args = parse_args()
    data, _, _ = gas.get_data("data", f"planted:{args.num_nodes}")
    covered = torch.stack([rule.covers(data) for rule in RULES])
    wrong = (covered & (data.y != torch.tensor([[0], [1]]))).sum() / covered.sum()
    print(f"rules cover {covered.any(dim=0).sum()} of {data.num_nodes} nodes, ", end="")
    print(f"and contradict the labels of {wrong:.0%} of them")
    print(f"{'':18}{'agreement with rules':>22}{'accuracy elsewhere':>20}{'examples added':>16}")
    for way in WAYS:
        runs = list(zip(*(train(args, data, seed, way) for seed in range(args.runs)), strict=True))
        mean = [statistics.mean(values) for values in runs]
        std = [statistics.pstdev(values) for values in runs]
        scores = [f"{100 * m:.1f} ± {100 * s:.1f} %" for m, s in zip(mean, std, strict=True)][:2]
        print(f"{way:18}{scores[0]:>22}{scores[1]:>20}{mean[2]:>16.0f}")


if __name__ == "__main__":
    main()
