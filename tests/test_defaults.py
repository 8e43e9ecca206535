"""Defaults in docstrings equal those of signatures."""

import importlib
import inspect
import pkgutil
import re

import pytest

import gas

MODULES = [gas.__name__] + [
    module.name
    for module in pkgutil.walk_packages(gas.__path__, "gas.")
    if not module.name.endswith("._C")
]


def described(module):
    """Public classes, methods and functions."""
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__ or name.startswith("_"):
            continue
        yield name, thing
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(function):
                yield f"{name}.{method}", function


def defaults_in(doc):
    """Arguments, and the default that the description of each ends with."""
    for argument in re.finditer(r"^ +(\w+): (.+?)(?=^ +\**\w+: |\n\n|\Z)", doc, re.M | re.S):
        found = re.search(r"\(default:\s+``([^`]+)``[);]", argument[2])
        if found:
            yield argument[1], found[1]


@pytest.mark.parametrize("name", MODULES)
def test_defaults(name):
    for owner, thing in described(importlib.import_module(name)):
        wanted = dict(defaults_in(inspect.getdoc(thing) or ""))
        parameters = inspect.signature(thing).parameters if wanted else {}
        for argument in wanted.keys() & parameters.keys():
            default = parameters[argument].default
            if default is not None or wanted[argument] == "None":  # None stands for many things.
                found = repr(default).replace("'", '"')
                assert found == wanted[argument], f"{owner}: {argument}"


def test_descriptions_are_understood():
    doc = """
    Args:
        one: First. (default: ``1``)
        two: Second, on
            two lines.
            (default: ``"a b"``; more)
        three: Third. (default: those of ``one``)
    """
    assert dict(defaults_in(doc)) == {"one": "1", "two": '"a b"'}
