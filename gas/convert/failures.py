"""Texts of what a module raises when it is run, or followed, on a small graph."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor

_WRITTEN = re.compile(r"_(propagate|edge_updater)_\w+\.py$")  # What PyG writes for its layers.
LONGEST = 100  # Characters of a line that is shown.
_LIBRARIES = tuple(
    f"{Path(str(path)).parent}{os.sep}"
    for path in (torch.__file__, torch_geometric.__file__, Path(__file__).parent)
)


def describe_error(error: BaseException) -> str:
    """Return the line of the user's code that an error comes from, and the error, in one line.

    An error of this library is its own text.
    """
    if is_own(error):
        return str(error)
    lines = [
        frame.line for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and not frame.filename.startswith(_LIBRARIES)
        and not _WRITTEN.search(frame.filename)
    ]  # fmt: skip
    first = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}: {first}".rstrip(":. ")
    return f"'{lines[-1][:LONGEST]}' raises {what}" if lines else f"it raises {what}"


def describe_values(values: Mapping[str, Any]) -> str:
    """Return the names and shapes of what a module is called with."""
    return ", ".join(
        f"{name} of {list(value.shape)}" if isinstance(value, Tensor) else name
        for name, value in values.items()
    )


def is_own(error: BaseException) -> bool:
    """Return whether an error is one of this library's, whose text says what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and frames[-1].filename.startswith(_LIBRARIES[-1])
