"""Account of a process's memory, against the process's total."""

import json
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import ROOT, clustered_graph, random_graph
from torch_geometric.data import Data

import gas
from gas.cli import Experiment, Settings
from gas.cli.account import _batch_tensors, _enter_rows
from gas.graph.attributes import remove_edges
from gas.native.rows import sparse_csr
from gas.native.transfer import MOST_IDLE_BYTES, SHARED, BufferPool
from gas.training import measure
from gas.training.measure import MemoryAccount, release_freed_memory


def test_a_storage_counts_once():
    account = MemoryAccount()
    x = torch.zeros(100, 4)
    account.enter("whole", [x, x[10:], x.t()])
    account.enter("again", [x.view(-1), None])
    account.enter("more", [torch.zeros(5)])
    account.enter("bytes", 7)
    account.enter("bytes", 1)
    assert account.held == {"whole": 1600, "again": 0, "more": 20, "bytes": 8}
    assert account.total == 1628
    names = [line.split("  ")[1] for line in account.table(2048).splitlines()]
    assert names == ["whole", "more", "bytes", "sum", "measured peak"]
    assert account.table(2048).splitlines()[-1].split() == ["measured", "peak", "2", "KiB"]


def test_a_matrix_counts_as_its_parts():
    account = MemoryAccount()
    adj = sparse_csr(torch.arange(4), torch.arange(3), torch.ones(3), 3)
    account.enter("adj", [adj, adj.values()])
    assert account.held["adj"] == (4 + 3) * 8 + 3 * 4


@pytest.mark.parametrize(("store", "expected"), [("host", 100 * 8), ("disk", 0)])
def test_encoded_features_count_as_they_are_stored(store, expected):
    account = MemoryAccount()
    x = gas.quantize(torch.randn(100, 3), "int8", store)
    account.enter("features", [x, x.detach()])
    assert account.held["features"] == expected


def test_tensors_of_a_batch_are_those_of_its_matrix_too():
    adj_t = sparse_csr(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2), 2)
    data = Data(x=torch.zeros(2, 4), adj_t=adj_t, name="some")
    account = MemoryAccount()
    account.enter("batch", _batch_tensors(data))
    assert account.held == {"batch": 8 * 4 + (3 + 2) * 8 + 2 * 4}


@pytest.mark.parametrize("store", ["host", "disk"])
def test_histories_count_where_they_are_in_memory(store):
    model = gas.models.GCN(50, 5, 8, 3, 3, store=store)
    account = MemoryAccount()
    _enter_rows(account, [model], [])
    assert account.held.get("histories", 0) == (2 * 50 * 8 * 4 if store == "host" else 0)
    assert account.held["ages of histories"] == 2 * 50 * 4


def test_loaders_of_one_graph_share_its_edges():
    data, ptr = clustered_graph()
    loader = gas.SubgraphLoader(data, ptr, log=False)
    twin = gas.EvalSubgraphLoader(data, ptr, log=False, like=loader)
    alone = gas.EvalSubgraphLoader(data, ptr, log=False)
    assert twin._relabel is loader._relabel
    for one, two in zip(twin, alone, strict=True):
        for key, value in one.data:
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                assert torch.equal(value, two.data[key])
        assert torch.equal(one.data.adj_t.to_dense(), two.data.adj_t.to_dense())
    data.edge_index[0, 0] = 1 - data.edge_index[0, 0].clamp(max=1)
    with pytest.raises(ValueError, match="'edge_index' of the graph was changed"):
        gas.SubgraphLoader(data, ptr, log=False, like=loader)


def test_edges_go_once_batches_have_copies():
    data, ptr = clustered_graph()
    loader = gas.SubgraphLoader(data, ptr, log=False)
    before = [batch.data.adj_t.to_dense() for batch in loader]
    loader.forget_edges()
    assert "edge_index" not in loader.data
    assert "edge_index" in data
    edges = weakref.ref(data.edge_index)
    del data.edge_index
    assert edges() is None  # The loader has let go of them, too.
    data.edge_index = torch.zeros(2, 0, dtype=torch.long)
    for batch, expected in zip(loader, before, strict=True):
        assert torch.equal(batch.data.adj_t.to_dense(), expected)
    data.edge_attr = torch.rand(data.num_edges, 2)
    assert "edge_index" in remove_edges(data)  # Which says how many rows are one per edge.


SMALL = {"hidden_channels": 8, "num_parts": 6, "batch_size": 2, "epochs": 2}
QUIET = {"log": False, "libraries": 0}


def learnable_graph():
    data = random_graph(num_nodes=120, num_edges=480, directed=False)
    data.y = data.x[:, :3].argmax(dim=1)
    group = torch.arange(120) % 4
    data.train_mask, data.val_mask, data.test_mask = group < 2, group == 2, group == 3
    return data


@pytest.mark.parametrize("full_batch", [False, True])
def test_a_full_batch_has_no_mini_batches(full_batch):
    options = {"full_batch": True} if full_batch else {"evaluation": "layerwise"}
    settings = Settings.default("gcn").replace(**SMALL)
    held = Experiment(learnable_graph(), 3, "gcn", settings, **options, **QUIET).run(0).memory.held
    assert (held["full batch"] > 0) == full_batch
    mini_batches = [held.get(name, 0) for name in ("batch", "batch before")]
    assert all(size > 0 for size in mini_batches) == (not full_batch)
    assert any(size > 0 for size in mini_batches) == (not full_batch)


@pytest.mark.slow
def test_an_experiment_without_edges_is_the_same():
    data = learnable_graph()
    for model in ("gcn", "pna"):
        for options in ({"evaluation": "layerwise"}, {"full_batch": True}):
            runs = []
            for keep_edges in (False, True):
                settings = Settings.default(model).replace(**SMALL)
                options |= {"keep_edges": keep_edges}
                experiment = Experiment(data, 3, model, settings, **options, **QUIET)
                assert ("edge_index" in experiment.data) == keep_edges
                runs.append(experiment.run(0))
            assert runs[0].loss == runs[1].loss
            held = runs[0].memory.held
            assert held["features"] == data.x.nbytes
            assert held["activations"] > 0
            rows = 0 if "full_batch" in options else 120
            kept = runs[0].history_bytes
            assert held["histories"] >= kept
            assert (kept > 0) == (rows > 0)


def test_freed_memory_is_given_back(monkeypatch):
    SHARED.clear()
    monkeypatch.setattr(SHARED, "most_idle_bytes", MOST_IDLE_BYTES)  # Other tests limit it.
    pool = BufferPool()
    assert pool.peak_bytes == 0
    pool.allocate(1000, 1000, torch.float32)
    one = pool.peak_bytes
    assert pool.idle_bytes == one >= 4_000_000
    first, second = (pool.allocate(1000, 1000, torch.float32) for _ in range(2))
    assert pool.peak_bytes == 2 * one  # The first has reused a block.
    del first, second
    pool.clear()
    assert pool.idle_bytes == 0
    SHARED.allocate(1000, 1000, torch.float32)
    assert SHARED.idle_bytes == one
    assert release_freed_memory() >= 0
    assert SHARED.idle_bytes == 0


def test_no_block_stays_idle_if_freed_memory_is_limited(monkeypatch):
    SHARED.clear()
    monkeypatch.setattr(SHARED, "most_idle_bytes", MOST_IDLE_BYTES)  # As before, afterwards.
    monkeypatch.setattr(measure, "_load_c_library", lambda: None)
    idle, used = (SHARED.allocate(1000, 1000, torch.float32) for _ in range(2))
    del idle
    assert SHARED.idle_bytes >= 4_000_000
    gas.training.limit_freed_memory()
    assert SHARED.idle_bytes == 0
    del used
    assert SHARED.idle_bytes == 0
    SHARED.allocate(1000, 1000, torch.float32)
    assert SHARED.idle_bytes == 0


@pytest.mark.slow  # Processes that train on large graphs.
@pytest.mark.requires("matplotlib")
@pytest.mark.parametrize(
    "options",
    [
        "--dataset planted:100000 --num-layers 3 --hidden-channels 128 --num-parts 64 "
        "--batch-size 8",
        "--dataset planted:100000 --num-layers 3 --hidden-channels 128 --full-batch",
        "--dataset planted:20000 --num-layers 6 --hidden-channels 16 --model gat",
    ],
)
def test_the_account_is_the_peak(tmp_path, options):
    script = str(ROOT / "examples" / "train_gas.py")
    command = [sys.executable, script, *options.split(), "--epochs", "1"]
    command += ["--memory-report", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "interpreter and libraries" in done.stdout
    found = json.loads((tmp_path / "metrics.json").read_text())
    measured = found["peak_rss_bytes"]["mean"]
    assert sum(found["memory"].values()) == pytest.approx(measured, rel=0.15)
