import functools

import numpy as np
import pytest
import torch

import gas
from gas.datasets.planted import open_mapped, planted_partition, write_planted_partition


def same_class(data):
    return float((data.y[data.edge_index[0]] == data.y[data.edge_index[1]]).float().mean())


def test_the_model_is_that_of_graphs_in_memory(tmp_path):
    data = write_planted_partition(tmp_path, 5000)
    twin = planted_partition(5000)
    for key in ("edge_index", "x", "y"):
        assert data[key].shape == twin[key].shape
        assert data[key].dtype == twin[key].dtype
    assert data.is_undirected()
    assert same_class(data) == pytest.approx(same_class(twin), abs=0.02)
    degrees = [torch.bincount(d.edge_index[0], minlength=5000).double() for d in (data, twin)]
    for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        found, expected = (float(degree.quantile(share)) for degree in degrees)
        assert found == pytest.approx(expected, rel=0.1, abs=1)
    assert float(degrees[0].max()) == pytest.approx(float(degrees[1].max()), rel=0.3)
    counts = [torch.bincount(d.y, minlength=16).double() for d in (data, twin)]
    assert counts[0].min() > counts[1].min() / 2
    means, centred = class_means(data)
    twin_means, twin_centred = class_means(twin)
    assert float(means.std()) == pytest.approx(float(twin_means.std()), rel=0.1)
    assert float(centred.std()) == pytest.approx(float(twin_centred.std()), rel=0.01)
    assert (
        abs(torch.corrcoef(centred[:, :2].t())[0, 1]) < 0.1
    )  # Features of a node are independent.


def class_means(data):
    means = torch.stack([data.x[data.y == c].mean(dim=0) for c in range(16)])
    return means, data.x - means[data.y]


def test_blocks_do_not_matter_and_the_seed_does(tmp_path):
    arguments = {"num_nodes": 300, "avg_degree": 5, "num_features": 7}
    first = write_planted_partition(tmp_path / "0", **arguments)
    for number, block in enumerate((1, 10, 97, 750, 10**6), 1):
        again = write_planted_partition(tmp_path / str(number), **arguments, block=block)
        assert all(torch.equal(value, again[key]) for key, value in first)
    other = write_planted_partition(tmp_path / "other", **arguments, seed=1)
    assert not any(torch.equal(value, other[key]) for key, value in first)


def test_it_is_read_by_open_graph_and_clustered_from_the_map(tmp_path):
    data = write_planted_partition(tmp_path, 400, dtype=torch.float16)
    assert data.x.dtype == torch.float16
    read = gas.open_graph(tmp_path, log=False)
    for key in ("edge_index", "x", "y"):
        assert torch.equal(read[key], data[key].to(read[key].dtype))
    before = (tmp_path / "x.npy").read_bytes()
    graph = gas.cluster(data, 4, log=False)
    assert torch.equal(graph.x, data.x[graph.perm])
    data.x.zero_()  # The file is not the caller's.
    assert (tmp_path / "x.npy").read_bytes() == before
    assert not open_mapped(tmp_path).x.eq(0).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 50])
def test_small_graphs(num_nodes, tmp_path):
    data = write_planted_partition(tmp_path, num_nodes)
    assert data.num_nodes == num_nodes
    assert int(data.edge_index.max()) < num_nodes
    assert write_planted_partition(tmp_path / "none", num_nodes, avg_degree=0).num_edges == 0
    assert write_planted_partition(tmp_path / "bare", num_nodes, num_features=0).x.size(1) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_nodes": 0},
        {"num_classes": 0},
        {"num_features": -1},
        {"community_size": 0},
        {"avg_degree": -1},
        {"mixing": 2.0},
        {"exponent": 2},
        {"noise": float("nan")},
    ],
    ids=str,
)
def test_arguments_are_checked_before_anything_is_written(wrong, tmp_path):
    (name,) = wrong
    for draw in (planted_partition, functools.partial(write_planted_partition, tmp_path / "new")):
        with pytest.raises(ValueError, match=f"'{name}' is .*, expected"):
            draw(**{"num_nodes": 10, **wrong})
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_taken(tmp_path):
    (tmp_path / "x.npy").write_text("mine")
    with pytest.raises(ValueError, match="which holds x.npy: choose another"):
        write_planted_partition(tmp_path, 10)
    assert [file.name for file in tmp_path.iterdir()] == ["x.npy"]
    with pytest.raises(ValueError, match="has no edge_index.npy"):
        open_mapped(tmp_path)


def test_files_larger_than_memory_are_mapped(tmp_path):
    """A hole takes no room: of x there is only what was written."""
    write_planted_partition(tmp_path, 10)
    shape = (2**30, 2**10)
    with (tmp_path / "x.npy").open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        try:
            stream.truncate(stream.tell() + 4 * 2**40)
        except OSError:
            return  # Where a file can't be that long.
    assert open_mapped(tmp_path).x.shape == shape
