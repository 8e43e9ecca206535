"""Conversion of a module: from its trace to a model with histories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.changes import RefuseChanges, given_parameters, with_noise
from gas.convert.check import (
    Conversion,
    check_edges,
    check_hooks,
    check_layers,
    check_lists,
    describe_layer,
    make_layer_tests,
    make_layers,
)
from gas.convert.edge_dropout import take_edge_dropout
from gas.convert.edge_layers import InexactLayerError
from gas.convert.failures import changes_error
from gas.convert.fixed_numbers import NUMBERS, training_mode
from gas.convert.hops import DROP, Opened
from gas.convert.inputs import (
    Inputs,
    copy_value,
    copy_with_noise,
    eval_mode,
)
from gas.convert.kinds import Values, check_rows, find_value_kinds, row_dims
from gas.convert.known import is_close
from gas.convert.layers import (
    LayerCall,
    describe_call,
    layers_without_weights,
    wrap_selecting_layers,
)
from gas.convert.matrices import replace_products
from gas.convert.messages import replace_sums, wrap_messages
from gas.convert.model import Converted
from gas.convert.normalise import (
    Normalise,
    conflict,
    move_normalisation,
    take_matrices,
    write_normalisation,
)
from gas.convert.outputs import (
    Outputs,
    call_module,
    check_outputs,
    describe_constants,
    find_draws,
    record,
    record_checked,
    record_values,
    run_in_training,
)
from gas.convert.place import GraphWriter, Placement, place_histories
from gas.convert.places import CONSTANT, keep_attributes
from gas.convert.preparation import NODE_ID, Preparation
from gas.convert.prepare import move_preparation
from gas.convert.projection import merge_projections
from gas.convert.rewrite import (
    erase_unused,
    follow_changes,
    read_masks,
    refuse_methods,
    skip_copies,
    spread_selected_rows,
    turn_ends,
)
from gas.convert.sample import SAMPLES, find_sample_graphs
from gas.convert.tables import asks_for_rows, read_all_rows
from gas.convert.trace import is_layer, trace
from gas.graph import is_row_per_edge
from gas.nn import explain_failures, fuse

OWN = 31  # In-batch nodes of the first mini-batch on which layers are checked.


@dataclass(frozen=True)
class Choices:
    """Ways to convert a module, of which the first that is exact is taken.

    * ``opened``: types of layers that are followed up to ``propagate``.
    * ``on_matrix``: whether layers read the values of a matrix.
    * ``on_own_edges``: whether each layer normalises the edges that it is given.
    * ``is_turned``: whether messages go from ``edge_index[1]`` to ``edge_index[0]``.
    * ``emptied``: attributes that the module has computed of the graph, and their empty values.
    """

    opened: Opened = ()
    on_matrix: bool = False
    on_own_edges: bool = False
    is_turned: bool = False
    emptied: dict[str, Any] = field(default_factory=dict)


def convert_module(
    net: Module, data: Data, inputs: Inputs, wanted: dict[str, Any], options: dict[str, Any],
    choices: Choices,
) -> Converted:  # fmt: skip
    """Convert a module in the ways that are chosen.

    Args:
        net: The module.
        data: The graph.
        inputs: The arguments that the graph gives to the module.
        wanted: The defaults of all its parameters.
        options: Options of :class:`gas.ScalableGNN`.
        choices: The ways.

    Raises:
        ValueError: If the module can't be converted in these ways.
    """
    copied, computed = copy_with_noise(net, choices.emptied), set[str]()
    with explain_failures(net):
        graphs, expected, inputs = find_sample_graphs(copied, inputs, data, wanted)
        trained, caches = run_in_training(copied, inputs, graphs, expected)
    draws = partial(find_draws, copied, inputs, graphs[0])
    _check_parameters(net, copied)
    noise = _run_with_noise(copied, inputs, graphs[0], [expected, *trained], choices.opened)
    graph = _trace(copied, inputs, wanted, graphs, choices.opened, caches, computed)
    num_dropped = sum(DROP in node.meta for node in graph.nodes)
    if choices.is_turned:
        turn_ends(graph, record_values(copied, graph, inputs, graphs[:1], (), None)[0])
    if choices.on_own_edges:
        write_normalisation(copied, graph)
    prepared, inputs, graphs = _move_preparation(copied, graph, inputs, graphs)
    matrices = take_matrices(copied, graph, inputs.edges) if choices.on_matrix else {}
    weighted = layers_without_weights(copied, graph) if inputs.by_value else []
    given_edges = "" if inputs.by_value else inputs.edges
    transform, normalised, added = move_normalisation(copied, graph, given_edges, weighted)
    if transform is not None:
        graphs = _normalise_graphs(graphs, transform, prepared, inputs)
    selecting = wrap_selecting_layers(copied, graph, inputs.edges)
    given = [*normalised, *weighted]
    fixed = trained[:1] if num_dropped else trained  # For the first, no edges are dropped.
    run = partial(record_checked, copied, graph, expected, inputs, graphs, transform, fixed, draws)
    outputs, records = run(given)
    train = partial(record, copied, graph, inputs, graphs[0], given)
    _check_noise(type(net).__name__, graph, outputs, train, *noise, len(fixed) + 1)
    counts = [(each.num_nodes, each.num_edges) for each in graphs]
    kinds = find_value_kinds(graph, records, counts)
    source = next(node for node in graph.nodes if node.target == inputs.edges)
    messages = wrap_messages(copied, graph, source, kinds, records[0], counts[0][0])
    products = replace_sums(copied, graph, source, kinds, records[0])
    projected = merge_projections(copied, graph, kinds, records[0])
    added = matrices | selecting | added | messages | (products or {}) | (projected or {})
    if projected is not None or products is not None or messages:
        weighted = layers_without_weights(copied, graph) if inputs.by_value else []
        given = [*normalised, *weighted]
        outputs, records = run(given)
        kinds = find_value_kinds(graph, records, counts)
    check_outputs(outputs, kinds, records[0], counts[0][0], type(net).__name__)
    with eval_mode(copied):
        check_rows(copied, graph, kinds, records, counts[0])
    fuse(copied)
    calls = [
        describe_call(copied, node, kinds, source, normalised, weighted)
        for node in graph.nodes if is_layer(copied, node)
    ]  # fmt: skip
    check_edges(type(net).__name__, source, calls, num_dropped)
    train = partial(record, copied, graph, inputs, graphs[0], given)
    _find_forms(copied, graph, calls, kinds, records[0], graphs[0], train, len(trained))
    return _make_model(
        copied, data, records[0], options,
        Conversion(net, inputs, graph, kinds, calls, given, prepared or transform,
            outputs, opened=choices.opened, added=added, emptied=choices.emptied, computed=computed,
        ),
    )  # fmt: skip


def _normalise_graphs(
    graphs: list[Data], transform: Normalise, prepared: Preparation | None, inputs: Inputs
) -> list[Data]:
    """Apply normalisation to small graphs, and refuse it after another preparation."""
    if prepared is not None:
        raise conflict(prepared, transform)
    transform.fit_to(inputs.is_matrix, inputs.edges)
    return [transform(each) for each in graphs]


def _check_parameters(net: Module, called: Module) -> None:
    """Refuse a module whose copy got parameters when it was called."""
    before = dict(net.named_parameters())
    for name in dict(called.named_parameters()):
        if name not in before:
            raise ValueError(
                f"'{name}' is made when {type(net).__name__} is called first, so that no optimizer "
                "trains it: make it in __init__, or call the module before it is converted"
            )


def _run_with_noise(
    net: Module, inputs: Inputs, data: Data, returned: Sequence[Any], opened: Opened
) -> tuple[dict[Tensor, Tensor], list[list[Any]], str]:  # fmt: skip
    """Return parameters with noise, what a module returns with them, and a parameter it replaces.

    First in evaluation, and then with :data:`NUMBERS` in training, as often as it has ``returned``
    values before.

    Raises:
        ValueError: If it changes a parameter, quoting the line, or reads tensors in a list.
    """
    check_lists(net, inputs, data, returned)
    noisy: dict[Tensor, Tensor] = {
        weight: with_noise(weight.detach()) for weight in net.parameters()
    }
    found, replaced = [], ""
    for number in (None, *NUMBERS)[: len(returned)]:
        mode = eval_mode(net) if number is None else training_mode(net, number)
        gradients = torch.no_grad() if number is None else torch.enable_grad()
        with given_parameters(noisy), mode, keep_attributes(net), gradients:
            with RefuseChanges(net, opened) as changes:
                out = call_module(net, inputs, data)
            replaced = replaced or changes.find_replaced()
            found.append(copy_value(out))
    return noisy, found, replaced


def _check_noise(
    name: str, graph: Graph, outputs: Outputs, run: Callable[[float | None], Values],
    noisy: dict[Tensor, Tensor], returned: Sequence[list[Any]], replaced: str, number_of_runs: int,
) -> None:  # fmt: skip
    """Refuse a module whose graph has numbers of its parameters, which training changes.

    ``run`` runs the graph in evaluation, ``None``, or with a random number in training; and
    ``returned`` is what the module returns with the parameters ``noisy``, in so many runs. Also
    refuse one that has ``replaced`` the values of a parameter.
    """
    if replaced:
        raise changes_error(replaced)
    for number, values in zip((None, *NUMBERS), returned[:number_of_runs], strict=False):
        with given_parameters(noisy):
            found = outputs.values(run(number))
        if not is_close(found, values):
            raise ValueError(
                f"{name} returns other values than its layers do, called one by one, after a step "
                f"of training{describe_constants(graph)}: have the forward of a layer return what "
                "it computes of its parameters, not set an attribute that others read, and read "
                "parameters by their names, self.lin.weight, not by parameters() or item()"
            )


def _find_forms(
    net: Module, graph: Graph, calls: Sequence[LayerCall], kinds: dict[Node, str], values: Values,
    data: Data, train: Callable[[float], Values], num_trained: int,
) -> None:  # fmt: skip
    """Find for each call of a layer the form that is exact on mini-batches, also in training."""
    with eval_mode(net):
        for test in make_layer_tests(calls, kinds, values, data, [OWN]):
            test.call.form = test.find_form()
    for number in NUMBERS[:num_trained]:
        records = [train(number)]
        with training_mode(net, number):
            check_layers(net, graph, calls, kinds, records, data, [OWN], " in training")


def _move_preparation(
    net: Module, graph: Graph, inputs: Inputs, graphs: list[Data]
) -> tuple[Preparation | None, Inputs, list[Data]]:
    """Move what a traced graph computes of a list of edges alone to a transform."""
    prepared = None
    if inputs.is_list:
        records = record_values(net, graph, inputs, graphs, (), None)
        prepared = move_preparation(graph, inputs.edges, records, graphs)
    if prepared is not None:
        graphs = [prepared(each) for each in graphs]
        inputs = replace(inputs, made=prepared.made)
    spread_selected_rows(net, graph)
    return prepared, inputs, graphs


def _trace(
    net: Module, inputs: Inputs, wanted: dict[str, Any], graphs: Sequence[Data], opened: Opened,
    caches: Sequence[str], computed: set[str],
) -> Graph:  # fmt: skip
    """Trace a module's method, and remove unused inputs.

    Raises:
        InexactLayerError: If a layer of the user's own keeps what it computes in its first call.
    """
    for name in caches:
        layer = net.get_submodule("" if ":" in name else name.rpartition(".")[0])
        if isinstance(layer, MessagePassing) and type(layer) not in opened:
            raise InexactLayerError(f"'{name}' is computed in the first call alone", layer)
    given = (*inputs.names, inputs.edges)
    named = ["x" if key == inputs.features else key for key in wanted]
    is_named = not inputs.graph and not inputs.matrix
    order = [key for key in (*named, NODE_ID) if key in given] if is_named else list(given)
    order += [] if inputs.edges in order else [inputs.edges]  # The model is given them anyway.
    known = (*order, inputs.graph, inputs.features, inputs.matrix)
    fixed = {key: default for key, default in wanted.items() if key not in known}
    samples = [inputs.values(each) for each in graphs]
    counts = [int(each.num_nodes or 0) for each in graphs]
    graph = trace(
        net, inputs.method, order, inputs.call, fixed, samples, counts, inputs.edges,
        follow_changes, opened, caches, computed,
    )  # fmt: skip
    attributes = [name for name in inputs.names if is_row_per_edge(graphs[0], name)]
    take_edge_dropout(net, graph, inputs.edges, attributes)
    read_masks(graph)
    skip_copies(graph, inputs.edges)
    replace_products(net, graph, inputs.edges)
    if inputs.is_matrix:
        refuse_methods(graph, inputs.edges)
    if any(map(asks_for_rows, graph.nodes)):
        read_all_rows(graph, record_values(net, graph, inputs, graphs[:1], (), None)[0])
        erase_unused(graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target in inputs.names:
            graph.erase_node(node)
    return graph


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
    shapes = {node: _history_shape(node, values[node], dims[node]) for node in placed.pulled}
    widths = [math.prod(shape) for shape in shapes.values()]
    writer = GraphWriter(
        copied, kinds, placed, calls, made.outputs, dims, shapes, made.transform, made.inputs.edges
    )
    written = writer.write(graph)
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


def _history_shape(node: Node, value: Any, dim: Any) -> Sequence[int]:
    """Return the shape of a row of a value that needs a history.

    Args:
        node: The node of the value, for the error.
        value: The value on a small graph.
        dim: The dimension of its rows.

    Raises:
        ValueError: If it isn't a tensor of floating-point numbers.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"'{node.name}' of {shape} goes to a message passing layer, and a history takes rows "
            "of floating-point numbers, [num_nodes, ...]"
        )
    return value.movedim(dim, 0).shape[1:]
