"""Transforms of the whole graph that a loader applies before it cuts mini-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch_geometric.data import Data

from gas.graph import local_graph, with_csr_features
from gas.loader.cutter import get_shard


class EpochTransform(Protocol):
    """Transforms the whole graph once an epoch, as :class:`gas.augment.Augmentation` does."""

    def views(self, data: Data, transform: Callable[[Data], Data] | None) -> Any:
        """Return a :class:`gas.augment.Views`, which cuts views of mini-batches."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse the state of another graph or class."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""

    def rng_fingerprint(self) -> int:
        """Return a fingerprint of the random state."""


def transform_graph(
    data: Data,
    epoch_transform: EpochTransform | None,
    graph_transform: Callable[[Data], Data] | None,
) -> tuple[Data, Any]:
    """Return the transformed graph of this process, and its :class:`gas.augment.Views`, if any.

    Raises:
        ValueError: If the graph is a shard, or the epoch transform makes no views.
    """
    if epoch_transform is None and graph_transform is None:
        return with_csr_features(local_graph(data)), None
    if get_shard(data) is not None:
        name = "graph_transform" if epoch_transform is None else "epoch_transform"
        raise ValueError(
            f"'{name}' is given with the graph of one process, a shard, which lacks the edges "
            "of other nodes: pass the whole graph, which every process cuts for itself; or "
            "normalise before it is cut, gas.cluster(data, num_parts, shards, model=model)"
        )
    data = with_csr_features(data)
    if epoch_transform is None:
        assert graph_transform is not None
        return local_graph(graph_transform(copy.copy(data))), None
    is_class = isinstance(epoch_transform, type)
    if is_class or not hasattr(epoch_transform, "views"):
        given: Any = epoch_transform if is_class else type(epoch_transform)
        kind = f"{'the class' if is_class else 'a'} {given.__name__}"
        raise ValueError(
            f"'epoch_transform' is {kind}, expected an augmentation of gas.augment, built on the "
            "graph, such as gas.MHAug(data, ...)"
        )
    views = epoch_transform.views(data, graph_transform)
    return local_graph(views.graph), views
