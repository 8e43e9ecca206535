"""``OneBatch``: a model on one mini-batch, as a module that only reads the histories.

PyG's explainers call it; what they leave behind on layers is removed after every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import get_embeddings

from gas.loader import SubData
from gas.native import is_sparse
from gas.scalable.base import preserve_modes
from gas.scalable.call import BatchModel

EMBEDDINGS = get_embeddings.__module__
ATTENTION = "torch_geometric.explain.algorithm.attention_explainer"
Masks = dict[MessagePassing, tuple[Tensor | None, Tensor, bool]]


class OneBatch(nn.Module):
    """Module from :meth:`gas.ScalableGNN.at`: ``model(batch, push=False)`` for other features.

    Its outputs are those of the in-batch nodes, to which ``index=`` of an explainer refers. It has
    the parameters of ``model``, and its mode unless it is set to another. Further arguments of
    ``forward`` are those of ``batch``. Explainers don't change the layers of ``model``.
    """

    training = property(
        lambda self: self.model.training if self._mode is None else self._mode, lambda *_: None
    )

    def __init__(self, model: BatchModel, batch: SubData) -> None:
        if not isinstance(batch, SubData):
            raise ValueError(
                f"'batch' is a {type(batch).__name__}, expected a mini-batch of a "
                "gas.SubgraphLoader"
            )
        super().__init__()
        self._mode: bool | None = None
        self._masks: Masks = {}
        self.model = model
        if is_sparse(batch.data.x):  # Explainers mask each feature, zeros included.
            batch.data.x = batch.data.x.to_dense()
        self.batch = batch.to(model.device)

    def train(self, mode: bool = True) -> OneBatch:
        """Set the mode of this module, which the model has while this module runs."""
        self._mode = None if mode == self.model.training else mode
        forget_masks(self._masks)
        return self

    def forward(self, x: Tensor, edge_index: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the in-batch nodes, of shape ``[batch_size, out_channels]``.

        Args:
            x: Features of the batch's nodes, halo included.
            edge_index: Its edges, in the loader's layout.
            **kwargs: Arguments of ``forward`` other than the batch's, such as ``edge_weight``.

        Raises:
            ValueError: If ``x`` is sparse and requires a gradient, or an explainer needs embeddings
                that can't be shown to it.
        """
        if is_sparse(x) and x.requires_grad:
            raise ValueError(
                "'x' is sparse and requires a gradient, which PyTorch doesn't hand on to masks of "
                "it: pass dense rows, those that 'batch.x' has after model.at(batch)"
            )
        own_mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._mode is not None:
            own_mode = preserve_modes(self.model, self._mode)
        with own_mode, prepare_layers(self.model, edge_index, self._masks):
            _, _, given = self.model.inputs_of(self.batch.data)
            out = self.model(x, edge_index, *self.batch[1:], push=False, **{**given, **kwargs})
            return show_embeddings(self.model, self.batch, out)


@contextlib.contextmanager
def prepare_layers(model: torch.nn.Module, edges: Any, masks: Masks) -> Iterator[None]:
    """Prepare layers for an explainer in this context, and restore them afterwards.

    PyG sets masks on layers and clears them at the end of an explanation, unless an exception is
    raised. Here layers have masks only while the model runs; between runs they are in ``masks``.
    Layers keep only ``_loop_mask``, which PyG's ``clear_masks`` resets at the end.

    Args:
        model: The model.
        edges: The edges of the run.
        masks: The masks of earlier runs, which are updated.

    Raises:
        ValueError: If AttentionExplainer couldn't observe the attention of these edges.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MessagePassing)]
    for layer in layers:
        _restore_mask(layer, masks)
    has_run = False
    try:
        _check_attention(model, edges)
        yield
        has_run = True
    finally:
        for layer in layers:
            _remove_mask(layer, masks)
            if not has_run:  # PyG leaves its hooks behind if a model raises.
                _remove_hooks(EMBEDDINGS, layer._forward_hooks)
                _remove_hooks(ATTENTION, layer._message_forward_hooks)
        if not has_run:
            forget_masks(masks)


def forget_masks(masks: Masks) -> None:
    """Clear the masks of an explanation that PyG's ``clear_masks`` hasn't ended."""
    for layer, (_, loops, _) in masks.items():
        if layer._loop_mask is loops and layer.explain is not True:
            layer._loop_mask = None
    masks.clear()


def _restore_mask(layer: MessagePassing, masks: Masks) -> None:
    """Set the mask of the last run on a layer, unless PyG has set another or ended it."""
    mask, loops, sigmoid = masks.pop(layer, (None, None, True))
    if loops is None or layer.explain is True or layer._loop_mask is not loops:
        return
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = mask, sigmoid


def _remove_mask(layer: MessagePassing, masks: Masks) -> None:
    """Remove PyG's mask, and what belongs to it, from a layer."""
    if layer._loop_mask is not None and layer.explain is True:
        masks[layer] = layer._edge_mask, layer._loop_mask, layer._apply_sigmoid
        layer.explain = None
        layer._apply_sigmoid = True
    if layer.explain is not True:
        # A registered parameter would turn the next mask into a parameter.
        layer._parameters.pop("_edge_mask", None)
        layer._edge_mask = None
        layer.__dict__.pop("propagate", None)


def _check_attention(model: torch.nn.Module, edges: Any) -> None:
    """Refuse edges whose attention AttentionExplainer can't observe.

    Raises:
        ValueError: Naming the layer and the cure.
    """
    for name, layer in model.named_modules():
        is_layer = isinstance(layer, MessagePassing)
        if not is_layer or not _hooks_of(ATTENTION, layer._message_forward_hooks):
            continue
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise ValueError(
                f"'edge_index' is a {type(edges).__name__}, of which '{name}' "
                f"({type(layer).__name__}) makes no messages that AttentionExplainer could see: "
                "load the batch with layout='edge_index'"
            )
        num_loops = int((edges[0] == edges[1]).sum())
        if num_loops and getattr(layer, "add_self_loops", False):
            raise ValueError(
                f"'edge_index' has self-loops ({num_loops}), and '{name}' ({type(layer).__name__}) "
                "replaces them, as add_self_loops=True: AttentionExplainer would give edges the "
                "attention of others; remove them before the graph is cut, "
                "torch_geometric.transforms.RemoveSelfLoops()"
            )


def show_embeddings(model: Any, batch: Any, out: Tensor) -> Tensor:
    """Pass the last history's rows to PyG's ``get_embeddings``, and return the outputs.

    Layers give rows of the in-batch nodes only, but PGExplainer needs those of the halo, too.

    Args:
        model: A model with histories, which has run.
        batch: The :class:`gas.SubData` that it has run on.
        out: Its outputs.

    Raises:
        ValueError: If there is no history.
    """
    if batch.batch_size == model.num_nodes:
        return out
    layers = [layer for layer in model.modules() if _hooks_of(EMBEDDINGS, layer._forward_hooks)]
    if layers and not model.histories:
        raise ValueError(
            f"{type(model).__name__} has no history, and the explainer asks for embeddings of all "
            "nodes of the batch, halo included: take a batch of all parts, or another explainer"
        )
    if layers:  # All have the same hook, which keeps the last call.
        rows = model.histories[-1].pull(batch.n_id).to(out)
        _hooks_of(EMBEDDINGS, layers[0]._forward_hooks)[0](model, (), rows)
    return out


def _hooks_of(module: str, hooks: dict[int, Any]) -> list[Callable[..., Any]]:
    """Return the hooks that are functions of a module of PyG."""
    return [hook for hook in hooks.values() if getattr(hook, "__module__", None) == module]


def _remove_hooks(module: str, hooks: dict[int, Any]) -> None:
    """Remove the hooks that are functions of a module of PyG."""
    for key in [key for key, hook in hooks.items() if _hooks_of(module, {key: hook})]:
        del hooks[key]
