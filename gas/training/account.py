"""Who holds what of a process's memory: an account in which every storage counts once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.layout import layout_of
from gas.history.packing import Packing
from gas.history.store import TableStore
from gas.loader import SubgraphLoader
from gas.loader.batch import SubData, tensors
from gas.native.buffers import idle_bytes
from gas.native.encoded_rows import EncodedRows
from gas.native.memory import human
from gas.scalable.live import batch_bytes
from gas.scalable.model import ScalableGNN
from gas.training.freed import give_back_freed

if TYPE_CHECKING:
    from gas.training.experiment import Experiment


class MemoryAccount:
    """Bytes of host memory by who holds them, in the order in which they were entered.

    Tensors that share a storage count once, for the first who is asked.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._seen: set[int] = set()

    def enter(self, name: str, found: int | Iterable[Any]) -> None:
        """Adds bytes, or the storages of tensors that were not entered before."""
        if not isinstance(found, int):
            found = sum(self._new(tensor) for tensor in found)
        self.held[name] = self.held.get(name, 0) + found

    def _new(self, tensor: Any) -> int:
        """The bytes of a tensor's storage on the CPU, unless it has been counted."""
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return 0
        if isinstance(tensor, EncodedRows):
            return sum(map(self._new, tensor.in_memory))
        if tensor.layout != torch.strided:
            return sum(self._new(part) for part in layout_of(tensor).tensors(tensor))
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._seen:
            return 0
        self._seen.add(storage.data_ptr())
        return storage.nbytes()

    @property
    def total(self) -> int:
        """The sum: what the process should hold at its peak."""
        return sum(self.held.values())

    def table(self, peak_bytes: float) -> str:
        """The account as text, with the measured peak of the process beside the sum."""
        rows = [(name, human(size)) for name, size in self.held.items() if size]
        rows += [("sum", human(self.total)), ("measured peak", _or_unknown(peak_bytes))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size:>12}" for name, size in rows)


def _or_unknown(num_bytes: float) -> str:
    return human(int(num_bytes)) if math.isfinite(num_bytes) else "unknown"


def account_of(
    experiment: Experiment,
    model: ScalableGNN,
    apart: ScalableGNN,
    optimizer: torch.optim.Optimizer,
    libraries: int,
    outputs: Iterable[Tensor] = (),
) -> MemoryAccount:
    """What an experiment holds while it trains, at the end of an epoch's largest batch.

    Args:
        experiment: The experiment.
        model: What it trains, at least an epoch old.
        apart: What evaluates, ``model`` itself or one with histories of its own.
        optimizer: The optimizer.
        libraries: The bytes that were resident before the graph was there.
        outputs: What evaluations have left.
    """
    freed = give_back_freed()  # First: what follows allocates.
    account = MemoryAccount()
    graphs = (experiment.graph, experiment.eval_graph)
    account.enter("interpreter and libraries", libraries)
    account.enter("features", (g.data.x for g in graphs))
    account.enter("graph, clustered", (t for g in graphs for t in tensors(g.data)))
    account.enter(
        "graph before its transform",
        (t for g in graphs if g.raw is not None for t in tensors(g.raw)),
    )
    loaders = [x for g in graphs for x in (g.loader, g.inference) if x is not None]
    for loader in loaders:
        relabel = loader._relabel
        account.enter("loader", (relabel.rowptr, relabel.col, relabel.e_id, relabel.weight))
        account.enter("loader", (loader.ptr,))
    account.enter(
        "loader", sum({id(x._relabel): x._relabel.scratch_bytes for x in loaders}.values())
    )
    kept = [(b.data, b.n_id) for x in loaders for b in x.kept_batches()]
    whole = [g.whole.data for g in graphs if g.whole is not None]
    account.enter("full batch", (t for data in whole for t in _given(data)))
    account.enter("kept batches", (t for data, n_id in kept for t in (*_given(data), n_id)))
    every = [*whole, *(data for data, _ in kept)]
    account.enter("transposes", (t for data in every for t in tensors(data)))
    packings: set[Packing] = set()
    for one in (model, apart):
        for history in one.histories:
            store = history.store
            if isinstance(store, TableStore) and store.tier != "disk":
                account.enter("histories", [store.table])
            account.enter("ages of histories", [history._written_at])
            if isinstance(store, TableStore) and store.packed is not None:
                account.enter("packed rows in memory", [store.packed.hot])
                packings.add(store.packed.packing)
    for loader in loaders:
        x = loader.mapped_features()
        if x is not None and x.packed is not None:
            account.enter("packed rows in memory", [x.packed.hot])
            packings.add(x.packed.packing)
    account.enter("positions of packed rows", sum(packing.nbytes for packing in packings))
    account.enter("parameters and optimizer", model.parameters())
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    account.enter("parameters and optimizer", gradients)
    states = (value for state in optimizer.state.values() for value in state.values())
    account.enter("parameters and optimizer", states)
    account.enter("outputs", outputs)

    batch = _largest(experiment)
    buffers = model.idle_bytes
    model.free_buffers()  # Those that the batch needs count as what it keeps.
    taken = batch_bytes(model, batch)
    training = taken.peak
    if not experiment.full_batch:
        account.enter("batch", taken.batch)
        account.enter("batch before", taken.batch)  # Held until the next one has been cut.
        training += 2 * taken.batch
    account.enter("activations", taken.kept)
    account.enter("gradients of activations", max(0, taken.peak - taken.kept))
    buffers = max(0, buffers - model.idle_bytes)
    account.enter("buffers of histories", buffers)
    training += buffers
    account.enter("evaluation, beyond training", max(0, _evaluation(experiment, model) - training))
    # Activations were in there while they were needed.
    account.enter("freed, not given back", max(0, freed + idle_bytes() - taken.kept))
    return account


def _given(data: Data) -> Iterator[Tensor]:
    """The tensors of a batch but for what its adjacency has made of itself."""
    for key, value in data:
        if key == "adj_t":
            yield from (part for part in layout_of(value).parts(value) if part is not None)
        elif isinstance(value, Tensor):
            yield value


def _evaluation(experiment: Experiment, model: ScalableGNN) -> int:
    """What evaluating takes at once, besides what stays."""
    whole = experiment.eval_graph.whole
    if whole is None or experiment.evaluation != "full":
        return 0  # Layer by layer, it is less than training.
    (batch,) = whole
    taken = batch_bytes(model, batch, training=False)
    return taken.peak + taken.out  # The best epoch's outputs are kept beside those of this one.


def _largest(experiment: Experiment) -> SubData:
    """The batch of the parts with most edges, or the whole graph."""
    graph = experiment.graph
    if graph.loader is None:
        assert graph.whole is not None
        (batch,) = graph.whole
        return batch
    loader: SubgraphLoader = graph.loader
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    return loader.cut(largest[: loader.batch_size or 1].tolist())
