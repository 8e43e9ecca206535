"""Unusual uses of heterogeneous graphs: right, or refused with a reason."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from hetero.graphs import SIZES, Convs, bibliography, flat, net_of, sage
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, HeteroConv, Linear, to_hetero

import gas


class Two(nn.Module):
    """Two layers, and what a test wants between them."""

    def __init__(self, data, between=lambda x: x):
        super().__init__()
        self.encoders = nn.ModuleDict({kind: Linear(-1, 16) for kind in data.node_types})
        self.convs = nn.ModuleList(
            HeteroConv({kind: sage() for kind in data.edge_types}) for _ in range(2)
        )
        self.between = between

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.encoders[kind](x) for kind, x in x_dict.items()}
        x_dict = self.convs[0](x_dict, edge_index_dict)
        x_dict = {kind: self.between(x) for kind, x in x_dict.items()}
        return self.convs[1](x_dict, edge_index_dict)


def cut(data, num_parts=4):
    return gas.cluster(data, num_parts, log=False, method="random")


def batch_of(graph, part=0):
    return gas.SubgraphLoader(graph, log=False).cut([part])


@pytest.mark.parametrize("how", ["shuffled", "both directions"])
def test_edges_of_a_batch_may_be_changed(how):
    data = bibliography()
    model = gas.to_scalable(Two(data), data).eval()
    batch = batch_of(cut(data, 1))
    if how == "shuffled":
        for kind in batch.edge_types:
            edges = batch[kind].edge_index
            batch[kind].edge_index = edges[:, torch.randperm(edges.size(1))]
    else:
        batch = T.ToUndirected(merge=True)(batch)
    net = copy.deepcopy(model.net)
    expected = net(batch.x_dict, batch.edge_index_dict)
    torch.testing.assert_close(flat(model(batch)), flat(expected))


def test_edges_into_the_halo_and_from_nowhere():
    data = bibliography()
    model = gas.to_scalable(Two(data), data).eval()
    graph = cut(data)
    model.predict(graph)
    batch, kind = batch_of(graph), ("paper", "cites", "paper")
    expected = flat(model(batch, push=False))
    size, edges = batch["paper"].num_nodes, batch[kind].edge_index
    batch[kind].edge_index = torch.cat([edges, torch.tensor([[0], [size - 1]])], dim=1)
    assert torch.equal(flat(model(batch, push=False)), expected)
    batch[kind].edge_index = torch.cat([torch.tensor([[size], [0]]), edges], dim=1)
    with pytest.raises(IndexError):
        model(batch, push=False)


def test_lazy_weights_are_those_of_the_users_seed():
    weights = []
    for seed in (1, 2, 1):
        data = bibliography()
        torch.manual_seed(seed)
        net = to_hetero(GraphSAGE((-1, -1), 8, 2, 4), data.metadata())
        gas.to_scalable(net, data)
        weights.append(net.convs[0].author__writes__paper.lin_l.weight.detach().clone())
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_lazy_weights_of_one_type_are_those_of_the_users_seed():
    weights = []
    for seed in (1, 2):
        data = bibliography()["paper"]
        torch.manual_seed(seed)
        net = GraphSAGE(-1, 8, 2, 4)
        gas.to_scalable(net, Data(x=data.x, edge_index=torch.randint(60, (2, 200))))
        weights.append(net.convs[0].lin_l.weight.detach().clone())
    assert not torch.equal(*weights)


def test_conversion_leaves_the_module_as_it_was():
    data = bibliography()
    net = Convs(data, sage).train()
    before = torch.get_rng_state()
    gas.to_scalable(net, data)
    assert torch.equal(before, torch.get_rng_state())
    assert net.training
    assert all(norm.training for norm in net.norms.values())
    assert not any(norm.num_batches_tracked for norm in net.norms.values())
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in net.modules()]
    assert not any(any(each) for each in hooks)


def test_in_inference_mode():
    data = bibliography()
    net = Two(data)
    with torch.inference_mode():
        model = gas.to_scalable(net, data)
    graph = cut(data)
    with torch.inference_mode():
        model.predict(graph)
    model.train()
    flat(model(batch_of(graph))).sum().backward()
    assert gas.verify(model, graph)


@pytest.mark.parametrize("drop", [F.dropout, torch.dropout])
def test_rows_are_stored_before_dropout(drop):
    data = bibliography()
    net = Two(data)
    net.between = lambda x: drop(x, 0.5, model.training)
    model = gas.to_scalable(Two(data), data)
    model.net.between = net.between
    model.train()(batch_of(cut(data, 1)))
    for history in model.histories:
        assert float((history.emb == 0).float().mean()) < 0.1


class Scaled(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x_dict, edge_index_dict, num_nodes_dict, scale=1.0):
        out = self.net(x_dict, edge_index_dict)
        assert all(x_dict[kind].size(0) == num_nodes_dict[kind] for kind in x_dict)
        return {kind: scale * x for kind, x in out.items()}


def test_attributes_of_the_whole_graph_and_numbers_of_nodes():
    data = bibliography()
    data.scale = 3.0
    for kind, size in SIZES.items():
        data[kind].num_nodes = size
    net = Scaled(Two(data))
    model = gas.to_scalable(net, data)
    graph = cut(data)
    assert batch_of(graph).scale == 3.0
    expected = net.eval()(data.x_dict, data.edge_index_dict, SIZES, 3.0)
    torch.testing.assert_close(flat(model.predict(graph)), flat(expected))


class OfVenues(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x_dict, edge_index_dict):
        return self.net(x_dict, edge_index_dict)["venue"]


def test_two_small_types_of_one_size():
    data = bibliography()
    for kind in ("author", "venue"):
        data[kind].x = torch.randn(10, 4)
    for kind in data.edge_types:
        ends = [data[kind[0]].num_nodes, data[kind[2]].num_nodes]
        edges = torch.randint(min(ends), (2, 40))
        data[kind].edge_index = edges
    net = Two(data)
    model = gas.to_scalable(OfVenues(net), data)
    assert model.plan.output == "venue"
    assert gas.verify(model, cut(data))


def test_rows_that_are_detached_are_refused_with_the_reason():
    data = bibliography()
    with pytest.raises(ValueError, match="or rows are detached"):
        gas.to_scalable(Two(data, torch.Tensor.detach), data)


def test_a_batch_that_lacks_something():
    data = bibliography()
    model = gas.to_scalable(Two(data), data)
    batch = batch_of(cut(data))
    del batch["author"].x
    with pytest.raises(ValueError, match="'batch' has no 'x' of type 'author'"):
        model(batch)


def test_attributes_that_a_batch_sets_are_refused():
    data = bibliography()
    data["paper"].n_id = torch.arange(60) + 1000
    with pytest.raises(ValueError, match="has 'n_id' already"):
        cut(data)


def test_a_norm_in_an_encoder_is_refused_in_training():
    data = bibliography()
    net = Convs(data, sage, 2)
    net.start = nn.BatchNorm1d(8)
    first = net.encoders["paper"]
    net.encoders["paper"] = nn.Sequential(net.start, first)
    model = gas.to_scalable(net, data)
    assert model.norms_of_halo == {"encoders.paper.0"}
    graph = cut(data)
    model.predict(graph)
    with pytest.raises(ValueError, match="'encoders.paper.0' is a batch norm .* before the first"):
        model.train()(batch_of(graph))


def test_no_tolerance_is_none():
    data = bibliography()
    model = gas.to_scalable(net_of("HGT", data), data)
    assert gas.verify(model, cut(data), tolerance=0.0).tolerance == 0.0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_another_clustering_are_refused(tmp_path, num_workers):
    data = bibliography()
    model = gas.to_scalable(Two(data), data).eval()
    first, second = cut(data, 4), cut(data, 3)
    loaders = [gas.SubgraphLoader(g, log=False, num_workers=num_workers) for g in (first, second)]
    out = [model.predict(graph) for graph in (second, first)]
    torch.testing.assert_close(flat(out[0]), flat(out[1]))
    gas.save(tmp_path, model)
    with pytest.raises(ValueError, match="another clustering than those before"):
        model(next(iter(loaders[1])))
    model.refresh(second, norms=False, log=False)
    for batch in loaders[1]:
        for kind, rows in model(batch).items():
            nodes = batch[kind].perm[: batch[kind].batch_size]
            torch.testing.assert_close(rows, out[0][kind][nodes])
    with pytest.raises(ValueError, match="another clustering than those before"):
        model(loaders[0].cut([0]), push=False)
    gas.load(tmp_path, model)
    model(loaders[0].cut([0]))
    with pytest.raises(ValueError, match="another clustering than those before"):
        model(loaders[1].cut([0]))
    model.full_batch(second, fill=True)
    model(loaders[1].cut([0]))


def test_a_second_thread_is_refused():
    data = bibliography()
    errors, between = [], lambda x: x

    def call_again():
        with pytest.raises(RuntimeError, match="another thread is calling this model") as caught:
            model(batch_of(graph, 1))
        errors.append(caught.value)

    def in_a_thread(x):
        thread = threading.Thread(target=call_again)
        thread.start()
        thread.join()
        return x

    net = Two(data, lambda x: between(x))
    model, graph = gas.to_scalable(net, data), cut(data)
    model.refresh(graph, log=False)
    model.net.between = in_a_thread
    model(batch_of(graph))
    assert len(errors) == len(data.node_types)
    model.net.between = between
    assert model(batch_of(graph, 1))  # The lock is free again.


def test_forward_is_a_call():
    data = bibliography()
    model, graph = gas.to_scalable(Two(data), data).eval(), cut(data)
    model.refresh(graph, log=False)
    expected = model(batch_of(graph))
    assert torch.equal(flat(model.forward(batch_of(graph))), flat(expected))
