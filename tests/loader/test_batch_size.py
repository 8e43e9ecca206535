import copy

import torch
from conftest import clustered_graph, random_graph
from torch.utils.data import BatchSampler, SequentialSampler
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, SAGEConv, to_hetero

import gas


def clustered(num_parts=8, **kwargs):
    return gas.cluster(random_graph(), num_parts, log=False, **kwargs)


def typed():
    data = HeteroData()
    data["user"].x, data["item"].x = torch.rand(20, 3), torch.rand(10, 3)
    edges = torch.stack([torch.arange(20), torch.arange(20) // 2])
    data["user", "buys", "item"].edge_index = edges
    data["item", "is_of", "user"].edge_index = edges.flip(0)
    return data


def count_calls(model):
    """Return the in-batch nodes of each mini-batch that the model's first layer computes."""
    sizes = []
    layer = next(layer for layer in model.modules() if isinstance(layer, SAGEConv))
    layer.register_forward_hook(lambda *called: sizes.append(called[2].size(0)))
    return sizes


def test_a_graph_remembers_the_batch_size_of_its_last_loader():
    graph = clustered()
    assert gas.SubgraphLoader(graph, log=False).batch_size == 1
    assert "batch_size" not in graph
    assert gas.SubgraphLoader(graph, batch_size=4, log=False).batch_size == 4
    assert graph.batch_size == 4
    assert gas.SubgraphLoader(graph, log=False).batch_size == 4
    assert len(gas.EvalSubgraphLoader(graph, log=False)) == 2
    assert len(gas.EvalSubgraphLoader(graph, batch_size=2, log=False)) == 4
    assert graph.batch_size == 4  # Batches for evaluation are no matter of training.
    assert gas.SubgraphLoader(copy.copy(graph), batch_size=2, log=False).batch_size == 2
    assert graph.batch_size == 4
    assert all("batch_size" not in batch.data for batch in gas.SubgraphLoader(graph, log=False))


def test_other_parts_and_a_sampler_of_batches_are_no_matter_of_it():
    graph = clustered()
    gas.SubgraphLoader(graph, batch_size=4, log=False)
    ptr = torch.tensor([0, 10, graph.num_nodes])
    assert gas.SubgraphLoader(graph, ptr, log=False).batch_size == 1
    gas.SubgraphLoader(graph, ptr, batch_size=2, log=False)
    assert graph.batch_size == 4
    sampler = BatchSampler(SequentialSampler(range(8)), 3, drop_last=False)
    assert len(gas.SubgraphLoader(graph, batch_sampler=sampler, log=False)) == 3
    graph, ptr = clustered_graph(4)
    gas.SubgraphLoader(graph, ptr, batch_size=2, log=False)
    assert "batch_size" not in graph


def test_inference_takes_as_many_parts_as_a_sampler_of_batches():
    sampler = BatchSampler(SequentialSampler(range(8)), 3, drop_last=False)
    loader = gas.SubgraphLoader(clustered(), batch_sampler=sampler, log=False)
    assert [batch.batch_size for batch in loader] == [
        batch.batch_size for batch in loader.plain_loader()
    ]
    assert loader.parts_per_batch == 3
    batches = [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert gas.SubgraphLoader(clustered(), batch_sampler=batches, log=False).parts_per_batch == 1


def test_a_graph_of_a_neighbour_loader_and_one_cut_again_begin_anew():
    data = random_graph()
    data.batch_size = 1024
    graph = gas.cluster(data, 8, log=False)
    assert data.batch_size == 1024
    assert gas.SubgraphLoader(graph, log=False).batch_size == 1
    graph = clustered(1)
    gas.SubgraphLoader(graph, batch_size=5, log=False)
    assert "batch_size" not in gas.cluster(graph, 4, log=False)
    assert "batch_size" not in gas.permute(graph, torch.arange(graph.num_nodes), log=False)


def test_inference_and_verification_take_it():
    graph = clustered()
    net = GraphSAGE(graph.num_features, 4, 2, 3)
    model = gas.to_scalable(net, graph)
    with torch.no_grad():
        expected = net.eval()(graph.x, graph.edge_index)[graph.perm.argsort()]
    sizes = count_calls(model)
    gas.SubgraphLoader(graph, batch_size=4, log=False)
    torch.testing.assert_close(model.predict(graph), expected, atol=1e-5, rtol=1e-4)
    assert len(sizes) == 2
    sizes.clear()
    model.predict(graph, batch_size=1)
    assert len(sizes) == 8
    sizes.clear()
    assert gas.verify(model, graph)
    assert sizes[-6:] == 3 * sizes[-2:]  # Two sweeps and inference, of two batches each.
    assert graph.batch_size == 4


def test_a_typed_graph_remembers_it():
    graph = gas.cluster(typed(), num_parts=8, log=False)
    net = to_hetero(GraphSAGE(3, 4, 2, 3), graph.metadata())
    model = gas.to_scalable(net, graph)
    loader = gas.SubgraphLoader(graph, batch_size=4, log=False)
    assert graph.batch_size == 4
    assert "batch_size" not in next(iter(loader))._global_store
    assert gas.SubgraphLoader(graph, log=False).batch_size == 4
    sizes = count_calls(model)
    model.predict(graph, batch_size=8)
    alone = len(sizes)
    sizes.clear()
    model.predict(graph)
    assert len(sizes) == 2 * alone
    assert graph.batch_size == 4
    data = typed()
    data.batch_size = 7
    assert gas.SubgraphLoader(gas.cluster(data, num_parts=8, log=False)).batch_size == 1


def test_what_fits_is_remembered_in_a_folder(tmp_path):
    data = random_graph()
    model = gas.to_scalable(GraphSAGE(data.num_features, 4, 2, 3), data)
    options = {"model": model, "memory": "1MB", "log": False}
    assert gas.cluster(data, "auto", **options).batch_size == 1
    graph = gas.cluster(data, "auto", out=tmp_path / "graph", **options)
    assert graph.batch_size == gas.open_graph(tmp_path / "graph").batch_size == 1
    assert "batch_size" not in data
