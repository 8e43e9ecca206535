"""Feedback rules: training examples made by rules, which are kept if they help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas

CONFLICTS = ("relabel", "drop", "keep")


class Rule(NamedTuple):
    """A feedback rule: the class that a model should predict for some nodes, whatever their labels.

    * ``covers``: a function of the graph, or its result: a mask of shape ``[N]``, bool.
    * ``label``: a class, or a probability for each class.
    """

    covers: Callable[[Data], Tensor] | Tensor
    label: int | Sequence[float] | Tensor


class Score(NamedTuple):
    """Scores of predictions: ``agreement`` with rules on covered nodes, ``accuracy`` on others."""

    agreement: float
    accuracy: float

    @property
    def objective(self) -> float:
        """Return the product of both."""
        return self.agreement * self.accuracy


class RuleOversampling(gas.augment.Resumable):
    """Oversampling of training examples by feedback rules; examples that help are kept.

    After FROTE (Alkan et al., *FROTE: Feedback Rule-driven Oversampling for Editing Models*,
    MLSys 2022): examples are proposed, the model is trained with them, and they are kept if the
    objective on held-out nodes has improved. An example is a node of the graph that a rule covers,
    with the rule's label; the graph, its features and ``y`` are never modified, and no nodes are
    generated. It runs once per epoch, also together with augmentations::

        rules = RuleOversampling(graph, [Rule(lambda data: data.x[:, 0] > 2, 1)],
                                             graph.train_mask, graph.val_mask)
        rules.update(out)  # The outputs to compare with.
        for epoch in range(100):
            rules.run()
            ...  # Train on rules.examples(n_id) of each batch's own nodes.
            rules.update(out)  # In each epoch, or in every few.

    All masks and outputs are in the order of ``data``, such as the graph of ``gas.cluster``, whose
    rows are the ``n_id`` of batches.

    Args:
        data: The graph, with labels ``y`` of shape ``[N]``, integers.
        rules: The rules. If several cover a node, their labels are equally likely.
        train_mask: The nodes whose labels are used for training, of shape ``[N]``, bool.
        held_out: The labelled nodes that measure the objective, of shape ``[N]``, bool.
        pool: The nodes that may become examples, of shape ``[N]``, bool; their ``y`` isn't read.
            (default: ``train_mask``)
        num_classes: The number of classes.
            (default: that of the labels that are read and of the rules)
        fraction: The examples of a proposal, as a fraction of the training nodes.
            (default: ``0.1``)
        quota: The most examples that are kept, as a fraction of the training nodes.
            (default: ``0.5``)
        conflicts: The label of training nodes that a rule covers: ``"relabel"`` takes the rule's,
            ``"keep"`` their own, ``"drop"`` leaves these nodes out. (default: ``"relabel"``)
        generator: A generator of the CPU. (default: a new one, seeded by PyTorch's)

    Raises:
        ValueError: If an argument is unusable, naming it.
    """

    def __init__(
        self,
        data: Data,
        rules: Sequence[Rule],
        train_mask: Tensor,
        held_out: Tensor,
        *,
        pool: Tensor | None = None,
        num_classes: int | None = None,
        fraction: float = 0.1,
        quota: float = 0.5,
        conflicts: str = "relabel",
        generator: torch.Generator | None = None,
    ) -> None:
        gas.augment.check_fraction(fraction=fraction)
        gas.augment.check_not_negative(quota=quota)
        if conflicts not in CONFLICTS:
            raise ValueError(
                f"'conflicts' is {conflicts!r}, expected one of {', '.join(CONFLICTS)}"
            )
        y, size = data.get("y"), int(data.num_nodes or 0)
        if y is None or y.dim() != 1 or y.is_floating_point() or y.size(0) != size:
            found = "missing" if y is None else f"{y.dtype} of shape {list(y.shape)}"
            raise ValueError(f"'y' is {found}, expected one class of each of the {size} nodes")
        pool = train_mask if pool is None else pool
        masks = {"train_mask": train_mask, "held_out": held_out, "pool": pool}
        for name, mask in masks.items():
            gas.augment.check_mask(name, mask, size, "nodes", y.device)
            if name != "held_out" and (both := int((mask & held_out).sum())):
                raise ValueError(
                    f"'{name}' and 'held_out' share {both} nodes: what judges examples can't be "
                    "trained on, take it out of one of them"
                )
        self.y, self.train_mask, self.held_out, self.pool = y.long(), train_mask, held_out, pool
        if not len(rules) or not all(isinstance(rule, Rule) for rule in rules):
            raise ValueError(
                f"'rules' is {rules!r}, expected a list of gas.contrib.rules.Rule, not empty"
            )
        masks_of_rules = [
            rule.covers(data) if callable(rule.covers) else rule.covers for rule in rules
        ]
        for number, mask in enumerate(masks_of_rules):
            gas.augment.check_mask(f"rules[{number}].covers", mask, size, "nodes", y.device)
        self.covers = torch.stack(masks_of_rules)  # [R, N]
        """Masks of the nodes that each rule covers, of shape ``[R, N]``, bool."""
        self._check_held_out()
        read = y[train_mask | held_out]
        if num_classes is None:
            given = [_read_label(rule.label) for rule in rules]
            last = [label if isinstance(label, int) else label.numel() - 1 for label in given]
            num_classes = 1 + max(int(read.max()), *last)
        if bool(((read < 0) | (read >= num_classes)).any()):
            raise ValueError(
                f"'y' has the classes {int(read.min())} to {int(read.max())} where it is read, "
                f"expected those of [0, {num_classes})"
            )
        self.num_classes = num_classes
        labels = [
            _to_probabilities(number, rule.label, num_classes) for number, rule in enumerate(rules)
        ]
        self.labels = torch.stack(labels).to(y.device)
        """The label of each rule as probabilities, of shape ``[R, C]``."""
        self.conflicts = conflicts
        num_trained = int(train_mask.sum())
        self.num_proposed = round(fraction * num_trained)
        self.most = round(quota * num_trained)
        super().__init__(generator)
        self._kept = torch.zeros(self.covers.shape, dtype=torch.int32, device=y.device)
        self._tried = torch.zeros_like(self._kept)
        self._best = torch.tensor(-1.0, dtype=torch.double)  # No objective has been measured.

    def _check_held_out(self) -> None:
        """Refuse held-out nodes for which one of both scores isn't defined."""
        covered = self.covers.any(dim=0)
        for kind, mask in (("that a rule covers", covered), ("that no rule covers", ~covered)):
            if not bool((mask & self.held_out).any()):
                raise ValueError(
                    f"'held_out' has no node {kind}: examples are judged by the rules where they "
                    "cover, and by the labels elsewhere, expected some nodes of both"
                )
        if not bool((covered & self.pool).any()):
            raise ValueError("'pool' has no node that a rule covers: expected some to draw from")

    # Examples -----------------------------------------------------------------------------------

    def examples(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training weights and the label distributions of nodes.

        Several labels of one node are averaged, which gives the same cross entropy::

            weight, target = rules.examples(batch.n_id[: batch.batch_size])
            losses = F.cross_entropy(out, target, reduction="none")
            loss = (weight * losses).sum() / weight.sum()

        Args:
            n_id: The nodes, of shape ``[nodes]``, int64.

        Returns:
            ``weight``, of shape ``[nodes]``, 0 for nodes without an example; and ``target``, the
            probabilities, of shape ``[nodes, C]``, 0 for such nodes.
        """
        rows = n_id.to(self.y.device)
        covers, trained = self.covers[:, rows], self.train_mask[rows]
        is_edited = covers.any(dim=0) & (self.conflicts != "keep")
        own = torch.zeros(rows.numel(), self.num_classes, device=rows.device)
        own[trained] = torch.eye(self.num_classes, device=rows.device)[self.y[rows[trained]]]
        asked = self._rule_labels(covers) * trained[:, None] * (self.conflicts == "relabel")
        own = torch.where(is_edited[:, None], asked, own)
        times = (self._kept[:, rows] + self._tried[:, rows]).to(own.dtype)
        total = own + times.t() @ self.labels
        weight = total.sum(dim=1)
        return weight.to(n_id.device), (total / weight.clamp(min=1e-12)[:, None]).to(n_id.device)

    def _rule_labels(self, covers: Tensor) -> Tensor:
        """Return the mean label of the rules of each node, of shape ``[nodes, C]``; 0 without."""
        covers = covers.to(self.labels.dtype)
        return covers.t() @ self.labels / covers.sum(dim=0).clamp(min=1)[:, None]

    @property
    def num_examples(self) -> int:
        """Return the number of kept examples."""
        return int(self._kept.sum())

    # Proposals ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Propose examples, unless some are on trial or :meth:`update` hasn't been called yet.

        Rules are drawn uniformly, and then nodes of ``pool`` that the rule covers.
        """
        count = min(self.num_proposed, self.most - self.num_examples)
        if self._best < 0 or count < 1 or bool(self._tried.any()):
            return
        pools = [(number, (mask & self.pool).nonzero().view(-1)) for number, mask in
                 enumerate(self.covers)]  # fmt: skip
        pools = [(number, nodes) for number, nodes in pools if nodes.numel()]
        which = torch.randint(len(pools), (count,), generator=self.generator)
        for place, (number, nodes) in enumerate(pools):
            size = int((which == place).sum())
            drawn = torch.randint(nodes.numel(), (size,), generator=self.generator)
            times = torch.bincount(nodes.cpu()[drawn], minlength=self.y.numel())
            self._tried[number] = times.to(self._tried)

    def score(self, out: Tensor, mask: Tensor | None = None) -> Score:
        """Score the predictions on some nodes.

        Args:
            out: The outputs of all nodes, of shape ``[N, C]``.
            mask: The nodes, of shape ``[N]``, bool. (default: ``held_out``)

        Returns:
            The mean probability of the predicted class by the rules, over covered nodes, and the
            accuracy on the others; 1 if there are none.
        """
        if out.dim() != 2 or list(out.shape) != [self.y.numel(), self.num_classes]:
            raise ValueError(
                f"'out' has shape {list(out.shape)}, expected the outputs of all nodes, "
                f"[{self.y.numel()}, {self.num_classes}]"
            )
        mask = self.held_out if mask is None else mask
        gas.augment.check_mask("mask", mask, self.y.numel(), "nodes", self.y.device)
        pred = out.detach().argmax(dim=1).to(self.y.device)
        covered = self.covers.any(dim=0)
        inside, outside = mask & covered, mask & ~covered
        agreement = self._rule_labels(self.covers[:, inside]).gather(1, pred[inside, None]).double()
        correct = (pred[outside] == self.y[outside]).double()
        means = [float(value.mean()) if value.numel() else 1.0 for value in (agreement, correct)]
        return Score(*means)

    def update(self, out: Tensor) -> bool:
        """Keep the examples on trial if the objective is the best so far.

        The first call measures the objective without examples.

        Args:
            out: The outputs of all nodes, of shape ``[N, C]``.

        Returns:
            Whether examples were kept. Others are discarded, but the model's weights, which were
            trained with them, stay as they are.
        """
        objective = self.score(out).objective
        tried = bool(self._tried.any())
        is_better = objective > float(self._best)
        if tried and is_better:
            self._kept += self._tried
        self._tried.zero_()
        if is_better:
            self._best.fill_(objective)
        return tried and is_better

    # Checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to continue from, with the same examples and random numbers."""
        return {
            "kept": self._kept.clone(),
            "tried": self._tried.clone(),
            "best": self._best.clone(),
            "generator": self.generator.get_state(),
        }

    def _load(self, state: dict[str, Tensor]) -> None:
        self._kept, self._tried = state["kept"].clone(), state["tried"].clone()
        self._best = state["best"].clone()
        self.generator.set_state(state["generator"])

    def __repr__(self) -> str:
        covered = int(self.covers.any(dim=0).sum())
        return (
            f"{self.__class__.__name__}(num_rules={len(self.labels)}, covered={covered}, "
            f"num_examples={self.num_examples})"
        )


def _to_probabilities(
    number: int, label: int | Sequence[float] | Tensor, num_classes: int
) -> Tensor:
    """Return the label of a rule as probabilities."""
    given = _read_label(label)
    if isinstance(given, int):
        if 0 <= given < num_classes:
            return torch.nn.functional.one_hot(torch.tensor(given), num_classes).float()
    elif list(given.shape) == [num_classes] and (given >= 0).all() and 0 < given.sum() < math.inf:
        return given / given.sum()
    raise ValueError(
        f"'rules[{number}].label' is {label!r}, expected a class in [0, {num_classes}) or "
        f"{num_classes} probabilities"
    )


def _read_label(label: Any) -> int | Tensor:
    """Return the label of a rule: a class, or numbers, none if it is neither."""
    try:
        given = torch.as_tensor(label).detach()
    except (TypeError, ValueError, RuntimeError):
        return torch.empty(0)
    is_class = given.dim() == 0 and not given.is_floating_point()
    return int(given) if is_class else given.float()
