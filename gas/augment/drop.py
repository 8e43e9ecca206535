"""Independent draws: DropEdge and feature masks, baselines of MH-Aug."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.augment.base import Augmentation
from gas.augment.units import GraphState
from gas.native import check_probability, subset


class _IndependentDrop(Augmentation):
    """Base class of augmentations that drop each element independently."""

    def __init__(self, data: Data, p: float, **kwargs: Any) -> None:
        check_probability("p", p)
        super().__init__(data, **kwargs)
        self.p = p

    def _draw(self, size: int, most: int) -> Tensor:
        """Draw a mask of kept elements, of shape ``[size]``, that drops at most ``most``."""
        count = torch.tensor([float(size), self.p], dtype=torch.double)
        dropped = torch.binomial(count[:1], count[1:], generator=self.generator).clamp(max=most)
        device = self.units.device
        kept = (size - dropped[0]).to(device, non_blocking=True)
        return subset(size, kept, self._seeds(1)[0], device)

    @abstractmethod
    def _draw_state(self) -> GraphState:
        """Draw the masks of a step."""

    def _step(self) -> Tensor:
        self._current = self._draw_state()
        return torch.ones((), dtype=torch.bool)


class DropEdge(_IndependentDrop):
    """Drops each edge with probability ``p`` (Rong et al., *DropEdge*, ICLR 2020).

    Args:
        data: The graph, with ``edge_index``.
        p: The probability, in ``[0, 1]``. Self-loops stay. (default: ``0.5``)
        **kwargs: ``undirected``, ``num_steps`` and ``generator`` of
            :class:`gas.augment.Augmentation`.

    Raises:
        ValueError: If there is no edge to drop, or an argument is unusable.
    """

    def __init__(self, data: Data, p: float = 0.5, **kwargs: Any) -> None:
        super().__init__(data, p, **kwargs)
        self.units.check_size()

    def _draw_state(self) -> GraphState:
        size = self.units.size
        return GraphState(self.units, self._draw(size, size), self._current.node_mask)


class MaskFeatures(_IndependentDrop):
    """Masks the features of each node with probability ``p``; at least one node keeps its own.

    As *DropNode* does (Feng et al., *Graph Random Neural Networks for Semi-Supervised Learning on
    Graphs*, NeurIPS 2020), with features scaled by the fraction of nodes that are really kept.

    Args:
        data: The graph.
        p: The probability, in ``[0, 1)``. (default: ``0.5``)
        **kwargs: ``num_steps`` and ``generator`` of :class:`gas.augment.Augmentation`.

    Raises:
        ValueError: If an argument is unusable.
    """

    def __init__(self, data: Data, p: float = 0.5, **kwargs: Any) -> None:
        if p == 1.0:
            raise ValueError("'p' is 1.0, which drops every node: expected less")
        super().__init__(data, p, **kwargs)

    def _draw_state(self) -> GraphState:
        size = self.units.num_nodes
        return GraphState(self.units, self._current.edges, self._draw(size, size - 1))
