"""Strict parsing and durable writing of JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from gas.native.files import refuse, replace_file

NUMBERS = re.compile(r"\[\n[\d,\s]+\]")  # Lists of integers, which are written in one line.


def parse_json(text: bytes) -> Any:
    """Parse JSON; refuse duplicate names, NaN and infinite numbers."""
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of pairs; refuse duplicate names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no number")


def read_json(path: Path) -> Any:
    """Read a file of a graph folder; see :func:`parse_json`."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        refuse(path, "its text", str(error), "JSON, as gas writes it: write the folder again")


def write_json(
    path: Path, content: Any, indent: int | None = 2, temporary: str | None = None
) -> None:
    """Write or replace a JSON file, atomically and durably.

    Args:
        path: The file.
        content: The content.
        indent: The spaces of each level. (default: ``2``)
        temporary: See :func:`replace_file`.
    """
    text = json.dumps(content, indent=indent, allow_nan=False)
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    with replace_file(path, temporary) as file:
        file.write_text(text + "\n", encoding="utf-8")
