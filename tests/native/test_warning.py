"""Warnings have the file of the program that called gas, however deep they are raised."""

import warnings

import pytest
import torch
from torch_geometric.data import Data

import gas


def line_with(text):
    """Return the number of the line of this file that holds a text."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def check_place(caught, text):
    (found,) = [one for one in caught if text in str(one.message)]
    assert found.filename == __file__
    return found.lineno


def test_a_history_that_was_not_filled():
    history = gas.History(4, 2)
    with pytest.warns(UserWarning, match="before it was filled") as caught:
        history.pull(torch.arange(4))
    assert check_place(caught, "read before it was filled") == line_with("history.pull(")


def test_in_a_model(graph):
    model = gas.models.GCN(6, 3, 4, 2, 2)
    loader = gas.SubgraphLoader(graph, batch_size=1, log=False)
    with pytest.warns(UserWarning, match="before it was filled") as caught:
        model(next(iter(loader)))  # Read before it was filled.
    assert check_place(caught, "read before it was filled") == line_with("(loader)))  # Read")


def test_a_partition_that_is_not_cached(tmp_path):
    (tmp_path / "file").write_text("")
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.warns(UserWarning, match="could not be cached") as caught:
        gas.metis(edges, 2, log=False, cache=tmp_path / "file")  # Not cached.
    assert check_place(caught, "could not be cached") == line_with('file")  # Not cached')


def test_wrong_on_purpose():
    model = gas.models.GCN(6, 3, 4, 2, 2)
    with pytest.warns(UserWarning, match="moves no rows") as caught:
        model.io = "none"
    assert check_place(caught, "moves no rows")


def test_one_line_warns_once():
    """As Python does by default: the caller's module remembers it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            gas.models.GCN(6, 3, 4, 2, 2).io = "none"
    assert len(caught) == 1


@pytest.fixture
def graph():
    edge_index = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4, 5]]
    )
    data = Data(x=torch.randn(6, 3), edge_index=edge_index)
    return gas.cluster(data, 3, log=False, model=gas.models.GCN(6, 3, 4, 2, 2), cache=False)
