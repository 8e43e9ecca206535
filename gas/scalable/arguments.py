"""Checks of the arguments of constructors of models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gas.native import check_flags, check_names
from gas.scalable.model import ScalableGNN


def check_constructor(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor that passes ``**kwargs`` on to :class:`ScalableGNN`.

    Unknown names raise ``ValueError``, and so do texts for arguments of type ``bool``.
    """
    functions = (init, ScalableGNN.__init__)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    call = check_flags(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(kwargs, known, f"gas.models.{type(self).__name__}")
        call(self, *args, **kwargs)

    return checked
