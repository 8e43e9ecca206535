"""Values of a traced graph that follow from the edges alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from gas.convert.tracing.traced import Traced, is_selection
from gas.convert.values.known import has_tensor, is_about_shape, is_edge_list, walk_back
from gas.convert.values.matrices import gcn_norm


def has_rows(value: Any, size: int) -> bool:
    """Return whether a value has a number of rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == size


class EdgeValues:
    """Values of a traced graph that follow from the edges alone.

    Selected edges, ``edge_index[:, mask]``, stay with the module if it ``keeps_selections``.
    """

    def __init__(self, traced: Traced, keeps_selections: bool) -> None:
        graph = self.graph = traced.graph
        self.records, self.counts, self.edges = traced.records, traced.counts, traced.edges
        self.inputs: list[Node] = []  # Attributes of edges.
        found: set[Node] = set()  # What follows from the edges.
        sized: set[Node] = set()  # What follows from the number of nodes, such as zeros.
        for node in graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "placeholder":
                value = self.records[0][node]
                if node is self.edges or has_rows(value, self.counts[0][1]):
                    self.inputs.append(node)
                    found.add(node)
            elif node.op not in ("call_function", "call_method") or not all(
                each in found or each in sized or self.is_plain(each) or self.is_count(each)
                for each in inputs
            ):
                continue
            elif found.isdisjoint(inputs):
                sized.add(node)
            else:
                found.add(node)
        self.found = found
        needed = {each for node in found for each in node.all_input_nodes if each in sized}
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(each for each in node.all_input_nodes if each in sized)
        self.inside = [
            node for node in graph.nodes
            if node in needed or (node in found and node.op != "placeholder")
        ]  # fmt: skip
        # Move what needs the whole graph. Values of single edges stay, such as their ends.
        self.moved: set[Node] = set()
        self._kept_sizes = {tuple(edges for _, edges in self.counts)}
        for node in self.inside:
            inputs = node.all_input_nodes
            is_kept = keeps_selections and self.moved.isdisjoint(inputs) and node in found
            if is_kept and is_selection(node, self.records[0]):
                self._kept_sizes.update(self._sizes(node))
            if node in found and (
                node.target is gcn_norm
                or not self._is_like_edges(node)
                or self._is_other_list(node)
                or self._is_edge_weight(node)
                or (not self.moved.isdisjoint(inputs) and not self._is_selected(node))
            ):
                self.moved.add(node)
        self.read = [
            node for node in self.inside
            if node in self.moved
            and any(user not in self.moved for user in node.users) and not self.is_plain(node)
        ]  # fmt: skip

    def is_plain(self, node: Node) -> bool:
        """Return whether a value is a number that follows from shapes, whatever the graph."""
        if node.op == "placeholder":
            return False  # Whether it is training.
        first, *rest = (record[node] for record in self.records)
        if has_tensor(first) or any(other != first for other in rest):
            return False
        return all(
            is_about_shape(node)
            if has_tensor(self.records[0][each])
            else self.is_plain(each) or self.is_count(each)
            for each in node.all_input_nodes
        )

    def is_count(self, node: Node) -> bool:
        """Return whether a value is the number of nodes."""
        values = [record[node] for record in self.records]
        return all(
            type(value) is int and value == counts[0]
            for value, counts in zip(values, self.counts, strict=True)
        )

    @property
    def keeps_nothing(self) -> bool:
        """Return whether no selection of edges stays with the module."""
        return len(self._kept_sizes) == 1

    @property
    def changes_selections(self) -> bool:
        """Return whether edges are selected and then changed, such as turned round."""
        return any(self._is_selected(node) and self._is_changed(node) for node in self.inside)

    def _is_changed(self, node: Node) -> bool:
        """Return whether a value is a list of edges with some that the given list doesn't have."""
        value, edges = (self.records[0][each] for each in (node, self.edges))
        size = self.counts[0][0]
        if not self._is_list(value) or value.size(1) == edges.size(1):
            return False
        ids, given = (each[0] * size + each[1] for each in (value, edges))
        return not bool(torch.isin(ids, given).all())

    def _is_list(self, value: Any) -> bool:
        """Return whether a value may be a list of edges."""
        size = self.counts[0][0]
        return is_edge_list(value) and bool(((value >= 0) & (value < size)).all())

    def _is_selected(self, node: Node) -> bool:
        """Return whether a value has rows of selected edges, which stay with the module."""
        edges = tuple(edges for _, edges in self.counts)
        return any(found in self._kept_sizes and found != edges for found in self._sizes(node))

    def _sizes(self, node: Node) -> list[tuple[int, ...]]:
        per_graph = [
            [size for leaf in tree_leaves(record[node]) if isinstance(leaf, Tensor)
             for size in leaf.shape]
            for record in self.records
        ]  # fmt: skip
        return list(zip(*per_graph, strict=True))

    def _is_edge_weight(self, node: Node) -> bool:
        """Return whether a node of the trace is a weight of edges that forward computes.

        Such are numbers computed from the edges that a layer takes with the edges, and a number for
        each node, such as of its edges, by which rows are scaled.
        """
        value = self.records[0][node]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        layers = [user for user in node.users if user.op == "call_module"]
        if any(self.edges in layer.all_input_nodes for layer in layers):
            return self.uses_edges(node)
        is_read = any(user not in self.found for user in node.users)
        return is_read and has_rows(value, self.counts[0][1]) and self.uses_edges(node, sizes=True)

    def _is_other_list(self, node: Node) -> bool:
        """Return whether a value is a list of edges that isn't the one given, such as reversed."""
        value, edges = (self.records[0][each] for each in (node, self.edges))
        is_list = self._is_list(value) and value.shape == edges.shape
        return is_list and not torch.equal(value, edges)

    def uses_edges(self, node: Node, sizes: bool = False) -> bool:
        """Return whether a value is computed of the edges themselves, or of their number."""
        before = walk_back(node, is_about_shape if sizes else lambda _: False)
        if sizes:
            return any(is_about_shape(each) and self.uses_edges(each) for each in before)
        return self.edges in before

    def _is_like_edges(self, node: Node) -> bool:
        return all(len(set(found)) == 1 or found in self._kept_sizes for found in self._sizes(node))
