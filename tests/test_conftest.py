"""Selection of tests: ``slow`` ones are left out of a bare ``pytest``, and of nothing else."""

import pytest
from conftest import ROOT

pytest_plugins = ["pytester"]
TESTS = """
import pytest

def test_fast():
    pass

@pytest.mark.slow
@pytest.mark.requires("poison")
def test_slow():
    pass
"""


CASES = """
import pytest

@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("number", range(7))
def test_cases(number):
    assert number in (0, 3, 5)
"""


@pytest.fixture(autouse=True)
def requirements_of_this_run(monkeypatch):
    """Unset the list of CI, which names ``../shared/data``: the tests below run elsewhere."""
    monkeypatch.delenv("GAS_TEST_EXPECT", raising=False)


def run(pytester, tests, *arguments):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    folder = pytester.mkdir("tests")
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_two.py").write_text(tests)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], 1),
        (["-x"], 1),
        (["--all"], 2),
        (["tests"], 2),
        (["tests/test_two.py::test_slow"], 1),
        (["-k", "test_slow"], 1),
        (["-m", "slow"], 1),
        (["tests", "-m", "not slow"], 1),
        (["--requiring", "poison"], 1),
        pytest.param(["-n", "1", "tests"], 2, marks=pytest.mark.slow),  # Imports PyTorch.
    ],
)
@pytest.mark.requires("poison")
def test_slow_tests_run_when_they_are_chosen(pytester, arguments, chosen):
    run(pytester, TESTS, *arguments).assert_outcomes(passed=chosen)


@pytest.mark.parametrize(
    ("arguments", "failed"), [([], 0), (["tests", "-m", "not slow"], 0), (["--all"], 4)]
)
def test_fast_cases_are_spread(pytester, arguments, failed):
    run(pytester, CASES, *arguments).assert_outcomes(passed=3, failed=failed)
