"""Functions of sparse matrices, which are followed in a trace."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
import torch_geometric.nn as pyg
import torch_geometric.utils as pyg_utils
from torch import Tensor
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from gas.convert.values.known import is_close, walk_back
from gas.convert.values.modes import TRAINING, copy_function, make_leaf, replace_functions
from gas.convert.values.segments import trace_segments
from gas.convert.values.traced_matrix import PRODUCTS, TracedMatrix, TracedTensor, make_matrix
from gas.graph import WEIGHT
from gas.scalable import preserve_modes

# Layers that normalise by themselves, if ``normalize`` is true.
NORMALISING = (pyg.GCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.FAConv, pyg.DNAConv)
LOOPS = "has_loops"  # What a layer's node notes: its edges have the self-loops that it adds.
# Functions of torch-sparse that are methods of its matrices, too, and the modules they are in.
_FUNCTIONS = (
    ("diag", "remove_diag"), ("diag", "set_diag"), ("diag", "fill_diag"), ("mul", "mul"),
    ("reduce", "sum"), ("transpose", "t"), ("transpose", "transpose"),
)  # fmt: skip
# Those of PyG, and the methods that they call.
_OF_PYG: dict[Any, str] = {pyg_utils.spmm: "multiply", pyg_utils.to_edge_index: "to_edge_index"}


def normalises(layer: Any) -> bool:
    """Return whether a layer normalises by itself, and takes normalised weights instead."""
    if not isinstance(layer, NORMALISING) or not layer.normalize:
        return False
    names = inspect.signature(layer.forward).parameters
    return {"x", "edge_index", WEIGHT} <= names.keys()


def spread_matrix(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool] | None:
    """Return a layer's arguments with a list of edges and weights in place of a matrix.

    And whether the edges have the self-loops that the layer adds, which depends on the matrix.
    ``None`` if the layer takes no weights, and may read the values of the matrix.
    """
    matrices = [each for each in (*args, *kwargs.values()) if isinstance(each, TracedMatrix)]
    if len(matrices) != 1:
        return args, kwargs, False
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    (name,) = [key for key, each in bound.arguments.items() if each is matrices[0]]
    matrix, takes_weights = matrices[0], WEIGHT in bound.signature.parameters
    has_loops = normalises(layer) and getattr(layer, "add_self_loops", False)
    if has_loops:
        dtype = bound.arguments["x"].dtype
        matrix = matrix.add_loops(2.0 if getattr(layer, "improved", False) else 1.0, dtype)
    bound.arguments[name] = matrix.edges()
    if takes_weights and matrix.value is not None:
        bound.arguments[WEIGHT] = matrix.value
    elif matrix.value is not None and _reads_values(layer, bound.arguments, name, matrix):
        return None
    return (), dict(bound.arguments), has_loops


def _reads_values(layer: Any, given: dict[str, Any], name: str, matrix: TracedMatrix) -> bool:
    """Return whether a layer's result on a small graph depends on the values of its matrix.

    In the arguments that are ``given``, a list of edges, ``name``, is in place of the matrix.
    """
    known = matrix.row.tracer.known

    def value_of(proxy: Any) -> Any:
        return known.first(proxy.node) if issubclass(type(proxy), Proxy) else proxy

    values = tree_map(value_of, given)
    known.is_evaluating = True
    try:
        weight, size = value_of(matrix.value), value_of(matrix.shape)
        sizes = tuple(map(value_of, size))
        with preserve_modes(layer, False), torch.no_grad():
            whole = make_matrix(values[name], weight, cast(Any, sizes), matrix.layout_name)
            found = layer(**{**values, name: whole})
            return not is_close(found, layer(**values))
    except Exception:  # A layer may raise anything for edges in another form.
        return True
    finally:
        known.is_evaluating = False


@make_leaf
def gcn_norm(edge_index: Any, *args: Any) -> Any:
    """Compute the edges and weights of a symmetric normalisation, as PyG's function does."""
    return gcn_conv.gcn_norm(edge_index, *args)


def _has_rows(weight: Any) -> bool:
    """Return whether weights are computed of rows of nodes, or of parameters."""
    if not isinstance(weight, Proxy):
        return False
    known = cast(Any, weight.tracer).known
    return any(
        node.op in ("get_attr", "call_module")
        or (node.op == "placeholder" and node.target != TRAINING and known.has_row_per_node(node))
        for node in walk_back(weight.node)
    )


def _make_normalisation(function: Any) -> Callable[..., Any]:
    """Make ``gcn_norm`` of edges, or of a matrix, that are traced.

    Of weights that are computed of rows of nodes, it is followed.
    """
    copied = copy_function(function)

    def normalise(
        edge_index: Any, edge_weight: Any = None, num_nodes: Any = None, improved: bool = False,
        add_self_loops: bool = True, flow: str = "source_to_target", dtype: Any = None,
    ) -> Any:  # fmt: skip
        if isinstance(edge_index, TracedMatrix):
            made = edge_index.normalise(improved, add_self_loops, dtype)
            return (made, None) if edge_index.kind is Tensor else made
        args = edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype
        is_traced = isinstance(edge_index, Proxy) and not _has_rows(edge_weight)
        return (gcn_norm if is_traced else copied)(*args)

    return normalise


def _wrap_sparse_tensor_init(init: Callable[..., None]) -> Callable[..., None]:
    """Make ``SparseTensor(row=..., col=...)`` of traced indices a :class:`TracedMatrix`."""

    def traced_init(
        self: Any, row: Any = None, rowptr: Any = None, col: Any = None, value: Any = None,
        sparse_sizes: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not any(isinstance(each, Proxy) for each in (row, col)):
            return init(self, row, rowptr, col, value, sparse_sizes, *args, **kwargs)
        self.__class__ = TracedMatrix
        return self.__init__(row, col, value, sparse_sizes)

    return traced_init


def _make_coo(function: Callable[..., Any]) -> Callable[..., Any]:
    def sparse_coo_tensor(indices: Any, values: Any = None, size: Any = None, **kwargs: Any) -> Any:
        if any(isinstance(each, Proxy) for each in tree_leaves((indices, values))):
            return TracedTensor(indices[0], indices[1], values, size)
        given = [each for each in (values, size) if each is not None]
        return function(indices, *given, **kwargs)

    return sparse_coo_tensor


def _make_traceable_spmm(function: Callable[..., Any], reduce: str) -> Callable[..., Any]:
    """Return a replacement of a ``spmm`` of torch-sparse that also takes traced matrices."""

    def spmm(src: Any, other: Any) -> Any:
        if not isinstance(src, TracedMatrix):
            return function(src, other)
        out = src.multiply(other, reduce)
        return (out, None) if reduce in ("min", "max") else out  # Without where it was found.

    return spmm


def _make_method(function: Any, name: str = "") -> Callable[..., Any]:
    """Make a function that calls the method of a traced matrix, by default of its own name."""
    copied, name = copy_function(function), name or function.__name__

    def call(src: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(src, TracedMatrix):
            return getattr(src, name)(*args, **kwargs)
        return copied(src, *args, **kwargs)

    return call


@contextmanager
def trace_matrices() -> Iterator[None]:
    """Let a module that is traced make sparse matrices of its edges, and multiply by them.

    And reduce messages by torch-scatter, and by the pointers of a matrix.
    """
    with trace_segments(), ExitStack() as stack:
        coo = _make_coo(torch.sparse_coo_tensor)
        stack.enter_context(mock.patch.object(torch, "sparse_coo_tensor", coo))
        of_pyg = {each: _make_method(each, method) for each, method in _OF_PYG.items()}
        of_pyg[gcn_conv.gcn_norm] = _make_normalisation(gcn_conv.gcn_norm)
        stack.enter_context(replace_functions(of_pyg))
        if WITH_TORCH_SPARSE:
            functions = [
                getattr(sys.modules[f"torch_sparse.{module}"], name) for module, name in _FUNCTIONS
            ]
            stack.enter_context(replace_functions({each: _make_method(each) for each in functions}))
            init = _wrap_sparse_tensor_init(SparseTensor.__init__)
            stack.enter_context(mock.patch.object(SparseTensor, "__init__", init))
            module = sys.modules["torch_sparse.matmul"]  # The package has a function of that name.
            for reduce in PRODUCTS.values():
                name = f"spmm_{reduce}"
                product = _make_traceable_spmm(getattr(module, name), reduce)
                stack.enter_context(mock.patch.object(module, name, product))
        yield
