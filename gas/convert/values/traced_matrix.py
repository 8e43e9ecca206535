"""Sparse matrices in a trace: the adjacency, or those that a module makes of edges."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import Module
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import coalesce, scatter, to_undirected

from gas.convert.values.segments import RowPointers
from gas.graph import find_layout
from gas.nn import ProjectedConv, SimpleConv

# The layers that multiply, by the names that they get in a module.
PRODUCTS = {f"_product_{reduce}": reduce for reduce in ("sum", "mean", "min", "max")}
# Those that multiply after a linear layer.
PROJECTED = {f"_projected_{reduce}": reduce for reduce in ("sum", "mean")}
FUNCTIONS = (operator.matmul, torch.matmul, torch.mm, torch.sparse.mm, torch.spmm)
METHODS = ("matmul", "mm", "spmm")


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


def matrix_error(name: str) -> str:
    """Return the error of what can't be followed of a sparse matrix."""
    return (
        f"{name!r} of a sparse matrix can't be followed: multiply the matrix by rows of nodes, or "
        "give it to layers; for more, take 'edge_index', of a graph with data.edge_index: "
        "edge_index.flip(0) are the transposed edges, degree(edge_index[1], x.size(0)) the sums of "
        "rows, and gcn_norm(edge_index, num_nodes=x.size(0)) normalises"
    )


def make_matrix(edges: Tensor, weight: Tensor | None, sizes: tuple[int, int], layout: str) -> Any:
    """Return edges as a matrix of a layout, whose rows are destinations."""
    src, dst = edges
    order = (dst * sizes[1] + src).argsort(stable=True)
    counts = torch.bincount(dst, minlength=sizes[0])
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    value = None if weight is None else weight.view(-1)[order]
    return find_layout(layout).make(rowptr, src[order], value, sizes[1])


class TracedMatrix:
    """A sparse matrix in a trace: the graph's, or one that a module makes of edges.

    It stands for a ``torch_sparse.SparseTensor``; products are calls of a layer.

    Args:
        row: The row of each entry; rows are those of the product.
        col: The column of each entry.
        value: Its value. (default: 1)
        sizes: The numbers of rows and columns. (default: those of what is multiplied)
    """

    kind: type = SparseTensor  # What isinstance says that it is.
    layout_name = "sparse_tensor"

    def __init__(self, row: Any, col: Any, value: Any = None, sizes: Any = None) -> None:
        self.row, self.col, self.value, self.shape = row, col, value, sizes

    def replace(self, row: Any, col: Any, value: Any) -> TracedMatrix:
        """Return a matrix of the same kind and size with other entries."""
        return type(self)(row, col, value, self.shape)

    def edges(self) -> Any:
        """Return the entries as a list of edges, ``[2, num_edges]``, to the rows."""
        return torch.stack([self.col, self.row])

    def add_loops(self, weight: float, dtype: Any) -> TracedMatrix:
        """Return the matrix with the self-loops of a symmetric normalisation, as PyG has them.

        They replace its own, or are added to those of a tensor.

        Args:
            weight: Their weight.
            dtype: The type of weights of a matrix without values.
        """
        filled = self.fill_value(1.0, dtype) if self.value is None else self
        return filled.fill_diag(weight)

    def normalise(self, improved: bool, loops: bool, dtype: Any) -> Any:
        """Return the matrix after the symmetric normalisation of PyG."""
        whole = self.add_loops(2.0 if improved else 1.0, dtype) if loops else self
        args = whole.edges(), whole.value, whole.shape[0], False, False
        _, value = gcn_conv.gcn_norm(*args, dtype=dtype)
        return whole.set_value(value)

    def multiply(self, x: Any, reduce: str = "sum") -> Any:
        """Return the product with rows of nodes, ``[num_columns, ...]``."""
        if isinstance(x, TracedMatrix):
            raise ValueError(
                "the product of two sparse matrices can't be followed: multiply twice, A @ (A @ x)"
            )
        return _call_product(x, reduce, self.edges(), self.value)

    matmul = mm = spmm = __matmul__ = multiply

    def t(self) -> TracedMatrix:
        """Return the transposed matrix."""
        sizes = None if self.shape is None else tuple(self.shape)[::-1]
        return type(self)(self.col, self.row, self.value, sizes)

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
        return self.replace(self.row, self.col, value)

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
        """Return the product of entries with a column, ``[num_rows, 1]``, a row, or a number."""
        if isinstance(other, int | float):
            return self.set_value(self.to_edge_index()[1] * other)
        is_column = other.tracer.known.first(other.node).shape[1] == 1
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
        return self.replace(self.row[kept], self.col[kept], value)

    def set_diag(self, values: Any = None, k: int = 0) -> TracedMatrix:
        """Return the matrix with one self-loop for each node, of value 1 or others."""
        rest, nodes = self.remove_diag(k), torch.arange(self.shape[0], device=self.row.device)
        value = rest.value
        if value is not None:
            loops = torch.ones_like(nodes, dtype=value.dtype) if values is None else values
            value = torch.cat([value, loops])
        row, col = (torch.cat([each, nodes]) for each in (rest.row, rest.col))
        return self.replace(row, col, value)

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
        return self.replace(edges[0], edges[1], value)

    def coalesce(self, reduce: str = "sum") -> TracedMatrix:
        """Return the matrix with an entry for each pair once; products add up those of values."""
        if self.value is not None:
            return self if reduce in ("sum", "add") else self.__getattr__(f"coalesce by {reduce}")
        edges = coalesce(torch.stack([self.row, self.col]), num_nodes=self.shape[0])
        return self.replace(edges[0], edges[1], None)

    def to_edge_index(self) -> Any:
        """Return rows and columns, ``[2, num_entries]``, and values, as PyG does."""
        ones = torch.ones_like(self.row, dtype=torch.float)
        return torch.stack([self.row, self.col]), ones if self.value is None else self.value

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

    def size(self, dim: int | None = None) -> Any:
        """Return the number of rows, or of columns, or both."""
        return self.shape if dim is None else self.shape[dim]

    sparse_size = size

    def device(self) -> Any:
        """Return the device, as a SparseTensor does."""
        return self.row.device

    def _itself(self, *args: Any, **kwargs: Any) -> TracedMatrix:
        return self

    fill_cache_ = clone = detach = to = cuda = cpu = to_sparse_csr = to_sparse_coo = _itself
    to_torch_sparse_coo_tensor = to_torch_sparse_csr_tensor = _itself

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(matrix_error(name))

    def _refuse(self, other: Any) -> Any:
        raise TypeError(matrix_error("+, - or [...]"))

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __pow__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        is_product = function in FUNCTIONS and len(args) >= 2 and given.keys() <= {"reduce"}
        if is_product and isinstance(args[0], TracedMatrix):
            return args[0].multiply(*args[1:], **given)
        if function is torch.nn.functional.linear and args[1].node.op != "get_attr":
            out = args[0].multiply(args[1].t())  # The weights are columns of a table, by node.
            return out if args[2] is None else out + args[2]
        if function.__name__ == "_sparse_sum" and len(args) == 2:
            return args[0].sum(args[1])
        raise TypeError(matrix_error(function.__name__))


class TracedTensor(TracedMatrix):
    """A matrix that stands for a tensor of ``torch.sparse``."""

    kind = Tensor
    layout_name = "csr"
    layout = torch.sparse_csr
    is_sparse_csr = True

    @property
    def device(self) -> Any:
        """Return the device, as a tensor does."""
        return self.row.device

    @property
    def dtype(self) -> Any:
        """Return the type of the values."""
        return torch.float if self.value is None else self.value.dtype

    def dim(self) -> int:
        """Return the number of dimensions."""
        return 2

    def values(self) -> Any:
        """Return the values."""
        return self.to_edge_index()[1]

    def indices(self) -> Any:
        """Return rows and columns, ``[2, num_entries]``."""
        return self.to_edge_index()[0]

    def col_indices(self) -> Any:
        """Return the columns."""
        return self.col

    def crow_indices(self) -> Any:
        """Return where the entries of rows begin."""
        return self.csr()[0]

    def coalesce(self, reduce: str = "sum") -> TracedMatrix:
        """Return the matrix itself: products add up the values of a pair."""
        return self

    def add_loops(self, weight: float, dtype: Any) -> TracedMatrix:
        """See :class:`TracedMatrix`."""
        nodes = torch.arange(self.shape[0], device=self.row.device)
        row, col = (torch.cat([each, nodes]) for each in (self.row, self.col))
        kind = torch.float if dtype is None else dtype
        value = torch.ones_like(self.row, dtype=kind) if self.value is None else self.value
        return self.replace(row, col, torch.cat([value, value.new_full((self.shape[0],), weight)]))


# The class that stands for a matrix of a layout.
TRACED: dict[str, type[TracedMatrix]] = {"csr": TracedTensor, "sparse_tensor": TracedMatrix}


def _call_product(x: Any, reduce: str, *matrix: Any) -> Any:
    """Call the layer that multiplies by a matrix, or by edges and their weights."""
    tracer = matrix[0].tracer
    name = "_product_" + {"add": "sum", "amin": "min", "amax": "max"}.get(reduce, reduce)
    add_product(tracer.root, name)
    is_column = x.dim() == 1
    rows = x.unsqueeze(-1) if is_column else x
    out = tracer.create_proxy("call_module", name, (rows, *matrix), {})
    return out.squeeze(-1) if is_column else out
