"""The table of measured costs: what it says, when it is asked, and what follows from it."""

import json

import pytest
import torch

from gas.native import costs, measure_costs, sparse
from gas.native import device as moves
from gas.native.matrix import Matrix, transpose

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setenv("GAS_CACHE_DIR", str(tmp_path / "cache"))
    costs._is_torch_faster.cache_clear()
    yield tmp_path / "cache"
    costs._is_torch_faster.cache_clear()


def clock(seconds):
    """Measure by a table: the seconds of PyTorch's way, by operation; ours take one."""

    def timer(call):
        call()
        name = call.func.__name__
        return seconds(name) if costs._forced == "torch" else 1.0

    return timer


def measured(seconds):
    return measure_costs.measure(CPU, num_bytes=1 << 14, timer=clock(seconds))


def test_nobody_has_measured(folder):
    assert not costs._prefers_torch("gather", 64, CPU)
    assert not folder.exists()


def test_the_faster_way_is_taken(folder):
    found = measured(lambda name: {"gather_rows": 0.5, "scatter_rows": 0.97}.get(name, 2.0))
    assert set(found) == {"gather", "scatter", "sum", "weighted sum"}
    assert list(found["gather"]) == [str(size) for size in measure_costs.ROW_BYTES]
    assert (
        list(found["sum"]) == list(found["weighted sum"]) == [str(w) for w in measure_costs.WIDTHS]
    )
    assert found["gather"]["64"] == {"gas": 1.0, "torch": 0.5}
    assert costs._prefers_torch("gather", 64, CPU)
    assert not costs._prefers_torch("scatter", 64, CPU)  # Within the noise.
    assert not costs._prefers_torch("sum", 8, CPU)
    assert [file.name for file in folder.iterdir()] == ["costs.json"]
    assert costs._forced is None


def test_rows_are_as_large_as_the_table_says():
    tables = {"gather_rows": [], "scatter_rows": [], "multiply": []}

    def timer(call):
        name = call.func.__name__
        tables[name].append(call.args[2 if name == "multiply" else 0])
        return 1.0

    measure_costs.measure(CPU, num_bytes=1 << 14, timer=timer)
    for name in ("gather_rows", "scatter_rows"):
        sizes = [table.nbytes // len(table) for table in tables[name][::2]]  # Each in two ways.
        assert sizes == measure_costs.ROW_BYTES
        assert {table.nbytes for table in tables[name]} == {1 << 14}
    assert [x.size(1) for x in tables["multiply"][::4]] == measure_costs.WIDTHS


def test_another_process_reads_them_and_another_device_does_not(monkeypatch):
    measured(lambda name: 0.5)
    costs._is_torch_faster.cache_clear()
    assert costs._prefers_torch("sum", 8, CPU)
    monkeypatch.setattr(costs, "_device_key", lambda device: "another")
    costs._is_torch_faster.cache_clear()
    assert not costs._prefers_torch("sum", 8, CPU)
    measured(lambda name: 2.0)
    assert len(json.loads(costs._costs_path().read_text())) == 2


def test_sizes_between_those_measured():
    found = measured(lambda name: 2.0)
    found["sum"]["16"]["torch"] = 0.5
    costs._costs_path().write_text(json.dumps({costs._device_key(CPU): found}))
    costs._is_torch_faster.cache_clear()
    chosen = [width for width in range(40) if costs._prefers_torch("sum", width, CPU)]
    assert chosen == list(range(9, 17))
    assert not costs._prefers_torch("sum", 10_000, CPU)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_an_unreadable_file_counts_as_absent(folder, content):
    folder.mkdir()
    costs._costs_path().write_bytes(content)
    assert not costs._prefers_torch("gather", 64, CPU)
    measured(lambda name: 0.5)
    assert costs._prefers_torch("gather", 64, CPU)


def test_who_asks(monkeypatch):
    """Only who has what was measured: float32 on a GPU, and sums that may differ between runs."""
    monkeypatch.setattr(costs, "_prefers_torch", lambda *asked: asked)
    table = torch.zeros(3, 8)
    assert costs.prefers_torch_move("gather", table) is False
    assert costs.prefers_torch_sum(None, table) is False

    class OnCuda:
        is_cuda, device = True, "cuda:0"

        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    for shape, row_bytes in (((3, 8), 32), ((3,), 4), ((3, 0), 0)):
        asked = costs.prefers_torch_move("gather", OnCuda(torch.zeros(shape)))
        assert asked == ("gather", row_bytes, "cuda:0")
    assert costs.prefers_torch_move("gather", OnCuda(table[:0])) is False
    assert costs.prefers_torch_move("gather", OnCuda(table.double())) is False
    assert costs.prefers_torch_sum(None, OnCuda(table)) == ("sum", 8, "cuda:0")
    assert costs.prefers_torch_sum(table, OnCuda(table)) == ("weighted sum", 8, "cuda:0")
    assert costs.prefers_torch_sum(None, OnCuda(table.bfloat16())) is False
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert costs.prefers_torch_sum(None, OnCuda(table)) is False


def matrix(rows, cols, entries):
    rowptr = torch.randint(entries + 1, (rows + 1,), dtype=torch.int32).sort().values
    rowptr[0], rowptr[-1] = 0, entries
    col = torch.randint(cols, (entries,), dtype=torch.int32)
    return Matrix.of(rowptr, col, *transpose(rowptr, col, cols, cols))


@pytest.mark.parametrize("shape", [(7, 5, 60), (3, 9, 0)])
def test_sums_by_a_sparse_matrix(shape):
    m = matrix(*shape)
    x, weight = torch.randn(m.num_cols, 4), torch.randn(m.col.numel())
    for w in (None, weight):
        with torch.autocast("cpu", torch.bfloat16):
            out = sparse._multiply_sparse(m, w, x)
        assert torch.allclose(out, sparse._multiply_torch(m, w, x, False, False), atol=1e-5)


def test_which_sums_ask(monkeypatch):
    """Those of a matrix itself, of all rows of one tensor."""
    m, asked = matrix(6, 6, 40), []
    monkeypatch.setattr(costs, "prefers_torch_sum", lambda w, x: asked.append(w is None) or True)
    monkeypatch.setattr(sparse.native, "has_kernels", lambda *tensors: True)
    monkeypatch.setattr(sparse, "_multiply_sparse", lambda *inputs: "sparse")
    monkeypatch.setattr(sparse, "run_typed", lambda *arguments: None)
    monkeypatch.setattr(sparse, "native_matrix", lambda m: None)
    monkeypatch.setattr(sparse, "native_transpose", lambda m, rows: None)
    x = torch.randn(6, 3)
    for weight in (None, torch.ones(40)):
        assert sparse.multiply(m, weight, x, None, None, False, False, None) == "sparse"
    assert asked == [True, False]
    sparse.multiply(m, None, x, None, None, True, False, None)
    sparse.multiply(m, None, x, None, None, False, True, None)
    sparse.multiply(m, None, x[:2], x, None, False, False, None)
    assert len(asked) == 2


@pytest.mark.requires("cuda")
def test_both_ways_on_a_device(monkeypatch):
    m = matrix(50, 40, 900)
    m = Matrix.of(m.rowptr.cuda(), m.col.cuda(), *(part.cuda() for part in m.back))
    x, weight = torch.randn(40, 8, device="cuda"), torch.randn(900, device="cuda")
    index = torch.randperm(40, device="cuda")[:9]
    found = {}
    for way in measure_costs.WAYS:
        monkeypatch.setattr(costs, "_forced", way)
        table = x.clone()
        moves.scatter_rows(table, index, moves.gather_rows(x, index) + 1)
        with torch.autocast("cuda", torch.float16):
            how = x, None, None, False, False, None
            found[way] = table, *(sparse.multiply(m, w, *how) for w in (None, weight))
    for mine, other in zip(*found.values(), strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert torch.allclose(mine, other, atol=1e-4)


@pytest.mark.requires("cuda")
def test_a_measurement_on_a_device():
    found = measure_costs.measure("cuda", num_bytes=1 << 20)
    ways = [ways for sizes in found.values() for ways in sizes.values()]
    assert len(ways) == 2 * (len(measure_costs.ROW_BYTES) + len(measure_costs.WIDTHS))
    assert all(seconds > 0 for seconds_of in ways for seconds in seconds_of.values())
    key = torch.device("cuda", 0)
    seconds = found["gather"]["64"]
    faster = seconds["torch"] < costs.MARGIN * seconds["gas"]
    assert costs._prefers_torch("gather", 64, key) == faster
