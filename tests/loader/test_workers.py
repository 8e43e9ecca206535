"""Batches on their way from worker processes."""

import pickle

import pytest
import torch
from conftest import random_graph
from loaders import LAYOUTS, everything
from torch_geometric.data import Batch, Data

import gas

PTR = torch.tensor([0, 20, 45, 60])


def union():
    """Two graphs, as PyG puts them together."""
    return Batch.from_data_list([random_graph(25, 100), random_graph(35, 140)])


@pytest.mark.parametrize("layout", [*LAYOUTS, "fused"])
@pytest.mark.parametrize("make", [random_graph, union])
def test_workers_deliver_equal_batches(make, layout):
    data = make()
    loaders = [
        gas.SubgraphLoader(data, PTR, layout=layout, num_workers=workers, log=False)
        for workers in (0, 1)
    ]
    for batch, expected in zip(*loaders, strict=True):
        assert batch.batch_size == expected.batch_size
        assert set(batch.data.keys()) == set(expected.data.keys())
        for tensor, other in zip(everything(batch), everything(expected), strict=True):
            assert torch.equal(tensor, other)


def test_batches_of_several_graphs_can_be_pickled():
    data = union()
    for batch in gas.SubgraphLoader(data, PTR, log=False):
        assert type(batch.data) is type(batch.own) is Data
        twin = pickle.loads(pickle.dumps(batch))
        assert isinstance(twin, gas.SubData)
        for tensor, other in zip(everything(twin), everything(batch), strict=True):
            assert torch.equal(tensor, other)
        assert torch.equal(twin.own.x, batch.own.x)


def test_the_class_of_a_graph_is_kept():
    data = Graph.from_dict(random_graph().to_dict())
    for graph in (data, Batch.from_data_list([data])):
        batch = next(iter(gas.SubgraphLoader(graph, PTR, log=False, num_workers=1)))
        assert type(batch.data) is Graph


class Graph(Data):
    pass


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_cannot_send_is_refused(persistent):
    data = random_graph()
    data.names = ["some"]
    options = {"log": False, "num_workers": 1, "persistent_workers": persistent}
    loader = gas.SubgraphLoader(data, PTR, **options)
    assert next(iter(loader)).names == ["some"]
    data.names = lambda name: name
    for refused in (loader, gas.SubgraphLoader(data, PTR, **options)):
        with pytest.raises(ValueError, match="'names' is a function, which workers can't send"):
            next(iter(refused))
    assert next(iter(gas.SubgraphLoader(data, PTR, log=False))).names is data.names


def test_a_graph_of_a_class_that_cannot_be_sent():
    class Local(Data):
        pass

    data = Local.from_dict(random_graph().to_dict())
    loader = gas.SubgraphLoader(data, PTR, log=False, num_workers=1)
    with pytest.raises(ValueError, match="'data' is a Local, which workers can't send"):
        next(iter(loader))
