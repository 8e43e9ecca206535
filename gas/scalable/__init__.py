"""``ScalableGNN``, the base class of models, and what a call of one does."""

from gas.scalable.call import BANKS
from gas.scalable.distributed import Distributed, distribute
from gas.scalable.model import ScalableGNN
from gas.scalable.one_batch import OneBatch
from gas.scalable.prefetch import PrefetchLoader
from gas.scalable.ranks import Traffic
from gas.scalable.verify import Verification, verify

__all__ = [
    "BANKS",
    "Distributed",
    "OneBatch",
    "PrefetchLoader",
    "ScalableGNN",
    "Traffic",
    "Verification",
    "distribute",
    "verify",
]
