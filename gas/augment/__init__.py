"""Augmentations of whole graphs by masks: MH-Aug, and simpler ones with the same interface."""

from gas.augment.base import Augmentation
from gas.augment.drop import DropEdge, MaskFeatures
from gas.augment.loss import entropy, mh_aug_loss
from gas.augment.mh import MHAug
from gas.augment.published import PUBLISHED
from gas.augment.statistics import Statistics
from gas.augment.views import Views

__all__ = [
    "Augmentation",
    "DropEdge",
    "MHAug",
    "MaskFeatures",
    "PUBLISHED",
    "Statistics",
    "Views",
    "entropy",
    "mh_aug_loss",
]
