import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor

import gas
from gas.graph.edges import check_weight, read_csr, read_edges, read_graph, to_csr
from gas.graph.layout import implicit_ones, layout_of, sort_by_row
from gas.native.rows import sparse_csr


def test_read_edges_of_every_representation():
    edge_index = random_graph().edge_index
    unique = torch.unique(edge_index, dim=1)
    adj_t = to_torch_csr_tensor(unique.flip(0), size=(60, 60))
    for adj in (adj_t, adj_t.to_sparse_coo(), adj_t.to_sparse_csc()):
        edges = read_edges(adj)
        found = torch.unique(torch.stack([edges.src, edges.dst]), dim=1)
        assert torch.equal(found, unique)
        assert edges.num_nodes == 60
    edges = read_edges(edge_index.int(), 60)
    assert torch.equal(torch.stack([edges.src, edges.dst]), edge_index)
    assert read_edges(torch.empty(2, 0, dtype=torch.long)).num_nodes == 0


def test_duplicates_of_a_coo_matrix_stay():
    index = torch.tensor([[0, 0, 1], [1, 1, 2]])
    adj_t = torch.sparse_coo_tensor(index, torch.ones(3), (3, 3), check_invariants=False)
    assert read_edges(adj_t).src.tolist() == [1, 1, 2]


def test_edge_index_class():
    from torch_geometric import EdgeIndex

    edge_index = EdgeIndex([[0, 1], [1, 2]], sparse_size=(3, 3))
    assert type(read_edges(edge_index).src) is torch.Tensor


def test_to_csr_keeps_ids_of_edges():
    data = random_graph()
    edges = read_graph(data)
    rowptr, col, e_id = to_csr(edges)
    assert torch.equal(edges.src[e_id], col)
    assert rowptr[-1] == 240
    assert to_csr(edges._replace(src=edges.src[e_id], dst=edges.dst[e_id])).e_id is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sort_by_row_has_an_end_for_every_row(device):
    """The meta device takes the way of a GPU."""
    rowptr, order = sort_by_row(torch.tensor([2, 0, 2], device=device), 4)
    assert rowptr.shape == (5,)
    assert order.shape == (3,)
    if device == "cpu":
        assert rowptr.tolist() == [0, 1, 1, 3, 3]
        assert order.tolist() == [1, 0, 2]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_in_order_is_read_where_it_lies(weighted, monkeypatch):
    (rowptr, col, _), _ = read_csr(random_graph())
    col = col.int()
    value = torch.rand(240) if weighted else implicit_ones(240)
    adj_t = sparse_csr(rowptr.int(), col, value, 60)
    monkeypatch.setattr("gas.graph.edges.read_graph", None)
    csr, weight = read_csr(Data(adj_t=adj_t))
    assert torch.equal(csr.rowptr, rowptr)
    assert csr.e_id is None
    assert csr.col.data_ptr() == col.data_ptr()
    assert weight.data_ptr() == value.data_ptr() if weighted else weight is None
    assert read_csr(Data(adj_t=adj_t), edge_weight=False)[1] is None
    loader = gas.SubgraphLoader(Data(adj_t=adj_t), torch.tensor([0, 30, 60]), log=False)
    assert loader._relabel.col.data_ptr() == col.data_ptr()


def test_a_graph_out_of_order_is_sorted():
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1])
    adj_t = sparse_csr(rowptr, col, torch.tensor([1.0, 2.0, 3.0]), 2)
    csr, weight = read_csr(Data(adj_t=adj_t))
    assert csr.col.tolist() == [0, 1, 1]
    assert csr.e_id.tolist() == [1, 0, 2]
    assert weight.tolist() == [2, 1, 3]


def test_ones_that_take_no_memory_are_no_values():
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    adj_t = sparse_csr(rowptr, col, implicit_ones(3), 2)
    assert layout_of(adj_t).value(adj_t) is None
    assert torch.equal(adj_t.to_dense(), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    assert torch.equal(adj_t @ torch.eye(2), adj_t.to_dense())
    assert gas.nn.Adjacency.of(adj_t).value is None
    twos = sparse_csr(rowptr, col, torch.full((1,), 2.0).expand(3), 2)
    assert layout_of(twos).value(twos).tolist() == [2, 2, 2]
    one = sparse_csr(torch.tensor([0, 1]), torch.tensor([0]), implicit_ones(1), 1)
    assert layout_of(one).value(one) is None


def test_adj_t_must_fit_the_features():
    data = Data(x=torch.ones(4, 2), adj_t=torch.eye(5).to_sparse_csr())
    with pytest.raises(ValueError, match="'x' has 4 rows, but 'adj_t' has 5"):
        read_graph(data)


@pytest.mark.parametrize(
    "kind", ["csr", pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse"))]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_edge_dropout(kind, weighted):
    edge_index = torch.unique(torch.randint(200, (2, 9000)), dim=1)
    value = torch.rand(edge_index.size(1)) + 1
    if kind == "csr":
        adj = to_torch_csr_tensor(edge_index, value if weighted else None, size=(200, 200))
    else:
        from torch_sparse import SparseTensor

        adj = SparseTensor.from_edge_index(edge_index, value if weighted else None, (200, 200))
    assert gas.drop_edges(adj, 0.0) is adj
    assert gas.drop_edges(adj, 0.5, training=False) is adj
    before, after = adj.to_dense(), gas.drop_edges(adj, 0.25).to_dense()
    kept = after != 0
    assert 0.7 < kept.sum() / (before != 0).sum() < 0.8
    scale = 1 / 0.75 if weighted else 1.0
    assert torch.allclose(after[kept], before[kept] * scale)


def test_edge_dropout_checks():
    with pytest.raises(ValueError, match="'p' is 1.0, expected a probability"):
        gas.drop_edges(torch.eye(3).to_sparse_csr(), 1.0)
    with pytest.raises(ValueError, match="use torch_geometric.utils.dropout_edge"):
        gas.drop_edges(torch.ones(2, 3).long(), 0.5)


def test_weights_are_a_column_or_a_row():
    data = random_graph()
    weight = torch.rand(240)
    for shape in ((240,), (240, 1)):
        data.edge_weight = weight.view(shape)
        assert torch.equal(read_graph(data).weight, weight)
    for wrong in (torch.rand(240, 2), torch.rand(239), torch.rand(1, 240)):
        data.edge_weight = wrong
        with pytest.raises(ValueError, match=r"'edge_weight' has shape .*: \[240\]"):
            read_graph(data)


def test_the_first_weight_that_is_not_finite_is_named(monkeypatch):
    monkeypatch.setattr("gas.graph.edges.BLOCK", 4)
    weight = torch.ones(12)
    check_weight(weight)
    check_weight(torch.arange(12))
    weight[6] = weight[9] = float("-inf")
    for start in (0, 100):
        with pytest.raises(ValueError, match=f"'edge_weight' holds -inf at the edge {start + 6}:"):
            check_weight(weight, start)
