"""Hyper-parameters to start from: the published ones, where there are some.

Source: Fey et al., *GNNAutoScale*, ICML 2021, and the configuration files of its experiments. The
optimizer is Adam. On some large graphs they train on a part of the batches in each epoch; here an
epoch is every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gas.datasets import dataset_key


@dataclass(frozen=True)
class Preset:
    """Settings of one experiment.

    ``reg_weight_decay`` applies to ``model.reg_modules``, ``nonreg_weight_decay`` to
    ``model.nonreg_modules``; ``grad_norm`` is the bound of gradient clipping.
    """

    num_layers: int = 2
    hidden_channels: int = 64
    dropout: float = 0.5
    drop_input: bool = True
    batch_norm: bool = False
    residual: bool = False
    linear: bool = False
    num_parts: int | None = None
    batch_size: int | None = None
    lr: float = 0.01
    reg_weight_decay: float = 0.0
    nonreg_weight_decay: float = 0.0
    grad_norm: float | None = None
    epochs: int = 100

    def parts_for(self, num_nodes: int) -> tuple[int, int]:
        """Parts and parts per batch: as given, else parts of some 300 nodes, eight batches."""
        num_parts = self.num_parts or max(1, min(num_nodes // 300, 256))
        return num_parts, self.batch_size or max(1, num_parts // 8)


_CITATION = Preset(hidden_channels=16, reg_weight_decay=5e-4, epochs=200)
_COPURCHASE = Preset(reg_weight_decay=1e-3, epochs=200)
_LARGE = Preset(hidden_channels=256, drop_input=False)

GCN = {
    "cora": replace(_CITATION, num_parts=40, batch_size=10, grad_norm=1.0),
    "citeseer": replace(_CITATION, num_parts=24, batch_size=8),
    "pubmed": replace(_CITATION, num_parts=8, batch_size=4, grad_norm=1.0),
    "coauthorcs": replace(_COPURCHASE, num_parts=2, batch_size=1, grad_norm=1.0),
    "coauthorphysics": replace(_COPURCHASE, num_parts=4, batch_size=2),
    "amazoncomputers": replace(_COPURCHASE, num_parts=32, batch_size=16, grad_norm=1.0),
    "amazonphoto": replace(_COPURCHASE, num_parts=32, batch_size=16),
    "wikics": replace(
        _CITATION,
        hidden_channels=33,
        dropout=0.25,
        num_parts=32,
        batch_size=16,
        lr=0.02,
        grad_norm=1.0,
    ),
    "reddit2": replace(_LARGE, num_parts=200, batch_size=100, epochs=400),
    "flickr": replace(
        _LARGE,
        drop_input=True,
        dropout=0.3,
        batch_norm=True,
        num_parts=24,
        batch_size=12,
        epochs=400,
    ),
    "yelp": replace(
        _LARGE,
        hidden_channels=512,
        dropout=0.0,
        residual=True,
        num_parts=40,
        batch_size=5,
        epochs=500,
    ),
    "ogbnarxiv": replace(
        _LARGE, num_layers=3, batch_norm=True, num_parts=80, batch_size=40, epochs=300
    ),
    "ogbnproducts": replace(
        _LARGE, num_layers=3, dropout=0.3, num_parts=7, batch_size=1, lr=0.005, epochs=300
    ),
    # Not published: ours.
    "facebookpagepage": Preset(num_parts=64, batch_size=8, dropout=0.3, epochs=100),
    "planted": Preset(epochs=30, dropout=0.3),
}

PRESETS = {"gcn": GCN}


def preset(model: str, dataset: str) -> Preset:
    """The settings to start from for a model on a data set."""
    return PRESETS[model].get(dataset_key(dataset), Preset())
