"""Attributes that a module changes when it is called, such as what it computes once and keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import SparseTensor

from gas.convert.module.changes import swap_parameters, with_noise
from gas.convert.module.state import (
    ATTRIBUTES_OF_TORCH,
    CONSTANT,
    custom_modules,
    find_namespace,
    keep_attributes,
)
from gas.convert.values.failures import describe_error
from gas.convert.values.known import is_about_shape, is_close, walk_back
from gas.convert.values.matrices import TracedMatrix
from gas.nn import BY_TIME, deep_copy

MANY_CALLS = 1_000_007  # Prime, so that not every counter of some calls begins anew.
MOST_ROWS = 100_000  # Of a graph on which a module is run as a whole.
ABSENT = object()  # In place of the value of an attribute that there isn't.


def find_filled(net: Module, size: int, call: Callable[[Module], Any]) -> dict[str, Any]:
    """Find attributes that a module has computed of a graph, and computes again if they are empty.

    Args:
        net: The module.
        size: The number of nodes; what has fewer rows is left as it is.
        call: Calls a module on the graph by which ``net`` has computed them.

    Returns:
        The empty value of each attribute: ``None``, an empty dictionary, or :data:`ABSENT`.
    """
    names = [
        f"{prefix}.{key}".lstrip(".")
        for prefix, module in custom_modules(net)
        for key, value in vars(module).items()
        if size <= MOST_ROWS and key not in ATTRIBUTES_OF_TORCH
        and any(max(each.shape) >= size for each in find_rows(value))
    ]  # fmt: skip
    copied = copy_module(net) if names else net
    for empty in (None, ABSENT) if names else ():
        given = {name: {} if type(_find(copied, name)) is dict else empty for name in names}
        with keep_attributes(copied):
            set_attributes(copied, given)
            try:
                call(copied)
            except Exception:  # It may raise anything without them.
                continue
            found = [name for name in names if _are_equal(_find(copied, name), _find(net, name))]
        if found:
            return {name: given[name] for name in found}
    return {}


def copy_module(net: Module) -> Module:
    """Copy a module.

    Raises:
        ValueError: If it can't be copied.
    """
    try:
        return deep_copy(net)
    except Exception as error:
        found = [
            f"{name}.{key}".lstrip(".")
            for name, module in net.named_modules() for key, value in vars(module).items()
            if key not in ATTRIBUTES_OF_TORCH and _fails_alike(value, error)
        ]  # fmt: skip
        which = f"'{found[0]}' raises {type(error).__name__}: {error}" if found else ""
        raise ValueError(
            f"{type(net).__name__} can't be copied, to be tried on a small graph: "
            f"{which or describe_error(error)}; keep what copy.deepcopy can't copy outside of the "
            "module"
        ) from error


def _fails_alike(value: Any, error: Exception) -> bool:
    try:
        copy.deepcopy(value)
    except Exception as other:  # Copying may raise anything.
        return str(other) == str(error)
    return False


def set_attributes(net: Module, values: dict[str, Any]) -> None:
    """Set attributes of a module and its parts, by their names, as :func:`find_filled` returns."""
    for name, value in values.items():
        prefix, _, key = name.rpartition(".")
        attributes = vars(net.get_submodule(prefix))
        attributes[key] = dict(value) if type(value) is dict else value
        if value is ABSENT:
            del attributes[key]


def _find(net: Module, name: str) -> Any:
    prefix, _, key = name.rpartition(".")
    return vars(net.get_submodule(prefix)).get(key)


def find_rows(value: Any) -> list[Any]:
    """Return the tensors of some dimension in an attribute, and those of matrices in it."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            matrix = leaf.to_sparse_coo().coalesce()
            found += [matrix.indices(), matrix.values()]
        elif isinstance(leaf, SparseTensor):
            found += leaf.coo()
        else:
            found.append(leaf)
    return [each for each in found if isinstance(each, Tensor) and each.dim() > 0]


def _are_equal(value: Any, other: Any) -> bool:
    one, two = find_rows(value), find_rows(other)
    return bool(one) and is_close(one, two)


def find_caches(net: Module, call: Callable[[Any], Any], graphs: Sequence[Any]) -> list[str]:
    """Find the attributes that a module computes in its first call alone, and keeps.

    ``call`` calls it on one of two graphs, with the same random numbers each time.

    Raises:
        ValueError: If its result depends on calls before, naming the module and the attribute.
    """
    first, second = graphs
    noisy: dict[Tensor, Tensor] = {w: with_noise(w.detach()) for w in net.parameters()}
    read, changed = find_read(net, call, first, second, noisy)
    if not read:  # What it keeps, it never reads.
        return []
    if not _is_call_independent(net, call, first, first):
        raise memory_error(net, read[0], changed[read[0]])
    with keep_attributes(net):
        call(first)
        with keep_attributes(net) as again:
            call(first)
    return list(dict.fromkeys([*read, *(key for key in changed if key not in again)]))


def find_read(
    net: Module, call: Callable[[Any], Any], first: Any, second: Any,
    noisy: Mapping[Tensor, Tensor] | None = None,
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    """Find the attributes that a call sets and another reads, and all that the first sets.

    ``call`` calls the module on what is ``first`` or ``second``, with the same random numbers each
    time, and the second time with the values ``noisy`` of parameters, if there are any.
    """
    with keep_attributes(net) as changed:
        call(first)
    if not changed or _is_call_independent(net, call, first, second, noisy=noisy):
        return [], changed
    read = [key for key in changed if _is_call_independent(net, call, first, second, key, noisy)]
    return read or [*changed], changed


def _is_call_independent(
    net: Module, call: Callable[[Any], Any], first: Any, second: Any, without: str = "",
    noisy: Mapping[Tensor, Tensor] | None = None,
) -> bool:  # fmt: skip
    """Return whether a call returns the same with and without another call before it.

    The attribute ``without`` is reset between the two calls.
    """
    values, key = find_namespace(net, without)
    before, was_there = values.get(key), key in values
    counts = [] if without else _find_numbers(net)
    with keep_attributes(net):
        try:
            call(first)
            for owner, each, start in counts:  # Read only after many calls, some are.
                if owner.get(each, start) != start:
                    owner[each] += MANY_CALLS
            if was_there:
                values[key] = before
            else:
                values.pop(key, None)
            with swap_parameters(noisy or {}):
                found = call(second)
        except Exception:  # It may raise anything for a graph of another size.
            return False
    # Afterwards: statistics of norms are those of the first call.
    with keep_attributes(net), swap_parameters(noisy or {}):
        return is_close(found, call(second))


def _find_numbers(net: Module) -> list[tuple[dict[str, Any], str, float]]:
    """Find the numbers among the attributes of a module and its parts, such as counters."""
    return [
        (vars(module), key, value)
        for _, module in custom_modules(net)
        for key, value in vars(module).items()
        if type(value) in (int, float)
    ]


def memory_error(net: Module, name: str, value: Any) -> ValueError:
    """Return the error about an attribute that one call sets and a later one reads."""
    prefix, _, key = name.rpartition(":" if ":" in name else ".")
    where = f"'{prefix}'" if ":" in name else type(net.get_submodule(prefix)).__name__
    if prefix and ":" not in name:
        where = f"'{prefix}' ({where})"
    cure = BY_TIME
    if ":" not in name and isinstance(net.get_submodule(prefix), MessagePassing):
        cure = (
            "leave out what reads it after the call, such as get_attention_loss() of SuperGATConv; "
            f"or, if it is a state, {BY_TIME}"
        )
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() < 2):
        cure = "register it as a buffer, and change it in place in the training loop"
    return ValueError(
        f"{where} keeps '{key}' of one call for the next, and mini-batches come after one another: "
        f"{cure}"
    )


def check_caches(net: Module, caches: Sequence[str], changed: dict[str, Any]) -> None:
    """Refuse buffers that a module changes, and caches that don't follow from the graph alone.

    A trace has ``changed`` attributes, of which later calls read ``caches``.

    Raises:
        ValueError: Naming the attribute, and what it is computed of.
    """
    for name, value in changed.items():
        buffer = dict(net.named_buffers()).get(name) if isinstance(value, Proxy) else None
        if buffer is not None:
            raise memory_error(net, name, buffer)
    for name in caches:
        for leaf in tree_leaves(changed.get(name)):
            parts = (leaf.row, leaf.value) if isinstance(leaf, TracedMatrix) else (leaf,)
            for part in parts:
                nodes = walk_back(part.node, is_about_shape) if isinstance(part, Proxy) else []
                for found in [each for each in nodes if _reads_more_than_graph(net, each)][:1]:
                    of = getattr(found.target, "__name__", found.target)
                    raise ValueError(
                        f"'{name}' is computed in the first call, of '{of}', which "
                        "training changes or draws anew, and kept: compute it in every call, or "
                        "keep what follows from the graph alone"
                    )


def _reads_more_than_graph(net: Module, node: Node) -> bool:
    """Return whether a node reads parameters, modules or random numbers, not the graph alone."""
    if is_about_shape(node):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    is_known = node.op != "get_attr" or name.startswith(("_product_", CONSTANT))
    if node.op == "call_module":
        layer = net.get_submodule(str(node.target))
        kinds = [type(each).__name__.lower() for each in layer.modules()]
        has_parameters = any(True for _ in layer.parameters())
        is_known = not has_parameters and not any("drop" in kind for kind in kinds)
    return not is_known or "rand" in name or "drop" in name
