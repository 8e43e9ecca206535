"""Graph folders: what is written, mapped and trained on is the clustered graph in memory."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import random_graph
from scipy import sparse
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

import gas
from gas.graph import NewFolder
from gas.graph.layout import layout_of
from gas.history import Encoded

CODECS = ("float64", "float32", "float16", "bfloat16", "int8")


def make(**changes):
    torch.manual_seed(0)
    data = random_graph()
    for key, value in changes.items():
        data[key] = value(data) if callable(value) else value
    return data


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def both(data, path, num_parts=6, **options):
    """Return the same graph clustered in memory and in a folder."""
    return (
        gas.cluster(data, num_parts, log=False, **options),
        gas.cluster(data, num_parts, log=False, out=path / "graph", **options),
    )


class WithAttributes(gas.ScalableGNN):
    """Two layers that look at attributes of edges."""

    def __init__(self):
        super().__init__(60, 8, 2)
        self.convs = torch.nn.ModuleList([GATConv(5, 8, edge_dim=3), GATConv(8, 3, edge_dim=3)])

    def forward(self, x, edge_index, *args, edge_attr=None):
        x = self.convs[0](x, edge_index, edge_attr).relu()
        x = self.push_and_pull(self.histories[0], x, *args)
        return self.convs[1](x, edge_index, edge_attr)


def pna(data):
    deg = torch.bincount(data.edge_index[1], minlength=60)
    how = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": deg}
    return gas.models.PNA(60, 5, 8, 3, 2, **how)


def encoded(codec):
    return lambda data: gas.quantize(data.x, codec)


def words(data):
    return torch.where(data.x > 0.5, data.x, 0).to_sparse_csr()


MODELS = {
    "GCN": lambda data: gas.models.GCN(60, 5, 8, 3, 2, dropout=0.3),
    "GraphSAGE": lambda data: gas.models.GraphSAGE(60, 5, 8, 3, 2, dropout=0.3),
    "GAT": lambda data: gas.models.GAT(60, 5, 8, 2, 3, 1, 2),
    "PNA": pna,
    "attributes": lambda data: WithAttributes(),
}
CASES = [
    *((name, {}, {}) for name in ("GCN", "GraphSAGE", "GAT")),
    *((name, {"x": words}, {}) for name in ("GCN", "GraphSAGE", "PNA")),
    *(("GCN", {"x": encoded(codec)}, {}) for codec in CODECS[1:]),
    ("GraphSAGE", {"x": encoded("int8")}, {}),
    *(("GCN", {}, {"layout": layout}) for layout in ("csr", "edge_index")),
    (
        "attributes",
        {"edge_attr": lambda data: torch.rand(data.num_edges, 3)},
        {"layout": "edge_index"},
    ),
]


def curve(model, graph, **options):
    """Return the losses of a few epochs, and what is predicted then."""
    torch.manual_seed(1)
    model.predict(graph, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False, **options)
    losses = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            out, own = model(batch), batch.own
            loss = torch.nn.functional.cross_entropy(out[own.train_mask], own.y[own.train_mask])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert all(np.isfinite(losses))
    return losses, model.predict(graph, batch_size=2, **options)  # A path remembers none.


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize(("name", "changes", "options"), CASES)
def test_the_curve_is_bitwise_that_in_memory(name, changes, options, tmp_path):
    data = make(**changes)
    model = MODELS[name](data)
    memory, folder = both(data, tmp_path, model=model)
    losses, pred = curve(copy.deepcopy(model), memory, **options)
    for graph in (folder, tmp_path / "graph", str(tmp_path / "graph")):
        mine = copy.deepcopy(model)
        found, theirs = curve(mine, graph, **options)
        assert found == losses
        assert torch.equal(theirs, pred)
    assert gas.verify(mine, tmp_path / "graph", **options)
    assert gas.verify(mine, folder, num_nodes=5, **options)


def test_attributes_of_edges_follow_them(tmp_path):
    data = make(edge_attr=lambda d: torch.rand(d.num_edges, 3))
    data.edge_type = torch.arange(data.num_edges)
    memory, folder = both(data, tmp_path)
    row = torch.repeat_interleave(torch.arange(60), folder.adj_t.crow_indices().diff())
    found = torch.stack([folder.adj_t.col_indices(), row])
    assert torch.equal(found, memory.edge_index[:, folder.edge_type])
    assert torch.equal(folder.edge_attr, data.edge_attr[folder.edge_type])


@pytest.mark.parametrize("num_edges", [240, 60])
def test_attributes_of_edges_beside_pairs_to_predict(num_edges, tmp_path):
    """By which PyG counts edges; and there may be as many edges as nodes."""
    data = make(edge_index=lambda d: d.edge_index[:, :num_edges])
    data.edge_time = torch.arange(num_edges)
    data.edge_label_index = torch.tensor([[0, 1, 5], [2, 3, 7]])
    data.degree = torch.arange(60)
    memory, folder = both(data, tmp_path)
    for mine, theirs in zip(
        gas.SubgraphLoader(memory, batch_size=2, log=False),
        gas.SubgraphLoader(folder, batch_size=2, log=False),
        strict=True,
    ):
        assert torch.equal(mine.edge_time, theirs.edge_time)
        assert torch.equal(mine.degree, theirs.degree)
    assert torch.equal(folder.edge_label_index, memory.edge_label_index)


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_attributes_of_edges(codec, tmp_path):
    data = make(edge_attr=lambda d: gas.quantize(torch.rand(d.num_edges, 3), codec))
    memory, folder = both(data, tmp_path)
    for mine, theirs in zip(
        gas.SubgraphLoader(memory, log=False), gas.SubgraphLoader(folder, log=False), strict=True
    ):
        assert torch.equal(mine.edge_attr, theirs.edge_attr)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loader_reads_where_it_lies(weighted, tmp_path):
    data = make(**({"edge_weight": lambda d: torch.rand(d.num_edges)} if weighted else {}))
    _, folder = both(data, tmp_path)
    assert "edge_index" not in folder
    assert "edge_weight" not in folder
    loader = gas.SubgraphLoader(folder, batch_size=2, log=False)
    adj_t = folder.adj_t
    assert adj_t.col_indices().dtype == torch.int32
    assert loader._relabel.col.data_ptr() == adj_t.col_indices().data_ptr()
    assert loader._relabel.e_id is None
    if weighted:
        assert loader._relabel.weight.data_ptr() == adj_t.values().data_ptr()
    else:
        assert loader._relabel.weight is None
        assert layout_of(adj_t).value(adj_t) is None
    assert loader.data.x.data_ptr() == folder.x.data_ptr()


def test_every_attribute_comes_back(tmp_path):
    data = make(
        half=lambda d: d.x.half(),
        brain=lambda d: d.x.bfloat16(),
        wide=lambda d: d.x.double(),
        masks=lambda d: d.x > 0,
        lengths=torch.tensor([1, 2], dtype=torch.uint16),
        scalar=torch.tensor(3.5),
        nothing=torch.empty(0, 3),
        train_idx=torch.tensor([3, 0, 59]),
        edge_label_index=torch.tensor([[0, 1], [2, 3]]),  # By which PyG counts edges.
        node_id=np.array([f"node {i}" for i in range(60)]),
        number=np.arange(60) * 7,
        letters=np.array([], dtype="U"),
        X=torch.ones(2),
        classes=["a", "b", "ü"],
        split="made up",
        settings={"a": [1, 2.5, None, True], "b": {}},
        pair=(1, 2),
        number_of=np.int64(7),
        fraction=0.1,
    )
    data.edge_weight = torch.rand(240, 1)
    before = data.clone()
    memory, folder = both(data, tmp_path)
    again = gas.open_graph(tmp_path / "graph", log=False)
    assert torch.equal(data.x, before.x)
    left_out = {"edge_index", "edge_weight", "pair"}
    for found in (folder, again):
        assert set(found.keys()) == set(memory.keys()) - {"edge_index", "edge_weight"} | {
            "adj_t",
            "num_nodes",
        }
        for key in set(memory.keys()) - left_out:
            value = memory[key]
            if isinstance(value, torch.Tensor):
                assert found[key].dtype == value.dtype, key
                assert torch.equal(found[key], value), key
            elif isinstance(value, np.ndarray):
                assert type(found[key]) is np.ndarray
                assert found[key].tolist() == value.tolist()
            else:
                assert found[key] == value
        assert found.pair == [1, 2]
        assert found.number_of == 7
        assert found.num_nodes == 60
        dense = torch.zeros(60, 60)
        src, dst = memory.edge_index
        dense.index_put_((dst, src), memory.edge_weight.view(-1), accumulate=True)
        assert torch.allclose(found.adj_t.to_dense(), dense)


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_features_stay_encoded(codec, tmp_path):
    memory, folder = both(make(x=encoded(codec)), tmp_path)
    assert isinstance(folder.x, Encoded)
    assert folder.x.codec == memory.x.codec
    assert folder.x.store.tier == "disk"
    assert torch.equal(folder.x.dequantize(), memory.x.dequantize())
    index = torch.tensor([5, 0, 5])
    assert torch.equal(folder.x[index], memory.x[index])
    assert torch.equal(folder.x.clone().dequantize(), memory.x.dequantize())
    again = gas.cluster(Data(x=folder.x, edge_index=memory.edge_index), 2, log=False)
    assert torch.equal(again.x[:], folder.x[again.perm])


def test_numpy_alone_reads_it(tmp_path):
    data = make(edge_weight=lambda d: torch.rand(d.num_edges), x=encoded("float16"))
    memory, _ = both(data, tmp_path)
    folder = tmp_path / "graph"
    said = json.loads((folder / "graph.json").read_text())
    assert said["format"] == "gas graph"
    assert said["version"] == 1
    read = {
        key: np.load(folder / array["file"], allow_pickle=False)
        for key, array in said["arrays"].items()
    }
    for key, array in said["arrays"].items():
        assert read[key].shape == tuple(array["shape"])
        assert str(read[key].dtype) == array["dtype"]
    adj = sparse.csr_matrix((read["edge_weight"], read["col"], read["rowptr"]), shape=(60, 60))
    dense = np.zeros((60, 60), np.float32)
    np.add.at(dense, tuple(data.edge_index.flip(0).numpy()), data.edge_weight.numpy())
    perm = read["perm"]
    assert np.allclose(adj.toarray(), dense[perm][:, perm])
    assert np.array_equal(read["x"], data.x.dequantize().half().numpy()[perm])
    assert np.array_equal(read["parts"], memory.parts.numpy())
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["graph.json", *(array["file"] for array in said["arrays"].values())]
    )


@pytest.mark.slow
def test_a_fresh_process_predicts_the_same(tmp_path):
    data = make()
    model = gas.models.GCN(60, 5, 8, 3, 2)
    graph = gas.cluster(data, 6, model=model, out=tmp_path / "graph", log=False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(model.predict(graph), tmp_path / "pred.pt")
    program = """
import torch, gas
model = gas.models.GCN(60, 5, 8, 3, 2)
model.load_state_dict(torch.load("model.pt"))
assert torch.equal(model.predict("graph"), torch.load("pred.pt"))
(batch, *_) = next(iter(gas.SubgraphLoader("graph", log=False, num_workers=1)))
print(batch.num_nodes > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def test_files_are_not_the_callers(tmp_path):
    _, folder = both(make(), tmp_path)
    before = content(tmp_path / "graph")
    folder.x.zero_()
    folder.y += 1
    folder.adj_t.col_indices().zero_()
    assert content(tmp_path / "graph") == before
    assert not gas.open_graph(tmp_path / "graph", log=False).x.eq(0).all()


@pytest.mark.parametrize("block", [1, 100, 5000])
def test_blocks_do_not_matter(block, tmp_path, monkeypatch):
    data = make(edge_attr=lambda d: torch.rand(d.num_edges, 3), words=words, x=encoded("int8"))
    gas.cluster(data, 6, log=False, out=tmp_path / "one")
    monkeypatch.setattr("gas.graph.folder.writing.BLOCK_BYTES", block)
    monkeypatch.setattr("gas.graph.folder.opening.BLOCK", block)
    gas.cluster(data, 6, log=False, out=tmp_path / "other")
    gas.open_graph(tmp_path / "other", log=False)
    assert content(tmp_path / "one") == content(tmp_path / "other")


@pytest.mark.parametrize("model", [None, "GCN", "GAT"])
def test_a_folder_of_one_part_is_cut_into_parts(model, tmp_path):
    data = make(edge_attr=lambda d: torch.rand(d.num_edges, 3))
    one = gas.cluster(data, 1, log=False, out=tmp_path / "one")
    assert torch.equal(one.perm, torch.arange(60))
    made = None if model is None else MODELS[model](data)
    if model is not None:  # Whose transforms add edges that have no attributes.
        del data.edge_attr, one.edge_attr
    options = {"log": False, "model": made, "method": "random"}
    graph = gas.cluster(one, 6, out=tmp_path / "six", **options)
    expected = gas.cluster(data, 6, out=tmp_path / "twin", **options)
    assert torch.equal(graph.perm, expected.perm)
    for key, value in expected:
        if key == "edge_attr" and model is None:
            continue  # Those of duplicate edges may change places.
        if isinstance(value, torch.Tensor) and key != "adj_t":
            assert torch.equal(graph[key], value), key
    assert torch.allclose(graph.adj_t.to_dense(), expected.adj_t.to_dense())
    again = gas.cluster(gas.cluster(one, 1, log=False, method="random"), 6, **options)
    assert torch.equal(again.perm, expected.perm)
    assert torch.equal(again.x, expected.x)
    with pytest.raises(ValueError, match="'data' is clustered already, into 6 parts"):
        gas.cluster(graph, 2, log=False)


def test_it_may_come_as_any_adjacency(tmp_path):
    data = make(edge_weight=lambda d: torch.rand(d.num_edges))
    dense = torch.zeros(60, 60)
    dense.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
    for number, adj_t in enumerate(
        (dense.to_sparse_csr(), dense.to_sparse_coo(), gas.nn.Adjacency.of(dense.to_sparse_csr()))
    ):
        given = Data(x=data.x, adj_t=adj_t, num_nodes=60)
        graph = gas.cluster(given, 6, log=False, out=tmp_path / str(number))
        assert torch.equal(graph.adj_t.to_dense(), dense[graph.perm][:, graph.perm])


def test_weights_of_a_matrix_may_be_given_twice(tmp_path):
    adj_t = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr()
    data = Data(x=torch.eye(2), adj_t=adj_t, edge_weight=torch.tensor([2.0, 3.0]), num_nodes=2)
    graph = gas.cluster(data, 1, log=False, out=tmp_path / "graph")
    assert torch.equal(graph.adj_t.to_dense(), adj_t.to_dense()[graph.perm][:, graph.perm])


def test_small_graphs(tmp_path):
    for name, data in {
        "one node": Data(x=torch.ones(1, 2), edge_index=torch.empty(2, 0, dtype=torch.long)),
        "one loop": Data(x=torch.ones(1, 2), edge_index=torch.zeros(2, 1, dtype=torch.long)),
        "no features": Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2),
        "no width": Data(x=torch.empty(2, 0), edge_index=torch.tensor([[0], [1]])),
    }.items():
        graph = gas.cluster(data, 1, log=False, out=tmp_path / name)
        assert graph.num_nodes == data.num_nodes
        assert graph.num_edges == data.num_edges
        (batch,) = gas.SubgraphLoader(tmp_path / name, log=False)
        assert batch.adj_t.num_entries == data.num_edges
        assert batch.adj_t.value is None


def test_types_are_as_small_as_they_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr("gas.graph.folder.writing.MOST_INT32", 239)
    memory, folder = both(make(), tmp_path)
    assert folder.adj_t.col_indices().dtype == torch.int64
    assert folder.adj_t.crow_indices().dtype == torch.int64
    model = MODELS["GraphSAGE"](None)
    assert curve(copy.deepcopy(model), memory)[0] == curve(model, folder)[0]


@pytest.mark.parametrize("num_parts", [1, 6])
def test_scripts_take_it_as_it_was(num_parts, tmp_path):
    """In the order of the graph before, of which the ids of nodes are."""
    data = make(edge_weight=lambda d: torch.rand(d.num_edges))
    for key, begin in (("train_mask", 0), ("val_mask", 20), ("test_mask", 40)):
        data[key] = (torch.arange(60) >= begin) & (torch.arange(60) < begin + 20)
    gas.cluster(data, num_parts, log=False, out=tmp_path / "graph")
    found, in_channels, out_channels = gas.get_data("data", str(tmp_path / "graph"))
    assert (in_channels, out_channels) == (5, 3)
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(found[key], data[key])
    assert not {"perm", "parts", "adj_t"} & set(found.keys())
    dense = [
        torch.zeros(60, 60).index_put_(tuple(d.edge_index), d.edge_weight, accumulate=True)
        for d in (found, data)
    ]
    assert torch.allclose(*dense)


def test_with_memory_for_parts(tmp_path):
    data, model = make(), gas.models.GraphSAGE(60, 5, 8, 3, 2)
    options = {"model": model, "memory": "8KB", "log": False}
    memory, folder = (
        gas.cluster(data, "auto", **options),
        gas.cluster(data, "auto", **options, out=tmp_path / "g"),
    )
    assert torch.equal(memory.parts, folder.parts)
    assert memory.parts.numel() > 2


# Unfinished folders -------------------------------------------------------------------------------


class Stop(BaseException):
    """Exception that ends a program."""


@pytest.mark.parametrize("after", range(0, 7, 2))
def test_what_was_left_unfinished_is_written_anew(after, tmp_path, monkeypatch):
    data = make()
    expected = gas.cluster(data, 6, log=False, out=tmp_path / "whole")
    write, count = NewFolder.write, [0]

    def stops(self, array, blocks):
        if count[0] == after:
            (self.path / array.file).write_bytes(b"half")
            raise Stop
        count[0] += 1
        write(self, array, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(NewFolder, "write", stops)
        with pytest.raises(Stop):
            gas.cluster(data, 6, log=False, out=tmp_path / "graph")
    for opening in (gas.open_graph, gas.SubgraphLoader):
        with pytest.raises(ValueError, match="is a graph folder that was left unfinished"):
            opening(tmp_path / "graph", log=False)
    graph = gas.cluster(data, 6, log=False, out=tmp_path / "graph")
    assert torch.equal(graph.x, expected.x)
    assert content(tmp_path / "graph") == content(tmp_path / "whole")


def test_what_is_discarded_leaves_an_empty_folder(tmp_path):
    folder = NewFolder(tmp_path / "graph", "a test")
    folder.begin(["x.npy"], 8)
    for name in ("x.npy", "graph.json.new", "unfinished.json.new"):
        (folder.path / name).write_bytes(b"half")
    folder.discard()
    assert list(folder.path.iterdir()) == []
    NewFolder(folder.path, "another")  # Which may use it.


def test_files_of_others_are_never_touched(tmp_path):
    data, folder = make(), tmp_path / "graph"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="which holds thesis.txt: name a new folder"):
        gas.cluster(data, 6, log=False, out=folder)
    mark = {"format": "unfinished gas graph", "by": "gas.cluster", "files": ["x.npy"]}
    (folder / "unfinished.json").write_text(json.dumps(mark))
    with pytest.raises(ValueError, match="which holds thesis.txt: name a new folder"):
        gas.cluster(data, 6, log=False, out=folder)
    assert (folder / "thesis.txt").read_text() == "mine"
    (folder / "thesis.txt").unlink()
    gas.cluster(data, 6, log=False, out=folder)
    with pytest.raises(ValueError, match="which holds graph.json: name a new folder"):
        gas.cluster(data, 6, log=False, out=folder)


def test_nothing_is_written_of_what_cannot_be(tmp_path):
    for value in (object(), {1: 2}, float("nan"), [torch.ones(1)], torch.ones(2, 2).to_sparse()):
        with pytest.raises(ValueError, match="'odd' is .*can't be written into a graph folder"):
            gas.cluster(make(odd=value), 6, log=False, out=tmp_path / "graph")
    assert not (tmp_path / "graph").exists()


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("gas.graph.folder.new.free_disk", lambda _: 10)
    with pytest.raises(OSError, match="the graph takes .*, and 10 bytes are free"):
        gas.cluster(make(), 6, log=False, out=tmp_path / "graph")
    assert not (tmp_path / "graph").exists()
