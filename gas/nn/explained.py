"""What PyG's explainers look at in a model's layers, where a mini-batch shows them less."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import get_embeddings

EMBEDDINGS = get_embeddings.__module__
ATTENTION = "torch_geometric.explain.algorithm.attention_explainer"


def prepare_layers(model: torch.nn.Module, edges: Any) -> None:
    """What is done before a model runs that somebody may explain.

    Raises:
        ValueError: If AttentionExplainer looks, and wouldn't see the attention of these edges.
    """
    _forget_parameters(model)
    _check_attention(model, edges)


def _forget_parameters(model: torch.nn.Module) -> None:
    """Makes the mask of GNNExplainer, which has gone, none of a layer's parameters any more.

    PyG would make a parameter of the next explainer's mask, and captum find no gradient of its own.
    """
    for layer in model.modules():
        if isinstance(layer, MessagePassing) and layer._parameters.get("_edge_mask", 0) is None:
            del layer._parameters["_edge_mask"]
            layer._edge_mask = None


def _check_attention(model: torch.nn.Module, edges: Any) -> None:
    """Refuses edges of which AttentionExplainer wouldn't see the attention, or that of others.

    Raises:
        ValueError: Saying how to load the batch, or to cut the graph.
    """
    looked_at = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, MessagePassing) and _by(ATTENTION, layer._message_forward_hooks)
    }
    for name, layer in looked_at.items():
        reason = _why_unseen(name, layer, edges)
        if reason:
            _forget(ATTENTION, (layer._message_forward_hooks for layer in looked_at.values()))
            raise ValueError(reason)


def _why_unseen(name: str, layer: Any, edges: Any) -> str:
    """Why the attention that a layer's messages show isn't that of its edges; empty if it is."""
    if not isinstance(edges, Tensor) or edges.layout != torch.strided:
        return (
            f"'edge_index' is a {type(edges).__name__}, of which '{name}' "
            f"({type(layer).__name__}) makes no messages that AttentionExplainer could see: load "
            "the batch with layout='edge_index'"
        )
    num_loops = int((edges[0] == edges[1]).sum())
    if num_loops and getattr(layer, "add_self_loops", False):
        return (
            f"'edge_index' has self-loops ({num_loops}), and '{name}' ({type(layer).__name__}) "
            "replaces them, as add_self_loops=True: AttentionExplainer would give edges the "
            "attention of others; remove them before the graph is cut, "
            "torch_geometric.transforms.RemoveSelfLoops()"
        )
    return ""


def with_embeddings(model: Any, batch: Any, out: Tensor) -> Tensor:
    """Outputs, after PyG's ``get_embeddings``, if it looks, was shown rows of the last history.

    What it sees of layers is of the in-batch nodes alone, and PGExplainer takes the halo's, too.

    Args:
        model: A model with histories, which has run.
        batch: The :class:`gas.SubData` that it has run on; one of the whole graph lacks nothing.
        out: What it gave, and is returned.

    Raises:
        ValueError: If there is no history.
    """
    if batch.batch_size == model.num_nodes:
        return out
    layers = [layer for layer in model.modules() if _by(EMBEDDINGS, layer._forward_hooks)]
    if layers and not model.histories:
        _forget(EMBEDDINGS, (layer._forward_hooks for layer in layers))
        raise ValueError(
            f"{type(model).__name__} has no history, and the explainer asks for embeddings of all "
            "nodes of the batch, halo included: take a batch of all parts, or another explainer"
        )
    if layers:  # All have the same hook; what it is shown last counts.
        rows = model.histories[-1].pull(batch.n_id).to(out)
        _by(EMBEDDINGS, layers[0]._forward_hooks)[0](model, (), rows)
    return out


def _by(module: str, hooks: dict[int, Any]) -> list[Callable[..., Any]]:
    """The hooks that a module of PyG has registered."""
    return [hook for hook in hooks.values() if getattr(hook, "__module__", None) == module]


def _forget(module: str, registered: Iterable[dict[int, Any]]) -> None:
    """Takes off what PyG leaves behind if a model raises."""
    for hooks in registered:
        for key in [key for key, hook in hooks.items() if _by(module, {key: hook})]:
            del hooks[key]
