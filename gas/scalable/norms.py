"""Batch normalisation by statistics of the whole graph, gathered from its mini-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from gas.native import warn
from gas.scalable.call import StopForward

if TYPE_CHECKING:
    from gas.scalable.distributed import Group

BLOCK = 1 << 20  # Elements that are converted to float64 at once.
# From so many nodes on, variances over N and over N - 1 nodes are taken as equal: training mode
# normalises by the first, evaluation mode by the second.
MANY_NODES = 10_000
Key = tuple[int, int, int]  # The layer computed alone (or 0), the norm, and its call.


@dataclass(frozen=True)
class Moments:
    """The number of rows, their mean, and the sum of their squared deviations, in float64.

    * ``values``: the number, then the means, then the sums, of shape ``[1 + 2 * width]``.
    """

    values: Tensor

    @classmethod
    def of(cls, x: Tensor, width: int) -> Moments:
        """Compute the moments of ``[rows, width]`` or ``[rows, width, length]``."""
        total = cls(torch.zeros(1 + 2 * width, dtype=torch.float64, device=x.device))
        if not x.numel():
            return total
        for number, rows in enumerate(x.detach().split(max(1, BLOCK // x[0].numel()))):
            count = rows.numel() // width
            mean, var = torch.batch_norm_update_stats(rows.double(), None, None, 0.0)
            moments = cls(torch.cat([mean.new_full((1,), count), mean, var * count]))
            total = total + moments if number else moments
        return total

    @property
    def count(self) -> Tensor:
        """The number of rows."""
        return self.values[0]

    @property
    def mean(self) -> Tensor:
        """The means, of shape ``[width]``."""
        return self.values[1:].chunk(2)[0]

    @property
    def squares(self) -> Tensor:
        """The sums of squared deviations, of shape ``[width]``."""
        return self.values[1:].chunk(2)[1]

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the rows of both (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        shift, share = other.mean - self.mean, other.count / count.clamp(min=1)
        mean = self.mean + shift * share
        squares = self.squares + other.squares + shift.square() * self.count * share
        return Moments(torch.cat([count.view(1), mean, squares]))

    def is_close(self, other: Moments) -> bool:
        """Return whether two moments are equal but for rounding."""
        return torch.allclose(self.values, other.values, rtol=1e-5, atol=1e-7)


@dataclass(frozen=True)
class CallMoments:
    """The moments of a norm's inputs in one of its calls, over some mini-batches.

    If the inputs have as many rows as the batch has nodes, halo included, in every batch, the rows
    of the halo don't count. In some batches, rows of edges can be as many by chance.
    """

    own: Moments
    halo: Moments
    sees_halo: bool

    def __add__(self, other: CallMoments) -> CallMoments:
        is_seen = self.sees_halo and other.sees_halo
        return CallMoments(self.own + other.own, self.halo + other.halo, is_seen)

    @property
    def moments(self) -> Moments:
        """The moments of the rows that count."""
        return self.own if self.sees_halo else self.own + self.halo


class GraphNorms:
    """Normalise by the whole graph's statistics, as a full batch in training mode does.

    A norm's statistics have to be known before later layers can be computed: a sweep over all
    mini-batches gathers those of the first norm without statistics, and ends each forward pass
    there. Further sweeps normalise by them.

    This applies to norms that are in training mode at construction, and to norms without running
    statistics. If a model has none of these, nothing is done.

    Args:
        model: The model.
        group: The ranks whose mini-batches make up the graph. (default: one process)
        training: Use batch statistics for norms in training mode; ``False`` uses their running
            statistics. (default: ``True``)
        as_evaluation: Normalise as evaluation mode does by the running statistics to be set, whose
            variance is unbiased. (default: ``False``, as training mode does)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group | None = None,
        training: bool = True,
        as_evaluation: bool = False,
    ) -> None:
        self._norms: list[tuple[str, Any]] = [
            (name, norm) for name, norm in model.named_modules()
            if isinstance(norm, _BatchNorm)
            and (norm.running_mean is None or (training and norm.training))
        ]  # fmt: skip
        for name, norm in model.named_modules() if training else ():
            is_hetero = isinstance(norm, pyg.HeteroBatchNorm) and norm.training
            if is_hetero or ((name, norm) in self._norms and _has_own_forward(norm)):
                raise ValueError(
                    f"the batch norm '{name}' is a {type(norm).__name__}, whose forward isn't "
                    "PyTorch's and would be left out: put it in evaluation mode, or pass "
                    "norms=False"
                )
        if training and not model.training:
            _warn_of_evaluation_mode(model)
        self._group, self._as_evaluation = group, as_evaluation
        self._tracked = [training and is_tracked(norm) for _, norm in self._norms]
        # PyG's norms that use running statistics for a batch of one node.
        self._single_element_norms = [
            each for each in model.modules()
            if self._norms and isinstance(each, pyg.BatchNorm) and each.allow_single_element
        ]  # fmt: skip
        self._known: dict[Key, Moments] = {}
        self._moments: tuple[Key, CallMoments] | None = None
        # The current forward pass: its layer, sizes, and the calls of each norm so far.
        self._layer: int | None = None
        self._batch_size = self._num_rows = 0
        self._is_whole = False
        self._calls: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._norms)

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Replace the norms' forward in this context, for passes in :meth:`watch_batch`."""
        originals = [(norm, vars(norm).get("forward")) for _, norm in self._norms]
        try:
            for number, (_, norm) in enumerate(self._norms):
                norm.forward = partial(self._forward, number, norm, norm.forward)
            for each in self._single_element_norms:
                each.allow_single_element = False
            yield
        finally:
            for norm, forward in originals:
                del norm.forward
                if forward is not None:
                    norm.forward = forward
            for each in self._single_element_norms:
                each.allow_single_element = True

    @contextlib.contextmanager
    def watch_batch(
        self, layer: int = 0, batch_size: int = 0, num_rows: int = 0, is_whole: bool = False
    ) -> Iterator[None]:
        """Normalise, or gather the statistics of, one forward pass in this context.

        Args:
            layer: The layer, if one is computed alone. (default: ``0``)
            batch_size: The number of in-batch nodes. (default: all rows count)
            num_rows: The number of nodes, halo included.
            is_whole: Whether the batch is the whole graph, which needs no sweep.
                (default: ``False``)
        """
        self._layer, self._batch_size, self._num_rows = layer, batch_size, num_rows
        self._is_whole, self._calls = is_whole, [0] * len(self._norms)
        try:
            yield
        finally:
            self._layer = None

    def gather(
        self, sweep: Callable[[], Iterable[tuple[Any, Any]]], stop_at_output: bool = False
    ) -> None:
        """Repeat a sweep until all norms in it have statistics.

        Args:
            sweep: Runs all mini-batches; yields each with its output, or ``None`` if the forward
                pass ended before.
            stop_at_output: End a sweep with the first output, if outputs aren't needed.
                (default: ``False``)
        """
        while True:
            for _, out in sweep():
                if stop_at_output and out is not None and self._moments is None:
                    break
            if not self._finish():
                return

    def _forward(
        self, number: int, norm: Any, forward: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute the forward of a norm while it is installed."""
        if self._layer is None:
            return forward(x)
        key = self._layer, number, self._calls[number]
        self._calls[number] += 1
        if key not in self._known:
            self._add_rows(key, norm, x)
            if not self._is_whole:
                raise StopForward
            self._finish()
        known = self._known[key]
        like = next((t for t in (norm.running_mean, norm.weight) if t is not None), x)
        count = known.count - int(self._as_evaluation and self._tracked[number])
        mean, var = (t.to(like.dtype) for t in (known.mean, known.squares / count))
        return batch_norm(x, mean, var, norm.weight, norm.bias, eps=norm.eps)

    def _add_rows(self, key: Key, norm: Any, x: Tensor) -> None:
        """Add the moments of one call of a norm."""
        size, is_halo = x.size(0), self._batch_size < self._num_rows == x.size(0)
        own, halo = x.split([self._batch_size, size - self._batch_size] if is_halo else [size, 0])
        moments = [Moments.of(rows, norm.num_features) for rows in (own, halo)]
        call = CallMoments(moments[0], moments[1], size in (0, self._num_rows))
        if self._moments is None:
            self._moments = key, call
            return
        first, before = self._moments
        self._check_alike(first, key)
        self._moments = key, before + call

    def _check_alike(self, *keys: Key) -> None:
        """Refuse a model that calls norms in another order for some mini-batches."""
        if len(set(keys)) > 1:
            one, other = (self._norms[number][0] for _, number, _ in keys)
            raise RuntimeError(
                f"forward calls the batch norm '{one}' first for one mini-batch and '{other}' for "
                "another: its order has to be the same for every mini-batch, or pass norms=False"
            )

    def _finish(self) -> bool:
        """End a sweep; return whether any rank has gathered the statistics of a norm."""
        if not self._norms:
            return False
        every = [] if self._moments is None else [self._moments]
        if self._group is not None:
            every = _exchange_moments(self._group, self._moments)
        self._moments = None
        if not every:
            return False
        key, total = every[0]
        for other, more in every[1:]:
            self._check_alike(key, other)
            total = total + more
        moments = total.moments
        if moments.count < 2:
            raise ValueError(
                f"the batch norm '{self._norms[key[1]][0]}' is given {int(moments.count)} rows by "
                "the whole graph, expected at least 2, whose variance it takes: put it in "
                "evaluation mode, or pass norms=False"
            )
        self._known[key] = Moments(moments.values.to(self._device_of(key[1], moments)))
        return True

    def _device_of(self, number: int, moments: Moments) -> torch.device:
        norm = self._norms[number][1]
        tensors = (norm.running_mean, norm.weight)
        return next((t.device for t in tensors if t is not None), moments.values.device)

    @torch.no_grad()
    def write(self) -> bool:
        """Set the running statistics, as one step of a full batch with momentum 1 does.

        A layer that repeats the computation of an earlier one doesn't count as another call.

        Returns:
            ``True`` if each norm was called once: evaluation mode then normalises by the same
            statistics as this pass.
        """
        calls: dict[int, list[tuple[int, Moments]]] = {}
        for (layer, number, _), moments in self._known.items():
            earlier = calls.setdefault(number, [])
            if not any(layer != at and moments.is_close(each) for at, each in earlier):
                earlier.append((layer, moments))
        for number, found in calls.items():
            norm, (_, last) = self._norms[number][1], found[-1]
            if self._tracked[number]:
                norm.running_mean.copy_(last.mean)
                norm.running_var.copy_(last.squares / (last.count - 1))
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(len(found))
        return len(self._known) == len(calls)


def has_equal_variances(num_nodes: int) -> bool:
    """Return whether variances over ``N`` and over ``N - 1`` nodes are taken as equal."""
    return num_nodes >= MANY_NODES


def is_tracked(module: torch.nn.Module) -> bool:
    """Return whether a module is a batch norm whose running statistics a forward pass changes."""
    return (
        isinstance(module, _BatchNorm)
        and module.training
        and module.track_running_stats
        and module.running_mean is not None
    )


def _has_own_forward(norm: Any) -> bool:
    return type(norm).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


def _warn_of_evaluation_mode(model: torch.nn.Module) -> None:
    """Warn that running statistics won't be set, if a model has some."""
    norms = [n for n in model.modules() if isinstance(n, _BatchNorm | pyg.HeteroBatchNorm)]
    if any(n.running_mean is not None for n in norms) and not any(n.training for n in norms):
        warn(
            "refresh leaves the running statistics of batch norms as they are: the model is in "
            "evaluation mode. Call model.train() before to set them, or pass norms=False"
        )


def _exchange_moments(
    group: Group, mine: tuple[Key, CallMoments] | None
) -> list[tuple[Key, CallMoments]]:
    """Exchange the moments of a sweep; return those of all ranks in order, on the CPU."""
    sent = torch.zeros(1, dtype=torch.float64)
    if mine is not None:
        key, each = mine
        head = torch.tensor([1, *key, each.sees_halo], dtype=torch.float64)
        sent = torch.cat([head, each.own.values.cpu(), each.halo.values.cpu()])
    out: list[tuple[Key, CallMoments]] = []
    for found in group.gather(sent, "adding up the statistics of batch norms"):
        if found[0]:
            layer, number, call, sees_halo = (int(value) for value in found[1:5])
            own, halo = (Moments(values) for values in found[5:].chunk(2))
            out.append(((layer, number, call), CallMoments(own, halo, bool(sees_halo))))
    return out
