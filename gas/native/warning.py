"""Warnings that point at the line of a user's program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

# Packages whose lines a user can't change. Decorators and context managers are contextlib's.
_SKIPPED = frozenset(("gas", "torch", "torch_geometric", "contextlib", "functools", "importlib"))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the file and line of the innermost caller outside of these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) in _SKIPPED:
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__", "<string>"),
        names.setdefault("__warningregistry__", {}),
    )


def _package_of(names: dict[str, object]) -> str:
    """Return the package of a module's global names, ``"importlib"`` of its frozen parts too."""
    return str(names.get("__name__", "")).removeprefix("_frozen_").partition(".")[0]


def renamed(old: str, new: str) -> Callable[..., Any]:
    """Make a method under an old name, which warns and calls the method ``new``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        warn(f"{old} is now {new}; the old name works until version 0.3", DeprecationWarning)
        return getattr(self, new)(*args, **kwargs)

    return method
