"""Pool of buffers, which ``gas`` doesn't need."""

from __future__ import annotations

from typing import Any


class AsyncIOPool:
    """Pool that moved rows of histories to a GPU and back; models have an engine instead.

    Scripts that import the name run; one that makes a pool is told what to use.

    Raises:
        NotImplementedError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "AsyncIOPool doesn't exist in gas: models move the rows of their histories "
            "asynchronously themselves; remove the pool, and call push_and_pull"
        )
