"""What mini-batches of a model cost, by their size: measured on some of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gas.graph.edges import is_row_per_node
from gas.history import Codec
from gas.history.cores import share_cores
from gas.history.store import StoreFactory
from gas.loader import SubData
from gas.loader.unread import attributes
from gas.scalable.live import BatchBytes, backward, batch_bytes
from gas.scalable.memory import left_alone
from gas.scalable.model import ScalableGNN
from gas.training.sample import Shape

# How often a mini-batch is run for its time at least, for how many seconds together, and how often
# at most; the later half counts. It takes so many to see how many cores other processes leave.
TIMED, SECONDS, MOST_TIMED = 3, 0.3, 100


class Linear:
    """A linear function of a mini-batch's size, with no negative coefficient.

    Args:
        shapes: Some sizes.
        values: What is to be said of each; relative errors count.
    """

    def __init__(self, shapes: Sequence[Shape], values: Sequence[float]) -> None:
        rows = torch.tensor([[1.0, *shape] for shape in shapes], dtype=torch.double)
        wanted = torch.tensor(values, dtype=torch.double)
        weight = 1 / wanted.clamp(min=1e-9 + 1e-3 * float(wanted.max()))
        self.coefficients = _not_negative(rows * weight[:, None], wanted * weight)

    def __call__(self, shape: Shape) -> float:
        """The value for a size."""
        one, own, halo, edges = self.coefficients.tolist()
        return one + own * shape.own + halo * shape.halo + edges * shape.edges


def _not_negative(rows: Tensor, values: Tensor) -> Tensor:
    """Least squares without negative coefficients: the best of all sets of columns."""
    best, least = torch.zeros(rows.size(1), dtype=torch.double), float(values.square().sum())
    scale = rows.abs().amax(dim=0).clamp(min=1e-300)
    for size in range(1, min(rows.shape) + 1):
        for chosen in itertools.combinations(range(rows.size(1)), size):
            columns = list(chosen)
            found = torch.linalg.lstsq(
                rows[:, columns] / scale[columns], values[:, None], driver="gelsd"
            ).solution.view(-1)
            error = float((rows[:, columns] / scale[columns] @ found - values).square().sum())
            if bool((found >= 0).all()) and error < least * (1 - 1e-9):
                best, least = torch.zeros_like(best), error
                best[columns] = found / scale[columns]
    return best


class Cost:
    """Seconds and bytes of mini-batches, by their size.

    * ``cut``: seconds to cut a batch out of the graph; ``step``: to run it forward and backward,
      history traffic included;
    * ``batch``, ``kept``, ``peak``: see :class:`gas.scalable.live.BatchBytes`, in training;
    * ``looked_at``: of a batch itself without training, which makes no transposes;
    * ``between``: what a loader keeps of a batch between epochs, if it keeps batches;
    * ``evaluation``: the most that lives besides the batch when it runs without gradient.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        shapes = [one.shape for one in measured]

        def fit(value: Callable[[Measured], float]) -> Linear:
            return Linear(shapes, [value(one) for one in measured])

        self.cut = fit(lambda one: one.cut)
        self.step = fit(lambda one: one.step)
        self.batch = fit(lambda one: one.training.batch)
        self.looked_at = fit(lambda one: one.evaluation.batch)
        self.between = fit(lambda one: one.between)
        self.kept = fit(lambda one: one.training.kept)
        self.peak = fit(lambda one: one.training.peak)
        self.evaluation = fit(lambda one: one.evaluation.peak)
        self.out_bytes = measured[0].training.out / max(measured[0].shape.own, 1)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one mini-batch was measured to cost; see :class:`Cost`."""

    shape: Shape
    cut: float
    step: float
    training: BatchBytes
    evaluation: BatchBytes
    between: int


def measure(
    model: ScalableGNN,
    cut: Callable[[], SubData],
    codec: Codec,
    store: str | StoreFactory | None,
) -> Measured:
    """Measures a mini-batch, with histories of its nodes alone; the model is left as it was.

    Args:
        model: The model.
        cut: Cuts the mini-batch.
        codec: How the histories store rows.
        store: Where.
    """
    first = cut()
    with apart(model, first.n_id.numel(), codec, store) as twin:
        size, nodes = first.batch_size, torch.arange(first.n_id.numel())

        def alone(batch: SubData) -> SubData:
            """A batch of a graph of its nodes alone."""
            return batch._replace(n_id=nodes, offset=torch.tensor([0]), count=torch.tensor([size]))

        io, twin.io = twin.io, "serial"  # What other threads make isn't seen.
        evaluation = batch_bytes(twin, alone(cut()), training=False)
        batch = alone(cut())
        training = batch_bytes(twin, batch)
        between = training.batch - _row_bytes(batch)
        del batch
        twin.io = io
        cuts: list[float] = []
        steps: list[float] = []
        with share_cores() as follow, left_alone(twin):
            twin.train()
            while len(steps) < TIMED or (sum(cuts + steps) < SECONDS and len(steps) < MOST_TIMED):
                follow()
                start = time.perf_counter()
                batch = cut()
                cuts.append(time.perf_counter() - start)
                batch = alone(batch)
                start = time.perf_counter()
                outs = (twin(batch),)
                backward(twin, outs)
                steps.append(time.perf_counter() - start)
                del batch, outs
    return Measured(Shape.of(first), _usual(cuts), _usual(steps), training, evaluation, between)


def _row_bytes(batch: SubData) -> int:
    """The bytes of a batch's rows of nodes, which loaders read anew."""
    return sum(
        value.nbytes
        for key, value in list(attributes(batch.data))
        if isinstance(value, Tensor) and is_row_per_node(batch.data, key)
    )


def _usual(seconds: Sequence[float]) -> float:
    """The median of the later half."""
    return statistics.median(seconds[len(seconds) // 2 :])


@contextlib.contextmanager
def apart(
    model: ScalableGNN, num_nodes: int, codec: Codec, store: str | StoreFactory | None
) -> Iterator[ScalableGNN]:
    """The same model with histories of another kind, that are filled, for so many nodes."""
    twin = model.for_graph(1)
    for history in twin.histories:
        history.close()
    twin.num_nodes = num_nodes
    twin._factory = dataclasses.replace(twin._factory, codec=codec, store=store, path=None)
    twin.histories = twin._make_histories()
    twin.buffer_size = None
    try:
        for history in twin.histories:
            history.push(torch.zeros(num_nodes, history.embedding_dim))
        yield twin
    finally:
        twin.close()


def optimizer_seconds(model: ScalableGNN) -> float:
    """The time of a step of Adam, with copies of the parameters."""
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    if not parameters:
        return 0.0
    optimizer = torch.optim.Adam(parameters, fused=True)
    seconds = []
    for _ in range(TIMED):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return _usual(seconds)
