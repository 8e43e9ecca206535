"""Errors of ``gas.augment``."""

from types import SimpleNamespace

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import gas
from gas.augment import DropEdge, MaskFeatures, Views, mh_aug_loss
from gas.contrib.rules import Rule, RuleOversampling
from refusals import load, ring

PAPER = dict(
    mu_e=0.3, mu_v=0.7, sigma_delta_e=0.1, sigma_delta_v=0.01, a_e=10, b_e=1, a_v=1, b_v=1, lam1=5,
    lam2=0.9999, lam3=1, lam4=0.999,
)  # fmt: skip
KEPT = torch.ones(4, dtype=torch.bool)
NAN = torch.full((4, 2), float("nan"))


def chain(data=None, **options):
    return gas.MHAug(ring() if data is None else data, **{**PAPER, **options})


def drop(data=None, **options):
    return DropEdge(ring() if data is None else data, **options)


def without_one(undirected):
    mask = torch.ones(8, dtype=torch.bool)
    mask[0] = False
    drop(undirected=undirected).reset(mask)


def changed_graph():
    data = ring()
    augmentation = drop(data)
    data.edge_index[0, 0] = 2
    augmentation(data)


def state_with(**changes):
    augmentation = drop()
    augmentation.load_state_dict({**augmentation.state_dict(), **changes})


def stuck(t):
    augmentation = chain(num_steps=2)
    t.patch.setattr(type(augmentation._tally), "acceptance_rate", 0.002)
    augmentation._tally.steps = 999
    augmentation.step()


def views(transform, data=None):
    data = ring() if data is None else data
    return Views(drop(data), data, transform)


class Shuffled(T.BaseTransform):
    """Weights by features, which a view can't compute again."""

    def __init__(self, change):
        self.change = change

    def forward(self, data):
        self.change(data)
        return data

    def __repr__(self):
        return "MyTransform()"


def turned(data):
    data.edge_index = data.edge_index.flip(1)


def by_features(data):
    data.edge_weight = data.x[data.edge_index[0], 0]


def drawn(data):
    data.edge_weight = torch.rand(data.edge_index.size(1))


def without_one_of_few(data):
    few = data.edge_index.size(1) < 8
    data.edge_index = data.edge_index[:, int(few) :]
    data.edge_weight = torch.ones(data.edge_index.size(1))


def with_degrees(data):
    data.degree = torch.bincount(data.edge_index[1], minlength=4)


def rules(covers=(0, 1), label=1, **options):
    """Rules on two nodes that are trained on, and two by which they are judged."""
    given = {"train_mask": mask(0, 2), "held_out": mask(1, 3), **options}
    masks = given.pop("train_mask"), given.pop("held_out")
    data = given.pop("data", ring())
    listed = given.pop("rules", [Rule(mask(*covers), label)])
    return RuleOversampling(data, listed, *masks, **given)


def mask(*nodes):
    return torch.zeros(4, dtype=torch.bool).index_fill_(0, torch.tensor(nodes), True)


def loss(y=None, **options):
    return mh_aug_loss(*[torch.ones(4, 2)] * 3, ring().y if y is None else y, **options)


LOOPED = T.AddSelfLoops()(ring())
WEIGHTED = T.GCNNorm()(ring())

CASES = {
    "DropEdge, no graph": lambda t: DropEdge(0.3),
    "DropEdge, a graph of both": lambda t: drop(ring(adj_t=torch.eye(4).to_sparse())),
    "DropEdge, a graph of adj_t": lambda t: drop(T.ToSparseTensor(layout=torch.sparse_csr)(ring())),
    "DropEdge, no nodes": lambda t: drop(Data(edge_index=ring().edge_index[:, :0], num_nodes=0)),
    "DropEdge, self-loops alone": lambda t: drop(ring(edge_index=torch.arange(4).expand(2, 4))),
    "DropEdge, more than certain": lambda t: drop(p=1.5),
    "DropEdge, undirected, a one-way edge": lambda t: drop(
        ring(edge_index=ring().edge_index[:, :5]), undirected=True
    ),
    "DropEdge, no steps": lambda t: drop(num_steps=-1),
    "DropEdge, a generator of a GPU": lambda t: drop(
        generator=SimpleNamespace(device=torch.device("cuda"))
    ),
    "MaskFeatures, every node": lambda t: MaskFeatures(ring(), 1.0),
    "reset, a mask as numbers": lambda t: drop().reset(torch.ones(8)),
    "reset, a mask of other edges": lambda t: drop().reset(KEPT),
    "reset, one direction of a pair": lambda t: without_one(True),
    "reset, no node kept": lambda t: drop().reset(node_mask=~KEPT),
    "call, a graph with more edges": lambda t: drop()(LOOPED),
    "call, a graph with other edges": lambda t: drop()(ring(edge_index=ring().edge_index.flip(0))),
    "call, edges changed in place": lambda t: changed_graph(),
    "call, no features": lambda t: drop()(ring(x=None, num_nodes=4)),
    "call, integer features": lambda t: drop()(ring(x=torch.ones(4, 2).long())),
    "call, features on another device": lambda t: drop()(ring(x=torch.ones(4, 2, device="meta"))),
    "load_state_dict, of another class": lambda t: drop().load_state_dict({}),
    "load_state_dict, of another graph": lambda t: state_with(nodes=KEPT[:3]),
    "MHAug, a change above 1": lambda t: chain(mu_e=1.5),
    "MHAug, a negative weight": lambda t: chain(lam1=-1),
    "MHAug, a deviation of 0": lambda t: chain(sigma_delta_e=0.0),
    "MHAug, a deviation that is text": lambda t: chain(sigma_delta_e="0.1"),
    "MHAug, no hops": lambda t: chain(hops=0),
    "MHAug, an unknown proposal": lambda t: chain(proposal="uniform"),
    "MHAug, a list of proposals": lambda t: chain(proposal=["walk"]),
    "MHAug, a rate that is text": lambda t: chain(target_acceptance="high", burn_in=10),
    "MHAug, a seed for a generator": lambda t: chain(generator=3),
    "MHAug, text for a truth value": lambda t: chain(undirected="yes"),
    "MHAug, a rate above 1": lambda t: chain(target_acceptance=2.0, burn_in=10),
    "MHAug, a rate without a burn-in": lambda t: chain(target_acceptance=0.3),
    "MHAug, hardly ever accepted": stuck,
    "update_entropy, of other nodes": lambda t: chain().update_entropy(torch.ones(3, 2)),
    "update_entropy, classes": lambda t: chain().update_entropy(torch.ones(4, dtype=torch.long)),
    "update_entropy, one class": lambda t: chain().update_entropy(torch.ones(4, 1)),
    "update_entropy, a node too many": lambda t: chain().update_entropy(
        torch.ones(1, 2), torch.tensor([4])
    ),
    "update_entropy, training diverged": lambda t: chain().update_entropy(NAN),
    "mh_aug_loss, a number for a teacher": lambda t: loss(teacher_is_first=1),
    "mh_aug_loss, a negative weight": lambda t: gas.augment.mh_aug_loss(
        *torch.zeros(3, 4, 2), torch.zeros(4, dtype=torch.long), kl=-1.0
    ),
    "mh_aug_loss, a weight that is NaN": lambda t: gas.augment.mh_aug_loss(
        *torch.zeros(3, 4, 2), torch.zeros(4, dtype=torch.long), h=float("nan")
    ),
    "mh_aug_loss, labels of other nodes": lambda t: loss(torch.zeros(3).long()),
    "mh_aug_loss, a mask of other nodes": lambda t: loss(mask=KEPT[:3]),
    "mh_aug_loss, nodes without a class": lambda t: loss(torch.full((4,), -1)),
    "mh_aug_loss, outputs of other nodes": lambda t: mh_aug_loss(
        torch.ones(4, 2), torch.ones(3, 2), torch.ones(4, 2), torch.zeros(4).long(), torch.arange(4)
    ),
    "SubgraphLoader, a class instead of an augmentation": lambda t: load(epoch_transform=DropEdge),
    "Views, a class instead of an augmentation": lambda t: Views(DropEdge, ring()),
    "Views, normalised before": lambda t: load(WEIGHTED, epoch_transform=drop(WEIGHTED)),
    "Views, self-loops and a transform": lambda t: views(T.GCNNorm(), LOOPED),
    "Views, a transform to adj_t": lambda t: views(T.ToSparseTensor(layout=torch.sparse_csr)),
    "Views, a prepared graph": lambda t: views(
        None, gas.to_scalable(GCN(2, 2, 2), ring()).prepare(ring())
    ),
    "Views, a transform that keeps degrees": lambda t: views(Shuffled(with_degrees)),
    "Views, a transform that sorts edges": lambda t: views(Shuffled(turned)),
    "Views, a transform that reads features": lambda t: views(Shuffled(by_features)),
    "Views, a transform that draws weights": lambda t: views(Shuffled(drawn)),
    "RuleOversampling, no rules": lambda t: rules(rules=[]),
    "RuleOversampling, a pair in place of a rule": lambda t: rules(rules=[(0, 1)]),
    "RuleOversampling, a list for a mask": lambda t: rules(train_mask=[0, 2]),
    "RuleOversampling, a rule that covers something else": lambda t: rules(
        rules=[Rule(lambda data: data.x[:, 0], 1)]
    ),
    "RuleOversampling, a class too many": lambda t: rules(label=2, num_classes=2),
    "RuleOversampling, probabilities of other classes": lambda t: rules(
        label=[0.5, 0.5], num_classes=3
    ),
    "RuleOversampling, an infinite probability": lambda t: rules(label=[float("inf"), 1.0]),
    "RuleOversampling, a label in words": lambda t: rules(label="first"),
    "RuleOversampling, no labels": lambda t: rules(data=ring(y=None)),
    "RuleOversampling, several labels": lambda t: rules(data=ring(y=torch.ones(4, 2))),
    "RuleOversampling, a label that is missing": lambda t: rules(
        data=ring(y=torch.tensor([-1, 0, 1, 0]))
    ),
    "RuleOversampling, ids in place of a mask": lambda t: rules(train_mask=torch.tensor([0, 2])),
    "RuleOversampling, trained on and held out": lambda t: rules(train_mask=mask(0, 1)),
    "RuleOversampling, no held-out node is covered": lambda t: rules(covers=(0, 2)),
    "RuleOversampling, everybody held out is covered": lambda t: rules(covers=(0, 1, 3)),
    "RuleOversampling, nothing to draw from": lambda t: rules(covers=(1,)),
    "RuleOversampling, an unknown way": lambda t: rules(conflicts="remove"),
    "RuleOversampling, a fraction above 1": lambda t: rules(fraction=1.5),
    "RuleOversampling, a negative quota": lambda t: rules(quota=-1),
    "RuleOversampling, outputs of a batch": lambda t: rules().update(torch.ones(2, 2)),
    "Views, a transform that removes edges": lambda t: views(Shuffled(without_one_of_few)).run(),
}
