"""Running a model on a mini-batch and on its views, which share the pulls of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gas.history import History
from gas.history.batch import BatchPulls
from gas.loader.batch import SubData
from gas.loader.moving import moved
from gas.scalable.call import BANKS, Call, check_call
from gas.scalable.ranks import check_connected
from gas.scalable.run import pulls_of, run

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


def run_views(model: ScalableGNN, batch: SubData, bank: str) -> tuple[Tensor, ...]:
    """The outputs of a batch and of its views; see :meth:`gas.ScalableGNN.views`."""
    if bank not in BANKS:
        raise ValueError(f"'bank' is {bank!r}, expected one of {', '.join(map(repr, BANKS))}")
    if batch.data.get("views") is None:
        raise ValueError(
            "'batch' has no views: load with gas.SubgraphLoader(..., epoch_transform=...), an "
            "augmentation such as gas.MHAug"
        )
    data, batch_size, n_id = moved(batch, model.device)[:3]
    inputs = [model.inputs_of(view) for view in (data, *data.views)]
    if model.ranks is not None:
        model.ranks.bind_to(model, n_id)
    else:
        check_connected(n_id)
    for x, _, _ in inputs:
        check_call(x, batch_size, n_id, False, model.num_nodes, model.buffer_size)

    ranks = model.ranks
    if ranks is not None:
        if bank != "original":
            raise ValueError(
                "'bank' is 'per_view', but histories of views aren't sent to other ranks: use "
                "bank='original'"
            )
        ranks.begin(batch.n_id, batch.offset, batch.count, batch)
    calls = [Call(batch=True, pushes=False) for _ in data.views]
    if bank == "per_view":
        for number, call in enumerate(calls):
            call.bank, call.pushes = _bank_of(model, number), True
    pulls = pulls_of(model, batch_size, n_id)
    own = Call(batch=True, pulls=pulls, ranks=ranks)
    if bank == "original":
        pulls = pulls or BatchPulls([], batch_size, n_id)
        pulls.readers += len(calls)
        for call in (own, *calls):
            call.pulls = pulls
    outs = tuple(
        run(model, call, x, adj_t, *batch[1:], **kwargs)
        for call, (x, adj_t, kwargs) in zip([own, *calls], inputs, strict=True)
    )
    return outs if ranks is None else (outs[0], *map(ranks.weighed, outs[1:]))


def _bank_of(model: ScalableGNN, number: int) -> dict[History, History]:
    """The histories of a view in place of the model's."""
    if len(model.view_histories or ()) <= number:
        set_banks(model, number + 1)
    assert model.view_histories is not None
    return dict(zip(model.histories, model.view_histories[number], strict=True))


def set_banks(model: ScalableGNN, number: int) -> None:
    """Gives a model histories for so many views: copies of its own, where there were none."""
    banks = list(model.view_histories or ())
    for bank in banks[number:]:
        for history in bank:
            history.close()
    factory = dataclasses.replace(model._factory, path=None)
    while len(banks) < number:
        made = torch.nn.ModuleList(factory.clone(model.histories, model._engine)).to(model.device)
        banks.append(cast("Sequence[History]", made))
    modules = torch.nn.ModuleList(cast("list[torch.nn.Module]", banks[:number]))
    if not number:
        model._modules.pop("view_histories", None)
    model.view_histories = cast("Sequence[Sequence[History]]", modules) if number else None
