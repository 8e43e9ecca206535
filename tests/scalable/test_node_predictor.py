"""Outputs of chosen nodes: those of all nodes, from one mini-batch around a few."""

import copy
import time
import warnings

import numpy as np
import pytest
import torch
from conftest import random_graph
from torch_geometric.nn import GAT, GraphSAGE

import gas

LAYOUTS = ("fused", "csr", "edge_index")
NODES = torch.tensor([7, 140, 3, 7, 55])


def made(layer=GraphSAGE, num_parts=6, num_layers=3, **options):
    data = random_graph(150, 900)
    torch.manual_seed(0)
    net = layer(data.num_features, 16, num_layers, 4, dropout=0.5, norm="batch_norm")
    model = gas.to_scalable(net, data, **options)
    graph = gas.cluster(data, num_parts, model=model, log=False, method="random")
    return data, model, graph


@pytest.mark.parametrize("layer", [GraphSAGE, GAT])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_they_are_those_of_all(layer, layout, num_layers):
    _, model, graph = made(layer, num_layers=num_layers)
    every = model.train().predict(graph)
    before = [(h.emb.clone(), h.age) for h in model.histories]
    loader = gas.SubgraphLoader(graph, layout=layout, log=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model.predict(loader, nodes=NODES), every[NODES])
        torch.testing.assert_close(model.predict(graph, nodes=NODES), every[NODES])
        torch.testing.assert_close(model.predict(graph, nodes=NODES[:1]), every[NODES[:1]])
    assert model.training
    for history, (rows, age) in zip(model.histories, before, strict=True):
        assert torch.equal(history.emb, rows)
        assert torch.equal(history.age, age)


def test_a_batch_around_nodes_is_one_of_them():
    _, model, graph = made()
    model.predict(graph)
    loader = gas.SubgraphLoader(graph, log=False, layout="edge_index")
    nodes = torch.tensor([4, 5, 6, 30, 31, 2])
    batch = loader.cut_nodes(nodes)
    assert torch.equal(batch.n_id[:6], nodes)
    assert (batch.offset.tolist(), batch.count.tolist()) == ([4, 30, 2], [3, 2, 1])
    src, dst = graph.edge_index
    inside = torch.isin(dst, nodes)
    assert sorted(batch.e_id.tolist()) == inside.nonzero().view(-1).tolist()
    assert set(batch.n_id.tolist()) == {*nodes.tolist(), *src[inside].tolist()}
    assert torch.equal(batch.x, graph.x[batch.n_id])
    twin = copy.deepcopy(model).eval()
    expected = [history.emb.clone() for history in twin.histories]
    for history in twin.histories:
        history.emb[nodes] = 0
    out = twin(batch)
    assert out.shape == (6, 4)
    for history, rows in zip(twin.histories, expected, strict=True):
        torch.testing.assert_close(history.emb, rows)  # Written again, each to its own row.


def test_training_on_batches_around_nodes():
    _, model, graph = made()
    model.predict(graph)
    loader = gas.SubgraphLoader(graph, log=False)
    model.train()
    model(loader.cut_nodes(torch.arange(10, 30))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rows_that_are_not_exact_are_told_with_their_age():
    _, model, graph = made()
    loader = gas.SubgraphLoader(graph, log=False)
    model.predict(graph)
    model.eval()
    for batch in loader:
        model(batch)
    with pytest.warns(
        UserWarning, match=r"of histories up to \d+ pushes old, and something has changed"
    ):
        model.predict(graph, nodes=NODES)
    every = model.predict(graph)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.warns(UserWarning, match="makes them so"):
        stale = model.predict(graph, nodes=NODES)
    assert not torch.equal(stale, every[NODES])
    model.predict(graph)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector / 2, model.parameters())  # Replaces their data.
    with pytest.warns(UserWarning, match="makes them so"):
        model.predict(graph, nodes=NODES)
    model.predict(graph)
    for weight in model.parameters():  # As averages of weights are often written: no new version.
        weight.data.mul_(0.99)
    with pytest.warns(UserWarning, match="makes them so"):
        model.predict(graph, nodes=NODES)


def test_buffers_without_an_address():
    _, model, graph = made()
    model.register_buffer("matrix", torch.eye(3).to_sparse_csr())
    model.unused = torch.nn.LazyLinear(2)
    model.predict(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(graph, nodes=NODES)


def test_edges_that_were_replaced():
    """The loader that the first call has made is made anew."""
    _, model, graph = made()
    model.predict(graph)
    model.predict(graph, nodes=NODES)
    graph.edge_index = graph.edge_index[:, :300]
    every = model.predict(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model.predict(graph, nodes=NODES), every[NODES])


def test_it_takes_no_longer_in_a_larger_graph():
    """Chosen nodes read fewer edges by three orders of magnitude: that shows under load, too."""
    data = random_graph(60_000, 600_000)
    model = gas.to_scalable(GraphSAGE(data.num_features, 16, 2, 4), data)
    graph = gas.cluster(data, 4, log=False, method="random")
    start = time.process_time()
    model.predict(graph)
    whole = time.process_time() - start
    model.predict(graph, nodes=NODES)
    start = time.process_time()
    for _ in range(5):
        model.predict(graph, nodes=NODES)
    assert (time.process_time() - start) / 5 < whole / 10


def test_what_cannot_be_chosen():
    data, model, graph = made()
    model.predict(graph)
    with pytest.raises(IndexError, match="'nodes'"):
        model.predict(graph, nodes=torch.tensor([150]))
    with pytest.raises(ValueError, match="'layout' is given"):
        model.predict(graph, nodes=NODES, layout="csr")
    loader = gas.SubgraphLoader(graph, log=False)
    with pytest.raises(ValueError, match="'nodes' is empty"):
        loader.cut_nodes(NODES[:0])
    with pytest.raises(ValueError, match="node id 7 is listed twice"):
        loader.cut_nodes(NODES)
    plain = gas.SubgraphLoader(data, torch.tensor([0, 150]), log=False)
    with pytest.raises(ValueError, match="the graph has no 'perm', by which nodes are found"):
        model.predict(plain, nodes=NODES)


@pytest.mark.parametrize("kind", ["text", "numbers", "list", "tensor"])
def test_nodes_by_their_own_ids(kind):
    data, model, _ = made()
    numbers = torch.randperm(1000)[:150]
    given = {
        "text": np.array([f"package-{i}" for i in numbers.tolist()]),
        "numbers": numbers.numpy(),
        "list": [f"package-{i}" for i in numbers.tolist()],
        "tensor": numbers,
    }[kind]
    data.node_id = given
    graph = gas.cluster(data, 6, log=False, method="random")
    every = model.predict(graph)
    ids = [given[i] for i in NODES]
    for _ in range(2):
        torch.testing.assert_close(model.predict(graph, ids=ids), every[NODES])
    torch.testing.assert_close(model.predict(graph, ids=np.array(ids)), every[NODES])
    loader = gas.SubgraphLoader(graph, log=False)
    torch.testing.assert_close(model.predict(loader, ids=ids[:1]), every[NODES[:1]])
    with pytest.raises(ValueError, match="'ids' holds 'python3-nump' and 1 more, which no node"):
        model.predict(graph, ids=[np.asarray(given)[7].item(), "python3-nump", "x"])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_that_were_changed_in_place_are_found_anew(kind):
    _, model, graph = made()
    model.predict(graph)
    graph.node_id = kind([*range(150)])
    before = model.predict(graph, ids=[3])
    graph.node_id[3], graph.node_id[4] = 1004, 1003
    with pytest.raises(ValueError, match="'ids' holds 3, which no node"):
        model.predict(graph, ids=[3])
    torch.testing.assert_close(model.predict(graph, ids=[1004]), before)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_mask_of_all_nodes_of_a_small_graph(num_nodes):
    data = random_graph(num_nodes, 8)
    model = gas.models.GraphSAGE(num_nodes, data.num_features, 4, 3, 2)
    graph = gas.cluster(data, num_nodes, model=model, method="random", log=False)
    every = model.predict(graph)
    mask = torch.ones(num_nodes, dtype=torch.bool)
    torch.testing.assert_close(model.predict(graph, nodes=mask), every)


@pytest.mark.parametrize("nodes", [torch.ones(3, dtype=torch.bool), torch.tensor([1.0])])
def test_masks_of_another_size_and_real_numbers_are_refused(nodes):
    _, model, graph = made()
    model.predict(graph)
    with pytest.raises(ValueError, match="'nodes' is torch.* expected the rows"):
        model.predict(graph, nodes=nodes)


def test_predictions_under_autocast_are_not_exact_outside_of_it():
    _, model, graph = made()
    with torch.autocast("cpu", torch.bfloat16):
        model.predict(graph)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.predict(graph, nodes=NODES)
    with pytest.warns(UserWarning, match="makes them so"):
        model.predict(graph, nodes=NODES)
