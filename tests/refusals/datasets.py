"""Errors of ``gas.datasets``: names, downloads, and files that hold no graph."""

import contextlib
import io
import sys
import zipfile

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gas
from gas.datasets import open_mapped, write_planted_partition
from refusals import raising, ring

EDGES = np.array([[0, 1], [1, 0]])
ONES = np.ones((2, 3))
CLASSES = np.array([0, 1])
NO_NETWORK = OSError("Network is unreachable")


def get(t, name, **options):
    return gas.get_data(t.path, name, **options)


def npz(t, **changes):
    arrays = {"x": ONES, "y": CLASSES, "edge_index": EDGES, **changes}
    np.savez(t.path / "g.npz", **{key: value for key, value in arrays.items() if value is not None})
    get(t, str(t.path / "g.npz"))


def pt(t, content):
    torch.save(content, t.path / "g.pt")
    get(t, str(t.path / "g.pt"))


def damaged(t, name, content=b"letters"):
    (t.path / name).write_bytes(content)
    get(t, str(t.path / name))


def pt_of_adj_t(t):
    adj_t = torch.eye(2).to_sparse_csr()
    torch.save({"x": torch.ones(2, 3), "y": torch.arange(2), "adj_t": adj_t}, t.path / "g.pt")
    get(t, str(t.path / "g.pt"), undirected=True)


def cut_off(t):
    np.savez(t.path / "whole.npz", x=ONES)
    damaged(t, "g.npz", (t.path / "whole.npz").read_bytes()[:200])


def packed_by_lzma(t):
    whole = io.BytesIO()
    np.save(whole, ONES)
    with zipfile.ZipFile(t.path / "g.npz", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("x.npy", whole.getvalue())
    get(t, str(t.path / "g.npz"))


def types_of_another_length(t):
    np.savez(t.path / "g.npz", x=ONES, y=CLASSES, edge_index=EDGES, node_type=CLASSES[:1])
    gas.open_graph(t.path / "g.npz", hetero=True, log=False)


def entry(t, change):
    """Write an array into an archive that isn't as NumPy writes it."""
    whole = io.BytesIO()
    np.save(whole, ONES)
    with zipfile.ZipFile(t.path / "g.npz", "w") as file:
        file.writestr("x.npy", change(whole.getvalue()))
    get(t, str(t.path / "g.npz"))


def unreachable(t, name):
    t.patch.setattr("torch_geometric.datasets.Planetoid.download", raising(NO_NETWORK))
    get(t, name)


def ogb(t, package):
    t.patch.setitem(sys.modules, "ogb", package)
    t.patch.setitem(sys.modules, "ogb.nodeproppred", package)
    get(t, "ogbn-arxiv")


class Ogb:
    """The package, without a network."""

    PygNodePropPredDataset = raising(NO_NETWORK)


def opening(t, **files):
    """Write files, whose names have ``__`` for the dot, and open their folder."""
    t.options = files.pop("options", {})
    for name, content in {"edges__csv": "source,target\n0,1\n1,0\n", **files}.items():
        file = t.path / name.replace("__", ".")
        if isinstance(content, str):
            file.write_text(content)
        elif content is not None:
            np.save(file, content, allow_pickle=True)
    gas.open_graph(t.path, **{"log": False, **t.options})


def opening_without_pyarrow(t):
    t.without_package("pyarrow")
    opening(t)


def opening_lists_of_two_lengths(t):
    from pyarrow import parquet, table

    parquet.write_table(table({"id": [0, 1], "f": [[1.0], [1.0, 2.0]]}), t.path / "nodes.parquet")
    opening(t)


def types_that_are_dates(t):
    from pyarrow import array, date32, parquet, table

    columns = {"source": [0, 1], "target": [1, 0], "type": array([1, 2], date32())}
    parquet.write_table(table(columns), t.path / "edges.parquet")
    gas.open_graph(t.path / "edges.parquet", log=False)


MASKS = {f"{part}_mask": np.array([True, False]) for part in ("train", "val", "test")}


def sparse_folder(t, **arrays):
    np.save(t.path / "edge_index.npy", EDGES)
    np.savez(t.path / "x.npz", **arrays)
    gas.open_graph(t.path, log=False)


def imports(t, files=None, source=None, **options):
    """Import a graph of tables, given as texts, and of arrays."""
    files = {"edges.csv": "source,target\na,b\nb,a\n"} if files is None else files
    (t.path / "tables").mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, str):
            (t.path / "tables" / name).write_text(content)
        else:
            np.save(t.path / "tables" / name, content)
    source = t.path / "tables" if source is None else source
    gas.datasets.import_graph(source, t.path / "graph", log=False, **options)


def archive(t):
    """Write an archive of a whole graph, and return its path."""
    np.savez(t.path / "whole.npz", x=ONES, edge_index=EDGES)
    return t.path / "whole.npz"


def imports_arrays(t, **arrays):
    options = {key: arrays.pop(key) for key in ("dtype",) if key in arrays}
    arrays = {"edge_index": EDGES, **arrays}
    imports(t, {f"{name}.npy": array for name, array in arrays.items()}, **options)


def import_that_changed(t):
    t.patch.setattr("gas.datasets.importing.stages.GraphImport._finish", raising(OSError("full")))
    with contextlib.suppress(OSError):
        imports(t)
    imports(t, {"edges.csv": "source,target\na,b\n"})


def import_into_one_folder(t):
    """While another import is at it."""

    def meanwhile(*_):
        gas.datasets.import_graph(t.path / "tables", t.path / "graph", log=False)

    t.patch.setattr("gas.datasets.importing.stages.GraphImport._order", meanwhile)
    imports(t)


def import_of_a_cut_off_file(t):
    with t.patch.context() as patch:
        patch.setattr("gas.datasets.importing.stages.GraphImport._order", raising(OSError("full")))
        with contextlib.suppress(OSError):
            imports(t)
    part = t.path / "graph" / "edges.part"
    part.write_bytes(part.read_bytes()[:-1])
    gas.datasets.import_graph(t.path / "tables", t.path / "graph", log=False)


def stores(t, kinds=(None,), x=ONES, name="x", **options):
    """Import PyG's stores of two nodes."""
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(torch.as_tensor(x), group_name=None, attr_name=name, index=None)
    for kind in kinds:
        edges = torch.from_numpy(EDGES)
        graph.put_edge_index((edges[0], edges[1]), edge_type=kind, layout="coo", size=(2, 2))
    gas.datasets.import_graph((features, graph), t.path / "graph", log=False, **options)


def folder_store(t):
    gas.cluster(ring(), 2, log=False, out=t.path / "graph")
    return gas.datasets.FolderStore(t.path / "graph")


def graph_folder(t, **options):
    gas.cluster(ring(), 2, log=False, out=t.path / "graph")
    gas.open_graph(t.path / "graph", **options)


EDGES_OF_0_AND_1 = "source,target\n0,1\n1,0\n"


def root_below_a_file(t):
    (t.path / "file").touch()
    gas.get_data(t.path / "file" / "data", "Cora")


CASES = {
    "get_data, a root below a file": root_below_a_file,
    "import_graph, while another is at it": import_into_one_folder,
    "import_graph, goes on after its file was cut off": import_of_a_cut_off_file,
    "import_graph, stores of several types": lambda t: stores(t, [("a", "to", "b"), None]),
    "import_graph, a tensor with a wrong name": lambda t: stores(t, name="an x"),
    "import_graph, options for stores": lambda t: stores(t, undirected=True),
    "import_graph, a whole graph": lambda t: imports(t, source=archive(t)),
    "open_graph, columns of a whole graph": lambda t: gas.open_graph(
        archive(t), columns={"source": "from"}, log=False
    ),
    "import_graph, a number": lambda t: imports(t, source=7),
    "FolderStore, a tensor is put": lambda t: folder_store(t).put_tensor(
        torch.ones(4), group_name=None, attr_name="z", index=None
    ),
    "FolderStore, a tensor is removed": lambda t: folder_store(t).remove_tensor(
        group_name=None, attr_name="x", index=None
    ),
    "FolderStore, edges are put": lambda t: folder_store(t).put_edge_index(
        (torch.ones(1), torch.ones(1)), edge_type=None, layout="coo"
    ),
    "FolderStore, edges are removed": lambda t: folder_store(t).remove_edge_index(
        edge_type=None, layout="coo"
    ),
    "import_graph, no such source": lambda t: imports(t, source=t.path / "nowhere"),
    "import_graph, little memory": lambda t: imports(t, memory="1KB"),
    "import_graph, no nodes": lambda t: imports(t, {"edges.csv": "source,target\n"}),
    "import_graph, a source that has changed": import_that_changed,
    "import_graph, features twice": lambda t: imports(
        t, {"edges.csv": EDGES_OF_0_AND_1, "nodes.csv": "f\n1\n2\n", "x.npy": ONES}
    ),
    "import_graph, features of more nodes": lambda t: imports(
        t,
        {
            "edges.csv": EDGES_OF_0_AND_1,
            "node_id.csv": "id\n0\n1\n",
            "x.csv": "id,f\n0,1\n",
        },
    ),
    "import_graph, targets of fewer nodes": lambda t: imports(
        t,
        {
            "edges.csv": EDGES_OF_0_AND_1,
            "node_id.csv": "id\n0\n1\n",
            "y.csv": "id,y\n0,0.5\n",
        },
    ),
    "import_graph, features of another shape": lambda t: imports_arrays(t, x=np.ones(2)),
    "import_graph, labels that floats can't tell apart": lambda t: imports(
        t, {"edges.csv": EDGES_OF_0_AND_1, "nodes.csv": f"id,label\n0,{2**64}\n1,{2**64 + 1}\n"}
    ),
    "import_graph, features too large": lambda t: imports_arrays(
        t, x=np.full((2, 1), 1e9), dtype="float16"
    ),
    "import_graph, too few weights": lambda t: imports_arrays(t, edge_weight=np.ones(1)),
    "import_graph, too many weights": lambda t: imports_arrays(t, edge_weight=np.ones(3)),
    "import_graph, weights in columns": lambda t: imports_arrays(t, edge_weight=np.ones((2, 2))),
    "import_graph, weights in a table": lambda t: imports(
        t, {"edges.csv": EDGES_OF_0_AND_1, "edge_weight.csv": "w\n1\n2\n"}
    ),
    "import_graph, weights twice": lambda t: imports(
        t, {"edges.csv": "source,target,weight\n0,1,2\n", "edge_weight.npy": np.ones(1)}
    ),
    "import_graph, no array": lambda t: imports(t, {"edge_index.npy": "letters"}),
    "import_graph, half an edge": lambda t: imports(t, {"edges.csv": "source,target\na,b\nb,\n"}),
    "import_graph, an endless id": lambda t: imports(
        t, {"edges.csv": f"source,target\na,{'b' * 2000}\n"}
    ),
    "import_graph, an unknown node": lambda t: imports(
        t, {"edges.csv": "source,target\na,c\n", "node_id.csv": "id\na\nb\n"}
    ),
    "open_graph, a graph folder made undirected": lambda t: graph_folder(t, undirected=True),
    "open_graph, a shard of a graph without": lambda t: graph_folder(t, shard=0),
    "open_graph, a shard of tables": lambda t: opening(t, options={"shard": 0}),
    "open_graph, columns of a graph folder": lambda t: graph_folder(t, columns={"source": "a"}),
    "write_planted_partition, no nodes": lambda t: write_planted_partition(t.path, 0),
    "write_planted_partition, hubs of all edges": lambda t: write_planted_partition(
        t.path, 9, exponent=1.0
    ),
    "write_planted_partition, features of another type": lambda t: write_planted_partition(
        t.path, 9, dtype=torch.bfloat16
    ),
    "write_planted_partition, a folder that is taken": lambda t: [
        write_planted_partition(t.path / "there", 9) for _ in range(2)
    ],
    "open_mapped, nothing there": lambda t: open_mapped(t.path / "nowhere"),
    "open_graph, x.npz that is no sparse matrix": lambda t: sparse_folder(t, x=ONES),
    "open_graph, a sparse value that float32 can't hold": lambda t: sparse_folder(
        t,
        format=np.array(b"csr"),
        shape=np.array([2, 3]),
        data=np.array([1.0, 1e300]),
        indptr=np.array([0, 1, 2]),
        indices=np.array([0, 2]),
    ),
    "open_graph, a sparse matrix of another format": lambda t: sparse_folder(
        t, format=np.array(b"dia"), shape=np.array([2, 3]), data=ONES
    ),
    "get_data, an unknown name": lambda t: get(t, "coral"),
    "get_data, planted without a size": lambda t: get(t, "planted:many"),
    "get_data, no network": lambda t: unreachable(t, "cora"),
    "get_data, ogb is missing": lambda t: ogb(t, None),
    "get_data, ogb without a network": lambda t: ogb(t, Ogb),
    "get_data, a file of another kind": lambda t: get(t, str(t.path / "graph.csv")),
    "get_data, a file that isn't there": lambda t: get(t, str(t.path / "graph.npz")),
    "get_data, tables without labels": lambda t: (
        (t.path / "nodes.csv").write_text("id,f\n0,1\n1,2\n"),
        (t.path / "edges.csv").write_text("source,target\n0,1\n1,0\n"),
        get(t, str(t.path)),
    ),
    "get_data, undirected, an adj_t": lambda t: pt_of_adj_t(t),
    "get_data, no name": lambda t: get(t, None),
    "get_data, no folder": lambda t: gas.get_data(None, "Cora"),
    "open_graph, no path": lambda t: gas.open_graph(None),
    "open_graph, nothing there": lambda t: gas.open_graph(t.path / "absent"),
    "open_graph, an empty folder": lambda t: gas.open_graph(t.path),
    "open_graph, pyarrow is missing": opening_without_pyarrow,
    "open_graph, a role that columns don't have": lambda t: opening(
        t, options={"columns": {"destination": "to"}}
    ),
    "open_graph, a column of edges that isn't there": lambda t: opening(
        t, options={"columns": {"source": "payer"}}
    ),
    "open_graph, a column of nodes that isn't there": lambda t: opening(
        t, nodes__csv="id,f\n0,1\n1,1\n", options={"columns": {"label": "kind"}}
    ),
    "get_data, a split too many": lambda t: get(t, "planted:60", split=20),
    "get_data, a split by name": lambda t: get(t, "planted:60", split="first"),
    "get_data, columns of no table": lambda t: get(t, "planted:60", columns={"id": "who"}),
    "open_graph, a file of another kind": lambda t: (
        (t.path / "graph.xlsx").touch(),
        gas.open_graph(t.path / "graph.xlsx"),
    ),
    "open_graph, ids of another name": lambda t: opening(t, nodes__csv="user_id,f\n1,1\n0,2\n"),
    "open_graph, an attribute that is missing": lambda t: opening(
        t, edges__csv="source,target,a\n0,1,2\n1,0,\n"
    ),
    "open_graph, edges twice": lambda t: opening(t, edge_index__npy=EDGES),
    "open_graph, edges of one direction": lambda t: opening(
        t, options={"log": True}, edges__csv="source,target\n0,1\n"
    ),
    "open_graph, names of edges alone": lambda t: opening(
        t, options={"log": True}, edges__csv="source,target\n", nodes__csv="id,f\na,1\n"
    ),
    "open_graph, the same nodes twice": lambda t: opening(
        t,
        options={"log": True},
        nodes__csv="id,label\n0,a\n1,b\n2,a\n",
        train_mask__npy=np.arange(3) == 0,
        val_mask__npy=np.arange(3) == 1,
        test_mask__npy=np.arange(3) >= 1,
    ),
    "open_graph, a file of no known name": lambda t: opening(t, payments__csv="1,2\n"),
    "open_graph, edges whose ends have other names": lambda t: opening(
        t, edges__csv="payer,payee,when\n0,1,2\n"
    ),
    "open_graph, two columns for one role": lambda t: opening(
        t, nodes__csv="id,node,f\n0,1,2\n1,0,2\n"
    ),
    "open_graph, two columns of one name": lambda t: opening(t, nodes__csv="id,f,f\n0,1,2\n"),
    "open_graph, names or values": lambda t: opening(t, edges__csv="alice,bob\nbob,alice\n"),
    "open_graph, nodes without names of columns": lambda t: opening(t, nodes__csv="0,1\n1,1\n"),
    "open_graph, text where numbers were": lambda t: opening(
        t, nodes__csv="id,f\n" + "".join(f"{i},1\n" for i in range(300_000)) + "300000,many\n"
    ),
    "open_graph, an empty file": lambda t: opening(t, nodes__csv=""),
    "open_graph, one line is shorter": lambda t: opening(t, nodes__csv="id,f\n0,1\n1\n"),
    "open_graph, letters for Parquet": lambda t: opening(t, nodes__parquet="letters"),
    "open_graph, lists of two lengths": opening_lists_of_two_lengths,
    "open_graph, an edge with one end": lambda t: opening(t, edges__csv="source,target\n0,\n"),
    "open_graph, an edge to no node": lambda t: opening(t, nodes__csv="id,f\n0,1\n2,1\n"),
    "open_graph, an edge to no row": lambda t: opening(t, x__npy=np.ones((1, 2))),
    "open_graph, ids for rows": lambda t: opening(
        t, x__npy=np.ones((2, 2)), edges__csv="source,target\na,b\n"
    ),
    "open_graph, an edge without a type": lambda t: opening(
        t, edges__csv="source,target,type\n0,1,a\n1,0,\n"
    ),
    "open_graph, types that are fractions": lambda t: opening(
        t, edges__csv="source,target,type\n0,1,0.5\n1,0,2\n"
    ),
    "open_graph, an array of types of pairs": lambda t: opening(
        t, edge_type__npy=np.ones((2, 2), dtype=int)
    ),
    "open_graph, a type without a name": lambda t: opening(
        t, edge_type__npy=np.array([0, 2]), edge_types__txt="likes\nknows\n"
    ),
    "open_graph, a name of two types": lambda t: opening(
        t, edge_type__npy=np.array([0, 1]), edge_types__txt="likes\nlikes\n"
    ),
    "open_graph, no column of types": lambda t: opening(t, options={"columns": {"type": "kind"}}),
    "open_graph, a file of types in two columns": lambda t: opening(
        t, edge_type__csv="type,b\nx,1\ny,1\n"
    ),
    "open_graph, names of types that are no text": lambda t: (
        (t.path / "edge_types.txt").write_bytes(b"\xff\xfe\xfa"),
        opening(t, edge_type__npy=np.array([0, 1])),
    ),
    "import_graph, an edge without a type": lambda t: imports(
        t, {"edges.csv": "source,target,type\na,b,x\nb,a,\n"}
    ),
    "open_graph, hetero of a graph folder": lambda t: graph_folder(t, hetero=True),
    "open_graph, reverses that are there": lambda t: opening(
        t,
        edges__csv="source,target,type\n0,1,a\n1,0,rev_a\n",
        nodes__csv="id,type,f\n0,u,1\n1,v,2\n",
        options={"undirected": True, "hetero": True},
    ),
    "open_graph, a node without an id": lambda t: opening(t, nodes__csv="id,f\n0,1\n,1\n"),
    "open_graph, a node twice": lambda t: opening(t, nodes__csv="id,f\n0,1\n0,1\n"),
    "open_graph, a feature that is missing": lambda t: opening(
        t, nodes__csv="id,f,g\n0,1,2\n1,1,\n"
    ),
    "open_graph, nothing known of nodes": lambda t: opening(t, nodes__csv="name,f\nx,y\nz,1\n"),
    "open_graph, text is no feature": lambda t: opening(t, nodes__csv="id,city\n0,A\n1,B\n"),
    "open_graph, other nodes have features": lambda t: opening(
        t, nodes__csv="id,label\n0,1\n1,1\n", x__csv="id,f\n0,1\n"
    ),
    "open_graph, a node without a real target": lambda t: opening(
        t, nodes__csv="id,f\n0,1\n1,1\n", labels__csv="id,label\n0,0.5\n"
    ),
    "open_graph, other numbers of rows": lambda t: opening(
        t, x__npy=np.ones((2, 2)), y__npy=np.array([0, 1, 0])
    ),
    "open_graph, labels of no known name": lambda t: opening(t, labels__csv="a,b\n1,2\n3,4\n"),
    "open_graph, labels twice": lambda t: opening(
        t, nodes__csv="id,label\n0,1\n1,1\n", y__npy=CLASSES
    ),
    "open_graph, features in one row": lambda t: opening(t, x__npy=np.ones(2)),
    "open_graph, an array of nodes": lambda t: opening(t, nodes__npy=np.ones((2, 2))),
    "open_graph, objects in an array": lambda t: opening(t, x__npy=np.array([{}, {}])),
    "open_graph, edges in three rows": lambda t: opening(
        t, edges__csv=None, edge_index__npy=np.ones((3, 3), dtype=int)
    ),
    "open_graph, a split of another name": lambda t: opening(
        t, nodes__csv="id,split\n0,train\n1,later\n"
    ),
    "open_graph, a mask of another length": lambda t: opening(
        t, x__npy=np.ones((2, 2)), train_mask__npy=np.ones(3)
    ),
    "open_graph, a list of fractions": lambda t: opening(
        t, x__npy=np.ones((2, 2)), train_idx__npy=np.ones(1)
    ),
    "open_graph, a list in two columns": lambda t: opening(
        t, x__npy=np.ones((2, 2)), train_idx__csv="0,1\n"
    ),
    "open_graph, too large an id": lambda t: opening(
        t, y__npy=np.array([0, 2**64 - 1], dtype=np.uint64)
    ),
    "npz, no nodes": lambda t: npz(
        t, x=ONES[:0], y=CLASSES[:0], edge_index=np.zeros((2, 0), dtype=int)
    ),
    "npz, a class beyond reason": lambda t: npz(t, y=np.array([0, 10**9])),
    "npz, parts that overlap": lambda t: npz(t, **{**MASKS, "val_mask": ~MASKS["val_mask"]}),
    "npz, an empty part": lambda t: npz(t, **{**MASKS, "train_mask": np.array([False, False])}),
    "npz, several training sets": lambda t: npz(
        t, **{**MASKS, "train_mask": np.ones((2, 2)), "val_mask": np.ones((2, 3))}
    ),
    "npz, a list with a node too many": lambda t: npz(t, train_idx=np.array([0, 7])),
    "npz, one mask for all": lambda t: npz(t, train_mask=np.array(True)),
    "open_graph, one weight for all": lambda t: opening(t, edge_weight__npy=np.array(1.0)),
    "open_graph, one mask for all": lambda t: opening(
        t, x__npy=np.ones((2, 2)), train_mask__npy=np.array(True)
    ),
    "open_graph, a list of columns": lambda t: opening(t, options={"columns": ["source"]}),
    "pt, a dictionary by number": lambda t: pt(t, {0: torch.ones(2, 3)}),
    "pt, a list for a mask": lambda t: pt(
        t, Data(torch.ones(2, 3), torch.eye(2).long(), y=torch.arange(2), train_mask=[True, False])
    ),
    "pt, complex features": lambda t: pt(
        t, {"x": torch.ones(2, 3) * 1j, "y": torch.arange(2), "edge_index": torch.eye(2).long()}
    ),
    "npz, letters": lambda t: damaged(t, "g.npz"),
    "npz, empty": lambda t: damaged(t, "g.npz", b""),
    "npz, cut off": cut_off,
    "npz, an array cut off": lambda t: entry(t, lambda whole: whole[:64]),
    "npz, an array without its rows": lambda t: entry(t, lambda whole: whole[:128]),
    "npz, no array": lambda t: entry(t, lambda _: b"words"),
    "npz, an array of version 3": lambda t: entry(
        t, lambda whole: whole.replace(b"Y\x01", b"Y\x03")
    ),
    "npz, pickled objects": lambda t: npz(t, y=np.array([{}, {}])),
    "npz, text": lambda t: npz(t, y=np.array(["a", "b"])),
    "npz, no features": lambda t: npz(t, x=None),
    "npz, features in one row": lambda t: npz(t, x=np.ones(2)),
    "npz, features that are NaN": lambda t: npz(t, x=np.full((2, 3), np.nan)),
    "npz, real targets that are NaN": lambda t: npz(t, y=np.array([0.5, np.nan])),
    "npz, real targets that are infinite": lambda t: npz(t, y=np.array([0.5, np.inf])),
    "npz, packed by LZMA": packed_by_lzma,
    "npz, types of another length": types_of_another_length,
    "open_graph, types that are dates": types_that_are_dates,
    "npz, classes below -1": lambda t: npz(t, y=np.array([0, -2])),
    "npz, a mask of indices": lambda t: npz(t, train_mask=np.array([0, 5])),
    "npz, a training mask alone": lambda t: npz(t, train_mask=MASKS["train_mask"]),
    "npz, a training node of no class": lambda t: npz(
        t, **{**MASKS, "train_mask": ~MASKS["train_mask"]}, y=np.array([0, -1])
    ),
    "npz, an edge to a missing node": lambda t: npz(t, edge_index=EDGES + 1),
    "npz, no edges": lambda t: npz(t, edge_index=None),
    "pt, letters": lambda t: damaged(t, "g.pt"),
    "pt, a list": lambda t: pt(t, [torch.ones(1)]),
    "pt, code": lambda t: pt(t, {"x": Ogb()}),
    "pt, a Data without targets": lambda t: pt(t, Data(x=torch.ones(2, 3))),
}
