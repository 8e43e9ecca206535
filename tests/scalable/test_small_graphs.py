"""Graphs of one node, of isolated nodes, and another graph of the same size on the same files."""

import pytest
import torch
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, PNA, GraphSAGE

import gas

NO_EDGES = torch.empty(2, 0, dtype=torch.long)
LOOP = torch.zeros(2, 1, dtype=torch.long)


@pytest.mark.parametrize("net", [GraphSAGE, GCN, GAT])
@pytest.mark.parametrize(
    ("num_nodes", "edge_index"),
    [(1, NO_EDGES), (1, LOOP), (5, NO_EDGES)],
    ids=["one node", "one node and its loop", "isolated nodes"],
)
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_tiny_graphs_train_and_are_exact(net, num_nodes, edge_index):
    data = Data(x=torch.randn(num_nodes, 4), edge_index=edge_index, num_nodes=num_nodes)
    net = net(4, 8, num_layers=2, out_channels=3)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, num_nodes, model=model, log=False)
    for batch in gas.SubgraphLoader(graph, shuffle=True, log=False):
        model(batch).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    expected = net.eval()(data.x, data.edge_index)
    torch.testing.assert_close(model.predict(graph), expected, check_device=False)
    assert gas.verify(model, graph)


@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
def test_another_graph_of_the_same_size_on_the_same_path(tmp_path):
    """Its files are gone on with, which is said; what fills them makes outputs right."""
    first, second = random_graph(), random_graph()
    expected = {}
    for data, path in ((first, "one"), (second, "one"), (second, "other")):
        torch.manual_seed(0)
        net = GraphSAGE(5, 8, num_layers=3, out_channels=3)
        model = gas.to_scalable(net, data, store="disk", path=tmp_path / path)
        graph = gas.cluster(data, 4, model=model, log=False)
        expected[path] = model.predict(graph), [h.emb.clone() for h in model.histories]
        model.close()
    torch.testing.assert_close(expected["one"], expected["other"], rtol=0, atol=0)


def test_a_graph_without_nodes_is_refused():
    data = Data(x=torch.empty(0, 4), edge_index=NO_EDGES, num_nodes=0)
    with pytest.raises(ValueError, match="'num_nodes' is 0, expected an integer of at least 1"):
        gas.to_scalable(PNA(4, 8, 2, 3, aggregators=["mean"], scalers=["identity"],
                            deg=torch.ones(2)), data)  # fmt: skip
