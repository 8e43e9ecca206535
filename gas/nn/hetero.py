"""Joint aggregation of relations of a heterogeneous graph with the same source type."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gas.graph import Adjacency, EdgeType, edge_type_name, layout_of, sort_by_row
from gas.native import MOST_INT32, Matrix, check_range, empty, is_transformed
from gas.native import sparse as kernels
from gas.nn.spmm import HALF, check_features, spmm


def relations(
    edge_index_dict: Mapping[EdgeType, Tensor], num_nodes_dict: Mapping[str, int]
) -> dict[EdgeType, Adjacency]:
    """Make adjacencies of a whole heterogeneous graph for layers in PyG's ``HeteroConv``.

    Relations with the same source type are aggregated by one product: the first layer that sums
    rows computes the sums of all these relations, which the others read. Pass only relations whose
    layers are called. Sums are the same, bit by bit; gradients are added up in another order.
    Models of :func:`gas.to_scalable` do this in their mini-batches already::

        net = gas.fuse(HeteroConv({kind: SAGEConv((-1, -1), 64) for kind in data.edge_types}))
        edges = gas.nn.relations(data.edge_index_dict, data.num_nodes_dict)
        out_dict = net(data.x_dict, edges)

    Args:
        edge_index_dict: The edges of each relation, of shape ``[2, E]``, sources first.
        num_nodes_dict: The number of nodes of each type.

    Raises:
        ValueError: If edges have values, or no number of nodes is given for one of their types.
        IndexError: If an edge names a node that isn't there.
    """
    made: dict[str, dict[EdgeType, Adjacency]] = defaultdict(dict)
    for kind, edges in edge_index_dict.items():
        for end in (kind[0], kind[2]):
            if end not in num_nodes_dict:
                raise ValueError(
                    f"'num_nodes_dict' has no '{end}', where relation {edge_type_name(kind)} "
                    "starts or ends: pass data.num_nodes_dict"
                )
        made[kind[0]][kind] = _make_adjacency(kind, edges, num_nodes_dict)
    together = {
        kind: adj
        for same in made.values()
        for kind, adj in zip(same, share_products(list(same.values())), strict=True)
    }
    return {kind: together[kind] for kind in edge_index_dict}


def _make_adjacency(kind: EdgeType, edges: Any, sizes: Mapping[str, int]) -> Adjacency:
    name = f"edge_index_dict[{edge_type_name(kind)}]"
    layout = layout_of(edges, name)
    if layout.value(edges) is not None:
        raise ValueError(
            f"'{name}' has values, which relations that are multiplied together don't: leave them "
            "out, or make one of gas.nn.Adjacency for each relation"
        )
    row, col = layout.entries(edges)
    check_range(name, row, sizes[kind[2]])
    check_range(name, col, sizes[kind[0]])
    rowptr, order = sort_by_row(row, sizes[kind[2]])
    return Adjacency(rowptr, col[order], None, sizes[kind[0]])


def share_products(adjs: Sequence[Adjacency]) -> Sequence[Adjacency]:
    """Return the same edges without values, for layers that share one product.

    Args:
        adjs: The adjacencies, with the same number of columns.
    """
    if len(adjs) < 2 or sum(adj.num_entries for adj in adjs) > MOST_INT32:  # Pointers are int32.
        return [adj.remove_values() for adj in adjs]
    group, made = _RelationGroup(adjs), [adj.with_value(None) for adj in adjs]
    for number, adj in enumerate(made):
        adj.sums_of = partial(group.sums_of, number)
    return made


class _RelationGroup:
    """Stacked adjacencies of several relations, with a cache of their aggregations."""

    def __init__(self, adjs: Sequence[Adjacency]) -> None:
        self._adjs = [adj.remove_values() for adj in adjs]
        self._stacked: Adjacency | None = None
        # The features, how they are summed, and the sums: one value, which threads can replace.
        self._cache: tuple[weakref.ref[Tensor], tuple[Any, ...], dict[int, Tensor]] | None = None

    def sums_of(self, number: int, x: Tensor, reduce: str) -> Tensor:
        """Return :func:`gas.nn.spmm` by one of the adjacencies."""
        if torch.compiler.is_compiling() or is_transformed(x) or x.is_inference():
            return spmm(self._adjs[number], x, reduce=reduce)  # Such tensors have no version.
        if x.dtype == HALF:  # No kernel computes in float16.
            return spmm(self._adjs[number], x, reduce=reduce)
        how = x._version, torch.is_grad_enabled() and x.requires_grad, reduce
        cache = self._cache
        if cache is not None and cache[0]() is x and cache[1] == how:
            out = cache[2].pop(number, None)  # The caller may change it in place.
            if out is not None:
                return out
        self._cache = cache = None  # Its sums are freed before others are computed.
        sums = dict(enumerate(self._multiply(x, reduce)))
        out = sums.pop(number)
        self._cache = weakref.ref(x), how, sums
        return out

    def _multiply(self, x: Tensor, reduce: str) -> tuple[Tensor, ...]:
        """Multiply all adjacencies, stacked, by rows; return the result of each."""
        if self._stacked is None:
            self._stacked = _stack(self._adjs)
        adj, sizes = self._stacked, [adj.size(0) for adj in self._adjs]
        check_features(adj, x, 2)
        return _Multiply.apply(x, adj.matrix_for(x), sizes, reduce == "mean")


def _stack(adjs: Sequence[Adjacency]) -> Adjacency:
    """Stack the rows of several adjacencies."""
    pointers, first = [adjs[0].rowptr[:1]], 0
    for adj in adjs:
        pointers.append(adj.rowptr[1:] + first)
        first += adj.num_entries
    col = torch.cat([adj.col for adj in adjs])
    return Adjacency.from_valid_csr(torch.cat(pointers), col, None, adjs[0].size(1))


class _Multiply(torch.autograd.Function):
    """Product whose result is split by relation; the backward pass is one product, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Matrix, sizes: list[int], mean: bool
    ) -> tuple[Tensor, ...]:
        ctx.matrix, ctx.sizes, ctx.mean, ctx.num_rows = matrix, sizes, mean, x.size(0)
        out = kernels.multiply(matrix, None, x, None, None, mean, False, None)
        return torch.unsafe_split_with_sizes(out, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by: Sequence[Tensor] = ()
        if ctx.mean:
            degree = ctx.matrix.rowptr.diff().clamp(min=1).to(grads[0].dtype)
            by = degree[:, None].split(ctx.sizes)
        if torch.is_grad_enabled():  # For a second derivative.
            grad = torch.cat([g / b for g, b in zip(grads, by, strict=True)] if by else grads)
        else:
            grad = empty(sum(ctx.sizes), grads[0].size(1), grads[0])
            for g, b, out in zip(grads, by, grad.split(ctx.sizes), strict=ctx.mean):
                torch.div(g, b, out=out)
            if not ctx.mean:
                torch.cat(grads, out=grad)
        back = kernels.multiply(ctx.matrix, None, grad, None, None, False, True, ctx.num_rows)
        return back, None, None, None
