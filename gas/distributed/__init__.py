"""Many processes: rows of histories on their way between the ranks of ``torch.distributed``."""

from gas.distributed.exchange import Exchange
from gas.distributed.group import Group, RankError

__all__ = ["Exchange", "Group", "RankError"]
