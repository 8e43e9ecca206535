"""``to_scalable``: an ordinary module as a model with histories."""

from __future__ import annotations

import contextlib
import inspect
import threading
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing

from gas.convert.conversion import ConversionChoices, convert_module
from gas.convert.model import Converted
from gas.convert.module.arguments import make_sample_graph, node_table_error
from gas.convert.module.caches import find_filled
from gas.convert.module.inputs import Inputs, find_inputs
from gas.convert.module.lists_and_tables import wrap_lists
from gas.convert.module.state import is_custom_module, keep_generators
from gas.convert.module.wrappers import (
    EncoderWrapper,
    wrap,
    wrap_edges_by_other_names,
    wrap_kept_graph,
)
from gas.convert.sample import find_sample_graphs
from gas.convert.tracing.outputs import MismatchError
from gas.convert.values.edge_layers import (
    UNROLLED,
    DirectionError,
    InexactLayerError,
    find_layout_sensitive_types,
)
from gas.graph import check_nodes
from gas.nn import NeverExactError, check_exact, explain_failures
from gas.scalable import (
    HeteroModel,
    ScalableGNN,
    check_integer,
    check_names,
    to_hetero_model,
)

# Options of a model besides its number of nodes and layers, and their widths, which follow.
_OPTIONS = list(inspect.signature(ScalableGNN.__init__).parameters)[4:]
_LOCK = threading.RLock()  # One thread converts at a time: functions are replaced meanwhile.


@overload
def to_scalable(net: Module, data: HeteroData, **kwargs: Any) -> HeteroModel: ...


@overload
def to_scalable(
    net: Module, data: Data | None = ..., *, num_nodes: int | None = ..., **kwargs: Any
) -> Converted: ...


def to_scalable(
    net: Module,
    data: Data | HeteroData | None = None,
    *,
    num_nodes: int | None = None,
    **kwargs: Any,
) -> Converted | HeteroModel:
    """Convert an ordinary module, such as any of PyG's models, into a model with histories.

    The model has the parameters of ``net``, not copies of them. Every node-level input of a message
    passing layer after the first gets a history, before dropout. Layers become those
    of :mod:`gas.nn`, where there are such; symmetric normalisation moves to the whole graph, which
    ``gas.cluster(data, num_parts, model=model)`` applies, as does what layers of one's own compute
    of the edges alone; several hops become as many layers. Each layer is checked numerically on
    mini-batches of a small random graph; layers that aren't exact raise an error::

        net = GraphSAGE(data.num_features, 256, num_layers=3, out_channels=47, dropout=0.5)
        model = gas.to_scalable(net, data)
        print(model)  # Shows the histories, and how each layer is called.

    Args:
        net: The module. Its ``forward`` (or ``encode``, if it has no ``forward``) takes
            ``edge_index`` or ``adj_t``, and attributes of the graph by their names: ``x``,
            ``edge_weight``, ``edge_attr``, ``edge_type``, ...; arguments that the graph lacks take
            their defaults. Or it takes the graph itself, ``forward(data)``. It returns a tensor
            with a row for each node, or several in tuples, lists, dictionaries or a dataclass.
        data: The graph, with the attributes that ``net`` takes.
        num_nodes: Instead of ``data``, the number of nodes of a graph with ``x`` and
            ``edge_index`` alone; the width of ``x`` is ``net.in_channels``.
        **kwargs: Options of :class:`gas.ScalableGNN`, such as ``store`` or ``dtype``. The default
            ``dtype`` is ``torch.float64`` if all parameters (of a module without parameters,
            ``data.x``) have this type.

    Returns:
        A :class:`gas.ScalableGNN`; of a ``HeteroData``, a :class:`gas.scalable.HeteroModel`.

    Raises:
        ValueError: If ``net`` can't be traced, or isn't exact on mini-batches, naming the layer.
    """
    _check_module(net)
    if isinstance(data, HeteroData):
        if num_nodes is not None:
            raise ValueError(
                "'num_nodes' is given with a HeteroData, which has a number for each type of "
                "nodes: leave it out"
            )
        return to_hetero_model(net, data, **_with_precision(net, None, kwargs))
    if data is not None and not isinstance(data, Data):
        raise ValueError(
            f"'data' is a {type(data).__name__}, expected a torch_geometric.data.Data or HeteroData"
        )
    if data is not None and not isinstance(data.edge_index, Tensor | None):
        raise ValueError(
            f"'data.edge_index' is a {type(data.edge_index).__name__}, expected a tensor of shape "
            "[2, E]: a matrix whose rows are destinations is data.adj_t"
        )
    if isinstance(net, ScalableGNN):
        raise ValueError(f"{type(net).__name__} is a ScalableGNN already: use it as it is")
    _check_forward(net)
    if num_nodes is not None:
        check_integer("num_nodes", num_nodes, 1)
    check_names(kwargs, _OPTIONS, "gas.to_scalable")
    data = make_sample_graph(net, data, num_nodes)
    check_exact("", net)
    net, data = wrap_lists(net, data)
    with _LOCK:
        try:
            return _convert(net, data, kwargs)
        except ValueError:
            with contextlib.suppress(ValueError):
                joined, listed = wrap_lists(net, data, in_graph=True)
                if joined is not net:
                    return _convert(joined, listed, kwargs)
                renamed = wrap_edges_by_other_names(net, data)
                if renamed is not net:
                    return _convert(renamed, data, kwargs)
            raise


def _check_module(net: Any) -> None:
    if not isinstance(net, Module):
        what = f"the class {net.__name__}" if isinstance(net, type) else f"a {type(net).__name__}"
        raise ValueError(
            f"'net' is {what}, expected a module, such as torch_geometric.nn.GraphSAGE(...)"
        )
    names = [kind.__name__ for kind in type(net).__mro__]
    if "ScalableGNN" in names and not isinstance(net, ScalableGNN):
        raise ValueError(
            f"{type(net).__name__} is a ScalableGNN of another library: have it inherit "
            "gas.ScalableGNN, as docs/migration.md shows for pyg_autoscale's, and use it as it is"
        )
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(net).__name__} is a ScriptModule, and can't be followed: give the module "
            "before torch.jit.script"
        )
    if "_orig_mod" in net._modules:
        raise ValueError(
            "'net' is compiled, and can't be followed: give the module as it was, and compile what "
            "gas.to_scalable makes of it, torch.compile(model)"
        )


def _with_precision(net: Module, x: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with histories of float64 by default, if the module computes in it."""
    dtypes: set[Any] = {weight.dtype for weight in net.parameters()}
    if (dtypes or {getattr(x, "dtype", None)}) == {torch.float64}:
        return {"dtype": torch.float64, **options}
    return options


def _check_forward(net: Module) -> None:
    """Refuse a module whose call isn't the ``forward`` of its class."""
    if not is_custom_module(net) or isinstance(net, GraphModule):
        return  # PyG's Sequential has a forward of each object, and torch.fx makes a __call__.
    if "forward" in vars(net) or type(net).__call__ is not Module.__call__:
        name = "forward" if "forward" in vars(net) else "__call__"
        where = "set on the object" if name == "forward" else "of its own"
        raise ValueError(
            f"{type(net).__name__} has a {name!r} {where}, and what is followed is the forward of "
            "its class: do there what it does, def forward(self, x, edge_index)"
        )


def _convert(net: Module, data: Data, options: dict[str, Any]) -> Converted:
    """Convert a module; if that fails, with its tables of nodes read by their rows."""
    if isinstance(net, MessagePassing) and not isinstance(net, UNROLLED):
        net = wrap(EncoderWrapper, net)
    net = wrap_kept_graph(net, data)
    options = _with_precision(net, data.x, options)
    if "num_nodes" in data:
        check_nodes(data, data.num_nodes)
    with explain_failures(net):
        inputs = find_inputs(net, data)
    with keep_generators(net):
        try:
            return _convert_opening(net, data, inputs, options)
        except ValueError as error:
            inputs, data = inputs.with_tables(net, data)
            if not inputs.tables:
                raise
            try:
                return _convert_opening(inputs.tables.by_ids(net), data, inputs, options)
            except ValueError as other:
                found = inputs.tables.error(net, other if other.__cause__ is None else error)
                raise found from error.__cause__


def _convert_opening(net: Module, data: Data, inputs: Inputs, options: dict[str, Any]) -> Converted:
    """Convert a module; follow layers of its own that aren't exact as a whole."""
    if any(torch.nn.parameter.is_lazy(p) for p in net.parameters()):
        find_sample_graphs(net, inputs, data)  # It runs the module.
    torch.default_generator.manual_seed(0)

    def run(filled: Module) -> None:
        inputs.run_in_layout(filled, data, keeps=True)

    choices = ConversionChoices(
        traced_types=inputs.tables.find_layers(net),
        emptied=find_filled(net, int(data.num_nodes or 0), run),
    )
    first: InexactLayerError | None = None
    while True:
        try:
            return convert_module(net, data, inputs, options, choices)
        except InexactLayerError as error:
            first = first or error
            kind = type(error.layer)
            is_own = not kind.__module__.startswith("gas.")
            if not issubclass(kind, MessagePassing) or not is_own or kind in choices.traced_types:
                raise ValueError(str(first)) from None
            choices = replace(choices, traced_types=(*choices.traced_types, kind))
        except NeverExactError:
            raise
        except DirectionError as error:
            if choices.is_turned:
                raise ValueError(str(error)) from None
            choices = replace(choices, is_turned=True)
        except MismatchError as error:
            dubious = find_layout_sensitive_types(net, choices.traced_types)
            if not dubious:
                raise ValueError(str(error)) from None
            choices = replace(choices, traced_types=(*choices.traced_types, *dubious))
        except ValueError as error:
            if first is not None:
                raise ValueError(f"{first}. Inside of it, {error}") from error
            has_run = error.__cause__ is not None  # Otherwise, it failed for a known reason.
            is_known = not has_run or inputs.tables
            table = None if is_known else node_table_error(net, data, error, choices.emptied)
            if table is not None:
                raise table from error
            raise
