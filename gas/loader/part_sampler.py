"""Sampling of the parts of an epoch: by labels, staleness or loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch_geometric.data import Data

from gas.graph import PARTS, SHARD, SHARDS, check_ptr
from gas.loader.batch import SubData
from gas.native import check_integer

CRITERIA = ("labels", "staleness", "loss")
MIN_SHARE = 0.1  # Smallest probability of a part, as a fraction of the uniform one.
MOMENTUM = 0.5  # Weight of the running loss of a part in its next value.


class PartSampler(Sampler[int]):
    """Samples the parts of an epoch by labels, loss or staleness.

    Pass it to a loader::

        sampler = gas.PartSampler(graph, by="labels", every=10)
        loader = gas.SubgraphLoader(graph, batch_size=4, sampler=sampler)

    An epoch has the sampled parts only. Histories of other parts aren't updated: :attr:`age` is
    their staleness in epochs, ``model.staleness()`` that in pushes.

    * ``by="labels"``: parts with a labelled node, in random order, or a random ``share`` of them.
    * ``by="loss"``: a ``share`` of these, with probabilities that grow with the running loss of
      their labelled nodes; see :meth:`report`. :meth:`weight` compensates for the probabilities: at
      fixed parameters and histories, the expected gradient of an epoch is that of all parts.
    * ``by="staleness"``: the ``share`` of all parts that were visited least recently, those first;
      the first time in random order. Each part comes as often as any other, and with all parts no
      row gets older than one epoch, instead of nearly two with ``shuffle=True``.

    :func:`gas.training.train_epoch` reports losses and applies the weights. A checkpoint of the
    loader includes the sampler's state.

    Args:
        data: The graph, from :func:`gas.cluster`, with ``train_mask``, which is read once: make
            another sampler for other labels.
        by: ``"labels"``, ``"staleness"`` or ``"loss"``. (default: ``"labels"``)
        share: How many of the parts to draw in an epoch, above 0 and at most 1; rounded up.
            (default: ``1.0``)
        every: Visit each part without labelled nodes once in so many epochs, equally many in each
            epoch and before the others, to limit the staleness of its rows; not with
            ``by="staleness"``. (default: never)
        split: The split of a ``train_mask`` of several splits. (default: ``0``)
        generator: The random generator. (default: PyTorch's, ``torch.manual_seed``)

    Raises:
        ValueError: If the graph or an argument is unusable, naming it.
    """

    def __init__(
        self,
        data: Data,
        by: str = "labels",
        share: float = 1.0,
        every: int | None = None,
        *,
        split: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        if by not in CRITERIA:
            raise ValueError(f"'by' is {by!r}, expected one of {', '.join(map(repr, CRITERIA))}")
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"'share' is {share!r}, expected a part of 1: above 0 and at most 1")
        if by == "loss" and share == 1:
            raise ValueError(
                "'share' is 1 and 'by' is 'loss', but an epoch of all parts has each of them once, "
                "whatever its loss: expected less than 1, such as share=0.5"
            )
        if every is not None:
            check_integer("every", every, 1)
            if by == "staleness":
                raise ValueError(
                    f"'every' is {every} and 'by' is 'staleness', by which every part comes as "
                    f"often as the others: leave it out, and choose share=1 / {every}"
                )
        self.by = by
        self.share = share
        self.every = every
        self.split = split
        self.generator = generator
        self.ptr = _parts_of(data)
        """The parts, of shape ``[num_parts + 1]``."""
        self.labelled = self._count_labelled(data)
        """The number of labelled nodes of each part, of shape ``[num_parts]``."""
        self._first = torch.arange(self.num_parts)  # The parts of which a share is drawn.
        self._others = self._first[:0]
        if by != "staleness":
            self._first, self._others = (
                which.nonzero().view(-1) for which in (self.labelled > 0, self.labelled == 0)
            )
        self._num_first = math.ceil(round(share * self._first.numel(), 9))
        self._num_others = 0 if every is None else math.ceil(self._others.numel() / every)
        # The state in a checkpoint. Draws are numbered from 1.
        self._drawn = 0
        self._drawn_at = torch.zeros(self.num_parts, dtype=torch.long)
        self._chance = torch.ones(self.num_parts, dtype=torch.double)
        self._loss = torch.full((self.num_parts,), math.nan, dtype=torch.double)
        self._reported: list[tuple[Tensor, Tensor]] = []

    @property
    def num_parts(self) -> int:
        """The number of parts of the graph."""
        return self.ptr.numel() - 1

    @property
    def age(self) -> Tensor:
        """Epochs since each part was drawn, of shape ``[num_parts]``.

        0 means in the last epoch, -1 never.
        """
        epoch = torch.div(self._drawn_at - 1, len(self), rounding_mode="floor")
        age = self._drawn // len(self) - 1 - epoch
        return age.masked_fill_(self._drawn_at == 0, -1)

    def __len__(self) -> int:
        return self._num_first + self._num_others

    def __iter__(self) -> Iterator[int]:
        self._update_losses()
        first, others = self._first, self._others
        shuffled = first[torch.randperm(first.numel(), generator=self.generator)]
        if self.by == "staleness":
            order = self._drawn_at[shuffled].argsort(stable=True)
            chosen = shuffled[order[: self._num_first]]
            self._chance.fill_(self._num_first / first.numel())
        else:
            chance = inclusion_probabilities(self._score()[shuffled], self._num_first)
            start = torch.rand((), dtype=torch.double, generator=self.generator)
            chosen = shuffled[systematic_sample(chance, float(start))]
            self._chance[shuffled] = chance
            # Systematic sampling keeps the shuffled order.
            turn = self._drawn_at[others].argsort(stable=True)[: self._num_others]
            chosen = torch.cat([others[turn], chosen])
        self._drawn_at[chosen] = self._drawn + 1 + torch.arange(chosen.numel())
        self._drawn += chosen.numel()
        yield from chosen.tolist()

    def count_labelled(self, batch: SubData) -> list[int]:
        """Return the number of labelled nodes of each part of a mini-batch."""
        return self.labelled[self._parts(batch)].tolist()

    def weight(self, batch: SubData) -> Tensor:
        """Return the loss weight of each labelled node of a mini-batch, of shape ``[labelled]``.

        The sum of ``weight * loss`` over an epoch is in expectation the mean loss of all labelled
        nodes; so is the mean of ``len(loader) * weight * loss`` over steps. A weight is 1 over the
        number of labelled nodes, divided by the probability of the part in this epoch.

        Args:
            batch: A mini-batch of the last epoch.

        Raises:
            ValueError: If it doesn't consist of parts of the graph.
        """
        parts = self._parts(batch)
        weight = 1 / (self._chance[parts] * int(self.labelled.sum()))
        return weight.float().repeat_interleave(self.labelled[parts])

    def report(self, batch: SubData, loss: Tensor) -> None:
        """Report the losses of a mini-batch, for ``by="loss"``.

        Args:
            batch: The mini-batch.
            loss: The loss of each labelled node, in their order, of shape ``[labelled]``.

        Raises:
            ValueError: If ``loss`` has another shape. One that is negative or not finite is found
                when the next epoch begins, or a checkpoint is written.
        """
        parts = self._parts(batch)
        if loss.shape != (int(self.labelled[parts].sum()),):
            raise ValueError(
                f"'loss' has shape {list(loss.shape)}, expected one for each labelled node of the "
                f"mini-batch: [{int(self.labelled[parts].sum())}], of the split {self.split}"
            )
        if self.by == "loss":
            self._reported.append((parts, loss.detach()))  # Read later: a GPU isn't synchronised.

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: drawn parts, their probabilities, and losses."""
        self._update_losses()
        return {
            **self._settings(),
            "drawn": self._drawn,
            "drawn_at": self._drawn_at.clone(),
            "chance": self._chance.clone(),
            "loss": self._loss.clone(),
            "generator": None if self.generator is None else self.generator.get_state(),
        }

    def check_state(self, state: Any) -> None:
        """Refuse the state of another sampler.

        Raises:
            ValueError: Saying what differs.
        """
        for name, value in self._settings().items():
            found = state.get(name) if isinstance(state, Mapping) else None
            if found != value:
                raise ValueError(
                    f"'loader' has a PartSampler whose {name!r} is {value!r}, but it was {found!r} "
                    "when it was saved: make it as it was"
                )
        if (state["generator"] is None) != (self.generator is None):
            raise ValueError(
                "'loader' has a PartSampler with "
                f"{'a' if state['generator'] is None else 'no'} generator, other than what was "
                "saved: make it as it was"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: If it is that of another sampler; nothing has changed then.
        """
        self.check_state(state)
        self._drawn = state["drawn"]
        self._drawn_at, self._chance, self._loss = (
            state[key].clone() for key in ("drawn_at", "chance", "loss")
        )
        self._reported = []
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def _settings(self) -> dict[str, Any]:
        names = ("by", "share", "every", "split", "num_parts")
        return {name: getattr(self, name) for name in names}

    def _count_labelled(self, data: Data) -> Tensor:
        """Count the labelled nodes of each part, of shape ``[num_parts]``."""
        mask = data.get("train_mask")
        if mask is None and self.by == "staleness":
            return torch.zeros(self.num_parts, dtype=torch.long)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() not in (1, 2):
            raise ValueError(
                "'data' has no 'train_mask' of shape [N], or [N, splits], with True for labelled "
                "nodes: set it, or choose by='staleness', which needs none"
            )
        if mask.size(0) != self.ptr[-1]:
            raise ValueError(
                f"'train_mask' of 'data' has {mask.size(0)} rows, expected one for each of its "
                f"{int(self.ptr[-1])} nodes"
            )
        if mask.dim() == 2:
            mask = mask[:, self.split % mask.size(1)]
        total = torch.nn.functional.pad(mask.cpu().long().cumsum(0), (1, 0))
        found = total[self.ptr].diff()
        if self.by != "staleness" and not bool(found.any()):
            raise ValueError(
                "'train_mask' of 'data' is False for all nodes, so that an epoch would have no "
                "part: expected some labelled nodes"
            )
        return found

    def _parts(self, batch: SubData) -> Tensor:
        """Return the parts of a mini-batch, of shape ``[parts]``."""
        parts = torch.searchsorted(self.ptr, batch.offset, right=True) - 1
        sizes = self.ptr.diff()[parts.clamp(max=self.num_parts - 1)]
        if not torch.equal(self.ptr[parts], batch.offset) or not torch.equal(sizes, batch.count):
            raise ValueError(
                f"'batch' has the rows from {batch.offset.tolist()}, which aren't parts of the "
                "sampler's graph: expected a mini-batch of a loader with this sampler"
            )
        return parts

    def _score(self) -> Tensor:
        """Return the scores of parts: the loss of their labelled nodes, or ones.

        The score of a part with unknown loss is the largest of the known ones.
        """
        if self.by == "labels" or bool(self._loss.isnan().all()):
            return torch.ones(self.num_parts, dtype=torch.double)
        score = self._loss * self.labelled
        known = ~score.isnan()
        score = torch.where(known, score, score[known].max())
        score[self.labelled == 0] = 0
        total = float(score.sum())
        if total == 0:
            return torch.ones(self.num_parts, dtype=torch.double)
        return (1 - MIN_SHARE) * score / total + MIN_SHARE / self._first.numel()

    def _update_losses(self) -> None:
        """Update each part's moving average of losses by those that were reported."""
        for parts, losses in self._reported:
            rows = losses.double().cpu().split(self.labelled[parts].tolist())
            for part, loss in zip(parts.tolist(), rows, strict=True):
                if not loss.numel():
                    continue
                mean = float(loss.mean())
                if not 0 <= mean < math.inf:
                    self._reported = []
                    raise ValueError(
                        f"the 'loss' of the part {part} is {mean}, by which nothing can be drawn: "
                        "expected a finite number, at least 0"
                    )
                known = float(self._loss[part])
                self._loss[part] = (
                    mean if math.isnan(known) else MOMENTUM * known + (1 - MOMENTUM) * mean
                )
        self._reported = []

    def __repr__(self) -> str:
        return f"PartSampler(by={self.by!r}, {len(self)} of {self.num_parts} parts an epoch)"


def unwrap_loader(loader: Any) -> Any:
    """Return the loader inside a :class:`gas.PrefetchLoader`; anything else unchanged."""
    while not hasattr(loader, "data") and hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def find_sampler(loader: Any) -> PartSampler | None:
    """Return the part sampler of a loader or a prefetching loader; ``None`` if there is none."""
    batches = getattr(unwrap_loader(loader), "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    return sampler if isinstance(sampler, PartSampler) else None


def _parts_of(data: Data) -> Tensor:
    """Return the parts of a graph."""
    parts = data.get(PARTS) if isinstance(data, Data) else None
    if not isinstance(parts, Tensor) or SHARD in data or SHARDS in data:
        what = "is cut for several processes" if parts is not None else "has no 'parts'"
        raise ValueError(
            f"'data' {what}, expected a graph of one type that gas.cluster(data, num_parts) has "
            "cut for one process"
        )
    check_ptr(parts, int(data.num_nodes or 0))
    return parts.cpu()


def inclusion_probabilities(score: Tensor, number: int) -> Tensor:
    """Return probabilities that are proportional to scores, but at most 1.

    Args:
        score: Of shape ``[n]``, double, none negative, at least ``number`` of them positive.
        number: The sum of the probabilities, the size of the sample.

    Returns:
        Of shape ``[n]``, double.
    """
    sure = torch.zeros_like(score, dtype=torch.bool)
    while True:
        left = number - int(sure.sum())
        chance = score * (left / score[~sure].sum().clamp(min=1e-300))
        more = ~sure & (chance > 1 - 1e-9)  # With a tolerance, so that none is drawn twice.
        if left == 0 or not bool(more.any()):
            return chance.masked_fill(sure, 1)
        sure |= more


def systematic_sample(chance: Tensor, start: float) -> Tensor:
    """Draw a sample without replacement by systematic sampling.

    The points ``start``, ``start + 1``, ... select positions by the cumulative sum of their
    probabilities (Madow, Annals of Mathematical Statistics 20, 1949).

    Args:
        chance: The probabilities, of shape ``[n]``, double, each at most 1; their sum is the size
            of the sample, an integer.
        start: A uniform random number in ``[0, 1)``.

    Returns:
        The positions in the sample, increasing.
    """
    sure = chance == 1
    line = torch.where(sure, 0.0, chance).cumsum(0)
    number = round(float(line[-1])) if line.numel() else 0
    points = start + torch.arange(number, dtype=torch.double)
    # By rounding errors, the last point may exceed the sum.
    free = (~sure).nonzero().view(-1)
    drawn = free[torch.searchsorted(line[free], points, right=True).clamp(max=free.numel() - 1)]
    return torch.cat([sure.nonzero().view(-1), drawn]).sort().values
