"""What a call of a model is given, and what it is doing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.history import History
from gas.history.batch import BatchPulls, Copies, SharedPulls
from gas.inference import Sweep

BANKS = ("original", "per_view")
Pulls = BatchPulls | SharedPulls | Copies


@dataclass
class Call:
    """What one call of a model is doing.

    * ``batch``: it computes a mini-batch; ``fill``: a full batch, and writes the histories.
    * ``pulls``: the halo's rows; ``None`` to read them when they are asked for.
    * ``pushes``: whether in-batch rows are stored.
    * ``bank``: other histories than the model's, to be used in their place.
    * ``sweep``: layer-wise inference by whole forward passes.
    * ``pushed``: the histories that were filled; ``held_back``: pushes, until forward has ended.
    """

    batch: bool = False
    fill: bool = False
    pulls: Pulls | None = None
    pushes: bool = True
    bank: Mapping[History, History] = field(default_factory=dict)
    sweep: Sweep | None = None
    pushed: list[History] = field(default_factory=list)
    held_back: list[Callable[[], None]] | None = None


def adjacency(data: Data) -> Any:
    """The adjacency of a batch, in its layout."""
    return data.adj_t if "adj_t" in data else data.edge_index


def edge_arguments(function: Callable[..., Tensor], data: Data) -> dict[str, Tensor]:
    """The edge-level tensors of a batch that ``function`` takes by name."""
    named = inspect.signature(function).parameters
    kwargs = {
        name: data[name] for name in ("edge_weight", "edge_attr") if name in named and name in data
    }
    if "adj_t" in data:  # The weights are its values.
        kwargs.pop("edge_weight", None)
    return kwargs


def lacks_product(adj_t: Any, error: RuntimeError) -> bool:
    """Whether PyTorch said that it can't multiply a CSR matrix by numbers of 16 bits."""
    if not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_csr:
        return False
    return "sparse_csr" in str(error) or "scalar type" in str(error)
