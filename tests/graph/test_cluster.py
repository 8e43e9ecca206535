"""``gas.cluster``: a graph is transformed, cut into parts and renumbered in one call."""

import sys

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data

import gas
from gas.graph import find_original_graph
from gas.graph.cluster import to_original_order
from gas.graph.edges import with_edge_index


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


@pytest.mark.parametrize("cls", [gas.models.GCN, gas.models.GraphSAGE])
def test_wrong_ids_are_refused_before_a_transform(cls):
    data = make()
    data.edge_index = data.edge_index.clone()
    data.edge_index[1, 3] = 60
    model = cls(60, data.num_features, 8, 3, num_layers=2)
    with pytest.raises(ValueError, match="'edge_index' holds the node id 60, but 'num_nodes' is"):
        gas.cluster(data, 6, model=model, log=False)


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
    assert torch.equal(to_original_order(graph, graph.x), make().x)


def test_the_original_is_known_while_it_lasts():
    data = make()
    graph = gas.cluster(data, 6, log=False)
    assert find_original_graph(graph, ["x"]).x is data.x
    again = gas.cluster(gas.cluster(data, 1, log=False), 6, log=False)
    assert find_original_graph(again, ["x"]) is None  # Its ``perm`` is of another.
    overwritten = gas.cluster(data, 6, log=False, in_place=True)
    assert find_original_graph(overwritten, ["x"]) is None
    assert find_original_graph(graph, ["x"]) is None  # Its original was.


def test_clustered_graphs():
    graph = gas.cluster(make(), 6, log=False)
    with pytest.raises(ValueError, match="'data' is clustered already, into 6 parts"):
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


# In place -----------------------------------------------------------------------------------------


def with_everything(num_nodes=300, num_edges=2000):
    torch.manual_seed(3)
    group = torch.arange(num_nodes) % 3
    return Data(
        x=torch.rand(num_nodes, 37),
        y=torch.randint(4, (num_nodes,)),
        pos=torch.rand(num_nodes, 2, 3),
        train_mask=torch.stack([group == 0, group == 1], dim=1),
        train_idx=torch.randperm(num_nodes)[:50],
        edge_index=torch.randint(num_nodes, (2, num_edges)),
        edge_attr=torch.rand(num_edges, 5),
        edge_label_index=torch.randint(num_nodes, (2, 9), dtype=torch.int32),
    )


def same(mine, other):
    assert set(mine.keys()) == set(other.keys())
    for key, value in other:
        assert mine[key].dtype == value.dtype
        assert torch.equal(mine[key], value), key


def test_permuting_in_place_is_the_same_in_the_same_memory():
    data, perm = with_everything(), torch.randperm(300)
    expected = gas.permute(data.clone(), perm, log=False)
    found = gas.permute(data, perm, log=False, in_place=True)
    same(found, expected)
    for key in ("x", "y", "pos", "train_mask", "edge_index", "edge_attr"):
        assert found[key].data_ptr() == data[key].data_ptr()


def test_clustering_in_place_is_the_same():
    data = with_everything()
    expected = gas.cluster(data.clone(), 5, log=False)
    same(gas.cluster(data, 5, log=False, in_place=True), expected)


def test_what_shares_memory_is_made_anew():
    base, perm = torch.rand(300, 40), torch.randperm(300)
    data = Data(
        x=base[:, :20].t().contiguous().t(),  # By columns.
        left=base[:, :8],
        whole=base,
        again=base,
        ones=torch.ones(1, 3).expand(300, 3),
        learnt=torch.rand(300, 2, requires_grad=True),
        order=perm,
        edge_index=torch.randint(300, (2, 900)),
    )
    data.edge_label_index = data.edge_index[:, :7]
    expected = gas.permute(data.clone(), perm.clone(), log=False)
    before = {key: value.clone() for key, value in data}
    found = gas.permute(data, perm, log=False, in_place=True)
    same(found, expected)
    same(data, Data(**before))  # Nothing was theirs alone.


@pytest.mark.parametrize("transform", [None, T.ToUndirected()])
def test_edges_are_listed_for_a_transform_alone(transform, monkeypatch, tmp_path):
    gas.cluster(make(), 1, log=False, out=tmp_path / "whole")
    mapped, listed = gas.open_graph(tmp_path / "whole"), []

    def note(data):
        listed.append(data)
        return with_edge_index(data)

    monkeypatch.setattr(sys.modules["gas.graph.cluster"], "with_edge_index", note)
    model = gas.models.GraphSAGE(60, 5, 8, 3, num_layers=2)
    model.transform = transform
    graph = gas.cluster(mapped, 6, model=model, log=False)
    assert len(listed) == (transform is not None)
    assert torch.isfinite(model.predict(graph)).all()


LAYOUTS = {
    "csr": torch.Tensor.to_sparse_csr,
    "coo": torch.Tensor.to_sparse_coo,
    "csc": torch.Tensor.to_sparse_csc,
    "fused": lambda dense: gas.nn.Adjacency.of(dense.to_sparse_csr()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_of_any_layout_is_normalised_for_a_model(layout):
    """PyG normalises ``torch.sparse_csr`` and ``sparse_coo``, and returns two values of these."""
    dense = (torch.rand(20, 20) < 0.2) * torch.rand(20, 20)
    adj_t = LAYOUTS[layout](dense)
    model = gas.models.GCN(20, 5, 8, 3, 2).eval()
    data = Data(x=torch.randn(20, 5), adj_t=adj_t)
    dst, src = dense.nonzero().t()
    listed = Data(x=data.x, edge_index=torch.stack([src, dst]), edge_weight=dense[dst, src])
    listed = T.GCNNorm()(listed)
    expected = model(listed.x, listed.edge_index, edge_weight=listed.edge_weight)
    graph = gas.cluster(data, 4, model=model, method="random", log=False)
    torch.testing.assert_close(model.predict(graph), expected, rtol=1e-4, atol=1e-5)
