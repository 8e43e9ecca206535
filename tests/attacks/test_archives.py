"""Archives of arrays, ``.npz``, that are damaged or hostile: each opens or is refused by name.

What is refused raises ``ValueError`` or ``OSError``, whatever zipfile, zlib, NumPy and Python's
parser raise at it; a refusal names the file, or what in it makes no graph.
"""

import io
import random
import struct
import warnings
import zipfile

import numpy as np
import pytest
from conftest import random_graph

import gas

MUTATIONS = 300  # Of each kind of archive.
MARKS = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x93NUMPY")
VALUES = (0, 1, 2, 3, 8, 9, 12, 14, 63, 99, 127, 128, 255)


def graph():
    """Return the arrays of a good graph."""
    data = random_graph(num_nodes=12, num_edges=30)
    return {
        "x": data.x.numpy(),
        "y": data.y.numpy() if "y" in data else np.arange(12) % 3,
        "edge_index": data.edge_index.numpy(),
        "edge_weight": np.ones(data.num_edges, np.float32),
        "train_mask": np.arange(12) % 3 == 0,
        "val_mask": np.arange(12) % 3 == 1,
        "test_mask": np.arange(12) % 3 == 2,
    }


def sparse():
    """Return the archive that SciPy writes of an identity of twelve rows."""
    return {
        "format": np.array(b"csr"),
        "shape": np.array([12, 12]),
        "data": np.ones(12, np.float32),
        "indices": np.arange(12, dtype=np.int32),
        "indptr": np.arange(13, dtype=np.int32),
    }


def packed(arrays, save=np.savez_compressed):
    stream = io.BytesIO()
    save(stream, **arrays)
    return stream.getvalue()


def mutated(content, rng):
    """One to four changes: bytes, fields, pieces."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content))
        kind = rng.randrange(8)
        if kind < 3:  # Near the beginning of a header, where each byte means something.
            mark = rng.choice(MARKS)
            places = [i for i in range(len(content)) if content.startswith(mark, i)]
            at = min((rng.choice(places) if places else 0) + rng.randrange(140), len(content) - 1)
            content[at] = rng.choice(VALUES) if kind else content[at] ^ (1 << rng.randrange(8))
        elif kind == 3:
            content[at] = rng.randrange(256)
        elif kind == 4:
            content[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1)))
        elif kind == 5:
            del content[at : at + rng.randrange(1, 40)]
        elif kind == 6:
            content[at:at] = content[at : at + rng.randrange(1, 40)]
        else:
            del content[at:]
        if not content:
            break
    return bytes(content)


def open_archive(folder, content):
    (folder / "graph.npz").write_bytes(content)
    return gas.open_graph(folder / "graph.npz", log=False)


def open_sparse(folder, content):
    (folder / "x.npz").write_bytes(content)
    if not (folder / "edge_index.npy").exists():
        np.save(folder / "edge_index.npy", np.stack([np.arange(12), np.arange(12)[::-1]]))
    return gas.open_graph(folder, log=False)


def attack(folder, opened, content, quoted):
    """Return whether a file is refused; an error without the file's name fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            opened(folder, content)
        except (ValueError, OSError) as error:
            said = str(error)
            assert ".npz" in said or any(f"'{key}'" in said for key in quoted), said
            return True
    return False


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("opened", "arrays"), [(open_archive, graph), (open_sparse, sparse)])
def test_mutations_open_or_are_refused(tmp_path, opened, arrays, save):
    rng = random.Random(0)
    good = packed(arrays(), save)
    opened(tmp_path, good)
    quoted = [*arrays(), "edge_index", "y"]
    refused = sum(attack(tmp_path, opened, mutated(good, rng), quoted) for _ in range(MUTATIONS))
    assert refused > MUTATIONS // 4


def header(said, body=b"", version=1):
    """Return an archive whose ``x`` has any header."""
    line = said.encode("latin1") + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(line))
    content = b"\x93NUMPY" + bytes([version, 0]) + size + line + body
    return entry(content)


def entry(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", content)
    return stream.getvalue()


def field(offset, value, width="<H", first=b"PK\x01\x02"):
    """Return a good archive with a field of an entry in the central directory that is another."""
    content = bytearray(packed(graph()))
    at = content.index(first) + offset
    content[at : at + struct.calcsize(width)] = struct.pack(width, value)
    return bytes(content)


X = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"
ATTACKS = {
    "version of zip": field(6, 99),
    "encrypted": field(8, 1),
    "patched data": field(8, 0x20),
    "strong encryption": field(8, 0x41),
    "packed by an unknown method": field(10, 99),
    "packed by LZMA, which it is not": field(10, 14),
    "offset beyond the end": field(42, 2**31, "<I"),
    "size too small for a header": field(24, 10, "<I"),
    "a name that isn't UTF-8": bytes(packed(graph()).replace(b"edge_index", b"edge\xff\xfendex")),
    "an unfinished token": header("{'descr': '''"),
    "an unknown token": header("{'descr': $"),
    "brackets without end": header("(" * 9000),
    "minus signs without end": header("-" * 9000 + "1"),
    "a number of many digits": header(X % f"({'9' * 5000},)"),
    "terabytes": header(X % f"({2**40}, 3)"),
    "a shape beyond any": header(X % f"({2**62}, {2**62})"),
    "a negative shape": header(X % "(-1, 3)"),
    "a shape of truth": header(X % "(True, 3)"),
    "a type that is none": header("{'descr': '<q9', 'fortran_order': False, 'shape': (1,), }"),
    "a type of types": header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,), }"),
    "objects": header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80\x04N."),
    "long floats": header("{'descr': '<f16', 'fortran_order': False, 'shape': (1,), }", bytes(16)),
    "a header cut off": entry(b"\x93NUMPY\x01\x00\xff\xff{"),
    "a beginning cut off": entry(b"\x93NUM"),
    "no array": entry(b"words"),
    "version 9": header(X % "(1, 3)", version=9),
    "an array alone": b"\x93NUMPY" + entry(b"")[:40],
    "a pickle": b"\x80\x04N.",
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("opened", [open_archive, open_sparse])
def test_attacks_are_refused(tmp_path, name, opened):
    assert attack(tmp_path, opened, ATTACKS[name], quoted=["x"])


@pytest.mark.parametrize(
    "name", [name for name in ATTACKS if ATTACKS[name].find(b"\x93NUMPY") == 35]
)
def test_attacks_on_an_array_alone(tmp_path, name):
    """The same headers in an ``.npy`` file."""
    with zipfile.ZipFile(io.BytesIO(ATTACKS[name])) as archive:
        content = archive.read("x.npy")
    (tmp_path / "x.npy").write_bytes(content)
    np.save(tmp_path / "edge_index.npy", np.zeros((2, 1), int))
    with pytest.raises(ValueError, match=r"x\.npy"):
        gas.open_graph(tmp_path, log=False)


@pytest.mark.parametrize(("method", "name"), [(12, "bzip2"), (14, "LZMA")])
def test_other_methods_are_refused_by_name(tmp_path, method, name):
    path = tmp_path / "g.npz"
    with zipfile.ZipFile(path, "w", method) as file:
        for key, array in {**graph(), "x": np.zeros((12, 9999), np.float32)}.items():
            stream = io.BytesIO()
            np.save(stream, array)
            file.writestr(f"{key}.npy", stream.getvalue())
    with pytest.raises(ValueError, match=f"packed by {name}.*numpy.savez_compressed"):
        gas.open_graph(path, log=False)
