"""Contenders from papers: what others do against stale or missing rows of the halo.

All are written from the papers, or from their descriptions, for GraphSAGE of PyG, and train by
``gas.fit`` on the batches of plain histories. Each says what it changes of :class:`SAGE`, which
gives the results of plain histories at about their cost. Only batches that are trained on are
changed: evaluation is of the whole graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.graph import select_rows
from gas.history import Rows
from gas.nn import Adjacency, Neighbours, fuse, linear, spmm
from gas.training import Callback, Progress

Prepared = tuple[gas.ScalableGNN, Data, dict[str, Any]]  # The dictionary has options of gas.fit.
# Takes plain histories, the module that they were made of, and the clustered graph.
Make = Callable[[gas.ScalableGNN, torch.nn.Module, Data], Prepared]


class SAGE(gas.ScalableGNN):
    """Plain histories: GraphSAGE of PyG, written out for changes by subclasses.

    Features and their means over neighbours are kept here, as the means never change; the ``x``
    of the graph are the numbers of its nodes.

    Args:
        net: A ``torch_geometric.nn.GraphSAGE``, whose weights are shared.
        graph: The clustered graph, whose edges go both ways.
        **options: See :class:`gas.ScalableGNN`.
    """

    def __init__(self, net: torch.nn.Module, graph: Data, **options: Any) -> None:
        super().__init__(graph.num_nodes, net.hidden_channels, net.num_layers, **options)
        self.net = fuse(net)
        self.edges = Adjacency.of(graph.edge_index, graph.num_nodes)
        self.degree = self.edges.degree().clamp(min=1)
        self.features, self.means = graph.x, self.average(graph.x)
        self.train_mask = graph.train_mask

    def average(self, x: Tensor) -> Tensor:
        """Return the means of features over neighbours; those of sparse features are sparse."""
        if x.layout == torch.strided:
            return spmm(self.edges, x, reduce="mean")
        weight = (1 / self.degree.to(x.dtype)).repeat_interleave(self.edges.degree())
        return self.edges.with_value(weight).to_torch_sparse() @ x

    def forward(self, x: Tensor, adj_t: Any, *args: Any) -> Tensor:
        """Compute the outputs of the nodes numbered in ``x``."""
        rows: Any = x.view(-1).long()
        for layer in range(self.net.num_layers - 1):
            z = self.convolve(layer, rows, adj_t, args)
            rows = self.drop(self.exchange(layer, rows, z, args))
        return self.convolve(self.net.num_layers - 1, rows, adj_t, args)

    def convolve(self, layer: int, rows: Any, adj_t: Any, args: Any) -> Tensor:
        """Compute a layer up to its norm, of shape ``[batch_size, width]``."""
        if layer == 0:
            return self.first_layer(rows[: adj_t.size(0)])
        return self.net.convs[layer](Neighbours(adj_t, None, None).layer_input(rows), adj_t)

    def first_layer(self, nodes: Tensor, learns: bool = True) -> Tensor:
        """Compute the first layer of some nodes up to its norm."""
        inputs = (select_rows(x, nodes) for x in (self.means, self.features))
        return self.transform(0, *inputs, learns=learns)

    def transform(self, layer: int, means: Tensor, own: Tensor, learns: bool = True) -> Tensor:
        """Apply a layer's weights to means over neighbours and to the nodes' own rows."""
        conv = self.net.convs[layer]
        weights = (conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight)
        left, bias, right = weights if learns else (weight.detach() for weight in weights)
        return linear(means, left, bias) + linear(own, right)

    def activate(self, layer: int, z: Tensor) -> Tensor:
        """Apply a layer's norm and activation."""
        return self.net.norms[layer](z).relu()

    def activate_halo(self, layer: int, z: Tensor, own: Tensor) -> Tensor:
        """Apply a layer's norm, by the statistics of the batch's own rows, and activation."""
        if self.net.norm:
            norm, own = self.net.norms[layer].module, own.detach()
            weight, bias = norm.weight.detach(), norm.bias.detach()
            var, mean = torch.var_mean(own, 0, unbiased=False)
            z = F.batch_norm(z, mean, var, weight, bias, False, 0.0, norm.eps)
        return z.relu()

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        """Push a layer's rows, and return them with those of the halo."""
        h = self.activate(layer, z)
        history = self.histories[layer]
        return self.push_and_pull(history, h, *args, rows=True) if any_batch(args) else h

    def drop(self, rows: Any) -> Any:
        """Apply dropout to the own rows of a batch."""
        return self.net.dropout(rows)


def any_batch(args: Any) -> bool:
    """Return whether the arguments of forward are those of a mini-batch."""
    return len(args) > 1 and args[1] is not None


def is_trained(args: Any) -> bool:
    """Return whether forward is that of a mini-batch to train on."""
    return any_batch(args) and torch.is_grad_enabled()


class AgeWeights(SAGE):
    """Multiply the halo's rows by ``exp(-decay * age / step)``, both in steps of training.

    The weights become 1 during training. Source: VISAGNN (arXiv 2511.12434), the weights of its
    messages; neither its loss nor its additional inputs.
    """

    decay, step = 1.0, 0

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        if not is_trained(args):
            return super().exchange(layer, rows, z, args)
        self.step += layer == 0
        age = self.histories[layer].age[args[1][args[0] :]] + 1.0
        pulled = super().exchange(layer, rows, z, args)
        weight = torch.exp(-self.decay * age / self.step)
        return Rows(pulled.own, pulled.halo_tensor() * weight[:, None])


class FirstLayerFresh(SAGE):
    """Compute the halo's first hidden rows from means of features, by the weights of now."""

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        pulled = super().exchange(layer, rows, z, args)
        if layer or not is_trained(args):
            return pulled
        with torch.no_grad():
            fresh = self.first_layer(rows[args[0] :])
            return Rows(pulled.own, self.activate_halo(0, fresh, z))


class Momentum(SAGE):
    """Mix the halo's stored rows with rows computed of the edges inside batch and halo.

    Mixed rows are stored. Messages that are missing count as 0. In the first layer none are, as
    means of features are known. Source: GraphFM-OB (Yu et al., ICML 2022); there, missing are all
    messages from other nodes than those of the batch.
    """

    beta = 0.5

    def halo_edges(self, args: Any) -> Adjacency:
        """Return the edges from batch and halo to the halo, weighted by its degrees."""
        n_id, halo = args[1], args[1][args[0] :]
        position = torch.full((self.num_nodes,), -1)
        position[n_id] = torch.arange(n_id.numel())
        count = self.edges.degree()[halo].long()
        row = torch.repeat_interleave(torch.arange(halo.numel()), count)
        first = self.edges.rowptr.long()[halo] - (count.cumsum(0) - count)
        col = position[self.edges.col[first[row] + torch.arange(row.numel())].long()]
        row, col = row[col >= 0], col[col >= 0]
        rowptr = F.pad(torch.bincount(row, minlength=halo.numel()).cumsum(0), (1, 0))
        weight = (1 / self.degree[halo].to(self.features.dtype))[row]
        return Adjacency.from_valid_csr(rowptr.int(), col.int(), weight, n_id.numel())

    def convolve_halo(self, layer: int, rows: Tensor, args: Any) -> Tensor:
        """Compute the halo's rows of a layer up to its norm, by constant weights."""
        own = rows[args[0] :]
        if layer == 0:
            self.inside = self.halo_edges(args)
            return self.first_layer(own, learns=False)
        return self.transform(layer, spmm(self.inside, rows), own, learns=False)

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        pulled = super().exchange(layer, rows, z, args)
        if not is_trained(args):
            return pulled
        with torch.no_grad():
            rows, stored = rows.tensor() if layer else rows, pulled.halo_tensor()
            fresh = self.activate_halo(layer, self.convolve_halo(layer, rows, args), z)
            mixed = stored + self.beta * (fresh - stored)
        self.histories[layer].push(mixed, args[1][args[0] :])
        return Rows(pulled.own, mixed)


class BackwardLMC(SAGE):
    """Add the gradient that the halo's next layer sends to the batch, from a second table.

    A table for each layer but the first has the gradients of its rows before the norm, of the sum
    of all nodes' losses; those of the batch are stored in the backward pass. As edges go both ways,
    the halo's messages to the batch have the edges of the batch's from the halo. Source: LMC (Shi
    et al., ICLR 2023), with beta 0, and tables before the norm.
    """

    def __init__(self, net: torch.nn.Module, graph: Data, **options: Any) -> None:
        super().__init__(net, graph, **options)
        widths = [conv.out_channels for conv in net.convs[1:]]
        shapes = [(graph.num_nodes, width) for width in widths]
        self.tables = [torch.zeros(shape, dtype=graph.x.dtype) for shape in shapes]

    def labels(self, args: Any) -> int:
        """Return the number of nodes of a batch that have a loss."""
        return max(1, int(self.train_mask[args[1][: args[0]]].sum()))

    def store_gradient(self, layer: int, z: Tensor, args: Any) -> None:
        """Store the gradient of a layer's rows in the backward pass."""
        table, own, scale = self.tables[layer - 1], args[1][: args[0]], self.labels(args)

        def store(grad: Tensor) -> None:
            table[own] = scale * grad

        z.register_hook(store)

    def convolve(self, layer: int, rows: Any, adj_t: Any, args: Any) -> Tensor:
        z = super().convolve(layer, rows, adj_t, args)
        if layer and is_trained(args):
            self.store_gradient(layer, z, args)
            halo = args[1][args[0] :]
            grad = self.tables[layer - 1][halo] / (self.degree[halo, None] * self.labels(args))
            grad = grad @ self.net.convs[layer].lin_l.weight.detach()
            sent = spmm(adj_t.remove_values(), Rows(torch.zeros_like(rows.own), grad))
            rows.own.register_hook(lambda grad: grad + sent)
        return z


class LMC(Momentum, BackwardLMC):
    """Mix the halo's rows, and their gradients with those of the second table.

    The share ``beta`` of a row computed inside batch and halo is multiplied by ``a * (2 - a)``,
    where ``a`` is the share of the node's edges that are inside. Source: as :class:`BackwardLMC`.
    """

    beta = 0.4

    def convolve(self, layer: int, rows: Any, adj_t: Any, args: Any) -> Tensor:
        if not is_trained(args):
            return SAGE.convolve(self, layer, rows, adj_t, args)
        z, halo = SAGE.convolve(self, layer, rows, adj_t, args), args[1][args[0] :]
        self.fresh = self.convolve_halo(layer, rows, args)
        if layer == 0:
            share = self.inside.degree() / self.degree[halo]
            self.share = (self.beta * share * (2 - share)).to(self.features.dtype)[:, None]
        else:
            self.store_gradient(layer, z, args)
            stored, share = self.tables[layer - 1][halo] / self.labels(args), self.share
            self.fresh.register_hook(lambda grad: stored + share * (grad - stored))
        if layer == self.net.num_layers - 1:
            z = z + 0.0 * self.fresh.sum()  # No loss of the halo, whose gradient is the table's.
        return z

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        pulled = SAGE.exchange(self, layer, rows, z, args)
        if not is_trained(args):
            return pulled
        fresh, stored = self.activate_halo(layer, self.fresh, z), pulled.halo_tensor()
        mixed = fresh + ((1 - self.share) * (stored - fresh)).detach()
        return torch.cat([super().drop(pulled.own), mixed])

    def drop(self, rows: Any) -> Any:
        return rows if self.training and torch.is_grad_enabled() else super().drop(rows)


class TOP(SAGE):
    """Replace the halo's rows by linear combinations of the batch's own rows, with gradient.

    Coefficients are those of least squares, with a small ridge, on the hidden rows of the untrained
    model; they are computed for every batch, as a product of two thin matrices. There are no
    histories. Source: TOP (Shi et al., ICLR 2025, arXiv 2502.19693), which keeps the same batches,
    and computes their coefficients once.
    """

    def __init__(self, net: torch.nn.Module, graph: Data, **options: Any) -> None:
        super().__init__(net, graph, **options)
        self.histories = torch.nn.ModuleList()
        self.basis: Tensor | None = None

    @torch.no_grad()
    def find_basis(self) -> Tensor:
        """Return the hidden rows of all nodes, of shape ``[N, width]``."""
        rows: Any = torch.arange(self.num_nodes)
        found = []
        for layer in range(self.net.num_layers - 1):
            z = self.convolve(layer, rows, self.edges, ())
            rows = self.activate_halo(layer, z, z)
            found.append(rows)
        return torch.cat(found, dim=1)

    def convolve(self, layer: int, rows: Any, adj_t: Any, args: Any) -> Tensor:
        if layer == 0 or not any_batch(args):
            return super().convolve(layer, rows, adj_t, args)
        if layer == 1:
            self.of_halo, self.of_own = self.fit_coefficients(adj_t, args)
        none = rows.new_zeros(adj_t.size(1) - args[0], rows.size(1))
        means = spmm(adj_t.remove_values(), Rows(rows, none), reduce="mean")
        return self.transform(layer, means + self.of_halo @ (self.of_own @ rows), rows)

    @torch.no_grad()
    def fit_coefficients(self, adj_t: Adjacency, args: Any) -> tuple[Tensor, Tensor]:
        """Return two matrices, of whose product a row is the halo's part of a node's mean."""
        if self.basis is None:
            self.basis = self.find_basis()
        own, halo = self.basis[args[1][: args[0]]], self.basis[args[1][args[0] :]]
        gram = own.T @ own
        gram.diagonal().add_(1e-3 * gram.diagonal().mean())
        means = spmm(adj_t.remove_values(), Rows(torch.zeros_like(own), halo), reduce="mean")
        return means, torch.linalg.solve(gram, own.T)

    def exchange(self, layer: int, rows: Any, z: Tensor, args: Any) -> Any:
        return self.activate(layer, z)


class Refresh(Callback):
    """Compute all histories anew after every few steps, by ``model.refresh``."""

    def __init__(self, model: gas.ScalableGNN, graph: Data, every: int) -> None:
        self.model, self.every, self.steps = model, every, 0
        self.loader = gas.EvalSubgraphLoader(graph, batch_size=graph.parts.numel() - 1, log=False)

    def on_step_end(self, progress: Progress) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.model.refresh(self.loader, norms=False, log=False)


class ForwardOnly(Callback):
    """Run further batches forward alone after every step, which stores their rows.

    Source: REST (*Haste Makes Waste*, ICML 2025).
    """

    def __init__(self, model: gas.ScalableGNN, graph: Data, batch_size: int, number: int) -> None:
        loader = gas.SubgraphLoader(graph, batch_size=batch_size, shuffle=True, log=False)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self.model, self.number = model, number

    def on_step_end(self, progress: Progress) -> None:
        with torch.no_grad():
            for batch in itertools.islice(self.batches, self.number):
                self.model(batch)


def write_out(
    kind: type[SAGE], model: gas.ScalableGNN, net: torch.nn.Module, graph: Data, **options: Any
) -> Prepared:
    """Make a subclass of :class:`SAGE`, and a graph whose ``x`` are the numbers of its nodes."""
    numbered = graph.clone()
    numbered.x = torch.arange(graph.num_nodes, dtype=torch.float64).view(-1, 1)
    return kind(net, graph), numbered, options


def call_back(
    kind: Callable[..., Callback], model: gas.ScalableGNN, net: torch.nn.Module, graph: Data,
    *args: int,
) -> Prepared:  # fmt: skip
    """Train plain histories with a callback."""
    return model, graph, {"callbacks": [kind(model, graph, *args)]}


FROM_PAPERS: dict[str, Make] = {
    "refreshed every 4 steps": lambda *made: call_back(Refresh, *made, 4),
    "a batch forward alone per step (REST)": lambda *made: call_back(ForwardOnly, *made, 64, 1),
    "age weights (VISAGNN)": partial(write_out, AgeWeights),
    "momentum .5 (GraphFM-OB)": partial(write_out, Momentum, correct_drift=False),
    "LMC, beta 0": partial(write_out, BackwardLMC),
    "LMC, beta .4": partial(write_out, LMC),
    "TOP": partial(write_out, TOP),
    "first layer's halo fresh": partial(write_out, FirstLayerFresh),
}
