"""Checks of options: errors name the option, its value and what was expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any


def check_fraction(**options: float) -> None:
    """Refuse values outside of ``[0, 1]``."""
    _check(options, lambda v: 0.0 <= v <= 1.0, "a number in [0, 1]")


def check_probability(**options: float) -> None:
    """Refuse values outside of ``[0, 1]``, in the words of a probability."""
    _check(options, lambda v: 0.0 <= v <= 1.0, "a probability in [0, 1]")


def check_rate(**options: float) -> None:
    """Refuse values that aren't between 0 and 1."""
    _check(options, lambda v: 0.0 < v < 1.0, "a rate between 0 and 1")


def check_not_negative(**options: float) -> None:
    """Refuse negative, infinite and NaN values."""
    _check(options, lambda v: 0.0 <= v < math.inf, "a finite number of at least 0")


def check_positive(**options: float) -> None:
    """Refuse values that aren't positive and finite."""
    _check(options, lambda v: 0.0 < v < math.inf, "a finite number above 0")


def _check(options: dict[str, Any], fits: Callable[[Any], bool], wanted: str) -> None:
    for name, value in options.items():
        if not isinstance(value, numbers.Real) or not fits(value):
            raise ValueError(f"'{name}' is {value!r}, expected {wanted}")
