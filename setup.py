"""Builds the extension ``gas._C`` with CMake. Everything else is in ``pyproject.toml``.

Build options are environment variables:

* ``GAS_WITH_CUDA=AUTO|ON|OFF``: compile the CUDA sources for the GPUs of this machine, if there are
  some and nvcc is found (default: ``AUTO``); for every GPU that is supported; not at all.
* ``CMAKE_ARGS``: further arguments for CMake, such as ``-DCMAKE_CUDA_ARCHITECTURES=90``.
"""

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# A build never reads what an earlier one left behind: neither CMake's cache, which may belong to
# another Python or compiler, nor modules that have been deleted since.
SCRATCH = tempfile.mkdtemp(prefix="gas-build-")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


class CMakeBuild(build_ext):
    """Builds every extension with the project's CMakeLists.txt."""

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(tempfile.mkdtemp(dir=SCRATCH))
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DGAS_WITH_CUDA={os.environ.get('GAS_WITH_CUDA', 'AUTO')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(configure, check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)
        if not library.exists():
            raise RuntimeError(f"CMake ended without error, but {library} is missing")


setup(
    ext_modules=[Extension("gas._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"build": {"build_base": SCRATCH}},
)
