"""One module for each room of the package: cases that provoke its errors, one each.

``CASES`` maps what a user does, in words or code, to a function of :class:`Tools`.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

import gas
from gas.nn import Adjacency


@dataclasses.dataclass
class Tools:
    """A folder, and a way to change what is there until the case ends."""

    path: Path
    patch: pytest.MonkeyPatch

    def without_extension(self):
        """Return the twins in PyTorch are used."""
        self.patch.setattr("gas.native.extension.C", None)

    def without_package(self, name):
        """It can't be imported."""
        self.patch.setitem(sys.modules, name, None)


def raising(error):
    """Return a function that takes anything and raises this."""

    def function(*_, **__):
        raise error

    return function


def without_cuda(t, target, action):
    """Do something while a function raises what PyTorch does without CUDA, also where there is."""
    t.patch.setattr(target, raising(AssertionError("Torch not compiled with CUDA enabled")))
    return action()


def ring(**changes):
    """Return a ring of four nodes with both directions of its edges; ``None`` takes a part away."""
    node = torch.arange(4)
    both = torch.cat([torch.stack([node, (node + 1) % 4]), torch.stack([(node + 1) % 4, node])], 1)
    parts = {
        "x": torch.ones(4, 2),
        "y": torch.tensor([0, 1, 0, 1]),
        "edge_index": both,
        "train_mask": torch.ones(4, dtype=torch.bool),
    }
    return Data.from_dict({k: v for k, v in {**parts, **changes}.items() if v is not None})


def sharded(**changes):
    """Return the ring in two shards of one part each."""
    return gas.cluster(ring(**changes), 2, 2, method="random", log=False)


HALVES = torch.tensor([0, 2, 4])


def load(data=None, ptr=HALVES, **options):
    return gas.SubgraphLoader(ring() if data is None else data, ptr, log=False, **options)


def first_batch(data=None, ptr=HALVES, **options):
    return next(iter(load(data, ptr, **options)))


def adjacency(value=None, rows=2, cols=3):
    """Two rows, three columns, three entries."""
    rowptr = torch.tensor([0, 2, 3] if rows == 2 else [0, 1, 2, 3])
    return Adjacency(rowptr, torch.tensor([0, 2, 1]), value, cols)


class Model(gas.ScalableGNN):
    """Two layers that add up neighbours, and what a case makes of ``push_and_pull``."""

    def __init__(self, num_nodes=4, push=None, **options):
        super().__init__(num_nodes, options.pop("hidden_channels", 2), 2, **options)
        self.push = push
        self.conv = torch.nn.Linear(2, 2)

    def forward(self, x, adj_t, *args):
        h = self.conv(x)
        if self.push is not None:
            return self.push(self, h, *args)
        x = self.push_and_pull(self.histories[0], h, *args)
        return self.conv(x)
