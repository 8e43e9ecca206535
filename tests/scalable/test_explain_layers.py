"""PG- and AttentionExplainer look at layers: at their outputs, and at their messages."""

import copy

import pytest
import torch
from conftest import random_graph
from torch_geometric.explain import AttentionExplainer, Explainer, PGExplainer
from torch_geometric.nn import GAT, GATConv, GATv2Conv, GraphSAGE, SAGEConv, TransformerConv
from torch_geometric.transforms import RemoveSelfLoops
from torch_geometric.utils import get_embeddings

import gas

ATTENTION = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}

# PyG's PGExplainer.train makes a number of a loss.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")


class Net(torch.nn.Module):
    """Layers of one kind, which loop or don't."""

    def __init__(self, kind, loops=True):
        super().__init__()
        if kind in ATTENTION:
            options = {} if kind == "transformer" else {"add_self_loops": loops}
            self.first = ATTENTION[kind](5, 4, heads=2, **options)
            self.last = ATTENTION[kind](8, 3, **options)
        else:
            self.first, self.last = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


class Written(gas.ScalableGNN):
    """The same by hand, of the same layers."""

    def __init__(self, net):
        super().__init__(60, 8, num_layers=2)
        self.first, self.last = copy.deepcopy(net.first), copy.deepcopy(net.last)

    def forward(self, x, edge_index, *args):
        x = self.push_and_pull(self.histories[0], self.first(x, edge_index).relu(), *args)
        return self.last(x, edge_index)


def made(kind, by, num_parts, loops=True):
    """Return a module, the model of it, their graph without loops, and a loader of that."""
    data = RemoveSelfLoops()(random_graph())
    net = Net(kind, loops).eval()
    model = (Written(net) if by == "hand" else gas.to_scalable(net, data)).eval()
    graph = gas.cluster(data, num_parts, model=model, log=False)
    model.predict(graph, layout="edge_index")
    loader = gas.SubgraphLoader(
        graph, batch_size=max(num_parts // 2, 1), layout="edge_index", log=False
    )
    return net, model, graph, loader


def state_of(model):
    return [
        copy.deepcopy((history.emb, history.written_at, history.age, history.changes))
        for history in model.histories
    ]


def check_same(before, after):
    for old, new in zip(before, after, strict=True):
        assert all(map(torch.equal, old[:3], new[:3]))
        assert old[3] == new[3]


def attention(module, x, edge_index, index=None):
    config = {**CONFIG, "task_level": "graph"} if index is None else CONFIG  # Of all edges.
    explainer = Explainer(module, AttentionExplainer(), "model", config, edge_mask_type="object")
    return explainer(x, edge_index, index=index).edge_mask


def trained(module, inputs, target, indices):
    """Return a PGExplainer that was trained on some nodes."""
    torch.manual_seed(0)
    algorithm = PGExplainer(epochs=3)
    explainer = Explainer(module, algorithm, "phenomenon", CONFIG, edge_mask_type="object")
    for epoch in range(3):
        for index in indices:
            loss = algorithm.train(epoch, module, *inputs, target=target, index=index)
            assert loss > 0
    return explainer


@pytest.mark.parametrize("by", ["conversion", "hand"])
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_pg_explainer_of_one_part_is_that_of_the_module(kind, by):
    net, model, _, loader = made(kind, by, 1)
    (batch,) = loader
    before, masks = state_of(model), []
    for module in (net, model.at(batch)):
        inputs = batch.x, batch.edge_index
        explainer = trained(module, inputs, batch.y, [3, 8])
        masks.append(explainer(*inputs, target=batch.y, index=3).edge_mask)
    assert masks[0].count_nonzero() > 0
    assert torch.allclose(masks[0], masks[1], atol=1e-5)
    check_same(before, state_of(model))


@pytest.mark.parametrize("by", ["conversion", "hand"])
@pytest.mark.parametrize("kind", ["sage", "gat"])
@pytest.mark.parametrize("some", ["parts", "nodes"])
def test_pg_explainer_takes_the_halos_rows_from_the_history(kind, by, some):
    """Its masks are what its network makes of the hidden states of both ends of each edge."""
    net, model, graph, loader = made(kind, by, 4)
    hidden = net.first(graph.x, graph.edge_index).relu()
    for batch in loader if some == "parts" else [loader.cut_nodes(torch.tensor([11, 3, 30, 5]))]:
        before = state_of(model)
        inputs, target = (batch.x, batch.edge_index), batch.own.y
        explainer = trained(model.at(batch), inputs, target, [1, 3])
        found = explainer(*inputs, target=target, index=3).edge_mask
        assert (batch.edge_index[0] >= batch.batch_size).any()
        src, dst = hidden[batch.n_id[batch.edge_index]]
        of_node = hidden[batch.n_id[3]].expand_as(src)
        expected = explainer.algorithm.mlp(torch.cat([src, dst, of_node], dim=1)).sigmoid()[:, 0]
        reached = found > 0
        assert torch.equal(reached[batch.edge_index[1] == 3].all(), torch.tensor(True))
        assert torch.allclose(found[reached], expected[reached], atol=1e-5)
        check_same(before, state_of(model))
        assert not model.training


def test_pg_explainer_of_one_network_for_all_batches():
    """The network is trained on each batch in turn."""
    _, model, _, loader = made("sage", "conversion", 4)
    algorithm = PGExplainer(epochs=2)
    for epoch in range(2):
        for batch in loader:
            module = model.at(batch)
            explainer = Explainer(module, algorithm, "phenomenon", CONFIG, edge_mask_type="object")
            algorithm.train(epoch, module, batch.x, batch.edge_index, target=batch.own.y, index=0)
    found = explainer(batch.x, batch.edge_index, target=batch.own.y, index=0)
    assert found.edge_mask.count_nonzero() > 0


@pytest.mark.parametrize(
    ("kind", "loops"), [("gat", True), ("gat", False), ("gatv2", True), ("transformer", True)]
)
@pytest.mark.parametrize("by", ["conversion", "hand"])
def test_attention_on_batches_is_that_on_the_graph(by, kind, loops):
    """Of every edge, by its id: a node has all of its edges in its batch."""
    net, model, graph, loader = made(kind, by, 4, loops)
    full = attention(net, graph.x, graph.edge_index)
    before = state_of(model)
    batches = [*loader, loader.cut_nodes(torch.tensor([11, 3, 30]))]
    assert sum(batch.e_id.numel() for batch in batches[:-1]) == graph.num_edges
    for batch in batches:
        found = attention(model.at(batch), batch.x, batch.edge_index)
        assert torch.allclose(found, full[batch.e_id], atol=1e-6)
        assert 0 < found.max() <= 1
    check_same(before, state_of(model))
    assert not model.training


@pytest.mark.parametrize("by", ["conversion", "hand"])
def test_attention_around_a_node_reaches_no_further_than_its_layers(by):
    net, model, _, loader = made("gat", by, 1)
    (batch,) = loader
    expected = attention(net, batch.x, batch.edge_index, index=3)
    found = attention(model.at(batch), batch.x, batch.edge_index, index=3)
    assert torch.equal(found == 0, expected == 0)
    assert torch.allclose(found, expected, atol=1e-6)
    # With a hop of neighbours in the batch, all that two layers read.
    nodes = loader.neighbourhood(batch.n_id[3:4], num_hops=1).n_id
    around = loader.cut_nodes(nodes)
    found = attention(model.at(around), around.x, around.edge_index, index=0)
    assert torch.allclose(found, expected[batch.e_id.argsort()][around.e_id], atol=1e-6)
    assert (found > 0).all()


def test_attention_of_a_matrix_is_refused_and_leaves_no_hooks():
    _, model, graph, _ = made("gat", "conversion", 4)
    for layout in ("fused", "csr"):
        batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)))
        with pytest.raises(ValueError, match="layout='edge_index'"):
            attention(model.at(batch), batch.x, batch.adj_t)
        assert not any(layer._message_forward_hooks for layer in (model.net.first, model.net.last))


def test_attention_of_loops_that_a_layer_replaces_is_refused():
    data = random_graph()
    model = gas.to_scalable(GAT(5, 8, 2, 3, heads=2), data).eval()
    graph = gas.cluster(data, 2, model=model, log=False)
    model.predict(graph)
    for batch in gas.SubgraphLoader(graph, layout="edge_index", log=False):
        loops = int((batch.edge_index[0] == batch.edge_index[1]).sum())
        if loops:
            with pytest.raises(ValueError, match=rf"has self-loops \({loops}\)"):
                attention(model.at(batch), batch.x, batch.edge_index)
        model.at(batch)(batch.x, batch.edge_index)  # No explainer.


def test_embeddings_that_no_history_has_are_refused():
    data = random_graph()
    model = gas.to_scalable(GraphSAGE(5, 3, num_layers=1), data).eval()
    graph = gas.cluster(data, 2, model=model, log=False)
    one, all_parts = (
        next(iter(gas.SubgraphLoader(graph, batch_size=size, layout="edge_index", log=False)))
        for size in (1, 2)
    )
    with pytest.raises(ValueError, match="has no history"):
        get_embeddings(model.at(one), one.x, one.edge_index)
    assert not any(layer._forward_hooks for layer in model.modules())
    (found,) = get_embeddings(model.at(all_parts), all_parts.x, all_parts.edge_index)
    assert torch.equal(found, model(all_parts, push=False))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_the_models(training):
    """The weights at the time of the explanation, not when the module was made."""
    _, model, _, loader = made("gat", "conversion", 4)
    batch = next(iter(loader))
    module = model.train(not training).at(batch)
    model.train(training)
    assert module.training == training
    attention(module, batch.x, batch.edge_index)
    assert model.training == model.net.training == model.net.first.training == training
