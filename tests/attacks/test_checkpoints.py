"""Hostile checkpoints and files of histories: refused with the reason, or harmless; never a crash.

What is mutated under a fixed seed is 100,000 files in all: files of tensors, manifests whose
checksum is right again, and files of histories.
"""

import copy
import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch

import gas
from gas.checkpoint import CheckpointError
from gas.checkpoint.tensors import TensorFile, write_tensors
from gas.history.disk import HEADER_BYTES, DiskStore

TENSORS, MANIFESTS, HISTORIES = 40_000, 400, 10_000
HUGE = 2**50


def model_of(number=1.0):
    model = gas.models.GraphSAGE(6, 3, 2, 2, num_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    model.histories[0].push(torch.full((6, 2), number))
    return model


@pytest.fixture
def saved(tmp_path):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(6, 3), torch.eye(6).to_sparse_csr()).sum().backward()
    optimizer.step()
    path = gas.save(tmp_path / "checkpoints", model, optimizer, number=3, best=[0.5, float("nan")])
    model.histories[0].push(torch.zeros(1, 2), torch.tensor([4]))
    return gas.save(path.parent, model, optimizer, number=4, best=[0.5, float("nan")])


@pytest.fixture
def memory():
    """No more than this may be allocated at once: what a header promises is more."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def rewrite(path, content):
    """Write a manifest whose checksum is right."""
    text = json.dumps(content, separators=(",", ":"))
    whole = {"crc32": zlib.crc32(text.encode()), "content": content}
    (path / "manifest.json").write_text(json.dumps(whole, separators=(",", ":")))


def sign(path, content):
    """Note sizes and checksums of the files as they are."""
    for name in content["files"]:
        data = (path / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    rewrite(path, content)


def content_of(path):
    return json.loads((path / "manifest.json").read_text())["content"]


def refuses(path, match=""):
    """Return whether loading is refused, with nothing changed."""
    model = model_of(9.0)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=match):
        gas.load(path, model, optimizer)
    assert all(bool((p == 9).all()) for p in model.parameters())
    assert bool((model.histories[0].emb == 9).all())


# Manifests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x"])
def test_names_that_leave_the_folder(saved, name):
    content = content_of(saved)
    content["files"][name] = {"bytes": 1, "crc32": 0}
    rewrite(saved, content)
    refuses(saved, "no file of a checkpoint")


def test_links_that_leave_the_folder(saved, tmp_path):
    file = saved / "model.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refuses(saved, "no file of a checkpoint")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version 2, and this gas reads version 1"),
        ({"version": "1"}, "version '1'"),
        ({"format": "pickle"}, "doesn't say that it is one"),
        ({"files": None}, "names no files"),
        ({"files": {}}, "names no file model.safetensors"),
        ({"histories": []}, "has no 'histories'"),
        ({"state": {"a": {"$dict": [1]}}}, "pairs"),
        ({"optimizer": {"state": {}, "param_groups": [3]}}, "damaged"),
        ({"random": {}}, "random numbers"),
        ({"random": {"torch": {"$tensor": "no such"}}}, "missing"),
    ],
)
def test_manifests(saved, change, match):
    rewrite(saved, {**content_of(saved), **change})
    refuses(saved, match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"content": {}, "content": {}}', "twice"),
        (b'{"crc32": NaN, "content": {"format": "gas checkpoint"}}', "NaN"),
        (b"\xff\xfe", "JSON"),
        (b"1" * 10_000, "JSON|doesn't say"),
    ],
)
def test_texts(saved, text, match):
    (saved / "manifest.json").write_bytes(text)
    refuses(saved, match)


def test_histories_of_another_shape(saved, memory):
    first = content_of(saved)
    for change, match in (
        ({"num_rows": HUGE}, f"num_rows {HUGE}|with num_rows 6"),
        ({"pushes": -1}, "how 'history_0' was written"),
        ({"pushes": HUGE}, "how 'history_0' was written"),
        ({"pushes": 1}, "written by push"),
        ({"files": ["model.safetensors"]}, "how 'history_0' was written"),
        ({"files": ["../../x"]}, "how 'history_0' was written"),
        ({"codec": "int8"}, "codec"),
    ):
        content = copy.deepcopy(first)
        content["histories"]["history_0"].update(change)
        rewrite(saved, content)
        refuses(saved, match)


@pytest.mark.parametrize(
    ("index", "ages", "match"),
    [
        ([-1], None, "rows that don't exist"),
        ([6], None, "rows that don't exist"),
        ([4, 4], None, "a row twice"),
        ([HUGE], None, "rows that don't exist"),
        ([4], [0, 0, 0, 0, 0, -5], "before 0"),
        ([4], [0, 0, 0, 0, 0, 2**31 - 1], "before 0"),
        ([4], [float("nan")] * 6, "expected torch.int32"),
    ],
)
def test_rows_of_histories(saved, index, ages, match):
    """Overlaps, rows outside, ages that can't be."""
    file = saved / "history_0_changes.safetensors"
    tensors = {
        "index": torch.tensor(index),
        "rows": torch.zeros(len(index), 2),
        "written_at": torch.zeros(6, dtype=torch.int32) if ages is None else torch.tensor(ages),
    }
    if ages is not None and ages[0] == 0:
        tensors["written_at"] = tensors["written_at"].int()
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {})
    sign(saved, content_of(saved))
    refuses(saved, match)


def hostile(draw, value):
    """Return a value in place of another."""
    other = [None, True, -1, HUGE, 1e308, "", "../x", [], {}, [[]], {"$tensor": 3}, {"$dict": 1}]
    kinds = [lambda: draw.choice(other), lambda: [value], lambda: {"$tuple": [value]}]
    if isinstance(value, int):
        kinds += [lambda: value + draw.choice((-1, 1)), lambda: -value, lambda: float(value)]
    return draw.choice(kinds)()


def mutate_json(draw, value):
    """Change one thing somewhere in a value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate_json(draw, value[key])}
    if isinstance(value, list) and value and len(value) < 100 and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], mutate_json(draw, value[at]), *value[at + 1 :]]
    return hostile(draw, value)


@pytest.mark.slow
def test_mutated_manifests(saved, memory):
    draw = random.Random(1)
    content = content_of(saved)
    python = content.pop("random")["python"]  # 625 numbers, which would get all mutations.
    assert python
    model = model_of(9.0)
    optimizer = torch.optim.Adam(model.parameters())
    refused = 0
    for _ in range(MANIFESTS):
        key = draw.choice(list(content))
        rewrite(saved, {**content, key: mutate_json(draw, content[key]), "random": None})
        try:
            gas.load(saved, model, optimizer, random_state=False)
        except ValueError as error:
            refused += bool(str(error))
    assert refused > 0.4 * MANIFESTS


# Files of tensors ---------------------------------------------------------------------------------


def tensor_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"a": entry([HUGE], 0, 4 * HUGE)}, b"", None),  # Terabytes.
        ({"a": entry([2**40, 2**40], 0, 4)}, b"1234", None),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234", None),  # Overlaps.
        ({"a": entry([1], 4, 8)}, b"12345678", None),  # A hole.
        ({"a": entry([1], 0, 4)}, b"123", None),
        ({"a": entry([1], 0, 4)}, b"12345", None),
        ({"a": entry([-1], 0, 4)}, b"1234", None),
        ({"a": entry([1.0], 0, 4)}, b"1234", None),
        ({"a": entry([True], 0, 4)}, b"1234", None),
        ({"a": entry([1], 0, 4, "F99")}, b"1234", None),
        ({"a": entry([1], 0, 4, ["F32"])}, b"1234", None),
        ({"a": entry([1], 4, 0)}, b"1234", None),
        ({"a": entry([1], 0, 10**400)}, b"1234", None),
        ({"a": 3}, b"", None),
        ({"__metadata__": 3}, b"", None),
        ({"__metadata__": {"a": 3}}, b"", None),
        ([], b"", None),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"1234", None),
        (b"{}", b"", 2**63),
        (b"{}", b"", 3),
        (b"", b"", 0),
        (b"[" * 1000, b"", None),
    ],
)
def test_headers(tmp_path, memory, header, data, length):
    tensor_file(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match="damaged"):
        TensorFile(tmp_path / "a.safetensors")


def mutate(draw, data):
    """Change a few bytes, cut, or repeat some."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        kind, at = draw.random(), draw.randrange(len(data) + 1)
        if kind < 0.6 and data:
            data[at % len(data)] = draw.choice((0, 255, draw.randrange(256), ord("9"), ord('"')))
        elif kind < 0.75:
            del data[at : at + draw.randint(1, 9)]
        elif kind < 0.9:
            data[at:at] = data[at // 2 : at // 2 + draw.randint(1, 9)]
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.slow
def test_mutated_tensors(tmp_path, memory):
    draw = random.Random(0)
    file = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.int8)}
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {"format": "pt"})
    data = file.read_bytes()
    refused = 0
    for _ in range(TENSORS):
        file.write_bytes(mutate(draw, data))
        try:
            found = TensorFile(file)
            read = {name: found.read(name) for name in found}
        except CheckpointError:
            refused += 1
        else:
            assert sum(tensor.nbytes for tensor in read.values()) <= file.stat().st_size
    assert refused > 0.5 * TENSORS


# Files of histories -------------------------------------------------------------------------------


@pytest.mark.slow
def test_mutated_histories(tmp_path, memory):
    draw = random.Random(2)
    path = tmp_path / "history"
    store = DiskStore(4, 2, torch.float32, path)
    store.table.fill_(1.0)
    store.close()
    data = path.read_bytes()
    refused = 0
    for _ in range(HISTORIES):
        head = mutate(draw, data[:64])
        whole = head.ljust(HEADER_BYTES, b"\0") + data[HEADER_BYTES:]
        path.write_bytes(whole[: draw.randrange(1, len(whole))] if draw.random() < 0.1 else whole)
        try:
            found = DiskStore(4, 2, torch.float32, path)
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            assert found.table.shape == (4, 2)
            found.close()
    assert refused > 0.5 * HISTORIES


def test_a_history_that_promises_terabytes(tmp_path, memory):
    path = tmp_path / "history"
    head = struct.pack("<8sIQQI32s", b"gas-hist", 1, HUGE, 64, 4, b"float32 x 64")
    path.write_bytes(head.ljust(HEADER_BYTES, b"\0"))
    with pytest.raises(ValueError, match="number of rows is"):
        gas.History(10, 64, store="disk", path=path)


def test_ages_that_cannot_be(tmp_path):
    path = tmp_path / "history"
    history = gas.History(4, 2, store="disk", path=path)
    history.push(torch.ones(4, 2))
    history.close()
    age = Path(f"{path}.age")
    data = bytearray(age.read_bytes())
    data[HEADER_BYTES : HEADER_BYTES + 4] = (-7).to_bytes(4, "little", signed=True)
    age.write_bytes(data)
    with pytest.raises(ValueError, match="holds ages that can't be"):
        gas.History(4, 2, store="disk", path=path)
    age.unlink()
    gas.History(4, 2, store="disk", path=path).close()
