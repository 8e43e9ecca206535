"""Mini-batches: some parts of a graph, their one-hop halo, and every edge between them."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data, HeteroData

from gas.augment import Augmentation, EpochViews, Views
from gas.graph import (
    BATCH_SIZE,
    PARTS,
    PERM,
    SHARD,
    SHARDS,
    GraphVersions,
    Shard,
    check_entering,
    check_is_graph,
    check_nodes,
    check_ptr,
    clone_unless_learnable,
    default_layout,
    find_layout,
    keys_by_row,
    local_graph,
    mapped_rows,
    open_if_path,
    read_csr,
    with_csr_features,
    without_edges,
)
from gas.history import Encoded, share_cores
from gas.loader.batch import GRAPH_SIZE, RNG_FINGERPRINT, SubData, empty_graph
from gas.loader.batch_sampler import (
    ResumableBatchSampler,
    check_state,
    choose_batch_size,
    remember_batch_size,
)
from gas.loader.cache import BatchCache
from gas.loader.lazy import LazyRows, read_lazy_rows, rows_of, set_lazy
from gas.native import Relabeler, check_integer, check_range

CACHE_BYTES = 1 << 30  # What a loader keeps of its batches unless told.
FEATURES = ("x", "edge_attr")  # What a batch copies when it is asked for.
ADJACENCY_KEYS = ("edge_index", "adj_t", "num_nodes")  # What a batch gets anew.


class SubgraphLoader(DataLoader):
    """Loads mini-batches of a partitioned graph, each with its one-hop halo.

    Args:
        data: The graph, from :func:`gas.cluster` or :func:`gas.permute`, or the path of a graph
            folder, whose edges and features are read where they lie. It is never modified, but that
            it remembers ``batch_size``. Changes of its features and attributes are seen from the
            next epoch on; those of its edges are refused. Sparse features ``x`` stay so:
            batches have a ``torch.sparse_csr`` matrix of their nodes' rows. Where they have to be
            made CSR, the loader works on a graph of its own: assign to ``loader.data`` then. So it
            does where processes of ``torch.distributed`` share a graph that was cut into
            ``shards``: each has the batches of its own, and ids of nodes and edges are those of the
            local graph that :func:`gas.graph.shards.shard_of` makes. Such a local graph may be
            given, too.
        ptr: The parts, of shape ``[num_parts + 1]``, from :func:`gas.metis`; of the shard's own
            nodes, where there is one. (default: ``data.parts``, which :func:`gas.cluster` has set)
        batch_size: Parts per mini-batch; a batch lists them in increasing order. ``data`` remembers
            it, as ``data.batch_size``, unless ``ptr`` is given. (default: that of the last loader
            of ``data`` which was given one, or ``1``)
        bipartite: Make the adjacency ``[batch_size, batch_size + halo]``; otherwise square, with
            empty halo rows. The layout ``"edge_index"`` has no such shape. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        layout: ``"csr"`` puts a ``torch.sparse_csr`` matrix into ``data.adj_t``;
            ``"sparse_tensor"`` a ``torch_sparse.SparseTensor``; ``"fused"`` a
            :class:`gas.nn.Adjacency`, for the layers of :mod:`gas.nn`; ``"edge_index"`` sets
            ``data.edge_index``. (default: ``"fused"`` for a graph of :func:`gas.cluster`, ``"csr"``
            where ``ptr`` is given, ``"sparse_tensor"`` for a graph that has one)
        edge_weight: Make ``data.edge_weight`` the values of ``adj_t``. (default: ``True``)
        cache: Keep batches, features included, for the next epoch. A batch may be modified in
            place; those that share memory with what is kept are cut anew. Only fixed batches can be
            kept: those of one part, or in a fixed order. (default: keep ids and edges of fixed
            batches, up to 1 GiB, and no features)
        check: Refuse NaN and infinite values in ``x`` and ``edge_attr``. (default: unless
            :func:`gas.cluster` has cut the graph, which does, or it is mapped from a graph folder)
        epoch_transform: An augmentation of ``data``, which runs on the whole graph at the start of
            every epoch; layer-wise inference leaves it alone. Batches then have ``data.views``: two
            of PyG's ``Data`` with ``x``, the adjacency and attributes of edges, for its previous
            and its current state; see :class:`gas.augment.Views`. An epoch keeps the states of its
            start. (default: none)
        graph_transform: Normalises the whole graph, such as ``T.GCNNorm()``: what is loaded is
            ``graph_transform(data)``, and views have weights by their own degrees.
            (default: nothing)
        like: Another loader of the same graph, whose copy of edges and weights is shared.
            (default: a copy of its own)
        leave_cores: In a loop over the loader, leave cores to other processes that keep them busy,
            with fewer of PyTorch's threads; see :func:`gas.training.share_cores`. Sums of PyTorch's
            own may be rounded otherwise then, unless it has one thread from the start.
            (default: ``True``)
        **kwargs: Further arguments of ``torch.utils.data.DataLoader``, such as ``shuffle``, or
            ``sampler``: a :class:`gas.loader.PartSampler`; ``DistributedSampler(range(num_parts))``
            gives each process some of the parts, which a graph with ``shards`` does by itself.

    Raises:
        ValueError: If the graph, ``ptr`` or an option is unusable, naming the argument; when an
            epoch begins, if the graph has an attribute that workers can't send.
    """

    _of_typed: ClassVar[type[SubgraphLoader]]  # Set by gas.loader.hetero, which builds on this.

    def __new__(cls, data: Any = None, *args: Any, **kwargs: Any) -> SubgraphLoader:
        """Make a :class:`gas.loader.HeteroLoader` of a heterogeneous graph."""
        is_typed = cls is SubgraphLoader and isinstance(data, HeteroData)
        return super().__new__(cls._of_typed if is_typed else cls)

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
        epoch_transform: Augmentation | None = None,
        graph_transform: Callable[[Data], Data] | None = None,
        like: SubgraphLoader | None = None,
        leave_cores: bool = True,
        **kwargs: Any,
    ) -> None:
        given = open_if_path(data)
        check_is_graph(given)
        asked, has_ptr = batch_size, ptr is not None
        batch_size = choose_batch_size(given, asked, has_ptr, kwargs)
        data = given
        again = _made_of(kwargs)
        if again is not None:
            like, layout, edge_weight, cache = again, again.layout, again.edge_weight, again.cache
            leave_cores = again.leave_cores
        if layout is None:
            layout = default_layout(data.get("adj_t"), is_clustered=ptr is None)
        is_transformed = epoch_transform is not None or graph_transform is not None
        if is_transformed and shard_in(data) is not None:
            name = "graph_transform" if epoch_transform is None else "epoch_transform"
            raise ValueError(
                f"'{name}' is given with the graph of one process, a shard, which lacks the edges "
                "of other nodes: pass the whole graph, which every process cuts for itself; or "
                "normalise before it is cut, gas.cluster(data, num_parts, shards, model=model)"
            )
        if not is_transformed:  # Whole graphs are.
            data = local_graph(data)
        if like is not None:
            _check_like(like, data, edge_weight, is_transformed)
        self._first = data
        data = with_csr_features(data)
        self._views: Views | EpochViews | None = None  # An epoch has the latter.
        if epoch_transform is not None:
            if kwargs.get("persistent_workers"):
                raise ValueError(
                    "'persistent_workers' is True, but workers that stay don't see the next "
                    "epoch's views: leave it out, or 'epoch_transform'"
                )
            self._views = views = Views(epoch_transform, data, graph_transform)
            data = views.graph
        elif again is not None:  # Whose graph has been transformed.
            self._views = again._views
        elif graph_transform is not None:
            data = graph_transform(copy.copy(data))
        if is_transformed:
            data = local_graph(data)
        ptr = parts_in(data, ptr)
        self.shard: Shard | None = shard_in(data)
        """Which nodes and edges of the whole graph those are that it loads, if not all."""
        self._layout = find_layout(layout)
        with share_cores(leave_cores):  # A first loop knows then which cores are free.
            relabel = like._relabel if like is not None else _relabeler(data, edge_weight)
        num_nodes = relabel.num_nodes
        check_ptr(ptr, num_nodes if self.shard is None else self.shard.num_own)
        if self.shard is not None:
            _check_undivided(kwargs)
        if check or (check is None and like is None and PARTS not in data):
            check_entering(data, with_mapped=bool(check))

        if log:
            print(f"Loading {len(ptr) - 1} parts, {batch_size} per batch", file=sys.stderr)
        self.data = data
        self.ptr = ptr
        self.bipartite = bipartite
        self.log = log
        self.layout: str = layout
        self.edge_weight: bool = edge_weight
        self.cache: bool | None = cache
        self.leave_cores: bool = leave_cores
        self.num_nodes: int = num_nodes
        self._relabel: Relabeler = relabel
        self._rowptr = self._relabel.rowptr
        self._weighted = self._relabel.weight is not None
        self._weight_key = "edge_weight" if self._weighted and data.get("adj_t") is None else None
        self._bounds: list[int] = ptr.tolist()
        self._copied = {"edge_index", "adj_t", *(["edge_weight"] if edge_weight else [])}
        self._look()

        super().__init__(
            range(len(ptr) - 1),  # type: ignore[arg-type]
            batch_size=batch_size,
            collate_fn=self._collate,
            **kwargs,
        )
        self._order = ResumableBatchSampler(cast(Any, self.batch_sampler), ptr)
        self._fingerprint: int | None = None
        in_order = isinstance(self.sampler, torch.utils.data.SequentialSampler)
        fixed = kwargs.get("batch_sampler") is None and (batch_size == 1 or in_order)
        self._cache_features = bool(cache)
        self._kept = BatchCache(_cache_limit(cache, fixed))
        remember_batch_size(given, asked, has_ptr)

    def cut(self, parts: Sequence[int]) -> SubData:
        """Return the mini-batch of some parts, in increasing order.

        Raises:
            ValueError: If a part doesn't exist, or is named twice.
        """
        num_parts = self.ptr.numel() - 1
        key = tuple(sorted(parts))
        if not key or key[0] < 0 or key[-1] >= num_parts or len(set(key)) < len(key):
            raise ValueError(
                f"'parts' is {list(parts)}, expected different parts between 0 and {num_parts - 1}"
            )
        self._follow()
        batch = self._cut(key)
        self._add_rows(batch)
        self._add_others(batch)
        return self._signed(batch)

    def around(self, nodes: Tensor) -> SubData:
        """Make the mini-batch of given nodes of any parts; its halo is their neighbours.

        ``model(loader.around(nodes))`` computes these nodes alone, with rows of histories for their
        neighbours, in a time that doesn't depend on the size of the graph; and writes theirs.

        Args:
            nodes: Their rows in ``loader.data``, of shape ``[B]``, each listed once.

        Raises:
            IndexError: If a node doesn't exist.
            ValueError: If there is none, or one is listed twice.
        """
        check_range("nodes", nodes, self.num_own)
        if nodes.numel() == 0:
            raise ValueError("'nodes' is empty, expected at least one node")
        self._follow()
        return self._around(nodes)

    def _around(self, nodes: Tensor) -> SubData:
        data, n_id = self._cut_nodes(nodes, self.bipartite)
        starts = torch.ones(nodes.numel(), dtype=torch.bool)
        starts[1:] = nodes.diff() != 1
        first = starts.nonzero().view(-1)
        count = torch.diff(first, append=first.new_tensor([nodes.numel()]))
        batch = SubData(data, nodes.numel(), n_id, nodes[first], count)
        self._add_rows(batch)
        self._add_others(batch)
        return self._signed(batch)

    def neighbourhood(self, nodes: Tensor, num_hops: int, most: int | None = None) -> Data:
        """Make the subgraph around given nodes that a full batch of them reads.

        Args:
            nodes: The nodes, of shape ``[B]``, each listed once.
            num_hops: How far edges are followed back, at least 1.
            most: How many nodes and edges it may have together. (default: any number)

        Returns:
            ``nodes`` and all from which a path of at most ``num_hops`` edges leads to them, in the
            order of its length, with every edge of those paths; edges into the farthest nodes are
            left out. ``n_id`` holds the nodes' ids in the graph.

        Raises:
            ValueError: If a node is named twice, or there is no hop, or the graph is a shard.
            IndexError: If a node doesn't exist.
            MemoryError: If there are more nodes and edges than ``most``, before features are read.
        """
        check_integer("num_hops", num_hops, 1)
        if self.shard is not None:
            raise ValueError(
                "'loader' has a shard of a graph, whose replicas of nodes have no edges into them: "
                "make a loader of the whole graph, in a process of its own"
            )
        check_range("nodes", nodes, self.num_nodes)
        self._follow()
        for _ in range(num_hops - 1):
            nodes = self._relabel(nodes).n_id
        none = torch.empty(0, dtype=torch.long)
        data, n_id = self._cut_nodes(nodes, bipartite=False)
        size = n_id.numel() + data.e_id.numel()
        if most is not None and size > most:
            raise MemoryError(
                f"there are {size} nodes and edges within {num_hops} hops, expected at most {most}"
            )
        batch = SubData(data, n_id.numel(), n_id, none, none)
        self._add_rows(batch)
        self._add_others(batch)
        read_lazy_rows(data)
        data.n_id = n_id
        return data

    @property
    def num_own(self) -> int:
        """Number of nodes in the loader's parts, which come first; all nodes but for a shard."""
        return self._bounds[-1]

    @property
    def degree(self) -> Tensor:
        """The number of edges into each node, of shape ``[num_nodes]``."""
        return self._rowptr.diff()

    def edges_per_part(self) -> Tensor:
        """Return the number of edges into the nodes of each part, of shape ``[num_parts]``."""
        return self._rowptr[self.ptr].diff()

    @property
    def _index_sampler(self) -> ResumableBatchSampler:
        """Sampler that PyTorch draws batches from; others replace ``batch_sampler``."""
        return self._order

    def __iter__(self) -> Iterator[SubData]:  # type: ignore[override]
        self._follow()
        self._check_learnt()
        self._check_sendable()
        order = self._order
        resumes = order.resumes
        before = (None, 0) if resumes else (order.epoch, order.done)
        epoch = self._epoch(resumes)
        generator = cast("torch.Generator | None", self.generator)
        drawn = None if generator is None else generator.get_state()
        # The rest of an epoch draws no random numbers: the whole has drawn them.
        with torch.random.fork_rng(devices=[], enabled=resumes):
            batches = DataLoader.__iter__(epoch)
        if resumes and generator is not None and drawn is not None:
            generator.set_state(drawn)
        mine = None
        try:
            with share_cores(self.leave_cores) as follow_cores:
                for batch in batches:
                    mine = order.epoch
                    order.done += 1
                    follow_cores()
                    yield self._signed(batch)
            mine = order.epoch
        finally:  # Whoever leaves the loop has ended the epoch, unless another has begun.
            if mine is order.epoch:
                order.end(before)

    def _epoch(self, resumes: bool) -> SubgraphLoader:
        """Return the iterator over the mini-batches of a new or resumed epoch."""
        if isinstance(self._views, Views):
            return self._with(self._views.run(again=resumes))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the partition, the state of the epoch, the augmentation.

        Within a loop over the loader, the batches that it has handed out are done.
        """
        order, chain = self._order, self._augmentation
        # Without a key where it has none, as checkpoints were before there were such samplers.
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
        if self._augmentation is not None:
            self._augmentation.check_state(state["augmentation"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next epoch is the rest of the one that had begun, if one had.

        Raises:
            ValueError: If it is that of another graph or partition; nothing has changed then.
        """
        self.check_state(state)
        if self._augmentation is not None:
            self._augmentation.load_state_dict(state["augmentation"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        self._order.restore(state["order"], state.get("sampler"))

    def epoch_state(self) -> dict[str, Any]:
        """Return the progress of the epoch: its batches, and the number handed out."""
        return self._order.state()

    def forget_epoch(self) -> None:
        """Return the next epoch is a whole one, even after :meth:`load_state_dict`."""
        self._order.end()

    @property
    def _augmentation(self) -> Augmentation | None:
        return self._views.augmentation if isinstance(self._views, Views) else None

    def _graph_fingerprint(self) -> int:
        """Tell graphs, and orders of their nodes, from each other."""
        if self._fingerprint is None:
            crc = 0
            for ids in (self._rowptr, self._relabel.col):
                for block in ids.split(1 << 20):
                    crc = zlib.crc32(block.long().numpy().data, crc)
            self._fingerprint = crc
        return self._fingerprint

    def without_views(self) -> SubgraphLoader:
        """Return the same batches without views: the augmentation isn't run for them."""
        if self._views is None and self.persistent_workers:
            return self  # Which has them.
        other = self._with(None)
        # An epoch that is under way, or is to go on, is no business of theirs.
        other._order = ResumableBatchSampler(self._order.batches, self.ptr)
        return other

    def _with(self, views: EpochViews | None) -> SubgraphLoader:
        """Return the same loader with other views, which keeps the same batches."""
        other = copy.copy(self)
        other._views = views
        other.collate_fn = other._collate
        return other

    def kept_batches(self) -> list[SubData]:
        """Return the batches that are kept for the next epoch, themselves: not to be changed."""
        return self._kept.batches()

    def halos(self) -> Iterator[Tensor]:
        """Return the halo of every part, in order, each of shape ``[h]``, int64."""
        for begin, end in itertools.pairwise(self._bounds):
            yield self._relabel(torch.arange(begin, end)).n_id[end - begin :]

    def mapped_features(self) -> Encoded | None:
        """Return the features of nodes, if they are read from a file."""
        self._follow()
        return mapped_rows(self.data.get("x"))

    def use_features(self, x: Tensor) -> None:
        """Read the features of nodes from another tensor of the same values.

        ``data`` is then a graph of its own: assign to ``loader.data`` what is to be seen.
        """
        self._follow()
        if x is not self.data.x:
            self.data = copy.copy(self.data)
            self.data.x = x
            self._look()

    def forget_edges(self) -> None:
        """Let go of the graph's edges and weights, of which the loader has a copy of its own.

        ``data`` is then a graph without them, and batches have weights in ``adj_t`` alone. They
        stay where another attribute has a row per edge. What is assigned to the graph that the
        loader was given isn't seen any more: assign it to ``loader.data``.
        """
        self._follow()
        self.data = self._first = without_edges(self.data)
        self._look()
        self._kept.clear()

    def _look(self) -> None:
        """Note which tensors the graph has."""
        ours = {PARTS, SHARDS, BATCH_SIZE} | ({SHARD} if shard_in(self.data) is not None else set())
        keys = [key for key in self.data.keys() if key not in ours]  # noqa: SIM118  # A graph iterates pairs.
        self._node_keys, self._edge_keys = keys_by_row(self.data, keys)
        rows = {*self._node_keys, *self._edge_keys, *ADJACENCY_KEYS}
        self._other_keys = [key for key in keys if key not in rows]
        self._versions = GraphVersions(self.data)
        self._learnt = [key for key in keys if key in rows and _learns(self.data[key])]

    def _follow(self) -> None:
        """Take up what was changed in the graph since; its edges were copied.

        Raises:
            ValueError: If edges were changed, or workers can't follow.
        """
        changed = self._versions.changed(self.data)
        if not changed:
            return
        if changed & self._copied:
            raise ValueError(
                f"'{min(changed & self._copied)}' of the graph was changed after the loader was "
                "made, which has its own copy of edges and weights: make a new loader"
            )
        if self.persistent_workers:
            raise ValueError(
                f"'{min(changed)}' of the graph was changed, but 'persistent_workers' is True, and "
                "workers that stay don't see it: make a new loader, or leave that option out"
            )
        check_nodes(self.data, self.num_nodes)
        self.data = with_csr_features(self.data)
        edge_keys = set(self._edge_keys)
        self._look()
        if self._cache_features or changed & edge_keys.union(self._edge_keys):
            self._kept.clear()

    def _check_learnt(self) -> None:
        """Refuse what is to learn, and would not.

        Raises:
            ValueError: Naming the attribute.
        """
        if not self._learnt or not torch.is_grad_enabled():
            return
        weight = self._weight_key or "adj_t"
        if self._weighted and weight in self._learnt:
            raise ValueError(
                f"{weight!r} requires a gradient, but the loader has a copy of the weights: "
                "detach() it, or compute weights in forward, of 'edge_attr'"
            )
        if self.num_workers:
            raise ValueError(
                f"{self._learnt[0]!r} requires a gradient, which workers can't send with their "
                "batches: leave 'num_workers' out, or detach() it"
            )

    def _check_sendable(self) -> None:
        """Refuse what workers can't send: PyTorch would print why, and wait for ever.

        Raises:
            ValueError: Naming the attribute.
        """
        if not self.num_workers:
            return
        others = {key: self.data[key] for key in self._other_keys}
        for name, value in {"data": empty_graph(self.data), **others}.items():
            if isinstance(value, Tensor):
                continue
            try:
                pickle.dumps(value)
            except Exception as error:  # Whatever an object's own pickling leads to.
                raise ValueError(
                    f"'{name}' is a {type(value).__name__}, which workers can't send with their "
                    f"batches ({error}): take it out of the graph, or leave 'num_workers' out"
                ) from error

    def _signed(self, batch: SubData) -> SubData:
        """Note the graph's size beside the ids; on their way from a worker they would lose it."""
        setattr(batch.n_id, GRAPH_SIZE, self.num_nodes)
        if self.shard is not None:
            setattr(batch.n_id, SHARD, self.shard)
            chain = self._augmentation
            setattr(batch.n_id, RNG_FINGERPRINT, 0 if chain is None else chain.rng_fingerprint())
        return batch

    def _collate(self, parts: list[int]) -> SubData:
        # Tensors made in inference mode would be of no use to a later epoch of training.
        with torch.inference_mode(False), torch.no_grad():
            key = tuple(sorted(parts))
            batch = self._kept.take(key)
            keeps_rows = self._cache_features and not self._learnt
            if batch is None:
                batch = self._cut(key)
                if keeps_rows:
                    self._add_rows(batch)
                    read_lazy_rows(batch.data)
                batch = self._kept.keep(key, batch, self._node_keys)
            if not keeps_rows:
                self._add_rows(batch)
            self._add_others(batch)
        return batch

    def _cut(self, parts: tuple[int, ...]) -> SubData:
        """Cut the edges of some parts out of the graph; features come later."""
        ranges = [(self._bounds[part], self._bounds[part + 1]) for part in parts]
        nodes = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        data, n_id = self._cut_nodes(nodes, self.bipartite)
        offset = torch.tensor([begin for begin, _ in ranges])
        count = torch.tensor([end - begin for begin, end in ranges])
        return SubData(data, nodes.numel(), n_id, offset, count)

    def _cut_nodes(self, nodes: Tensor, bipartite: bool) -> tuple[Data, Tensor]:
        """Return the edges into some nodes, and the ids of these, then of the halo."""
        dtype = torch.int32 if self.layout == "fused" else torch.int64
        rowptr, col, e_id, n_id, weight = self._relabel(nodes, dtype)

        data = empty_graph(self.data)
        if weight is not None and self._weight_key in self._edge_keys:
            # Cut already, with the edges.
            data[self._weight_key] = weight.view(-1, *self.data[self._weight_key].shape[1:])
        data.e_id = e_id
        data.num_nodes = n_id.numel()
        self._set_adjacency(data, rowptr, col, weight, n_id.numel(), bipartite)
        return data, n_id

    def _add_rows(self, batch: SubData) -> None:
        """Add what nodes and edges have; features are read by who asks for them."""
        for keys, index, per_node in (
            (self._node_keys, batch.n_id, True),
            (self._edge_keys, batch.data.e_id, False),
        ):
            for key in keys:
                if key == self._weight_key:  # Cut already, with the edges.
                    continue
                table = self.data[key]
                later = key in FEATURES or table.requires_grad  # Not here, without gradient.
                if later and not table.is_inference():  # Whose changes are counted.
                    set_lazy(batch.data, key, LazyRows(key, table, index, per_node))
                else:
                    batch.data[key] = rows_of(table, index)

    def _add_others(self, batch: SubData) -> None:
        """Add what isn't by row, and the views of the epoch."""
        for key in self._other_keys:
            value = self.data[key]
            batch.data[key] = clone_unless_learnable(value) if isinstance(value, Tensor) else value
        if self._views is not None:
            n_id, e_id, shard = batch.n_id, batch.data.e_id, self.shard
            if shard is not None:  # The views are those of the whole graph.
                n_id, e_id = shard.nodes[n_id], shard.edges[e_id]
            batch.data.views = self._views.cut(batch.data, n_id, self._weighted, e_id)

    def _set_adjacency(
        self,
        data: Data,
        rowptr: Tensor,
        col: Tensor,
        value: Tensor | None,
        num_cols: int,
        bipartite: bool,
    ) -> None:
        if self.layout == "edge_index":
            data.edge_index = self._layout.make(rowptr, col, None, num_cols)
            if value is not None and "edge_weight" not in data:
                data.edge_weight = value
            return
        if not bipartite:
            halo_rows = num_cols - rowptr.numel() + 1
            rowptr = torch.nn.functional.pad(rowptr, (0, halo_rows), value=col.numel())
        if value is None and self.layout == "csr":  # It has values always.
            x = self.data.get("x")
            dtype = x.dtype if x is not None and x.is_floating_point() else None
            value = torch.ones(col.numel(), dtype=dtype)
        data.adj_t = self._layout.make(rowptr, col, value, num_cols)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}(num_parts={len(self.ptr) - 1}, "
            f"batch_size={self.batch_size}, layout={self.layout!r})"
        )


def parts_in(data: Data, ptr: Tensor | None) -> Tensor:
    """Return the parts that a loader was given, or those of its graph."""
    if ptr is not None:
        return ptr
    parts = data.get(PARTS)
    if parts is None:
        raise ValueError(
            "'ptr' is missing, and the graph has no 'parts': cut it, "
            "data = gas.cluster(data, num_parts), or pass the ptr of gas.metis"
        )
    return parts


def shard_in(data: Data) -> Shard | None:
    """Return the shard that a graph is, if it isn't a whole one."""
    shard = data.get(SHARD)
    return shard if isinstance(shard, Shard) else None


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _made_of(options: dict[str, Any]) -> SubgraphLoader | None:
    """Return the loader that is being re-created with another sampler, as by Lightning.

    What makes it knows attributes of the ``DataLoader``, and the arguments that its constructor
    names, as far as they are attributes, too. It can't give all, but the loader itself.
    """
    loader = getattr(options.get("collate_fn"), "__self__", None)
    if not isinstance(loader, SubgraphLoader):
        return None
    for name in ("dataset", "collate_fn"):
        options.pop(name, None)
    return loader


def _relabeler(data: Data, edge_weight: bool) -> Relabeler:
    (rowptr, col, e_id), weight = read_csr(data, edge_weight)
    return Relabeler(rowptr, col, e_id, weight)


def _check_like(like: SubgraphLoader, data: Data, edge_weight: bool, is_transformed: bool) -> None:
    is_same = data is like.data or data is like._first
    if is_transformed or not is_same or like.edge_weight != edge_weight:
        raise ValueError(
            "'like' is a loader of another graph, or with another 'edge_weight', or the graph is "
            "transformed: pass a loader of the same 'data', or leave 'like' out"
        )
    like._follow()


def _check_undivided(options: Mapping[str, Any]) -> None:
    """Refuse to share out the parts of one process among all of them once more."""
    samplers = options.get("sampler"), getattr(options.get("batch_sampler"), "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            "'sampler' is a DistributedSampler, but the graph has 'shards', and each process has "
            "the parts of its own already: use shuffle=True instead, and "
            "Trainer(use_distributed_sampler=False) with Lightning; or take the shards away, "
            "del data.shards"
        )


def _cache_limit(cache: bool | None, fixed: bool) -> int:
    """Return the bytes of batches that are kept, or -1 for none; only ``fixed`` ones come again."""
    if cache and not fixed:
        raise ValueError(
            "'cache' is True, but shuffling makes new batches every epoch: use batch_size=1, "
            "with larger parts, or leave 'cache' out"
        )
    if cache is False or not fixed:
        return -1
    return CACHE_BYTES if cache is None else sys.maxsize
