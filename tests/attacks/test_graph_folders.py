"""Graph folders that want to crash, to allocate, or to be read elsewhere: each is refused.

Each attack is made on a good folder. What is refused is named: the file, what was found, and what
was expected. Nothing is allocated of what a folder promises.
"""

import contextlib
import json
import os
import resource
import struct

import numpy as np
import pytest
import torch
from conftest import random_graph

import gas
from gas.graph import open_folder, open_if_path
from gas.native.memory import free_memory

TERA = 2**40
MOST_MORE = 64 << 20  # Bytes that a refusal may take.


@pytest.fixture
def folder(tmp_path):
    """A good one: weights, encoded and sparse features, text, lists."""
    torch.manual_seed(0)
    data = random_graph()
    data.x = gas.quantize(data.x, "int8")
    data.edge_weight = torch.rand(data.num_edges)
    data.words = torch.eye(60).to_sparse_csr()
    data.node_id = np.array([f"n{i}" for i in range(60)])
    data.classes = ["a", "b"]
    gas.cluster(data, 6, log=False, out=tmp_path / "graph")
    return tmp_path / "graph"


def said(folder):
    return json.loads((folder / "graph.json").read_text())


def says(folder, **changes):
    """Change what ``graph.json`` says: ``arrays.x.file`` is written ``arrays__x__file``."""
    content = said(folder)
    for key, value in changes.items():
        *where, last = key.split("__")
        at = content
        for name in where:
            at = at[name]
        at[last] = value(at.get(last)) if callable(value) else value
    (folder / "graph.json").write_text(json.dumps(content))


def text(content):
    return lambda folder: (folder / "graph.json").write_bytes(content)


def changed(**changes):
    return lambda folder: says(folder, **changes)


def without(*keys):
    def attack(folder):
        content = said(folder)
        at = content
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]
        (folder / "graph.json").write_text(json.dumps(content))

    return attack


def array(name, change):
    """Change what a file holds, not what it says it is."""

    def attack(folder):
        values = np.load(folder / name)
        change(values)
        np.save(folder / name, values)

    return attack


def replaced(name, values):
    return lambda folder: np.save(folder / name, values)


def raw(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def header(name, said, version=b"\x01\x00", more=b"", length=None):
    """Return a file with any header."""

    def attack(folder):
        line = said.encode("latin1").ljust(117) + b"\n"
        width = "<H" if version[0] == 1 else "<I"
        size = struct.pack(width, len(line) if length is None else length)
        (folder / name).write_bytes(b"\x93NUMPY" + version + size + line + more)

    return attack


def promises_terabytes(folder):
    """Both the description and the header do."""
    says(folder, arrays__y__shape=[60, TERA])
    line = f"{{'descr': '<i8', 'fortran_order': False, 'shape': (60, {TERA}), }}"
    header("y.npy", line)(folder)


def cut_off(name, left):
    return lambda folder: os.truncate(folder / name, left)


def longer(name):
    def attack(folder):
        with (folder / name).open("ab") as stream:
            stream.write(b"\0" * 8)

    return attack


def link(name, target=None):
    """Return a file that is a link to a good one outside."""

    def attack(folder):
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside if target is None else target)

    return attack


def is_folder(name):
    def attack(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return attack


def is_pipe(name):
    """Reading a pipe without a writer would wait for ever."""

    def attack(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return attack


def set_item(at, value):
    return lambda values: values.__setitem__(at, value)


Y = "{'descr': '<i8', 'fortran_order': False, 'shape': (60,), }"
DEEP = b"[" * 100_000
ATTACKS = {
    # The description.
    "no JSON": (text(b"\x80\x04."), "its text is .* can't decode"),
    "nothing at all": (text(b""), "its text is Expecting value"),
    "brackets without end": (text(DEEP), "its text is .*recursion|its text is .*"),
    "a list": (text(b"[]"), "it is \\[\\], expected an object"),
    "a name twice": (
        text(b'{"version": 1, "format": "gas graph", "format": "x"}'), "its text is 'format' twice"
    ),
    "no number": (text(b'{"format": NaN}'), "its text is NaN, which is no number"),
    "a number of digits": (text(b'{"format": ' + b"9" * 5000 + b"}"), "its text is .*limit"),
    "another format": (changed(format="pickle"), "'format' is pickle, expected 'gas graph'"),
    "another version": (changed(version=2), "'version' is 2, expected 1"),
    "a version that is true": (changed(version=True), "'version' is True, expected 1"),
    "no version": (without("version"), "it is without 'version'"),
    "something else": (changed(code="import os"), "it is with 'code', expected only format"),
    "no arrays": (changed(arrays=[]), "'arrays' is \\[\\], expected an object"),
    "no rows": (without("arrays", "rowptr"), "'arrays' is without 'rowptr'"),
    "no columns": (without("arrays", "col"), "'arrays' is without 'col'"),
    "attributes in a list": (changed(attributes=["x"]), "'attributes' is \\['x'\\], expected"),
    "an attribute of Python's": (
        lambda folder: says(folder, attributes={"__class__": 1}), "a name in 'attributes' is '__cla"
    ),
    "an attribute of the storage": (
        changed(attributes___mapping={}), "a name in 'attributes' is '_mapping', expected letters"
    ),
    "an attribute that opening sets": (
        changed(attributes__num_nodes=TERA), "a name in 'attributes' is 'num_nodes', expected"
    ),
    "an array that opening sets": (
        changed(arrays__edge_index={}), "a name in 'arrays' is 'edge_index', expected letters"
    ),
    "an attribute that is an array, too": (
        changed(attributes__x=1), "'attributes.x' is there, expected one that 'arrays' doesn't have"
    ),
    # Numbers.
    "negative nodes": (changed(num_nodes=-1), "'num_nodes' is -1, expected a whole number"),
    "too many nodes": (changed(num_nodes=2**63), "'num_nodes' is 9223372036854775808, expected"),
    "nodes that are true": (changed(num_nodes=True), "'num_nodes' is True, expected a whole"),
    "half an edge": (changed(num_edges=0.5), "'num_edges' is 0.5, expected a whole number"),
    "edges in words": (changed(num_edges="240"), "'num_edges' is 240, expected a whole number"),
    "more nodes than rows": (changed(num_nodes=TERA), "'rowptr' is int32 of shape \\[61\\], expec"),
    "more edges than columns": (changed(num_edges=TERA), "'col' is int32 of shape \\[240\\], expe"),
    "a negative length": (
        changed(arrays__y__shape=[-60]), "a length in 'arrays.y'.shape is -60, expected a whole"
    ),
    "a length that is true": (
        changed(arrays__y__shape=[True]), "a length in 'arrays.y'.shape is True, expected"
    ),
    "a shape that is none": (changed(arrays__y__shape=60), "'arrays.y'.shape is 60, expected a li"),
    "a thousand dimensions": (
        changed(arrays__y__shape=[1] * 1000), "'arrays.y'.shape is .*, expected a list of at most"
    ),
    # Files that aren't in the folder.
    "an absolute path": (
        changed(arrays__y__file="/etc/passwd"), "'arrays.y'.file is /etc/passwd, expected the name"
    ),
    "the folder above": (changed(arrays__y__file="../y.npy"), "'arrays.y'.file is ../y.npy, exp"),
    "two dots": (changed(arrays__y__file=".."), "'arrays.y'.file is .., expected the name"),
    "another system's path": (changed(arrays__y__file="..\\y.npy"), "'arrays.y'.file is .*, exp"),
    "a drive": (changed(arrays__y__file="C:y.npy"), "'arrays.y'.file is C:y.npy, expected"),
    "the end of a string": (changed(arrays__y__file="y\0.npy"), "'arrays.y'.file is .*, expected"),
    "a line's end": (changed(arrays__y__file="y.npy\n"), "'arrays.y'.file is y.npy\\n, expected"),
    "a hidden file": (changed(arrays__y__file=".y.npy"), "'arrays.y'.file is .y.npy, expected"),
    "no name": (changed(arrays__y__file=7), "'arrays.y'.file is 7, expected the name"),
    "an endless name": (changed(arrays__y__file="y" * 9999 + ".npy"), "'arrays.y'.file is y.*, ex"),
    "a file that isn't there": (changed(arrays__y__file="z.npy"), "z.npy: it is not readable"),
    "a link out": (link("y.npy"), "y.npy: it is a link to .*outside, expected a file in the folde"),
    "a link to a device": (link("y.npy", "/dev/zero"), "y.npy: it is a link to /dev/zero"),
    "a link to itself": (link("y.npy", "y.npy"), "y.npy: it is (a link to|not readable)"),
    "a description elsewhere": (link("graph.json"), "graph.json: it is a link to .*outside"),
    "a folder": (is_folder("y.npy"), "y.npy: it is no file, expected an .npy file"),
    "a pipe": (is_pipe("y.npy"), "y.npy: it is no file, expected an .npy file"),
    # Overlaps.
    "two arrays in one file": (
        changed(arrays__y__file="perm.npy"), "the file of 'perm' is perm.npy, expected another than"
    ),
    "in one but for capitals": (
        changed(arrays__y__file="PERM.npy"), "the file of 'perm' is perm.npy, expected another than"
    ),
    "a part of a matrix in another": (
        changed(arrays__words__col__file="col.npy"), "the file of .* is col.npy, expected another"
    ),
    # Types.
    "objects": (changed(arrays__y__dtype="object"), "'arrays.y'.dtype is object, expected one of"),
    "a structure": (changed(arrays__y__dtype=["a"]), "'arrays.y'.dtype is \\['a'\\], expected one"),
    "another byte order": (changed(arrays__y__dtype=">i8"), "'arrays.y'.dtype is >i8, expected"),
    "text as a tensor": (
        changed(arrays__node_id__numpy=False), "'arrays.node_id'.numpy is False, expected true"
    ),
    "words of gigabytes": (
        changed(arrays__node_id__dtype="<U9999999999"), "'arrays.node_id'.dtype is <U9999999999"
    ),
    "an array that is neither": (
        changed(arrays__y__numpy="yes"), "'arrays.y'.numpy is yes, expected true for an array"
    ),
    "columns that are fractions": (
        changed(arrays__col__dtype="float32"), "'col' is float32 of shape .*, expected a tensor of "
    ),
    "columns of another type": (
        changed(arrays__col__dtype="int64"), "'col' is int64 of shape .*, expected a tensor of int3"
    ),
    "columns that are encoded": (
        changed(arrays__col={"codec": "csr"}), "'arrays.col' is without 'shape', expected an object"
    ),
    "columns that are a matrix": (
        lambda folder: says(
            folder,
            arrays__col=said(folder)["arrays"]["words"],
            arrays__words=said(folder)["arrays"]["col"],
        ),
        "'col' is of shape \\[60, 60\\], expected a tensor of int32",
    ),
    "weights that are complex": (
        changed(arrays__edge_weight__dtype="complex64"), "'edge_weight' is complex64 of shape"
    ),
    "parts that are small": (changed(arrays__parts__dtype="int32"), "'parts' is int32 of shape"),
    "a permutation of others": (changed(arrays__perm__shape=[59]), "'perm' is int64 of shape \\[5"),
    "no part": (changed(arrays__parts__shape=[1]), "'parts' is int64 of shape \\[1\\], expected"),
    "labels of others": (changed(arrays__y__shape=[61]), "'y' is of shape \\[61\\], expected 60 r"),
    # Codecs.
    "an unknown codec": (changed(arrays__x__codec="zip"), "'arrays.x'.codec is zip, expected one "),
    "a codec that is a list": (changed(arrays__x__codec=["int8"]), "'arrays.x'.codec is \\['int8"),
    "another codec": (changed(arrays__x__codec="float16"), "'arrays.x' is uint8 of shape .*, expe"),
    "wider rows": (changed(arrays__x__width=TERA), "'arrays.x' is uint8 of shape .*, expected uin"),
    "a negative width": (changed(arrays__x__width=-1), "'arrays.x'.width is -1, expected a whole"),
    "no width": (without("arrays", "x", "width"), "'arrays.x'.width is None, expected a whole"),
    "a width of nothing": (changed(arrays__y__width=3), "'arrays.y'.width is 3, expected none"),
    "a field more": (changed(arrays__y__offset=128), "'arrays.y' is with 'offset', expected only "),
    "a matrix without columns": (
        changed(arrays__words__shape=[60]), "'arrays.words'.shape is \\[60\\], expected \\[rows"
    ),
    "a matrix of three dimensions": (
        changed(arrays__words__shape=[60, 60, 1]), "'arrays.words'.shape is .*, expected .rows, col"
    ),
    "a matrix of more rows": (
        changed(arrays__words__shape=[TERA, 60]), "'arrays.words'.rowptr is int64 of shape \\[61\\]"
    ),
    "a matrix of text": (
        changed(arrays__words__value__dtype="int8"), "'arrays.words'.value is int8 of shape \\[60"
    ),
    "fewer values than columns": (
        changed(arrays__words__value__shape=[59]), "'arrays.words'.value is float32 of shape \\[59"
    ),
    # Headers and lengths.
    "terabytes in the description": (
        changed(arrays__node_id__shape=[TERA]), "node_id.npy: its header is <U3 of shape \\[60\\]"
    ),
    "terabytes in the header": (
        header("y.npy", Y.replace("60", str(TERA))), "y.npy: its header is int64 of shape \\[1099"
    ),
    "terabytes in both": (promises_terabytes, "y.npy: its size is 128 bytes, expected 527,765"),
    "more than there is in the world": (
        changed(arrays__y__shape=[60, 2**62, 2**62]), "y.npy: its header is int64 of shape \\[60\\]"
    ),
    "a header of gigabytes": (
        header("y.npy", Y, b"\x02\x00", length=2**32 - 1), "length of its header is 4294967295, exp"
    ),
    "a header longer than its file": (header("y.npy", Y, length=60_006), "y.npy: its header is un"),
    "a header that is a program": (
        header("y.npy", "__import__('os').abort()"), "y.npy: its header is unreadable \\(ValueErr"
    ),
    "a header of brackets": (header("y.npy", "(" * 8997), "y.npy: its header is unreadable"),
    "a header of objects": (header("y.npy", Y.replace("<i8", "|O")), "y.npy: its header is object"),
    "a header of structures": (
        header("y.npy", Y.replace("'<i8'", "[('a', '<i8')]")), "y.npy: its header is \\[\\('a'"
    ),
    "a header of another order": (header("y.npy", Y.replace("<", ">")), "y.npy: its header is >i8"),
    "a header of letters": (header("y.npy", Y.replace("60", "'60'")), "its header is unreadable"),
    "a negative header": (header("y.npy", Y.replace("60", "-60")), "y.npy: its header is int64 of"),
    "a header in Fortran's order": (
        lambda folder: np.save(folder / "train.npy", np.asfortranarray(np.ones((60, 2))))
        or says(
            folder, arrays__y=dict(file="train.npy", dtype="float64", shape=[60, 2])
        ),
        "train.npy: its header is in Fortran's order, expected C's order",
    ),
    "elements between addresses": (
        header("y.npy", Y, length=115, more=b"\0" * 477), "length of its header is 115, expected"
    ),
    "another array": (replaced("y.npy", np.zeros(60)), "y.npy: its header is float64 of shape"),
    "a later version": (header("y.npy", Y, b"\x09\x00"), "y.npy: its beginning is .*, expected th"),
    "no header": (raw("y.npy", b"PK\x03\x04" * 200), "y.npy: its beginning is .*, expected the he"),
    "an empty file": (raw("y.npy", b""), "y.npy: its beginning is b'', expected the header"),
    "a file cut off in its header": (cut_off("y.npy", 40), "y.npy: its header is unreadable"),
    "a file cut off": (cut_off("y.npy", 600), "y.npy: its size is 600 bytes, expected 608"),
    "a longer file": (longer("y.npy"), "y.npy: its size is 616 bytes, expected 608"),
    # What arrays hold.
    "rows that fall": (array("rowptr.npy", set_item(30, 0)), "'rowptr' is from 0 to 240, expected"),
    "rows from elsewhere": (array("rowptr.npy", set_item(0, 1)), "'rowptr' is from 1 to 240, exp"),
    "rows below 0": (array("rowptr.npy", set_item(0, -5)), "'rowptr' is from -5 to 240, expected"),
    "rows beyond the edges": (array("rowptr.npy", set_item(-1, 241)), "'rowptr' is from 0 to 241"),
    "parts that fall": (array("parts.npy", set_item(3, 0)), "'parts' is from 0 to 60, expected nu"),
    "parts beyond the nodes": (array("parts.npy", set_item(-1, 61)), "'parts' is from 0 to 61"),
    "a column too many": (array("col.npy", set_item(7, 60)), "'col' is 60 at 7, expected ids in"),
    "a negative column": (array("col.npy", set_item(7, -1)), "'col' is -1 at 7, expected ids in"),
    "a node twice": (array("perm.npy", set_item(3, 0)), "'perm' is without .*, expected every row"),
    "a node that isn't there": (array("perm.npy", set_item(3, 60)), "'perm' is 60 at 3, expected"),
    "sparse rows that fall": (
        array("words.rowptr.npy", set_item(30, 0)), "'words.rowptr' is from 0 to 60, expected"
    ),
    "a word that isn't there": (
        array("words.col.npy", set_item(0, 99)), "'words.col' is 99 at 0, expected ids in"
    ),
}  # fmt: skip


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused(name, folder):
    attack, words = ATTACKS[name]
    open_folder(folder)
    attack(folder)
    before = resident()
    with pytest.raises(ValueError, match=words) as refusal:
        gas.open_graph(folder, log=False)
    assert resident() - before < MOST_MORE
    assert str(refusal.value).startswith(str(folder))
    assert len(str(refusal.value)) < 1000
    with pytest.raises(ValueError, match=words):
        open_if_path(folder)


def test_nothing_is_allocated(folder):
    """Even where the file is as long as it says: a hole of a terabyte takes no room."""
    promises_terabytes(folder)
    with contextlib.suppress(OSError):  # Some systems have no such holes.
        os.truncate(folder / "y.npy", 128 + 60 * 2**33 * 8)
    says(folder, arrays__y__shape=[60, 2**33])
    line = f"{{'descr': '<i8', 'fortran_order': False, 'shape': (60, {2**33}), }}"
    with (folder / "y.npy").open("r+b") as stream:
        stream.write(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + line.encode().ljust(117) + b"\n"
        )
    before, free = resident(), free_memory()
    if (folder / "y.npy").stat().st_size > TERA:
        assert open_folder(folder).y.shape == (60, 2**33)
    assert resident() - before < MOST_MORE
    assert free_memory() > free / 2


def test_a_loader_looks_at_what_it_reads(folder):
    """A loader checks arrays that opening the folder doesn't read."""
    array("col.npy", set_item(7, 60))(folder)
    data = gas.open_graph(folder, check=False, log=False)
    with pytest.raises(ValueError, match="'adj_t' holds the node id 60"):
        gas.SubgraphLoader(data, log=False)


def hostile_mark(files):
    return {"format": "unfinished gas graph", "by": "gas.cluster", "files": files}


@pytest.mark.parametrize(
    "mark",
    [
        [],
        {},
        hostile_mark("x.npy"),
        hostile_mark([7]),
        *(
            hostile_mark([name])
            for name in ("../mine.npy", "/mine.npy", "..", "", "a/b.npy", "mine.txt", ".npy")
        ),
        {**hostile_mark([]), "by": "somebody"},
    ],
)
def test_a_hostile_mark_removes_nothing(mark, tmp_path):
    (tmp_path / "mine.npy").write_text("mine")
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "unfinished.json").write_text(json.dumps(mark))
    with pytest.raises(ValueError, match="left unfinished, not gas.cluster: name another folder"):
        gas.cluster(random_graph(), 2, log=False, out=tmp_path / "graph")
    assert (tmp_path / "mine.npy").read_text() == "mine"
    assert (tmp_path / "graph" / "unfinished.json").exists()
