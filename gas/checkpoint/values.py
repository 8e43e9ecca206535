"""Conversion of Python values to JSON and named tensors, and back; random states.

Supported are tensors and arrays, numbers (with NaN and infinities), text, and lists, tuples and
dictionaries of these, such as the ``state_dict`` of optimizers, schedulers and augmentations.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gas.checkpoint.tensors import CheckpointError

SPECIAL = ("nan", "inf", "-inf")
DEEPEST = 64  # The largest depth of nested values; a list may contain itself by mistake.


def to_json(value: Any, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Convert a value to JSON; its tensors are added to ``tensors`` under names with a prefix.

    Raises:
        ValueError: If it holds anything else, naming where.
    """
    if depth > DEEPEST:
        raise ValueError(f"{name[:80]!r} is {DEEPEST} values deep, expected fewer")
    if isinstance(value, (np.bool_, np.number)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, (Tensor, np.ndarray)):
        while name in tensors:  # Keys such as 0 and "0" have the same name.
            name += "'"
        if isinstance(value, np.ndarray):  # In the machine's order of bytes.
            value = np.asarray(value, value.dtype.newbyteorder("="), order="C")
        try:
            tensor = torch.as_tensor(value).detach()
        except TypeError as error:
            raise ValueError(f"{name!r} is an array of {value.dtype}: expected numbers") from error
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the device 'meta'" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ValueError(
                f"{name!r} is a tensor {kind}, which a checkpoint can't hold: expected a dense one"
            )
        tensors[name] = tensor
        return {"$tensor" if isinstance(value, Tensor) else "$array": name}

    def inner(key: Any, value: Any) -> Any:
        return to_json(value, f"{name}.{key}", tensors, depth + 1)

    if isinstance(value, (list, tuple)):
        items = [inner(position, item) for position, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(
            isinstance(key, str) and not key.startswith("$") for key in value
        ):
            return {key: inner(key, item) for key, item in value.items()}
        pairs = [[inner("key", key), inner(key, item)] for key, item in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    raise ValueError(
        f"{name!r} is of the type {type(value).__name__}, which a checkpoint can't hold: expected "
        "numbers, text, tensors, and lists and dictionaries of these, or an object with a "
        "state_dict()"
    )


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Convert a value back; see :func:`to_json`."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: from_json(item, tensors) for key, item in value.items()}
    content = value[kind]
    if kind == "$float" and content in SPECIAL:
        return float(content)
    if kind in ("$tensor", "$array") and isinstance(content, str) and content in tensors:
        found = tensors[content]
        return found if kind == "$tensor" else found.numpy()
    if kind in ("$tuple", "$dict", "$counter") and isinstance(content, list):
        items = [from_json(item, tensors) for item in content]
        if kind == "$tuple":
            return tuple(items)
        try:
            return Counter(dict(items)) if kind == "$counter" else dict(items)
        except (TypeError, ValueError) as error:
            raise CheckpointError("'$dict' holds what isn't pairs of keys and values") from error
    raise CheckpointError(f"{kind!r} is no value of a checkpoint, or what it names is missing")


def rng_states() -> dict[str, Any]:
    """Return the states of Python's random generator, NumPy's, and PyTorch's of every device."""
    name, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).astype(np.int64), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def check_rng_states(found: Any) -> None:
    """Check random states by setting separate generators to them.

    Raises:
        Exception: Of any type: what the generators raise.
    """
    random.Random().setstate(found["python"])
    np.random.RandomState().set_state(_numpy_state(found["numpy"]))
    torch.Generator().set_state(found["torch"])


def restore_rng_states(found: dict[str, Any]) -> None:
    """Set the random generators; states of missing devices are ignored."""
    random.setstate(found["python"])
    np.random.set_state(_numpy_state(found["numpy"]))
    torch.set_rng_state(found["torch"])
    for number, state in enumerate(found.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, number)


def _numpy_state(state: Any) -> Any:
    name, keys, *rest = state
    return (name, np.asarray(keys).astype(np.uint32), *rest)
