"""``model.refresh(graph)`` of heterogeneous graphs: statistics are those of one full batch."""

import copy

import pytest
import torch
from graphs import NETS, bibliography

import gas

pytestmark = pytest.mark.filterwarnings("ignore:A history was read before it was filled")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def norms_of(model):
    return [each for each in model.modules() if isinstance(each, torch.nn.BatchNorm1d)]


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize(
    ("name", "batch_size"), [("HeteroConv-SAGE", 2), ("HeteroConv-SAGE", 6), ("HeteroConv-GAT", 1)]
)
def test_statistics_and_histories_are_those_of_the_full_batch(name, batch_size):
    torch.manual_seed(0)
    data = bibliography(dtype=torch.float64)
    model = gas.to_scalable(NETS[name](data).double(), data, dtype=torch.float64)
    exact = gas.to_scalable(copy.deepcopy(model.net), data, dtype=torch.float64).eval()
    for norm in norms_of(exact):
        norm.training, norm.momentum = True, 1.0
    graph = gas.cluster(data, 6, log=False)
    with torch.no_grad():
        exact.full_batch(graph, fill=True)
    assert model.refresh(graph, batch_size) is None
    for found, expected in zip(model.net.buffers(), exact.net.buffers(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    for mine, true in zip(model.histories, exact.histories, strict=True):
        torch.testing.assert_close(mine.emb, true.emb, **CLOSE)
    assert model.training
    assert all(norm.training for norm in norms_of(model))
    model.refresh(graph, batch_size, norms=False)
    rows = [history.emb.clone() for history in model.histories]
    model.predict(graph, batch_size)
    for history, expected in zip(model.histories, rows, strict=True):
        assert torch.equal(history.emb, expected)


def test_norms_of_halo_are_refused_as_in_training():
    torch.manual_seed(0)
    data = bibliography()
    net = NETS["HeteroConv-SAGE"](data)
    net.encoders["paper"] = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 6, log=False)
    with pytest.raises(ValueError, match=r"'encoders.paper.1' is a batch norm that is given rows"):
        model.refresh(graph)
    model.refresh(graph, norms=False)
    model.eval()
    with pytest.warns(UserWarning, match=r"statistics of batch norms as they are.*model\.train"):
        model.refresh(graph)
