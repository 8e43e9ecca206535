"""Loader of mini-batches in order, each one range of nodes, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph import check_ptr, default_layout, local_graph, open_if_path, with_csr_features
from gas.loader.batch_sampler import choose_batch_size
from gas.loader.cutter import get_parts, get_shard
from gas.loader.subgraph import SubgraphLoader
from gas.native import check_flags, share_cores


class EvalSubgraphLoader(SubgraphLoader):
    """Loads the mini-batches of a partitioned graph in order, for evaluation.

    Consecutive parts are joined, so every batch is one range of nodes; the batches are fixed.

    Args:
        data: The graph, from :func:`gas.cluster` or :func:`gas.permute`, or the path of a graph
            folder.
        ptr: See :class:`SubgraphLoader`.
        batch_size: Parts per mini-batch. (default: that of the last :class:`SubgraphLoader` of
            ``data`` which was given one, or ``1``)
        bipartite: See :class:`SubgraphLoader`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        **kwargs: Further arguments of :class:`SubgraphLoader`, ``shuffle`` and
            ``drop_last`` excepted.

    Raises:
        ValueError: If ``shuffle`` or ``drop_last`` is true, or as :class:`SubgraphLoader` does.
    """

    @check_flags
    def __init__(
        self,
        data: Data | str | Path,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        bipartite: bool = True,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("shuffle", False):
            raise ValueError("'shuffle' is True, but evaluation has a fixed order: leave it out")
        if kwargs.get("drop_last"):
            raise ValueError("'drop_last' is True, but evaluation is of every node: leave it out")
        data = open_if_path(data)
        if isinstance(data, HeteroData):
            raise ValueError(
                "'data' is a HeteroData: pass gas.SubgraphLoader(graph), or the graph itself, to "
                "model.predict"
            )
        batch_size = choose_batch_size(data, batch_size, ptr is not None, kwargs)
        if kwargs.get("layout") is None:
            kwargs["layout"] = default_layout(data.get("adj_t"), is_clustered=ptr is None)
        mine = local_graph(data)
        ptr, shard = get_parts(mine, ptr), get_shard(mine)
        num_nodes = with_csr_features(mine).num_nodes if shard is None else shard.num_own
        check_ptr(ptr, num_nodes)
        ptr = torch.unique_consecutive(torch.cat([ptr[::batch_size], ptr[-1:]]))
        super().__init__(data, ptr, 1, bipartite, log, **kwargs)


def batches_in_order(loader: SubgraphLoader) -> Iterator[Any]:
    """Cut the mini-batches of a loader in the order of their nodes, without caching them."""
    num_parts = loader.ptr.numel() - 1
    size = loader.parts_per_batch
    with share_cores(loader.leave_cores) as follow_cores:
        for first in range(0, num_parts, size):
            batch = loader.cut(range(first, min(first + size, num_parts)))
            follow_cores()
            yield batch
