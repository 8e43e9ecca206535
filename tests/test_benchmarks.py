"""Benchmarks that measure devices: all of them run, with their smallest settings."""

import argparse
import functools
import importlib
import json
import math
import re
import sys
import types

import pytest
import torch
from conftest import ROOT

import gas

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def script(monkeypatch):
    """Import a script of ``benchmarks``, as it finds its neighbours; without METIS."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setitem(sys.modules, "torch_sparse", None)
    return importlib.import_module


@pytest.fixture
def results(script, monkeypatch, tmp_path):
    """Run a script with a command line; return its results and its table."""

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, "--quick", "--name", str(tmp_path / name), *args])
        script(name).main()
        table = (tmp_path / f"{name}.md").read_text()
        return json.loads((tmp_path / f"{name}.json").read_text()), table

    return run


class Inline:
    """In place of a process of its own, which takes seconds to start."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def submit(self, function, *args):
        value = function(*args)
        return type("Job", (), {"result": lambda self: value})()


@pytest.mark.slow
def test_epoch_time(results, script, monkeypatch):
    small = script("contenders").Case("planted:600", 2, 8, 6, 2, 0.3)
    monkeypatch.setitem(script("epoch_time").QUICK, "cpu", small)
    found, table = results("epoch_time", "--repeats", "1")
    case = found["cases"]["planted:600"]
    makers = script("contenders").MAKERS
    assert {*case["seconds"], *case["not_measured"]} == set(makers)
    assert {"gas", "gas, converted", "ClusterLoader", "PyG full batch"} <= set(case["seconds"])
    assert case["nodes"] == 600
    assert "| planted:600 | GCN 2x8, 6 / 2 | " in table
    assert case["not_measured"]
    assert all(f" {name} was not measured: " in table for name in case["not_measured"])


@pytest.mark.slow
def test_operators_that_have_goals_come_first(results, script, monkeypatch, tmp_path):
    """And are in the table of a run that is ended."""
    cases = []

    def measure(case, repeats, device, compiles):
        cases.append(case)
        if case[0] == "SAGEConv":
            raise KeyboardInterrupt
        return {"gas": {"forward": {"median": 0.1}, "both": {"median": 0.2}}}

    monkeypatch.setattr(script("operators"), "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        results("operators", "--nodes", "5000")
    kinds = [(operator, kind, width) for operator, kind, _, _, width in cases]
    products = [("spmm", kind, w) for kind in ("uniform", "hubs") for w in (16, 64, 256)]
    others = [
        (name, "uniform", w) for name in ("GATConv", "GATv2Conv", "GCNConv") for w in (64, 256)
    ]
    assert kinds == [*products, *others, ("SAGEConv", "uniform", 64)]
    assert (tmp_path / "operators.md").read_text().count("| 100.0 ms |") == len(cases) - 1


@pytest.mark.slow
def test_epoch_time_of_a_large_graph(results, script, monkeypatch):
    bench = script("epoch_time")
    assert bench.LARGE.dataset == "planted:2000000"
    monkeypatch.setattr(bench, "LARGE_QUICK", bench.Case("planted:700", 3, 16, 7, 2, 0.3))
    some = ["PyG full batch", "ClusterLoader"]
    found, table = results("epoch_time", "--large", "--repeats", "1", "--contenders", *some)
    assert list(found["cases"]["planted:700"]["seconds"]) == ["gas", *some]
    assert "| gas | PyG full batch | ClusterLoader |" in table
    assert found["cases"]["planted:700"]["edges"] > 20 * 700


@pytest.mark.slow
def test_io_overhead(results):
    found, table = results("io_overhead", "--seconds", "0.01")
    assert [case["store"] for case in found["cases"]] == ["host", "packed"]
    for case in found["cases"]:
        assert list(case["overhead"]) == ["serial", "concurrent", "expected", "prefetch"]
        assert case["row_bytes"] == 64
    assert "| host | float32 | 400 | 16 | 1 | there | 0.1 MiB | " in table


@pytest.mark.slow
def test_a_quick_io_overhead_that_is_ended(results, script, monkeypatch, tmp_path):
    bench, rows = script("io_overhead"), []

    def measure(*args):
        if rows:
            raise KeyboardInterrupt
        rows.append(1)
        return {"seconds": {"none": 1.0}, "overhead": {"serial": 0.5}}

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        results("io_overhead")
    found = json.loads((tmp_path / "io_overhead.json").read_text())
    assert [case["store"] for case in found["cases"]] == ["host"]
    assert "| +50 % |" in (tmp_path / "io_overhead.md").read_text()


def test_io_overhead_of_batches_that_a_loader_moves(script, tmp_path):
    bench = script("io_overhead")
    setting = bench.Setting("host", 16, "float32", 2.0, 50, "moved")
    model = bench.make_model(setting, "cpu", str(tmp_path))
    batches = bench.make_batches(50, 16, 2.0, 3, "fused")
    assert batches[0].data.adj_t.num_entries == 50 * 3 * 3
    assert batches[0].n_id.numel() == 150
    found = bench.measure(model, batches * 2, 0.01, None, bench.ON_DEVICE)
    assert list(found["overhead"]) == ["serial", "concurrent", "prefetch"]
    case = {**setting._asdict(), "row_bytes": 64, "batch_count": 8, **found}
    assert "The goal" not in bench.goal([case])
    pinned = {**case, "store": "pinned", "overhead": {"concurrent": 0.031}}
    beyond = {**pinned, "ratio": 3.0, "overhead": {"concurrent": 0.4}}
    assert "+3.1 % at most" in bench.goal([case, pinned, beyond])
    assert "| 2 | moved | " in bench.table_of([case])


def test_rows_of_a_device(script):
    bench = script("io_overhead")
    args = argparse.Namespace(
        quick=False, device="cuda", widths=[16], ratios=[0.0, 1.0], codecs=["float32", "int8"],
        stores=["device", "host"], nodes=[100],
    )  # fmt: skip
    rows = bench.settings_of(args)
    assert len(rows) == 2 * 3 * 2  # Stores; ratios and a codec; ways of batches.
    assert {row.batches for row in rows} == {"there", "moved"}
    args.quick = True
    assert {row.store for row in bench.settings_of(args)} == {"device", "pinned", "host", "disk"}


def test_bandwidth(results, script, monkeypatch):
    bench = script("bandwidth")
    monkeypatch.setitem(bench.TABLE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(bench.MOVED_BYTES, "cpu", 2**18)
    found, table = results("bandwidth", "--repeats", "1")
    assert len(found["cases"]) == 7
    assert all(speed > 0 for case in found["cases"] for speed in case["gb_per_s"].values())
    assert "| 512 | float32 | sorted | " in table
    speed = bench.measure_device("host", 128, "float32", False, 1, "cpu")
    assert len(bench.device_row_of(speed)) == len(bench.DEVICE_HEADER)
    speed = {"pull, ids there": 9.0, "copy in": 10.0}
    case = {"store": "pinned", "codec": "float32", "width": 128, "gb_per_s": speed}
    narrow = {**case, "width": 64, "gb_per_s": {**speed, "pull, ids there": 1.0}}
    assert ": 90% of a copy at least. The goal is 85%." in bench.goal([case, narrow])
    assert bench.goal([narrow]) == ""


@pytest.mark.slow
def test_memory(results, script, monkeypatch):
    bench = script("memory")
    monkeypatch.setattr(script("common"), "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(bench, "QUICK", (bench.Case("planted:500", 2, 8, 5, 2, 0.3),))
    monkeypatch.setattr(bench, "SMALL", bench.Case("planted:200", 2, 8, 5, 2, 0.3))
    monkeypatch.setattr(bench, "LEAST_STEPS", 4)
    sizes = ["--sizes", "500", "1000", "--ring-sizes", "500"]
    found, table = results("memory", *sizes)
    (depth,) = found["by_depth"]
    assert depth["methods"]["gas"]["edges_used"] == 1
    assert depth["methods"]["gas"]["history_bytes"] == 500 * 8 * 4
    assert depth["methods"]["ClusterLoader"]["edges_used"] < 1
    assert "peak_bytes" in depth["methods"]["gas full batch"]
    assert [size["settings"]["num_parts"] for size in found["by_size"]] == [2, 4, 2]
    assert "| planted:500 | cpu | 2 | " in table
    full, *others = found["process"]
    assert full["method"] == "gas full batch"
    assert [(one["settings"]["num_parts"], one["dtype"]) for one in others] == [
        (64, "float32"),
        (512, "float32"),
        (512, "bfloat16"),
    ]
    assert all(one["peak_bytes"] > 2**20 and one["epoch_seconds"] > 0 for one in found["process"])
    assert "| planted:500, 2 layers | 64 parts, 8 per batch, float32 | " in table


# As on a device: all that needs none of what its rows take ----------------------------------------


@pytest.fixture
def as_on_a_device(script, monkeypatch):
    """Let a script measure a device which is the CPU; return the script."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def pretend(name):
        bench = script(name)
        read = script("common").read_options

        def read_options(parser):
            args = read(parser)
            args.device = "cuda"
            return args

        monkeypatch.setattr(bench, "read_options", read_options)
        return bench

    return pretend


def here(make):
    """Return a function that makes a contender, or another object of a device, on the CPU."""
    return lambda case, graph, device="cpu": make(case, graph)


@pytest.mark.slow
def test_table_of_epochs(results, script, monkeypatch, as_on_a_device):
    bench, contenders = as_on_a_device("epoch_time"), script("contenders")
    small = contenders.Case("planted:600", 2, 8, 6, 2, 0.3)
    monkeypatch.setitem(bench.QUICK, "cuda", small)
    makers = {name: here(contenders.MAKERS[name]) for name in ("gas", "ClusterLoader")}
    monkeypatch.setattr(contenders, "DEVICE_MAKERS", {**makers, "broken": lambda: None})
    found, table = results("epoch_time", "--repeats", "2")
    assert found["device"] == "cuda"
    assert set(found["cases"]["planted:600"]["seconds"]) == set(makers)
    assert "| gas | ClusterLoader | broken |" in table
    assert "| not measured |" in table
    assert "busy" not in table


@pytest.mark.slow
def test_table_of_overheads(results, monkeypatch, as_on_a_device):
    bench = as_on_a_device("io_overhead")
    make_model = bench.make_model

    def on_host(setting, device, folder):
        return bench.gas.nn.fuse(make_model(setting._replace(store="host"), "cpu", folder))

    rows = [bench.Setting(store, 8, "float32", 1.0, 40) for store in ("pinned", "device")]
    rows.append(rows[0]._replace(batches="moved"))
    monkeypatch.setattr(bench, "make_model", on_host)
    monkeypatch.setattr(bench, "quick_settings", lambda args: rows)
    monkeypatch.setattr(bench.SubData, "to", lambda batch, *_, **__: batch)
    found, table = results("io_overhead", "--seconds", "0.01")
    assert [case["batches"] for case in found["cases"]] == ["there", "there", "moved"]
    assert found["degree"] == 60
    assert found["cases"][0]["batch_count"] == 16
    assert "| batch, io=none | serial | concurrent | prefetch |" in table
    assert "% at most. The goal is 5 %." in table


def test_table_of_bandwidths(results, monkeypatch, as_on_a_device):
    bench = as_on_a_device("bandwidth")
    on_device = bench.measure_device
    monkeypatch.setitem(bench.TABLE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(bench.MOVED_BYTES, "cpu", 2**18)

    def measure(store, *args):
        assert args[-1] == "cuda"
        return on_device("host", *args[:-1], "cpu")

    monkeypatch.setattr(bench, "measure_device", measure)
    found, table = results("bandwidth", "--repeats", "1")
    assert [case["store"] for case in found["cases"]] == ["device"] * 4 + ["pinned"] * 4 + [
        "host"
    ] * 4
    assert "| bytes of a row | stored as | index | store |" in table
    assert "| 2048 | float32 | random | pinned | " in table
    assert "The goal is 85%." in table


@pytest.mark.slow
def test_table_of_memory(results, script, monkeypatch, as_on_a_device):
    bench, contenders = as_on_a_device("memory"), script("contenders")
    for name, value in (("memory_allocated", 1024), ("max_memory_allocated", 2**20 + 1024)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for name, make in contenders.MAKERS.items():
        monkeypatch.setitem(bench.MAKERS, name, here(make))
    monkeypatch.setitem(bench.BY_SIZE, "gas", here(contenders.make_gas))
    monkeypatch.setattr(bench, "QUICK", (bench.Case("planted:500", 2, 8, 5, 2, 0.3),))
    monkeypatch.setattr(bench, "SMALL", bench.Case("planted:200", 2, 8, 5, 2, 0.3))
    monkeypatch.setattr(bench, "LEAST_STEPS", 4)
    found, table = results("memory", "--sizes", "500", "--ring-sizes", "500")
    assert found["by_depth"][0]["methods"]["gas"]["peak_bytes"] == 2**20
    assert "| planted:500 | cuda | 2 | 1.0 MiB, 100% | 1.0 MiB, 100% | " in table
    assert "| ring | 500 | cuda | 1.0 MiB | 1.00x | " in table


# On a device --------------------------------------------------------------------------------------


@pytest.mark.requires("cuda")
def test_epoch_time_on_a_device(results, script, monkeypatch):
    small = script("contenders").Case("planted:3000", 3, 16, 8, 2, 0.3)
    monkeypatch.setitem(script("epoch_time").QUICK, "cuda", small)
    makers = script("contenders").DEVICE_MAKERS
    monkeypatch.delitem(makers, "PyG full batch, compiled")  # Takes half a minute.
    found, _ = results("epoch_time", "--device", "cuda", "--repeats", "1")
    case = found["cases"]["planted:3000"]
    assert {*case["seconds"], *case["not_measured"]} == set(makers)
    missing = {name for name in makers if name.startswith(("NeighborLoader", "GraphSAINT"))}
    assert set(case["not_measured"]) <= missing
    assert found["machine"]["gpu"] is not None


@pytest.mark.requires("cuda")
def test_io_overhead_on_a_device(results, script, monkeypatch):
    bench = script("io_overhead")
    rows = [
        bench.Setting(store, 16, "float32", 1.0, 200, way)
        for store in ("device", "pinned", "host", "disk")
        for way in ("there", "moved")
    ]
    monkeypatch.setattr(bench, "quick_settings", lambda args: rows)
    found, table = results("io_overhead", "--device", "cuda", "--seconds", "0.01")
    assert [case["store"] for case in found["cases"]] == [row.store for row in rows]
    assert "Pinned, float32, up to 2 and concurrent: " in table


@pytest.mark.requires("cuda")
def test_bandwidth_on_a_device(results, script, monkeypatch):
    bench = script("bandwidth")
    monkeypatch.setitem(bench.TABLE_BYTES, "cuda", 2**22)
    monkeypatch.setitem(bench.MOVED_BYTES, "cuda", 2**20)
    found, table = results("bandwidth", "--device", "cuda", "--repeats", "1")
    assert {case["store"] for case in found["cases"]} == {"device", "pinned", "host"}
    assert "| 512 | float32 | random | pinned | " in table


@pytest.mark.requires("cuda")
def test_memory_on_a_device(results, script, monkeypatch):
    bench = script("memory")
    monkeypatch.setattr(bench, "QUICK", (bench.Case("planted:2000", 2, 64, 5, 2, 0.3),))
    monkeypatch.setattr(bench, "LEAST_STEPS", 4)
    found, _ = results("memory", "--device", "cuda", "--sizes", "2000", "--ring-sizes", "2000")
    (depth,) = found["by_depth"]
    features = 2000 * 64 * 4
    assert depth["methods"]["gas full batch"]["peak_bytes"] > 2 * features
    assert depth["methods"]["gas"]["peak_bytes"] > 0


# What they share ----------------------------------------------------------------------------------


def test_contenders_of_a_device(script):
    contenders = script("contenders")
    case = contenders.Case("planted:600", 2, 8, 6, 2, 0.3)
    graph = contenders.prepare("", case)
    for name, make in contenders.DEVICE_MAKERS.items():
        options = {}
        if isinstance(make, functools.partial):
            make, options = make.func, {**make.keywords}
        options.pop("store", None)  # Needs a device.
        if "workers" in options:
            options["workers"] = 0
        if "compiled" in name:
            options["backend"] = "eager"
        try:
            contender = make(case, graph, "cpu", **options)
        except ImportError:
            assert name.startswith(("NeighborLoader", "GraphSAINT"))
            continue
        before = [weight.clone() for weight in contender.model.parameters()]
        contender.epoch()
        after = contender.model.parameters()
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True)), name


def test_contenders_that_fail_when_they_train(script, monkeypatch, capsys):
    contenders = script("contenders")
    case = contenders.Case("planted:600", 2, 8, 6, 2, 0.3)
    graph = contenders.prepare("", case)

    def fails(case, graph, device):
        contender = contenders.make_full_batch(case, graph)
        return contender._replace(epoch=lambda: torch.empty(2**60))

    made = {"gas": lambda *_: contenders.make_gas(case, graph), "too large": fails}
    monkeypatch.setattr(contenders, "DEVICE_MAKERS", made)
    found, reasons = contenders.make_all(case, graph, "a device")
    assert list(found) == ["gas"]
    assert reasons["too large"].startswith("RuntimeError: ")
    assert re.fullmatch(r"gas: made in .* s, first epoch .* s\n", capsys.readouterr().err)


def test_communities_are_parts_without_metis(script):
    contenders = script("contenders")
    graph = contenders.prepare("", contenders.Case("planted:3000", 2, 8, 5, 1, 0.0))
    assert graph.ptr.tolist() == [0, 600, 1200, 1800, 2400, 3000]
    part = torch.bucketize(graph.data.edge_index, graph.ptr[1:], right=True)
    assert (part[0] == part[1]).float().mean() > 0.6
    assert graph.out_channels == 16
    assert 0.45 < graph.data.train_mask.float().mean() < 0.55


def test_rounds_end_when_a_device_has_done_everything(script, monkeypatch):
    common, log = script("common"), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))

    def clock():
        log.append("clock")
        return 0.0

    common.time_in_turn({"f": lambda: log.append("f")}, 1, 0, 2, clock=clock, device="cuda")
    assert log == ["wait", "clock", "f", "f", "wait", "clock"]
    log.clear()
    common.time_in_turn({"f": lambda: None}, 1, 0)
    assert log == []


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ([], "script"),
        (["--quick"], "script_quick"),
        (["--large", "--device", "cuda"], "script_large_cuda"),
        (["--quick", "--name", "mine"], "mine"),
    ],
)
def test_names_of_results(script, monkeypatch, args, name):
    common = script("common")
    parser = argparse.ArgumentParser()
    common.add_options(parser, "script")
    parser.add_argument("--large", action="store_true")
    monkeypatch.setattr(sys, "argv", ["script.py", *args])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert common.read_options(parser).name == name


def test_a_device_that_is_not_there(script, monkeypatch, capsys):
    common = script("common")
    parser = argparse.ArgumentParser()
    common.add_options(parser, "script")
    monkeypatch.setattr(sys, "argv", ["script.py", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        common.read_options(parser)
    assert "PyTorch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_time_to_accuracy(script, monkeypatch, tmp_path):
    module = script("time_to_accuracy")
    monkeypatch.setattr(module, "MOST_EPOCHS", 4)
    ways = {"corrected": (6, 2, {}), "as is": (6, 2, {"correct_drift": False})}
    monkeypatch.setattr(module, "CONTENDERS", ways)
    nets = {"SAGE": lambda *args, **kwargs: module.GraphSAGE(*args, **kwargs | {"dropout": 0.0})}
    monkeypatch.setattr(module, "MODELS", nets)
    of_pyg = ("PyG, full batch", "PyG, ClusterLoader")  # Others need torch-sparse.
    loaders = {name: module.OF_PYG[name] for name in of_pyg}
    monkeypatch.setattr(module, "OF_PYG", loaders)
    monkeypatch.setattr(module, "FROM_PAPERS", {})  # See test_from_papers.py.
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    name, case = str(tmp_path / "table"), "planted:600:SAGE:none:0.01"
    monkeypatch.setattr(sys, "argv", ["time_to_accuracy", "--name", name, "--cases", case])
    module.main()
    runs = json.loads((tmp_path / "table.json").read_text())["cases"][f"{case}:seed 0"]
    whole = runs["full batch"]
    assert len(whole["val"]) == 4
    assert runs["corrected"]["drift"][0] > 0
    at = whole["val"].index(max(whole["val"]))
    assert module.first_above(whole, whole["val"][at]) == at
    assert module.first_above(whole, 1.1) is None
    for contender in (*ways, *of_pyg):  # They have three times the time to the best.
        seconds = runs[contender]["seconds"]
        assert seconds[-1] >= 3 * whole["seconds"][at]
        assert all(each < 3 * whole["seconds"][at] for each in seconds[:-1])
    assert (
        "| planted:600 SAGE none 0.01 seed 0 | full batch | " in (tmp_path / "table.md").read_text()
    )
    assert (runs["corrected"]["steps"], whole["steps"]) == (3, 1)
    assert [runs[contender]["steps"] for contender in of_pyg] == [1, 8]
    whole, ours = runs["PyG, full batch"], runs["full batch"]  # Without dropout, the same steps.
    first = min(len(whole["loss"]), len(ours["loss"]))
    assert whole["loss"][:first] == pytest.approx(ours["loss"][:first], rel=1e-3)
    assert whole["val"][:first] == pytest.approx(ours["val"][:first], abs=0.02)
    train, trained = module.train, []
    monkeypatch.setattr(module, "train", lambda *args: trained.append(args[3]) or train(*args))
    module.main()
    assert not trained  # What is saved isn't measured again.
    monkeypatch.setattr(module, "CONTENDERS", {**ways, "another": (6, 3, {})})
    module.main()
    assert trained == [(6, 3, {})]
    another = [*sys.argv, "--contenders", "another", "--seconds", "0", "--epochs", "3"]
    another += ["--seed", "1"]
    monkeypatch.setattr(sys, "argv", another)
    module.main()
    runs = json.loads((tmp_path / "table.json").read_text())["cases"][f"{case}:seed 1"]
    assert [len(run["val"]) for run in runs.values()] == [3, 1]  # Seconds limit the second alone.


def test_time_to_accuracy_within_memory(script, monkeypatch, tmp_path):
    module = script("time_to_accuracy")
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    limits = []

    def run_apart(function, *arguments, initializer, initargs):
        assert initializer is module.limit_memory
        limits.append(initargs)
        if arguments[-2] == module.FULL:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if arguments[-2] == "PyG, full batch":
            raise RuntimeError("another error")
        return function(*arguments)

    monkeypatch.setattr(module, "run_apart", run_apart)
    name, case = str(tmp_path / "table"), "planted:600:SAGE:batch:0.01"
    options = ["--cases", case, "--memory", "0.5", "--seconds", "0", "--contenders"]
    monkeypatch.setattr(sys, "argv", ["_", "--name", name, *options, "histories"])
    module.main()
    assert limits == [(2**29,)] * 2
    runs = json.loads((tmp_path / "table.json").read_text())["cases"][f"{case}:seed 0"]
    assert runs["full batch"] == {"val": [], "test": [], "error": "out of memory"}
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "| full batch |" in lines[2]
    assert "| out of memory |" in lines[2]
    (ours,) = [line.split(" | ") for line in lines if "| histories |" in line]
    score, seconds = 100 * runs["histories"]["val"][0], runs["histories"]["seconds"][0]
    assert ours[1:7] == [  # Of itself, as there is no other.
        "histories", f"{seconds:.1f} s", ours[3], "", "8", f"{score:.1f}"
    ]  # fmt: skip
    assert f"{runs['histories']['peak'] / 2**30:.1f} GiB" in ours[-1]
    monkeypatch.setattr(sys, "argv", ["_", "--name", name, *options, "PyG, full batch"])
    with pytest.raises(RuntimeError, match="another error"):
        module.main()


@pytest.mark.slow
def test_allocators(script, monkeypatch, tmp_path):
    module = script("allocators")
    more = {"kept": {"MALLOC_MMAP_MAX_": "0"}, "absent": {"LD_PRELOAD": "no_such_library"}}
    monkeypatch.setattr(module, "ALLOCATORS", {"glibc": {}, **more})
    monkeypatch.setattr(module, "WAYS", {"histories": 512})
    options = ["--nodes", "2000", "--rounds", "1", "--name", str(tmp_path / "table")]
    monkeypatch.setattr(sys, "argv", ["allocators", *options])
    module.main()
    found = json.loads((tmp_path / "table.json").read_text())["found"]
    assert {way: [*runs] for way, runs in found.items()} == {"histories": ["glibc", "kept"]}
    (one,) = found["histories"]["kept"]
    assert 0 < one["seconds"] < 60
    assert 2**26 < one["peak"] < 2**32
    assert "| histories | glibc | " in (tmp_path / "table.md").read_text()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "no_script.py"))
    with pytest.raises(RuntimeError, match="no_script"):
        module.run("data", 2000, "histories", "glibc")


@pytest.mark.slow
def test_tuned_classics(script, monkeypatch, tmp_path):
    """Each contender has its own seconds, and a graph its loops; a second call runs nothing."""
    module = script("tuned_classics")
    settings = module.Settings(8, 2, 0.5, "batch", True, 0.01, 0.0, 4, "97.0 ± 0.1")
    for kind in ("GCN", "SAGE", "GAT"):
        monkeypatch.setitem(module.SETTINGS, f"planted:600:{kind}", settings)
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    cases = ["planted:600:GCN", "planted:600:SAGE", "planted:600:GAT"]
    name = str(tmp_path / "tuned")
    monkeypatch.setattr(sys, "argv", ["tuned_classics", "--cases", *cases, "--name", name])
    monkeypatch.setattr(module.time, "perf_counter", module.time.perf_counter)  # It is replaced.
    module.main()
    text = (tmp_path / "tuned.json").read_text()
    for runs in json.loads(text)["cases"].values():
        full, ours = (runs[each] for each in ("full batch", "histories"))
        assert len(full["val"]) == 4
        assert (full["parts"], full["steps"], ours["steps"]) == ("1 / 1", 1, 8)
        given = full["seconds"][module.best_of(full)]
        assert ours["seconds"][-1] >= given - 1e-4  # Rounded.
        assert all(second < given + 1e-4 for second in ours["seconds"][:-1])
    monkeypatch.setattr(module, "train", None)
    module.main()
    assert (tmp_path / "tuned.json").read_text() == text
    data, _ = module.read_with_loops("data", "planted:600", None)
    loops = (data.edge_index[0] == data.edge_index[1]).nonzero().view(-1)
    assert torch.equal(data.edge_index[0, loops].sort()[0], torch.arange(600))


@pytest.mark.slow
def test_grid(script, monkeypatch, tmp_path):
    times = script("time_to_accuracy")
    monkeypatch.setattr(times, "MOST_EPOCHS", 3)
    candidate = types.SimpleNamespace
    candidates = [  # The plan is the full batch, which histories are compared with.
        candidate(num_parts=1, batch_size=1, steps=1, relative_seconds=1),
        candidate(num_parts=6, batch_size=1, steps=6, relative_seconds=3),
        candidate(num_parts=6, batch_size=2, steps=3, relative_seconds=2),
    ]
    plan = types.SimpleNamespace(candidates=candidates)
    monkeypatch.setattr(gas, "plan", lambda *args, **kwargs: plan)
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    module = script("grid")
    options = ["--graphs", "planted:600", "--models", "SAGE", "--name", str(tmp_path / "grid")]
    monkeypatch.setattr(sys, "argv", ["grid", *options])
    clock = module.time.perf_counter
    module.main()
    assert module.time.perf_counter is clock
    cases = json.loads((tmp_path / "grid.json").read_text())["cases"]
    assert len(cases) == 2 * len(module.RATES)
    for norm, below in module.GOALS.items():
        cell = f"planted:600:SAGE:{norm}"
        rate = module.best_rate(cases, cell, "full batch")
        whole = cases[f"{cell}:{rate}"]["full batch"]
        best = max(max(cases[f"{cell}:{each}"]["full batch"]["val"]) for each in module.RATES)
        assert max(whole["val"]) == best
        given = 3 * whole["seconds"][module.best_of(whole)]
        for each in module.RATES:  # All get three times what the best rate took.
            ours = cases[f"{cell}:{each}"]["auto"]["seconds"]
            assert ours[-1] >= given - 1e-4  # Rounded.
            assert all(second < given + 1e-4 for second in ours[:-1])
        row, is_good, ratio = module.row_of(cases, cell)
        ours = cases[f"{cell}:{module.best_rate(cases, cell, 'auto')}"]["auto"]
        assert is_good == (max(ours["val"]) >= best - below)
        assert row[7] == "6 / 2"
        assert (ratio == math.inf) == (row[8] == "not reached")
    text = (tmp_path / "grid.md").read_text()
    assert "BatchNorm, the best less 0.5: " in text
    measure, measured = times.train, []
    monkeypatch.setattr(times, "train", lambda *args: measured.append(args) or measure(*args))
    module.main()
    assert not measured  # Finished runs aren't run again.


@pytest.mark.slow
def test_precompute(script, monkeypatch, tmp_path):
    module, name = script("precompute"), str(tmp_path / "table")
    options = ["--cases", "planted:600:GCN:6:2:8", "--epochs", "2", "--name", name]
    monkeypatch.setattr(sys, "argv", ["precompute", *options])
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    module.main()
    found = json.loads((tmp_path / "table.json").read_text())["cases"]["planted:600:GCN:6:2:8"]
    assert found["bytes"] == 600 * 8 * 4
    assert found["with"]["rounds"] == found["without"]["rounds"] == 2


@pytest.mark.slow
def test_baselines(script, monkeypatch, tmp_path):
    module, name = script("baselines"), str(tmp_path / "table")
    monkeypatch.setattr(module, "MOST_EPOCHS", 60)
    options = ["--graphs", "planted:600", "--seeds", "2", "--name", name]
    monkeypatch.setattr(sys, "argv", ["baselines", *options])
    module.main()
    found = json.loads((tmp_path / "table.json").read_text())["graphs"]["planted:600"]
    assert len(found["mlp"]) == 2
    y = module.read_graph("", "planted:600").y
    chance = float(y.bincount().max()) / y.numel()
    assert min(test for _, test in [*found["mlp"], found["propagation"]]) > chance + 0.1


@pytest.mark.slow
def test_staleness(script, monkeypatch, tmp_path):
    module, name = script("staleness"), str(tmp_path / "table")
    options = ["--graph", "planted:600", "--parts", "6", "2", "--epochs", "5", "--name", name]
    monkeypatch.setattr(sys, "argv", ["staleness", *options])
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    module.main()
    runs = json.loads((tmp_path / "table.json").read_text())["runs"]
    for norm, run in runs.items():
        assert [len(epoch) for epoch in run["errors"]] == [2] * 5
        assert min(min(epoch) for epoch in run["errors"]) > 0.001  # Rows are stale in each epoch.
        assert (max(run["fixed"]["errors"][-1]) < 1e-5) == (norm == "none")
    first = runs["none"]["errors"][0][0]
    assert f"| none | 1 | {first:.3f} | " in (tmp_path / "table.md").read_text()


@pytest.mark.requires("matplotlib")
def test_figures_have_the_numbers_of_the_results(script, monkeypatch, tmp_path):
    module, drawn = script("figures"), []
    close = module.plt.close
    monkeypatch.setattr(module.plt, "close", lambda figure: drawn.append(figure) or close(figure))
    runs = {
        "full batch": {"seconds": [1.0, 2.0, 3.0], "val": [0.5, 0.9, 0.8]},
        "64 parts": {"seconds": [0.5, 1.0], "val": [0.7, 0.88]},
        "no clipping": {"seconds": [0.5], "val": [0.7]},  # Not drawn.
    }
    cases = {"Cora:GCN:none:0.01:seed 0": runs, "Cora:SAGE:batch:0.01:seed 0": runs}
    cases["Cora:GAT:batch:0.01:seed 0"] = {"full batch": runs["full batch"]}  # Not drawn.
    load = module.load
    monkeypatch.setattr(
        module, "load", lambda name: {"cases": cases} if name == "time_to_accuracy" else load(name)
    )
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path / "images")])
    module.main()
    for name in module.FIGURES:
        assert "</svg>" in (tmp_path / f"images/{name}.svg").read_text()
    found = dict(zip(module.FIGURES, drawn, strict=True))
    panels = found["time_to_accuracy"].axes
    assert [panel.get_title() for panel in panels] == [
        "Cora, GCN, no norm, lr 0.01", "Cora, SAGE, BatchNorm, lr 0.01",
    ]  # fmt: skip
    full, parts, target = panels[0].get_lines()
    assert full.get_xydata().tolist() == [[1.0, 0.5], [2.0, 0.9], [3.0, 0.8]]
    assert parts.get_label() == "64 parts"
    assert target.get_ydata()[0] == 0.9 - 0.005
    assert panels[0].get_xlim() == (0, 2.4)
    (curve,) = found["scale"].axes[0].get_lines()
    edges = [each["edges"] / 1e6 for each in load("hundred_million")["results"]]
    assert curve.get_xdata().tolist() == edges
    histories = found["memory"].axes[0].get_lines()[-1]
    of_cpu = [each for each in load("memory")["by_depth"] if each["device"] == "cpu"]
    deepest = of_cpu[-1]["methods"]["gas"]
    held = deepest["peak_bytes"] + deepest["history_bytes"]
    assert histories.get_ydata()[-1] == held / 2**20


def test_measured_tables_are_written_by_the_script():
    """Pages on performance have no typed measurements, but one that no script measures."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]
    typed = set()
    for page in pages:
        text = re.sub(r"<!-- table .*?<!-- end of table -->", "", page.read_text(), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            if len(re.findall(r"\d (?:s|ms|MiB|GiB)\b|\d\.\d+x", table)) > 3:
                typed.add(page.name)
    assert typed <= {"cpu-contention.md"}


def test_tables_of_pages_are_those_of_the_results(script, tmp_path, monkeypatch):
    module = script("tables")
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    module.main()
    names = [name for page in module.PAGES for _, name, _ in module.TABLE.findall(page.read_text())]
    assert set(names) == set(module.TABLES)
    page = tmp_path / "page.md"
    old = (module.ROOT / "README.md").read_text().replace("10.6 GiB", "9.6 GiB")
    page.write_text(old)
    monkeypatch.setattr(module, "PAGES", [page])
    with pytest.raises(SystemExit, match="page.md differ from the results"):
        module.main()
    monkeypatch.setattr(sys, "argv", ["tables"])
    module.main()
    assert page.read_text() == (module.ROOT / "README.md").read_text()


@pytest.mark.parametrize(("sets", "low", "high"), [(6, 1, 6), (9, 2, 8), (24, 7, 18)])
def test_the_interval_of_a_median(script, sets, low, high):
    """By ranks, as tables of the binomial distribution have them."""
    versions = script("versions")
    ratios = [float(rank) for rank in range(sets, 0, -1)]
    assert versions.median_of(ratios) == ((sets + 1) / 2, low, high)
    with pytest.raises(SystemExit, match="are too few for an interval: take 6 or more"):
        versions.median_of(ratios[:5])


def test_a_regression_is_a_whole_interval_above_the_limit(script):
    versions = script("versions")
    ratios = {
        "slower": [1.04, 1.05, 1.06, 1.03, 1.05, 1.04],
        "unclear": [0.9, 1.05, 1.06, 1.03, 1.05, 1.04],
        "equal": [1.0] * 6,
    }
    assert versions.slower_cases(ratios, 1.02) == ["slower"]
    assert versions.slower_cases(ratios, 1.1) == []
