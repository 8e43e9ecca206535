"""Cache folder between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: ``$GAS_CACHE_DIR``, or ``gas`` in the user's cache."""
    if "GAS_CACHE_DIR" in os.environ:
        return Path(os.environ["GAS_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gas"
