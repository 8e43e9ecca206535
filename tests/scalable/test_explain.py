"""PyG's explainers and captum on mini-batches, which write nothing to the histories."""

import copy
import re

import pytest
import torch
from conftest import ROOT, random_graph
from torch_geometric.explain import CaptumExplainer, Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    EdgeConv,
    GATConv,
    GraphConv,
    GraphSAGE,
    SAGEConv,
    SGConv,
    TAGConv,
)

import gas


class Net(torch.nn.Module):
    """Takes weights of edges."""

    def __init__(self):
        super().__init__()
        self.first, self.last = GraphConv(5, 8), GraphConv(8, 3)

    def forward(self, x, edge_index, edge_weight=None):
        x = self.first(x, edge_index, edge_weight).relu()
        return self.last(x, edge_index, edge_weight)


class Written(gas.ScalableGNN):
    """By hand, of layers that look at their features in two ways."""

    def __init__(self):
        super().__init__(60, 8, num_layers=2)
        self.first, self.last = GATConv(5, 8, add_self_loops=False), SAGEConv(8, 3)

    def forward(self, x, edge_index, *args):
        x = self.push_and_pull(self.histories[0], self.first(x, edge_index).relu(), *args)
        return self.last(x, edge_index)


def made(kind, data):
    if kind == "written":
        return None, Written().eval()
    net = (Net() if kind == "weighted" else GraphSAGE(5, 8, num_layers=2, out_channels=3)).eval()
    if kind == "weighted":
        data.edge_weight = torch.rand(data.num_edges) + 0.5
    return net, gas.to_scalable(net, data)


def explainer(model, algorithm, **kwargs):
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    masks = {"node_mask_type": "attributes", "edge_mask_type": "object", **kwargs}
    return Explainer(model, algorithm, explanation_type="model", model_config=config, **masks)


def batches(model, data, num_parts, layout="edge_index"):
    graph = gas.cluster(data, num_parts, model=model, log=False)
    model.predict(graph, layout=layout)
    return gas.SubgraphLoader(graph, batch_size=max(num_parts // 2, 1), layout=layout, log=False)


ALGORITHMS = [
    lambda: GNNExplainer(epochs=4),
    pytest.param(
        lambda: CaptumExplainer("IntegratedGradients", n_steps=4),
        marks=[
            pytest.mark.requires("captum"),
            pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
        ],
    ),
    pytest.param(
        lambda: CaptumExplainer("Saliency"),
        marks=[
            pytest.mark.requires("captum"),
            pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
        ],
    ),
]


def rows_of(model):
    return [
        copy.deepcopy((history.emb, history.age, history.written_at, history.num_pushes))
        for history in model.histories
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["sage", "weighted", "written"])
def test_explanations_of_a_batch(kind, algorithm):
    data = random_graph()
    _, model = made(kind, data)
    loader = batches(model, data, 4)
    before = rows_of(model)
    for batch in [*loader, loader.cut_nodes(torch.tensor([40, 3, 8, 11]))]:
        found = explainer(model.at(batch), algorithm())(batch.x, batch.edge_index, index=3)
        assert found.node_mask.shape == batch.x.shape
        assert found.edge_mask.shape == (batch.edge_index.size(1),)
        assert found.edge_mask.abs().sum() > 0
        assert torch.equal(found.target, model(batch, push=False).argmax(dim=-1))
        assert not model.training
    for (*tensors, num_pushes), history in zip(before, model.histories, strict=True):
        now = history.emb, history.age, history.written_at
        assert all(map(torch.equal, tensors, now))
        assert num_pushes == history.num_pushes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["sage", "weighted"])
def test_explanations_of_one_part_are_those_of_the_module(kind, algorithm):
    data = random_graph()
    net, model = made(kind, data)
    (batch,) = batches(model, data, 1)
    weight = {"edge_weight": batch.edge_weight} if kind == "weighted" else {}
    masks = []
    for module, given in ((net, weight), (model.at(batch), {})):
        torch.manual_seed(0)
        found = explainer(module, algorithm())(batch.x, batch.edge_index, index=3, **given)
        masks.append((found.node_mask, found.edge_mask))
    assert torch.allclose(masks[0][0], masks[1][0], atol=1e-5)
    assert torch.allclose(masks[0][1], masks[1][1], atol=1e-5)


@pytest.mark.requires("captum")
@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")
@pytest.mark.parametrize("kind", ["sage", "written"])
def test_one_explainer_after_another(kind):
    """GNNExplainer leaves an empty parameter in each layer, after which PyG's own net fails."""
    data = random_graph()
    _, model = made(kind, data)
    batch = next(iter(batches(model, data, 4)))
    module, names = model.at(batch), [name for name, _ in model.named_parameters()]
    masks = []
    for algorithm in ("Saliency", GNNExplainer(epochs=2), "Saliency"):
        if isinstance(algorithm, str):
            algorithm = CaptumExplainer(algorithm)
        found = explainer(module, algorithm)(batch.x, batch.edge_index, index=3)
        masks.append((found.node_mask, found.edge_mask))
        assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(masks[0][0], masks[2][0])
    assert torch.equal(masks[0][1], masks[2][1])


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("kind", ["sage", "weighted"])
def test_around_a_node_and_its_neighbours_are_those_of_the_graph(kind, algorithm):
    """Two layers read no further: every attribution is that on the whole graph."""
    data = random_graph()
    net, model = made(kind, data)
    loader = batches(model, data, 4)
    graph, node = loader.data, torch.tensor([17])
    batch = loader.cut_nodes(loader.neighbourhood(node, num_hops=1).n_id)
    weight = {"edge_weight": graph.edge_weight} if kind == "weighted" else {}
    full = explainer(net, algorithm())(graph.x, graph.edge_index, index=17, **weight)
    found = explainer(model.at(batch), algorithm())(batch.x, batch.edge_index, index=0)
    assert torch.allclose(found.node_mask, full.node_mask[batch.n_id], atol=1e-5)
    assert torch.allclose(found.edge_mask, full.edge_mask[batch.e_id], atol=1e-5)
    for mask in ("node_mask", "edge_mask"):
        assert full[mask].count_nonzero() == found[mask].count_nonzero() > 0


def test_arguments_in_place_of_the_batchs():
    data = random_graph()
    _, model = made("weighted", data)
    batch = next(iter(batches(model, data, 4)))
    module = model.at(batch)
    same = module(batch.x, batch.edge_index, edge_weight=batch.edge_weight)
    assert torch.equal(same, module(batch.x, batch.edge_index))
    assert not torch.allclose(
        same, module(batch.x, batch.edge_index, edge_weight=2 * batch.edge_weight)
    )
    assert torch.equal(module.eval()(batch.x, batch.edge_index), model(batch, push=False))
    assert list(module.parameters()) == list(model.parameters())


@pytest.mark.requires("captum")
@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")
@pytest.mark.parametrize("layout", ["edge_index", "fused"])
def test_captum_itself(layout):
    from captum.attr import IntegratedGradients
    from torch_geometric.nn import to_captum_model

    data = random_graph()
    _, model = made("sage", data)
    batch = next(iter(batches(model, data, 4, layout)))
    adj = batch.edge_index if layout == "edge_index" else batch.adj_t
    before = rows_of(model)
    captum_model = to_captum_model(model.at(batch), mask_type="node", output_idx=2)
    method = IntegratedGradients(captum_model)
    (found,) = method.attribute(
        (batch.x.unsqueeze(0),),
        target=1,
        internal_batch_size=1,
        n_steps=100,
        additional_forward_args=(adj,),
    )
    with torch.no_grad():
        ends = [model.at(batch)(x, adj)[2, 1] for x in (batch.x, torch.zeros_like(batch.x))]
    assert torch.allclose(found.sum().float(), ends[0] - ends[1], atol=1e-2)
    assert torch.equal(before[0][0], model.histories[0].emb)


class Two(torch.nn.Module):
    """Two layers."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


NETS = {
    "sage": lambda: GraphSAGE(5, 8, num_layers=2, out_channels=3),
    "gin": lambda: GIN(5, 8, num_layers=2, out_channels=3),
    "gcn": lambda: GCN(5, 8, num_layers=2, out_channels=3),
    "gat": lambda: GAT(5, 8, num_layers=2, out_channels=3),
    "graph": lambda: Two(GraphConv(5, 8), GraphConv(8, 3)),
    "edge": lambda: Two(EdgeConv(torch.nn.Linear(10, 8)), EdgeConv(torch.nn.Linear(16, 3))),
    "tag": lambda: Two(TAGConv(5, 8), TAGConv(8, 3)),
    "sg": lambda: Two(SGConv(5, 8, K=2), SGConv(8, 3)),
}


def attributes_of(model):
    """Return all that layers hold, by name; values that explanations may have changed."""
    kept = ("training", "_edge_mask", "_loop_mask", "_apply_sigmoid", "_explain")
    return [
        (sorted(vars(module)), sorted(module._parameters), [getattr(module, k, "") for k in kept])
        for module in model.modules()
    ]


def check_that_it_goes_on(model, loader, expected):
    """In training, prediction and on mini-batches of layers with kernels of their own."""
    graph = loader.data
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, layout="fused", log=False)))
    model(batch).sum().backward()
    assert torch.equal(model.predict(graph), expected)


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", NETS)
def test_nothing_is_left_in_a_model_that_was_explained(kind, algorithm):
    data = random_graph()
    model = gas.to_scalable(NETS[kind](), data).train()
    loader = batches(model, data, 4)
    batch, expected = next(iter(loader)), model.predict(loader.data)
    before = attributes_of(model)
    found = explainer(model.at(batch), algorithm())(batch.x, batch.edge_index, index=3)
    assert found.edge_mask.abs().sum() > 0
    assert attributes_of(model) == before
    check_that_it_goes_on(model, loader, expected)


@pytest.mark.parametrize("kind", ["sage", "gat", "tag"])
def test_nothing_is_left_after_an_explanation_that_raised(kind):
    """Inside of the model, and after it, where PyG's masks were still wanted."""
    data = random_graph()
    model = gas.to_scalable(NETS[kind](), data).train()
    loader = batches(model, data, 4)
    batch, expected = next(iter(loader)), model.predict(loader.data)
    module, before = model.at(batch), attributes_of(model)
    torch.manual_seed(0)
    masks = [explainer(module, GNNExplainer(epochs=3))(batch.x, batch.edge_index, index=3)]
    with pytest.raises(IndexError):
        explainer(module, GNNExplainer(epochs=3))(batch.x, batch.edge_index, index=10**6)
    # Parameters, modes and methods; PyG's mark of an explanation that goes on stays until the next.
    assert [item[:2] for item in attributes_of(model)] == [item[:2] for item in before]
    assert all(layer.training for layer in model.modules())
    check_that_it_goes_on(model, loader, expected)
    torch.manual_seed(0)
    masks.append(explainer(module, GNNExplainer(epochs=3))(batch.x, batch.edge_index, index=3))
    assert torch.equal(masks[0].edge_mask, masks[1].edge_mask)
    assert torch.equal(masks[0].prediction, masks[1].prediction)
    set_masks(module, torch.rand(batch.edge_index.size(1)), batch.edge_index)
    with pytest.raises(RuntimeError):
        module(batch.x[:, :2], batch.edge_index)
    assert attributes_of(model) == before
    check_that_it_goes_on(model, loader, expected)


def test_masks_hold_from_one_run_to_the_next():
    data = random_graph()
    model = gas.to_scalable(NETS["sage"](), data).eval()
    batch = next(iter(batches(model, data, 4)))
    module = model.at(batch)
    plain = module(batch.x, batch.edge_index)
    set_masks(module, torch.zeros(batch.edge_index.size(1)), batch.edge_index)
    masked = [module(batch.x, batch.edge_index) for _ in range(2)]
    assert not torch.allclose(masked[0], plain)
    assert torch.equal(*masked)
    assert torch.equal(model(batch, push=False), plain)  # Which isn't what is explained.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_sparse_features_are_explained_as_dense_ones(kind, algorithm):
    data = random_graph()
    data.x = data.x * (data.x > 0.5)
    net, masks = NETS[kind]().eval(), []
    for x in (data.x, data.x.to_sparse_csr()):
        data.x = x
        model = gas.to_scalable(net, data)
        batch = next(iter(batches(model, data, 4)))
        module = model.at(batch)
        torch.manual_seed(0)
        found = explainer(module, algorithm())(batch.x, batch.edge_index, index=3)
        masks.append((found.node_mask, found.edge_mask))
    assert masks[0][0].abs().sum() > 0
    assert torch.allclose(masks[0][0], masks[1][0], atol=1e-5)
    assert torch.allclose(masks[0][1], masks[1][1], atol=1e-5)


@pytest.mark.parametrize("kind", NETS)
def test_a_module_that_was_explained_is_converted(kind):
    data, net = random_graph(), NETS[kind]().eval()
    explainer(net, GNNExplainer(epochs=2))(data.x, data.edge_index, index=3)
    model = gas.to_scalable(net, data)
    assert "[fused]" in str(model)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net(data.x, data.edge_index).detach()
    assert torch.allclose(model.predict(graph), expected, atol=1e-5)
    methods = [vars(layer)["propagate"] for layer in model.modules() if "propagate" in vars(layer)]
    assert all(method.__self__ in list(model.modules()) for method in methods)


def test_masks_of_edges_are_not_forgotten():
    data = random_graph()
    _, model = made("sage", data)
    batch = next(iter(batches(model, data, 4, "fused")))
    model(batch)
    conv = model.net.convs[0]
    assert conv.path == "fused"
    conv.explain = True
    assert "masks its edges" in conv._reason_not_fused(batch.adj_t)


@pytest.mark.slow
@pytest.mark.requires("captum")
@pytest.mark.requires("matplotlib")
def test_the_example(run_script, tmp_path):
    """Friends and words that were drawn for the club count, and the picture is there."""
    script = ROOT / "examples" / "explain_node.py"
    done = run_script(script, "--person", "Luca Kaya", "--out", "luca.png")
    assert done.code == 0, done.err
    shares = [float(found) for found in re.findall(r"than others: ([\d.]+) % of pairs", done.out)]
    assert len(shares) == 2
    assert min(shares) > 85
    assert re.search(r"Luca Kaya is put into (\w+), and is of \1, because of", done.out)
    assert "Warning" not in done.err
    assert (tmp_path / "luca.png").stat().st_size > 50_000
