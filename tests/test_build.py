"""For which GPUs the extension is compiled; names, versions and wheels of the distribution."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import pytest
import smoke
import yaml
from conftest import ROOT

import gas

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # Of pytest.

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEELS = PYPROJECT["tool"]["cibuildwheel"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/refusals/*.txt")]
TEXTS += [
    path for name in ("gas", "examples", "benchmarks") for path in ROOT.glob(f"{name}/**/*.py")
]
TEXTS += [ROOT / "Makefile", ROOT / ".ci" / "run", *WORKFLOWS]


# CUDA ---------------------------------------------------------------------------------------------


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Configure a build on a machine whose GPUs have some capabilities; what CMake says."""
    cmake = Path(sys.executable).with_name("cmake")
    command = [str(cmake) if cmake.exists() else shutil.which("cmake"), "-S", str(ROOT)]
    command += ["-B", str(tmp_path / "build"), "-DGAS_BUILD_MODULE=OFF"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(capabilities):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
        tool.chmod(0o700)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("-- gas: CUDA "))
        return line.removeprefix("-- gas: CUDA ")

    return run


@pytest.mark.parametrize("said", ["", "No devices were found", "N/A"])
def test_no_device(configure, said):
    assert configure(said).startswith("OFF ")


@pytest.mark.slow
@pytest.mark.requires("nvcc")
def test_the_devices_that_are_there(configure):
    assert configure(r"8.6\n9.0\n8.6\n").startswith("ON 86;90 ")


# Names and versions -------------------------------------------------------------------------------


def test_one_version():
    released = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0] == (cited["version"], str(cited["date-released"]))
    assert cited["version"] == gas.__version__ == check_wheel.read_version()
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "gas.__version__"}}


def test_old_names_have_time_left():
    """Every warning of an old name gives the version that removes it, a later one than this."""
    now = tuple(map(int, re.match(r"(\d+)\.(\d+)", gas.__version__).groups()))
    found = 0
    for path in (ROOT / "gas").rglob("*.py"):
        text = " ".join(re.sub(r'"\n\s+"', "", path.read_text()).split())
        assert "next release" not in text, path
        for major, minor in re.findall(r"(?:until|away in) version (\d+)\.(\d+)", text):
            assert now < (int(major), int(minor)), f"{path} has names to be removed in this version"
            found += 1
    assert found >= 7


def test_installs_by_the_name_of_the_distribution():
    assert PYPROJECT["project"]["name"] == "gas-gnn"
    extras = PYPROJECT["project"]["optional-dependencies"].keys()
    named = set()
    for path in TEXTS:
        text = path.read_text()
        assert not re.search(r"(?<![\w.-])gas\[[a-z]+\]", text), path
        named |= set(re.findall(r"(?:gas-gnn|'\.)\[([a-z]+)\]", text))
    assert named <= extras
    described = re.findall(
        r"^\| `(\w+)` \| ([\w, -]+) \|", (ROOT / "docs/installation.md").read_text(), re.M
    )
    packages = {name: packages.split(", ") for name, packages in described}
    assert packages == PYPROJECT["project"]["optional-dependencies"]


# Wheels -------------------------------------------------------------------------------------------


def test_every_python_has_a_wheel():
    built = [re.fullmatch(r"cp3(\d+)-\*", each)[1] for each in WHEELS["build"]]
    classifiers = PYPROJECT["project"]["classifiers"]
    assert built == re.findall(r"Python :: 3\.(\d+)", " ".join(classifiers))
    assert PYPROJECT["project"]["requires-python"] == f">=3.{built[0]}"


def test_wheels_are_for_the_cpu():
    """The environment of a platform replaces the general one."""
    for table in (WHEELS, WHEELS["macos"]):
        assert table["environment"]["GAS_WITH_CUDA"] == "OFF"
    assert "--exclude libgomp.so.1" in WHEELS["linux"]["repair-wheel-command"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_is_there(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    commands += [WHEELS["test-command"].replace("{project}/", "")]
    for path in re.findall(r"(?:tests|\.ci)/[\w.]+", " ".join(commands)):
        assert (ROOT / path).exists(), path
    for job in jobs.values():
        needs = job.get("needs", [])
        assert {needs} <= jobs.keys() if isinstance(needs, str) else set(needs) <= jobs.keys()


def test_the_oldest_versions_are_tried():
    job = (ROOT / ".github/workflows/wheels.yml").read_text().partition("  oldest:")[2]
    required = dict(
        each.split(">=") for each in PYPROJECT["project"]["dependencies"] if ">=" in each
    )
    for name in ("torch", "torch-geometric"):
        assert f'"{name}=={required[name]}.*"' in job
    assert f'python-version: "{PYPROJECT["project"]["requires-python"].removeprefix(">=")}"' in job


def make_wheel(
    folder, name="gas_gnn-1.5-cp311-cp311-linux_x86_64.whl", size=0, without=(), also=()
):
    """Write a package of two modules, and a wheel of it with changes."""
    package = folder / "gas"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1.5"')
    (package / "loop.py").write_text("")
    names = {"gas/__init__.py", "gas/loop.py", "gas/py.typed", "gas/_C.so"}
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for each in sorted((names - {*without}) | {*also, "gas_gnn-1.5.dist-info/METADATA"}):
            wheel.writestr(each, bytes(size))
    return folder / name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"name": "gas-1.5-any.whl"}, ["its name doesn't begin with gas_gnn-1.5"]),
        ({"without": ["gas/_C.so"]}, ["it has 0 extensions, expected gas/_C"]),
        ({"without": ["gas/loop.py"]}, ["it lacks gas/loop.py"]),
        ({"also": ["gas/stale.py"]}, ["it has also gas/stale.py"]),
        ({"also": ["gas_gnn.libs/libgomp.so.1"]}, ["it has also gas_gnn.libs/libgomp.so.1"]),
    ],
)
def test_content_of_wheels(tmp_path, change, expected):
    assert check_wheel.find_problems(make_wheel(tmp_path, **change), tmp_path) == expected


def test_size_of_wheels(tmp_path, capsys):
    wheel = make_wheel(tmp_path, size=check_wheel.LIMIT // 5)
    (problem,) = check_wheel.find_problems(wheel, tmp_path)
    assert re.fullmatch(r"it has 50\d+ bytes, expected at most 5000000", problem)
    assert check_wheel.main([str(wheel)]) == 1
    assert check_wheel.main([]) == 1
    assert str(wheel) in capsys.readouterr().out


@pytest.mark.requires("native")
def test_smoke(capsys):
    smoke.main()
    assert capsys.readouterr().out.startswith(f"gas {gas.__version__}, PyTorch ")
