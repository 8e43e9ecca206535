"""Reads of uninitialised memory are noticed: see ``conftest.py``."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import gas

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8]


@pytest.mark.requires("poison")
@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_new_tensors(size, dtype):
    like = torch.zeros(size, dtype=dtype)
    # Where tests run in the first process, its thread's cache gives back up to seven small pieces
    # of memory as they were.
    repeats, spared = (10, 7) if size <= 1000 else (1, 0)
    for _ in range(2):  # Also where memory is used again.
        some = []
        for _ in range(repeats):
            some += torch.empty(size, dtype=dtype), torch.empty_like(like), like.new_empty(size)
        poisoned = [(new.isnan() if dtype.is_floating_point else new == -1).all() for new in some]
        assert sum(poisoned) >= len(some) - spared
        for new in some:
            new.zero_()
        del new, some
    assert not like.any()


@pytest.mark.requires("poison")
def test_new_arrays():
    assert np.isnan(np.empty(10**5)).all()
    assert not np.zeros(10**5).any()


@pytest.mark.requires("poison")
def test_a_row_that_an_operator_forgets():
    out = torch.empty(100, 8)
    torch.index_select(torch.ones(50, 8), 0, torch.arange(50), out=out[:50])
    assert out[:50].sum() == 400
    assert out.sum() != 400


@pytest.mark.slow
@pytest.mark.requires("poison")
def test_programs_under_test():
    code = "import torch; print(float(torch.empty(1000).min()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 1e38


def test_buffers():
    pool = gas.native.BufferPool()
    for rows in (1, 10**5):
        for _ in range(2):
            assert (pool.allocate(rows, 4, torch.float32) == torch.finfo(torch.float32).max).all()
            assert (pool.allocate(rows, 4, torch.int64) == torch.iinfo(torch.int64).max).all()
