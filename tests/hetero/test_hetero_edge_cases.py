"""Unusual uses of heterogeneous graphs: right, or refused with a reason."""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from hetero.graphs import SIZES, Convs, bibliography, flat, net_of, sage
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, GraphSAGE, HeteroConv, Linear, to_hetero

import gas


class Two(nn.Module):
    """Two layers, and what a test wants between them."""

    def __init__(self, data, between=torch.clone):
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
    with pytest.raises(ValueError, match="the graph has no 'x' of type 'author'"):
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
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="another clustering than those before"):
            other(loaders[0].cut([0]))
    model.full_batch(data, fill=True)  # In the order before clustering.
    with pytest.raises(ValueError, match="another clustering than those before"):
        model(loaders[1].cut([0]))


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_edges_that_change_after_the_loader_was_made_are_refused(how):
    data = bibliography()
    graph, kind = cut(data), ("paper", "cites", "paper")
    loader = gas.SubgraphLoader(graph, log=False)
    loader.cut([0])
    graph["paper"].x = graph["paper"].x + 1
    assert torch.equal(loader.cut([1])["paper"].x, graph["paper"].x[loader.cut([1])["paper"].n_id])
    if how == "replaced":
        graph[kind].edge_index = graph[kind].edge_index[:, :9]
    else:
        graph[kind].edge_index[0, 0] += 1
    with pytest.raises(ValueError, match=r"cites.*\.edge_index' of the graph was changed after"):
        loader.cut([0])
    with pytest.raises(ValueError, match="make a new loader"):
        next(iter(loader))


def test_features_that_change_are_refused_by_workers_that_stay():
    graph = cut(bibliography())
    loader = gas.SubgraphLoader(graph, log=False, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    graph["paper"].x += 1
    with pytest.raises(ValueError, match="'paper.x' of the graph was changed, but 'persistent_w"):
        next(iter(loader))


class Weighted(nn.Module):
    """A layer that takes weights, by one of PyG's names for them."""

    def __init__(self, data):
        super().__init__()
        self.conv = HeteroConv({kind: GraphConv((-1, -1), 4) for kind in data.edge_types})

    def forward(self, x_dict, edge_index_dict, edge_weight_dict=None):
        weights = [] if edge_weight_dict is None else [edge_weight_dict]
        return self.conv(x_dict, edge_index_dict, *weights)


class Plain(Weighted):
    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x, edge_index, edge_weight)


class Typed(nn.Module):
    """The same for ``to_hetero``, which keeps the parameter."""

    def __init__(self, data):
        super().__init__()
        self.conv = GraphConv((-1, -1), 4)

    def forward(self, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight)


def typed(data):
    return to_hetero(Typed(data), data.metadata())


@pytest.mark.parametrize("net", [Weighted, Plain, typed])
def test_weights_that_the_graph_of_the_conversion_lacked_are_refused(net):
    data = bibliography()
    model = gas.to_scalable(net(data), data).eval()
    model.predict(cut(data))
    for kind in data.edge_types:
        data[kind].edge_weight = torch.rand(data[kind].edge_index.size(1))
    graph = cut(data)
    for call in (model.predict, model.full_batch, partial(gas.verify, model), model.refresh):
        with pytest.raises(ValueError, match="the graph has 'edge_weight', which the module takes"):
            call(graph)
    with pytest.raises(ValueError, match="it was converted with a graph that had none"):
        model(batch_of(graph))


def test_parameters_that_no_layer_takes_may_be_attributes():
    """``to_hetero`` keeps those of PyG's models."""
    data = bibliography()
    for kind, store in zip(data.node_types, data.node_stores, strict=True):
        store.x = torch.randn(SIZES[kind], 8)
    net = to_hetero(GraphSAGE(8, 16, 2, 4), data.metadata())
    model = gas.to_scalable(net, data).eval()
    expected = model.predict(cut(data))
    for kind in data.edge_types:
        data[kind].edge_weight = torch.rand(data[kind].edge_index.size(1))
    torch.testing.assert_close(flat(model.predict(cut(data))), flat(expected))


def test_pairs_of_nodes_are_checked_and_renumbered():
    data, kind = bibliography(), ("author", "writes", "paper")
    data[kind].edge_label_index = pairs = torch.tensor([[32, 0], [0, 59]])
    graph = cut(data)
    ends = graph[kind].edge_label_index
    assert torch.equal(graph["author"].perm[ends[0]], pairs[0])
    assert torch.equal(graph["paper"].perm[ends[1]], pairs[1])
    assert "edge_label_index" not in batch_of(graph)[kind]
    for wrong in (torch.tensor([[-1], [1]]), torch.tensor([[33], [1]]), torch.rand(2, 3)):
        data[kind].edge_label_index = wrong
        with pytest.raises(ValueError, match=r"'edge_label_index of \('author', 'writes', 'paper'"):
            cut(data)


def test_a_graph_without_a_relation_is_refused():
    data = bibliography()
    model = gas.to_scalable(Two(data), data)
    del data["paper", "cites", "paper"]
    with pytest.raises(ValueError, match=r"no 'edge_index' of type .*'cites'.* for no edges"):
        model.predict(cut(data))


def test_a_lazy_layer_that_is_never_called():
    data = bibliography()
    net = Two(data)
    net.unused = Linear(-1, 3)
    torch.testing.assert_close(
        flat(gas.to_scalable(net, data).eval().predict(cut(data))),
        flat(net.eval()(data.x_dict, data.edge_index_dict)),
    )


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
