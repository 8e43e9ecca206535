"""Explains by which friends and words a model tells the club of a person, and draws it.

    python examples/explain_node.py                            # a generated graph, no network
    python examples/explain_node.py --person "Ada Moreau" --out ada.png

People of some clubs write a few words about themselves, and two of three friends are of the same
club. A model is trained with histories. What it says of one person is explained by captum's
integrated gradients on a mini-batch around that person and their friends, on which two layers
compute what they do on the whole graph; nothing is written to the histories. Here it is known which
friends and words matter, those of the club: how often they count more than others is printed, where
50 % is chance.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.explain import CaptumExplainer, Explainer, Explanation
from torch_geometric.nn import GraphSAGE

import gas

CLUBS = {
    "astronomy": "comet telescope orbit nebula eclipse galaxy",
    "baking": "dough oven sourdough cinnamon flour crust",
    "climbing": "rope summit chalk boulder harness ridge",
    "chess": "rook gambit endgame bishop castling checkmate",
    "gardening": "compost seedling tulip pruning orchard soil",
}
OTHER = "coffee music weekend travel books family city cinema summer running cat dog work"
FIRST = "Ada Ben Chloe Dan Elif Finn Greta Hugo Ines Jonas Kira Luca Mina Noah Olga Pavel Rosa Sven"
LAST = "Adler Bauer Costa Dubois Evans Fischer Garcia Haas Ito Jensen Kaya Lang Moreau Novak Okoye"
PEOPLE = [" ".join(name) for name in itertools.product(FIRST.split(), LAST.split())]
WORDS = " ".join([*CLUBS.values(), OTHER]).split()
TOPIC = torch.tensor([*torch.arange(len(CLUBS)).repeat_interleave(6), *[-1] * len(OTHER.split())])
CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
COLOURS = ["#4e79a7", "#e6a532", "#d1615d", "#85629e", "#57a05a", "#b9b4ac"]  # The last: no club.


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--person", choices=PEOPLE, metavar="NAME", help="whom to explain")
    parser.add_argument("--epochs", type=int, default=30, help="of training (%(default)s)")
    parser.add_argument("--out", default="explanation.png", help="the picture (%(default)s)")
    return parser.parse_args()


def draw_people() -> Data:
    """People with words and friends, more of which are of their club."""
    size = len(PEOPLE)
    y = torch.randint(len(CLUBS), (size,))
    odds = torch.where(y[:, None] == TOPIC, 1.5, 0.25).where(TOPIC >= 0, torch.tensor(1.0))
    x = torch.zeros(size, len(WORDS)).scatter_(1, odds.multinomial(7), 1.0)
    pairs = torch.randint(size, (2, 40 * size))
    pairs = pairs[:, pairs[0] != pairs[1]]
    alike = y[pairs[0]] == y[pairs[1]]
    pairs = torch.cat([pairs[:, alike][:, : 3 * size], pairs[:, ~alike][:, : size * 3 // 2]], dim=1)
    edges = torch.cat([pairs, pairs.flip(0)], dim=1).unique(dim=1)
    return Data(x=x, y=y, edge_index=edges, train_mask=torch.rand(size) < 0.3)


def train(model: gas.ScalableGNN, graph: Data, epochs: int) -> None:
    loader = gas.SubgraphLoader(graph, batch_size=3, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.predict(graph)  # Fills the histories.
    for _ in range(epochs):
        model.train()
        for batch in loader:
            out, own = model(batch), batch.own
            loss = F.cross_entropy(out[own.train_mask], own.y[own.train_mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def explain(model: gas.ScalableGNN, loader: gas.SubgraphLoader, row: int) -> Explanation:
    """Of one row of the graph, on a mini-batch around it, in which it comes first."""
    batch = loader.around(loader.neighbourhood(torch.tensor([row]), num_hops=1).n_id)
    explainer = Explainer(
        model.at(batch),
        CaptumExplainer("IntegratedGradients", n_steps=20),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config=CONFIG,
    )
    # Captum warns of features without gradients.
    found = explainer(batch.x.requires_grad_(), batch.edge_index, index=0).apply(Tensor.detach)
    found.friends = (batch.edge_index[1] == 0).nonzero().view(-1)  # Edges into the person.
    found.y, found.n_id = batch.y, batch.n_id
    return found


def share_above(score: Tensor, alike: Tensor) -> list[float]:
    """Of the pairs of one that is alike and one that isn't, how many the former wins."""
    if alike.all() or not alike.any():
        return []
    return [(score[alike][:, None] > score[~alike]).float().mean().item()]


def draw(found: Explanation, names: list[str], path: str) -> None:
    """Friends around the person, lines as wide as they count; beside them the words that count."""
    figure = Figure(figsize=(12, 6.6))
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    left.set(xlim=(-1.95, 1.95), ylim=(-1.45, 1.45), aspect="equal")
    order = found.edge_mask[found.friends].argsort(descending=True)
    strongest = found.edge_mask[found.friends].abs().max()
    for place, edge in enumerate(found.friends[order].tolist()):
        friend, counts = int(found.edge_index[0, edge]), float(found.edge_mask[edge] / strongest)
        angle = math.pi / 2 - 2 * math.pi * place / len(order)
        x, y = math.cos(angle), math.sin(angle)
        style = {"color": "#2f2f2f", "ls": "-"} if counts > 0 else {"color": "#d1615d", "ls": ":"}
        left.plot([0, x], [0, y], lw=0.6 + 7 * abs(counts), alpha=0.25 + 0.5 * abs(counts), **style)
        left.scatter(x, y, s=330, color=COLOURS[found.y[friend]], edgecolor="white", lw=2, zorder=3)
        side = "left" if x > 0.05 else "right" if x < -0.05 else "center"
        where = (
            x + 0.13 * (x > 0.05) - 0.13 * (x < -0.05),
            y * (1.2 if side == "center" else 1.06),
        )
        top = [i for i in found.node_mask[friend].topk(2).indices if found.x[friend, i] > 0]
        text = f"{names[friend]}  {float(found.edge_mask[edge]):+.2f}\n"
        left.text(*where, text, ha=side, va="center", fontsize=10)
        left.text(
            *where,
            "\n" + ", ".join(WORDS[i] for i in top),
            ha=side,
            va="center",
            fontsize=8.5,
            color="#777",
        )
    left.scatter(0, 0, s=1500, color=COLOURS[found.target[0]], edgecolor="white", lw=3, zorder=3)
    text = names[0].replace(" ", "\n")
    left.text(0, 0, text, ha="center", va="center", color="white", weight="bold", zorder=4)
    left.set_title("friends, and how much each counts; dotted: against it", fontsize=10)
    left.axis("off")
    for club, colour in zip(CLUBS, COLOURS, strict=False):
        left.scatter([], [], s=90, color=colour, label=club)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, -0.1), ncols=5, frameon=False)
    score = found.node_mask.sum(dim=0)
    top = score.abs().topk(12).indices
    top = top[score[top].argsort()]
    right.barh([WORDS[i] for i in top], score[top].tolist(), color=[COLOURS[TOPIC[i]] for i in top])
    right.axvline(0, color="#2f2f2f", lw=0.8)
    right.spines[["top", "right", "left"]].set_visible(False)
    right.tick_params(left=False)
    right.set_title("words of all of them, in the colour of their club", fontsize=10)
    right.set_xlabel("contribution to the club's score")
    club, sure = list(CLUBS)[found.target[0]], found.prediction[0].softmax(dim=0).max()
    figure.suptitle(f"Why {names[0]} is put into {club} ({100 * sure:.0f} %)", fontsize=15)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    data = draw_people()
    model = gas.to_scalable(GraphSAGE(len(WORDS), 32, 2, len(CLUBS), dropout=0.5), data)
    graph = gas.cluster(data, num_parts=12, model=model, log=False)
    train(model, graph, args.epochs)
    right = model.predict(graph).argmax(dim=1) == data.y
    print(f"test accuracy  {100 * right[~data.train_mask].float().mean():.1f} %")

    model.eval()
    loader = gas.SubgraphLoader(graph, layout="edge_index", log=False)
    row_of = {PEOPLE[i]: row for row, i in enumerate(graph.perm.tolist())}
    tested = [PEOPLE[i] for i in (~data.train_mask).nonzero().view(-1)]
    friends, words = [], []
    for name in tested[:20]:
        found = explain(model, loader, row_of[name])
        alike = found.y[found.edge_index[0, found.friends]] == found.target[0]
        friends += share_above(found.edge_mask[found.friends], alike)
        used = found.x.sum(dim=0) > 0
        words += share_above(found.node_mask.sum(dim=0)[used], TOPIC[used] == found.target[0])
    for what, shares in (("friends", friends), ("words", words)):
        share = 100 * torch.tensor(shares).mean()
        print(f"{what} of the club count more than others: {share:.1f} % of pairs")

    found = explain(model, loader, row_of[args.person or tested[0]])
    names = [PEOPLE[i] for i in graph.perm[found.n_id]]
    club = list(CLUBS)[found.target[0]]
    print(f"\n{names[0]} is put into {club}, and is of {list(CLUBS)[found.y[0]]}, because of")
    for edge in found.friends[found.edge_mask[found.friends].argsort(descending=True)][:5].tolist():
        friend = int(found.edge_index[0, edge])
        print(f"  {found.edge_mask[edge]:+.3f}  {names[friend]}, of {list(CLUBS)[found.y[friend]]}")
    for score, word in zip(*found.node_mask.sum(dim=0).topk(5), strict=True):
        print(f"  {score:+.3f}  {WORDS[word]!r}")
    draw(found, names, args.out)
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    main()
