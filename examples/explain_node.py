"""Explains by which friends and words a model tells the club of a person, and draws it.

    python examples/explain_node.py                            # a generated graph, no network
    python examples/explain_node.py --person "Ada Moreau" --out ada.png

People of some clubs write a few words about themselves, and two of three friends are of the same
club. What a model that was trained with histories says of one of them is explained by captum on a
batch around that person and their friends, on which two layers compute what they do on the whole
graph; nothing is written to the histories. Which friends and words matter is known here, those of
the club: how often they count more than others is printed, where 50 % is chance.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.explain import CaptumExplainer, Explainer, Explanation
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import remove_self_loops

import gas

CLUBS = {
    "astronomy": "comet telescope orbit nebula eclipse galaxy",
    "baking": "dough oven sourdough cinnamon flour crust",
    "climbing": "rope summit chalk boulder harness ridge",
    "chess": "rook gambit endgame bishop castling checkmate",
}
OTHER = "coffee music weekend travel books family city cinema summer running cat dog work"
FIRST = "Ada Ben Chloe Dan Elif Finn Greta Hugo Ines Jonas Kira Luca Mina Noah Olga Pavel Rosa Sven"
LAST = "Adler Bauer Costa Dubois Evans Fischer Garcia Haas Ito Jensen Kaya Lang Moreau Novak Okoye"
PEOPLE = [" ".join(name) for name in itertools.product(FIRST.split(), LAST.split())]
WORDS = " ".join([*CLUBS.values(), OTHER]).split()
TOPIC = torch.tensor([*torch.arange(len(CLUBS)).repeat_interleave(6), *[-1] * len(OTHER.split())])
CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
COLOURS = ["#4e79a7", "#e6a532", "#d1615d", "#85629e", "#b9b4ac"]  # The last: of no club.


def draw_people() -> Data:
    """People of clubs, with words, and friends of whom more are of their club."""
    data = gas.datasets.planted.planted_partition(len(PEOPLE), 9.0, len(CLUBS), mixing=0.4)
    odds = torch.where(data.y[:, None] == TOPIC, 1.5, 0.25).where(TOPIC >= 0, torch.tensor(1.0))
    data.x = torch.zeros(len(PEOPLE), len(WORDS)).scatter_(1, odds.multinomial(7), 1.0)
    data.edge_index, _ = remove_self_loops(data.edge_index)
    data.train_mask = torch.rand(len(PEOPLE)) < 0.3
    return data.coalesce()


def train(model: gas.ScalableGNN, graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, batch_size=3, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.refresh(graph)
    for _ in range(30):
        gas.train_epoch(model, loader, optimizer)


def explain(model: gas.ScalableGNN, loader: gas.SubgraphLoader, name: str) -> Explanation:
    """Of one person, on a mini-batch around them, in which they come first."""
    row = (loader.data.perm == PEOPLE.index(name)).nonzero().view(-1)
    batch = loader.cut_nodes(loader.neighbourhood(row, num_hops=1).n_id)
    explainer = Explainer(
        model.at(batch),
        CaptumExplainer("IntegratedGradients", n_steps=20),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config=CONFIG,
    )
    x = batch.x.requires_grad_()  # Captum warns otherwise.
    found = explainer(x, batch.edge_index, index=0).apply(Tensor.detach)
    into = (batch.edge_index[1] == 0).nonzero().view(-1)
    found.counts, order = found.edge_mask[into].sort(descending=True)
    found.friends, found.words = batch.edge_index[0, into[order]], found.node_mask.sum(dim=0)
    found.names, found.y = [PEOPLE[i] for i in loader.data.perm[batch.n_id]], batch.y
    return found


def share_above(score: Tensor, alike: Tensor) -> float:
    """Of the pairs of one that is alike and one that isn't, how many the former wins."""
    return (score[alike][:, None] > score[~alike]).float().mean().item()


def draw(found: Explanation, title: str, path: str) -> None:
    """Friends around the person, lines as wide as their importance, and the words that matter."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    middle = {"ha": "center", "va": "center"}
    for place, (friend, counts) in enumerate(zip(found.friends, found.counts, strict=True)):
        angle = 2 * math.pi * place / len(found.friends)
        x, y = math.sin(angle), math.cos(angle)
        width = float(8 * counts.abs() / found.counts.abs().max())
        left.plot([0, x], [0, y], "silver" if counts > 0 else "r:", lw=width, zorder=0)
        left.scatter(x, y, s=350, color=COLOURS[found.y[friend]])
        left.text(1.35 * x, 1.18 * y, f"{found.names[friend]}\n{counts:+.2f}", **middle)
    left.scatter(0, 0, s=1800, color=COLOURS[found.target[0]])
    left.text(0, 0, found.names[0].replace(" ", "\n"), color="white", **middle)
    for club, colour in zip(CLUBS, COLOURS, strict=False):
        left.scatter([], [], s=90, color=colour, label=club)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(CLUBS), frameon=False)
    left.set(xlim=(-1.7, 1.7), ylim=(-1.35, 1.35), title="friends (dotted: against it)")
    left.axis("off")
    top = found.words.abs().topk(12).indices
    top = top[found.words[top].argsort()]
    colours = [COLOURS[TOPIC[i]] for i in top]
    right.barh([WORDS[i] for i in top], found.words[top].tolist(), color=colours)
    right.set_title("words of all of them, in the colour of their club")
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=15)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--person", choices=PEOPLE, metavar="NAME", help="who is explained")
    parser.add_argument("--out", default="explanation.png", help="the picture (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = draw_people()
    model = gas.to_scalable(GraphSAGE(len(WORDS), 32, 2, len(CLUBS), dropout=0.5), data)
    graph = gas.cluster(data, num_parts=12, model=model, log=False)
    train(model, graph)
    right = model.predict(graph).argmax(dim=1) == data.y
    print(f"test accuracy  {100 * right[~data.train_mask].float().mean():.1f} %")

    model.eval()
    loader = gas.SubgraphLoader(graph, layout="edge_index", log=False)
    tested = [PEOPLE[i] for i in (~data.train_mask).nonzero().view(-1)]
    shares = []
    for found in (explain(model, loader, name) for name in tested[:20]):
        club, used = found.target[0], found.x.any(dim=0)
        alike = (found.y[found.friends] == club, TOPIC[used] == club)
        scores = (found.counts, found.words[used])
        shares.append([share_above(*pair) for pair in zip(scores, alike, strict=True)])
    for what, share in zip(("friends", "words"), torch.tensor(shares).nanmean(dim=0), strict=True):
        print(f"{what} of the club count more than others: {100 * share:.1f} % of pairs")

    found = explain(model, loader, args.person or tested[0])
    clubs = [list(CLUBS)[club] for club in found.y]
    title = f"{found.names[0]} is put into {list(CLUBS)[found.target[0]]}, and is of {clubs[0]}"
    friends = [f"{found.names[friend]} ({clubs[friend]})" for friend in found.friends[:3]]
    words = [WORDS[word] for word in found.words.topk(3).indices]
    print(f"{title}, because of {', '.join(friends)} and of {', '.join(words)}")
    draw(found, title, args.out)
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    main()
