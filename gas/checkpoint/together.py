"""What is done on all ranks or on none: an error on one is one on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from gas.checkpoint.errors import CheckpointError
from gas.distributed import Group, RankError

T = TypeVar("T")


def together(group: Group | None, what: str, function: Callable[[], T]) -> T:
    """Calls a function on every rank; where it fails on one, it fails on all.

    Args:
        group: The ranks; ``None``, there is one.
        what: In words, for the error of a rank that doesn't come.
        function: Waits for nobody who may fail in it alone.

    Raises:
        ValueError: Or ``CheckpointError``, or ``OSError``: what it has raised on the first rank on
            which it has, whose name it has.
        RankError: For any other error, or if a rank has gone, or doesn't come in time.
    """
    if group is None:
        return function()
    result, failed = None, None
    try:
        result = function()
    except RankError:
        raise
    except Exception as error:  # Whatever it is, the others wait.
        failed = error
    for rank, told in enumerate(group.gather_json(_told(failed), what)):
        if told is not None:
            raise _error(rank, *told) from failed
    return cast(T, result)


def _told(error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    if isinstance(error, OSError):
        return ["OSError", error.strerror or str(error), error.errno, str(error.filename or "")]
    kinds = {"CheckpointError": CheckpointError, "ValueError": ValueError}
    kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "")
    return [kind, str(error) if kind else f"{type(error).__name__}: {error}", None, ""]


def _error(rank: int, kind: str, text: str, number: int | None, file: str) -> Exception:
    text = f"rank {rank}: {text}"
    if kind == "OSError" and number is not None:
        return OSError(number, text, *([file] if file else []))
    others = {"OSError": OSError, "CheckpointError": CheckpointError, "ValueError": ValueError}
    return others.get(kind, RankError)(text)
