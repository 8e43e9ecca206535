"""Checks of integers, ids and paths; folders; warnings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

MOST_INT32 = 2**31 - 1  # The largest int32.
# Packages whose lines a user can't change. Decorators and context managers are contextlib's.
_SKIPPED = frozenset(("gas", "torch", "torch_geometric", "contextlib", "functools", "importlib"))
Function = TypeVar("Function", bound=Callable[..., Any])


def check_integer(
    name: str, value: object, least: int, most: int | None = None, expected: str = ""
) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number, of Python or numpy, within bounds.

    ``expected`` is what the error expects. (default: the bounds)
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and least <= value and (most is None or value <= most):  # type: ignore[operator]
        return
    bounds = f"of at least {least}" if most is None else f"between {least} and {most}"
    raise ValueError(f"'{name}' is {value!r}, expected {expected or f'an integer {bounds}'}")


def check_number(name: str, value: object, fits: Callable[[Any], bool], expected: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a real number, or a tensor of one, that fits."""
    is_real = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.dim() == 0)
    if not is_real or not fits(value):
        raise ValueError(f"'{name}' is {value!r}, expected {expected}")


def check_probability(name: str, value: object, below_one: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is a probability; ``below_one`` refuses 1, too."""
    if isinstance(value, float) and 0.0 <= value < 1.0:
        return  # At no cost in every step.
    if below_one:
        check_number(name, value, lambda p: 0.0 <= p < 1.0, "a probability in [0, 1)")
    else:
        check_number(name, value, lambda p: 0.0 <= p <= 1.0, "a probability in [0, 1]")


def check_flags(function: Function) -> Function:
    """Decorate a function so that its arguments of type ``bool`` are checked at each call.

    A text such as ``"no"``, which Python takes for true, raises ``ValueError``.
    """
    flags = {
        p.name: sys.maxsize if p.kind is p.KEYWORD_ONLY else at
        for at, p in enumerate(inspect.signature(function).parameters.values())
        if p.annotation in (bool, "bool")  # Annotations may be text.
    }

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, at in flags.items():
            value = kwargs.get(name, args[at] if at < len(args) else True)
            if not isinstance(value, bool) and not _is_truth_value(value):
                raise ValueError(f"'{name}' is {value!r}, expected True or False")
        return function(*args, **kwargs)

    return cast(Function, checked)  # Of the same signature.


def check_names(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raise ``ValueError`` if there is an argument of another name than those that are known.

    Args:
        given: The names.
        known: The names that are known.
        of: What the error says the arguments are of, such as ``"gas.fit"``.
    """
    unknown = {*given} - {*known}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is no argument of {of}: leave it out")


def _is_truth_value(value: object) -> bool:
    """Return whether this is a truth value of another library, no mask, or 0 or 1."""
    if isinstance(value, numbers.Integral):
        return value in (0, 1)
    is_bool = str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    return is_bool and math.prod(getattr(value, "shape", ())) == 1


def cache_dir() -> Path:
    """Return the cache folder: ``$GAS_CACHE_DIR``, or ``gas`` in the user's cache."""
    if os.environ.get("GAS_CACHE_DIR"):
        return Path(os.environ["GAS_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gas"


def check_path(name: str, value: object, what: str, others: tuple[type, ...] = ()) -> None:
    """Raise ``ValueError`` unless ``value`` is a path of ``what``, or of another type."""
    if isinstance(value, (str, os.PathLike, *others)):
        return
    also = "".join(f", or a gas.{each.__module__.split('.')[1]}.{each.__name__}" for each in others)
    is_short = value is None or isinstance(value, numbers.Number)
    shown = repr(value) if is_short else f"a {type(value).__name__}"  # That of a model has lines.
    raise ValueError(f"'{name}' is {shown}, expected the path of {what}{also}")


def make_folder(name: str, path: Path) -> None:
    """Make a folder and its parents, unless it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"'{name}' is a folder that can't be made ({error.strerror}): name one that can be "
            "written",
            str(path),
        ) from error


def check_index(name: str, index: Tensor) -> None:
    """Raise ``ValueError`` unless ``index`` is a one-dimensional int64 tensor."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        what = f"{index.dtype} of shape {list(index.shape)}" if isinstance(index, Tensor) else index
        raise ValueError(f"'{name}' is {what}, expected a one-dimensional int64 tensor")


def assert_range(name: str, index: Tensor, size: int, kind: str) -> None:
    """Check as :func:`check_range` by an assertion on the device: the host doesn't wait."""
    inside = ((index >= 0) & (index < size)).all()
    torch._assert_async(inside, f"'{name}' has a {kind} outside [0, {size})")


def check_range(name: str, index: Tensor, size: int) -> None:
    """Raise ``IndexError`` unless every index is in ``[0, size)``."""
    if index.numel() == 0:
        return
    low, high = map(int, torch.aminmax(index))
    if low < 0 or high >= size:
        bad = low if low < 0 else high
        raise IndexError(f"'{name}' holds {bad}, which is outside [0, {size})")


@contextlib.contextmanager
def explain_missing_cuda(what: str) -> Iterator[None]:
    """Add the cure to errors that PyTorch raises in this context because there is no CUDA."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available() or not re.search("CUDA|NVIDIA", str(error)):
            raise
        raise RuntimeError(
            f"{what} can't be put on a CUDA device, as PyTorch sees none ({error}): use 'cpu', or "
            "install a driver and a PyTorch with CUDA"
        ) from error


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
