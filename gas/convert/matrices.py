"""Products with sparse matrices: the adjacency, or those that a module makes of edges."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Proxy
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import coalesce, scatter, to_undirected

from gas.convert.modes import copy_function, replace_functions
from gas.convert.segments import RowPointers, trace_segments
from gas.nn import ProjectedConv, SimpleConv

# The layers that multiply, by the names that they get in a module.
PRODUCTS = {f"_product_{reduce}": reduce for reduce in ("sum", "mean", "min", "max")}
# Those that multiply after a linear layer.
PROJECTED = {f"_projected_{reduce}": reduce for reduce in ("sum", "mean")}
FUNCTIONS = (operator.matmul, torch.matmul, torch.mm, torch.sparse.mm, torch.spmm)
METHODS = ("matmul", "mm", "spmm")
# Functions of torch-sparse that are methods of its matrices, too, and the modules they are in.
_FUNCTIONS = (
    ("diag", "remove_diag"), ("diag", "set_diag"), ("diag", "fill_diag"), ("mul", "mul"),
    ("reduce", "sum"), ("transpose", "t"), ("transpose", "transpose"),
)  # fmt: skip


def add_products(net: Module, graph: Graph) -> None:
    """Give a module the layers that a traced graph multiplies by."""
    for name in dict.fromkeys(str(node.target) for node in graph.nodes):
        if name in PRODUCTS or name in PROJECTED:
            add_product(net, name)


def add_product(net: Module, name: str) -> None:
    """Give a module the layer of a product."""
    is_projected = name in PROJECTED
    layer = ProjectedConv(aggr=PROJECTED[name]) if is_projected else SimpleConv(aggr=PRODUCTS[name])
    setattr(net, name, layer)


def product_name(reduce: str) -> str:
    """Return the name of the layer of a product, by how it reduces."""
    return "_product_" + {"add": "sum", "amin": "min", "amax": "max"}.get(reduce, reduce)


class MatrixError(ValueError):
    """Error of a module that asks for more of the graph's matrix than products."""


def matrix_error(name: str) -> MatrixError:
    """Return the error of a method of the graph's matrix that can't be followed."""
    return MatrixError(
        f"{name!r} of the graph's matrix can't be followed, which multiplies rows of nodes, or is "
        "given to layers: take 'edge_index' for more, of a graph with data.edge_index. Then, "
        "edge_index.flip(0) are the transposed edges, degree(edge_index[1], x.size(0)) the sums of "
        "rows, and gcn_norm(edge_index, num_nodes=x.size(0)) normalises"
    )


def _describe_refusal(name: str) -> str:
    return f"'{name}' of a sparse matrix can't be followed: multiply the matrix by rows of nodes"


class TracedMatrix:
    """A sparse matrix that a module makes while it is traced; products are calls of a layer.

    It stands for a ``torch_sparse.SparseTensor``, or a ``torch.sparse_coo_tensor``.

    Args:
        row: The row of each entry; rows are those of the product.
        col: The column of each entry.
        value: Its value. (default: 1)
        sizes: The numbers of rows and columns. (default: those of what is multiplied)
    """

    def __init__(self, row: Any, col: Any, value: Any = None, sizes: Any = None) -> None:
        self.row, self.col, self.value, self.shape = row, col, value, sizes

    def multiply(self, x: Any, reduce: str = "sum") -> Any:
        """Return the product with rows of nodes, ``[num_columns, ...]``."""
        if isinstance(x, TracedMatrix):
            raise ValueError(
                "the product of two sparse matrices can't be followed: multiply twice, A @ (A @ x)"
            )
        return _call_product(x, reduce, torch.stack([self.col, self.row]), self.value)

    matmul = mm = spmm = __matmul__ = multiply

    def t(self) -> TracedMatrix:
        """Return the transposed matrix."""
        sizes = None if self.shape is None else tuple(self.shape)[::-1]
        return TracedMatrix(self.col, self.row, self.value, sizes)

    @property
    def T(self) -> TracedMatrix:  # noqa: N802 (the name that PyTorch gives it)
        """The transposed matrix."""
        return self.t()

    def transpose(self, first: int, second: int) -> TracedMatrix:
        """Return the transposed matrix, or the matrix itself."""
        return self if first == second else self.t()

    def coo(self) -> tuple[Any, Any, Any]:
        """Return rows, columns and values."""
        return self.row, self.col, self.value

    def csr(self) -> tuple[Any, Any, Any]:
        """Return where the entries of rows begin, which segments are reduced by, and as above."""
        if self.shape is None:
            return self.__getattr__("csr without its sizes")
        return RowPointers(self.row, self.shape[0]), self.col, self.value

    def csc(self) -> tuple[Any, Any, Any]:
        """Return where the entries of columns begin, rows and values."""
        return self.t().csr()

    def set_value(self, value: Any, layout: Any = None) -> TracedMatrix:
        """Return a matrix with other values."""
        return TracedMatrix(self.row, self.col, value, self.shape)

    def has_value(self) -> bool:
        """Return whether the values aren't all 1."""
        return self.value is not None

    def sum(self, dim: int | None = None) -> Any:
        """Return the sums of rows, ``dim=1``, or of columns."""
        if dim is None or self.shape is None:
            return self.__getattr__("sum")
        index, size = (self.row, self.shape[0]) if dim in (1, -1) else (self.col, self.shape[1])
        ones = torch.ones_like(index, dtype=torch.float)  # The type of a SparseTensor's counts.
        return scatter(ones if self.value is None else self.value, index, 0, size, "sum")

    def fill_value(self, fill_value: float, dtype: Any = None) -> TracedMatrix:
        """Return a matrix whose entries are all a number."""
        value = torch.full((self.nnz(),), fill_value, dtype=dtype or torch.float)
        return self.set_value(value)

    def mul(self, other: Any) -> TracedMatrix:
        """Return the product of entries with a column, ``[num_rows, 1]``, or a row."""
        shape: Any = getattr(other.tracer.known.first(other.node), "shape", ())
        if len(shape) != 2 or 1 not in shape:
            return self.__getattr__("mul by other than a column or a row")
        is_column = shape[1] == 1
        scale = other.squeeze(1)[self.row] if is_column else other.squeeze(0)[self.col]
        scaled = scale if self.value is None else scale.to(self.value.dtype) * self.value
        return self.set_value(scaled)

    __mul__ = __rmul__ = mul

    def remove_diag(self, k: int = 0) -> TracedMatrix:
        """Return the matrix without self-loops."""
        if k != 0:
            return self.__getattr__("remove_diag of another diagonal")
        kept = self.row != self.col
        value = None if self.value is None else self.value[kept]
        return TracedMatrix(self.row[kept], self.col[kept], value, self.shape)

    def set_diag(self, values: Any = None, k: int = 0) -> TracedMatrix:
        """Return the matrix with one self-loop for each node, of value 1 or others."""
        rest, nodes = self.remove_diag(k), torch.arange(self.shape[0])
        value = rest.value
        if value is not None:
            loops = torch.ones_like(nodes, dtype=value.dtype) if values is None else values
            value = torch.cat([value, loops])
        row, col = (torch.cat([each, nodes]) for each in (rest.row, rest.col))
        return TracedMatrix(row, col, value, self.shape)

    def fill_diag(self, fill_value: float, k: int = 0) -> TracedMatrix:
        """Return the matrix with one self-loop for each node, of a value."""
        if self.value is None:
            return self.set_diag(k=k)
        return self.set_diag(self.value.new_full((self.shape[0],), fill_value), k)

    def to_symmetric(self, reduce: str = "sum") -> TracedMatrix:
        """Return the sum with the transposed matrix, which has an entry for each pair once."""
        edges = torch.stack([self.row, self.col])
        value, size = self.value, self.shape[0]
        if value is None:
            edges = to_undirected(edges, num_nodes=size)
        else:
            reduce = "add" if reduce == "sum" else reduce
            edges, value = to_undirected(edges, value, size, reduce)
        return TracedMatrix(edges[0], edges[1], value, self.shape)

    def coalesce(self, reduce: str = "sum") -> TracedMatrix:
        """Return the matrix with an entry for each pair once; products add up those of values."""
        if self.value is not None:
            return self if reduce in ("sum", "add") else self.__getattr__(f"coalesce by {reduce}")
        edges = coalesce(torch.stack([self.row, self.col]), num_nodes=self.shape[0])
        return TracedMatrix(edges[0], edges[1], None, self.shape)

    def nnz(self) -> Any:
        """Return the number of entries."""
        return self.row.size(0)

    def sparse_sizes(self) -> Any:
        """Return the numbers of rows and columns."""
        return self.shape

    sizes = sparse_sizes

    @property
    def storage(self) -> SimpleNamespace:
        """Return what a SparseTensor stores."""
        return SimpleNamespace(
            row=lambda: self.row,
            col=lambda: self.col,
            value=lambda: self.value,
            rowptr=lambda: self.csr()[0],
            colptr=lambda: self.csc()[0],
            rowcount=lambda: self.set_value(None).sum(1).long(),
            colcount=lambda: self.set_value(None).sum(0).long(),
        )

    def size(self, dim: int) -> Any:
        """Return the number of rows, or of columns."""
        return self.shape[dim]

    sparse_size = size

    def device(self) -> Any:
        """Return the device, as a SparseTensor does."""
        return self.row.device

    def _itself(self, *args: Any, **kwargs: Any) -> TracedMatrix:
        return self

    fill_cache_ = to = cuda = cpu = to_sparse_csr = to_sparse_coo = _itself
    to_torch_sparse_coo_tensor = to_torch_sparse_csr_tensor = _itself

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_describe_refusal(name))

    def _refuse(self, other: Any) -> Any:
        raise TypeError(_describe_refusal("+, - or [...]"))

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __pow__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in FUNCTIONS and len(args) == 2 and isinstance(args[0], TracedMatrix):
            return args[0].multiply(args[1])
        if function is torch.nn.functional.linear and args[1].node.op != "get_attr":
            out = args[0].multiply(args[1].t())  # The weights are columns of a table, by node.
            return out if args[2] is None else out + args[2]
        if function.__name__ == "_sparse_sum" and len(args) == 2:
            return args[0].sum(args[1])
        raise TypeError(_describe_refusal(function.__name__))


def spread_matrix(layer: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give a layer of PyG the edges and weights of a matrix that a module makes.

    Raises:
        TypeError: If the layer takes no weights, and the matrix has some.
    """
    matrices = [each for each in (*args, *kwargs.values()) if isinstance(each, TracedMatrix)]
    if len(matrices) != 1:
        return args, kwargs
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    (name,) = [key for key, each in bound.arguments.items() if each is matrices[0]]
    matrix = matrices[0]
    if getattr(layer, "normalize", False) and getattr(layer, "add_self_loops", False):
        matrix = matrix.remove_diag()  # Which gcn_norm replaces, and keeps in a list of edges.
    bound.arguments[name] = torch.stack([matrix.col, matrix.row])
    if matrix.value is not None:
        if "edge_weight" not in bound.signature.parameters:
            raise TypeError(
                f"{type(layer).__name__} takes no weights of a matrix: leave them out, such as "
                "adj_t.set_value(None), or give them as edge_attr"
            )
        bound.arguments["edge_weight"] = matrix.value
    return (), dict(bound.arguments)


def _call_product(x: Any, reduce: str, *matrix: Any) -> Any:
    """Call the layer that multiplies by a matrix, or by edges and their weights."""
    tracer = matrix[0].tracer
    name = product_name(reduce)
    add_product(tracer.root, name)
    is_column = x.dim() == 1
    rows = x.unsqueeze(-1) if is_column else x
    out = tracer.create_proxy("call_module", name, (rows, *matrix), {})
    return out.squeeze(-1) if is_column else out


def _make_init(init: Callable[..., None]) -> Callable[..., None]:
    def make(
        self: Any, row: Any = None, rowptr: Any = None, col: Any = None, value: Any = None,
        sparse_sizes: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not any(isinstance(each, Proxy) for each in (row, col)):
            return init(self, row, rowptr, col, value, sparse_sizes, *args, **kwargs)
        self.__class__ = TracedMatrix
        return self.__init__(row, col, value, sparse_sizes)

    return make


def _make_coo(function: Callable[..., Any]) -> Callable[..., Any]:
    def sparse_coo_tensor(indices: Any, values: Any = None, size: Any = None, **kwargs: Any) -> Any:
        if any(isinstance(each, Proxy) for each in tree_leaves((indices, values))):
            return TracedMatrix(indices[0], indices[1], values, size)
        given = [each for each in (values, size) if each is not None]
        return function(indices, *given, **kwargs)

    return sparse_coo_tensor


def _make_product(function: Callable[..., Any], reduce: str) -> Callable[..., Any]:
    def spmm(src: Any, other: Any) -> Any:
        if isinstance(src, TracedMatrix):
            out = src.multiply(other, reduce)
        elif isinstance(src, Proxy):  # The graph's own.
            out = _call_product(other, reduce, src)
        else:
            return function(src, other)
        return (out, None) if reduce in ("min", "max") else out  # Without where it was found.

    return spmm


def _make_method(function: Any) -> Callable[..., Any]:
    """Make a function of torch-sparse that calls the method of a traced matrix."""
    copied, name = copy_function(function), function.__name__

    def call(src: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = isinstance(src, TracedMatrix)
        return (getattr(src, name) if is_traced else functools.partial(copied, src))(
            *args, **kwargs
        )

    return call


@contextmanager
def trace_matrices() -> Iterator[None]:
    """Let a module that is traced make sparse matrices of its edges, and multiply by them.

    And reduce messages by torch-scatter, and by the pointers of a matrix.
    """
    with trace_segments(), ExitStack() as stack:
        coo = _make_coo(torch.sparse_coo_tensor)
        stack.enter_context(mock.patch.object(torch, "sparse_coo_tensor", coo))
        if WITH_TORCH_SPARSE:
            functions = [
                getattr(sys.modules[f"torch_sparse.{module}"], name) for module, name in _FUNCTIONS
            ]
            made = {each.__name__: _make_method(each) for each in functions}
            stack.enter_context(replace_functions(functions, made))
            init = _make_init(SparseTensor.__init__)
            stack.enter_context(mock.patch.object(SparseTensor, "__init__", init))
            module = sys.modules["torch_sparse.matmul"]  # The package has a function of that name.
            for reduce in PRODUCTS.values():
                name = f"spmm_{reduce}"
                product = _make_product(getattr(module, name), reduce)
                stack.enter_context(mock.patch.object(module, name, product))
        yield
