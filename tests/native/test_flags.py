"""Arguments that are truth values, which texts aren't."""

import inspect
import pickle

import numpy as np
import pytest
import torch

import gas
from gas.native import check_flags


@check_flags
def read(path: str, check: bool = True, *, log: bool | None = None, fast: "bool" = False) -> tuple:
    """Read a file."""
    return path, check, log, fast


@check_flags
def add(x: int, *others: int, log: bool = False) -> int:
    return sum(others, x)


NO_FLAGS = ["no", "", None, 2, 0.0, [], torch.ones(2), torch.ones(2, dtype=torch.bool)]


@pytest.mark.parametrize("value", NO_FLAGS)
def test_what_is_no_truth_value_is_refused(value):
    with pytest.raises(ValueError, match=r"'check' is .*, expected True or False"):
        read("a", value)
    with pytest.raises(ValueError, match=r"'fast' is .*, expected True or False"):
        read("a", fast=value)


@pytest.mark.parametrize("value", [True, False, np.bool_(True), 0, 1, torch.tensor(True)])
def test_truth_values_are_passed_on(value):
    assert read("a", value, fast=value) == ("a", value, None, value)
    assert read(check=value, path="a", log="other types aren't checked")[1] is value


def test_arguments_before_a_keyword_are_others():
    assert add(1, 2, 3) == 6
    with pytest.raises(ValueError, match="'log' is 2"):
        add(1, log=2)


def test_a_function_stays_what_it_was():
    assert read.__name__ == "read"
    assert read.__doc__ == "Read a file."
    assert list(inspect.signature(read).parameters) == ["path", "check", "log", "fast"]
    assert pickle.loads(pickle.dumps(read)) is read


def is_checked(function):
    """Return whether texts are refused for its truth values, if it has any."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation in (bool, "bool")]
    return not names or hasattr(function, "__wrapped__")


@pytest.mark.parametrize("name", sorted({*gas.__all__} - {"drop_edges"}))
def test_public_functions_check_their_truth_values(name):
    """``drop_edges`` runs in every step; models' calls do, too."""
    found = getattr(gas, name)
    if inspect.isclass(found):
        assert is_checked(found.__init__)
    elif callable(found):
        assert is_checked(found)


@pytest.mark.parametrize("name", gas.models.__all__)
def test_models_check_their_truth_values(name):
    assert is_checked(getattr(gas.models, name).__init__)


class Scaled(gas.ScalableGNN):
    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale


class ScaledGCN(gas.models.GCN, Scaled):
    pass


def test_models_pass_arguments_on_to_other_bases_of_a_class():
    model = ScaledGCN(4, 2, 3, 2, num_layers=2, scale=2.0)
    assert (model.scale, model.in_channels) == (2.0, 2)
    with pytest.raises(ValueError, match=r"'size' is no argument of gas\.models\.GCN"):
        ScaledGCN(4, 2, 3, 2, num_layers=2, size=2.0)
