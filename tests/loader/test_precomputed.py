"""Sums over neighbours' features that are computed once for the whole graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GIN, MLP, GINConv, GraphConv, GraphSAGE

import gas
from gas.loader import cache
from gas.nn import spmm

N, F, C = 60, 7, 3


def make_data(weighted: bool = False, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.randn(N, F, generator=generator, dtype=torch.double),
        edge_index=torch.randint(N, (2, 5 * N), generator=generator),
        y=torch.randint(C, (N,), generator=generator),
    )
    if weighted:
        data.edge_weight = torch.rand(5 * N, generator=generator, dtype=torch.double)
    return data


class WeightedNet(torch.nn.Module):
    """Layers that multiply by the edges' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConv(F, 5), GraphConv(5, C, aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


class OwnProduct(torch.nn.Module):
    """A sum over neighbours of linearly transformed features, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = torch.nn.ModuleList([torch.nn.Linear(F, 5), torch.nn.Linear(5, C)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for lin in self.lins:
            h = lin(x)
            x = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]).tanh()
        return x


NETS = {
    "GCN": lambda: GCN(F, 5, 2, C),
    "SAGE": lambda: GraphSAGE(F, 5, 2, C, norm="batch_norm"),
    "SAGE, sums": lambda: GraphSAGE(F, 5, 2, C, aggr="sum"),
    "GIN": lambda: GIN(F, 5, 2, C),
    "weighted": WeightedNet,
    "own product": OwnProduct,
}


def train_step(model: gas.ScalableGNN, batch: gas.SubData) -> list[Tensor]:
    """Return the outputs of a batch, and the gradients of the weights."""
    model.train().zero_grad()
    out = model(batch, push=False)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", NETS)
def test_outputs_and_gradients_are_those_without(name: str) -> None:
    torch.manual_seed(0)
    data = make_data(weighted=name == "weighted")
    net = NETS[name]().double()
    model = gas.to_scalable(net, data, dtype="float64")
    graph = gas.cluster(data, 6, model=model, log=False)
    model.refresh(graph)
    with_sums = gas.SubgraphLoader(graph, batch_size=2, log=False)
    without = gas.SubgraphLoader(graph, batch_size=2, log=False, precompute=False)
    for one, other in zip(with_sums, without, strict=True):
        for a, b in zip(train_step(model, one), train_step(model, other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    (sums,) = with_sums.feature_sums.tensors()
    assert without.feature_sums.tensors() == []
    adj = gas.nn.Adjacency.of(graph.edge_index, N, graph.get("edge_weight"))
    if name in ("SAGE", "SAGE, sums", "GIN"):
        adj = adj.remove_values()
    reduce = "mean" if name == "SAGE" else "sum"
    torch.testing.assert_close(sums, spmm(adj, graph.x, reduce=reduce))


def test_models_of_gas_read_them() -> None:
    data = gas.get_data("unused", "planted:200")[0]
    for kind in (gas.models.GCN, gas.models.GraphSAGE):
        model = kind(200, data.num_features, 8, 4, num_layers=2, dropout=0.0)
        graph = gas.cluster(data, 4, model=model, log=False)
        model.refresh(graph)
        loader = gas.SubgraphLoader(graph, log=False)
        train_step(model, next(iter(loader)))
        assert len(loader.feature_sums.tensors()) == 1


def first_layer(loader: gas.SubgraphLoader, part: int = 0) -> tuple[gas.SubData, Tensor]:
    """Return a batch, and the sums over neighbours that a first layer takes."""
    batch = loader.cut([part])
    return batch, spmm(batch.adj_t, batch.features())


@pytest.fixture
def graph() -> Data:
    return gas.cluster(make_data(weighted=True), 6, log=False)


def mark(loader: gas.SubgraphLoader) -> None:
    """Change the sums, so that it shows who reads them."""
    for table in loader.feature_sums.tensors():
        table.fill_(7.0)


def test_halo_and_edges_are_not_read(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    batch, out = first_layer(loader)
    mark(loader)
    _, again = first_layer(loader)
    assert bool((again == 7.0).all())
    assert not bool((out == 7.0).any())
    assert again.shape == (batch.batch_size, F)


def test_layers_may_change_what_they_get(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    _, out = first_layer(loader)
    expected = out.clone()
    out.zero_()
    assert torch.equal(first_layer(loader)[1], expected)


def test_other_edges_and_weights_are_summed_as_they_are(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    first_layer(loader)
    mark(loader)
    batch = loader.cut([1])
    adj, x = batch.adj_t, batch.features()
    assert bool((spmm(adj, x) == 7.0).all())
    dense = adj.to_torch_sparse().to_dense()
    for value in (adj.value * 2, torch.ones_like(adj.value)):
        out = spmm(adj.with_value(value), x)
        weights = dense.clone()
        weights[adj.coo()] = 0.0
        weights.index_put_(adj.coo(), value, accumulate=True)
        torch.testing.assert_close(out, weights @ batch.features().tensor())
    torch.testing.assert_close(
        spmm(adj, x, torch.zeros_like(adj.value)), torch.zeros(batch.batch_size, F).double()
    )
    half = gas.nn.Adjacency(adj.rowptr, adj.col, adj.value.clone(), adj.size(1))
    assert not bool((spmm(half, x) == 7.0).any())
    adj.value.mul_(2)  # The batch's own copy.
    assert not bool((spmm(adj, batch.features()) == 7.0).any())


def test_dropped_features_are_summed_as_they_are(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    first_layer(loader)
    mark(loader)
    batch = loader.cut([1])
    out = spmm(batch.adj_t, gas.nn.dropout(batch.features(), 0.5, True))
    assert not bool((out == 7.0).any())


def test_changed_features_have_none_and_new_ones_do(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    batch, before = first_layer(loader)
    graph.x.mul_(2)
    torch.testing.assert_close(first_layer(loader)[1], 2 * before)
    assert loader.feature_sums.tensors() == []  # They may be written to in every step.
    graph.x = graph.x.clone() / 2
    torch.testing.assert_close(first_layer(loader)[1], before)
    assert len(loader.feature_sums.tensors()) == 1
    graph.x.mul_(2)
    with pytest.raises(RuntimeError, match="'x' of the graph"):
        batch.features()


def test_a_single_pass_computes_none(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    with torch.no_grad():
        _, out = first_layer(loader)
    assert loader.feature_sums.tensors() == []
    torch.testing.assert_close(first_layer(loader)[1], out)
    with torch.no_grad():  # But takes those of training.
        mark(loader)
        assert bool((first_layer(loader)[1] == 7.0).all())


def test_loaders_like_it_share_them(graph: Data) -> None:
    loader = gas.SubgraphLoader(graph, log=False)
    first_layer(loader)
    other = gas.EvalSubgraphLoader(graph, like=loader, log=False)
    assert other.feature_sums.tensors()[0] is loader.feature_sums.tensors()[0]
    sent = pickle.loads(pickle.dumps(copy.copy(loader.feature_sums)))
    assert sent.tensors() == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("num_edges", [0, 1, 5 * N])
def test_sums_of_quantised_features_are_exact(
    num_edges: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "BLOCK_VALUES", 13 * F)  # Some nodes have more edges, some none.
    data = make_data(weighted=True)
    data.edge_index, data.edge_weight = data.edge_index[:, :num_edges], data.edge_weight[:num_edges]
    data.x = gas.quantize(data.x, dtype)
    graph = gas.cluster(data, 6, log=False)
    loader = gas.SubgraphLoader(graph, log=False)
    adj = gas.nn.Adjacency.of(graph.edge_index, N, graph.edge_weight)
    for reduce in ("sum", "mean"):
        expected = spmm(adj, graph.x.dequantize(), reduce=reduce)
        for batch in loader:
            out = spmm(batch.adj_t, batch.features(), reduce=reduce)
            torch.testing.assert_close(out, expected[batch.n_id[: batch.batch_size]])
    kind = torch.float64 if dtype == "float64" else torch.float32
    assert [each.dtype for each in loader.feature_sums.tensors()] == [kind, kind]


def test_little_memory_means_none(graph: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_memory", lambda: 4 * graph.x.nbytes - 1)
    loader = gas.SubgraphLoader(graph, log=False)
    _, out = first_layer(loader)
    assert loader.feature_sums.tensors() == []
    monkeypatch.setattr(cache, "free_memory", lambda: 4 * graph.x.nbytes)
    loader = gas.SubgraphLoader(graph, log=False)
    torch.testing.assert_close(first_layer(loader)[1], out)
    assert len(loader.feature_sums.tensors()) == 1


def _learn(graph: Data) -> None:
    graph.x.requires_grad_()


class OwnStore(gas.history.MemoryStore):
    """A store of the user's own, which may be written to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tier = "custom"


def _store_elsewhere(graph: Data) -> None:
    graph.x = gas.quantize(graph.x, "float32", store=OwnStore)


def _store_on_disk(graph: Data) -> None:
    graph.x = gas.quantize(graph.x, "int8", store="disk")


def _narrow(graph: Data) -> None:
    graph.x, graph.edge_weight = graph.x.bfloat16(), graph.edge_weight.bfloat16()


@pytest.mark.parametrize("change", [_learn, _store_elsewhere, _store_on_disk, _narrow])
def test_other_features_have_none(graph: Data, change: Callable[[Data], None]) -> None:
    change(graph)
    loader = gas.SubgraphLoader(graph, log=False)
    x = loader.cut([0]).features()
    assert getattr(x, "find_sums", None) is None


def test_features_of_a_folder_have_none(tmp_path: Path) -> None:
    graph = gas.cluster(make_data(), 6, log=False, out=tmp_path / "graph")
    loader = gas.SubgraphLoader(graph, log=False)
    assert loader.cut([0]).features().find_sums is None
    first_layer(loader)
    assert loader.feature_sums.tensors() == []


def test_hooks_see_tensors(graph: Data) -> None:
    data = make_data()
    model = gas.to_scalable(GraphSAGE(F, 5, 2, C).double(), data, dtype="float64")
    graph = gas.cluster(data, 6, model=model, log=False)
    model.refresh(graph)
    loader = gas.SubgraphLoader(graph, log=False)
    seen: list[object] = []
    handle = model.net.get_submodule("convs.0").register_forward_hook(
        lambda layer, args, out: seen.extend(args[0])
    )
    expected = train_step(model, loader.cut([2]))
    assert seen
    assert all(type(each) is Tensor for each in seen)
    assert loader.feature_sums.tensors() == []
    handle.remove()
    for a, b in zip(train_step(model, loader.cut([2])), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(loader.feature_sums.tensors()) == 1


def test_full_batch_of_one_part_reads_them() -> None:
    data = make_data()
    net = torch.nn.ModuleList([GINConv(MLP([F, 4, C], norm=None))])

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = net

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.convs[0](x, edge_index)

    module = One().double()
    model = gas.to_scalable(module, data, dtype="float64")
    graph = gas.cluster(data, 1, model=model, log=False)
    loader = gas.SubgraphLoader(graph, log=False)
    out = train_step(model, next(iter(loader)))[0]
    torch.testing.assert_close(out, module(graph.x, graph.edge_index))
    assert len(loader.feature_sums.tensors()) == 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_shards_have_sums_of_their_own_nodes(dtype: str, weighted: bool) -> None:
    whole = gas.cluster(make_data(weighted), 6, shards=2, log=False)
    x = whole.x
    if dtype == "bfloat16":  # Rows of float32 are read.
        whole.x, x = gas.quantize(x, dtype), x.to(torch.bfloat16).float()
    if weighted:
        whole.edge_weight = whole.edge_weight.to(x.dtype)
    adj = x.new_zeros(N, N)
    weight = whole.edge_weight if weighted else x.new_ones(5 * N)
    adj.index_put_((whole.edge_index[1], whole.edge_index[0]), weight, accumulate=True)
    expected = adj @ x
    for rank in (0, 1):
        shard = gas.graph.shard_of(whole, rank)
        loader = gas.SubgraphLoader(shard, batch_size=2, log=False)
        for batch in loader:
            own = shard.shard.nodes[batch.n_id[: batch.batch_size]]
            torch.testing.assert_close(spmm(batch.adj_t, batch.features()), expected[own])
        assert [len(each) for each in loader.feature_sums.tensors()] == [shard.shard.num_own]


def test_ranks_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = gas.graph.shard_of(gas.cluster(make_data(), 6, shards=2, log=False), 0)
    for free, number in ((8 * shard.x.nbytes - 1, 0), (8 * shard.x.nbytes, 1)):
        monkeypatch.setattr(cache, "free_memory", lambda free=free: free)
        loader = gas.SubgraphLoader(shard, log=False)
        batch = loader.cut([0])
        spmm(batch.adj_t, batch.features())
        assert len(loader.feature_sums.tensors()) == number
