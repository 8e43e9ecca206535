"""Stores of histories: every tier gives the same rows, and refuses what it can't do."""

import copy
import gc
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gas
from gas.history import Codec, DiskStore, MemoryStore, Store, TableStore, tiers

CODECS = ["float64", "float32", "bfloat16", "float16", "int8"]
TOLERANCE = {"float64": 1e-6, "float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 254}


class DictStore(Store):
    """A store of a user: rows in a dictionary."""

    def __init__(self, num_rows, columns, dtype):
        super().__init__(num_rows, columns, dtype)
        self.rows = {}

    def read(self, index, out):
        for i, row in enumerate(index.tolist()):
            out[i] = self.rows.get(row, torch.zeros(self.columns, dtype=self.dtype))

    def write(self, index, rows):
        self.rows.update(zip(index.tolist(), rows.clone(), strict=True))

    def clone(self):
        twin = DictStore(self.num_rows, self.columns, self.dtype)
        twin.rows = dict(self.rows)
        return twin


STORES = {
    "host": "host",
    "disk": "disk",
    "auto": "auto",
    "user": DictStore,
    "pinned": pytest.param("pinned", marks=pytest.mark.requires("cuda")),
    "device": pytest.param("device", marks=pytest.mark.requires("cuda")),
}
stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


def close(found, wanted, codec):
    error = (found.double() - wanted.double()).abs()
    scale = wanted.abs().amax(1, keepdim=True) if codec == "int8" else wanted.abs()
    return bool((error <= TOLERANCE[codec] * scale.double() * 1.001 + 1e-7).all())


@stores
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("io", ["serial", "concurrent"])
def test_every_store_and_codec(store, codec, io):
    engine = gas.history.TransferEngine(io)
    history = gas.History(50, 7, dtype=codec, store=store, engine=engine)
    expected = torch.randn(50, 7)
    history.push(expected)
    assert close(history.pull(), expected, codec)
    x, n_id = torch.randn(3, 7), torch.tensor([7, 0, 2])
    history.push(x, n_id)
    expected[n_id] = x
    x = torch.randn(5, 7)
    history.push(x, None, [48, 10, 10], [2, 0, 3])
    expected[48:], expected[10:13] = x[:2], x[2:]
    x.zero_()
    n_id = torch.tensor([49, 49, 0, 12, 33])
    assert close(history.pull(n_id), expected[n_id], codec)
    assert close(history.start_pull(n_id, 2).wait()[2:].float(), expected[n_id], codec)
    assert close(history.emb.cpu(), expected, codec)  # The table, wherever it is.
    assert history.pull(n_id[:0]).shape == (0, 7)
    assert history.pull().dtype == Codec(codec).value_dtype

    twin = copy.deepcopy(history)
    twin.push(torch.zeros(50, 7))
    assert close(history.pull(), expected, codec)
    assert not twin.pull().any()
    assert twin.store.tier == history.store.tier
    history.reset_parameters()
    assert not history.emb.any()
    assert not history.written.any()
    history.close()
    twin.close()
    engine.close()


@stores
def test_no_rows_and_no_columns(store):
    for shape in ((0, 4), (4, 0), (0, 0)):
        history = gas.History(*shape, store=store)
        history.push(torch.zeros(shape))
        assert history.pull().shape == shape


@pytest.mark.parametrize("width", [1, 3, 5, 17])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_any_size(width, codec):
    history = gas.History(9, width, dtype=codec)
    x = torch.randn(width, 9).t()  # Not contiguous.
    history.push(x)
    assert close(history.pull(torch.arange(9)[::2]), x[::2], codec)


def test_names_of_codecs():
    for name, same in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("int8", torch.int8)):
        assert Codec.of(name) == Codec.of(same) == Codec.of(Codec.of(name))
    assert [Codec.of(c).row_bytes(10) for c in CODECS] == [80, 40, 20, 20, 16]
    for bad in (torch.int64, "fp8", "complex64"):
        with pytest.raises(ValueError, match=f"'dtype' is {bad}, expected one of float64,"):
            gas.History(4, 4, dtype=bad)


def test_bad_stores():
    with pytest.raises(ValueError, match="'store' is 'cloud', expected one of device, pinned"):
        gas.History(4, 4, store="cloud")
    with pytest.raises(ValueError, match="'path' is for store='disk', not for store=None"):
        gas.ScalableGNN(4, 4, 2, path="somewhere")
    with pytest.raises(ValueError, match=r"'store' made DictStore\(4, 3, .* expected 4 rows of 4"):
        gas.History(4, 4, store=lambda n, columns, dtype: DictStore(n, columns - 1, dtype))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'store' is 'pinned', but there is no CUDA device"):
            gas.History(4, 4, store="pinned")


def test_stores_describe_themselves():
    assert repr(MemoryStore(4, 3, torch.float32)) == (
        "MemoryStore(4, 3, dtype=torch.float32, tier='host')"
    )
    assert str(gas.History(4, 3, store="disk", dtype="bf16")) == (
        "History(4, 3, dtype=bfloat16, store='disk')"
    )
    assert MemoryStore(4, 3, torch.float16).nbytes == 24


def test_a_table_larger_than_memory():
    with pytest.raises(MemoryError, match=r"do not fit memory, .* are free: use store='disk'"):
        gas.History(10**12, 64)
    with pytest.raises(MemoryError, match="do not fit memory"):
        gas.ScalableGNN(10**12, 64, 3)


def test_all_histories_must_fit_before_one_is_made(monkeypatch):
    monkeypatch.setattr("gas.history.store.free_memory", lambda device=None: 1000 * 64 * 4 * 2)
    gas.ScalableGNN(1000, 64, 3)
    made = []
    monkeypatch.setattr(MemoryStore, "__init__", lambda *args, **kwargs: made.append(1))
    with pytest.raises(MemoryError, match="histories of 750 KiB do not fit memory, 500 KiB"):
        gas.ScalableGNN(1000, 64, 4)
    assert not made


def test_all_histories_must_fit_the_disk_before_one_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr("gas.history.store.free_disk", lambda path: 60 * 8 * 4 + 100)
    with pytest.raises(OSError, match="histories of 3.75 KiB do not fit the disk, 1.973 KiB are"):
        gas.ScalableGNN(60, 8, 3, store="disk", path=tmp_path)
    assert not list(tmp_path.iterdir())
    gas.ScalableGNN(60, 8, 2, store="disk", path=tmp_path).close()
    gas.ScalableGNN(60, 8, 2, store="disk", path=tmp_path).close()  # What is there needs no room.


def test_a_history_that_cannot_be_made_closes_the_others(tmp_path):
    (tmp_path / "history_1").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not the file of a history"):
        gas.ScalableGNN(60, 8, 3, store="disk", path=tmp_path)
    (tmp_path / "history_1").unlink()
    gas.ScalableGNN(60, 8, 3, store="disk", path=tmp_path).close()  # The first isn't in use.


@pytest.mark.slow
def test_limits_of_the_process_count():
    program = """
import resource, gas
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    gas.History(16 << 20, 128)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "histories of 8 GiB do not fit memory" in done.stdout, done.stderr


def test_auto_picks_by_size(monkeypatch, capsys, tmp_path):
    free = 1000 * 8 * 4 * 2  # Of memory, which one history of 1000 x 8 would half fill.
    monkeypatch.setattr(tiers, "free_memory", lambda device=None: free)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = gas.ScalableGNN(1000, 8, 2, store="auto")
    assert model.histories[0].store.tier == "host"
    assert (
        "store='host', because 31.25 KiB fit memory, 62.5 KiB are free" in capsys.readouterr().err
    )
    model = gas.ScalableGNN(1000, 8, 3, store="auto", path=tmp_path / "kept")
    assert [h.store.tier for h in model.histories] == ["disk", "disk"]
    assert "store='disk', because 62.5 KiB are too much for memory" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == [
        "history_0", "history_0.age", "history_1", "history_1.age",
    ]  # fmt: skip
    monkeypatch.setattr(tiers, "free_disk", lambda path: 1000)
    with pytest.raises(MemoryError, match="fit neither memory, .* nor the disk, 1000 bytes free"):
        gas.ScalableGNN(1000, 8, 3, store="auto")


# Files --------------------------------------------------------------------------------------------


def test_a_file_is_resumed(tmp_path):
    path = tmp_path / "new" / "history"
    for codec in CODECS:
        x = torch.randn(20, 5)
        history = gas.History(20, 5, dtype=codec, store="disk", path=f"{path}.{codec}")
        assert not history.store.resumed
        history.push(x[:15], torch.arange(15))
        history.push(x[:5], torch.arange(5))
        age, rows = history.age, history.pull(torch.arange(15))
        history.store.flush()
        history.close()
        again = gas.History(20, 5, dtype=codec, store="disk", path=f"{path}.{codec}")
        assert again.store.resumed
        assert torch.equal(again.pull(torch.arange(15)), rows)
        assert torch.equal(again.age, age)
        assert int(again.written.sum()) == 15
        again.close()


def test_ages_of_rows_that_are_gone_are_forgotten(tmp_path):
    history = gas.History(20, 5, store="disk", path=tmp_path / "history")
    history.push(torch.ones(20, 5))
    history.close()
    (tmp_path / "history").unlink()
    history = gas.History(20, 5, dtype="int8", store="disk", path=tmp_path / "history")
    assert not history.written.any()
    with pytest.warns(UserWarning, match="20 of 20 rows are zeros"):
        history.pull()


def test_a_file_grows_with_its_ages(tmp_path):
    history = gas.History(4, 3, store="disk", path=tmp_path / "h")
    history.push(torch.ones(2, 3), torch.tensor([1, 3]))
    history.resize(6)
    history.push(torch.ones(1, 3), torch.tensor([5]))
    assert history.age.tolist() == [-1, 1, -1, 1, -1, 0]
    history.close()
    again = gas.History(6, 3, store="disk", path=tmp_path / "h")
    assert again.store.resumed
    assert again.age.tolist() == [-1, 1, -1, 1, -1, 0]
    again.close()


def test_tables_are_contiguous():
    with pytest.raises(ValueError, match="'table' is not contiguous"):
        TableStore(torch.zeros(4, 6)[:, :3])


def test_a_model_is_resumed(tmp_path, capsys):
    for resumed in (False, True):
        model = gas.ScalableGNN(6, [4, 2], 3, store="disk", path=tmp_path)
        said = "resuming with the rows in" in capsys.readouterr().err
        assert said == resumed
        assert [h.store.resumed for h in model.histories] == [resumed] * 2
        if resumed:
            assert (model.histories[1].emb == 2).all()
        model.histories[0].push(torch.full((6, 4), 1.0))
        model.histories[1].push(torch.full((6, 2), 2.0))
        model.close()
        for use in (lambda h: h.push(torch.zeros(6, 4)), lambda h: h.pull(), lambda h: h.emb):
            with pytest.raises(RuntimeError, match="this history has been closed"):
                use(model.histories[0])
        model.close()


def test_wrong_files_are_refused(tmp_path):
    path = tmp_path / "history"
    gas.History(20, 5, store="disk", path=path).close()
    for arguments, message in (
        ((21, 5), "its number of rows is 20, expected 21"),
        ((20, 6), "its content is float32 x 5, expected float32 x 6"),
        ((20, 5, None, "float16"), "its content is float32 x 5, expected float16 x 5"),
    ):
        with pytest.raises(ValueError, match=f"holds another history: {message}"):
            gas.History(*arguments, store="disk", path=path)
    with pytest.raises(ValueError, match="its content is float32 x 5, expected age"):
        DiskStore(20, 5, torch.float32, path, "age")

    ages = tmp_path / "history.age"
    content = ages.read_bytes()
    ages.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="was cut off") as refused:
        gas.History(20, 5, store="disk", path=path)
    ages.unlink()
    gas.History(20, 5, store="disk", path=path).close()  # Nothing has the other file open.
    assert refused.tb

    content = path.read_bytes()
    for size in (4096 + 400 - 1, 4096, 50):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="was cut off|is not the file of a history"):
            gas.History(20, 5, store="disk", path=path)
        assert path.stat().st_size == size
    path.write_bytes(b"something else" * 400)
    with pytest.raises(ValueError, match="is not the file of a history: it has no header"):
        gas.History(20, 5, store="disk", path=path)
    newer = bytearray(content)
    newer[8] = 9
    path.write_bytes(newer)
    with pytest.raises(ValueError, match="its version is 9, expected 1"):
        gas.History(20, 5, store="disk", path=path)
    path.write_bytes(content)
    gas.History(20, 5, store="disk", path=path).close()


def test_models_can_be_pickled_but_not_their_files():
    for store in ("host", "disk"):
        model = gas.ScalableGNN(6, 4, 2, store=store)
        model.histories[0].push(torch.ones(6, 4))
        if store == "disk":
            with pytest.raises(TypeError, match="a history on disk can't be pickled"):
                pickle.dumps(model)
            continue
        twin = pickle.loads(pickle.dumps(model))
        twin.histories[0].push(torch.zeros(6, 4))
        assert (model.histories[0].emb == 1).all()
        assert (twin.histories[0].pull() == 0).all()
        assert twin.histories[0].engine is twin._engine


def test_a_file_has_one_user(tmp_path):
    history = gas.History(4, 4, store="disk", path=tmp_path / "history")
    with pytest.raises(ValueError, match="is in use: two models can't share"):
        gas.History(4, 4, store="disk", path=tmp_path / "history")
    history.close()
    gas.History(4, 4, store="disk", path=tmp_path / "history").close()


def test_temporary_files_are_removed():
    store = DiskStore(4, 4, torch.float32)
    folder = store.path.parent
    assert folder.exists()
    store.close()
    assert not folder.exists()
    store = DiskStore(4, 4, torch.float32)
    folder = store.path.parent
    del store
    gc.collect()
    assert not folder.exists()


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="histories can't be stored here .*: choose a 'path'"):
        gas.History(4, 4, store="disk", path=tmp_path / "file" / "history")
    read_only = Path("/proc/self/history")
    if os.getuid() != 0:  # Nothing is read-only for root, but what the kernel makes.
        read_only = tmp_path / "read_only"
        read_only.mkdir()
        read_only.chmod(0o500)
        read_only = read_only / "history"
    with pytest.raises(OSError, match="histories can't be stored here"):
        gas.History(4, 4, store="disk", path=read_only)


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for the disk's: the same call refuses."""
    program = f"""
import resource, signal, gas
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    gas.History(10_000, 8, store="disk", path={str(tmp_path / "history")!r})
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "the disk has no room for a history of 324,096 bytes" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_store_of_a_user_may_refine_a_tier():
    class Counting(MemoryStore):
        reads = 0

        def read(self, index, out):
            Counting.reads += 1
            super().read(index, out)

    history = gas.History(5, 2, store=Counting)
    x = torch.randn(5, 2)
    history.push(x)
    assert torch.equal(history.pull(), x)
    assert Counting.reads == 1
    assert isinstance(history.store, TableStore)
    assert not history.store.direct


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_that_do_not_exist_are_not_read_from_a_store_of_a_user(row):
    """It may have something under that number, such as a list under -1."""

    class ListStore(Store):
        def __init__(self, *size):
            super().__init__(*size)
            self.rows = torch.ones(size[0] + 1, size[1])

        def read(self, index, out):
            out.copy_(self.rows[index])

        def write(self, index, rows):
            self.rows[index] = rows

    history = gas.History(5, 2, store=ListStore)
    history.push(torch.zeros(5, 2))
    with pytest.raises(IndexError, match=rf"'n_id' holds {row}, which is outside \[0, 5\)"):
        history.pull(torch.tensor([0, row]))


def test_a_store_may_be_refined_after_its_class_was_made():
    class Counting(MemoryStore):
        pass

    class Known:
        def __init_subclass__(cls, **options):
            super().__init_subclass__()
            cls.options = options

    class Named(MemoryStore, Known, name="mine"):
        direct = False

    reads = []
    Counting.read = lambda self, index, out: (reads.append(1), MemoryStore.read(self, index, out))
    history = gas.History(5, 2, store=Counting)
    history.push(torch.ones(5, 2))
    assert torch.equal(history.pull(), torch.ones(5, 2))
    assert reads == [1]
    assert Named.options == {"name": "mine"}
    assert not Named(5, 2, torch.float32).direct


def test_pulled_memory_is_used_again():
    history = gas.History(5000, 64)
    history.push(torch.randn(5000, 64))
    n_id = torch.arange(4000)
    first = history.pull(n_id)
    address, kept = first.data_ptr(), first[1:2]
    del first
    second = history.pull(n_id)
    assert second.data_ptr() != address  # There is still a reference to it.
    del kept
    assert history.pull(n_id).data_ptr() == address


def test_address_space_of_this_test_is_unlimited():
    """Else the tests above would look at that limit, and not at what they should."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_what_a_killed_process_left_is_made_anew(tmp_path, monkeypatch):
    """A file gets its name once it is complete; before, no directory lists it."""
    path = tmp_path / "history"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", killed)
        with pytest.raises(KeyboardInterrupt):
            gas.History(5, 3, store="disk", path=path)
    assert not path.exists()
    assert (tmp_path / ".history.new").stat().st_size > 0
    history = gas.History(6, 4, store="disk", path=path)  # Of another size, even.
    assert not history.written.any()
    assert not (history.emb != 0).any()
    history.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["history", "history.age"]


@pytest.mark.parametrize("device", [None, "cpu", "cuda:1", "meta"])
def test_the_device_of_a_table(device):
    expected = "cuda" if device in (None, "cpu") else device
    assert tiers.table_device(device) == torch.device(expected)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ((None, 0, 4), "'offset' is 0 and 'count' 4, expected lists"),
        ((None, torch.tensor([[0]]), torch.tensor([[4]])), r"'offset' is \[\[0\]\]"),
        ((None, [None], [4]), r"'offset' is \[None\]"),
        ((None, [0.0], [4]), r"'offset' is \[0.0\]"),
        (([0, 1, 2, 3], [0], [4]), "'n_id' is .*expected a one-dimensional int64"),
        ((torch.arange(4, dtype=torch.int32), [0], [4]), "'n_id' is torch.int32"),
    ],
)
def test_rows_of_unusable_types_are_refused(where, error):
    history = gas.History(20, 4)
    with pytest.raises(ValueError, match=error):
        history.push(torch.ones(4, 4), *where)
    assert history.num_pushes == 0
    history.push(torch.ones(4, 4), None, np.array([3]), (4,))
    assert history.emb.sum() == 16


def test_a_path_that_is_none():
    with pytest.raises(ValueError, match="'path' is 5, expected the path of a file"):
        gas.History(3, 4, store="disk", path=5)
