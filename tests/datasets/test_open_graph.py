"""``gas.open_graph``: tables and arrays as strangers have them."""

import gzip

import numpy as np
import pytest
import torch

import gas

pytestmark = pytest.mark.requires("pyarrow")
EDGES = "source,target\na,b\nb,a\nb,c\nc,b\n"
NODES = "id,age,label,split,height\nc,3,red,test,.5\na,1,blue,train,1.5\nb,2,red,val,2.5\n"


def folder(path, **files):
    """Write files, by names in which ``__`` is a dot."""
    for name, content in files.items():
        file = path / name.replace("__", ".")
        if isinstance(content, str):
            file.write_text(content)
        else:
            np.save(file, content)
    return path


def opened(path, **options):
    return gas.open_graph(path, **{"log": False, **options})


def test_tables_of_nodes_and_edges(tmp_path, capsys):
    data = opened(folder(tmp_path, nodes__csv=NODES, edges__csv=EDGES), log=True)
    assert data.node_id.tolist() == ["c", "a", "b"]
    assert data.edge_index.tolist() == [[1, 2, 2, 0], [2, 1, 0, 2]]
    assert data.x.tolist() == [[3, 0.5], [1, 1.5], [2, 2.5]]
    assert data.x.dtype == torch.float32
    assert data.classes == ["blue", "red"]
    assert data.y.tolist() == [1, 0, 1]
    masks = [data[f"{part}_mask"].tolist() for part in ("train", "val", "test")]
    assert masks == [[False, True, False], [False, False, True], [True, False, False]]
    assert "split" not in data
    said = capsys.readouterr().err
    assert "3 nodes, 4 edges, 2 features, 2 classes" in said
    assert "nodes for training, validation, test: 1, 1, 1" in said


@pytest.mark.parametrize("suffix", ["tsv", "csv.gz", "parquet"])
def test_formats_say_the_same(tmp_path, suffix):
    expected = opened(folder(tmp_path, nodes__csv=NODES, edges__csv=EDGES))
    for name, text in (("nodes", NODES), ("edges", EDGES)):
        (tmp_path / f"{name}.csv").unlink()
        if suffix == "tsv":
            (tmp_path / f"{name}.tsv").write_text(text.replace(",", "\t"))
        elif suffix == "csv.gz":
            (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            from pyarrow import BufferReader, csv, parquet

            parquet.write_table(
                csv.read_csv(BufferReader(text.encode())), tmp_path / f"{name}.parquet"
            )
    found = opened(tmp_path)
    assert list(found.keys()) == list(expected.keys())
    for key, value in expected:
        assert str(found[key]) == str(value)


def test_any_integers_are_ids(tmp_path):
    nodes = "node_id,f,y\n900000000000,1,0\n-5,2,1\n7,3,\n"
    edges = "from,to,weight,when\n7,-5,.5,10\n-5,7,.5,10\n900000000000,7,2,11\n"
    data = opened(folder(tmp_path, nodes__csv=nodes, edges__csv=edges))
    assert data.node_id.tolist() == [900000000000, -5, 7]
    assert data.edge_index.tolist() == [[2, 1, 0], [1, 2, 2]]
    assert data.edge_weight.tolist() == [0.5, 0.5, 2]
    assert data.edge_attr.tolist() == [[10], [10], [11]]
    assert data.y.tolist() == [0, 1, -1]  # Unknown.
    assert "classes" not in data


def test_zeros_in_front_are_part_of_an_id(tmp_path):
    data = opened(folder(tmp_path, edges__csv="source,target\n007,7\n7,007\n"))
    assert data.node_id.tolist() == ["007", "7"]


def test_edges_alone(tmp_path):
    """Nodes are those that edges name, in the order of their ids."""
    (tmp_path / "any.csv").write_text("src,dst\n30,10\n10,30\n20,10\n")
    data = opened(tmp_path / "any.csv")
    assert data.node_id.tolist() == [10, 20, 30]
    assert data.edge_index.tolist() == [[2, 0, 1], [0, 2, 0]]
    assert data.num_nodes == 3
    (tmp_path / "no_names.txt").write_text("30 10\n10 30\n")
    assert opened(tmp_path / "no_names.txt").edge_index.tolist() == [[1, 0], [0, 1]]
    (tmp_path / "other_names.csv").write_text("cited,citing\n30,10\n10,30\n")
    assert opened(tmp_path / "other_names.csv").edge_index.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("transposed", [False, True])
def test_arrays(tmp_path, transposed):
    edges = np.array([[0, 1, 2], [1, 0, 0]], dtype=np.uint64)
    files = {
        "edges__npy" if transposed else "edge_index__npy": edges.T if transposed else edges,
        "x__npy": np.eye(4, dtype=">f8"),
        "y__npy": np.array([2, 1, 0, 2], dtype=np.uint16),
        "train_idx__npy": np.array([3, 0]),
        "val-idx__npy": np.array([1]),
        "test_mask__npy": np.array([0, 0, 1, 0]),
        "edge-weight__npy": np.array([1.0, 2.0, 3.0]),
    }
    data = opened(folder(tmp_path, **files))
    assert data.edge_index.tolist() == edges.tolist()
    assert torch.equal(data.x, torch.eye(4))
    assert data.y.tolist() == [2, 1, 0, 2]
    assert data.train_mask.tolist() == [True, False, False, True]
    assert data.val_mask.nonzero().tolist() == [[1]]
    assert data.test_mask.nonzero().tolist() == [[2]]
    assert data.edge_weight.tolist() == [1, 2, 3]
    assert "node_id" not in data


def test_files_apart_and_by_id(tmp_path):
    """In the order of the first that has ids; what isn't named has no label and no part."""
    files = {
        "node_ids__csv": "id\nb\na\nc\nd\n",
        "edges__csv": EDGES,
        "features__csv": "f,id\n1,a\n2,b\n3,c\n4,d\n",
        "labels__csv": "id,what\nc,1\nb,0\na,0\n",
        "train__csv": "id\nb\n",
        "valid__csv": "id\nc\n",
    }
    with pytest.raises(ValueError, match="has a 'train_mask' but no 'test_mask': add it"):
        opened(folder(tmp_path, **files))
    data = opened(folder(tmp_path, test__csv="node\na\n"))
    assert data.node_id.tolist() == ["b", "a", "c", "d"]
    assert data.x.view(-1).tolist() == [2, 1, 3, 4]
    assert data.y.tolist() == [0, 0, 1, -1]
    masks = [data[f"{part}_mask"].nonzero().tolist() for part in ("train", "val", "test")]
    assert masks == [[[0]], [[2]], [[1]]]


def test_rows_without_ids_are_in_order(tmp_path):
    files = {
        "edge__csv": "0,1\n1,0\n",
        "node-feat__csv": "1,2\n3,4\n5,6\n",
        "node-label__csv": "4\n5\n4\n",
        "train_mask__csv": "train_mask\ntrue\nfalse\nfalse\n",
        "val_mask__csv": "val_mask\n0\n0\n1\n",
        "test_mask__npy": np.array([False, True, False]),
    }
    data = opened(folder(tmp_path, **files))
    assert data.edge_index.tolist() == [[0, 1], [1, 0]]
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.y.tolist() == [4, 5, 4]
    assert [int(data[f"{part}_mask"].nonzero()) for part in ("train", "val", "test")] == [0, 2, 1]


def test_labels(tmp_path):
    edges = "source,target\n0,1\n1,0\n"
    for column, y, classes in (
        ("2019\n-1\n2021\n", [0, -1, 1], [2019, 2021]),  # Years are no numbers of classes.
        ("3.0\n\n0.0\n", [3, -1, 0], None),
        ("true\nfalse\ntrue\n", [1, 0, 1], None),
        ("x\n\nNA\n", [0, -1, -1], ["x"]),
        ("-1\n1\n-1\n", [0, 1, 0], [-1, 1]),
        ("-1\n\n1\n", [0, -1, 1], [-1, 1]),
        ("b\n a \na\n", [1, 0, 0], ["a", "b"]),
        ("0.5\n1\n2\n", [0.5, 1, 2], None),
        (f"{2**53}\n{2**53 + 1}\n\n", [0, 1, -1], [2**53, 2**53 + 1]),
    ):
        nodes = "id,y,y2\n" + "".join(f"{i},{v},1\n" for i, v in enumerate(column.splitlines()))
        data = opened(folder(tmp_path, edges__csv=edges, nodes__csv=nodes))
        assert data.y.tolist() == y
        assert data.get("classes") == classes
        assert data.x.tolist() == [[1], [1], [1]]


@pytest.mark.parametrize(
    ("early", "late", "y", "classes"),
    [
        ("", "b,a", [-1, 1, 0], ["a", "b"]),
        ("3", "b,3", [0, 1, 0], ["3", "b"]),
        ("3", "0.5,", [3, 0.5], None),
        ("0.5", "b,a", [0, 2, 1], ["0.5", "a", "b"]),
    ],
)
def test_labels_whose_type_shows_late(tmp_path, early, late, y, classes):
    """The type of a column is that of its first megabyte."""
    late = [label for label in late.split(",") if label]
    size = 1 << 17
    rows = [f"{i},{label}\n" for i, label in enumerate([early] * size + late)]
    folder(tmp_path, nodes__csv="id,label\n" + "".join(rows), edges__csv="source,target\n0,1\n")
    data = opened(tmp_path)
    assert data.y[[0, *range(size, size + len(late))]].tolist() == y
    assert data.get("classes") == classes


def test_labels_that_read_as_the_same_number_are_one_class(tmp_path):
    nodes = "id,label\n0,1\n1,1.0\n2,a\n3,NA\n"
    data = opened(folder(tmp_path, nodes__csv=nodes, edges__csv="source,target\n0,1\n"))
    assert data.y.tolist() == [0, 0, 1, -1]
    assert data.classes == ["1", "a"]


def test_labels_of_unsigned_type(tmp_path):
    folder(tmp_path, x__npy=np.ones((2, 1)), y__npy=np.array([1, 0], dtype=np.uint8))
    assert opened(folder(tmp_path, edges__csv="0,1\n1,0\n")).y.tolist() == [1, 0]


def test_lists_are_features_and_labels(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    nodes = {
        "f": [1, 2],
        "id": ["u", "v"],
        "emb": [[1.0, 2.0], [3.0, 4.0]],
        "labels": [[0, 1], [1, 0]],
    }
    parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    data = opened(folder(tmp_path, edges__csv="source,target\nu,v\nv,u\n"))
    assert data.x.tolist() == [[1, 1, 2], [2, 3, 4]]
    assert data.y.tolist() == [[0, 1], [1, 0]]


def test_undirected(tmp_path):
    """The reverse of edges that lack it, with what they carry; loops have it."""
    edges = "source,target,weight,kind\n0,1,1,7\n1,2,2,8\n2,1,3,9\n2,2,4,6\n"
    path = folder(tmp_path, edges__csv=edges)
    data = opened(path, undirected=True)
    assert data.edge_index.tolist() == [[0, 1, 2, 2, 1], [1, 2, 1, 2, 0]]
    assert data.edge_weight.tolist() == [1, 2, 3, 4, 1]
    assert data.edge_attr.view(-1).tolist() == [7, 8, 9, 6, 7]
    assert opened(path).num_edges == 4  # Some have their reverse: nothing to say.


def test_what_may_not_be_meant_is_warned_of(tmp_path):
    """At the line of the caller, who can act on it; nothing with log=False."""
    path = folder(tmp_path, edges__csv="source,target\n0,1\n1,2\n")
    with pytest.warns(match="no edge has a reverse, .*: undirected=True adds") as caught:
        gas.open_graph(path)
    assert caught[0].filename == __file__
    gas.open_graph(path, undirected=True)  # Warnings are errors here.
    opened(path)
    masks = {
        f"{part}_mask__npy": np.arange(3) == (part == "train") for part in ("train", "val", "test")
    }
    folder(path, y__npy=np.arange(3), edges__csv="source,target\n0,1\n1,0\n2,1\n1,1\n", **masks)
    with pytest.warns(match="lack a reverse|share") as caught:
        gas.open_graph(path)
    said = [str(one.message) for one in caught]
    assert said[0].startswith("33.3 % of edges lack a reverse")
    assert said[1:] == ["'val_mask' and 'test_mask' share 1 nodes"]


def test_edges_that_are_only_named(tmp_path):
    path = folder(tmp_path, edges__csv="source,target\n")
    with pytest.raises(ValueError, match=r"has no nodes, .*: write a row for each edge"):
        gas.open_graph(path)
    folder(path, x__npy=np.zeros((2, 1), dtype=np.float32))
    with pytest.warns(match=r"has no edges: write a row for each"):
        gas.open_graph(path)


def test_columns_by_name(tmp_path):
    edges = "when,payer,payee\n1,x,y\n2,y,x\n"
    nodes = "who,id,fraud,target\nx,1,yes,0\ny,2,no,0\n"
    columns = {"source": "payer", "target": "payee", "id": "who", "label": "fraud"}
    data = opened(folder(tmp_path, edges__csv=edges, nodes__csv=nodes), columns=columns)
    assert data.node_id.tolist() == ["x", "y"]
    assert data.classes == ["no", "yes"]
    assert data.x.tolist() == [[1, 0], [2, 0]]
    assert data.edge_attr.tolist() == [[1], [2]]


def test_what_pandas_writes(tmp_path):
    """A column without a name, of rows: the ids, where there are no others."""
    edges = ",source,target\n0,10,11\n1,11,10\n"
    data = opened(folder(tmp_path, edges__csv=edges, nodes__csv=",f\n10,1\n11,2\n"))
    assert data.node_id.tolist() == [10, 11]
    assert data.x.tolist() == [[1], [2]]
    assert "edge_attr" not in data


@pytest.mark.filterwarnings("ignore:.*left out")
def test_what_is_not_read_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"the column 'city' \(not all numbers\) left out"):
        data = opened(folder(tmp_path, edges__csv=EDGES, nodes__csv="id,city\na,B\nb,C\nc,D\n"))
    assert "x" not in data
    with pytest.warns(UserWarning, match="the file readme.txt left out"):
        opened(folder(tmp_path, readme__txt="letters"))


@pytest.mark.parametrize("num_splits", [1, 4, None])
def test_made_up_splits_are_said(tmp_path, num_splits, capsys):
    """They are the same every time, and leave out nodes of unknown class."""
    nodes = "id,f,label\n" + "".join(f"{i},{i},{i % 3 if i < 60 else ''}\n" for i in range(80))
    path = folder(tmp_path, nodes__csv=nodes, edges__csv="source,target\n0,1\n1,0\n")
    data = opened(path, num_splits=num_splits, log=True)
    expected = f"made up, {num_splits or 20} at random from seed 0: 50 % training, 25 % validation"
    assert expected in data.split
    assert expected in capsys.readouterr().err
    again = opened(path, num_splits=num_splits)
    for part, size in (("train", 30), ("val", 15), ("test", 15)):
        mask = data[f"{part}_mask"]
        assert torch.equal(mask, again[f"{part}_mask"])
        assert mask.shape == ((80,) if num_splits == 1 else (80, num_splits or 20))
        assert mask[:60].view(60, -1).sum(dim=0).eq(size).all()
        assert not mask[60:].any()


def test_to_predictions(tmp_path):
    """Own ids and names survive clustering, and are those of the predictions' rows."""
    from torch_geometric.nn import GraphSAGE

    names = [f"n{i}" for i in range(40)]
    nodes = "id,f,g,label\n" + "".join(f"{n},{i},1,{'ab'[i % 2]}\n" for i, n in enumerate(names))
    pairs = [(names[i], names[(i + 2) % 40]) for i in range(40)]
    edges = "source,target\n" + "".join(f"{a},{b}\n" for a, b in pairs)
    data = opened(folder(tmp_path, nodes__csv=nodes, edges__csv=edges), undirected=True)
    model = gas.to_scalable(GraphSAGE(2, 8, num_layers=2, out_channels=2), data)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert graph.node_id is data.node_id
    (batch,) = gas.SubgraphLoader(graph, batch_size=4, log=False)
    assert model(batch).shape == (40, 2)
    out = model.predict(graph)
    model.eval()
    torch.testing.assert_close(out, model(data.x, data.edge_index).detach())


def test_get_data_reads_folders(tmp_path):
    path = folder(tmp_path, nodes__csv=NODES, edges__csv=EDGES)
    data, features, classes = gas.get_data("nowhere", str(path))
    assert (features, classes) == (2, 2)
    assert data.classes == ["blue", "red"]


def test_what_counts_as_an_id(tmp_path):
    """Blanks around it don't, and numbers may be written with a zero behind the point."""
    for edges, ids, index in (
        (" a,b\nb ,c\nc, a\n", ["a", "b", "c"], [[0, 1, 2], [1, 2, 0]]),
        ("1,2.0\n2,3.0\n3, 1\n", [1, 2, 3], [[0, 1, 2], [1, 2, 0]]),
        ("1.5,2\n2,1.5\n", ["1.5", "2"], [[0, 1], [1, 0]]),
    ):
        data = opened(folder(tmp_path, edges__csv=f"source,target\n{edges}"))
        assert data.node_id.tolist() == ids
        assert data.edge_index.tolist() == index


def test_comments_at_the_beginning(tmp_path):
    file = tmp_path / "web.txt"
    file.write_text("# Directed graph\n# Nodes: 3 Edges: 2\n# From\tTo\n0\t5\n5\t7\n")
    data = opened(file)
    assert data.node_id.tolist() == [0, 5, 7]
    assert data.edge_index.tolist() == [[0, 1], [1, 2]]
    file.write_text("\n# Directed graph\n \n0;5\n5;7\n")
    assert opened(file).node_id.tolist() == [0, 5, 7]


def test_decimal_commas(tmp_path):
    nodes = "id;f;label\n0;1,5;0,25\n1;2;3\n"
    data = opened(folder(tmp_path, nodes__csv=nodes, edges__csv="source;target\n0;1\n1;0\n"))
    assert data.x.tolist() == [[1.5], [2]]
    assert data.y.tolist() == [0.25, 3]


@pytest.mark.parametrize("numbers", [["1", "2", "0,25"], ["0.5", "2", "0,25"]])
def test_decimal_commas_of_later_rows(tmp_path, numbers):
    """Beside a number with a point, a comma makes a text, such as a name of a class."""
    rows = "".join(f"{node};{number}\n" for node, number in enumerate(numbers))
    edges = "source;target\n0;1\n1;2\n"
    data = opened(folder(tmp_path, nodes__csv="id;label\n" + rows, edges__csv=edges))
    if "0.5" in numbers:
        assert data.classes == sorted(numbers)
    else:
        assert data.y.tolist() == [1, 2, 0.25]


def test_blanks_in_names_of_columns_and_hidden_files(tmp_path):
    (tmp_path / "._edges.csv").write_bytes(b"\0\1")
    data = opened(folder(tmp_path, edges__csv="Source, Target\n0,1\n1,0\n"))
    assert data.edge_index.tolist() == [[0, 1], [1, 0]]


def test_ids_of_edges_are_no_attributes(tmp_path):
    with pytest.warns(UserWarning, match="the column 'id' left out"):
        data = opened(folder(tmp_path, edges__csv="id,source,target\n7,0,1\n8,1,0\n"))
    assert "edge_attr" not in data


def test_empty_columns_of_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    nodes = {"id": ["u", "v"], "label": pa.nulls(2), "split": pa.nulls(2), "f": [1, 2]}
    parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    path = folder(tmp_path, edges__csv="source,target\nu,v\nv,u\n")
    with pytest.raises(ValueError, match="'train_mask' has no node"):
        opened(path)
    del nodes["split"]
    parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    assert opened(path).y.tolist() == [-1, -1]


def test_lists_from_pandas(tmp_path):
    path = folder(tmp_path, x__npy=np.ones((3, 1)), edges__csv="source,target\n0,1\n1,0\n")
    lists = {f"{part}_idx__csv": f",id\n0,{i}\n" for i, part in enumerate(("train", "val", "test"))}
    data = opened(folder(path, **lists, y__npy=np.arange(3)))
    assert data.val_mask.tolist() == [False, True, False]


def test_unlabelled_nodes_are_counted(tmp_path, capsys):
    nodes = "id,f,label\n" + "".join(f"{i},{i},{'' if i % 3 else i % 2}\n" for i in range(12))
    opened(folder(tmp_path, nodes__csv=nodes, edges__csv="source,target\n0,1\n1,0\n"), log=True)
    assert "2 classes, 8 nodes without a label" in capsys.readouterr().err
