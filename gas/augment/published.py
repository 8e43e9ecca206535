"""Published settings of MH-Aug.

Source: Park et al., *Metropolis-Hastings Data Augmentation for Graph Neural Networks*, NeurIPS
2021, and its code, in the convention of the paper: ``lam2`` and ``lam4`` are 1 minus the options of
that code.
"""

from __future__ import annotations

from typing import NamedTuple


class PublishedSettings(NamedTuple):
    """Settings for one data set: of :class:`gas.MHAug`, and of :func:`gas.augment.mh_aug_loss`."""

    chain: dict[str, float]
    loss: dict[str, float]


PUBLISHED = {
    "cora": PublishedSettings(
        {
            "mu_e": 0.3, "mu_v": 0.7, "sigma_delta_e": 0.1, "sigma_delta_v": 0.01,
            "a_e": 10, "b_e": 1, "a_v": 1, "b_v": 1,
            "lam1": 5, "lam2": 0.9999, "lam3": 1, "lam4": 0.999,
        },
        {"kl": 0.5, "h": 0.5},
    ),
    "citeseer": PublishedSettings(
        {
            "mu_e": 0.2, "mu_v": 0.5, "sigma_delta_e": 0.005, "sigma_delta_v": 0.1,
            "a_e": 5, "b_e": 1, "a_v": 10, "b_v": 0.1,
            "lam1": 1, "lam2": 0.9999, "lam3": 10, "lam4": 0.999,
        },
        {"kl": 0.2, "h": 0.5},
    ),
}  # fmt: skip
"""By the name of a data set; those of Cora are a start for others."""
