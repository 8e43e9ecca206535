"""``import_graph`` makes of files what ``open_graph`` makes of them in memory."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from scipy import sparse as scipy_sparse
from torch_geometric.data import Data

import gas
from gas.datasets import import_graph
from gas.datasets.arrays import load_sparse
from gas.datasets.importing.sorting import PAIR, EdgeSorter, edge_record, is_new
from gas.datasets.nodes import collect_nodes
from gas.graph import NewFolder
from gas.history import Codec

pytestmark = pytest.mark.requires("pyarrow")
LITTLE = 1 << 20


def content(folder):
    """Return the contents of a folder's files, without the import's counters."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = json.loads(files.pop("graph.json"))
    said["attributes"].pop("imported", None)
    return files, said


def numbers(rng, num_nodes, kind):
    """Return ids that are drawn for nodes."""
    if kind == "rows":
        return np.arange(num_nodes)
    ids = rng.choice(10**6, num_nodes, replace=False)
    return ids if kind == "integers" else np.array([f"näme {i}" for i in ids])


def write(folder, edges, nodes, form):
    import pyarrow as pa
    from pyarrow import csv, parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, columns in (("edges", edges), ("nodes", nodes)):
        if columns is None:
            continue
        table = pa.table(columns)
        if form == "parquet":
            parquet.write_table(table, folder / f"{name}.parquet", row_group_size=100)
        elif form == "csv.gz":
            with pa.CompressedOutputStream(folder / f"{name}.csv.gz", "gzip") as stream:
                csv.write_csv(table, stream)
        else:
            options = csv.WriteOptions(delimiter="\t" if form == "tsv" else ",")
            csv.write_csv(table, folder / f"{name}.{form}", options)


def example(folder, kind="integers", form="csv", num_nodes=300, num_edges=2000, hub=0):
    """Tables of a graph with duplicates, loops, reverses, and perhaps a node with most edges."""
    rng = np.random.default_rng(0)
    ids = numbers(rng, num_nodes, kind)
    src, dst = rng.integers(num_nodes, size=(2, num_edges))
    dst[:hub] = 5
    src[3:9] = src[9:15]
    dst[3:9] = dst[9:15]
    src[20:30], dst[20:30] = dst[30:40], src[30:40]
    src[40:45] = dst[40:45]
    edges = {
        "source": ids[src],
        "target": ids[dst],
        "weight": rng.random(num_edges).astype(np.float32),
        "when": rng.random(num_edges).astype(np.float32),
        "how": rng.random(num_edges).astype(np.float32),
    }
    nodes = {
        "id": ids,
        "f": rng.random(num_nodes).astype(np.float32),
        "g": rng.random(num_nodes).astype(np.float32),
        "label": np.array(["a", "b", "c"])[rng.integers(3, size=num_nodes)],
    }
    write(folder, edges, nodes, form)
    return edges, nodes


def both(path, tmp_path, **options):
    """Return the folder of the import, and that of the graph as it is read into memory."""
    memory = options.pop("memory", LITTLE)
    import_graph(path, tmp_path / "imported", memory=memory, log=False, **options)
    data = gas.open_graph(path, log=False, **options)
    gas.cluster(data, 1, out=tmp_path / "expected", log=False)
    return content(tmp_path / "imported"), content(tmp_path / "expected")


def assert_same(found, expected):
    files, said = found
    assert files.keys() == expected[0].keys()
    for name, held in expected[0].items():
        assert files[name] == held, name
    assert said == expected[1]


@pytest.mark.slow(fast=7)
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("form", ["csv", "tsv", "csv.gz", "parquet"])
@pytest.mark.parametrize("kind", ["rows", "integers", "text"])
def test_tables(kind, form, undirected, tmp_path):
    example(tmp_path / "tables", kind, form)
    assert_same(*both(tmp_path / "tables", tmp_path, undirected=undirected))


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("hub", [0, 1500, 2000])
def test_memory_does_not_matter(hub, undirected, tmp_path, monkeypatch):
    """A sixteenth of the edges at a time, and one node that has most of them."""
    example(tmp_path / "tables", hub=hub)
    edges = []
    init = EdgeSorter.__init__

    def little(self, folder, kind, *args):
        init(self, folder, kind, *args)
        self.capacity, self._step = 120, 100
        edges.append(self)

    monkeypatch.setattr(EdgeSorter, "__init__", little)
    assert_same(*both(tmp_path / "tables", tmp_path, undirected=undirected))
    assert edges[0]._number > (10 if hub < 2000 else 2)


@pytest.mark.parametrize("undirected", [False, True])
def test_more_edges_between_two_nodes_than_fit(undirected, tmp_path, monkeypatch):
    src = np.array([1] * 300 + [0] * 50 + [2] * 40)
    dst = np.array([0] * 300 + [1] * 50 + [0] * 40)
    edges = {"source": src, "target": dst, "weight": np.arange(390, dtype=np.float32)}
    write(tmp_path / "tables", edges, None, "csv")
    init = EdgeSorter.__init__

    def little(self, *args):
        init(self, *args)
        self.capacity, self._step = 60, 25

    monkeypatch.setattr(EdgeSorter, "__init__", little)
    assert_same(*both(tmp_path / "tables", tmp_path, undirected=undirected))


@pytest.mark.parametrize("kind", ["integers", "text", "mixed"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_edges_alone(kind, form, tmp_path):
    edges, _ = example(tmp_path / "both", "text" if kind == "text" else "integers")
    if kind == "mixed":
        edges = {key: edges[key].astype(str) for key in ("source", "target")}
        edges["source"][-1] = "007"
    write(tmp_path / "tables", edges, None, form)
    found, expected = both(tmp_path / "tables", tmp_path)
    if kind == "mixed":  # Text of another length.
        ids = [np.load(tmp_path / name / "node_id.npy") for name in ("imported", "expected")]
        assert ids[0].tolist() == ids[1].tolist()
        for files, said in (found, expected):
            del files["node_id.npy"], said["arrays"]["node_id"]
    assert_same(found, expected)


@pytest.mark.parametrize(
    "ids",
    [
        ["1.0", "2.00", "-3", "0"],
        ["-0", "1", "2", "3"],
        ["123456789012345678901234567890", "1", "2", "3"],
        ["9223372036854775807", "-9223372036854775808", "1", "2"],
        ["+1", "1", "1.5", "1e3"],
        ["NA", "nan", " a b ", "ü"],
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_how_ids_are_written(ids, named, tmp_path):
    nodes = {"id": ids, "f": [1.0, 2.0, 3.0, 4.0]} if named else None
    edges = {"source": ids * 3, "target": [*ids[1:], ids[0]] * 3}
    write(tmp_path / "tables", edges, nodes, "csv")
    found, expected = both(tmp_path / "tables", tmp_path)
    ids = [np.load(tmp_path / name / "node_id.npy") for name in ("imported", "expected")]
    assert ids[0].tolist() == ids[1].tolist()
    del found[0]["node_id.npy"], expected[0]["node_id.npy"]
    assert found[0] == expected[0]


def test_one_file(tmp_path):
    (tmp_path / "any.txt").write_text("30 10\n10 30\n20 10\n30 10\n")
    assert_same(*both(tmp_path / "any.txt", tmp_path))
    data = gas.open_graph(tmp_path / "imported", log=False)
    assert data.imported == {"edges": 4, "duplicates": 1, "loops": 0}


@pytest.mark.parametrize("apart", [False, True])
def test_arrays(apart, tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "arrays"
    folder.mkdir()
    edges = rng.integers(300, size=(2, 3000)).astype(np.uint32)
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "edge-weight.npy", rng.random(3000))
    np.save(folder / "edge_attr.npy", rng.random((3000, 2)) if apart else rng.random(3000))
    np.save(folder / "x.npy", rng.random((300, 4)).astype(">f8"))
    np.save(folder / "y.npy", rng.integers(4, size=300))
    np.save(folder / "train_mask.npy", np.arange(300) < 100)
    ids = np.arange(300)[::-1].copy() if apart else np.arange(300)
    np.save(folder / "val_idx.npy", ids[100:200])
    np.save(folder / "test.npy", ids[200:])
    if apart:
        np.save(folder / "node_id.npy", ids)
    assert_same(*both(folder, tmp_path))


def test_sparse_features(tmp_path):
    edges, nodes = example(tmp_path / "tables")
    (tmp_path / "tables" / "nodes.csv").unlink()
    write(tmp_path / "tables", edges, {key: nodes[key] for key in ("id", "label")}, "csv")
    x = scipy_sparse.random(300, 50, 0.1, "csr", np.float32, random_state=0)
    scipy_sparse.save_npz(tmp_path / "tables" / "x.npz", x)
    assert_same(*both(tmp_path / "tables", tmp_path))


@pytest.mark.parametrize("kind", ["int8", "bool", "float64"])
def test_duplicates_of_sparse_features_are_summed_as_float32(tmp_path, kind):
    values, (row, col) = np.array([100, 100, 1]).astype(kind), ([1, 1, 0], [2, 2, 0])
    scipy_sparse.save_npz(tmp_path / "x.npz", scipy_sparse.coo_matrix((values, (row, col))))
    x = torch.sparse_coo_tensor([row, col], torch.from_numpy(values), check_invariants=True)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    torch.save(Data(x=x, y=torch.tensor([0, 1]), edge_index=edge_index), tmp_path / "g.pt")
    expected = [[1, 0, 0], [0, 0, 2 if kind == "bool" else 200]]
    for found in (load_sparse(tmp_path / "x.npz"), gas.open_graph(tmp_path / "g.pt", log=False).x):
        assert found.to_dense().tolist() == expected


@pytest.mark.parametrize(("value", "error"), [(1e300, "1e\\+300 in row 1"), (np.inf, "row 1")])
def test_sparse_features_that_are_not_finite_in_float32(tmp_path, value, error):
    edges, nodes = example(tmp_path / "tables")
    (tmp_path / "tables" / "nodes.csv").unlink()
    write(tmp_path / "tables", edges, {key: nodes[key] for key in ("id", "label")}, "csv")
    x = scipy_sparse.csr_matrix(([value], ([1], [2])), shape=(300, 5))
    scipy_sparse.save_npz(tmp_path / "tables" / "x.npz", x)
    for read in (gas.open_graph, lambda path, log: import_graph(path, tmp_path / "g", log=log)):
        with pytest.raises(ValueError, match=error):
            read(tmp_path / "tables", log=False)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_files_apart_and_by_id(form, tmp_path):
    """Features in another order than nodes."""
    edges, nodes = example(tmp_path / "both", "text", form)
    folder = tmp_path / "tables"
    write(folder, edges, {"id": nodes["id"]}, form)
    order = np.random.default_rng(1).permutation(300)
    write(tmp_path / "more", {"id": nodes["id"][order], "f": nodes["f"][order]}, None, form)
    (tmp_path / "more" / f"edges.{form}").rename(folder / f"x.{form}")
    write(tmp_path / "more", {"id": nodes["id"][:50], "what": np.arange(50) % 3}, None, form)
    (tmp_path / "more" / f"edges.{form}").rename(folder / f"labels.{form}")
    assert_same(*both(folder, tmp_path))


@pytest.mark.parametrize("codec", ["float64", "float32", "float16", "bfloat16", "int8"])
def test_features_in_any_codec(codec, tmp_path):
    example(tmp_path / "tables")
    data = import_graph(tmp_path / "tables", tmp_path / "graph", dtype=codec, log=False)
    plain = gas.open_graph(tmp_path / "tables", log=False)
    expected = gas.quantize(plain.x, codec).dequantize()
    assert data.x.codec == Codec(codec)
    assert torch.equal(data.x.dequantize().float(), expected.float())


def test_features_are_not_narrowed_before_they_are_stored(tmp_path):
    x = np.random.default_rng(0).random((300, 2))
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    np.save(tmp_path / "x.npy", x)
    stored = import_graph(tmp_path, tmp_path / "exact", dtype="float64", log=False).x
    assert torch.equal(stored[:], torch.from_numpy(x))
    x[4, 1] = 1e300  # The file is finite, float32 isn't.
    np.save(tmp_path / "x.npy", x)
    said = r"'x' of x.npy holds 1e\+300 in row 4, column 1, but {} ends at"
    for dtype in (None, "float16", "int8"):
        with pytest.raises(ValueError, match=said.format(dtype or "float32")):
            import_graph(tmp_path, tmp_path / "graph", dtype=dtype, check=False, log=False)
    with pytest.raises(ValueError, match=said.format("float32")):
        gas.open_graph(tmp_path, log=False)


def test_it_is_trained_on(tmp_path):
    example(tmp_path / "tables", "text")
    import_graph(tmp_path / "tables", tmp_path / "one", undirected=True, log=False)
    one = gas.open_graph(tmp_path / "one", log=False)
    assert one.node_id.shape == (300,)
    model = gas.models.GCN(300, 2, 8, 3, 2)
    del one.edge_attr  # GCN's loops have none.
    graph = gas.cluster(one, 8, model=model, out=tmp_path / "parts", log=False)
    assert graph.parts.numel() == 9
    assert gas.verify(model, tmp_path / "parts")
    data = gas.open_graph(tmp_path / "tables", undirected=True, log=False)
    del data.edge_attr
    twin = gas.cluster(data, 8, model=model, log=False)
    assert torch.allclose(model.predict(graph), model.predict(twin), atol=1e-5)


# Interrupted --------------------------------------------------------------------------------------


class Stop(BaseException):
    """Exception that ends a program."""


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("where", ["nodes", "edges", "order", "features", "finish"])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_it_goes_on(where, when, undirected, tmp_path, monkeypatch):
    example(tmp_path / "tables", "text")
    options = {"undirected": undirected, "memory": LITTLE, "log": False}
    import_graph(tmp_path / "tables", tmp_path / "whole", **options)
    importer = gas.datasets.importing.stages.GraphImport
    stage, done = getattr(importer, f"_{where}"), []

    def stops(self):
        if when == "before":
            raise Stop
        if when == "within":
            count = [0]
            unlink = self._announce

            def announce(names):
                unlink(names)
                count[0] += 1
                if count[0] == 2 or where in ("features", "edges"):
                    for name in names:
                        (self.folder.path / name).write_bytes(b"half")
                    raise Stop

            self._announce = announce
        stage(self)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(importer, f"_{where}", stops)
        with pytest.raises(Stop):
            import_graph(tmp_path / "tables", tmp_path / "graph", **options)
    if where == "finish" and when == "after":
        assert content(tmp_path / "graph") == content(tmp_path / "whole")
        return
    with pytest.raises(ValueError, match="left unfinished"):
        gas.open_graph(tmp_path / "graph", log=False)
    for name in importer.STAGES:
        run = getattr(importer, f"_{name}")
        monkeypatch.setattr(
            importer, f"_{name}", lambda self, name=name, run=run: (done.append(name), run(self))[1]
        )
    import_graph(tmp_path / "tables", tmp_path / "graph", **options)
    stages = [*importer.STAGES, "finish"]
    assert done == list(importer.STAGES)[stages.index(where) :]
    assert content(tmp_path / "graph") == content(tmp_path / "whole")
    assert not list((tmp_path / "graph").glob("*.part"))


def test_two_at_once(tmp_path, monkeypatch):
    example(tmp_path / "tables")
    importer = gas.datasets.importing.stages.GraphImport
    features, refused = importer._features, []

    def meanwhile(self):
        with pytest.raises(ValueError, match="which another process is writing"):
            import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
        refused.append(True)
        return features(self)

    monkeypatch.setattr(importer, "_features", meanwhile)
    import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    assert refused
    monkeypatch.undo()
    import_graph(tmp_path / "tables", tmp_path / "whole", log=False)
    assert content(tmp_path / "graph") == content(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"holds graph\.json"):
        import_graph(tmp_path / "tables", tmp_path / "graph", log=False)


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with pytest.raises(KeyError), NewFolder(tmp_path / "graph", "somebody").lock():
        raise KeyError
    assert not (tmp_path / "graph").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyError), NewFolder(tmp_path / "empty", "somebody").lock():
        raise KeyError
    assert (tmp_path / "empty").exists()


@pytest.mark.slow
def test_a_killed_process(tmp_path):
    example(tmp_path / "tables", num_nodes=2000, num_edges=60_000)
    import_graph(tmp_path / "tables", tmp_path / "whole", log=False)
    program = """
import os, signal, time
import gas
from gas.datasets.importing import stages
order = stages.GraphImport._order
def slow(self):
    print("now", flush=True)
    time.sleep(60)
stages.GraphImport._order = slow
gas.datasets.import_graph("tables", "graph")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "now\n"
        finally:
            process.send_signal(signal.SIGKILL)
    import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    assert content(tmp_path / "graph") == content(tmp_path / "whole")


@pytest.mark.parametrize("more", [{}, {"source": []}, {"source": {}, "stages": []}])
def test_what_says_nothing_of_stages_is_begun_anew(more, tmp_path):
    example(tmp_path / "tables")
    import_graph(tmp_path / "tables", tmp_path / "whole", log=False)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "edges-3.part").write_bytes(b"half")
    mark = {"format": "unfinished gas graph", "by": "gas.datasets.import_graph"}
    mark |= {"files": ["edges-3.part"], **more}
    (tmp_path / "graph" / "unfinished.json").write_text(json.dumps(mark))
    import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    assert content(tmp_path / "graph") == content(tmp_path / "whole")


def test_what_has_changed_is_refused(tmp_path, monkeypatch):
    example(tmp_path / "tables")
    with monkeypatch.context() as patch:
        patch.setattr(gas.datasets.importing.stages.GraphImport, "_order", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    with pytest.raises(ValueError, match="the options, or files, have changed since the import"):
        import_graph(tmp_path / "tables", tmp_path / "graph", undirected=True, log=False)
    before = (tmp_path / "tables" / "edges.csv").stat()
    time.sleep(0.01)
    os.utime(tmp_path / "tables" / "edges.csv")
    with pytest.raises(ValueError, match="edges.csv has changed since the import"):
        import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    os.utime(tmp_path / "tables" / "edges.csv", ns=(before.st_atime_ns, before.st_mtime_ns))
    import_graph(tmp_path / "tables", tmp_path / "graph", log=False)


def test_a_source_that_changes_meanwhile(tmp_path, monkeypatch):
    example(tmp_path / "tables")
    features = gas.datasets.importing.stages.GraphImport._features

    def changes(self):
        with (tmp_path / "tables" / "edges.csv").open("a") as file:
            file.write("1,2,3,4,5\n")
        return features(self)

    monkeypatch.setattr(gas.datasets.importing.stages.GraphImport, "_features", changes)
    with pytest.raises(ValueError, match="edges.csv has changed since the import"):
        import_graph(tmp_path / "tables", tmp_path / "graph", log=False)
    assert not (tmp_path / "graph" / "graph.json").exists()


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_peak_memory_is_bounded(tmp_path):
    """Of the process: what is bounded, and what comes on top for nodes, and nothing for edges."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "arrays"
    folder.mkdir()
    num_nodes, num_edges = 50_000, 6_000_000
    np.save(folder / "edge_index.npy", rng.integers(num_nodes, size=(2, num_edges), dtype=np.int32))
    np.save(folder / "x.npy", rng.random((num_nodes, 200), np.float32))
    program = f"""
import resource, sys, threading
from gas.datasets import import_graph
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))
import_graph({str(folder / "small")!r}, "small", log=False)
before, most, done = anonymous(), 0, threading.Event()
def look():
    global most
    while not done.wait(0.005):
        most = max(most, anonymous())
thread = threading.Thread(target=look)
thread.start()
import_graph({str(folder)!r}, "graph", memory={16 << 20}, log=False)
done.set()
thread.join()
print(most - before)
"""
    (folder / "small").mkdir()
    np.save(folder / "small" / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (16 << 20) + num_nodes * 40 + (16 << 20)
    assert gas.open_graph(tmp_path / "graph", log=False).num_edges == num_edges


# Parts of it --------------------------------------------------------------------------------------


def test_distinct_ids(monkeypatch):
    monkeypatch.setattr("gas.datasets.nodes.AT_ONCE", 2)
    blocks = [np.array([3, 1]), np.array([2, 3, 9]), np.array([1])]
    assert collect_nodes(blocks).ids.tolist() == [1, 2, 3, 9]
    blocks.append(np.array(["ä", "007", "9"]))
    assert collect_nodes(blocks).ids.tolist() == ["007", "1", "2", "3", "9", "ä"]
    assert collect_nodes([]).num_nodes == 0
    blocks = [np.array(some) for some in ([2, 4, 6], [1, 4, 5], [7, 3])]  # Around those known.
    assert collect_nodes(blocks).ids.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_new():
    edges = np.zeros(4, edge_record(9, False, 0, False))
    edges["dst"], edges["src"] = [0, 0, 1, 1], [1, 1, 1, 2]
    assert is_new(edges, PAIR).tolist() == [False, True, True]
    assert edge_record(2**31, True, 3, True).itemsize == 8 + 8 + 4 + 12 + 1
