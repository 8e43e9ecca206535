"""Checks of options: errors name the option, its value and what was expected."""

from __future__ import annotations

import math
from typing import Any

from gas import _native


def check_fraction(**options: float) -> None:
    """Refuses what isn't in ``[0, 1]``."""
    for name, value in options.items():
        _check(name, value, 0.0 <= value <= 1.0, "a number in [0, 1]")


def check_probability(**options: float) -> None:
    """Refuses what isn't in ``[0, 1]`` either, in the words of a probability."""
    for name, value in options.items():
        _check(name, value, 0.0 <= value <= 1.0, "a probability in [0, 1]")


def check_not_negative(**options: float) -> None:
    """Refuses what is below 0, infinite or NaN."""
    for name, value in options.items():
        _check(name, value, 0.0 <= value < math.inf, "a finite number of at least 0")


def check_positive(**options: float) -> None:
    """Refuses what isn't above 0, or is infinite."""
    for name, value in options.items():
        _check(name, value, 0.0 < value < math.inf, "a finite number above 0")


def check_integer(least: int, **options: Any) -> None:
    """Refuses what isn't an integer of at least ``least``."""
    for name, value in options.items():
        fine = _native.is_integer(value) and value >= least
        _check(name, value, fine, f"an integer of at least {least}")


def _check(name: str, value: object, fine: bool, wanted: str) -> None:
    if not fine:
        raise ValueError(f"'{name}' is {value!r}, expected {wanted}")
