"""The way of a row is short: how many files and classes of gas a push and a pull pass."""

import sys

import pytest
import torch

import gas
from gas.history.rows import BatchPulls

PUSH = {"history/history.py", "history/transfer.py", "native/transfer.py"}
PULL = PUSH | {"history/rows.py", "native/checks.py"}


def passed(function):
    """Return the files of gas, and the classes whose methods run, in a call of a function."""
    files, classes = set(), set()

    def note(frame, event, arg):
        file = frame.f_code.co_filename.replace("\\", "/")
        if event == "call" and "/gas/" in file:
            files.add(file.rpartition("/gas/")[2])
            if "self" in frame.f_locals:
                classes.add(type(frame.f_locals["self"]).__name__)

    function()  # What is done once is not of interest.
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files, classes


@pytest.fixture
def history():
    made = gas.History(1000, 64)
    made.push(torch.randn(1000, 64))
    return made


def test_a_push_passes_three_files_and_four_classes(history):
    """``History.push`` checks, ``HostLink.push`` makes a ``Job``, the engine runs it."""
    x, offset, count = torch.randn(100, 64), torch.tensor([100]), torch.tensor([100])
    files, classes = passed(lambda: history.push(x, None, offset, count))
    assert files <= PUSH
    assert len(classes) <= 4, classes


def test_a_pull_passes_five_files(history):
    """``BatchPulls`` asks ``History``, and that its link, for a ``Pull`` of memory of the pool."""
    n_id, own = torch.arange(300), torch.randn(100, 64)
    files, _ = passed(lambda: BatchPulls([history], 100, n_id).tensor(history, own))
    assert files <= PULL


def test_a_read_in_place_passes_four_classes(history):
    n_id, own = torch.arange(300), torch.randn(100, 64)
    files, classes = passed(lambda: BatchPulls([], 100, n_id).rows(history, own))
    assert files <= PULL
    assert len(classes) <= 4, classes
