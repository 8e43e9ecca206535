"""Where the random numbers of a process come from, taken down and set again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """The states of Python's generator, NumPy's, and PyTorch's of every device."""
    name, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).astype(np.int64), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def check(found: Any) -> None:
    """Refuses what isn't such states, by setting generators of their own to them.

    Raises:
        ValueError: Or whatever the generators say of it.
    """
    random.Random().setstate(found["python"])
    np.random.RandomState().set_state(_numpy(found["numpy"]))
    torch.Generator().set_state(found["torch"])


def restore(found: dict[str, Any]) -> None:
    """Sets the generators; those of devices that aren't here are left out."""
    random.setstate(found["python"])
    np.random.set_state(_numpy(found["numpy"]))
    torch.set_rng_state(found["torch"])
    for number, state in enumerate(found.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, number)


def _numpy(state: Any) -> Any:
    name, keys, *rest = state
    return (name, np.asarray(keys).astype(np.uint32), *rest)
