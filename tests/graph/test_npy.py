"""Arrays of a folder: mapped copy-on-write, and refused where file and entry disagree."""

import mmap
import platform
import runpy
import sys

import numpy as np
import pytest
from numpy.lib import format as npy

import gas
from gas.graph.folder.npy import PREFIX, Array, check_inside, map_array, write_array

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def entry(file="x.npy", dtype="float32", shape=(4, 3), **more):
    return Array(file, dtype, shape, **more)


def test_an_array_is_mapped_and_its_file_stays(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    mapped = map_array(tmp_path, entry())
    assert np.array_equal(mapped, ROWS)
    mapped[0] = -1
    assert np.array_equal(np.load(tmp_path / "x.npy"), ROWS)
    np.save(tmp_path / "x.npy", ROWS[:0])
    assert map_array(tmp_path, entry(shape=(0, 3))).shape == (0, 3)


@pytest.mark.parametrize(("machine", "flag"), [("x86_64", 0x4000), ("mips64", 0)])
def test_mappings_reserve_no_swap_where_the_flag_is_known(monkeypatch, machine, flag):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delattr(mmap, "MAP_NORESERVE", raising=False)  # Python 3.13 has it.
    module = runpy.run_path(gas.graph.folder.npy.__file__)
    assert module["PRIVATE"] == {"flags": mmap.MAP_PRIVATE | flag}


def test_an_entry_says_what_differs_from_the_usual():
    assert entry().to_json() == {"file": "x.npy", "dtype": "float32", "shape": [4, 3]}
    assert entry(numpy=True).to_json()["numpy"] is True
    encoded = entry(dtype="uint8", shape=(4, 8), codec="int8", width=3)
    assert encoded.to_json() | {"codec": "int8", "width": 3} == encoded.to_json()
    assert encoded.nbytes == 32
    assert entry(dtype="bfloat16").nbytes == 24


@pytest.mark.parametrize("size", [0, 6, PREFIX - 1])
def test_a_file_that_ends_in_its_beginning_is_refused(tmp_path, size):
    np.save(tmp_path / "x.npy", ROWS)
    path = tmp_path / "x.npy"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="its beginning is .*expected the header of an .npy file"):
        map_array(tmp_path, entry())


@pytest.mark.parametrize("position", [0, 6])
def test_another_beginning_is_refused(tmp_path, position):
    np.save(tmp_path / "x.npy", ROWS)
    path = tmp_path / "x.npy"
    content = bytearray(path.read_bytes())
    content[position] = 9
    path.write_bytes(content)
    with pytest.raises(ValueError, match="its beginning"):
        map_array(tmp_path, entry())


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (ROWS.astype(np.float64), "its header"),
        (ROWS.T.copy(), "its header"),
        (np.asfortranarray(ROWS), "its header is in Fortran's order"),
    ],
)
def test_another_header_is_refused(tmp_path, rows, wrong):
    np.save(tmp_path / "x.npy", rows)
    with pytest.raises(ValueError, match=wrong):
        map_array(tmp_path, entry())


def test_another_size_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    with (tmp_path / "x.npy").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="its size is .* bytes"):
        map_array(tmp_path, entry())


def test_a_link_stays_in_its_folder(tmp_path):
    folder = tmp_path / "graph"
    folder.mkdir()
    np.save(folder / "y.npy", ROWS)
    (folder / "x.npy").symlink_to("y.npy")
    check_inside(folder / "x.npy")
    assert np.array_equal(map_array(folder, entry()), ROWS)
    np.save(tmp_path / "z.npy", ROWS)
    (folder / "x.npy").unlink()
    (folder / "x.npy").symlink_to("../z.npy")
    with pytest.raises(ValueError, match="a link to .*z.npy"):
        map_array(folder, entry())


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_both_versions_of_the_header_are_read(tmp_path, version):
    with (tmp_path / "x.npy").open("wb") as file:
        npy.write_array(file, ROWS, version=version)
    assert np.array_equal(map_array(tmp_path, entry()), ROWS)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_file_holds_as_much_as_its_header_says(tmp_path, rows):
    with pytest.raises(AssertionError, match=f"x.npy: {12 * rows} bytes, expected 48"):
        write_array(tmp_path / "x.npy", entry(), [np.ones((rows, 3))])
