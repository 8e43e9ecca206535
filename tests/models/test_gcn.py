import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gas


@pytest.fixture
def data():
    return T.GCNNorm()(random_graph())


def test_equals_the_definition(data):
    """Dense algebra: A relu(A X W1 + b1) W2 + b2."""
    model = gas.models.GCN(60, 5, 8, 3, num_layers=2).eval()
    adj = torch.zeros(60, 60)
    adj.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
    first, last = model.convs
    hidden = (adj @ data.x @ first.lin.weight.t() + first.bias).relu()
    expected = adj @ hidden @ last.lin.weight.t() + last.bias
    out = model(data.x, data.edge_index, edge_weight=data.edge_weight, fill=True)
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(model.histories[0].emb, hidden, atol=1e-5)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_parameters_are_grouped_once(linear, batch_norm):
    model = gas.models.GCN(60, 5, 8, 3, 3, batch_norm=batch_norm, linear=linear)
    grouped = [*model.reg_modules.parameters(), *model.nonreg_modules.parameters()]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))


def test_reset_parameters(data):
    model = gas.models.GCN(60, 5, 8, 3, 2, batch_norm=True, linear=True)
    model(data.x, data.edge_index, edge_weight=data.edge_weight, fill=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    model.reset_parameters()
    assert not torch.equal(before["convs.0.lin.weight"], model.convs[0].lin.weight)
    assert (model.histories[0].emb == 0).all()
    assert (model.bns[0].running_mean == 0).all()


@pytest.mark.parametrize(("drop_input", "dropped"), [(True, True), (False, False)])
def test_dropping_the_input(data, drop_input, dropped):
    model = gas.models.GCN(60, 5, 8, 3, 2, dropout=0.9, drop_input=drop_input)
    seen = []
    model.convs[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.train()(data.x, data.edge_index, edge_weight=data.edge_weight)
    assert torch.equal(seen[0], data.x) != dropped
    model.eval()(data.x, data.edge_index, edge_weight=data.edge_weight)
    assert torch.equal(seen[1], data.x)


def test_batch_norm_does_not_see_halo_rows(data):
    """On a square batch the statistics are those of the in-batch nodes."""
    perm, ptr = gas.metis(data.edge_index, 4, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    stats = []
    for bipartite in (True, False):
        torch.manual_seed(0)
        model = gas.models.GCN(60, 5, 8, 3, 2, batch_norm=True).train()
        model.histories[0].push(torch.zeros(60, 8))
        for batch, *args in gas.SubgraphLoader(data, ptr, 1, bipartite, log=False):
            model(batch.x, batch.adj_t, *args)
        stats.append(model.bns[0].running_mean.clone())
    assert torch.allclose(*stats, atol=1e-6)


LAYOUTS = [
    "csr",
    "edge_index",
    pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_weights_are_refused(layout):
    data = random_graph()
    model = gas.models.GCN(60, 5, 8, 3, 2)
    message = "has no edge weights.*apply torch_geometric.transforms.GCNNorm"
    loader = gas.SubgraphLoader(data, torch.tensor([0, 60]), layout=layout, log=False)
    ((batch, *args),) = loader
    adj = batch.edge_index if layout == "edge_index" else batch.adj_t
    with pytest.raises(ValueError, match=message):
        model(batch.x, adj, *args)
    with pytest.raises(ValueError, match=message):
        model(loader=loader)
    assert (model.histories[0].age == -1).all()


def test_missing_weights_are_seen_on_the_sparsest_graphs():
    edge_index = torch.stack([torch.arange(39), torch.arange(1, 40)])
    data = Data(x=torch.randn(40, 5), edge_index=edge_index)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 40]), log=False)
    with pytest.raises(ValueError, match="has no edge weights"):
        gas.models.GCN(40, 5, 8, 3, 2)(loader=loader)


def test_nodes_with_nothing_but_a_self_loop_are_fine():
    edge_index, edge_weight = gcn_norm(torch.empty(2, 0, dtype=torch.long), num_nodes=4)
    assert (edge_weight == 1).all()
    data = Data(x=torch.randn(4, 5), edge_index=edge_index, edge_weight=edge_weight)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 4]), log=False)
    assert gas.models.GCN(4, 5, 8, 3, 2)(loader=loader).shape == (4, 3)
