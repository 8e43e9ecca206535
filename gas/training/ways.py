"""Ways to cut a graph into mini-batches, and the epochs that training then takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

MOST_PARTS = 2048
LEAST_NODES = 100  # Nodes per part.
# Of up to 64 parts per step, of 25 nodes at least: many small ones make batches alike.
MIXED, LEAST_MIXED = 64, 25
# Epochs until the full batch's best validation score less half a point, relative to those of the
# full batch, by steps per epoch: geometric means of GraphSAGE and GCN in time_to_accuracy.py.
EPOCHS = {1: 1.0, 2: 0.46, 4: 0.34, 8: 0.25, 16: 0.31, 32: 0.31}

Way = tuple[int, int, int]  # Parts, parts per mini-batch, mini-batches per step.


def relative_epochs(steps: int) -> float:
    """Return the epochs until a full batch's accuracy, relative to those of the full batch.

    Between measured numbers of steps per epoch, it is that of the next smaller one. Beyond the
    largest, which wasn't measured, it is assumed to grow with the root of the steps.
    """
    largest = max(EPOCHS)
    known = EPOCHS[max(number for number in EPOCHS if number <= steps)]
    return known * math.sqrt(max(1.0, steps / largest))


def find_ways(
    num_nodes: int, num_parts: int | None, batch_size: int | None, steps: int | None
) -> list[Way]:
    """Return ways to cut a graph so that an epoch has ``steps`` steps of equal size.

    Without ``steps``, an epoch has any power of two; one step is a full batch.
    """
    if steps is not None or (num_parts is not None and batch_size is not None):
        return list(_find_ways(num_nodes, num_parts, batch_size, steps or 1))
    most = min(MOST_PARTS, max(1, num_nodes // LEAST_MIXED))
    ways: list[Way] = []
    for number in (2**i for i in range(12)):
        if num_parts is not None:
            ways.append((num_parts, max(1, num_parts // number), 1))
        elif batch_size is not None:
            if batch_size * number <= max(batch_size, min(MOST_PARTS, num_nodes)):
                ways.append((batch_size * number, batch_size, 1))
        elif number <= most:
            per_step = min(MIXED, most // number)
            ways.append((number * per_step, per_step, 1) if number > 1 else (1, 1, 1))
    return list(dict.fromkeys(ways))


def _find_ways(
    num_nodes: int, num_parts: int | None, batch_size: int | None, steps: int
) -> Iterator[Way]:
    """Yield ways with one number of steps."""
    steps = min(steps, num_nodes)
    if num_parts is not None:
        numbers = [num_parts]
    elif batch_size is not None:
        numbers = [min(steps * batch_size, num_nodes)]
    else:
        most = min(MOST_PARTS, num_nodes // LEAST_NODES)
        doublings = range(max(0, int(math.log2(max(1, most // steps)))) + 1)
        numbers = [steps * 2**i for i in doublings]
    for parts in numbers:
        per_step = min(batch_size or max(1, parts // steps), parts)
        for micro in range(1, per_step + 1):
            if per_step % micro == 0:
                yield parts, per_step // micro, micro
