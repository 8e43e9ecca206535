"""``model.refresh(graph)`` on ranks: running statistics are those of all ranks' nodes."""

import copy

import pytest
import torch
from processes import run_on
from test_ranks import CLOSE, clustered, graph_data
from torch_geometric.nn import GraphSAGE

import gas

pytestmark = pytest.mark.slow  # Processes for every rank.


def refreshed(rank, num_ranks, is_sharded):
    """Return the buffers and outputs of a distributed model and of a full batch."""
    data = graph_data()
    torch.manual_seed(1)
    net = GraphSAGE(5, 4, 3, out_channels=3, norm="batch_norm", dropout=0.5).double()
    exact = copy.deepcopy(net).eval()
    for norm in exact.norms[:2]:
        norm.train().module.momentum = 1.0
    with torch.no_grad():
        exact(data.x, data.edge_index)
        expected = exact.eval()(data.x, data.edge_index)
    net.norms[0].module.running_mean.fill_(rank)
    model = gas.distribute(gas.to_scalable(net, data, dtype=torch.float64))
    graph = clustered(data, model.module, num_ranks if is_sharded else 1)
    model.refresh(graph, 1 + rank)
    mine = [buffer.clone() for buffer in model.module.net.buffers()]
    return mine, list(exact.buffers()), model.predict(graph), expected


@pytest.mark.parametrize("is_sharded", [True, False])
def test_statistics_are_those_of_the_full_batch(tmp_path, is_sharded):
    found = run_on(2, refreshed, tmp_path, 2, is_sharded)
    for buffers, exact, pred, expected in found:
        for mine, first, true in zip(buffers, found[0][0], exact, strict=True):
            torch.testing.assert_close(mine, true, **CLOSE)
            assert torch.equal(mine, first) or not is_sharded  # Other batches round otherwise.
        torch.testing.assert_close(pred, expected, **CLOSE)
