"""Masks for training, validation and test."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from gas.datasets.roles import PART_OF
from gas.graph import MASKS, check_ids, is_node_list, known_target_mask

NUM_SPLITS = 20  # The number of random splits of a graph without one, up to
MOST_SPLIT_NODES = 100_000  # so many nodes; larger graphs get one.


def index2mask(index: Tensor, size: int) -> Tensor:
    """Return a mask of shape ``[size]`` that is true at ``index``."""
    return index_to_mask(index, size)


def gen_masks(
    y: Tensor, train_per_class: int = 20, val_per_class: int = 30, num_splits: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw splits with a fixed number of training and validation nodes per class.

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


def with_masks(data: Data, num_splits: int | None = None) -> Data:
    """Set the masks for training, validation and test of a graph.

    Existing masks are kept, and lists of nodes (``train_idx``, ...) converted. Without either, the
    labelled nodes are split at random with a fixed seed: 50 % training, 25 % validation, 25 % test;
    ``data.split`` describes it.

    Args:
        data: The graph, which is modified.
        num_splits: The number of random splits. (default: 20 up to 100,000 nodes, else 1)
    """
    for key, value in list(data):
        part = PART_OF.get(key.split("_")[0])
        if part is not None and is_node_list(key, value) and f"{part}_mask" not in data:
            check_ids(value, data.num_nodes, key)
            data[f"{part}_mask"] = index2mask(value.long(), data.num_nodes)
    given = [key for key in MASKS if key in data]
    if given:
        for key in MASKS:
            if key not in data:
                raise ValueError(
                    f"the graph has a {given[0]!r} but no {key!r}: add it; a split that is given "
                    "isn't replaced"
                )
        check_parts(data)
        _check_disjoint(data)
        _check_labelled(data)
        return data
    known = known_target_mask(data.y).view(data.num_nodes, -1).all(dim=1)
    labelled = torch.arange(data.num_nodes)[known.cpu()]  # Other nodes are in no mask.
    if num_splits is None:
        num_splits = NUM_SPLITS if data.num_nodes <= MOST_SPLIT_NODES else 1
    size = labelled.numel()
    generator = torch.Generator().manual_seed(0)
    group = torch.full((data.num_nodes, num_splits), 3, dtype=torch.int8)
    for split in range(num_splits):
        order = labelled[torch.randperm(size, generator=generator)]
        group[order, split] = 2
        group[order[: size // 2], split] = 0
        group[order[size // 2 : size * 3 // 4], split] = 1
    if num_splits == 1:
        group = group.squeeze(1)
    for number, key in enumerate(MASKS):
        data[key] = group == number
    data.split = (
        f"made up, {num_splits} at random from seed 0: 50 % training, 25 % validation, 25 % test"
    )
    return data


def select_split(data: Data, split: int) -> None:
    """Keep the masks of one split, of shape ``[N]``."""
    several = [key for key in MASKS if key in data and data[key].dim() > 1]
    num_splits = max((data[key].size(1) for key in several), default=1)
    is_number = isinstance(split, int | np.integer) and not isinstance(split, bool)
    if not is_number or not 0 <= split < num_splits:
        raise ValueError(
            f"'split' is {split!r}, but the graph has {num_splits}: expected one of "
            f"0 to {num_splits - 1}, or 'all'"
        )
    for key in several:
        data[key] = data[key][:, split if data[key].size(1) > 1 else 0]
    if several and "split" in data:
        data.split = f"{data.split}; the masks are those of number {split}"


def check_parts(data: Data) -> None:
    """Refuse masks without a node."""
    for key in MASKS:
        if key in data:
            empty = ~data[key].bool().view(data[key].size(0), -1).any(dim=0)
            if bool(empty.any()):
                which = f" in split {int(empty.nonzero()[0])}" if empty.numel() > 1 else ""
                raise ValueError(
                    f"'{key}' has no node{which}, expected one at least, of known class"
                )


def _check_disjoint(data: Data) -> None:
    """Refuse training nodes that are also validation or test nodes."""
    train = data.train_mask.bool().view(data.num_nodes, -1)
    for key in MASKS[1:]:
        mask = data[key].bool().view(data.num_nodes, -1)
        if 1 not in (train.size(1), mask.size(1)) and train.size(1) != mask.size(1):
            raise ValueError(
                f"'train_mask' has {train.size(1)} splits, but {key!r} has {mask.size(1)}: "
                "expected as many"
            )
        both = (train & mask).any(dim=1)
        if bool(both.any()):
            raise ValueError(
                f"'train_mask' and '{key}' share {int(both.sum())} nodes, the first of which is "
                f"{int(both.nonzero()[0])}: expected no node that is trained on among those whose "
                "scores count"
            )


def _check_labelled(data: Data) -> None:
    """Refuse masks with unlabelled nodes."""
    if data.y.dim() > 1:
        return
    known, is_real = known_target_mask(data.y), data.y.is_floating_point()
    for key in MASKS:
        mask = data[key] if data[key].dim() == 1 else data[key].any(dim=1)
        unknown = (mask & ~known).nonzero().view(-1)
        if unknown.numel():
            what = "target is unknown (NaN)" if is_real else "class is unknown (negative)"
            raise ValueError(
                f"'{key}' holds {unknown.numel()} nodes whose {what}, the first of which is "
                f"{int(unknown[0])}: leave them out of it"
            )
