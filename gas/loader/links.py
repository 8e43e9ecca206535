"""Loader for link prediction: pairs of nodes, and mini-batches that compute both of their ends."""

from __future__ import annotations

import copy
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from gas.graph import LABELS, PAIRS, Edges, are_linked, open_if_path, read_pairs, to_csr
from gas.loader.batch import SubData
from gas.loader.subgraph import SubgraphLoader
from gas.native import check_flags

MAX_TRIES = 10  # How often a pair is drawn again that is an edge.
UNSUPPORTED = ("epoch_transform", "graph_transform", "persistent_workers", "cache")


class LinkLoader(SubgraphLoader):
    """Loads positive pairs of nodes, such as edges to predict, and negative pairs.

    The positive pairs are ``data.edge_label_index``, which :func:`gas.cluster` renumbers. They must
    not be edges of the graph; see :func:`gas.graph.remove_links`. A mini-batch is that of some
    parts, as of :class:`SubgraphLoader`, with every pair whose first node is in them. Nodes of
    other parts in these pairs become in-batch nodes, too, so that both ends of every pair are
    computed with the current weights, and get gradients. An epoch has every pair once; a batch may
    have none. Its attributes have PyG's names, and refer to rows of the model's output:

    * ``edge_label_index``, of shape ``[2, K]``, the positive pairs, then the negative ones, and
      ``edge_label``, of shape ``[K]``, which is 0 for the latter;
    * for triplets instead ``src_index``, ``dst_pos_index``, each of shape ``[K]``, and
      ``dst_neg_index``, of shape ``[K]``, or ``[K, amount]`` if there are several;
    * ``input_id``, of shape ``[K]``: the columns of ``data.edge_label_index`` in the batch.

    Args:
        data: The graph, from :func:`gas.cluster` or :func:`gas.permute`; see
            :class:`SubgraphLoader`. A new ``edge_label_index`` is used from the next epoch on.
        ptr: See :class:`SubgraphLoader`.
        batch_size: See :class:`SubgraphLoader`.
        bipartite: See :class:`SubgraphLoader`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        neg_sampling: ``"binary"`` draws pairs whose first node is in the batch's parts;
            ``"triplet"`` draws other second nodes for each positive pair;
            ``NegativeSampling(mode, amount)`` of PyG sets their number for each pair whose label
            isn't 0; ``None`` draws none. Negative pairs are neither edges nor given pairs, in
            either direction. (default: ``"binary"``)
        neg_pool: The nodes from which second nodes are drawn uniformly: ``"graph"``, all nodes, or
            ``"batch"``, those of the batch's parts, so that no further node has to be computed;
            after ten unsuccessful draws, all nodes. (default: ``"graph"``)
        **kwargs: Further arguments of :class:`SubgraphLoader`, such as ``shuffle``. Views, cached
            batches and persistent workers are not supported.

    Raises:
        ValueError: If the graph, its pairs or an option are unusable, naming the argument; or if
            some pairs are edges of the graph.
    """

    @check_flags
    def __init__(
        self,
        data: Data | str | Path,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        bipartite: bool = True,
        log: bool = True,
        *,
        neg_sampling: NegativeSampling | str | None = "binary",
        neg_pool: str = "graph",
        **kwargs: Any,
    ) -> None:
        data = open_if_path(data)
        if isinstance(data, HeteroData):
            raise ValueError(
                "'data' is a HeteroData, whose pairs of nodes aren't loaded by gas: make it "
                "homogeneous, data.to_homogeneous(), or use LinkNeighborLoader of PyG"
            )
        for name in UNSUPPORTED:
            if kwargs.get(name):
                raise ValueError(
                    f"'{name}' is {kwargs[name]!r}, which batches of pairs don't have: leave it out"
                )
        if neg_pool not in ("graph", "batch"):
            raise ValueError(f"'neg_pool' is {neg_pool!r}, expected 'graph' or 'batch'")
        self.neg_sampling = _parse_neg_sampling(neg_sampling)
        self.neg_pool = neg_pool
        generator = kwargs.get("generator")
        self._seed, self._round = int(torch.randint(2**62, (), generator=generator)), 0
        kwargs["cache"] = False  # Every epoch draws other pairs.
        super().__init__(data, ptr, batch_size, bipartite, log, **kwargs)

    def _classify_attributes(self) -> None:
        """Sort the attributes of the graph, and read its pairs."""
        pairs = read_pairs(self.data, self.num_nodes)  # Errors must not change any attribute.
        label = _labels(self.data, pairs, self.neg_sampling)
        _check_disjoint(self._rowptr, self._relabel.col, pairs)
        super()._classify_attributes()
        self._node_keys, self._edge_keys, self._other_keys = (
            [key for key in keys if key != LABELS]
            for keys in (self._node_keys, self._edge_keys, self._other_keys)
        )
        part = torch.searchsorted(self.ptr, pairs[0].contiguous(), right=True) - 1
        order = part.argsort(stable=True)
        self._pair_rows = {  # Further attributes of pairs, such as edge_label_time.
            key: rows[order] for key in self._other_keys if key.startswith(f"{LABELS}_")
            and isinstance(rows := self.data[key], Tensor) and rows.shape[:1] == order.shape
        }  # fmt: skip
        self._other_keys = [key for key in self._other_keys if key not in self._pair_rows]
        self._pairs, self._label, self._input_id = pairs[:, order], label[order], order
        self._is_link = (self._label.view(order.numel(), -1) != 0).any(1)  # Positive pairs.
        first = torch.searchsorted(part[order], torch.arange(self.ptr.numel()))
        self._pair_bounds: list[int] = first.tolist()
        csr = to_csr(Edges(pairs[0], pairs[1], None, self.num_nodes), small=True)
        self._label_edges = csr.rowptr, csr.col

    def _epoch(self, resumes: bool) -> LinkLoader:
        """Return a copy that draws the pairs of one epoch, also after another one has begun."""
        self._round += not resumes
        epoch = copy.copy(self)
        epoch.collate_fn = epoch._collate
        return epoch

    def plain_loader(self) -> SubgraphLoader:
        """Return a loader of the same parts in order, without pairs."""
        return SubgraphLoader(
            self.data,
            self.ptr,
            self.parts_per_batch,
            self.bipartite,
            log=False,
            layout=self.layout,
            edge_weight=self.edge_weight,
            cache=False,
            like=self,
            leave_cores=self.leave_cores,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the random numbers for pairs."""
        label = self._label.contiguous().numpy()
        pairs = zlib.crc32(label.tobytes(), zlib.crc32(self._pairs.contiguous().numpy().data))
        how = None if self.neg_sampling is None else self.neg_sampling.mode.value
        amount = 0 if self.neg_sampling is None else self.neg_sampling.amount
        drawn = {"pairs": pairs, "how": f"{how}, {amount}, {self.neg_pool}"}
        return {
            **super().state_dict(),
            "drawn": {**drawn, "seed": self._seed, "round": self._round},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another graph, partition or list of pairs.

        Raises:
            ValueError: Saying what differs.
        """
        super().check_state(state)
        mine, other = self.state_dict()["drawn"], state["drawn"]
        if other["pairs"] != mine["pairs"]:
            raise ValueError(
                "'loader' has other pairs of nodes, 'edge_label_index', or other labels than what "
                "was saved: split the edges as they were split then"
            )
        if other["how"] != mine["how"]:
            raise ValueError(
                f"'loader' draws other pairs ({mine['how']}) than what was saved "
                f"({other['how']}): choose 'neg_sampling' and 'neg_pool' as they were"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; see :meth:`SubgraphLoader.load_state_dict`."""
        super().load_state_dict(state)
        self._seed, self._round = state["drawn"]["seed"], state["drawn"]["round"]

    def _collate(self, parts: list[int]) -> SubData:
        """Return the mini-batch of some parts and of the pairs of their nodes."""
        key = sorted(parts)
        seed = hashlib.blake2b(repr((self._seed, self._round, key)).encode(), digest_size=8)
        generator = torch.Generator().manual_seed(int.from_bytes(seed.digest(), "little"))
        with torch.inference_mode(False), torch.no_grad():
            nodes = _ranges(self._bounds, key)
            which = _ranges(self._pair_bounds, key)
            pairs, linked = self._pairs[:, which], self._is_link[which]
            src, dst = self._draw(pairs[:, linked], nodes, generator)
            is_own = torch.zeros(len(self._bounds) - 1, dtype=torch.bool)
            is_own[key] = True
            ends = torch.cat([pairs.reshape(-1), src, dst]).unique()
            others = ends[~is_own[torch.searchsorted(self.ptr, ends, right=True) - 1]]
            nodes = torch.cat([nodes, others])
            batch = self._cut_nodes(nodes)
            rows, place = nodes.sort()
            given, src, dst = (
                place[torch.searchsorted(rows, ids.contiguous())] for ids in (pairs, src, dst)
            )
            _add_pairs(batch.data, given, self._label[which], src, dst, self.neg_sampling)
            batch.data.input_id = self._input_id[which]
            for key, rows in self._pair_rows.items():
                batch.data[key] = rows[which]
        return batch

    def _draw(
        self, pairs: Tensor, nodes: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw negative pairs: their first and their second nodes, each of shape ``[M]``."""
        sampling = self.neg_sampling
        if sampling is None or not pairs.numel():
            return nodes[:0], nodes[:0]

        def draw_nodes(size: int, among: Tensor | None) -> Tensor:
            limit = self.num_own if among is None else among.numel()
            index = torch.randint(limit, (size,), generator=generator)
            return index if among is None else among[index]

        pool = nodes if self.neg_pool == "batch" else None
        if sampling.is_triplet():
            src = pairs[0].repeat_interleave(int(sampling.amount))
        else:
            src = draw_nodes(math.ceil(pairs.size(1) * sampling.amount), nodes)
        dst = draw_nodes(src.numel(), pool)
        again = torch.arange(src.numel())
        for number in range(2 * MAX_TRIES):
            ends = torch.stack([src[again], dst[again]])
            again = again[self._are_known(ends)]
            if not again.numel():
                return src, dst
            # All pairs of nodes of a part may be edges.
            dst[again] = draw_nodes(again.numel(), pool if number < MAX_TRIES else None)
            if sampling.is_binary():
                src[again] = draw_nodes(again.numel(), nodes)
        if sampling.is_binary():
            left = torch.ones_like(src, dtype=torch.bool)
            left[again] = False
            return src[left], dst[left]
        for place in again.tolist():  # Nodes that are linked with nearly all others.
            dst[place] = self._draw_unlinked(src[place], generator)
        return src, dst

    def _are_known(self, pairs: Tensor) -> Tensor:
        """Return which pairs are edges, given pairs, or a node twice, of shape ``[M]``."""
        is_edge = are_linked(self._rowptr, self._relabel.col, pairs)
        return is_edge | are_linked(*self._label_edges, pairs) | (pairs[0] == pairs[1])

    def _draw_unlinked(self, node: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a node that isn't linked with the given one.

        Raises:
            ValueError: If there is none.
        """
        every = torch.arange(self.num_own)
        ends = torch.stack([node.expand_as(every), every])
        free = (~self._are_known(ends)).nonzero().view(-1)
        if not free.numel():
            raise ValueError(
                f"'neg_sampling' is 'triplet', but the node {int(node)} of the graph is joined "
                "with all others, so that no triplet has it: take its pairs out, or draw 'binary'"
            )
        return free[torch.randint(free.numel(), (), generator=generator)]


def _ranges(bounds: Sequence[int], parts: Sequence[int]) -> Tensor:
    """Return the concatenated ranges of some parts."""
    return torch.cat([torch.arange(bounds[part], bounds[part + 1]) for part in parts])


def _add_pairs(
    data: Data,
    given: Tensor,
    label: Tensor,
    src: Tensor,
    dst: Tensor,
    sampling: NegativeSampling | None,
) -> None:
    """Add pairs to a batch by PyG's names."""
    if sampling is not None and sampling.is_triplet():
        data.src_index, data.dst_pos_index = given
        several = sampling.amount > 1
        data.dst_neg_index = dst.view(-1, int(sampling.amount)) if several else dst
        return
    data[PAIRS] = torch.cat([given, torch.stack([src, dst])], dim=1)
    data[LABELS] = torch.cat([label, label.new_zeros(src.numel(), *label.shape[1:])])


def _parse_neg_sampling(sampling: NegativeSampling | str | None) -> NegativeSampling | None:
    """Convert the argument ``neg_sampling`` to PyG's class.

    Raises:
        ValueError: If it is invalid, or nodes have weights.
    """
    if isinstance(sampling, str) and sampling in ("binary", "triplet"):
        return NegativeSampling(sampling)
    if sampling is not None and not isinstance(sampling, NegativeSampling):
        raise ValueError(
            f"'neg_sampling' is {sampling!r}, expected 'binary', 'triplet', None, or a "
            "NegativeSampling of torch_geometric.sampler"
        )
    if sampling is not None and not (sampling.src_weight is None and sampling.dst_weight is None):
        raise ValueError(
            "'neg_sampling' has weights of nodes, but each is drawn as likely here: leave them out"
        )
    return sampling


def _labels(data: Data, pairs: Tensor, sampling: NegativeSampling | None) -> Tensor:
    """Return the labels of the given pairs.

    Raises:
        ValueError: If they don't fit the pairs or the sampling.
    """
    label = data.get(LABELS)
    if label is None:
        return torch.ones(pairs.size(1))
    if not isinstance(label, Tensor) or label.dim() == 0 or label.size(0) != pairs.size(1):
        what = list(label.shape) if isinstance(label, Tensor) else type(label).__name__
        raise ValueError(
            f"'{LABELS}' is {what}, expected one label for each of the {pairs.size(1)} pairs"
        )
    if sampling is not None and sampling.is_triplet() and bool((label == 0).any()):
        raise ValueError(
            f"'{LABELS}' has zeros, but the pairs of triplets are those that are linked: leave the "
            "others out, RandomLinkSplit(add_negative_train_samples=False)"
        )
    return label


def _check_disjoint(rowptr: Tensor, col: Tensor, pairs: Tensor) -> None:
    """Refuse pairs that are edges of the graph, along which messages would reveal the labels.

    Raises:
        ValueError: With their number.
    """
    shared = int((are_linked(rowptr, col, pairs) & (pairs[0] != pairs[1])).sum())
    if shared:
        raise ValueError(
            f"{shared} of {pairs.size(1)} pairs of '{PAIRS}', or their reverses, are edges of the "
            "graph, along which messages would tell the answer: take them out before gas.cluster, "
            "gas.graph.remove_links(data)"
        )
