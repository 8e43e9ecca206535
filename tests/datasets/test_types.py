"""Types of edges and nodes from tables and arrays, in memory and imported, and ``HeteroData``."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT
from scipy import sparse as scipy_sparse
from torch_geometric.data import HeteroData

import gas
from gas.datasets import import_graph

tables = pytest.mark.requires("pyarrow")
EDGES = "source,target,type,t\na,p,writes,1\nb,p,writes,2\np,q,cites,3\nq,a,likes,4\nb,p,reads,5\n"
NODES = "id,type,f,label\np,paper,3,u\na,author,1,\nb,author,2,\nq,paper,4,v\n"


def folder(path, edges=EDGES, nodes=NODES, **arrays):
    path.mkdir(exist_ok=True)
    for name, text in (("edges", edges), ("nodes", nodes)):
        if text is not None:
            (path / f"{name}.csv").write_text(text)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def opened(path, **options):
    return gas.open_graph(path, num_splits=1, log=False, **options)


@tables
@pytest.mark.filterwarnings("ignore:no edge has a reverse")
def test_types_are_numbered_by_their_names(tmp_path, capsys):
    data = gas.open_graph(folder(tmp_path / "g", nodes=NODES.replace(",label", ",y")))
    assert data.edge_type.tolist() == [3, 3, 0, 1, 2]
    assert data.edge_type.dtype == torch.long
    assert data.edge_type_names == ["cites", "likes", "reads", "writes"]
    assert data.node_type.tolist() == [1, 0, 0, 1]
    assert data.node_type_names == ["author", "paper"]
    assert data.edge_attr.tolist() == [[1], [2], [3], [4], [5]]
    assert data.x.size(1) == 1
    shown = capsys.readouterr().err
    assert "4 types of edges in data.edge_type, 2 types of nodes in data.node_type" in shown
    assert "hetero=True" in shown
    assert "--hetero" in shown


@tables
@pytest.mark.parametrize("role", ["type", "edge_type"])
def test_columns_of_types_by_name(tmp_path, role):
    edges = EDGES.replace("type", "relation")
    data = opened(folder(tmp_path / "g", edges=edges), columns={role: "relation"})
    assert data.edge_type_names == ["cites", "likes", "reads", "writes"]
    assert data.node_type_names == ["author", "paper"]


@tables
def test_integers_are_numbered_without_gaps(tmp_path):
    edges = "source,target,type\n0,1,30\n1,2,7\n2,0,30\n2,1,100\n"
    data = opened(folder(tmp_path / "g", edges=edges, nodes=None))
    assert data.edge_type.tolist() == [1, 0, 1, 2]
    assert data.edge_type_names == [7, 30, 100]


def test_arrays_and_the_names_of_their_numbers(tmp_path):
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    path = folder(tmp_path / "g", None, None, edge_index=edges, edge_type=np.int8([2, 0, 2]))
    assert opened(path).edge_type_names == [0, 2]
    (path / "edge_types.txt").write_text("#m\nis, perhaps\n@\n")
    data = opened(path)
    assert data.edge_type.tolist() == [2, 0, 2]
    assert data.edge_type_names == ["#m", "is, perhaps", "@"]
    np.save(path / "node_type.npy", np.array(["b", "a", "b"]))
    np.save(path / "x.npy", np.ones((3, 2)))
    assert opened(path).node_type.tolist() == [1, 0, 1]


@tables
def test_a_reverse_has_its_type_and_may_be_there_under_another(tmp_path):
    edges = "source,target,type\n0,1,a\n1,0,b\n0,1,a\n1,2,a\n2,0,b\n2,2,b\n"
    data = opened(folder(tmp_path / "g", edges=edges, nodes=None), undirected=True)
    triples = [*zip(*data.edge_index.tolist(), data.edge_type.tolist(), strict=True)]
    assert triples[6:] == [(2, 1, 0), (0, 2, 1)]


def contents(path):
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    said = json.loads(files.pop("graph.json"))
    counts = said["attributes"].pop("imported", None)
    return files, said, counts


def many(path, form, num_edges=3000, hub=0):
    """Return a graph with duplicates and reverses of the same and of other types."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(25, size=(2, num_edges))
    src[:hub], dst[:hub] = 3, 5
    src[hub : 2 * hub], dst[hub : 2 * hub] = 5, 3
    names = np.array(["likes", "knows", "7", "née"] if form == "text" else [9, 4, 7, 30])
    kinds = names[rng.integers(3 if hub else 4, size=num_edges)]
    kinds[:hub][kinds[:hub] == names[1]] = names[0]
    nodes = rng.integers(2, size=25)
    path.mkdir()
    if form == "array":
        np.save(path / "edge_index.npy", np.stack([src, dst]))
        np.save(path / "edge_type.npy", kinds)
        np.save(path / "node_type.npy", nodes)
        (path / "edge_types.txt").write_text("\n".join(f"n{i}" for i in range(31)))
        return path
    rows = zip(src, dst, kinds, rng.random(num_edges).round(3), strict=True)
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    (path / "edges.csv").write_text("source,target,type,weight\n" + text)
    text = "".join(f"{i},{'ab'[kind]},{i / 8}\n" for i, kind in enumerate(nodes))
    (path / "nodes.csv").write_text("id,type,f\n" + text)
    return path


@tables
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize(
    ("form", "num_edges", "hub"),
    [("text", 3000, 0), ("numbers", 3000, 0), ("array", 3000, 0), ("text", 40000, 12000)],
)
def test_an_import_has_the_same_types(tmp_path, undirected, form, num_edges, hub, monkeypatch):
    if hub:  # Edges between two nodes are more than are sorted at once.
        monkeypatch.setattr("gas.datasets.importing.sorting.SORT_BYTES", 10**3)
    path = many(tmp_path / "g", form, num_edges, hub)
    graph = import_graph(path, tmp_path / "a", undirected=undirected, memory="1MiB", log=False)
    data = opened(path, undirected=undirected)
    gas.cluster(data, 1, out=tmp_path / "b", log=False)
    mine, said, counts = contents(tmp_path / "a")
    theirs, known, _ = contents(tmp_path / "b")
    assert mine == theirs
    assert said == known
    triples = zip(*data.edge_index.tolist(), data.edge_type.tolist(), strict=True)
    assert counts["duplicates"] == data.num_edges - len(set(triples))
    assert graph.edge_type_names == data.edge_type_names


@tables
@pytest.mark.filterwarnings("ignore:no edge has a reverse")
def test_hetero_data(tmp_path, capsys):
    path = folder(tmp_path / "g")
    data = gas.open_graph(path, hetero=True, num_splits=None)
    assert isinstance(data, HeteroData)
    assert set(data.node_types) == {"author", "paper"}
    assert data["paper"].x.tolist() == [[3], [4]]
    assert data["author"].x.tolist() == [[1], [2]]
    assert data["paper"].node_id.tolist() == ["p", "q"]
    assert data["paper"].y.tolist() == [0, 1]
    assert data["paper"].train_mask.size(0) == 2
    assert data.classes == ["u", "v"]
    assert "y" not in data["author"]
    assert "train_mask" not in data["author"]
    assert {kind: data[kind].edge_index.tolist() for kind in data.edge_types} == {
        ("author", "reads", "paper"): [[1], [0]],
        ("author", "writes", "paper"): [[0, 1], [0, 0]],
        ("paper", "cites", "paper"): [[0], [1]],
        ("paper", "likes", "author"): [[1], [0]],
    }
    assert data["paper", "likes", "author"].edge_attr.tolist() == [[4]]
    shown = capsys.readouterr().err
    assert "2 author, 2 paper" in shown
    assert "hint" not in shown
    both = opened(path, hetero=True, undirected=True)
    assert both["paper", "cites", "paper"].edge_index.tolist() == [[0, 1], [1, 0]]
    assert both["paper", "rev_writes", "author"].edge_index.tolist() == [[0, 0], [0, 1]]
    assert both["author", "rev_likes", "paper"].edge_attr.tolist() == [[4]]


def test_hetero_data_without_types(tmp_path):
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    path = folder(tmp_path / "g", None, None, edge_index=edges)
    scipy_sparse.save_npz(path / "x.npz", scipy_sparse.csr_array(np.eye(3)))
    data = opened(path, hetero=True)
    assert data.edge_types == [("node", "to", "node")]
    assert data["node", "to", "node"].edge_index.tolist() == edges.tolist()
    assert torch.equal(data["node"].x.to_dense(), torch.eye(3))


@pytest.mark.requires("shared")
@pytest.mark.filterwarnings("error")
def test_wordnet():
    path = ROOT.parent / "shared/data/WordNet"
    data = opened(path)
    assert data.edge_type.shape == (377592,)
    assert len(data.edge_type_names) == 26
    assert data.edge_type_names[data.edge_type[0]] in ("@", "~")
    hetero = opened(path, hetero=True)
    assert len(hetero.edge_types) == 26
    assert hetero["node"].x.shape == data.x.shape
    assert sum(hetero[kind].num_edges for kind in hetero.edge_types) == data.num_edges


def parquet(path, types):
    import pyarrow as pa
    from pyarrow import parquet as files

    path.mkdir()
    ends = {"source": [0, 1, 2], "target": [1, 2, 0]}
    files.write_table(pa.table({**ends, "type": types(pa)}), path / "edges.parquet")
    return path


@tables
@pytest.mark.parametrize(
    ("types", "match"),
    [
        (lambda pa: pa.array(["a", "", "b"], pa.large_string()), "no type in row 1"),
        (lambda pa: pa.array([1.0, float("nan"), 1.0]), "no type in row 1"),
        (lambda pa: pa.array([1, None, 2]), "no type in row 1"),
        (lambda pa: pa.array([1, 2, 3], pa.date32()), "has the type datetime.date"),
        (lambda pa: pa.array([1, 2, 3], pa.timestamp("ns")), "has the type"),
    ],
)
def test_an_import_refuses_the_types_that_opening_does(tmp_path, types, match):
    path = parquet(tmp_path / "g", types)
    with pytest.raises(ValueError, match=match):
        opened(path)
    with pytest.raises(ValueError, match=match):
        import_graph(path, tmp_path / "out", log=False)


def test_an_import_refuses_blanks_in_an_array_of_types(tmp_path):
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    types = np.array(["a", "", "b"])
    path = folder(tmp_path / "g", None, None, edge_index=edges, edge_type=types)
    with pytest.raises(ValueError, match="no type in row 1"):
        import_graph(path, tmp_path / "out", log=False)


def test_an_import_warns_of_names_without_types(tmp_path):
    path = folder(tmp_path / "g", None, None, edge_index=np.array([[0, 1, 2], [1, 2, 0]]))
    (path / "edge_types.txt").write_text("a\nb\n")
    with pytest.warns(UserWarning, match=r"edge_types.txt without edge_type.npy"):
        import_graph(path, tmp_path / "out", log=False)


def archive(path, **arrays):
    edges = np.array([[0, 1, 2, 3], [1, 0, 3, 2]])
    np.savez(path, **{"x": np.ones((4, 2)), "edge_index": edges, "y": np.arange(4) % 2} | arrays)
    return path


def test_types_in_archives_may_be_text_of_one_for_each_node(tmp_path):
    path = archive(tmp_path / "g.npz", node_type=np.array(["b", "a", "b", "a"]))
    assert set(opened(path, hetero=True).node_types) == {"a", "b"}
    path = archive(tmp_path / "h.npz", node_type=np.array([0, 1, 0]))
    with pytest.raises(ValueError, match=r"'node_type' has shape \[3\], expected \[4\]"):
        opened(path, hetero=True)


def test_types_without_targets_have_no_y(tmp_path):
    kinds = np.array([0, 1, 0, 1])
    y = np.array([0.5, np.nan, 1.5, np.nan])
    path = archive(tmp_path / "g.npz", node_type=kinds, y=y)
    with pytest.raises(ValueError, match="NaN"):
        opened(path)
    data = opened(path, hetero=True)
    assert data["0"].y.tolist() == [0.5, 1.5]
    assert not {"y", "train_mask"} & set(data["1"].keys())
    masks = {f"{k}_mask": np.arange(6) == 2 * i for i, k in enumerate(("train", "val", "test"))}
    more = {"x": np.ones((6, 2)), "y": np.eye(6)[:, :2], "node_type": np.arange(6) % 2}
    data = opened(archive(tmp_path / "h.npz", **more, **masks), hetero=True)
    assert data["0"].y.shape == (3, 2)
    assert not {"y", "train_mask"} & set(data["1"].keys())


@tables
def test_reverses_are_the_same_with_and_without_hetero(tmp_path):
    edges = "source,target,type\n0,1,a\n1,0,b\n0,1,a\n1,2,a\n2,0,b\n2,2,b\n"
    path = folder(tmp_path / "g", edges=edges, nodes=None)
    data, hetero = opened(path, undirected=True), opened(path, undirected=True, hetero=True)
    for number, name in enumerate(data.edge_type_names):
        mine = data.edge_index[:, data.edge_type == number]
        assert torch.equal(hetero["node", name, "node"].edge_index, mine)
