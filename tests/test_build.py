"""For which GPUs the extension is compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


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
