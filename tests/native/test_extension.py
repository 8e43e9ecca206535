import warnings

import pytest

from gas.native.extension import openmp_runtimes, warn_of_second

MAPS = """\
7f10-7f20 r-xp 00000000 08:01 17   /env/torch/lib/libgomp.so.1
7f20-7f30 r--p 00001000 08:01 17   /env/torch/lib/libgomp.so.1
7f30-7f40 r-xp 00000000 08:01 18   /env/a folder/libiomp5.so
7f40-7f50 r-xp 00000000 08:01 19   /env/lib/libcomposite.so.1
7f50-7f60 r-xp 00000000 08:01 20   /env/scikit.libs/libgomp-a34b3233.so.1.0.0
7f60-7f70 rw-p 00000000 00:00 0
"""


def test_runtimes_are_the_files_that_are_mapped(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert openmp_runtimes(str(maps)) == {
        "/env/torch/lib/libgomp.so.1",
        "/env/a folder/libiomp5.so",
        "/env/scikit.libs/libgomp-a34b3233.so.1.0.0",
    }
    assert openmp_runtimes(str(tmp_path / "none")) == set()


def test_a_second_runtime_is_named_with_the_cure():
    with pytest.warns(RuntimeWarning, match="/a/libgomp.so.1, beside /b/libiomp5.so .*CMAKE_ARGS"):
        warn_of_second({"/b/libiomp5.so"}, {"/b/libiomp5.so", "/a/libgomp.so.1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_second({"/b/libiomp5.so"}, {"/b/libiomp5.so"})
        warn_of_second(set(), {"/a/libgomp.so.1"})


@pytest.mark.requires("native")
def test_the_extension_shares_the_runtime_of_torch():
    assert len(openmp_runtimes()) == 1
