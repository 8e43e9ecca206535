"""Replace a model's layers by those of :mod:`gas.nn`, and copy it: twins and deep copies."""

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

from gas.nn.attention import GATConv, GATv2Conv
from gas.nn.conv import pyg_class
from gas.nn.dropout import Dropout
from gas.nn.edge_conv import EdgeConv
from gas.nn.mixture import GMMConv
from gas.nn.sparse_features import LINEAR
from gas.nn.sum_convs import GCN2Conv, GCNConv, GINConv, GraphConv, SAGEConv, SimpleConv

CONVS = (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GMMConv,
    GraphConv,
    SAGEConv,
    SimpleConv,
)
FUSED: dict[type, type] = {
    torch.nn.Dropout: Dropout,
    **LINEAR,
    **{pyg_class(cls): cls for cls in CONVS},
}


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Replace PyG's convolutions of a model by fused ones, in place.

    Weights, hooks and ``state_dict`` don't change; other layers, including subclasses of PyG's, are
    left as they are. Load batches with ``layout='fused'``. :class:`torch.nn.Dropout` becomes
    :class:`gas.nn.Dropout`, which is faster; replace ``torch.nn.functional.dropout`` by
    :func:`gas.nn.dropout` yourself. Linear layers take sparse features.

    Args:
        model: Any model.

    Returns:
        The model.

    Raises:
        ValueError: If it isn't a module.
    """
    if not isinstance(model, Module):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a module, such as "
            "torch_geometric.nn.GraphSAGE(...)"
        )
    for module in model.modules():
        cls = FUSED.get(type(module))
        if cls is not None:
            module.__class__ = cls
            if "propagate" in vars(module) and not module.explain:
                del module.propagate  # PyG's function, left by an explanation.
    return model


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

    Tensors that ``copy.deepcopy`` rejects (stored outputs, weights computed from others) and sparse
    ones are detached and cloned. Python's modules and read-only mappings are shared.
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
