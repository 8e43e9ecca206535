"""Names that :class:`gas.ScalableGNN` had, for one release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gas.native import warn
from gas.scalable import base, call, pack


def _former(name: str, function: Callable[..., Any], use: str = "", is_method: bool = True) -> Any:
    """Make a method, or a property, that warns and does what a function does now."""
    use = use or f"gas.scalable.{name}(model, ...)"

    def do(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        warn(f"ScalableGNN.{name} goes away with the next release: use {use}", DeprecationWarning)
        return function(self, *args, **kwargs)

    return do if is_method else property(do)


class FormerNames(torch.nn.Module):
    """Methods and properties that are functions of :mod:`gas.scalable` now."""

    start_pulls = _former("start_pulls", call.start_pulls)
    cancel_pulls = _former("cancel_pulls", call.cancel_pulls)
    expect = _former("expect", call.read_ahead, "gas.scalable.read_ahead(model, ...)")
    free_buffers = _former("free_buffers", base.free_buffers)
    without_histories = _former("without_histories", base.HistoryModel._without_histories, "io=")
    moved_bytes = _former("moved_bytes", base.moved_bytes, is_method=False)
    idle_bytes = _former("idle_bytes", base.idle_bytes, is_method=False)
    is_packed = _former("is_packed", pack.is_packed, is_method=False)
    plain = _former("plain", lambda model: model._plain, "model.net, or the model", False)
    has_forward_layer = _former(
        "has_forward_layer",
        lambda model: model._has_forward_layer,
        "type(model).forward_layer is not gas.ScalableGNN.forward_layer",
        False,
    )
    emb_device = _former("emb_device", base.emb_device, "model.histories[0].device", False)
