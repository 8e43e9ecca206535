"""Values of Python as JSON, and the tensors in them by name: what isn't code comes back as it was.

Tensors and arrays, numbers (NaN and infinities included), text, lists, tuples and dictionaries with
keys of these; so do ``state_dict`` of optimizers, schedulers and augmentations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gas.checkpoint.errors import CheckpointError

SPECIAL = ("nan", "inf", "-inf")
DEEPEST = 64  # Values in values; deeper ones are a mistake, such as a list in itself.


def to_json(value: Any, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """What JSON can hold of a value; its tensors go into ``tensors``, by names that begin so.

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
        while name in tensors:  # Such as of the keys 0 and "0".
            name += "'"
        try:
            tensors[name] = torch.as_tensor(value).detach()
        except TypeError as error:
            raise ValueError(f"{name!r} is an array of {value.dtype}: expected numbers") from error
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
    """The value that :func:`to_json` was given.

    Raises:
        CheckpointError: If it is none of those.
    """
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
