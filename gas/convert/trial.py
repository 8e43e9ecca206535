"""Trial of a copy of a module on small graphs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from gas.convert.layers import WEIGHT
from gas.convert.sample import HOW, copy_value, eval_mode, sample
from gas.graph import find_layout
from gas.nn import deep_copy

# Nodes and edges of the graphs on which a model is tried: primes, so that no width is as large.
SAMPLES = ((61, 241), (67, 263))


@dataclass
class Inputs:
    """Arguments of a method that a graph provides.

    * ``names``: attributes; ``edges``: the parameter for the adjacency.
    * ``by_value``: whether the weights of the edges are values of the adjacency, as of an
      ``adj_t``: layers that take weights have them then without being given any.
    """

    method: str
    names: Sequence[str]
    edges: str
    by_value: bool

    @property
    def is_matrix(self) -> bool:
        """Return whether the module takes edges as a matrix whose values are the weights."""
        return self.by_value and self.edges != "edge_index"

    def of(self, data: Data) -> dict[str, Any]:
        """Return the arguments, with the adjacency as ``edge_index``."""
        return {**{name: data[name] for name in self.names}, self.edges: data.edge_index}

    def run_as_given(self, net: Module, data: Data) -> Tensor:
        """Run the module on a graph in the graph's own layout."""
        values = {name: copy_value(data[name]) for name in self.names}
        if "edge_index" not in data:
            values[self.edges] = data.adj_t
        else:
            is_matrix = self.is_matrix and WEIGHT in data
            values[self.edges] = matrix(data) if is_matrix else data.edge_index
        with eval_mode(net):
            return getattr(net, self.method)(**values)

    def run(self, net: Module, data: Data) -> Tensor:
        """Run the module itself; lazy parameters are initialised."""
        values = {name: copy_value(value) for name, value in self.of(data).items()}
        if self.by_value:
            values[self.edges] = matrix(data)
        try:
            with eval_mode(net):
                return getattr(net, self.method)(**values)
        except Exception as error:
            raise ValueError(
                f"{type(net).__name__} can't be run on a small graph like this one, with "
                f"{', '.join(values)}: {type(error).__name__}: {error}"
            ) from error


def _first_run(
    net: Module, inputs: Inputs, data: Data, wanted: dict[str, Any]
) -> tuple[Tensor, Inputs]:
    """Run the module, without edge features if only PyG's signature has them.

    Raises:
        ValueError: If it can't be run, naming an attribute without which it could.
    """
    try:
        return inputs.run(net, data), inputs
    except ValueError as error:
        for name in inputs.names:
            if wanted[name] is inspect.Parameter.empty:
                continue
            fewer = replace(inputs, names=[other for other in inputs.names if other != name])
            try:
                out = fewer.run(net, data)
            except ValueError:
                continue
            if name == "edge_attr" and _has_no_use_for_edge_attr(net, inputs.method):
                return out, fewer
            raise ValueError(
                f"{error}; without {name!r} it can: give it as the layers take it, or leave it "
                f"out of the graph, del data.{name}"
            ) from error
        raise


def _has_no_use_for_edge_attr(net: Module, method: str) -> bool:
    """Return whether a model of PyG has the parameter, but no layer that uses it."""
    is_pyg = getattr(net, method).__module__.startswith("torch_geometric.")
    return is_pyg and all(getattr(layer, "edge_dim", None) is None for layer in net.modules())


def matrix(data: Data) -> Tensor:
    """Return the weighted adjacency of a graph."""
    src, dst = data.edge_index
    order = dst.argsort(stable=True)
    counts = torch.bincount(dst, minlength=int(data.num_nodes or 0))
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return find_layout("csr").make(
        rowptr, src[order], data.edge_weight.view(-1)[order], int(data.num_nodes or 0)
    )


def trial_of(net: Module) -> Module:
    """Copy a module with other parameters, to be tried in its place.

    What is zero at first, such as a gate or the last layer, would hide what comes before it.
    """
    try:
        trial = deep_copy(net)
    except Exception as error:
        raise ValueError(
            f"{type(net).__name__} can't be copied, to be tried on a small graph: "
            f"{type(error).__name__}: {error}"
        ) from error
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return trial


def find_sample_graphs(
    net: Module, inputs: Inputs, data: Data, wanted: dict[str, Any], device: torch.device
) -> tuple[list[Data], Tensor, Inputs]:
    """Return small graphs on which a module's outputs are finite, and the first output."""
    # PyG adds self-loops to those that an adj_t has, and replaces those of an edge_index.
    self_loops = not inputs.by_value
    attributes = [*inputs.names, *([WEIGHT] if inputs.by_value else [])]
    failure: ValueError | None = None
    for how in HOW:
        graphs = [sample(data, attributes, *n, how, self_loops).to(device) for n in SAMPLES]
        try:
            out, taken = _first_run(net, inputs, graphs[0], wanted)
        except ValueError as error:
            failure = failure or error
            continue
        if not isinstance(out, Tensor) or bool(torch.isfinite(out).all()):
            return graphs, out, taken
    raise failure or ValueError(
        f"{type(net).__name__} gives NaN or infinite numbers on a small graph like this one, on "
        "which it would be tried"
    )
