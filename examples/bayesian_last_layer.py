"""Puts a Bayesian last layer on embeddings of a model with histories: how sure may it be?

    python examples/bayesian_last_layer.py                     # a generated graph, no network
    python examples/bayesian_last_layer.py --dataset Cora --root data --prior 1
    python examples/bayesian_last_layer.py --fit train         # what not to do, see below

A model is trained with histories; its body is frozen, and gives embeddings of all nodes layer by
layer. In its last layer, a torch.nn.Linear, each weight gets a normal prior, whose width is learnt,
and a normal posterior (Pyro); predictions are averages over draws from it.

It is fitted on the validation nodes: the body knows the labels of training nodes, and a posterior
of their embeddings is sure of too much. As the other nodes' labels alone might help, the same layer
is fitted to them by maximum likelihood, too. The width that the evidence bound prefers can be too
narrow: on Cora a width of 1 is better.
"""

from __future__ import annotations

import argparse
import copy

import pyro
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pyro.distributions import Categorical, Normal, constraints
from pyro.infer import SVI, Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.func import functional_call
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas


def graph_of(name: str | None, root: str) -> Data:
    if name is not None:
        return gas.get_data(root, name)[0]
    data = gas.datasets.planted_partition(3000, 6.0, 8, 32, mixing=0.5, noise=5.0)
    masks = gas.datasets.gen_masks(data.y, 50, 50, num_splits=1)
    data.train_mask, data.val_mask, data.test_mask = (mask.view(-1) for mask in masks)
    return data


def train(net: GraphSAGE, data: Data, epochs: int) -> tuple[torch.nn.Linear, Tensor]:
    """Train by histories; return the last layer, and the embeddings it had of all nodes."""
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_parts=20, model=model, log=False)
    loader = gas.SubgraphLoader(graph, batch_size=5, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.refresh(graph)
    for _ in range(epochs):
        gas.train_epoch(model, loader, optimizer)
    last, net.lin = net.lin, torch.nn.Identity()
    return last, gas.to_scalable(net, data).predict(graph)


def fit_bayesian(
    layer: torch.nn.Linear, z: Tensor, y: Tensor, steps: int, width: float | None
) -> tuple[Predictive, float]:
    """Fit a normal distribution of each weight to some nodes.

    Returns what draws from it, and the width of the prior.
    """

    def model(z: Tensor, y: Tensor | None = None) -> Tensor:
        wide = torch.tensor(1.0 if width is None else width)
        wide = wide if width is not None else pyro.param("width", wide, constraints.positive)
        drawn = {
            name: pyro.sample(name, Normal(torch.zeros_like(value), wide).to_event(value.dim()))
            for name, value in layer.named_parameters()
        }
        logits = functional_call(layer, drawn, z)
        with pyro.plate("nodes", len(z)):
            pyro.sample("y", Categorical(logits=logits), obs=y)
        return logits

    pyro.clear_param_store()
    guide = AutoNormal(model, init_scale=0.05)
    optimizer = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.1 ** (1 / steps)})
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    for _ in range(steps):
        svi.step(z, y)
    found = pyro.param("width").item() if width is None else width
    return Predictive(model, guide=guide, num_samples=100, return_sites=["_RETURN"]), found


def most_likely(layer: torch.nn.Linear, z: Tensor, y: Tensor) -> torch.nn.Linear:
    """Fit the same layer to the same nodes without a prior."""
    layer = copy.deepcopy(layer)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200)

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(z), y)
        loss.backward()
        return loss

    optimizer.step(loss)
    return layer


def bins_of(prob: Tensor, y: Tensor, bins: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """By confidence: the share of nodes, how many of them are right, and the mean confidence."""
    sure, label = prob.max(dim=1)
    member = F.one_hot((sure * bins).long().clamp(max=bins - 1), bins).float()
    size = member.sum(dim=0)
    right, sure = (member.T @ value / size.clamp(min=1) for value in ((label == y).float(), sure))
    return size / len(y), right, sure


def calibration_error(prob: Tensor, y: Tensor) -> float:
    """Compute the expected calibration error: the distance of confidence from accuracy, by bins."""
    share, right, sure = bins_of(prob, y)
    return float((share * (right - sure).abs()).sum())


def draw(panels: dict[str, Tensor], y: Tensor, path: str) -> None:
    """Draw a reliability diagram for each: bars on the diagonal are calibrated."""
    figure = Figure(figsize=(4 * len(panels), 4.5), layout="constrained")
    for (name, prob), axis in zip(panels.items(), figure.subplots(1, len(panels)), strict=True):
        share, right, sure = bins_of(prob, y)
        middle = [(i + 0.5) / len(share) for i in range(len(share))]
        for value, colour in ((torch.maximum(right, sure), "#efb8b4"), (right, "#4e79a7")):
            axis.bar(middle, value.tolist(), color=colour, width=0.9 / len(share))
        axis.plot([0, 1], [0, 1], color="#2f2f2f", lw=1, ls="--")
        axis.step(middle, share.tolist(), where="mid", color="#e6a532")
        title = f"{name}\nECE {100 * calibration_error(prob, y):.1f} %"
        axis.set(title=title, ylabel="share of right ones", xlim=(0, 1), ylim=(0, 1))
    figure.supxlabel("confidence (red: surer than right; line: share of nodes)", fontsize=10)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", help="name or path (a generated graph that is hard to learn)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--fit", choices=("val", "train"), default="val", help="(%(default)s)")
    parser.add_argument("--prior", type=float, metavar="WIDTH", help="of the prior (learnt)")
    parser.add_argument("--epochs", type=int, default=60, help="of training (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of inference (%(default)s)")
    parser.add_argument("--out", default="reliability.png", help="the diagram (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = graph_of(args.dataset, args.root)
    net = GraphSAGE(data.num_features, 32, 2, int(data.y.max()) + 1, dropout=0.5, jk="last")
    last, z = train(net, data, args.epochs)
    y, mask, test = data.y, data[f"{args.fit}_mask"], data.test_mask
    likely = most_likely(last, z[mask], y[mask])
    predictive, width = fit_bayesian(last, z[mask], y[mask], args.steps, args.prior)
    print(f"nodes          {int(mask.sum())} to fit to, {int(test.sum())} to test on")
    print(f"prior          N(0, {width:.2f}²)")

    with torch.no_grad():
        panels = {
            "as it was trained": last(z[test]).softmax(dim=1),
            "refitted, most likely": likely(z[test]).softmax(dim=1),
            "refitted, Bayesian": predictive(z[test])["_RETURN"].softmax(dim=2).mean(dim=0),
        }
    print("last layer              accuracy  confidence     NLL      ECE")
    for name, prob in panels.items():
        sure, label = prob.max(dim=1)
        right, sure = 100 * (label == y[test]).float().mean(), 100 * sure.mean()
        nll = F.nll_loss(prob.clamp(min=1e-12).log(), y[test])
        error = 100 * calibration_error(prob, y[test])
        print(f"{name:22} {right:8.2f} % {sure:9.2f} % {nll:7.3f} {error:6.2f} %")
    draw(panels, y[test], args.out)
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    main()
