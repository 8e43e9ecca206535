"""PyG's stores: graph folders as such, and such as a source."""

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data, EdgeAttr, TensorAttr
from torch_geometric.loader import NeighborLoader
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gas
from gas.datasets import FolderStore, import_graph


def folder(tmp_path, **changes):
    data = random_graph()
    for key, value in changes.items():
        data[key] = value(data)
    return gas.cluster(data, 6, log=False, out=tmp_path / "graph")


def stores(data, layout="coo", group=None, kind=None):
    features, graph = MyFeatureStore(), MyGraphStore()
    for key in ("x", "y", "train_mask"):
        features.put_tensor(data[key], group_name=group, attr_name=key, index=None)
    src, dst = data.edge_index
    edges, size = (src, dst), (60, 60)
    if layout != "coo":
        ends = (dst, src) if layout == "csc" else (src, dst)
        order = torch.argsort(ends[0], stable=True)
        ptr = torch.nn.functional.pad(torch.bincount(ends[0], minlength=60).cumsum(0), (1, 0))
        other = ends[1][order]
        edges = (other, ptr) if layout == "csc" else (ptr, other)
    graph.put_edge_index(edges, edge_type=kind, layout=layout, size=size)
    return features, graph


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
@pytest.mark.parametrize("typed", [False, True])
def test_stores_are_a_source(layout, typed, tmp_path):
    data = random_graph()
    names = {"group": "node", "kind": ("node", "to", "node")} if typed else {}
    graph = import_graph(stores(data, layout, **names), tmp_path / "graph", log=False)
    expected = gas.cluster(data, 1, log=False, out=tmp_path / "expected")
    assert set(graph.keys()) == set(expected.keys())
    for key in ("rowptr", "col", "x", "y", "train_mask", "perm", "parts"):
        files = [(tmp_path / name / f"{key}.npy").read_bytes() for name in ("graph", "expected")]
        assert files[0] == files[1], key
    assert gas.cluster(graph, 4, out=tmp_path / "parts", log=False).parts.numel() == 5


def test_what_is_both(tmp_path):
    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges, 2)
    graph = import_graph(data, tmp_path / "graph", log=False)
    expected = gas.cluster(data, 1, log=False, out=tmp_path / "expected")
    assert torch.equal(graph.edge_attr, expected.edge_attr)
    again = import_graph(FolderStore(tmp_path / "graph"), tmp_path / "again", log=False)
    assert torch.equal(again.adj_t.to_dense(), graph.adj_t.to_dense())
    assert torch.equal(again.x, graph.x)


def test_tensors_of_edges_are_left_out(tmp_path):
    features, graph = stores(random_graph(), group="node", kind=("node", "to", "node"))
    features.put_tensor(
        torch.ones(240), group_name=("node", "to", "node"), attr_name="time", index=None
    )
    with pytest.warns(UserWarning, match="the tensor 'time' of .* left out"):
        found = import_graph((features, graph), tmp_path / "graph", log=False)
    assert "time" not in found


def words(data):
    return torch.where(data.x > 0.5, data.x, 0).to_sparse_csr()


@pytest.mark.parametrize(
    "x",
    [lambda d: d.x, lambda d: gas.quantize(d.x, "int8"), words],
    ids=["dense", "int8", "sparse"],
)
def test_a_folder_is_both_stores(x, tmp_path):
    data = folder(tmp_path, x=x)
    store = FolderStore(tmp_path / "graph")
    assert repr(store) == "FolderStore(60 nodes, 240 edges)"
    names = {attr.attr_name for attr in store.get_all_tensor_attrs()}
    assert names == {"x", "y", "train_mask"}
    dense = data.x.to_dense() if data.x.layout != torch.strided else data.x[:]
    index = torch.tensor([7, 0, 7])
    for rows in (index, slice(3, 9), torch.arange(60) < 5):
        found = store.get_tensor(group_name=None, attr_name="x", index=rows)
        assert torch.equal(found.to_dense(), dense[rows])
    for rows in (None, slice(None)):
        found = store.get_tensor(group_name=None, attr_name="y", index=rows)
        assert torch.equal(found, data.y)
    assert store.get_tensor_size(TensorAttr(None, "x", index=None)) == (60, 5)
    assert store.get_tensor_size(TensorAttr(None, "z", index=None)) is None
    assert store.get_tensor(TensorAttr("node", "x", index=None)) is None
    (attr,) = store.get_all_edge_attrs()
    row, colptr = store.get_edge_index(attr)
    assert torch.equal(colptr, data.adj_t.crow_indices().long())
    assert torch.equal(row, data.adj_t.col_indices().long())
    assert store.get_edge_index(attr)[0] is row
    src, dst, _ = store.coo()
    adj = torch.zeros(60, 60).index_put_((dst[None], src[None]), torch.ones(1), accumulate=True)
    assert torch.equal(adj, data.adj_t.to_dense())
    with pytest.raises(KeyError):
        store.get_edge_index(EdgeAttr(("a", "to", "b"), "csc"))


@pytest.mark.requires("torch_sparse")
@pytest.mark.filterwarnings("ignore:Using 'NeighborLoader' without a 'pyg-lib'")
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
@pytest.mark.parametrize("codec", [None, "float16"])
def test_pyg_samples_from_it(codec, tmp_path):
    """All neighbours of all nodes, one hop away: what the graph has."""
    data = folder(tmp_path, x=lambda d: d.x if codec is None else gas.quantize(d.x, codec))
    store = FolderStore(tmp_path / "graph")
    loader = NeighborLoader(
        (store, store), num_neighbors=[-1], batch_size=7, input_nodes=torch.arange(60)
    )
    seen = torch.zeros(60, 60)
    for batch in loader:
        assert type(batch) is Data
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.y, data.y[batch.n_id])
        src, dst = batch.n_id[batch.edge_index]
        seen.index_put_((dst, src), torch.ones(1), accumulate=True)
    assert torch.equal(seen, data.adj_t.to_dense())
