"""A model whose layers are those of an ordinary module, with histories in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn.inits import reset

from gas.convert.check import Conversion
from gas.convert.module.followed import check_hooks, find_followed
from gas.convert.module.preparation import (
    Preparation,
    check_unprepared,
    is_gcn_normalised,
    is_weighted,
)
from gas.convert.module.state import CONSTANT
from gas.convert.module.wrappers import EncoderWrapper
from gas.convert.rewriting.place import multiplies_sparse, reads_in_place
from gas.convert.rewriting.rewrite import (
    drop_in_one_pass,
    dropout_rates,
    find_own_norms,
    find_relu_dropouts,
)
from gas.convert.tracing.scope import LayerScope, pull, read_history
from gas.convert.values.failures import new_error
from gas.convert.values.known import walk_back
from gas.convert.values.modes import TRAINING
from gas.graph import PREPARED, WEIGHT, Adjacency, find_original_graph
from gas.history import Features, Rows, first_rows
from gas.loader import SubData
from gas.nn import ProjectedConv, has_hooks
from gas.scalable import ScalableGNN, adjacency, attributes, compute_dtype, preserve_modes

UNPREPARED = (
    "the graph lacks what this model's layers compute of all edges: cut it by "
    "gas.cluster(data, num_parts, model=model), or give model.prepare(data); where batches have "
    "views of an augmentation, load with graph_transform=model.transform"
)


class Converted(ScalableGNN):
    """Model that :func:`to_scalable` returns: a module's layers, with histories in between.

    ``net`` has the layers, under the names that they have in the module.
    """

    _is_static = True
    _is_layer = False
    _followed: Sequence[Callable[[], None]] = ()
    _lacked: Collection[str] = ()  # Attributes of edges that are refused: see Conversion.
    _keywords: Collection[str] | None = None  # Of a call. (Older pickles have none of these.)
    _takes_weights = True
    _mark, _is_gcn_norm = "", False  # Of the transform: see Preparation.

    def __init__(
        self,
        net: Module,
        graph: Graph,
        num_nodes: int,
        widths: Sequence[int],
        drawing: Sequence[str],
        options: dict[str, Any],
        conversion: Conversion,
    ) -> None:
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        added = [make.keywords.get("target") for make in conversion.traced.added.values()]
        check_hooks(conversion.net, [*called, *filter(None, added)])
        super().__init__(num_nodes, list(widths), len(widths) + 1, **options)
        self._name = type(conversion.net).__name__
        self._is_layer = isinstance(conversion.net, EncoderWrapper)
        made = GraphModule(net, graph, self._name)
        constants = {n: b for n, b in made._buffers.items() if n not in net._buffers}
        # All submodules, in the original order, also those that the graph doesn't call.
        made.__dict__.update(_parameters=net._parameters, _modules=dict(net._modules))
        made.__dict__["_buffers"] = dict(net._buffers)
        for key, value in constants.items():
            made.register_buffer(key, value, persistent=False)
        self.net = made
        self._link_layers()
        self._stages: list[GraphModule] | None = None
        self._pulls: list[Node] | None = None
        self._one_pass: tuple[dict[Node, float], GraphModule] | None = None
        self.training = made.training = net.training
        self._unlike = {mode: _find_unlike(conversion.net, mode) for mode in (True, False)}
        self.transform = conversion.inputs.before(conversion.transform)
        self._outputs = conversion.outputs.without_nodes()
        self._returns_rows = conversion.outputs.is_single
        _, *self._inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self._takes_weights = WEIGHT in (*conversion.inputs.names, *conversion.inputs.made)
        self._keywords = {*self._inputs, *([WEIGHT] * self._takes_weights)} - {"x", TRAINING}
        self._drawing = list(drawing)
        self._conversion: Conversion | None = conversion
        unknown = {*conversion.inputs.keeps, *conversion.emptied}  # What calls set is theirs.
        self._known = (*self._inputs, *conversion.inputs.made)
        lacked = conversion.find_missing_attributes()
        self._lacked = lacked - {*conversion.inputs.made}
        transform = conversion.transform
        if isinstance(transform, Preparation):
            self._mark, self._is_gcn_norm = transform.needed_mark, transform.is_gcn_norm
            transform.refuse_weights(self._name if WEIGHT in lacked else "")
        self._followed = find_followed(conversion.net, made, unknown, conversion.computed)

    def train(self, mode: bool = True) -> Converted:
        """Set training or evaluation mode, in layers as the module's own ``train`` does."""
        super().train(mode)
        if self._conversion is not None:  # It may have changed its mind.
            self._unlike[mode] = _find_unlike(self._conversion.net, mode)
        for name, module in self.net.named_modules():
            module.training = mode != (name in self._unlike[mode])
        return self

    def _apply(self, fn: Any, *args: Any) -> Converted:
        self._outputs = self._outputs.apply(fn)
        own = {} if self._conversion is None else self._conversion.net._buffers
        shared = [key for key, value in own.items() if value is self.net._buffers.get(key)]
        super()._apply(fn, *args)
        own.update({key: self.net._buffers[key] for key in shared})  # As parameters are.
        return self

    @property
    def _checkpoint_module(self) -> Module:
        """Return the layers; their weights have the names of the original module."""
        return self.net.get_submodule("encoder" if self._is_layer else "")

    def check_on_sample(self, data: Data) -> None:
        """Check the layers on some nodes of a graph, as on the small random graph.

        :func:`gas.cluster` calls it. Copies of the model, and models whose layers were replaced,
        have no reference to the original module, and check nothing.

        Args:
            data: The graph, before :attr:`transform`.

        Raises:
            ValueError: If the model isn't exact on it, naming the layer.
        """
        if (conversion := self._find_conversion()) is not None:
            conversion.check_on(data)

    def run_module(self, graph: Data) -> Tensor | None:
        """Run the original module on a whole graph.

        Args:
            graph: A graph that :func:`gas.cluster` has returned. The module is run on the original
                graph, in its layout.

        Returns:
            The rows in the order of ``graph``; ``None`` without a reference to the module (see
            :meth:`check_on_sample`) or the original graph, or if the module fails.
        """
        made = self._find_conversion()
        data = None if made is None else find_original_graph(graph, made.inputs.given)
        if made is None or data is None:
            return None
        try:
            out = made.inputs.run_in_layout(made.net, made.inputs.lists(data).to(self.device))
        except Exception:  # A module may raise anything; verify then takes another reference.
            return None
        rows = self._join_outputs(out)
        return rows[graph.perm.to(rows.device)]

    def _find_conversion(self) -> Conversion | None:
        """Return the conversion, if the model's parameters are still those of the module."""
        if self._conversion is None:
            return None
        mine, modules = (
            {id(p) for p in net.parameters()} for net in (self.net, self._conversion.net)
        )
        return self._conversion if mine == modules else None

    def inputs_of(self, data: Data) -> tuple[Tensor, Any, dict[str, Any]]:
        """See :meth:`gas.ScalableGNN.inputs_of`."""
        known = attributes(data)
        x = known["x"] if "x" in known else cast(Any, data.x)
        return x, adjacency(data), self._other_inputs(data)

    def _other_inputs(self, data: Data) -> dict[str, Any]:
        """Return the inputs that aren't features."""
        known = attributes(data)
        check_unprepared(known, self._known)
        if self._mark and self._mark not in known and not self._is_normalised(data):
            raise ValueError(UNPREPARED)
        for name in self._lacked:
            if name == WEIGHT and is_weighted(known.get("adj_t"), known.get(WEIGHT)):
                raise new_error(self._name, name)
            if name != WEIGHT and name in known:
                raise new_error(self._name, name)
        names = {*self._inputs, *([WEIGHT] if self._takes_weights else [])} - {"x"}
        names -= {WEIGHT} if "adj_t" in known else set()
        return {name: data[name] for name in names if name in known}

    def _is_normalised(self, data: Data) -> bool:
        """Return whether a batch of a graph without a mark is one of ``T.GCNNorm()``'s.

        Only that of a graph without weights is known, where the model needs the same.
        """
        weight = attributes(data).get("edge_weight")
        return self._is_gcn_norm and is_gcn_normalised(adjacency(data), weight)

    def _forward_inputs(self, batch: SubData) -> tuple[Tensor | Features, Any, dict[str, Any]]:
        adj_t = adjacency(batch.data)
        is_narrow = isinstance(adj_t, Adjacency) and adj_t.size(0) == batch.batch_size
        is_private = not has_hooks(self) and not has_hooks(self.net)
        if is_narrow and is_private and reads_in_place(self.net, self._x):
            return batch.features(), adj_t, self._other_inputs(batch.data)
        return super()._forward_inputs(batch)

    @property
    def _x(self) -> Node | None:
        """Return the features in the graph of the layers."""
        return next((node for node in self.net.graph.nodes if node.target == "x"), None)

    @property
    def _supports_sparse_features(self) -> bool:
        return multiplies_sparse(self.net, self._x)

    def _split_outputs(self, rows: Tensor) -> Any:
        return self._outputs.split(rows)

    def _join_outputs(self, out: Any) -> Tensor:
        return self._outputs.join(out)

    def predict(self, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`gas.ScalableGNN.predict`; the outputs are nested as the module's are."""
        out = super().predict(graph, *args, **kwargs)
        return self._outputs.split(out) if isinstance(out, Tensor) else out

    def forward(
        self, x: Tensor, adj_t: Any, batch_size: int | None = None, *where: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the outputs of the in-batch nodes, or of all; see :class:`gas.ScalableGNN`."""

        def push_and_pull(position: int, h: Tensor, rows: bool) -> Tensor | Rows:
            history = self.histories[position]
            return self.push_and_pull(history, h, batch_size, *where, rows=rows)

        given = {name for name, value in kwargs.items() if value is not None}
        known = given if self._keywords is None else self._keywords
        if unknown := given - {*known}:
            names = sorted(n for n in known if not n.startswith(PREPARED)) or ["none"]
            raise ValueError(
                f"{min(unknown)!r} is given, which the model doesn't take: it takes "
                f"{', '.join(names)}, and has the values of other parameters that it was converted "
                "with"
            )
        scope = LayerScope(adj_t, kwargs.get("edge_weight"), batch_size, push_and_pull)
        return self._net_of(scope)(scope, *self._input_values(x, kwargs))

    def _own_norms(self) -> Iterable[Module]:
        return find_own_norms(self.net) if isinstance(self.net, GraphModule) else ()

    def _net_of(self, scope: LayerScope) -> GraphModule:
        """Return the layers, with ReLU and dropout between them in one pass where they can be.

        Only ``push_and_pull`` sees the rows before dropout, and returns them as they are.
        """
        net = self.net
        is_compiled = torch.compiler.is_compiling() or getattr(net, "_compiled_call_impl", None)
        if not self.training or is_compiled or not isinstance(net, GraphModule):
            return net
        if self._pulls is None:
            self._pulls = find_relu_dropouts(net)
        rates = dropout_rates(net, self._pulls)
        if (
            not rates
            or has_hooks(net)
            or not (scope.batch_size is None or scope.supports_rows)
            or getattr(self.push_and_pull, "__func__", None) is not ScalableGNN.push_and_pull
        ):
            return net
        if self._one_pass is None or self._one_pass[0] != rates:
            self._one_pass = rates, _with_graph(net, drop_in_one_pass(net, rates))
        return self._one_pass[1]

    def _input_values(self, x: Tensor, given: dict[str, Any]) -> list[Any]:
        """Return the inputs of the graph."""
        if not torch.compiler.is_compiling():
            for follow in self._followed:
                follow()
        given = {**given, "x": x, TRAINING: self.training}
        missing = [name for name in self._inputs if name not in given]
        if missing and missing[0].startswith(PREPARED):
            raise ValueError(UNPREPARED)
        if missing:
            raise ValueError(
                f"{missing[0]!r} is missing, with which the model was converted: call "
                f"model(batch), or pass {missing[0]}=batch.{missing[0]}"
            )
        return [given[name] for name in self._inputs]

    def forward_layer(self, layer: int, x: Tensor, adj_t: Any, state: dict[str, Any]) -> Tensor:
        """Compute one layer; see :meth:`gas.ScalableGNN.forward_layer`.

        Values of earlier layers are read from histories, or computed again.
        """
        if self._stages is None:
            self._stages = _make_stages(self.net)
        batch = state["batch"]
        features, _, given = self.inputs_of(batch.data)

        def read_history(position: int, own: bool) -> Tensor:
            if position == layer - 1:
                return first_rows(x, batch.batch_size) if own else x
            ids = batch.n_id[: batch.batch_size] if own else batch.n_id
            return self.histories[position].pull(ids).to(x.device, compute_dtype(self, features))

        weight = given.get("edge_weight")
        scope = LayerScope(adj_t, weight, batch.batch_size, read_history=read_history)
        return self._stages[layer](scope, *self._input_values(features, given))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        known = [name for name in self.net._buffers if name.startswith(CONSTANT)]
        self.net._non_persistent_buffers_set.update(known)
        self._link_layers()

    def _link_layers(self) -> None:
        """Let layers find their linear layers in ``net``, where these may be replaced."""
        for layer in self.net.modules():
            if isinstance(layer, ProjectedConv):
                object.__setattr__(layer, "net", self.net)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are made again from that of ``net``; a copy has other parameters than the module.
        made = dict.fromkeys(("_stages", "_pulls", "_one_pass", "_conversion"))
        return {**super().__getstate__(), **made, "_followed": ()}

    def reset_parameters(self) -> None:
        """Draw new weights, also of the original module, and clear the histories."""
        super().reset_parameters()
        for child in self.net.children():
            reset(child)

    def __repr__(self) -> str:
        after = "" if self.transform is None else f", of a graph after {self.transform}"
        number = len(self.histories)
        histories = "1 history" if number == 1 else f"{number} histories"
        head = f"{self._name}: {histories} of {self.num_nodes} nodes{after}"
        return "\n  ".join([head, *self._drawing])


def _find_unlike(net: Module, mode: bool) -> list[str]:
    """Return the names of the parts that a module's ``train`` keeps in the other mode."""
    with preserve_modes(net, mode):
        return [name for name, each in net.named_modules() if name and each.training != mode]


def _make_stages(net: GraphModule) -> list[GraphModule]:
    """Make the graphs that compute each history, and the output, from features and earlier ones.

    The stages have the inputs, modules and parameters of ``net``.
    """
    pulls = {node.args[1]: node for node in net.graph.nodes if node.target is pull}
    (output,) = [node for node in net.graph.nodes if node.op == "output"]
    targets = [pulls[position].args[2] for position in range(len(pulls))] + [output.args[0]]
    stages = []
    for layer, target in enumerate(targets):
        known = {position: pulls[position] for position in range(layer)}
        stages.append(_with_graph(net, _make_stage(net.graph, target, known)))
    return stages


def _with_graph(net: GraphModule, graph: Graph) -> GraphModule:
    """Return a module of a graph that shares the modules, parameters and buffers of another."""
    made = GraphModule(net, graph)
    for shared in ("_modules", "_parameters", "_buffers"):
        made.__dict__[shared] = net.__dict__[shared]
    return made


def _make_stage(graph: Graph, target: Node, known: dict[int, Node]) -> Graph:
    """Make the graph of one stage, which reads rows of earlier histories."""
    reads: dict[Any, tuple[int, bool]] = {}
    for position, node in known.items():
        reads[node], reads[node.args[2]] = (position, False), (position, True)
    needed = walk_back(target, reads.__contains__)
    out = Graph()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = out.node_copy(node)
        elif node in reads and node in needed:
            scope = made[next(iter(graph.nodes))]
            made[node] = out.call_function(read_history, (scope, *reads[node]))
        elif node in needed:
            made[node] = out.node_copy(node, made.__getitem__)
    out.output(map_arg(target, made.__getitem__))
    out.lint()
    return out
