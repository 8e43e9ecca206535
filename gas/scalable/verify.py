"""Whether mini-batches and histories give what the uncut graph gives."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.loader import EvalSubgraphLoader
from gas.scalable.inference import assemble, layer_wise

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


class Verification(NamedTuple):
    """What :func:`gas.verify` found; true if everything is exact.

    * ``errors``: ``|h - h*| / |h*|`` of every history, then of the outputs: Frobenius norms over
      all nodes, of what mini-batches give and what the uncut graph gives (``h*``).
    * ``tolerance``: the largest error that counts as exact.
    """

    errors: tuple[float, ...]
    tolerance: float

    @property
    def first(self) -> int | None:
        """The first layer, from 0, whose outputs differ; ``None`` if none does."""
        wrong = [layer for layer, error in enumerate(self.errors) if not error <= self.tolerance]
        return wrong[0] if wrong else None

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        names = [f"history {layer}" for layer in range(len(self.errors) - 1)] + ["outputs"]
        lines = [f"{name:<11}{error:.1e}" for name, error in zip(names, self.errors, strict=True)]
        if self.first is None:
            verdict = f"exact: relative errors are at most {self.tolerance:.0e}"
        else:
            verdict = (
                f"not exact: {names[self.first]} is the first to differ, so look at what forward "
                f"does before it"
            )
        return "\n".join([*lines, verdict])


@torch.no_grad()
def verify(
    model: ScalableGNN,
    graph: Data,
    batch_size: int = 1,
    *,
    tolerance: float | None = None,
    **kwargs: Any,
) -> Verification:
    """Compares mini-batches and histories with the uncut graph, at the model's current weights.

    With fixed weights every output is exact after one sweep over all mini-batches per layer. Here
    that many are made, on histories of their own, and compared, layer by layer, with one full batch
    of the whole graph, in evaluation mode; so are the outputs of layer-wise inference. The model
    and its histories stay as they are.

    It takes the memory of the full batch and of two further sets of histories::

        found = gas.verify(model, graph)
        print(found)  # Names the first layer that differs.

    Args:
        model: The model.
        graph: What :func:`gas.cluster` has returned.
        batch_size: Parts per mini-batch. (default: ``1``)
        tolerance: The largest relative error that counts as exact. (default: ``1e-5``, or what
            histories of fewer bits allow: ``2e-3`` for float16, ``2e-2`` for bfloat16 and int8)
        **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

    Raises:
        ValueError: If the graph isn't that of the histories, or an argument is unusable.
    """
    loader = EvalSubgraphLoader(graph, None, batch_size, log=False, **kwargs)
    uncut = torch.tensor([0, loader.num_nodes])
    (whole,) = EvalSubgraphLoader(graph, uncut, log=False, **kwargs)
    if tolerance is None:
        tolerance = max(
            (_TOLERANCES.get(h.codec.name, 1e-5) for h in model.histories), default=1e-5
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    exact, stale = model.for_graph(model.num_nodes), model.for_graph(model.num_nodes)
    try:
        x, adj_t, given = exact.inputs_of(whole.to(model.device).data)
        expected = exact(x, adj_t, fill=True, **given)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A history was read before it was filled")
            for _ in range(model.num_layers - 1):
                for batch in loader:
                    stale(batch)
            out = assemble(((batch, stale(batch)) for batch in loader), model.num_nodes)
            pairs = zip(stale.histories, exact.histories, strict=True)
            errors = [_error(a.emb, b.emb) for a, b in pairs]
            inferred = layer_wise(stale, loader)
        last = [_error(found, expected) for found in (out, inferred)]
        errors.append(math.nan if any(map(math.isnan, last)) else max(last))
    finally:
        exact.close()
        stale.close()
        for module, mode in modes:
            module.training = mode
    return Verification(tuple(errors), tolerance)


_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}


def _error(found: Tensor, expected: Tensor) -> float:
    true = expected.double().cpu()
    norm = torch.linalg.vector_norm(true).clamp(min=1e-300)
    return float(torch.linalg.vector_norm(found.double().cpu() - true) / norm)
