"""Checks of the arguments of constructors of models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gas.native import check_flags, check_names
from gas.scalable.model import ScalableGNN

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def check_constructor(init: Constructor) -> Constructor:
    """Decorate a constructor that passes ``**kwargs`` on to :class:`ScalableGNN`.

    Unknown names raise ``ValueError``, and so do texts for arguments of type ``bool``. In a class
    that inherits from others, too, names may be those of their constructors.
    """
    name = f"gas.models.{init.__qualname__.partition('.')[0]}"
    known = _names_of(init, ScalableGNN.__init__)
    call = check_flags(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.keys() - known:
            bases = (cls for cls in type(self).__mro__ if not cls.__module__.startswith("gas."))
            others = filter(None, (vars(cls).get("__init__") for cls in bases))
            check_names(kwargs, known | _names_of(*others), name)
        call(self, *args, **kwargs)

    return cast(Constructor, checked)  # Of the same signature.


def _names_of(*functions: Callable[..., None]) -> set[str]:
    """Return the names of the parameters of some functions."""
    return {name for function in functions for name in inspect.signature(function).parameters}
