import os
import shutil

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from conftest import SHARED, random_graph
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

import gas
from gas import datasets
from gas.datasets import named
from gas.datasets.masks import with_masks
from gas.datasets.planted import planted_partition


@pytest.mark.requires("shared")
@pytest.mark.parametrize(
    ("name", "nodes", "features", "classes", "mask"),
    [
        ("Cora", 2708, 1433, 7, (2708,)),
        ("cora", 2708, 1433, 7, (2708,)),
        ("FacebookPagePage", 22470, 128, 4, (22470, 20)),
        ("minesweeper", 10000, 7, 2, (10000, 10)),
    ],
)
def test_real_graphs(data_root, name, nodes, features, classes, mask):
    data, in_channels, out_channels = gas.get_data(data_root, name, split="all")
    assert (data.num_nodes, in_channels, out_channels) == (nodes, features, classes)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask]).int()
    assert masks.shape == (3, *mask)
    assert (masks.sum(dim=0) <= 1).all()
    assert data.is_undirected()
    if name.lower() == "cora":
        assert [int(m.sum()) for m in masks] == [140, 500, 1000]
        assert torch.allclose(data.x.sum(dim=1), torch.ones(nodes))
    if name == "FacebookPagePage":
        sizes = masks.sum(dim=1)[:, 0].tolist()
        assert sizes == [nodes // 2, nodes * 3 // 4 - nodes // 2, nodes - nodes * 3 // 4]


@pytest.mark.requires("shared")
def test_read_only_folders_are_mirrored(tmp_path, monkeypatch):
    root = tmp_path / "root"
    shutil.copytree(SHARED / "minesweeper", root / "minesweeper")
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "root" not in str(path) and access(path, mode)
    )
    data, *_ = gas.get_data(root, "Minesweeper")
    assert data.num_nodes == 10000
    assert sorted(os.listdir(root / "minesweeper")) == ["raw"]


@pytest.mark.parametrize("name", ["WikiCS", "Yelp", "Reddit2"])
def test_folders(name, tmp_path, monkeypatch):
    graph = random_graph()
    graph.val_mask = graph.test_mask = graph.stopping_mask = ~graph.train_mask
    folders = []

    def load(cls_name, folder, **_):
        folders.append((cls_name, folder))
        return graph

    monkeypatch.setattr(named, "load_pyg", load)
    data, *_ = gas.get_data(tmp_path, name)
    assert folders == [(name, f"{tmp_path}/{name}")]
    assert ("stopping_mask" in data) == (name != "WikiCS")
    if name != "WikiCS":
        assert torch.allclose(data.x.mean(dim=0), torch.zeros(5), atol=1e-5)
        assert torch.allclose(data.x.std(dim=0), torch.ones(5), atol=1e-5)


def test_names():
    assert len(gas.datasets.dataset_names()) == 20
    with pytest.raises(ValueError, match="'dataset' is 'Coro', expected one of Cora, CiteSeer, .*"):
        gas.get_data("data", "Coro")
    for name in ("planted", "planted:", "planted:x", "planted:0", "planted:-3"):
        with pytest.raises(ValueError, match="expected planted:NUM_NODES"):
            gas.get_data("data", name)


def test_without_network(tmp_path, monkeypatch):
    """The error names the files and where to put them."""

    def unreachable(self):
        raise OSError("Name or service not known")

    for name, cls, files in (
        ("CiteSeer", "Planetoid", ["CiteSeer/raw/ind.citeseer.x", "ind.citeseer.test.index"]),
        ("FacebookPagePage", "FacebookPagePage", ["FacebookPagePage/raw/facebook.npz"]),
        ("Tolokers", "HeterophilousGraphDataset", ["tolokers/raw/tolokers.npz"]),
        ("AmazonPhoto", "Amazon", ["photo/raw/amazon_electronics_photo.npz"]),
    ):
        monkeypatch.setattr(f"torch_geometric.datasets.{cls}.download", unreachable)
        with pytest.raises(
            ConnectionError, match="could not be downloaded .*put them there"
        ) as error:
            gas.get_data(tmp_path, name)
        for file in files:
            assert file in str(error.value).replace("Photo/raw", "photo/raw")
        assert str(tmp_path) in str(error.value)


# Files --------------------------------------------------------------------------------------------


def arrays():
    data = random_graph()
    return {"x": data.x.numpy(), "y": data.y.numpy(), "edge_index": data.edge_index.numpy()}


def test_npz(tmp_path):
    given = {**arrays(), "edge_weight": np.ones(240, dtype=np.float32)}
    np.savez(tmp_path / "graph.npz", **given)
    data, features, classes = gas.get_data("nowhere", str(tmp_path / "graph.npz"))
    assert (data.num_nodes, features, classes) == (60, 5, 3)
    for key, value in given.items():
        assert np.array_equal(data[key].numpy(), value)
    assert data.train_mask.shape == (60,)


def test_npz_with_a_number_of_nodes_and_several_labels(tmp_path):
    given = {**arrays(), "y": np.eye(4, dtype=np.int64)[np.arange(60) % 4], "num_nodes": 60}
    np.savez(tmp_path / "graph.npz", **given)
    data, _, outputs = gas.get_data("nowhere", str(tmp_path / "graph.npz"))
    assert type(data.num_nodes) is int
    assert data.num_nodes == 60
    assert outputs == 4


@pytest.mark.parametrize("num_graphs", [1, 3])
def test_several_graphs_are_one(num_graphs, monkeypatch, tmp_path):
    graphs = [random_graph() for _ in range(num_graphs)]

    class Cached:
        def __init__(self, root, name):
            assert (root, name) == (str(tmp_path), "some")

        def __len__(self):
            return num_graphs

        def __getitem__(self, i):
            return graphs[i]

    monkeypatch.setattr("torch_geometric.datasets.Planetoid", Cached)
    data = named.load_pyg("Planetoid", str(tmp_path), "some")
    assert data.num_nodes == 60 * num_graphs
    assert torch.equal(data.x, torch.cat([graph.x for graph in graphs]))
    last = data.edge_index[:, -240:] - 60 * (num_graphs - 1)
    assert torch.equal(last, graphs[-1].edge_index)
    assert ("batch" in data) == (num_graphs > 1)


@pytest.mark.parametrize("as_dict", [False, True])
def test_pt(tmp_path, as_dict):
    data = random_graph()
    data.val_mask = data.test_mask = ~data.train_mask
    torch.save(data.to_dict() if as_dict else data, tmp_path / "graph.pt")
    loaded, *_ = gas.get_data("nowhere", str(tmp_path / "graph.pt"))
    for key, value in data:
        assert torch.equal(loaded[key], value)


@pytest.mark.parametrize("transform", [T.ToUndirected(), T.ToSparseTensor(layout=torch.sparse_csr)])
def test_pt_of_transformed_graphs(tmp_path, transform):
    data = random_graph()
    data.edge_attr = torch.rand(240, 2)
    data.edge_index, data.edge_attr = coalesce(data.edge_index, data.edge_attr)
    assert data.is_edge_attr("edge_attr")
    file = tmp_path / "graph.pt"
    changed = transform(data)
    for content in (changed, changed.to_dict()):
        torch.save(content, file)
        loaded = datasets.load_graph(file)
        assert loaded.num_nodes == 60
        assert torch.equal(loaded.x, data.x)
        if "edge_index" in changed:
            assert torch.equal(loaded.edge_attr, changed.edge_attr)
            assert loaded.is_edge_attr("edge_attr")


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.int64])
def test_labels_and_features_of_any_type(tmp_path, dtype):
    given = arrays()
    given["y"] = given["y"].astype(dtype)[:, None]
    given["x"] = given["x"].astype(np.float64)
    given["num_nodes"] = np.array(60)
    mask = np.arange(60) % 3
    for number, key in enumerate(("train_mask", "val_mask", "test_mask")):
        given[key] = (mask == number).astype(np.int64)
    np.savez(tmp_path / "planted.npz", **given)  # Not a name of a generated graph.
    data, *_ = gas.get_data("nowhere", str(tmp_path / "planted.npz"))
    assert (data.x.dtype, data.y.dtype, data.y.shape) == (torch.float32, torch.int64, (60,))
    assert data.train_mask.dtype == torch.bool
    assert data.train_mask.nonzero().view(-1).tolist() == list(range(0, 60, 3))


def test_unknown_classes(tmp_path):
    given = arrays()
    given["y"][:10] = -1
    np.savez(tmp_path / "graph.npz", **given)
    data, _, classes = gas.get_data("nowhere", str(tmp_path / "graph.npz"))
    assert classes == 3
    for key in ("train_mask", "val_mask", "test_mask"):
        assert not data[key][:10].any()


def test_integer_features_become_floats(tmp_path):
    np.savez(tmp_path / "graph.npz", **{**arrays(), "x": np.eye(60, dtype=np.int32)})
    assert datasets.load_graph(tmp_path / "graph.npz").x.dtype == torch.float32


class Malicious:
    def __reduce__(self):
        return (os.mkdir, (os.environ["GAS_TEST_VICTIM"],))


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_pickles_are_never_loaded(tmp_path, monkeypatch, suffix):
    victim = tmp_path / "victim"
    monkeypatch.setenv("GAS_TEST_VICTIM", str(victim))
    file = tmp_path / f"graph{suffix}"
    if suffix == ".npz":
        np.savez(file, **{**arrays(), "y": np.array([Malicious()], dtype=object)})
        message = "holds pickled objects, which are never loaded .* save plain arrays"
    else:
        torch.save({"x": Malicious()}, file)
        message = "holds a pickled .*mkdir, which is never loaded .* save a PyG Data object"
    with pytest.raises(ValueError, match=message):
        gas.get_data("data", str(file))
    assert not victim.exists()


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_files(tmp_path, suffix, kept):
    file = tmp_path / f"graph{suffix}"
    np.savez(file, **arrays()) if suffix == ".npz" else torch.save(random_graph(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match="is truncated or no graph file .* save it again"):
        gas.get_data("data", str(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones(60)}, r"'x' has shape \[60\], expected \[N, F\]"),
        ({"x": np.array(["a"] * 60)}, "the array 'x' has type <U1, expected numbers"),
        ({"y": np.full(60, np.nan)}, "'y' holds a NaN or infinite value"),
        ({"y": np.full(60, -2)}, "'y' holds no classes, expected integers from 0"),
        ({"train_mask": np.arange(60)}, "'train_mask' holds other values than 0 and 1"),
        (
            {"y": np.full(60, -1)}
            | {
                key: np.arange(60) % 3 == part
                for part, key in enumerate(("train_mask", "val_mask", "test_mask"))
            },
            r"'train_mask' holds \d+ nodes whose class is unknown",
        ),
        ({"x": None}, "holds no 'x': expected the arrays x, y and edge_index"),
        ({"y": None}, "holds no 'y'"),
        ({"edge_index": None}, "holds no 'edge_index'"),
        ({"edge_index": np.array([[0], [60]])}, "node id 60, but 'num_nodes' is 60"),
        ({"edge_index": np.array([[0.0], [1.0]])}, "expected integers"),
        ({"x": np.full((60, 2), np.nan)}, "'x' holds a NaN or infinite value in row 0"),
        ({"y": np.zeros(59, dtype=np.int64)}, "'y' has 59 rows"),
        ({"train_mask": np.ones(60, dtype=bool)}, "has a 'train_mask' but no 'val_mask'"),
    ],
)
def test_incomplete_graphs(tmp_path, change, message):
    content = {key: value for key, value in {**arrays(), **change}.items() if value is not None}
    np.savez(tmp_path / "graph.npz", **content)
    with pytest.raises(ValueError, match=message):
        gas.get_data("data", str(tmp_path / "graph.npz"))


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        gas.get_data("data", str(tmp_path / "absent.npz"))
    with pytest.raises(
        ValueError, match=r"no such file: expected a \.pt or an \.npz file, or tables"
    ):
        gas.get_data("data", str(tmp_path / "graph.csv"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, expected a PyG Data object"):
        gas.get_data("data", str(tmp_path / "list.pt"))


# Generated graphs ---------------------------------------------------------------------------------


def test_planted_graphs():
    data = planted_partition(5000)
    assert data.x.shape == (5000, 64)
    assert data.edge_index.shape == (2, 100_000)
    assert data.is_undirected()
    again = planted_partition(5000)
    assert all(torch.equal(value, again[key]) for key, value in data)
    assert not torch.equal(planted_partition(5000, seed=1).edge_index, data.edge_index)

    degree = torch.bincount(data.edge_index[0], minlength=5000).float()
    assert degree.mean() == 20
    assert degree.max() > 10 * degree.mean()  # Hubs ...
    assert degree.median() < degree.mean()  # ... and many small degrees.
    src, dst = data.edge_index
    same = (data.y[src] == data.y[dst]).float().mean()
    assert same > 0.6  # Of 16 classes.


def test_planted_graphs_in_the_order_of_communities():
    sorted_, shuffled = (planted_partition(5000, shuffle=shuffle) for shuffle in (False, True))
    src, dst = sorted_.edge_index
    number = torch.arange(25).repeat_interleave(200)  # Ranges of nodes, as parts.
    assert (number[src] == number[dst]).float().mean() > 0.5
    # The same edges but for the names of nodes.
    degrees = [torch.bincount(data.edge_index[0]).sort().values for data in (sorted_, shuffled)]
    assert torch.equal(*degrees)
    for data, parts in ((sorted_, 25), (shuffled, 0)):
        runs = (data.y[1:] != data.y[:-1]).sum()  # Labels follow communities.
        assert (runs <= parts) == (parts > 0)


@pytest.mark.parametrize("num_nodes", [1, 2, 50])
def test_small_planted_graphs(num_nodes):
    data, features, _ = gas.get_data("data", f"planted:{num_nodes}")
    assert data.x.shape == (num_nodes, features)
    assert int(data.edge_index.max()) < num_nodes


def test_large_planted_graphs_have_one_split(monkeypatch):
    monkeypatch.setattr(datasets.masks, "MOST_SPLIT_NODES", 100)
    assert gas.get_data("data", "planted:200")[0].train_mask.shape == (200,)
    assert gas.get_data("data", "planted:100", split="all")[0].train_mask.shape == (100, 20)


def test_masks_are_those_of_one_split():
    several = gas.get_data("data", "planted:100", split="all")[0]
    assert several.split == with_masks(planted_partition(100)).split
    for options, number in (({}, 0), ({"split": 7}, 7), ({"split": np.int64(7)}, 7)):
        data = gas.get_data("data", "planted:100", **options)[0]
        assert data.split == f"{several.split}; the masks are those of number {number}"
        for key in ("train_mask", "val_mask", "test_mask"):
            assert torch.equal(data[key], several[key][:, number])
    with pytest.raises(ValueError, match="'split' is True, but the graph has 20"):
        gas.get_data("data", "planted:100", split=True)


def test_masks_of_a_graph_with_one_test_set(tmp_path):
    mask = torch.arange(60) % 3
    given = {**arrays(), "test_mask": mask.numpy() == 2}
    for number, key in enumerate(("train_mask", "val_mask")):
        given[key] = torch.stack([mask == number, mask == 1 - number], dim=1).numpy()
    np.savez(tmp_path / "graph.npz", **given)
    data = gas.get_data("nowhere", str(tmp_path / "graph.npz"), split=1)[0]
    for number, key in enumerate(("val_mask", "train_mask", "test_mask")):
        assert torch.equal(data[key], mask == number)


# Masks --------------------------------------------------------------------------------------------


def test_gen_masks():
    y = torch.randint(3, (600,))
    train, val, test = gas.datasets.gen_masks(y, train_per_class=20, val_per_class=30, num_splits=4)
    assert train.shape == val.shape == test.shape == (600, 4)
    for split in range(4):
        for c in range(3):
            assert int(train[y == c, split].sum()) == 20
            assert int(val[y == c, split].sum()) == 30
    assert (train.int() + val.int() + test.int() == 1).all()
    assert not torch.equal(train[:, 0], train[:, 1])


def test_index2mask():
    assert datasets.index2mask(torch.tensor([0, 2]), 4).tolist() == [True, False, True, False]


def test_given_splits_are_kept():
    data = Data(x=torch.ones(4, 1), y=torch.arange(4), train_mask=torch.arange(4) < 2)
    data.val_mask, data.test_mask = torch.arange(4) == 2, torch.arange(4) == 3
    assert datasets.masks.with_masks(data).train_mask.tolist() == [True, True, False, False]
    assert "split" not in data
