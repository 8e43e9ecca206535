"""Exchange of rows of histories between the ranks of ``torch.distributed``."""

from gas.scalable.distributed.exchange import HEADER_BYTES, RANGE_BYTES, Exchange
from gas.scalable.distributed.group import Group, RankError

__all__ = [
    "Exchange",
    "Group",
    "HEADER_BYTES",
    "RANGE_BYTES",
    "RankError",
]
