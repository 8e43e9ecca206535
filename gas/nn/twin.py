"""Copies of modules: twins, which share parameters, and deep copies."""

from __future__ import annotations

import copy
import copyreg
from types import MappingProxyType, MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves


def twin(module: Module, memo: dict[Module, Module] | None = None) -> Module:
    """Return a copy of a module and its children that shares parameters, buffers and hooks.

    Parameters, buffers and hooks are shared with ``module``, also if they are replaced, moved or
    added later. The twin has its own options (``normalize``, ``training``, ...), classes and
    children.
    """
    memo = {} if memo is None else memo
    if module in memo:
        return memo[module]
    made = memo[module] = object.__new__(type(module))
    made.__dict__.update(
        (name, MethodType(value.__func__, made) if _is_method(value, module) else value)
        for name, value in module.__dict__.items()
    )
    children = {
        name: None if child is None else twin(child, memo)
        for name, child in module._modules.items()
    }
    object.__setattr__(made, "_modules", children)
    return made


def deep_copy(module: Module) -> Module:
    """Copy a module and everything in it.

    Tensors that PyTorch refuses to copy are cloned without gradients: stored outputs, weights that
    are computed from others, sparse matrices. Python's modules and read-only mappings are shared.
    """
    memo: dict[int, Any] = {}
    for each in module.modules():
        for value in tree_leaves(vars(each)):
            if isinstance(value, Tensor) and not (value.is_leaf and value.layout == torch.strided):
                memo[id(value)] = value.detach().clone()
    shared = dict.fromkeys((MappingProxyType, ModuleType), lambda _: "shared")
    with mock.patch.dict(copyreg.dispatch_table, shared):  # A name means the value itself.
        return copy.deepcopy(module, memo)


def _is_method(value: Any, module: Module) -> bool:
    """Return whether an attribute is a method of the module, as PyG sets for explanations."""
    return isinstance(value, MethodType) and value.__self__ is module
