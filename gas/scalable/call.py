"""What a call of a model is given, what is wrong with it, and what it is doing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from gas.history import History
from gas.history.batch import BatchPulls
from gas.history.rows import Rows, first_rows
from gas.loader.batch import GRAPH_SIZE
from gas.native.checks import check_integer

if TYPE_CHECKING:
    from gas.scalable.ranks import Ranks

BANKS = ("original", "per_view")
# What ``forward`` and ``forward_layer`` are given by position.
POSITIONAL = frozenset(
    ("self", "x", "adj_t", "edge_index", "batch_size", "n_id", "offset", "count", "layer", "state")
)


class Reached(BaseException):
    """Ends a forward pass at the history that layer-wise inference is filling."""


class Sweep:
    """One sweep over all batches by whole forward passes; it fills the history of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.calls = 0


def wrong_calls(calls: int, num_histories: int) -> RuntimeError:
    """The error of a model that doesn't fill each of its histories once."""
    return RuntimeError(
        f"forward called push_and_pull {calls} times, expected once for each of the model's "
        f"{num_histories} histories: pass every hidden layer's output through it, or set "
        "'num_layers' to one more than the histories it needs"
    )


class _Running(threading.local):
    """What each thread is computing, of whatever model: its innermost call."""

    call: Call | None = None


RUNNING = _Running()


class Calls:
    """The calls of one model that are under way: one for each thread, and one with histories.

    Batches write the histories in an order that has to be known; a plain full batch doesn't.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._with_histories = threading.Lock()

    @property
    def current(self) -> Call | None:
        """What this thread is doing."""
        return getattr(self._mine, "call", None)

    @contextlib.contextmanager
    def enter(self, call: Call) -> Iterator[None]:
        """Makes a call this thread's current one.

        Raises:
            RuntimeError: If another thread's call uses the histories, as this one would.
        """
        before = self.current
        holds = call.batch or call.fill
        waits = holds and (before is None or not (before.batch or before.fill))
        if waits and not self._with_histories.acquire(blocking=False):
            raise RuntimeError(
                "another thread is calling this model, and both read and write its histories: call "
                "it from one thread, or make model.for_graph(num_nodes) for the other, which "
                "shares the weights and has histories of its own"
            )
        outside, RUNNING.call = RUNNING.call, call
        self._mine.call = call
        try:
            yield
        finally:
            self._mine.call, RUNNING.call = before, outside
            if waits:
                self._with_histories.release()

    def __deepcopy__(self, memo: object) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()


def check_not_recomputing() -> None:
    """Refuses to push and pull again in a backward pass.

    Raises:
        RuntimeError: If autograd is running this thread's code, as activation checkpointing has it.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "push_and_pull was called in the backward pass, by activation checkpointing: it would "
            "read what has been pushed since, and push again. Checkpoint the layers alone, "
            "x = checkpoint(conv, x, adj_t, use_reentrant=False), and call push_and_pull outside"
        )


@dataclass
class Call:
    """What one call of a model is doing.

    * ``batch``: it computes a mini-batch; ``fill``: a full batch, and writes the histories.
    * ``pulls``: the halo's rows; ``None`` to read them when they are asked for.
    * ``pushes``: whether in-batch rows are stored.
    * ``bank``: other histories than the model's, to be used in their place.
    * ``sweep``: layer-wise inference by whole forward passes.
    * ``compiled``: forward is compiled. Graphs can't ask whether rows in a history have changed.
    * ``ranks``: whom the pushed rows are sent to.
    * ``histories``: the model's.
    * ``pushed``: the histories that were filled; ``held_back``: pushes, until forward has ended.
    """

    batch: bool = False
    fill: bool = False
    pulls: BatchPulls | None = None
    pushes: bool = True
    bank: Mapping[History, History] = field(default_factory=dict)
    sweep: Sweep | None = None
    compiled: bool = False
    ranks: Ranks | None = None
    histories: Sequence[History] = ()
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

    def exchange(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None,
        n_id: Tensor | None,
        offset: Tensor | None,
        count: Tensor | None,
        rows: bool,
        num_nodes: int,
        num_histories: int,
    ) -> Tensor | Rows:
        """Pushes and pulls; see :meth:`gas.ScalableGNN.push_and_pull`."""
        if n_id is None or batch_size is None:
            if self.batch:
                raise ValueError(
                    "push_and_pull was not told which batch this is: pass on what forward was "
                    "given, self.push_and_pull(history, x, *args)"
                )
            if self.fill:
                self.check(history, x, num_nodes, num_histories)
                self.push(history, x)
            return x
        history = self.bank.get(history, history)
        self.check(history, x, batch_size, num_histories)
        own = first_rows(x, batch_size)
        sweep = self.sweep
        if sweep is None or sweep.calls == sweep.layer:
            self.push(history, own, n_id[:batch_size], offset, count)
        else:
            self.pushed.append(history)
        if sweep is not None:
            if sweep.calls == sweep.layer:
                raise Reached
            sweep.calls += 1
        pulls = self.pulls or BatchPulls([], batch_size, n_id)
        if rows:
            return pulls.rows(history, own, in_place=not self.compiled)
        return pulls.tensor(history, own)

    def push(self, history: History, x: Tensor, *where: Tensor | None) -> None:
        """Stores rows, now or when forward has ended."""
        self.pushed.append(history)
        if not self.pushes:
            return
        if self.held_back is None:
            history.push(x, *where)
        else:
            self.held_back.append(partial(history.push, x.detach().clone(), *where))

    def finish(self, num_histories: int) -> None:
        """Refuses a forward pass that didn't fill every history, before what is held back."""
        if len(self.pushed) < num_histories:
            raise wrong_calls(len(self.pushed), num_histories)
        for push in self.held_back or ():
            push()


def check_call(
    x: Tensor | Rows | None,
    batch_size: int | None,
    n_id: Tensor | None,
    fill: bool,
    num_nodes: int,
    buffer_size: int | None,
) -> None:
    """Refuses arguments of a model that don't describe one mini-batch, or one full batch."""
    if isinstance(x, DataLoader):
        raise ValueError(
            f"'x' is a {type(x).__name__}, expected a mini-batch of it, model(batch); all of them "
            "are model(loader=loader)"
        )
    if isinstance(x, Data):
        raise ValueError(
            f"'x' is a {type(x).__name__}, expected features, model(data.x, data.edge_index), or a "
            "mini-batch of gas.SubgraphLoader, model(batch); model.predict(graph) is for all nodes"
        )
    if (batch_size is None) != (n_id is None):
        raise ValueError(
            "'batch_size' and 'n_id' describe a mini-batch together: pass all that the loader "
            "yields, model(batch.x, batch.adj_t, *args)"
        )
    if batch_size is not None and n_id is not None:
        wanted = f"an integer between 0 and the {n_id.numel()} nodes in 'n_id'"
        check_integer("batch_size", batch_size, 0, n_id.numel(), wanted)
        if fill:
            raise ValueError("'fill' is for full batches: a mini-batch always writes histories")
        check_graph(n_id, num_nodes)
        check_halo(batch_size, n_id, buffer_size)
    expected = num_nodes if n_id is None else n_id.numel()
    if (fill or n_id is not None) and isinstance(x, Tensor | Rows) and x.size(0) != expected:
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
def _parameters(function: Callable[..., Tensor]) -> tuple[str, ...]:
    """The parameters that a function is given by name; to look takes long."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
    return tuple(name for name in named if name not in POSITIONAL)


def named_arguments(function: Callable[..., Tensor], data: Data) -> dict[str, Any]:
    """What a batch has of the parameters that ``function`` names: ``edge_weight``, ``pos``, ..."""
    named = _parameters(getattr(function, "__func__", function))
    kwargs = {name: data[name] for name in named if name in data}
    if "adj_t" in data:  # The weights are its values.
        kwargs.pop("edge_weight", None)
    return kwargs


def lacks_product(adj_t: Any, error: RuntimeError) -> bool:
    """Whether PyTorch said that it can't multiply a CSR matrix by numbers of 16 bits."""
    if not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_csr:
        return False
    return "sparse_csr" in str(error) or "scalar type" in str(error)
