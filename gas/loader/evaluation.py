"""Mini-batches in order, each one range of nodes: for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph.features import with_csr_features
from gas.graph.folder import opened
from gas.graph.layout import default_layout
from gas.graph.report import check_ptr
from gas.graph.shards import local_graph
from gas.loader.subgraph import SubgraphLoader, check_batch_size, parts_in, shard_in


class EvalSubgraphLoader(SubgraphLoader):
    """Loads the mini-batches of a partitioned graph in order, for evaluation.

    Consecutive parts are joined, so every batch is one range of nodes; the batches are fixed.

    Args:
        data: The graph, from :func:`gas.cluster` or :func:`gas.permute`, or the path of a graph
            folder.
        ptr: See :class:`SubgraphLoader`.
        batch_size: Parts per mini-batch. (default: ``1``)
        bipartite: See :class:`SubgraphLoader`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        **kwargs: Further arguments of :class:`SubgraphLoader`, ``shuffle`` excepted.
    """

    def __init__(
        self,
        data: Data | str | Path,
        ptr: Tensor | None = None,
        batch_size: int = 1,
        bipartite: bool = True,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("shuffle", False):
            raise ValueError("'shuffle' is True, but evaluation has a fixed order: leave it out")
        check_batch_size(batch_size)
        data = opened(data)
        if isinstance(data, HeteroData):
            raise ValueError(
                "'data' is a HeteroData: pass gas.SubgraphLoader(graph), or the graph itself, to "
                "model.predict"
            )
        if kwargs.get("layout") is None:
            kwargs["layout"] = default_layout(data.get("adj_t"), is_clustered=ptr is None)
        mine = local_graph(data)
        ptr, shard = parts_in(mine, ptr), shard_in(mine)
        num_nodes = with_csr_features(mine).num_nodes if shard is None else shard.num_own
        check_ptr(ptr, num_nodes)
        ptr = torch.unique_consecutive(torch.cat([ptr[::batch_size], ptr[-1:]]))
        super().__init__(data, ptr, 1, bipartite, log, **kwargs)
