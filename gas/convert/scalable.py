"""``to_scalable``: an ordinary module as a model with histories."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.transforms import BaseTransform

from gas.convert.check import (
    Conversion,
    check_edges,
    check_hooks,
    describe_layer,
    make_layer_tests,
    make_layers,
)
from gas.convert.edge_dropout import take_edge_dropout
from gas.convert.edge_layers import InexactLayerError
from gas.convert.inputs import (
    Inputs,
    copy_with_noise,
    eval_mode,
    find_inputs,
    make_graph,
    node_table_error,
    record,
)
from gas.convert.kinds import Values, check_rows, find_value_kinds, row_dims
from gas.convert.known import is_close
from gas.convert.layers import WEIGHT, LayerCall, describe_call, layers_without_weights
from gas.convert.matrices import replace_products
from gas.convert.messages import replace_sums, wrap_messages
from gas.convert.model import Converted
from gas.convert.modes import TRAINING
from gas.convert.normalise import (
    DifferentEdgesError,
    Normalise,
    conflict,
    move_normalisation,
    take_matrices,
    write_normalisation,
)
from gas.convert.outputs import check_outputs, find_outputs, flatten
from gas.convert.place import Placement, history_shape, place_histories, write_graph
from gas.convert.preparation import Preparation
from gas.convert.prepare import move_preparation, refuse_assignments
from gas.convert.rewrite import follow_changes, skip_copies
from gas.convert.sample import SAMPLES, find_sample_graphs
from gas.convert.selected import wrap_selecting_layers
from gas.convert.trace import CONSTANT, UNROLLED, Opened, is_layer, trace
from gas.graph import check_nodes, is_row_per_edge
from gas.nn import NeverExactError, check_exact, explain_failures, fuse
from gas.scalable import HeteroModel, ScalableGNN, to_hetero_model

_LOCK = threading.RLock()  # One thread converts at a time: functions are replaced meanwhile.
OWN = 31  # In-batch nodes of the first mini-batch on which layers are checked.


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
        net: The module. Its ``forward`` (or ``encode``, if it has no other) takes ``edge_index`` or
            ``adj_t``, and attributes of the graph by their names: ``x``, ``edge_weight``,
            ``edge_attr``, ``edge_type``, ... Those that the graph lacks have their defaults. Or it
            takes the graph itself, ``forward(data)``. It returns a row for each node, or several,
            in tuples, lists, dictionaries or a dataclass.
        data: The graph, with the attributes that ``net`` takes.
        num_nodes: Instead of ``data``, the number of nodes of a graph with ``x`` and
            ``edge_index`` alone; the width of ``x`` is ``net.in_channels``.
        **kwargs: Options of :class:`gas.ScalableGNN`, such as ``store`` or ``dtype``, which is
            ``torch.float64`` by default if all parameters are.

    Raises:
        ValueError: If ``net`` can't be traced, or isn't exact on mini-batches, naming the layer.
    """
    _check_module(net)
    if isinstance(data, HeteroData):
        return to_hetero_model(net, data, **kwargs)
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
    data = make_graph(net, data, num_nodes)
    if {weight.dtype for weight in net.parameters()} == {torch.float64}:
        kwargs.setdefault("dtype", torch.float64)
    if "num_nodes" in data:
        check_nodes(data, data.num_nodes)
    check_exact("", net)
    with explain_failures(net):
        inputs, wanted = find_inputs(net, data)
    with _LOCK, torch.random.fork_rng(devices=[]):
        if any(torch.nn.parameter.is_lazy(p) for p in net.parameters()):
            find_sample_graphs(net, inputs, data, wanted)  # It runs the module.
        torch.default_generator.manual_seed(0)
        return _convert_opening(net, data, inputs, wanted, kwargs)


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


def _convert_opening(
    net: Module, data: Data, inputs: Inputs, wanted: dict[str, Any], options: dict[str, Any]
) -> Converted:
    """Convert a module; follow layers of its own that aren't exact as a whole."""
    is_layer = isinstance(net, MessagePassing) and not isinstance(net, UNROLLED)
    opened: Opened = (type(net),) if is_layer else ()
    first: InexactLayerError | None = None
    on_matrix = False  # Whether layers read the values of a matrix.
    on_own_edges = False  # Whether each layer normalises the edges that it is given.
    while True:
        try:
            return _convert(net, data, inputs, wanted, options, opened, on_matrix, on_own_edges)
        except InexactLayerError as error:
            first = first or error
            kind = type(error.layer)
            is_own = not kind.__module__.startswith("gas.")
            if not issubclass(kind, MessagePassing) or not is_own or kind in opened:
                raise ValueError(str(first)) from None
            opened = (*opened, kind)
        except NeverExactError:
            raise
        except DifferentEdgesError as error:
            if inputs.edges == "edge_index" and not inputs.by_value and not on_own_edges:
                on_own_edges = True
            elif error.may_read_values and not on_matrix:
                on_matrix = True
            else:
                raise ValueError(str(error)) from None
        except ValueError as error:
            if first is not None:
                raise ValueError(f"{first}. Inside of it, {error}") from error
            if is_layer:
                raise ValueError(
                    f"'net' is a layer, {type(net).__name__}: convert a module that calls it, "
                    "torch_geometric.nn.Sequential('x, edge_index', [(net, 'x, edge_index -> x')])"
                    f". Inside of it, {error}"
                ) from error
            if (table := node_table_error(net, data, error)) is not None:
                raise table from error
            raise


def _convert(
    net: Module,
    data: Data,
    inputs: Inputs,
    wanted: dict[str, Any],
    options: dict[str, Any],
    opened: Opened = (),
    on_matrix: bool = False,
    on_own_edges: bool = False,
) -> Converted:
    name = type(net).__name__
    copied = copy_with_noise(net)
    with explain_failures(net):
        graphs, expected, inputs = find_sample_graphs(copied, inputs, data, wanted)
    graph, num_dropped = _trace(copied, inputs, wanted, graphs, opened)
    if on_own_edges:
        write_normalisation(copied, graph)
    prepared = _move_preparation(copied, graph, inputs, graphs)
    if prepared is not None:
        graphs = [prepared(each) for each in graphs]
        inputs = replace(inputs, made=prepared.made)
    matrices = take_matrices(copied, graph, inputs.edges) if on_matrix else {}
    weighted = layers_without_weights(copied, graph) if inputs.by_value else []
    edges = "" if inputs.by_value else inputs.edges
    transform, normalised, added = move_normalisation(copied, graph, edges, weighted)
    if transform is not None:
        if prepared is not None:
            raise conflict(prepared, transform)
        transform.fit_to(inputs.is_matrix, inputs.edges)
        graphs = [transform(each) for each in graphs]
    selecting = wrap_selecting_layers(copied, graph, inputs.edges)
    given_weights = [*normalised, *weighted]
    outputs = find_outputs(graph, expected, name)
    records = _record_values(copied, graph, inputs, graphs, given_weights, transform, name)
    if not is_close(outputs.values(records[0]), flatten(expected)):
        raise _MismatchError(name, prepared or transform, inputs)
    counts = [(each.num_nodes, each.num_edges) for each in graphs]
    kinds = find_value_kinds(graph, records, counts)
    source = next(node for node in graph.nodes if node.target == inputs.edges)
    messages = wrap_messages(copied, graph, source, kinds, records[0], counts[0][0])
    products = replace_sums(copied, graph, source, kinds, records[0])
    added = matrices | selecting | added | messages | (products or {})
    if products is not None or messages:
        records = _record_values(copied, graph, inputs, graphs, given_weights, transform, name)
        kinds = find_value_kinds(graph, records, counts)
        outputs = find_outputs(graph, expected, name)
    check_outputs(outputs, kinds, records[0], counts[0][0], name)
    with eval_mode(copied):
        check_rows(copied, graph, kinds, records, counts[0])
    fuse(copied)
    calls = [
        describe_call(copied, node, kinds, source, normalised, weighted)
        for node in graph.nodes if is_layer(copied, node)
    ]  # fmt: skip
    check_edges(name, source, calls, num_dropped)
    with eval_mode(copied):
        for test in make_layer_tests(calls, kinds, records[0], graphs[0], [OWN]):
            test.call.form = test.find_form()
    return _make_model(
        copied, data, records[0], options,
        Conversion(net, inputs, graph, kinds, calls, given_weights, prepared or transform,
            outputs, opened=opened, added=added,
        ),
    )  # fmt: skip


def _move_preparation(
    net: Module, graph: Graph, inputs: Inputs, graphs: Sequence[Data]
) -> Preparation | None:
    """Move what a traced graph computes of a list of edges alone to a transform."""
    prepared = None
    if inputs.edges == "edge_index" and not inputs.by_value:
        records = _record_values(net, graph, inputs, graphs, (), None, type(net).__name__)
        prepared = move_preparation(graph, inputs.edges, records, graphs)
    refuse_assignments(graph)
    return prepared


def _trace(
    net: Module, inputs: Inputs, wanted: dict[str, Any], graphs: Sequence[Data], opened: Opened
) -> tuple[Graph, int]:
    """Trace a module's method, and remove unused inputs.

    Returns:
        The graph, and the number of layers whose edges are dropped in training.
    """
    given = (*inputs.names, inputs.edges)
    named = ["x" if key == inputs.features else key for key in wanted]
    order = list(given) if inputs.graph else [key for key in named if key in given]
    known = (*order, inputs.graph, inputs.features)
    fixed = {key: default for key, default in wanted.items() if key not in known}
    samples = [inputs.values(each) for each in graphs]
    counts = [int(each.num_nodes or 0) for each in graphs]
    graph = trace(
        net, inputs.method, order, inputs.in_call, fixed, samples, counts, inputs.edges, opened
    )
    attributes = [name for name in inputs.names if is_row_per_edge(graphs[0], name)]
    num_dropped = take_edge_dropout(net, graph, inputs.edges, attributes)
    follow_changes(net, graph)
    skip_copies(graph, inputs.edges)
    replace_products(net, graph, inputs.edges)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target in inputs.names:
            graph.erase_node(node)
    return graph, num_dropped


def _make_model(
    copied: Module, data: Data, values: Values, options: dict[str, Any], made: Conversion
) -> Converted:
    """Place the histories, and make the model of the module's own parameters.

    Args:
        copied: The copy of the module that was traced.
        data: The graph.
        values: The values of the traced graph's nodes on the first small graph.
        options: Those of :class:`gas.ScalableGNN`.
        made: The conversion so far.
    """
    graph, kinds, calls = made.graph, made.kinds, made.calls
    placed = place_histories(copied, graph, kinds, calls, values)
    dims = {node: row_dims(value, SAMPLES[0][0]) for node, value in values.items()}
    shapes = {node: history_shape(node, values[node], dims[node]) for node in placed.pulled}
    widths = [math.prod(shape) for shape in shapes.values()]
    written = write_graph(
        copied, graph, kinds, placed, calls, made.outputs, dims, shapes, made.transform
    )
    drawing = _describe_layers(graph, placed, calls, widths)
    added = [getattr(make, "keywords", {}).get("target") for make in made.added.values()]
    check_hooks(made.net, written, added)
    constants = {key: value for key, value in vars(copied).items() if key.startswith(CONSTANT)}
    layers = make_layers(made.net, graph, constants, made.opened, made.added)
    made = replace(
        made,
        calls=[replace(call, layer=layers.get_submodule(call.name)) for call in calls],
        constants=constants,
        numbers={
            node: value if isinstance(value, bool | float | str) else None
            for node, value in values.items()
        },
    )
    return Converted(layers, written, int(data.num_nodes or 0), widths, drawing, options, made)


def _record_values(
    net: Module,
    graph: Graph,
    inputs: Inputs,
    graphs: Sequence[Data],
    weighted: Sequence[str],
    transform: Normalise | None,
    name: str,
) -> list[dict[Node, Any]]:
    """Record the values of the traced graph's nodes on each of the small graphs."""
    try:
        return [
            record(
                net, graph, {**inputs.arguments(each), TRAINING: False}, each.get(WEIGHT), weighted
            )
            for each in graphs
        ]
    except Exception as error:
        how = f" after {transform}, which attributes of edges don't follow" if transform else ""
        kind = DifferentEdgesError if transform else ValueError
        raise kind(
            f"{name} can't be run on a small graph{how}: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}"
        ) from error


class _MismatchError(DifferentEdgesError):
    """Error of a module whose result changes when it is run again, normalised, or on a list."""

    def __init__(self, name: str, transform: BaseTransform | None, inputs: Inputs) -> None:
        self.may_read_values = inputs.by_value and inputs.layout == "csr"
        how = "a weighted adj_t" if transform is None else f"{transform} of the whole graph"
        text = f"with {how}, because its layers take different graphs: use layers that all take "
        if transform is None and not inputs.by_value:
            text = "when it is run again: it mustn't be random in evaluation, nor change views of "
        end = "tensors in place" if text.endswith("of ") else "the same one"
        super().__init__(f"{name} returns other values {text}{end}")


def _describe_layers(
    graph: Graph, placed: Placement, calls: Sequence[LayerCall], widths: Sequence[int]
) -> list[str]:
    """Return a line for every layer and every history."""
    lines = []
    by_node = {call.node: call for call in calls}
    for node in graph.nodes:
        if (call := by_node.get(node)) is not None:
            lines.append("{}: {}  [{}]".format(*describe_layer(call), call.form))
        if node in placed.pulled:
            position = placed.pulled.index(node)
            lines.append(f"  history {position}: '{node.name}', {widths[position]} wide")
    return lines
