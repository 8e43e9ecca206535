"""Deprecated methods of :class:`gas.ScalableGNN`, kept until version 0.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gas.native import warn
from gas.scalable import base, call, pack


def _deprecate(
    name: str, function: Callable[..., Any], use: str = "", is_method: bool = True
) -> Any:
    """Return a method, or a property, that warns and calls the function that replaces it."""
    use = use or f"gas.scalable.{name}(model, ...)"

    def call_function(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        warn(f"ScalableGNN.{name} goes away in version 0.3: use {use}", DeprecationWarning)
        return function(self, *args, **kwargs)

    return call_function if is_method else property(call_function)


class DeprecatedNames(torch.nn.Module):
    """Methods and properties that functions of :mod:`gas.scalable` have replaced."""

    start_pulls = _deprecate("start_pulls", call.start_pulls)
    cancel_pulls = _deprecate("cancel_pulls", call.cancel_pulls)
    expect = _deprecate("expect", call.read_ahead, "gas.scalable.read_ahead(model, ...)")
    free_buffers = _deprecate("free_buffers", base.free_buffers)
    without_histories = _deprecate(
        "without_histories", base.HistoryModel._disable_transfers, "model.io = 'none'"
    )
    moved_bytes = _deprecate("moved_bytes", base.moved_bytes, is_method=False)
    idle_bytes = _deprecate("idle_bytes", base.idle_bytes, is_method=False)
    is_packed = _deprecate("is_packed", pack.is_packed, is_method=False)
    plain = _deprecate(
        "plain", lambda model: model._checkpoint_module, "model.net, or the model", False
    )
    has_forward_layer = _deprecate(
        "has_forward_layer",
        lambda model: model._has_forward_layer,
        "type(model).forward_layer is not gas.ScalableGNN.forward_layer",
        False,
    )
    emb_device = _deprecate("emb_device", base.emb_device, "model.histories[0].device", False)
