"""Memory of an experiment in training, by what holds it; every storage counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas import ScalableGNN, SubData, SubgraphLoader, scalable
from gas.cli.setup import Setup
from gas.graph import layout_of
from gas.history import Packing, TableStore
from gas.training import MemoryAccount, Run, batch_bytes, release_freed_memory


def measure_memory(
    experiment: Setup,
    model: ScalableGNN,
    evaluator: ScalableGNN,
    optimizer: torch.optim.Optimizer,
    libraries: int,
    run: Run,
) -> MemoryAccount:
    """Measure the memory of an experiment after an epoch, at the end of its largest batch.

    ``libraries`` are the resident bytes before the graph was loaded.
    """
    freed = release_freed_memory()  # First, because the rest allocates.
    account = MemoryAccount()
    graphs = (experiment.graph, experiment.eval_graph)
    account.enter("interpreter and libraries", libraries)
    account.enter("features", (g.data.x for g in graphs))
    account.enter("graph, clustered", (g.data for g in graphs))
    account.enter("graph before its transform", (g.raw for g in graphs if g.raw is not None))
    loaders = [x for g in graphs for x in (g.loader, g.inference) if x is not None]
    for loader in loaders:
        relabel = loader._relabel
        account.enter("loader", (relabel.rowptr, relabel.col, relabel.e_id, relabel.weight))
        account.enter("loader", (loader.ptr,))
        account.enter("sums of features", loader.feature_sums.tensors())
    account.enter(
        "loader", sum({id(x._relabel): x._relabel.scratch_bytes for x in loaders}.values())
    )
    kept = [(b.data, b.n_id) for x in loaders for b in x.get_cached_batches()]
    whole = [g.whole.data for g in graphs if g.whole is not None]
    account.enter("full batch", (t for data in whole for t in _batch_tensors(data)))
    account.enter("kept batches", (t for data, n_id in kept for t in (*_batch_tensors(data), n_id)))
    account.enter("transposes", [*whole, *(data for data, _ in kept)])
    _enter_rows(account, (model, evaluator), loaders)
    account.enter("parameters and optimizer", model.parameters())
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    account.enter("parameters and optimizer", gradients)
    states = (value for state in optimizer.state.values() for value in state.values())
    account.enter("parameters and optimizer", states)
    account.enter("outputs", [] if run.best is None else [run.best.out])
    _enter_batch(account, experiment, model, freed)
    return account


def _enter_rows(
    account: MemoryAccount, models: Iterable[ScalableGNN], loaders: Iterable[SubgraphLoader]
) -> None:
    """Add the rows of histories, and packed rows of histories and features."""
    packings: set[Packing] = set()
    for one in models:
        for history in one.histories:
            store = history.store
            if isinstance(store, TableStore) and store.tier != "disk":
                account.enter("histories", [store.table])
            account.enter("ages of histories", [history._written_at])
            if store.packed is not None:
                account.enter("packed rows in memory", [store.packed.hot])
                packings.add(store.packed.packing)
    for loader in loaders:
        x = loader.get_mapped_features()
        if x is not None and x.packed is not None:
            account.enter("packed rows in memory", [x.packed.hot])
            packings.add(x.packed.packing)
    account.enter("positions of packed rows", sum(packing.nbytes for packing in packings))


def _enter_batch(account: MemoryAccount, experiment: Setup, model: ScalableGNN, freed: int) -> None:
    """Add the memory of the largest batch in training, and what evaluation needs beyond it."""
    batch = _largest_batch(experiment)
    scalable.free_buffers(model)  # The batch makes those again that it needs.
    taken = batch_bytes(model, batch)
    training = taken.peak
    if not experiment.full_batch:
        account.enter("batch", taken.batch)
        account.enter("batch before", taken.batch)  # It is freed after the next one has been cut.
        training += 2 * taken.batch
    account.enter("activations", taken.kept)
    account.enter("gradients of activations", max(0, taken.peak - taken.kept))
    buffers = max(0, model._engine.pool.peak_bytes - scalable.idle_bytes(model))
    account.enter("buffers of histories", buffers)
    training += buffers
    account.enter(
        "evaluation, beyond training", max(0, _evaluation_bytes(experiment, model) - training)
    )
    # Freed memory has held the activations before.
    account.enter("freed, not given back", max(0, freed - taken.kept))


def _batch_tensors(data: Data) -> Iterator[Tensor]:
    """Yield the tensors of a batch, except those that its adjacency has cached."""
    for key, value in data:
        if key == "adj_t":
            yield from (part for part in layout_of(value).parts(value) if part is not None)
        elif isinstance(value, Tensor):
            yield value


def _evaluation_bytes(experiment: Setup, model: ScalableGNN) -> int:
    """Return the peak bytes of evaluation, besides what is held all the time."""
    whole = experiment.eval_graph.whole
    if whole is None or experiment.evaluation != "full":
        return 0  # Layer by layer, it needs less than training.
    (batch,) = whole
    taken = batch_bytes(model, batch, training=False)
    return taken.peak + taken.out  # The outputs of the best epoch are kept, too.


def _largest_batch(experiment: Setup) -> SubData:
    """Return the batch of the parts with the most edges, or the whole graph."""
    graph = experiment.graph
    if graph.loader is None:
        assert graph.whole is not None
        (batch,) = graph.whole
        return batch
    loader: SubgraphLoader = graph.loader
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    return loader.cut(largest[: loader.parts_per_batch].tolist())
