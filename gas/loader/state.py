"""What a checkpoint keeps of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gas.graph.cluster import PERM
from gas.loader.order import check_order

if TYPE_CHECKING:
    from gas.loader.subgraph import SubgraphLoader


def state_of(loader: SubgraphLoader) -> dict[str, Any]:
    """The partition, how far the epoch is, and the augmentation."""
    augmentation, order = loader._augmentation, loader._order
    # Without a key where it has none, as checkpoints were before there were such samplers.
    sampler = {} if order.sampler is None else {"sampler": order.sampler.state_dict()}
    return {
        **sampler,
        "graph": loader._graph_fingerprint(),
        "parts": loader.ptr,
        "perm": loader.data.get(PERM),
        "batches": len(order) if hasattr(order.batches, "__len__") else None,
        "order": order.state(),
        "generator": None if loader.generator is None else loader.generator.get_state(),
        "augmentation": None if augmentation is None else augmentation.state_dict(),
    }


def check_state(loader: SubgraphLoader, state: Mapping[str, Any]) -> None:
    """Refuses the state of another graph or partition.

    Raises:
        ValueError: Saying what differs.
    """
    mine, sampler = loader.state_dict(), loader._order.sampler
    may = {"sampler"}
    if not isinstance(state, Mapping) or state.keys() - may != mine.keys() - may:
        raise ValueError(f"'loader' is a {type(loader).__name__}, but what was saved was none")
    if state["graph"] != mine["graph"] or not torch.equal(state["parts"], mine["parts"]):
        raise ValueError(
            "'loader' has another graph, or other parts of it, than what was saved: cut the "
            "graph as it was cut then, of which perm and parts were saved"
        )
    if (state.get("sampler") is None) != (sampler is None):
        raise ValueError(
            f"'loader' has {'no' if sampler is None else 'a'} PartSampler, other than what was "
            "saved: make it as it was"
        )
    if sampler is not None:
        sampler.check_state(state["sampler"])
    if state["batches"] != mine["batches"]:
        raise ValueError(
            f"'loader' has {mine['batches']} mini-batches an epoch, but it had "
            f"{state['batches']} when it was saved: choose 'batch_size' as it was then"
        )
    check_order(state["order"], loader.ptr.numel() - 1)
    if (state["generator"] is None) != (loader.generator is None):
        raise ValueError(
            f"'loader' has {'a' if state['generator'] is None else 'no'} generator, other than "
            "what was saved: make it as it was"
        )
    if (state["augmentation"] is None) != (loader._augmentation is None):
        raise ValueError(
            f"'loader' has {'an' if state['augmentation'] is None else 'no'} augmentation, "
            "other than what was saved: make it as it was"
        )
    if loader._augmentation is not None:
        loader._augmentation.check_state(state["augmentation"])
