"""Loader of mini-batches: some parts of a graph each, with their halo."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data, HeteroData

from gas.graph import (
    PARTS,
    PERM,
    check_data_features,
    check_is_graph,
    check_ptr,
    default_layout,
    local_graph,
    open_if_path,
    read_csr,
)
from gas.loader.batch import SubData, check_sendable, empty_graph
from gas.loader.batch_sampler import (
    ResumableBatchSampler,
    check_state,
    choose_batch_size,
    remember_batch_size,
)
from gas.loader.cache import make_cache
from gas.loader.cutter import BatchCutter, get_parts, get_shard
from gas.loader.transforms import EpochTransform, transform_graph
from gas.native import Relabeler, check_flags, check_names, share_cores

LOADER_OPTIONS = {*inspect.signature(DataLoader).parameters} - {"dataset", "collate_fn"}


class SubgraphLoader(BatchCutter, DataLoader):
    """Loads mini-batches of a partitioned graph, each with its one-hop halo.

    Args:
        data: The graph, from :func:`gas.cluster` or :func:`gas.permute`, or the path of a graph
            folder, which is mapped into memory. Only ``data.batch_size`` is modified. Changes of
            features and attributes take effect in the next epoch; changes of edges are refused.
            Sparse features ``x`` stay sparse: batches have a ``torch.sparse_csr`` matrix of their
            nodes' rows. If features have to be converted to CSR, ``loader.data`` is another graph:
            make changes to it. So it is in distributed training on a graph with ``shards``: a
            process loads the batches of its shard, and ids of nodes and edges are those of the
            local graph of :func:`gas.graph.shard_of`, which may also be passed itself.
        ptr: The parts, of shape ``[num_parts + 1]``, from :func:`gas.metis`; of a shard, the parts
            of its own nodes. (default: ``data.parts``, from :func:`gas.cluster`)
        batch_size: Parts per mini-batch; a batch lists them in increasing order. It becomes
            ``data.batch_size`` unless ``ptr`` is given. (default: ``data.batch_size``, or ``1``)
        bipartite: Make the adjacency ``[batch_size, batch_size + halo]``; otherwise square, with
            empty halo rows. The layout ``"edge_index"`` has no such shape. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        layout: ``"csr"`` puts a ``torch.sparse_csr`` matrix into ``data.adj_t``;
            ``"sparse_tensor"`` a ``torch_sparse.SparseTensor``; ``"fused"`` a
            :class:`gas.nn.Adjacency`, for the layers of :mod:`gas.nn`; ``"edge_index"`` sets
            ``data.edge_index``. (default: ``"fused"`` for a graph of :func:`gas.cluster`, ``"csr"``
            if ``ptr`` is given, ``"sparse_tensor"`` for a graph that has one)
        edge_weight: Make ``data.edge_weight`` the values of ``adj_t``. (default: ``True``)
        cache: Cache batches, features included, for the next epoch. Batches may be modified in
            place; a cached batch whose tensors were changed is cut again. Only batches that repeat
            can be cached: those of one part, or in a fixed order. (default: cache ids and edges of
            repeating batches, up to 1 GiB, and no features)
        check: Refuse NaN and infinite values in ``x`` and ``edge_attr``. (default: unless
            :func:`gas.cluster` has checked the graph, or it is mapped from a graph folder)
        epoch_transform: An augmentation of ``data``, which runs on the whole graph at the start of
            every epoch, but not for layer-wise inference. Batches then have ``data.views``: two
            of PyG's ``Data`` with ``x``, the adjacency and attributes of edges, for its previous
            and its current state; see :class:`gas.augment.Views`. (default: none)
        graph_transform: Transform of the whole graph, such as ``T.GCNNorm()``: batches are those of
            ``graph_transform(data)``, and weights of views are normalised by the degrees of the
            view. (default: none)
        like: Another loader of the same graph, whose copy of edges and weights is shared.
            (default: make a copy)
        leave_cores: In a loop over the loader, reduce PyTorch's threads while other processes keep
            cores busy; see :func:`gas.training.share_cores`. This may change the rounding of
            PyTorch's sums, unless it has one thread from the start. (default: ``True``)
        precompute: In training, compute the sums or means over neighbours with which a first layer
            of :mod:`gas.nn` begins, ``A x``, once for the whole graph. Batches then read a row of
            them for each of their nodes, instead of the halo's features and all edges. They take
            as much memory as the features before quantisation, and at most a quarter of what is
            free, which several ranks share. Features that are learnt, changed in place, sparse, or
            on disk have none. (default: ``True``)
        **kwargs: Further arguments of ``torch.utils.data.DataLoader``, such as ``shuffle``, or
            ``sampler``: a :class:`gas.PartSampler`; ``DistributedSampler(range(num_parts))``
            distributes the parts among processes, which a graph with ``shards`` doesn't need.

    Raises:
        ValueError: If the graph, ``ptr`` or an option is unusable, naming the argument; when an
            epoch begins, if the graph has an attribute that workers can't send.
    """

    _hetero_class: ClassVar[type[SubgraphLoader]]  # Set by gas.loader.hetero, which builds on this.

    def __new__(cls, data: Any = None, *args: Any, **kwargs: Any) -> SubgraphLoader:
        """Make a :class:`gas.loader.HeteroLoader` of a heterogeneous graph."""
        is_hetero = cls is SubgraphLoader and isinstance(data, HeteroData)
        return super().__new__(cls._hetero_class if is_hetero else cls)

    @check_flags
    def __init__(
        self,
        data: Data | str | Path,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        bipartite: bool = True,
        log: bool = True,
        *,
        layout: str | None = None,
        edge_weight: bool = True,
        cache: bool | None = None,
        check: bool | None = None,
        epoch_transform: EpochTransform | None = None,
        graph_transform: Callable[[Data], Data] | None = None,
        like: SubgraphLoader | None = None,
        leave_cores: bool = True,
        precompute: bool = True,
        **kwargs: Any,
    ) -> None:
        given = open_if_path(data)
        check_is_graph(given)
        asked, has_ptr = batch_size, ptr is not None
        batch_size = choose_batch_size(given, asked, has_ptr, kwargs)
        original = _find_original(kwargs)
        if original is not None:
            like, layout, edge_weight = original, original.layout, original.edge_weight
            cache, leave_cores = original.cache, original.leave_cores
            precompute = original.feature_sums.is_on
        if layout is None:
            layout = default_layout(given.get("adj_t"), is_clustered=not has_ptr)
        _check_options(given, kwargs, epoch_transform)
        graph, views = transform_graph(given, epoch_transform, graph_transform)
        is_transformed = epoch_transform is not None or graph_transform is not None
        source = given if is_transformed else local_graph(given)
        _check_like(like, source, edge_weight, is_transformed)
        if original is not None and not is_transformed:
            views, epoch_transform = original._views, original.augmentation
        ptr = get_parts(graph, ptr)
        with share_cores(leave_cores):  # This also measures which cores are free.
            relabel = like._relabel if like is not None else _make_relabeler(graph, edge_weight)
        _check_parts(graph, ptr, relabel.num_nodes, kwargs)
        if check or (check is None and like is None and PARTS not in graph):
            check_data_features(graph, with_mapped=bool(check))
        if log:
            print(f"Loading {len(ptr) - 1} parts, {batch_size} per batch", file=sys.stderr)
        self.log = log
        self.leave_cores: bool = leave_cores
        self.cache: bool | None = cache
        BatchCutter.__init__(self, graph, ptr, relabel, layout, bipartite, edge_weight)
        self._source, self._views, self.augmentation = source, views, epoch_transform
        known = None if like is None else like.feature_sums
        self.feature_sums = self.feature_sums.share_with(known, precompute)
        options = {"batch_size": batch_size, "collate_fn": self._collate, **kwargs}
        DataLoader.__init__(self, range(len(ptr) - 1), **options)  # type: ignore[arg-type]
        self._order = ResumableBatchSampler(cast(Any, self.batch_sampler), ptr)
        in_order = isinstance(self.sampler, SequentialSampler)
        fixed = kwargs.get("batch_sampler") is None and (batch_size == 1 or in_order)
        self._cache, self._cache_features = make_cache(cache, fixed), bool(cache)
        remember_batch_size(given, asked, has_ptr)

    @property
    def _index_sampler(self) -> ResumableBatchSampler:
        """Return the sampler that PyTorch iterates, also if ``batch_sampler`` was replaced."""
        return self._order

    def __iter__(self) -> Iterator[SubData]:  # type: ignore[override]
        self._sync_graph()
        self._check_trainable()
        if self.num_workers:
            others = {key: self.data[key] for key in self._other_keys}
            check_sendable({"data": empty_graph(self.data), **others})
        order = self._order
        resumes = order.resumes
        epoch = self._epoch(resumes)
        generator = cast("torch.Generator | None", self.generator)
        drawn = None if generator is None else generator.get_state()
        # A resumed epoch draws no random numbers again.
        with torch.random.fork_rng(devices=[], enabled=resumes):
            batches = DataLoader.__iter__(epoch)
        if resumes and generator is not None and drawn is not None:
            generator.set_state(drawn)
        mine = None
        try:
            with share_cores(self.leave_cores) as follow_cores:
                for batch in batches:
                    mine = mine or order.epoch  # Of this loop, also after another one has begun.
                    if mine is not None:
                        mine.done += 1
                    follow_cores()
                    yield self._tag_ids(batch)
            mine = mine or order.epoch
        finally:  # Leaving the loop ends the epoch.
            if mine is not None:
                order.end(mine)

    def _epoch(self, resumes: bool) -> SubgraphLoader:
        """Return the loader whose views are those of a new or resumed epoch."""
        if self.augmentation is None:
            return self
        return self._with_views(self._views.run(again=resumes))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: partition, order of the epoch, augmentation.

        Within a loop over the loader, or over a :class:`gas.PrefetchLoader` of it, the batches
        that were yielded count as done.
        """
        order, chain = self._order, self.augmentation
        # The key is optional, as in checkpoints of older versions.
        sampler = {} if order.sampler is None else {"sampler": order.sampler.state_dict()}
        return {
            **sampler,
            "graph": self._graph_fingerprint(),
            "parts": self.ptr,
            "perm": self.data.get(PERM),
            "batches": len(order) if hasattr(order.batches, "__len__") else None,
            "order": order.state(),
            "generator": None if self.generator is None else self.generator.get_state(),
            "augmentation": None if chain is None else chain.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another graph or partition.

        Raises:
            ValueError: Saying what differs.
        """
        check_state(type(self).__name__, self.state_dict(), state, self._order.sampler)
        if self.augmentation is not None:
            self.augmentation.check_state(state["augmentation"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state: the next epoch is the rest of the one that had begun, if one had.

        Raises:
            ValueError: If it is that of another graph or partition; nothing has changed then.
        """
        self.check_state(state)
        if self.augmentation is not None:
            self.augmentation.load_state_dict(state["augmentation"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        self._order.restore(state["order"], state.get("sampler"))

    @property
    def order(self) -> ResumableBatchSampler:
        """Return the order of the epoch's batches, which counts those that were yielded."""
        return self._order

    @property
    def parts_per_batch(self) -> int:
        """Return the number of parts per mini-batch, as far as a ``batch_sampler`` says it."""
        size = getattr(self._order.batches, "batch_size", None)
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def trainable(self) -> list[str]:
        """Return the names of attributes of nodes and edges that require a gradient."""
        self._sync_graph()
        return self._trainable

    @property
    def view_loss(self) -> Callable[..., Tensor] | None:
        """Return the loss of batches with views that the augmentation has, if there is one."""
        return getattr(self.augmentation, "view_loss", None)

    def plain_loader(self) -> SubgraphLoader:
        """Return a loader of all parts in order, without views; it leaves this loader's epochs."""
        if self._views is None and self.persistent_workers:
            return self  # A copy would start workers of its own.
        other = self._with_views(None)
        parts = SequentialSampler(range(self.ptr.numel() - 1))
        order = BatchSampler(parts, self.parts_per_batch, drop_last=False)
        other._order = ResumableBatchSampler(order, self.ptr)
        other.generator = None if self.generator is None else torch.Generator()
        return other

    def _with_views(self, views: Any) -> SubgraphLoader:
        """Return a copy of the loader with other views, or none; both share cached batches."""
        other = copy.copy(self)
        other._views, other.augmentation = views, None
        other.collate_fn = other._collate
        return other

    def _check_changes(self, changed: set[str]) -> None:
        super()._check_changes(changed)
        if self.persistent_workers:
            raise ValueError(
                f"'{min(changed)}' of the graph was changed, but 'persistent_workers' is True, and "
                "workers that stay don't see it: make a new loader, or leave that option out"
            )

    def _check_trainable(self) -> None:
        """Refuse attributes that require a gradient but wouldn't get one.

        Raises:
            ValueError: Naming the attribute.
        """
        if not self._trainable or not torch.is_grad_enabled():
            return
        weight = self._weight_key or "adj_t"
        if self._weighted and weight in self._trainable:
            raise ValueError(
                f"{weight!r} requires a gradient, but the loader has a copy of the weights: "
                "detach() it, or compute weights in forward, of 'edge_attr'"
            )
        if self.num_workers:
            raise ValueError(
                f"{self._trainable[0]!r} requires a gradient, which workers can't send with their "
                "batches: leave 'num_workers' out, or detach() it"
            )

    def __repr__(self) -> str:
        sizes = f"num_parts={len(self.ptr) - 1}, batch_size={self.batch_size}"
        return f"{self.__class__.__name__}({sizes}, layout={self.layout!r})"


def _find_original(options: dict[str, Any]) -> SubgraphLoader | None:
    """Return the loader that is being re-created with another sampler, as by Lightning.

    Lightning passes those arguments of the constructor that are attributes, and those of
    ``DataLoader``; ``collate_fn``, a method of the loader, leads to the others.
    """
    loader = getattr(options.get("collate_fn"), "__self__", None)
    if not isinstance(loader, SubgraphLoader):
        return None
    for name in ("dataset", "collate_fn"):
        options.pop(name, None)
    return loader


def _check_options(
    data: Data, options: Mapping[str, Any], epoch_transform: EpochTransform | None
) -> None:
    """Refuse options that ``DataLoader`` lacks, and persistent workers for views that change."""
    if "views" in data:
        raise ValueError(
            "'data' has an attribute 'views', the name of an augmentation's views in mini-batches: "
            "rename it"
        )
    check_names(options, LOADER_OPTIONS, "gas.SubgraphLoader, nor one of DataLoader that it takes")
    if epoch_transform is not None and options.get("persistent_workers"):
        raise ValueError(
            "'persistent_workers' is True, but workers that stay don't see the next epoch's views: "
            "leave it out, or 'epoch_transform'"
        )


def _make_relabeler(data: Data, edge_weight: bool) -> Relabeler:
    (rowptr, col, e_id), weight = read_csr(data, edge_weight)
    return Relabeler(rowptr, col, e_id, weight)


def _check_like(
    like: SubgraphLoader | None, data: Data, edge_weight: bool, is_transformed: bool
) -> None:
    """Refuse a loader ``like`` of another graph."""
    if like is None:
        return
    is_same = data is like.data or data is like._source
    if is_transformed or not is_same or like.edge_weight != edge_weight:
        raise ValueError(
            "'like' is a loader of another graph, or with another 'edge_weight', or the graph is "
            "transformed: pass a loader of the same 'data', or leave 'like' out"
        )
    like._sync_graph()


def _check_parts(data: Data, ptr: Tensor, num_nodes: int, options: Mapping[str, Any]) -> None:
    """Refuse parts of another graph, and a ``DistributedSampler`` of the parts of a shard."""
    shard = get_shard(data)
    check_ptr(ptr, num_nodes if shard is None else shard.num_own)
    if shard is None:
        return
    samplers = options.get("sampler"), getattr(options.get("batch_sampler"), "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            "'sampler' is a DistributedSampler, but the graph has 'shards', and each process has "
            "the parts of its own already: use shuffle=True instead, and "
            "Trainer(use_distributed_sampler=False) with Lightning; or take the shards away, "
            "del data.shards"
        )
