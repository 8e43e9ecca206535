"""Augmentations of whole graphs by masks, such as MH-Aug, and of what is trained on by rules."""

from gas.augment.base import Augmentation
from gas.augment.drop import DropEdge, MaskFeatures
from gas.augment.loss import entropy, mh_aug_loss
from gas.augment.mh import MHAug
from gas.augment.published import PUBLISHED
from gas.augment.rules import Rule, RuleOversampling
from gas.augment.statistics import Statistics
from gas.augment.views import Views

__all__ = [
    "Augmentation",
    "DropEdge",
    "MHAug",
    "MaskFeatures",
    "PUBLISHED",
    "Rule",
    "RuleOversampling",
    "Statistics",
    "Views",
    "entropy",
    "mh_aug_loss",
]
