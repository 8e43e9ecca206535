"""Masks for training, validation and test."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

NUM_SPLITS = 20  # Random splits of a graph that brings none, one per run ...
MOST_SPLIT_NODES = 100_000  # ... up to this size; larger graphs get one.


def index2mask(index: Tensor, size: int) -> Tensor:
    """A mask of shape ``[size]`` that is true at ``index``."""
    mask = torch.zeros(size, dtype=torch.bool, device=index.device)
    mask[index] = True
    return mask


def gen_masks(
    y: Tensor, train_per_class: int = 20, val_per_class: int = 30, num_splits: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws splits with a fixed number of training and validation nodes per class.

    Args:
        y: The class of each node, of shape ``[N]``.
        train_per_class: Training nodes of each class. (default: ``20``)
        val_per_class: Validation nodes of each class. (default: ``30``)
        num_splits: The number of splits. (default: ``20``)

    Returns:
        Masks for training, validation and test, each of shape ``[N, num_splits]``.
    """
    train_mask = torch.zeros(y.size(0), num_splits, dtype=torch.bool)
    val_mask = torch.zeros(y.size(0), num_splits, dtype=torch.bool)
    for c in range(int(y.max()) + 1):
        nodes = (y == c).nonzero().view(-1)
        order = torch.stack([torch.randperm(nodes.numel()) for _ in range(num_splits)], dim=1)
        nodes = nodes[order]
        train_mask.scatter_(0, nodes[:train_per_class], True)
        val_mask.scatter_(0, nodes[train_per_class : train_per_class + val_per_class], True)
    return train_mask, val_mask, ~(train_mask | val_mask)


def with_masks(data: Data) -> Data:
    """Adds random splits, 50 % training, 25 % validation, 25 % test, where there are none."""
    if "train_mask" in data:
        for key in ("val_mask", "test_mask"):
            if key not in data:
                raise ValueError(f"the graph has a 'train_mask' but no {key!r}: add it")
        _check_labelled(data)
        return data
    num_nodes = data.num_nodes
    num_splits = NUM_SPLITS if num_nodes <= MOST_SPLIT_NODES else 1
    generator = torch.Generator().manual_seed(0)
    group = torch.full((num_nodes, num_splits), 2, dtype=torch.int8)
    for split in range(num_splits):
        order = torch.randperm(num_nodes, generator=generator)
        group[order[: num_nodes // 2], split] = 0
        group[order[num_nodes // 2 : num_nodes * 3 // 4], split] = 1
    if data.y.dim() == 1 and not data.y.is_floating_point():
        group[data.y < 0] = 3  # Of unknown class: in no mask.
    group = group.squeeze(1)
    data.train_mask, data.val_mask, data.test_mask = (group == part for part in range(3))
    return data


def _check_labelled(data: Data) -> None:
    if data.y.dim() > 1 or data.y.is_floating_point() or not bool((data.y < 0).any()):
        return
    for key in ("train_mask", "val_mask", "test_mask"):
        mask = data[key] if data[key].dim() == 1 else data[key].any(dim=1)
        if bool((mask & (data.y < 0)).any()):
            raise ValueError(
                f"'{key}' holds nodes whose class is unknown (negative): leave them out of it"
            )
