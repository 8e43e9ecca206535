"""A pool of buffers, which is not needed here."""

from __future__ import annotations

from typing import Any


class AsyncIOPool:
    """Moved rows of histories to a GPU and back; here every model has an engine that does.

    Scripts that import the name run; one that makes a pool is told what to use.

    Raises:
        NotImplementedError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "there is no AsyncIOPool: every model moves the rows of its histories beside the "
            "computation by itself, through push_and_pull"
        )
