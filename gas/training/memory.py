"""Planning how much of a mini-batch fits into memory at once."""

from __future__ import annotations

from gas.loader import SubgraphLoader
from gas.native.memory import human
from gas.scalable.memory import activation_bytes
from gas.scalable.model import ScalableGNN

__all__ = ["activation_bytes", "plan_micro_batches"]


def plan_micro_batches(
    model: ScalableGNN, loader: SubgraphLoader, budget_bytes: int
) -> tuple[int, int]:
    """Splits a loader's mini-batches into micro-batches that fit a budget of memory.

    A micro-batch has a divisor of the parts; the gradients of several are accumulated before each
    step, with ``train_epoch(..., micro_batches=...)``. The halo between the micro-batches of one
    step comes from the histories.

    Args:
        model: The model.
        loader: The loader of mini-batches.
        budget_bytes: The most that :func:`activation_bytes` may be, of the parts with most edges.

    Returns:
        Parts per micro-batch, and micro-batches per step.

    Raises:
        MemoryError: If not even one part fits.
    """
    if budget_bytes < 1:
        raise ValueError(f"'budget_bytes' is {budget_bytes}, expected a number of bytes")
    parts = loader.batch_size or 1
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    need = 0
    for size in (size for size in range(parts, 0, -1) if parts % size == 0):
        need = activation_bytes(model, loader.cut(largest[:size].tolist()))
        if need <= budget_bytes:
            return size, parts // size
    raise MemoryError(
        f"'budget_bytes' is {budget_bytes}, but one part needs {human(need)}: cut the graph into "
        "more parts, or raise the budget"
    )
