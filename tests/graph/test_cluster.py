"""``gas.cluster``: a graph is transformed, cut into parts and renumbered in one call."""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data

import gas
from gas.graph.cluster import in_first_order


def make(**attributes):
    torch.manual_seed(0)
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    data.train_idx = torch.tensor([3, 0, 59, 7])
    for key, value in attributes.items():
        data[key] = value
    return data


def test_it_is_metis_and_permute():
    data = make()
    graph = gas.cluster(data, 6, log=False)
    perm, ptr = gas.metis(data.edge_index, 6, num_nodes=60, log=False)
    expected = gas.permute(data, perm, log=False)
    assert torch.equal(graph.perm, perm)
    assert torch.equal(graph.parts, ptr)
    assert set(graph.keys()) - set(expected.keys()) == {"perm", "parts"}
    for key, value in expected:
        assert torch.equal(graph[key], value)
    assert torch.equal(graph.x, data.x[graph.perm])
    assert "perm" not in data


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.int32, torch.uint8])
def test_ids_are_any_integers(dtype):
    data = make()
    expected = gas.cluster(data, 6, log=False)
    data.edge_index = data.edge_index.to(dtype)
    graph = gas.cluster(data, 6, log=False)
    assert torch.equal(graph.edge_index, expected.edge_index)
    (batch, *_) = next(iter(gas.SubgraphLoader(graph, log=False)))
    (other, *_) = next(iter(gas.SubgraphLoader(expected, log=False)))
    assert torch.equal(batch.e_id, other.e_id)


def test_what_partitions_is_up_to_the_caller():
    data = make()
    one, other = (gas.cluster(data, 6, method="random", seed=s, log=False) for s in (0, 1))
    perm, _ = gas.metis(data.edge_index, 6, num_nodes=60, method="random", seed=1, log=False)
    assert torch.equal(other.perm, perm)
    assert not torch.equal(one.perm, perm)


def test_lists_of_nodes_follow():
    data = make(test_nodes=torch.arange(60).flip(0), val_id=torch.tensor([5], dtype=torch.int32))
    graph = gas.cluster(data, 6, log=False)
    for key in ("train_idx", "test_nodes", "val_id"):
        assert torch.equal(graph.x[graph[key]], data.x[data[key].long()])
    data.train_idx = torch.tensor([0, 60])
    with pytest.raises(
        ValueError, match=r"'train_idx' holds the node id 60, expected ids in \[0, 60\)"
    ):
        gas.cluster(data, 6, log=False)


@pytest.mark.parametrize("cls", [gas.models.GCN, gas.models.GIN, gas.models.GraphSAGE])
def test_a_model_says_how_the_graph_is_transformed(cls):
    data = make()
    before = data.clone()
    model = cls(60, 5, 8, 3, 2)
    graph = gas.cluster(data, 6, model=model, log=False)
    expected = data if cls.transform is None else cls.transform(data.clone())
    assert graph.num_edges == expected.num_edges
    perm, _ = gas.metis(expected.edge_index, 6, num_nodes=60, log=False)
    expected = gas.permute(expected, perm, log=False)
    assert torch.equal(graph.edge_weight, expected.edge_weight)
    for key, value in before:
        assert torch.equal(data[key], value)


def test_graphs_given_as_adj_t():
    data = random_graph()
    matrix = gas.nn.Adjacency.of(data.edge_index, 60).to_torch_sparse()
    graph = gas.cluster(Data(x=data.x, adj_t=matrix), 6, log=False)
    dense = matrix.to_dense()[graph.perm][:, graph.perm]
    assert torch.equal(graph.adj_t.to_dense(), dense)


def test_the_first_order():
    graph = gas.cluster(make(), 6, log=False)
    assert torch.equal(in_first_order(graph, graph.x), make().x)


def test_clustered_graphs():
    graph = gas.cluster(make(), 6, log=False)
    with pytest.raises(ValueError, match=r"'data' has 'parts' already, which gas.cluster sets"):
        gas.cluster(graph, 4, log=False)
    perm = torch.randperm(60)
    again = gas.permute(graph, perm, log=False)
    assert "parts" not in again  # They would be wrong.
    assert torch.equal(again.x, make().x[again.perm])
    with pytest.raises(ValueError, match="'ptr' is missing, and the graph has no 'parts'"):
        gas.SubgraphLoader(again)


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
def test_loaders_take_it(layout):
    graph = gas.cluster(T.GCNNorm()(make()), 6, log=False)
    for cls in (gas.SubgraphLoader, gas.EvalSubgraphLoader):
        given = cls(graph, batch_size=2, layout=layout, log=False)
        told = cls(graph, graph.parts, 2, layout=layout, log=False)
        for a, b in zip(given, told, strict=True):
            assert torch.equal(a.n_id, b.n_id)
            assert torch.equal(a.data.x, b.data.x)
            assert torch.equal(a.data.perm, graph.perm[a.n_id])
            assert "parts" not in a.data


def test_as_many_parts_as_nodes():  # ``parts`` has one row more than there are nodes, or as many.
    data = Data(x=torch.rand(5, 2), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    for num_parts in (4, 5):
        graph = gas.cluster(data, num_parts, log=False)
        assert graph.parts.numel() == num_parts + 1
        batches = list(gas.SubgraphLoader(graph, log=False))
        assert all("parts" not in batch.data for batch in batches)
