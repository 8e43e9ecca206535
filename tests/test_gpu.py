"""benchmarks/gpu.py: its limits, going on, failures and summary, with steps that only print."""

import dataclasses
import json
import runpy
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, no_sync

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    name = "gpu_benchmark"  # Dataclasses look their module up.
    sys.modules[name] = SimpleNamespace()
    found = runpy.run_path(str(SCRIPT), run_name=name)
    del sys.modules[name]
    return SimpleNamespace(**found)


@pytest.fixture
def take(gpu, tmp_path, capsys):
    """Take steps of Python code, by name; the exit status, and what each wrote."""

    def run(codes, sources="a", again=(), only=(), minutes=None, **changes):
        todo = [
            dataclasses.replace(
                gpu.Step(name, 30, ((sys.executable, "-c", code),)),
                after=None if name == "build" else "build",
                **changes.get(name, {}),
            )
            for name, code in codes.items()
        ]
        status = gpu.run(todo, tmp_path, sources, "a machine", again, only, minutes)
        return status, capsys.readouterr().out

    return run


def outcomes(folder):
    record = json.loads((folder / "steps.json").read_text())
    return {name: step["outcome"] for name, step in record.items()}


APPEND = "open({!r}, 'a').write({!r})"


@pytest.fixture
def steps(tmp_path):
    """Steps that say in a file that they were taken; the second one fails."""
    file = str(tmp_path / "taken")
    names = ("build", "tests", "memory")
    codes = {name: APPEND.format(file, f"{name} ") for name in names}
    codes["tests"] += "; print('what was wrong'); raise SystemExit(3)"
    return codes, tmp_path / "taken"


def test_a_failure_is_said_and_stops_nothing_else(take, steps, tmp_path):
    codes, taken = steps
    status, out = take(codes)
    assert status == 1
    assert taken.read_text() == "build tests memory "
    assert outcomes(tmp_path) == {"build": "ok", "tests": "failed, exit status 3", "memory": "ok"}
    assert "what was wrong" in out
    assert "what was wrong" in (tmp_path / "tests.log").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert "| tests | 30 | 0 | failed, exit status 3 |" in summary
    assert "Machine: a machine; sources a" in summary


def test_what_is_done_is_not_done_again(take, steps):
    codes, taken = steps
    take(codes, only=["build"])
    assert taken.read_text() == "build "
    take(codes)
    assert taken.read_text() == "build tests memory "
    status, out = take(codes)
    assert taken.read_text() == "build tests memory "
    assert status == 1  # One had failed.
    assert "tests: failed, exit status 3, before" in out
    take(codes, again=["tests"])
    assert taken.read_text() == "build tests memory tests "
    take(codes, sources="b")
    assert taken.read_text() == "build tests memory tests build tests memory "


def test_nothing_follows_a_build_that_failed(take, steps, tmp_path):
    codes, taken = steps
    status, _ = take({**codes, "build": "raise SystemExit(1)"})
    assert status == 1
    assert not taken.exists()
    assert outcomes(tmp_path)["memory"] == "not run: no build of these sources"
    take(codes)  # And is tried again.
    assert taken.read_text() == "build tests memory "
    _, out = take(codes, sources="b", only=["memory"])
    assert "not run: no build of these sources" in out


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_stopped_with_all_its_processes(take, tmp_path, gpu):
    child = "import time; time.sleep(60)"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
time.sleep(60)
"""
    start = time.monotonic()
    codes = {"build": "", "slow": code, "next": ""}
    status, _ = take(codes, slow={"seconds": 1.0})
    assert time.monotonic() - start < 20
    assert status == 1
    assert outcomes(tmp_path) == {"build": "ok", "slow": "stopped after 1 s", "next": "ok"}
    lines = (tmp_path / "slow.log").read_text().splitlines()
    pid = int(next(line for line in lines if line.isdigit()))
    for _ in range(100):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        )
        if not state.stdout.strip() or state.stdout.startswith("Z"):
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} is left")
    _, out = take({**codes, "slow": ""})  # It has no result yet.
    assert "slow: ok" in out
    assert "next: ok, before" in out


@pytest.mark.slow
def test_steps_share_the_time_there_is(take, tmp_path):
    take({"build": "", "later": ""}, minutes=0.0)
    assert outcomes(tmp_path) == {
        "build": "not run: no time was left",
        "later": "not run: no build of these sources",
    }
    take({"build": "import time; time.sleep(60)"}, minutes=0.03)
    assert outcomes(tmp_path)["build"] == "stopped after 2 s"


def test_what_is_missing_is_said(take, tmp_path):
    changes = {"memcheck": {"program": "no-such-program"}, "memory": {"refused": "no reason"}}
    status, _ = take(dict.fromkeys(("build", "memcheck", "memory"), ""), **changes)
    assert status == 1
    assert outcomes(tmp_path) == {
        "build": "ok",
        "memcheck": "not run: no-such-program is missing",
        "memory": "not run: no reason",
    }


def test_tables_stand_in_the_summary(take, tmp_path):
    code = f"open({str(tmp_path / 'memory.md')!r}, 'w').write('| a table |')"
    take({"build": "", "memory": code})
    assert "## memory\n\n| a table |" in (tmp_path / "summary.md").read_text()


def test_sources_tell_results_apart(gpu, tmp_path, monkeypatch):
    names = gpu.digest.__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    (tmp_path / "CMakeLists.txt").write_text("")
    (tmp_path / "gas").mkdir()
    file = tmp_path / "gas" / "a.py"
    file.write_text("1")
    first = gpu.digest(False)
    assert gpu.digest(False) == first != gpu.digest(True)
    file.with_suffix(".pyc").write_text("2")
    assert gpu.digest(False) == first
    file.write_text("3")
    assert gpu.digest(False) != first


# The steps themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_built", [False, True])
def test_a_rehearsal_replaces_no_extension(gpu, tmp_path, monkeypatch, is_built):
    (tmp_path / "gas").mkdir()
    if is_built:
        (tmp_path / "gas" / "_C.so").touch()
    monkeypatch.setitem(gpu.build.__globals__, "ROOT", tmp_path)
    (configure, *_) = gpu.build({}, True, sys.executable).commands
    assert (f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={tmp_path / 'gas'}" in configure) != is_built


@pytest.mark.parametrize("rehearse", [False, True])
def test_steps(gpu, tmp_path, rehearse):
    todo = {s.name: s for s in gpu.steps({"capability": "90"}, tmp_path, rehearse)}
    assert list(todo) == ["build", "tests", "memcheck", "racecheck", *gpu.BENCHMARKS]
    configure = " ".join(todo["build"].commands[0])
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in configure
    assert (f"OUTPUT_DIRECTORY={ROOT / 'gas'}" in configure) or rehearse  # In place.
    for name in ("tests", "memcheck", "racecheck"):
        (command,) = todo[name].commands
        assert "tests/history/test_cuda.py" in command
        assert ("--rehearse" in command) == rehearse
        assert ("GAS_TEST_EXPECT" in todo[name].environment) != rehearse  # Nothing is skipped.
    (sanitized,) = todo["racecheck"].commands
    assert (sanitized[:3] == ["compute-sanitizer", "--tool", "racecheck"]) != rehearse
    assert ("--kernel-name" in sanitized) != rehearse  # Until 2023.3 it was --kernel-regex.
    for name, (_, script, *given) in gpu.BENCHMARKS.items():
        ((_, _, *options),) = todo[name].commands
        assert options[:2] == ["--device", "cpu" if rehearse else "cuda"]
        assert options[2:4] == ["--name", str(tmp_path / name)]
        assert options[4:] == list(given[rehearse])
        shares_costs = todo[name].environment == todo["costs"].environment
        assert shares_costs == (name != "operators")  # Which are compared with PyTorch's.
        source = (ROOT / "benchmarks" / script).read_text()
        if "add_options(" in source:  # Which has the options of all.
            named = [option for option in options[4:] if option.startswith("--")]
            assert all(f'"{option}"' in source for option in named if option != "--quick")


@pytest.mark.parametrize("make", [None, "/usr/bin/make"])
def test_ninja_builds_where_make_is_missing(gpu, monkeypatch, make):
    monkeypatch.setattr("shutil.which", lambda name, path=None: make if name == "make" else name)
    configure = gpu.build({}, False, "python3").commands[0]
    assert (configure[-2:] == ["-G", "Ninja"]) == (make is None)


@pytest.mark.slow
def test_the_tests_for_sanitizers_are_found(gpu, tmp_path):
    (step,) = (s for s in gpu.steps({}, tmp_path, True) if s.name == "memcheck")
    other = [part for part in step.commands[0] if part.startswith("tests/") and "/nn/" not in part]
    command = [part for part in step.commands[0] if part not in other]  # Which takes long.
    command.append("--collect-only")
    done = subprocess.run(
        command, cwd=ROOT, env=gpu.environment(step), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_equals_the_cpu_twice[hub rows-3-full]" in done.stdout
    assert "test_equals_the_cpu_twice[many rows" not in done.stdout


def test_without_a_device(monkeypatch, capsys, gpu):
    names = gpu.main.__globals__
    monkeypatch.setitem(names, "look", lambda: {"device": None, "torch": "2", "cuda": None})
    for arguments, message in (
        ([], "there is no CUDA device; --rehearse takes"),
        (["--rehearse", "--only", "tests", "nothing"], "there is no step 'nothing', expected some"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            gpu.main()
        assert message in f"{stopped.value} {capsys.readouterr().err}"


def test_no_sync_ends_with_its_block(monkeypatch):
    """Whatever went wrong in it, and although PyTorch says that it is a prototype."""
    modes = [0]

    def set_mode(mode):
        warnings.warn("a prototype feature", UserWarning, stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def waits():
        with no_sync():
            assert modes == [0, "error"]
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="called a synchronizing"):
        waits()
    assert modes == [0, "error", 0]
