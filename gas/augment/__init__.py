"""Augmentations of whole graphs by masks, such as MH-Aug."""

from gas.augment.base import Augmentation, Resumable
from gas.augment.drop import DropEdge, MaskFeatures
from gas.augment.loss import PUBLISHED, entropy, mh_aug_loss
from gas.augment.mh import MHAug
from gas.augment.statistics import Statistics
from gas.augment.units import check_fraction, check_mask, check_not_negative
from gas.augment.views import Views

__all__ = [
    "Augmentation",
    "DropEdge",
    "MHAug",
    "MaskFeatures",
    "PUBLISHED",
    "Resumable",
    "Statistics",
    "Views",
    "check_fraction",
    "check_mask",
    "check_not_negative",
    "entropy",
    "mh_aug_loss",
]
