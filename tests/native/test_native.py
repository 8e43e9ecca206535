"""E6: every native function equals its pure-torch twin."""

import pickle

import pytest
import torch

from gas.native import extension
from gas.native import graph as graphs
from gas.native import matrix as matrices
from gas.native import rows as tables
from gas.native.dropout import (
    _dropout_torch,
    dropout,
    norm_relu_dropout,
    norm_relu_dropout_backward,
    relu_dropout,
    relu_dropout_backward,
)

pytestmark = pytest.mark.requires("native")

DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def table_of(shape, dtype):
    return (
        torch.randint(0, 2, shape).to(dtype)
        if dtype == torch.bool
        else (torch.randint(0, 200, shape).to(dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 16, 33])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_gather_rows(dtype, width, rows):
    table = table_of((rows, width), dtype)
    for n in (0, 1, 3 * rows):
        index = torch.randint(rows, (n,))
        expected = tables._gather_rows_torch(table, index, table.new_empty(n, width))
        assert torch.equal(tables.gather_rows(table, index), expected)


def test_gather_rows_in_parallel(threads):
    table, index = torch.randn(50_000, 64), torch.randint(50_000, (70_000,))
    assert torch.equal(tables.gather_rows(table, index), table[index])


def test_gather_rows_of_vectors_and_cubes():
    index = torch.tensor([2, 0, 2])
    for shape in ((4,), (4, 3, 2)):
        table = torch.randn(shape)
        assert torch.equal(tables.gather_rows(table, index), table[index])


def test_gather_rows_into_a_buffer():
    table, index, out = torch.randn(5, 4), torch.tensor([4, 1]), torch.full((2, 4), float("nan"))
    assert tables.gather_rows(table, index, out) is out
    assert torch.equal(out, table[index])
    for wrong in (torch.empty(3, 4), torch.empty(2, 4).double(), torch.empty(4, 2).t()):
        with pytest.raises(ValueError, match="'out' is"):
            tables.gather_rows(table, index, wrong)


@pytest.mark.parametrize("lazy", [torch.conj, lambda table: table.conj().imag], ids=["conj", "neg"])
def test_gather_rows_of_a_view_that_pytorch_computes(lazy):
    table, index = lazy(torch.randn(6, 3, dtype=torch.complex64)), torch.tensor([4, 0, 4])
    assert torch.equal(tables.gather_rows(table, index), table[index])


def test_gather_rows_of_a_strided_table():
    table = torch.randn(6, 8)[:, ::2]
    index = torch.arange(12)[::2] % 6
    assert torch.equal(tables.gather_rows(table, index), table[index])


@pytest.mark.parametrize("bad", [-1, 5])
def test_rows_out_of_range_change_nothing(bad):
    table, index = torch.zeros(5, 4), torch.tensor([0, bad, 1])
    out = torch.full((3, 4), 7.0)
    with pytest.raises(IndexError, match=f"index {bad} at position 1"):
        tables.gather_rows(table, index, out)
    assert (out == 7).all()
    with pytest.raises(IndexError, match=f"holds {bad}"):
        tables._gather_rows_torch(table, index, out)


@pytest.mark.parametrize("index", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.long), [0, 1]])
def test_rows_need_a_vector_of_ids(index):
    with pytest.raises(ValueError, match="'index' is .* expected a one-dimensional int64"):
        tables.gather_rows(torch.zeros(5, 4), index)


@pytest.mark.parametrize(
    ("num_rows", "num_edges"), [(0, 0), (1, 0), (1, 9), (50, 400), (9000, 90_000)]
)
def test_coo_to_csr(num_rows, num_edges, threads):
    row = torch.randint(max(num_rows, 1), (num_edges,))
    col = torch.randint(max(num_rows // 3, 1), (num_edges,))  # Many duplicates.
    found = graphs.coo_to_csr(row, col, num_rows)
    for mine, twin in zip(found, graphs._coo_to_csr_torch(row, col, num_rows), strict=True):
        assert torch.equal(mine, twin)
    rowptr, out_col, perm = found
    assert torch.equal(row[perm], torch.arange(num_rows).repeat_interleave(rowptr.diff()))
    assert torch.equal(col[perm], out_col)
    for mine, small in zip(found, graphs.coo_to_csr(row, col, num_rows, torch.int32), strict=True):
        assert small.dtype == (torch.int64 if mine is rowptr else torch.int32)
        assert torch.equal(mine.int(), small.int())


@pytest.mark.slow(fast=2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("num_nodes", "num_edges"), [(0, 0), (1, 0), (1, 9), (2, 9), (50, 400), (9000, 200_000)]
)
def test_symmetrize_edges(num_nodes, num_edges, weighted, dtype, threads):
    src = torch.randint(max(num_nodes, 1), (num_edges,))
    dst = torch.randint(max(num_nodes // 3, 1), (num_edges,))  # Hubs, and many duplicates.
    src[: num_edges // 3], dst[: num_edges // 3] = (
        dst[-(num_edges // 3) :],
        src[-(num_edges // 3) :],
    )
    weight = torch.randint(4, (num_edges,), dtype=torch.int32) if weighted else None
    found = graphs.symmetrize_edges(src, dst, num_nodes, weight, dtype)
    twins = graphs._symmetrize_edges_torch(src, dst, num_nodes, weight, dtype)
    for mine, twin in zip(found, twins, strict=True):
        if twin is None:
            assert mine is None
        else:
            assert mine.dtype == twin.dtype
            assert torch.equal(mine, twin)
    if num_nodes > 50:
        return
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.long)
    dense.index_put_((src, dst), torch.ones_like(src) if weight is None else weight.long(), True)
    dense = (dense + dense.t()).fill_diagonal_(0)
    rowptr, col, weight = found
    row = torch.arange(num_nodes).repeat_interleave(rowptr.diff())
    assert torch.equal(torch.stack([row, col.long()]), dense.nonzero().t())
    assert weight is None or torch.equal(weight, dense[row, col.long()])


def test_symmetrize_edges_checks_ids():
    for function in (graphs.symmetrize_edges, graphs._symmetrize_edges_torch):
        for bad in (-1, 3):
            for src, dst in ((0, bad), (bad, 0)):
                ids = torch.tensor([[0, src], [1, dst]])
                with pytest.raises(IndexError):
                    function(*ids, 3, None, torch.int64)


def test_coo_to_csr_checks_rows():
    for function in (graphs.coo_to_csr, graphs._coo_to_csr_torch):
        for bad in (-1, 3):
            with pytest.raises(IndexError):
                function(torch.tensor([0, bad]), torch.tensor([0, 0]), 3)
    with pytest.raises(ValueError, match="'row' has 2 entries and 'col' has 1"):
        graphs.coo_to_csr(torch.tensor([0, 1]), torch.tensor([0]), 3)


@pytest.mark.parametrize("order", ["sorted", "own columns first", "any"])
def test_transpose(order, threads):
    num_cols, rows = 300, torch.randint(200, (120_000,)).sort().values  # A share for each thread.
    cols = torch.randint(num_cols, rows.shape)
    if order != "any":
        key = cols if order == "sorted" else (cols >= 100).long()
        cols = cols[torch.argsort(rows * num_cols + key, stable=True)]
    rowptr = torch.zeros(201, dtype=torch.int32)
    rowptr[1:] = torch.bincount(rows, minlength=200).cumsum(0)
    for kept in (300, 100, 0):
        found = matrices.transpose(rowptr, cols.int(), num_cols, kept)
        twin = matrices._transpose_torch(rowptr, cols.int(), num_cols, kept)
        entries = int(twin[0][-1])
        assert torch.equal(found[0], twin[0])
        for mine, other in zip(found[1:], twin[1:], strict=True):
            assert torch.equal(mine[:entries], other[:entries])
    for bad in (-1, num_cols):
        cols[90_000] = bad
        with pytest.raises(IndexError, match=f"column {bad} of entry 90000 is outside"):
            matrices.transpose(rowptr, cols.int(), num_cols, num_cols)


@pytest.mark.parametrize(
    ("num_nodes", "num_edges"), [(1, 0), (1, 3), (65, 0), (130, 900), (5000, 200_000)]
)
def test_relabel(num_nodes, num_edges, threads):
    row, col = torch.randint(num_nodes, (2, num_edges))
    rowptr, col, _ = graphs.coo_to_csr(row, col, num_nodes)
    relabel = graphs.Relabeler(rowptr, col)
    for n in (0, 1, num_nodes // 3, num_nodes):
        for nodes in (torch.randperm(num_nodes)[:n], torch.arange(n)):
            found = relabel(nodes)
            twins = graphs._relabel_torch(rowptr, col, nodes)
            for mine, twin in zip(found[:4], twins, strict=True):
                assert torch.equal(mine, twin)
            small, twin = relabel(nodes, torch.int32), relabel._cut_torch(nodes, torch.int32)
            for i in range(4):
                assert small[i].dtype == twin[i].dtype == (torch.int32 if i < 2 else torch.int64)
                assert torch.equal(small[i], found[i].to(small[i].dtype))
                assert torch.equal(small[i], twin[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_relabel_with_names_and_weights(dtype, threads):
    row, col = torch.randint(500, (2, 9000))
    rowptr, col, _ = graphs.coo_to_csr(row, col, 500)
    e_id, weight = torch.randperm(9000), torch.randint(99, (9000,)).to(dtype)
    relabel = graphs.Relabeler(rowptr, col, e_id, weight)
    small = graphs.Relabeler(rowptr, col.int(), e_id.int(), weight)
    nodes = torch.randperm(500)[:100]
    for chosen in (nodes, nodes.sort().values):
        for index in (torch.int32, torch.int64):
            twins = relabel._cut_torch(chosen, index)
            few = small(chosen, index)
            for mine, twin, other in zip(relabel(chosen, index), twins, few, strict=True):
                assert mine.dtype == twin.dtype == other.dtype
                assert torch.equal(mine, twin)
                assert torch.equal(mine, other)
            for mine, twin in zip(few, small._cut_torch(chosen, index), strict=True):
                assert mine.dtype == twin.dtype
                assert torch.equal(mine, twin)
    entry = graphs.Relabeler(rowptr, col)(nodes).e_id
    assert torch.equal(relabel(nodes).e_id, e_id[entry])
    assert torch.equal(relabel(nodes).weight, weight[entry])
    for name in ("e_id", "weight"):
        with pytest.raises(ValueError, match=f"'{name}' has shape"):
            graphs.Relabeler(rowptr, col, **{name: torch.arange(8999)})


def test_relabel_of_few_among_many(threads):
    num_nodes = 3_000_000  # The halo's bits lie in words far from each other.
    row, col = torch.randint(50, (2000,)), torch.randint(num_nodes, (2000,))
    rowptr, col, _ = graphs.coo_to_csr(row, col, num_nodes)
    relabel = graphs.Relabeler(rowptr, col)
    for nodes in (torch.arange(50), torch.arange(20, 40), torch.tensor([num_nodes - 1, 7])):
        twins = graphs._relabel_torch(rowptr, col, nodes)
        for mine, twin in zip(relabel(nodes)[:4], twins, strict=True):
            assert torch.equal(mine, twin)


def test_relabel_by_hand():
    #                       0 <- 3, 0 <- 1, 1 <- 4 (twice), 3 <- 0; batch: 3, 0
    rowptr, col = torch.tensor([0, 2, 4, 4, 5, 5]), torch.tensor([1, 3, 4, 4, 0])
    rowptr, col, e_id, n_id, _ = graphs.Relabeler(rowptr, col)(torch.tensor([3, 0]))
    assert rowptr.tolist() == [0, 1, 3]
    assert col.tolist() == [1, 0, 2]
    assert e_id.tolist() == [4, 1, 0]
    assert n_id.tolist() == [3, 0, 1]


def test_relabel_of_columns_in_any_order():
    rowptr, col = torch.tensor([0, 5, 5, 5, 5]), torch.tensor([3, 1, 0, 3, 2])
    found = graphs.Relabeler(rowptr, col)(torch.tensor([0]))
    twin = graphs._relabel_torch(rowptr, col, torch.tensor([0]))
    assert all(torch.equal(mine, other) for mine, other in zip(found[:4], twin, strict=True))
    assert found[1].tolist() == [0, 1, 2, 3, 3]
    assert found[2].tolist() == [2, 1, 4, 0, 3]


def test_relabel_recovers_from_bad_nodes():
    rowptr, col = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0])
    relabel = graphs.Relabeler(rowptr, col)
    expected = relabel(torch.tensor([1]))
    with pytest.raises(IndexError, match="node id 3 is outside"):
        relabel(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="node id 0 is listed twice"):
        relabel(torch.tensor([0, 0]))
    again = relabel(torch.tensor([1]))
    assert all(torch.equal(a, b) for a, b in zip(expected[:4], again[:4], strict=True))
    with pytest.raises(ValueError, match="twice"):
        graphs._relabel_torch(rowptr, col, torch.tensor([0, 0]))
    with pytest.raises(IndexError, match="outside"):
        graphs.Relabeler(rowptr, torch.tensor([1, 2, 3]))
    for bad in ([0, 3, 1, 3], [1, 2, 3, 3], [0, 1, 2, 4]):
        with pytest.raises(ValueError, match="'rowptr' does not rise from 0 to the 3 entries"):
            graphs.Relabeler(torch.tensor(bad), torch.tensor([1, 2, 0]))


def test_relabel_travels_to_another_process():
    rowptr, col = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0])
    relabel = graphs.Relabeler(rowptr, col)
    copy = pickle.loads(pickle.dumps(relabel))
    nodes = torch.tensor([2])
    assert all(torch.equal(a, b) for a, b in zip(relabel(nodes)[:4], copy(nodes)[:4], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (5, 7, 3), (300, 501)])
def test_dropout(dtype, p, shape, threads):
    x = torch.randn(shape, dtype=dtype)
    for seed in (0, 1, 2**62 + 12345):
        mine = dropout(x, p, seed)
        twin = _dropout_torch(x, round(p * 2**32), 1 / (1 - p), seed)
        assert torch.equal(mine, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (5, 7, 3), (300, 501)])
def test_relu_and_dropout(dtype, shape, threads, monkeypatch):
    x, grad = torch.randn(2, *shape, dtype=dtype)
    relu, out = relu_dropout(x, 0.3, 9)
    assert torch.equal(out, dropout(x.relu(), 0.3, 9))
    found = relu_dropout_backward(grad, out, 0.3)
    monkeypatch.setattr(extension, "C", None)
    assert all(map(torch.equal, relu_dropout(x, 0.3, 9), (relu, out)))
    assert torch.equal(found, relu_dropout_backward(grad, out, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 3), (256, 8), (257, 9), (1000, 37)])
def test_batch_norm_with_relu_and_dropout(dtype, shape, threads, monkeypatch):
    """The same for any number of threads; of blocks of rows, sums are close to the twin's."""
    x, grad = torch.randn(2, *shape, dtype=dtype)
    mean, inverse, weight, bias = torch.rand(4, shape[1], dtype=dtype) + 0.5

    def run():
        relu, out = norm_relu_dropout(x, mean, inverse * weight, bias, 0.3, 9)
        back = norm_relu_dropout_backward(grad, out, x, mean, inverse, weight, 0.3)
        return relu, out, *back

    found = run()
    torch.set_num_threads(1)
    assert all(map(torch.equal, found, run()))
    monkeypatch.setattr(extension, "C", None)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(found, run(), **tolerance)
    assert torch.equal(found[1] == 0, run()[1] == 0)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_rows_are_looked_at_in_blocks(block, monkeypatch):
    monkeypatch.setattr(graphs, "BLOCK", block)
    for dtype in (torch.int64, torch.int32):
        rowptr = torch.tensor([0, 0, 3, 3, 7, 7], dtype=dtype)
        cases = {
            (0, 1, 4, 0, 1, 2, 3): (True, True),
            (0, 1, 1, 0, 1, 2, 3): (True, False),
            (0, 1, 4, 3, 1, 2, 3): (False, False),
            (2, 1, 4, 0, 1, 2, 3): (False, False),
            (0, 1, 4, 0, 1, 3, 2): (False, False),
        }
        for col, expected in cases.items():
            found = [graphs.has_sorted_rows(rowptr, torch.tensor(col), strict) for strict in (0, 1)]
            assert tuple(found) == expected
        assert graphs.is_valid_rowptr(rowptr, 7)
        assert not graphs.is_valid_rowptr(rowptr, 6)
        assert not graphs.is_valid_rowptr(rowptr[1:].flip(0), 7)
        assert not graphs.is_valid_rowptr(torch.tensor([0, 2, 1, 4], dtype=dtype), 4)
    assert graphs.has_sorted_rows(torch.tensor([0, 0]), torch.tensor([], dtype=torch.long))
    assert not graphs.is_valid_rowptr(torch.tensor([], dtype=torch.long), 0)
