"""Packed rows: read elsewhere, the same ones; and what is read is what the plan says."""

import copy
import errno
import os

import numpy as np
import pytest
import torch
from torch_geometric.transforms import GCNNorm

import gas
from gas import native
from gas.datasets.planted import planted_partition
from gas.graph import get_mapped_rows
from gas.history.disk import DiskStore
from gas.history.packing import Packing
from gas.native import segments
from gas.native.transfer import BufferPool
from gas.training import train_epoch

NODES, PARTS = 600, 12


@pytest.fixture(params=["native", "twin"])
def backend(request, monkeypatch):
    if request.param == "twin":
        monkeypatch.setattr(native.extension, "C", None)


def graph(**options):
    data = planted_partition(NODES, seed=3)
    data.train_mask = torch.ones(NODES, dtype=torch.bool)
    data.x = data.x[:, :9].contiguous()
    return gas.cluster(GCNNorm()(data), PARTS, log=False, **options)


def loader_of(data, batch_size=3, **options):
    generator = torch.Generator().manual_seed(5)
    return gas.SubgraphLoader(
        data, batch_size=batch_size, shuffle=True, log=False, generator=generator, **options
    )


def model_of(data, width=7, **options):
    torch.manual_seed(1)
    options = {"store": "disk", **options}
    model = gas.models.GCN(NODES, data.x.size(1), width, int(data.y.max()) + 1, 3, **options)
    for history in model.histories:
        history.push(torch.zeros(NODES, width))
    return model


def halos(loader):
    return [halo.clone() for halo in loader.halos()]


# What is read -------------------------------------------------------------------------------------


@pytest.mark.slow(fast=17)
@pytest.mark.parametrize("hot", [0, 1, 40, NODES])
@pytest.mark.parametrize("size", [1, 3, PARTS])
@pytest.mark.parametrize("columns", [1, 17, 1500])
def test_rows_are_those_of_the_table(hot, size, columns, tmp_path, backend):
    loader = loader_of(graph(), size)
    packing = Packing(loader.ptr, loader.halos(), hot)
    store = DiskStore(NODES, columns, torch.float32, tmp_path / "rows")
    store.table.copy_(torch.randn(NODES, columns))
    before = store.table.clone()
    store.packed = store.make_packed(packing, BufferPool())
    for batch in loader:
        own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
        for index, plan in (
            (halo, packing.plan(halo, own)),
            (batch.n_id, packing.plan(batch.n_id)),
        ):
            staged = store.packed.read_staged(plan)
            assert (
                staged.size(0)
                == plan.num_rows
                == plan.hot.numel()
                + sum(end - first for first, end in plan.ranges)
                + sum(int(packing.starts[b] - packing.starts[a]) for a, b in plan.runs)
            )
            assert torch.equal(staged[plan.places], before[index])
            assert plan.in_order == torch.equal(plan.places, torch.arange(staged.size(0)))
    store.close()


def test_what_is_read_is_little(tmp_path):
    """Of one part: its halo, each row once, in one piece; of several nothing of the batch's own."""
    loader = loader_of(graph(), 1)
    every = halos(loader)
    packing = Packing(loader.ptr, iter(every))
    assert packing.halo_rows == len(packing.rows) == sum(halo.numel() for halo in every)
    for batch in loader:
        halo = batch.n_id[batch.batch_size :]
        plan = packing.plan(halo, batch.n_id[: batch.batch_size])
        assert plan.in_order
        assert plan.num_rows == halo.numel()
        assert len(plan.runs) == 1
    for batch in loader_of(graph(), 4):
        own = batch.n_id[: batch.batch_size]
        plan = packing.plan(batch.n_id[batch.batch_size :], own)
        rows = [packing.rows[packing.starts[a] : packing.starts[b]] for a, b in plan.runs]
        if plan.ranges:
            assert plan.ranges == [(0, NODES)]
        else:
            assert not np.isin(np.concatenate(rows), own.numpy()).any()
            assert plan.num_rows == sum(map(len, rows)) < NODES


def test_rows_that_most_parts_read_are_hot():
    loader = loader_of(graph(), 1)
    read = torch.zeros(NODES, dtype=torch.long)
    for halo in halos(loader):
        read[halo] += 1
    for hot in (1, 10, 100):
        packing = Packing(loader.ptr, loader.halos(), hot)
        assert len(packing.hot) == hot
        chosen = read[packing.hot]
        assert packing.hot_reads == chosen.sum() == read.sort(descending=True).values[:hot].sum()
        assert len(packing.rows) == packing.halo_rows - packing.hot_reads
        assert not np.isin(packing.rows, packing.hot).any()


def test_what_is_no_batch_has_no_plan():
    loader = loader_of(graph(), 1)
    packing = Packing(loader.ptr, loader.halos())
    batch = loader.cut([2])
    own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
    assert packing.plan(halo, own) is not None
    assert packing.plan(halo, own[1:]) is None
    assert packing.plan(halo, own[:-1]) is None
    assert packing.plan(halo, own.flip(0)) is None
    assert packing.plan(halo, torch.cat([own, own])) is None
    assert packing.plan(halo[:0], own[:0]) is None
    unread = np.setdiff1d(np.arange(NODES), np.concatenate([halo, own]))
    assert packing.plan(torch.cat([halo, torch.tensor(unread[:1])]), own) is None
    again = packing.plan(halo[:5], own)  # Of the same parts, other rows.
    assert torch.equal(again.index, halo[:5])
    assert packing.plan(halo, own).index.numel() == halo.numel()


@pytest.mark.parametrize("first", [0, 1, 50, 99, 100])
@pytest.mark.parametrize("end", [0, 1, 50, 99, 100])
def test_parts_of_a_range(first, end):
    bounds = [0, 10, 10, 50, 100]
    packing = Packing(torch.tensor(bounds), [torch.empty(0, dtype=torch.long)] * 4)
    if first > end:
        return
    whole, cut = packing.parts_in_range(first, end)
    rows = set(range(first, end))
    for part in range(4):
        own = set(range(bounds[part], bounds[part + 1]))
        assert not own or (part in whole) == (own <= rows)
        assert (part in cut) == (bool(own & rows) and not own <= rows)


# Segments of a file -------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [4, 68, 4096, 5000])
@pytest.mark.parametrize("counts", [[1], [0, 3, 0], [70, 1, 64, 200], [1] * 1500])
def test_segments(row_bytes, counts, tmp_path, backend):
    rows = torch.randint(0, 255, (300, row_bytes), dtype=torch.uint8)
    starts = np.concatenate([[0], np.cumsum(counts)])
    ids = np.random.default_rng(0).integers(0, 300, starts[-1]).astype(np.int32) + 7
    sizes = segments.padded_sizes(np.diff(starts) * row_bytes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    path = tmp_path / "segments"
    path.write_bytes(b"\xff" * int(offsets[-1] + 5))
    file = os.open(path, os.O_RDWR)
    segments.write_segments(file, rows, ids, 7, starts[:-1], starts[1:], offsets[:-1])
    out = torch.empty(len(ids), row_bytes, dtype=torch.uint8)
    assert segments.read_segments(file, 0, starts, row_bytes, out) == offsets[-1]
    assert torch.equal(out, rows[torch.from_numpy(ids.astype(np.int64) - 7)])
    held = np.frombuffer(path.read_bytes(), np.uint8)
    assert (held[offsets[-1] :] == 255).all()
    for begin, size, count in zip(offsets[:-1], sizes, counts, strict=True):
        assert not held[begin + count * row_bytes : begin + size].any()
    os.ftruncate(file, max(0, int(offsets[-1]) - 4096))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        segments.read_segments(file, 0, starts, row_bytes, out)
    os.close(file)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        segments.read_segments(file, 0, starts, row_bytes, out)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        segments.write_segments(file, rows, ids, 7, starts[:-1], starts[1:], offsets[:-1])


def test_what_the_system_does_by_and_by(tmp_path, monkeypatch):
    """A call may read or write less than it was asked for."""
    monkeypatch.setattr(native.extension, "C", None)
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def little(file, pieces, offset, call=call):
            return call(file, [pieces[0][:100]], offset)

        monkeypatch.setattr(os, name, little)
    file = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    rows = torch.randn(50, 33)
    starts = np.array([0, 20, 50])
    segments.write_segments(
        file, rows, np.arange(50), 0, starts[:-1], starts[1:], starts[:-1] * 4096
    )
    out = torch.empty(30, 33)
    segments.read_segments(file, 20 * 4096, starts[1:], 132, out)
    assert torch.equal(out, rows[20:])
    os.close(file)


# Training -----------------------------------------------------------------------------------------


def trained(
    data, pack, dtype="float32", io="concurrent", prefetch=None, memory=0, threads=1, **more
):
    """Return losses, predictions and histories."""
    model = model_of(data, dtype=dtype, io=io, prefetch=int(bool(prefetch)))
    loader = loader_of(data, **more)
    if pack:
        packed = model.pack(loader, memory)
        assert str(packed)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    before, batches = torch.get_num_threads(), loader
    if prefetch is not None:
        batches = gas.PrefetchLoader(loader, model)
    torch.set_num_threads(threads)
    try:
        losses = [train_epoch(model, batches, optimizer) for _ in range(2)]
        out = model.predict(loader)
    finally:
        torch.set_num_threads(before)
    for history in model.histories if pack else ():
        assert history.store.packed.rows_read
    rows = [history.emb.clone() for history in model.histories]
    model.close()
    return losses, out, rows


def assert_same(one, other):
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("memory", [0, "3kB", "1GB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_training_is_the_same(dtype, memory, backend):
    data = graph()
    assert_same(trained(data, False, dtype), trained(data, True, dtype, memory=memory))


@pytest.mark.parametrize("prefetch", [None, 0, 1])
@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize("cores", [1, 4])
def test_whenever_rows_are_moved(cores, io, prefetch, monkeypatch):
    monkeypatch.setattr(gas.native.cores, "num_cores", lambda: cores)
    data = graph()
    expected = trained(data, False, io="serial", prefetch=prefetch)
    assert_same(expected, trained(data, True, io=io, prefetch=prefetch))


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 5}, {"num_workers": 1}])
def test_batches_of_a_graph_folder(options, tmp_path):
    graph(out=tmp_path / "graph")
    data = gas.open_graph(tmp_path / "graph", log=False)
    assert get_mapped_rows(data.x) is not None
    assert_same(trained(data, False, **options), trained(data, True, memory="4kB", **options))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
def test_features(dtype, backend):
    unpacked = graph()
    data = copy.copy(unpacked)
    unpacked.x, data.x = (gas.quantize(data.x, dtype, store="disk") for _ in range(2))
    plain, packed = loader_of(unpacked), loader_of(data)
    model = model_of(data)
    model.pack(packed, "2kB")
    assert packed.data is data
    assert data.x.packed is not None
    assert unpacked.x.packed is None
    for batch, other in zip(plain, packed, strict=True):
        assert torch.equal(batch.x, other.x)
        dropped = []
        for one in (batch, other):
            torch.manual_seed(2)
            rows = gas.nn.dropout(one.features(), 0.5, True)
            dropped.append(rows if isinstance(rows, torch.Tensor) else rows.tensor())
        assert torch.equal(*dropped)
    assert data.x.packed.rows_read > NODES
    first, end = data.parts[3:5].tolist()
    for index in ([3, 1], [first, *[2] * (end - first - 2), end - 1], [first, first + 1]):
        index = torch.tensor(index)
        assert torch.equal(data.x[index], unpacked.x[index])
    for index in ([-1], [NODES], [*range(first, end), NODES + 5]):
        with pytest.raises(IndexError):
            data.x.read(torch.tensor(index))
    batch = packed.cut([1])
    assert torch.equal(batch.x, plain.cut([1]).x)
    model.close()


# What changes rows --------------------------------------------------------------------------------


def every_halo(model, loader):
    for batch in loader:
        own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
        for history in model.histories:
            yield history.start_pull(halo, 0, own).wait(), history.store.table[halo]


CHANGES = {
    "in place": lambda history, x: history.emb.copy_(x),
    "everything": lambda history, x: history.push(x),
    "by index": lambda history, x: history.push(x[100:].flip(0), torch.arange(100, NODES).flip(0)),
    "ranges": lambda history, x: history.push(x[:450], None, [7, 300], [250, 200]),
    "reset": lambda history, _: history.reset_parameters(),
    "restored": lambda history, x: history.restore(
        [(torch.arange(NODES), x)], torch.ones(NODES, dtype=torch.int32), 1
    ),
}


@pytest.mark.filterwarnings("ignore:A history was read before")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", [0, "1kB"])
@pytest.mark.parametrize("inference", [False, True])
def test_whoever_changes_rows_changes_their_copies(change, memory, inference):
    data = graph()
    with torch.inference_mode(inference):  # Whose tensors have no version.
        model, loader = model_of(data), loader_of(data, 1)
        model.pack(loader, memory)
        for history in model.histories:
            CHANGES[change](history, torch.randn(NODES, 7))
        found = [torch.equal(a, b) for a, b in every_halo(model, loader)]
    assert len(found) == PARTS * 2
    assert all(found)
    model.close()


def test_a_checkpoint_of_packed_histories(tmp_path):
    data = graph()
    model, loader = model_of(data), loader_of(data, 1)
    model.pack(loader, "1kB")
    train_epoch(model, loader, torch.optim.Adam(model.parameters()))
    gas.save(tmp_path / "run", model)
    other = model_of(data)
    other.pack(loader)
    gas.load(tmp_path / "run", other)
    for mine, its in zip(model.histories, other.histories, strict=True):
        assert torch.equal(mine.emb, its.emb)
    assert all(torch.equal(a, b) for a, b in every_halo(other, loader))
    model.close()
    other.close()


# Files --------------------------------------------------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_nothing_is_left(tmp_path):
    data = graph()
    before = open_files()
    model = model_of(data, path=tmp_path / "histories")
    names = sorted(path.name for path in (tmp_path / "histories").iterdir())
    for _ in range(2):  # The second time replaces the first.
        model.pack(loader_of(data), "1kB")
        assert sorted(path.name for path in (tmp_path / "histories").iterdir()) == names
    model.close()
    assert open_files() == before


def test_a_full_disk(monkeypatch):
    data = graph()
    model, loader = model_of(data), loader_of(data, 1)
    before = [history.emb.clone() for history in model.histories]

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fallocate, calls = os.posix_fallocate, []

    def full_at_last(*args):  # The second history finds no room.
        calls.append(args)
        return fallocate(*args) if len(calls) == 1 else full()

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full_at_last)
        with pytest.raises(OSError, match="no room for .* of packed rows .*give more 'memory'"):
            model.pack(loader)
    assert not gas.scalable.is_packed(model)
    assert all(torch.equal(a, b) for a, b in every_halo(model, loader))
    assert all(torch.equal(h.emb, x) for h, x in zip(model.histories, before, strict=True))
    model.close()


def test_a_push_that_fails(monkeypatch, backend):
    """Copy of what was written are made when they are read."""
    data = graph()
    model, loader = model_of(data, io="serial"), loader_of(data, 1)
    model.pack(loader)
    for where_fails in ("gas.history.packed.write_segments", "gas.history.packed.write_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(where_fails, failing)
            with pytest.raises(OSError, match="broken"):
                model.histories[0].push(torch.randn(NODES, 7))
        assert all(torch.equal(a, b) for a, b in every_halo(model, loader))
    model.close()


def failing(*_):
    raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("where", [None, torch.arange(NODES)])
def test_a_forked_process_may_not_push(where, monkeypatch):
    data = graph()
    model, loader = model_of(data, io="serial"), loader_of(data, 1)
    model.pack(loader)
    own = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr("gas.history.packed.os.getpid", lambda: own + 1)
        with pytest.raises(RuntimeError, match="in the process that trains"):
            model.histories[0].push(torch.randn(NODES, 7), where)
    assert all(torch.equal(a, b) for a, b in every_halo(model, loader))
    model.close()


def test_packing_again_fails(monkeypatch, tmp_path):
    """The rows packed before are kept."""
    data = graph()
    data.x = gas.quantize(data.x, "float32", store="disk")
    model, loader = model_of(data), loader_of(data, 1)
    model.pack(loader, "1kB")
    before = [h.store.packed for h in model.histories], data.x.packed
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(OSError, match="broken"):
            model.pack(loader)
    with pytest.raises(ValueError, match="'path' is .*, which is no directory"):
        model.pack(loader, path=tmp_path / "nowhere")
    assert before == ([h.store.packed for h in model.histories], data.x.packed)
    assert all(torch.equal(a, b) for a, b in every_halo(model, loader))
    model.close()


class Negative(DiskStore):
    """Rows of the user's, which aren't those of the table."""

    def read(self, index, out):
        super().read(index, out)
        out.neg_()


def test_a_store_with_a_read_of_its_own():
    data = graph()
    model = model_of(data, store=lambda *args: Negative(*args))
    with pytest.raises(ValueError, match="only rows of a DiskStore are packed"):
        model.pack(loader_of(data))
    model.close()


@pytest.mark.parametrize("cache", [False, True])
def test_features_that_change(cache, tmp_path):
    graph(out=tmp_path / "graph")
    data = gas.open_graph(tmp_path / "graph", log=False)
    loader = loader_of(data, 1, cache=cache)
    model = model_of(data)
    model.pack(loader)
    before = [batch.x.clone() for batch in sorted(loader, key=lambda batch: int(batch.n_id[0]))]
    data.x.mul_(2)
    after = [batch.x for batch in sorted(loader, key=lambda batch: int(batch.n_id[0]))]
    assert all(torch.equal(2 * a, b) for a, b in zip(before, after, strict=True))
    model.close()


def test_another_default_device():
    data = graph()
    model, loader = model_of(data), loader_of(data, 1)
    model.pack(loader, "1kB")
    batch = loader.cut([1])
    own, halo = batch.n_id[: batch.batch_size], batch.n_id[batch.batch_size :]
    history = model.histories[0]
    history.push(torch.randn(NODES, 7))
    with torch.device("meta"):
        assert torch.equal(history.start_pull(halo, 0, own).wait(), history.store.table[halo])
    model.close()


def test_copies_are_not_packed():
    data = graph()
    model, loader = model_of(data), loader_of(data, 1)
    model.pack(loader)
    twin = copy.deepcopy(model)
    assert not gas.scalable.is_packed(twin)
    assert not gas.scalable.is_packed(model.for_graph(NODES))
    assert torch.equal(twin.predict(loader), model.predict(loader))
    twin.close()
    model.close()


def test_what_comes_next_is_expected(monkeypatch):
    """Before a batch is computed, the system is told of the one after it."""
    monkeypatch.setattr(gas.native.cores, "num_cores", lambda: 1)
    data = graph()
    model, loader = model_of(data), loader_of(data, 1)
    model.pack(loader)
    told = []
    for module in (gas.scalable.call, gas.scalable.prefetch):
        monkeypatch.setattr(module, "read_ahead", lambda _, size, n_id: told.append(int(n_id[0])))
    seen = []
    for batch in gas.PrefetchLoader(loader, model):
        seen.append(int(batch.n_id[0]))
        assert told == seen + told[len(seen) :]
        assert len(told) == min(len(seen) + 1, PARTS)
    model.close()
