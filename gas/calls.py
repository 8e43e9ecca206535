"""What a call of a model is given, what is wrong with it, and what it is doing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas import _native
from gas.history import History
from gas.history.batch import BatchPulls, Copies, SharedPulls
from gas.inference import Sweep, wrong_calls
from gas.loader import GRAPH_SIZE
from gas.nn.halo import Halo

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

    def check(self, history: History, x: Tensor, num_rows: int, num_histories: int) -> None:
        """Refuses what can't be pushed to a history."""
        width = history.embedding_dim
        if x.dim() != 2 or x.size(0) < num_rows or x.size(1) != width:
            raise ValueError(
                f"'x' has shape {list(x.shape)}, expected the rows of the {num_rows} in-batch "
                f"nodes, of the history's width {width}: [{num_rows}, {width}], or more rows"
            )
        if any(history is pushed for pushed in self.pushed):
            raise RuntimeError(
                "forward called push_and_pull twice with the same history, expected once for each "
                f"of the model's {num_histories}: every layer needs a history of its own"
            )

    def push(self, history: History, x: Tensor, *where: Tensor | None) -> None:
        """Stores rows, now or when forward has ended."""
        self.pushed.append(history)
        if not self.pushes:
            return
        if self.held_back is None:
            history.push(x, *where)
        else:
            self.held_back.append(partial(history.push, x.detach().clone(), *where))

    def halo(self, history: History, own: Tensor, n_id: Tensor) -> Halo:
        """The halo's rows from a history, for a batch of nodes ``n_id`` whose own are ``own``."""
        pulls = self.pulls or BatchPulls([history], own.size(0), n_id, limit=0)
        index = n_id[own.size(0) :]
        halo = Halo(index.numel(), partial(pulls.rows, history))
        if not pulls.has_started(history):
            halo.stored = history.in_place(index, own.dtype, halo)
        if halo.stored is None:
            halo.settle()
        return halo

    def finish(self, num_histories: int) -> None:
        """Refuses a forward pass that didn't fill every history, before what is held back."""
        if len(self.pushed) < num_histories:
            raise wrong_calls(len(self.pushed), num_histories)
        for push in self.held_back or ():
            push()


def check_count(name: str, value: object) -> None:
    """Refuses what is no number of at least one thing."""
    if not _native.is_integer(value) or cast(int, value) < 1:
        raise ValueError(f"'{name}' is {value!r}, expected an integer of at least 1")


def check_call(
    x: Tensor | None,
    batch_size: int | None,
    n_id: Tensor | None,
    fill: bool,
    num_nodes: int,
    buffer_size: int | None,
) -> None:
    """Refuses arguments of a model that don't describe one mini-batch, or one full batch."""
    if (batch_size is None) != (n_id is None):
        raise ValueError(
            "'batch_size' and 'n_id' describe a mini-batch together: pass all that the loader "
            "yields, model(batch.x, batch.adj_t, *args)"
        )
    if batch_size is not None and n_id is not None:
        if not _native.is_integer(batch_size) or not 0 <= batch_size <= n_id.numel():
            raise ValueError(
                f"'batch_size' is {batch_size!r}, expected an integer between 0 and the "
                f"{n_id.numel()} nodes in 'n_id'"
            )
        if fill:
            raise ValueError("'fill' is for full batches: a mini-batch always writes histories")
        check_graph(n_id, num_nodes)
        check_halo(batch_size, n_id, buffer_size)
    expected = num_nodes if n_id is None else n_id.numel()
    if (fill or n_id is not None) and isinstance(x, Tensor) and x.size(0) != expected:
        raise ValueError(f"'x' has {x.size(0)} rows, expected one per node: {expected}")


def check_graph(n_id: Tensor, num_nodes: int) -> None:
    """Refuses nodes of another graph, as far as its size tells."""
    graph = getattr(n_id, GRAPH_SIZE, num_nodes)
    if n_id.device.type == "cpu" and n_id.numel():
        graph = max(graph, int(n_id.max()) + 1)
    if graph != num_nodes:
        raise ValueError(
            f"'n_id' names nodes of a graph of {graph} nodes, but the histories are for "
            f"{num_nodes}: use model.for_graph(num_nodes), which shares the weights"
        )


def check_halo(batch_size: int, n_id: Tensor, buffer_size: int | None) -> None:
    """Refuses a batch whose halo doesn't fit."""
    halo = n_id.numel() - batch_size
    if buffer_size is not None and halo > buffer_size:
        raise ValueError(
            f"'buffer_size' is {buffer_size}, but the batch has {halo} halo nodes: raise "
            "it, or leave it out to have buffers sized automatically"
        )


def adjacency(data: Data) -> Any:
    """The adjacency of a batch, in its layout."""
    return data.adj_t if "adj_t" in data else data.edge_index


@functools.lru_cache(maxsize=128)
def _edge_parameters(function: Callable[..., Tensor]) -> tuple[str, ...]:
    """Those of ``edge_weight`` and ``edge_attr`` that a function takes; to look takes long."""
    named = inspect.signature(function).parameters
    return tuple(name for name in ("edge_weight", "edge_attr") if name in named)


def edge_arguments(function: Callable[..., Tensor], data: Data) -> dict[str, Tensor]:
    """The edge-level tensors of a batch that ``function`` takes by name."""
    named = _edge_parameters(getattr(function, "__func__", function))
    kwargs = {name: data[name] for name in named if name in data}
    if "adj_t" in data:  # The weights are its values.
        kwargs.pop("edge_weight", None)
    return kwargs


def lacks_product(adj_t: Any, error: RuntimeError) -> bool:
    """Whether PyTorch said that it can't multiply a CSR matrix by numbers of 16 bits."""
    if not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_csr:
        return False
    return "sparse_csr" in str(error) or "scalar type" in str(error)
