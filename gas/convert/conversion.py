"""Conversion of a module: from its trace to a model with histories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.check import (
    Conversion,
    check_edges,
    check_layers,
    describe_layer,
    make_layer_tests,
    make_layers,
)
from gas.convert.model import Converted
from gas.convert.module.changes import RefuseChanges, swap_parameters, with_noise
from gas.convert.module.inputs import (
    Inputs,
    copy_value,
    copy_with_noise,
)
from gas.convert.module.state import (
    CONSTANT,
    NUMBERS,
    eval_mode,
    keep_attributes,
    run_mode,
    training_mode,
)
from gas.convert.rewriting.edge_dropout import take_edge_dropout
from gas.convert.rewriting.layers import (
    LayerCall,
    describe_call,
    wrap_selecting_layers,
)
from gas.convert.rewriting.messages import wrap_messages
from gas.convert.rewriting.normalise import refuse_normalisation, write_normalisation
from gas.convert.rewriting.place import GraphWriter, Placement
from gas.convert.rewriting.prepare import move_preparation
from gas.convert.rewriting.products import merge_projections, replace_sums
from gas.convert.rewriting.rewrite import (
    erase_unused,
    flip_edge_ends,
    is_table_lookup,
    read_masks,
    redirect_in_place_changes,
    replace_full_lookups,
    skip_copies,
    spread_selected_rows,
)
from gas.convert.sample import SAMPLES, find_sample_graphs
from gas.convert.tracing.outputs import (
    Outputs,
    call_module,
    check_outputs,
    find_draws,
    record_checked,
    run_in_training,
)
from gas.convert.tracing.trace import is_layer, trace
from gas.convert.tracing.traced import Traced, describe_constants, row_dims
from gas.convert.values.edge_layers import DROP, InexactLayerError, LayerTypes
from gas.convert.values.failures import attribute_change_error
from gas.convert.values.known import is_close
from gas.convert.values.traced_matrix import add_products
from gas.nn import explain_failures, fuse

OWN = 31  # In-batch nodes of the first mini-batch on which layers are checked.


@dataclass(frozen=True)
class ConversionChoices:
    """Choices in the conversion of a module; the first combination that is exact is taken.

    * ``traced_types``: types of layers that are followed up to ``propagate``.
    * ``is_turned``: whether messages go from ``edge_index[1]`` to ``edge_index[0]``.
    * ``emptied``: attributes that the module has computed of the graph, and their empty values.
    * ``computed``: tensors of the module that it is known to compute with in a trace.
    """

    traced_types: LayerTypes = ()
    is_turned: bool = False
    emptied: dict[str, Any] = field(default_factory=dict)
    computed: frozenset[str] = frozenset()


def convert_module(
    net: Module, data: Data, inputs: Inputs, options: dict[str, Any], choices: ConversionChoices
) -> Converted:
    """Convert a module in the ways that are chosen.

    Raises:
        ValueError: If the module can't be converted in these ways.
    """
    copied, computed = copy_with_noise(net, choices.emptied, choices.computed), set[str]()
    given = inputs
    with explain_failures(net):
        graphs, expected, inputs = find_sample_graphs(copied, inputs, data)
        trained, caches = run_in_training(copied, inputs, graphs, expected)
    draws = partial(find_draws, copied, inputs, graphs[0])
    _check_parameters(net, copied)
    noise = _run_with_noise(copied, inputs, graphs[0], [expected, *trained], choices.traced_types)
    traced = _trace(copied, inputs, graphs, choices.traced_types, caches, computed)
    if not computed <= choices.computed:  # What is computed of them mustn't have noise.
        choices = replace(choices, computed=choices.computed | computed)
        return convert_module(net, data, given, options, choices)
    graph = traced.graph
    num_dropped = sum(DROP in node.meta for node in graph.nodes)
    if choices.is_turned:
        flip_edge_ends(graph, traced.record()[0])
    write_normalisation(traced)
    prepared = move_preparation(traced)
    refuse_normalisation(traced)
    spread_selected_rows(copied, graph, lambda: traced.record()[0])
    wrap_selecting_layers(traced)
    fixed = trained[:1] if num_dropped else trained  # For the first, no edges are dropped.
    outputs = record_checked(traced, expected, fixed, draws)
    _check_noise(traced, outputs, *noise, len(fixed) + 1)
    traced.find_kinds()
    changes = wrap_messages(traced), replace_sums(traced), merge_projections(traced)
    if any(changes):
        outputs = record_checked(traced, expected, fixed, draws)
        traced.find_kinds()
    check_outputs(outputs, traced)
    with eval_mode(copied):
        traced.check_rows()
    fuse(copied)
    calls = [describe_call(traced, node) for node in graph.nodes if is_layer(copied, node)]
    check_edges(traced, calls, num_dropped)
    _find_forms(traced, calls, len(trained))
    made = Conversion(
        replace(traced, net=net), calls, outputs, prepared, choices.traced_types, choices.emptied,
        computed,
    )  # fmt: skip
    return _make_model(copied, data, options, made)


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
    net: Module, inputs: Inputs, data: Data, returned: Sequence[Any], traced_types: LayerTypes
) -> tuple[dict[Tensor, Tensor], list[list[Any]], str]:  # fmt: skip
    """Run a module with noise on its parameters, as often as it was run before (``returned``).

    The first run is in evaluation, the others are in training, with :data:`NUMBERS` as random
    numbers.

    Returns:
        The noisy parameters, the outputs of each run, and the name of a parameter whose values the
        module replaces, or "".

    Raises:
        ValueError: If the module changes a parameter, quoting the line.
    """
    noisy: dict[Tensor, Tensor] = {
        weight: with_noise(weight.detach()) for weight in net.parameters()
    }
    found, replaced = [], ""
    for number in (None, *NUMBERS)[: len(returned)]:
        gradients = torch.no_grad() if number is None else torch.enable_grad()
        with swap_parameters(noisy), run_mode(net, number), keep_attributes(net), gradients:
            with RefuseChanges(net, traced_types) as changes:
                out = call_module(net, inputs, data)
            replaced = replaced or changes.find_replaced()
            found.append(copy_value(out))
    return noisy, found, replaced


def _check_noise(
    traced: Traced, outputs: Outputs, noisy: dict[Tensor, Tensor], returned: Sequence[list[Any]],
    replaced: str, number_of_runs: int,
) -> None:  # fmt: skip
    """Refuse a module whose trace has values of parameters as constants, which training changes.

    The trace is run with the parameters ``noisy``, and its outputs are compared with those of the
    module, ``returned``, for ``number_of_runs`` runs, the first in evaluation. A module that has
    ``replaced`` the values of a parameter is refused, too.
    """
    if replaced:
        raise attribute_change_error(replaced)
    for number, values in zip((None, *NUMBERS), returned[:number_of_runs], strict=False):
        with swap_parameters(noisy):
            found = outputs.values(traced.run(number))
        if not is_close(found, values):
            raise ValueError(
                f"{type(traced.net).__name__} returns other values than its layers do, called one "
                f"by one, after a step of training{describe_constants(traced.graph)}: have the "
                "forward of a layer return what it computes of its parameters, not set an "
                "attribute that others read, and read parameters by their names, "
                "self.lin.weight, not by parameters() or item()"
            )


def _find_forms(traced: Traced, calls: Sequence[LayerCall], num_trained: int) -> None:
    """Find for each call of a layer the form that is exact on mini-batches, also in training."""
    with eval_mode(traced.net):
        for test in make_layer_tests(traced, calls, [OWN]):
            test.call.form = test.find_form()
    for number in NUMBERS[:num_trained]:
        trained = replace(traced, records=[traced.run(number)])
        with training_mode(traced.net, number):
            check_layers(trained, calls, [OWN], " in training")


def _trace(
    net: Module, inputs: Inputs, graphs: list[Data], traced_types: LayerTypes,
    caches: Sequence[str], computed: set[str],
) -> Traced:  # fmt: skip
    """Trace a module's method, and remove unused inputs.

    Raises:
        InexactLayerError: If a layer of the user's own keeps what it computes in its first call.
    """
    for name in caches:
        layer = net.get_submodule("" if ":" in name else name.rpartition(".")[0])
        if isinstance(layer, MessagePassing) and type(layer) not in traced_types:
            raise InexactLayerError(f"'{name}' is computed in the first call alone", layer)
    graph = trace(net, inputs, graphs, redirect_in_place_changes, traced_types, caches, computed)
    traced = Traced(net, graph, inputs, graphs)
    take_edge_dropout(traced)
    read_masks(graph)
    skip_copies(graph, traced.edges)
    add_products(net, graph)
    if any(map(is_table_lookup, graph.nodes)):
        replace_full_lookups(graph, traced.record()[0])
        erase_unused(graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.target in inputs.names:
            graph.erase_node(node)
    return traced


def _make_model(copied: Module, data: Data, options: dict[str, Any], made: Conversion) -> Converted:
    """Place the histories, and make the model of the module's own parameters.

    ``copied`` is the copy of the module that was traced.
    """
    traced = replace(made.traced, net=copied)
    graph, values = traced.graph, traced.values
    placed = Placement(traced, made.calls)
    dims = {node: row_dims(value, SAMPLES[0][0]) for node, value in values.items()}
    shapes = {node: _history_shape(node, values[node], dims[node]) for node in placed.pulled}
    widths = [math.prod(shape) for shape in shapes.values()]
    writer = GraphWriter(traced, placed, made.calls, made.outputs, dims, shapes, made.transform)
    written = writer.write()
    drawing = _describe_layers(graph, placed, made.calls, widths)
    constants = {key: value for key, value in vars(copied).items() if key.startswith(CONSTANT)}
    layers = make_layers(made.net, graph, constants, made.traced_types, traced.added)
    numbers = {
        node: value if isinstance(value, bool | float | str) else None
        for node, value in values.items()
    }
    made = replace(
        made,
        traced=replace(made.traced, records=[numbers]),
        calls=[replace(call, layer=layers.get_submodule(call.name)) for call in made.calls],
        constants=constants,
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
