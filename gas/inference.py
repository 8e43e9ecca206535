"""Layer-wise inference: every node's output, one layer after the other, at one batch's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gas.history import History
from gas.loader import SubData

Outputs = Iterator[tuple[SubData, Tensor]]


class Reached(BaseException):
    """Ends a forward pass at the history that layer-wise inference is filling."""


class Sweep:
    """One sweep over all batches by whole forward passes; it fills the history of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.calls = 0


def run_layers(
    loader: Iterable[SubData],
    histories: Sequence[History],
    device: torch.device,
    forward_layer: Callable[[int, Tensor, SubData, dict[str, Any]], Tensor],
) -> Outputs:
    """One sweep per layer, each computing that layer alone."""
    states: dict[tuple[int, ...], dict[str, Any]] = {}  # By batch: the order may change.
    for layer in range(len(histories) + 1):
        for batch in loader:
            state = states.setdefault(tuple(batch.offset.tolist()), {})
            batch = batch.to(device)
            x = batch.data.x
            if layer > 0:
                x = histories[layer - 1].pull(batch.n_id).to(x)
            out = forward_layer(layer, x, batch, state)[: batch.batch_size]
            if layer < len(histories):
                histories[layer].push(
                    out, batch.n_id[: batch.batch_size], batch.offset, batch.count
                )
            else:
                yield batch, out


def run_forwards(
    loader: Iterable[SubData], num_histories: int, forward: Callable[[SubData, Sweep], Tensor]
) -> Outputs:
    """One sweep per layer, each running ``forward`` from the start up to that layer."""
    for layer in range(num_histories):
        for batch in loader:
            sweep = Sweep(layer)
            try:
                forward(batch, sweep)
            except Reached:
                continue
            raise wrong_calls(layer, num_histories)
    for batch in loader:
        sweep = Sweep(num_histories)
        out = forward(batch, sweep)
        if sweep.calls < num_histories:
            raise wrong_calls(sweep.calls, num_histories)
        yield batch, out[: batch.batch_size]


def wrong_calls(calls: int, num_histories: int) -> RuntimeError:
    """The error of a model that doesn't fill each of its histories once."""
    return RuntimeError(
        f"forward called push_and_pull {calls} times, expected once for each of the model's "
        f"{num_histories} histories: pass every hidden layer's output through it, or set "
        "'num_layers' to one more than the histories it needs"
    )


def assemble(outputs: Outputs, num_nodes: int) -> Tensor:
    """Puts the outputs of batches into one new tensor on the CPU."""
    out: Tensor | None = None
    done = torch.zeros(num_nodes, dtype=torch.bool)
    for batch, rows in outputs:
        if out is None:
            out = rows.new_zeros(num_nodes, *rows.shape[1:], device="cpu")
        nodes = batch.n_id[: batch.batch_size].cpu()
        out[nodes] = rows.cpu()
        done[nodes] = True
    if out is None or not bool(done.all()):
        raise ValueError(
            f"'loader' yields {int(done.sum())} of the graph's {num_nodes} nodes: inference needs "
            "all of them, as EvalSubgraphLoader(data, ptr) yields"
        )
    return out
