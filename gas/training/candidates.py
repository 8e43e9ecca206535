"""What training is predicted to take, for a way to cut a graph and to store histories."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gas.history import Codec
from gas.history.store import StoreFactory
from gas.loader.subgraph import CACHE_BYTES
from gas.scalable.model import ScalableGNN
from gas.training.cost import Cost, Measured
from gas.training.sample import Shape

Way = tuple[int, int, int]  # Parts, parts per mini-batch, mini-batches per step.
# Of what a mini-batch takes: blocks that were freed, and that the C library keeps.
FREED = 1.0


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what it is predicted to take; see :class:`gas.training.Plan`."""

    num_parts: int
    batch_size: int
    micro_batches: int
    dtype: str
    store: str
    peak_bytes: int
    epoch_seconds: float
    components: dict[str, int] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Extra:
    """What rows take that are stored in another way: more than the first, for each of them."""

    seconds: float = 0.0
    bytes: float = 0.0

    @staticmethod
    def between(one: Measured, other: Measured, exact: bool) -> Extra:
        """The difference of two measurements of one mini-batch."""
        rows = max(1.0, one.shape.own + one.shape.halo)
        seconds = (other.step - one.step) / rows
        # The same rows elsewhere are never read faster; what seems so is noise.
        return Extra(
            max(0.0, seconds) if exact else seconds,
            (other.training.peak - one.training.peak) / rows,
        )


@dataclass(frozen=True)
class Predictor:
    """Makes candidates: what they take, from what mini-batches cost.

    ``stays`` is what all of them hold, ``graph`` the size of the whole graph, ``per_step`` the
    seconds of a step of the optimizer, ``sets`` the number of sets of histories.
    """

    model: ScalableGNN
    cost: Cost
    stays: dict[str, int]
    graph: Shape
    per_step: float
    evaluation: str
    sets: int

    def __call__(
        self,
        way: Way,
        shapes: tuple[Shape, Shape],
        codec: Codec,
        store: str | StoreFactory | None,
        extra: Extra,
    ) -> Candidate:
        """What it takes to train one way.

        Args:
            way: How the graph is cut.
            shapes: The mean mini-batch then, and the largest.
            codec: How rows of histories are stored.
            store: Where.
            extra: What rows take that are stored so, beyond those that were measured.
        """
        (num_parts, batch_size, micro), (mean, largest), cost = way, shapes, self.cost
        number = math.ceil(num_parts / batch_size)
        between = number * cost.between(mean)
        kept = batch_size == 1 and between <= CACHE_BYTES
        components = dict(self.stays)
        if batch_size == 1:
            components["kept batches"] = int(min(between, CACHE_BYTES))
        components |= self._histories(codec, store)
        components |= self._batch(largest, extra)
        seconds = cost.step(mean) + (0 if kept else cost.cut(mean))
        seconds += extra.seconds * (mean.own + mean.halo)
        return Candidate(
            num_parts,
            batch_size,
            micro,
            codec.name,
            store if isinstance(store, str) else "custom",
            sum(components.values()),
            number * seconds + number / micro * self.per_step,
            components,
        )

    def _histories(self, codec: Codec, store: str | StoreFactory | None) -> dict[str, int]:
        widths = [history.embedding_dim for history in self.model.histories]
        rows = self.sets * int(self.graph.own)
        held = {"ages of histories": rows * 4 * len(widths)}
        if store != "disk":
            held["histories"] = rows * sum(map(codec.row_bytes, widths))
        return held

    def _batch(self, largest: Shape, extra: Extra) -> dict[str, int]:
        """What the largest mini-batch takes, or evaluation, if that is more."""
        more = extra.bytes * (largest.own + largest.halo)
        batch, kept = self.cost.batch(largest), self.cost.kept(largest) + more
        peak = max(kept, self.cost.peak(largest) + more)
        training, evaluating = 2 * batch + peak, 0.0
        if self.evaluation == "full":
            evaluating = self.cost.evaluation(self.graph)
        elif self.evaluation == "layerwise":
            evaluating = 2 * batch + self.cost.evaluation(largest) + more
        evaluating += self.stays.get("outputs", 0)  # Beside those of the best epoch.
        return {
            "batch": int(batch),
            "batch before": int(batch),
            "activations": int(kept),
            "gradients of activations": int(peak - kept),
            "evaluation, beyond training": int(max(0, evaluating - training)),
            "freed, not given back": int(FREED * max(training, evaluating)),
        }
