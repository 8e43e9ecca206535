"""Texts of what a module raises when it is run, or followed, on a small graph."""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor
from torch.fx.proxy import TraceError
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

_WRITTEN = re.compile(r"_(propagate|edge_updater)_\w+\.py$")  # What PyG writes for its layers.
_TYPES = re.compile("dtype|result type")
LONGEST = 100  # Characters of a line that is shown.
_LIBRARIES = tuple(
    f"{Path(str(path)).parent}{os.sep}"
    for path in (torch.__file__, torch_geometric.__file__, Path(__file__).parents[1])
)


def describe_error(error: BaseException) -> str:
    """Return the line of the user's code that an error comes from, and the error, in one line.

    An error of this library is its own text.
    """
    if is_own(error):
        return str(error)
    lines = _lines_of_user(traceback.extract_tb(error.__traceback__))
    first = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}: {first}".rstrip(":. ")
    return f"'{lines[-1]}' raises {what}" if lines else f"it raises {what}"


def _lines_of_user(frames: traceback.StackSummary) -> list[str]:
    """Return the lines of the user's code among frames, the innermost last."""
    return [
        frame.line[:LONGEST] for frame in frames
        if frame.line and not frame.filename.startswith(_LIBRARIES)
        and not _WRITTEN.search(frame.filename)
    ]  # fmt: skip


def find_line() -> str:
    """Return the line of the module's code that is run, or ""."""
    frames = itertools.takewhile(
        lambda pair: pair[0].f_code.co_name != "convert_module",
        traceback.walk_stack(sys._getframe(1)),
    )
    lines = _lines_of_user(traceback.StackSummary.extract(frames))
    return lines[0] if lines else ""


def attribute_change_error(name: str) -> ValueError:
    """Return the error of a ``forward`` that changes a parameter or attribute of the module."""
    line = find_line()
    where = f"{line!r} in forward" if line else "forward"
    return ValueError(
        f"{where} changes '{name}' of the module, which every mini-batch would do again: change it "
        "in the training loop, after optimizer.step(), or compute with a changed copy, .clone()"
    )


def describe_values(values: Mapping[str, Any]) -> str:
    """Describe the arguments of a module by name and shape."""
    return ", ".join(
        f"{name} of {list(value.shape)}" if isinstance(value, Tensor) else name
        for name, value in values.items()
    )


def is_own(error: BaseException) -> bool:
    """Return whether an error is one of this library's, whose text says what to do."""
    return isinstance(error, ValueError) and _is_raised_here(error)


def _is_raised_here(error: BaseException) -> bool:
    """Return whether an error is raised by a line of this library."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename.startswith(_LIBRARIES[-1])


def new_error(module: str, name: str) -> ValueError:
    """Return the error for an attribute that a module takes, and that its graph lacked before."""
    return ValueError(
        f"'data' has {name!r}, which {module} takes, but the model was converted without: give "
        f"gas.to_scalable this graph, or leave {name!r} out"
    )


def explain_trace(error: Exception) -> str:
    """Return why tracing fails, and what to do."""
    if is_own(error):
        return str(error)
    if any("_functorch" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return (
            "it calls a function of torch.func, such as vmap, which can't be followed: compute all "
            "rows at once, as x * weight does instead of vmap(lambda row: row * weight)(x)"
        )
    if isinstance(error, TypeError | AttributeError) and _is_raised_here(error):
        return describe_error(error)
    why = "It is called with stand-ins for tensors, which have shapes but no values"
    if isinstance(error, TraceError):
        why = (
            "What it does must not depend on values of tensors. Leave a check out of forward, and "
            "make it of the graph before; for anything else"
        )
    comma = "," if isinstance(error, TraceError) else ":"
    return (
        f"{describe_error(error)}. {why}{comma} subclass gas.ScalableGNN instead, and call "
        "push_and_pull after every layer but the last"
    )


def describe_hooks(net: Module) -> str:
    """Return which layer has a hook that is given other arguments than the module's, or ""."""
    for name, layer in net.named_modules():
        if isinstance(layer, MessagePassing) and layer._forward_pre_hooks:
            return (
                f", where the hook before '{name}' ({type(layer).__name__}) is given the layer's "
                "arguments by their names: take it off, and compute what it does before the call"
            )
    return ""


def explain_missing_attribute(error: Exception, graph: Any) -> str:
    """Return the cure for an attribute that a module needs and the graph lacks, or ""."""
    read = [] if graph is None else sorted(graph.read)
    for name in [key for key in read if key not in graph and not hasattr(Data, key)]:
        if f"'{name}'" in str(error) or "NoneType" in str(error):
            return f"the graph has no {name!r}: set data.{name}, or name it as the graph does"
    return ""


def find_differing_type(
    error: Exception, net: Module, values: Mapping[str, Any], matrix: str
) -> str:
    """Return how to convert an attribute of another type than the parameters, or "".

    That is of another precision, or features of integers, if the error is about types. Weights are
    those of a ``matrix``, if there is one.
    """
    kinds = {p.dtype for p in net.parameters() if p.is_floating_point()}
    for name, value in values.items():
        if not isinstance(value, Tensor) or len(kinds) != 1:
            continue
        is_number = value.is_floating_point() or (name == "x" and _TYPES.search(str(error)))
        if is_number and value.dtype not in kinds:
            (kind,) = kinds
            name = matrix if matrix and name == "edge_weight" else name
            return (
                f"{name!r} is of {value.dtype} and the parameters of {kind}: convert it, "
                f"data.{name} = data.{name}.to({kind})"
            )
    return ""
