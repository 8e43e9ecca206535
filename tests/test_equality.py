"""E1-E3: batches with histories equal the full batch.

The full batch is always PyG on the ``edge_index`` of the whole graph, which shares no code with our
loader; gradients are compared with dense algebra.
"""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree
from user_models import BIPARTITE, SQUARE, SharedGCN

import gas

LAYOUTS = [
    "csr",
    "edge_index",
    "fused",
    pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
]
ALL = {"batch_norm": True, "residual": True}
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification", "attenuation"]}
ZOO = {  # Positional arguments after the number of nodes, and keywords.
    "GCN": ((5, 8, 3, 4), {**ALL, "linear": True}),
    "GraphSAGE": ((5, [8, 6, 6], 3, 4), ALL),
    "GIN": ((5, [8, 6, 6], 3, 4), {**ALL, "noise": 0.1}),
    "GAT": ((5, 4, 2, 3, 2, 4), {"residual": True}),
    "APPNP": ((5, 8, 3, 4), {"alpha": 0.2}),
    "GCN2": ((5, 8, 3, 4), ALL),
    "GCN2 unshared": ((5, 8, 3, 3), {"shared_weights": False}),
    "PNA": ((5, 8, 3, 3), {**ALL, **PNA}),
    "PNA_JK": ((5, 8, 3, 3), {**ALL, **PNA}),
}
OURS = {f"gas.{name}": name for name in ZOO}
MODELS = {**OURS, **BIPARTITE, **SQUARE}


def zoo_class(name):
    return getattr(gas.models, OURS[name].split()[0])


def make_graph(name, directed, dtype=torch.float32, num_parts=6):
    """Return a permuted graph, with edge weights only for models that use them."""
    data = random_graph(directed=directed, dtype=dtype)
    if name == "SquareGAT":
        # Where PyG adds self-loops to a torch.sparse matrix, it merges duplicate edges.
        data.edge_index = coalesce(data.edge_index)
    if name in OURS:
        transform = zoo_class(name).transform
        data = data if transform is None else transform(data)
    elif "GCN" in name:
        data = T.GCNNorm()(data)
    if "edge_weight" in data:
        data.edge_weight = data.edge_weight.to(dtype)
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=data.num_nodes, log=False)
    return gas.permute(data, perm, log=False), ptr


def make_model(name, data, dtype=torch.float32, history=None, **kwargs):
    history = history or dtype
    if name in OURS:
        args, options = ZOO[OURS[name]]
        if "aggregators" in options:
            options = {**options, "deg": degree(data.edge_index[1], data.num_nodes)}
        model = zoo_class(name)(data.num_nodes, *args, **options, dtype=history, **kwargs)
        for bn in model.modules():
            if isinstance(bn, torch.nn.BatchNorm1d):
                bn.running_mean.uniform_(-1, 1)
                bn.running_var.uniform_(0.5, 2)
        return model.to(dtype)
    return MODELS[name](data.num_nodes, 5, 3, dtype=history, **kwargs).to(dtype)


def full_batch(model, data, fill=False):
    weight = {"edge_weight": data.edge_weight} if "edge_weight" in data else {}
    return model(data.x, data.edge_index, fill=fill, **weight)


def run(model, batch, *args):
    if isinstance(batch.get("adj_t"), gas.nn.Adjacency):
        gas.fuse(model)
        out = model(batch.x, batch.adj_t, *args)
        paths = {module.path for module in model.modules() if hasattr(module, "path")}
        assert paths <= {"fused"}
        return out
    if hasattr(batch, "adj_t"):
        return model(batch.x, batch.adj_t, *args)
    weight = {"edge_weight": batch.edge_weight} if "edge_weight" in batch else {}
    return model(batch.x, batch.edge_index, *args, **weight)


def relative_error(out, expected):
    out, expected = out.detach(), expected.detach()
    return float((out - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_gradients_equal(found, wanted, tolerance):
    """Compare relative to the largest: a bias before batch norm has a gradient of rounding only."""
    largest = max(float(grad.abs().max()) for grad in wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert float((mine - other).abs().max()) < tolerance * largest


def shapes_of(name):
    return [True, False] if name in OURS or "GCN" in name else [name not in SQUARE]


CASES = [
    pytest.param(name, bipartite, id=f"{name}-{'bipartite' if bipartite else 'square'}")
    for name in MODELS
    for bipartite in shapes_of(name)
]


@pytest.mark.slow(fast=41)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "undirected"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bipartite"), CASES)
def test_one_part_equals_full_batch(name, bipartite, layout, directed):
    data, _ = make_graph(name, directed, torch.float64)
    model = make_model(name, data, torch.float64).train()
    expected = full_batch(model, data)
    loss = expected.pow(2).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))

    whole = torch.tensor([0, data.num_nodes])
    loader = gas.SubgraphLoader(data, whole, layout=layout, bipartite=bipartite, log=False)
    ((batch, *args),) = loader
    out = run(model, batch, *args)
    assert relative_error(out, expected) < 1e-12
    found = torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))
    assert_gradients_equal(found, wanted, 1e-12)


@pytest.mark.slow(fast=41)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "undirected"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bipartite"), CASES)
def test_sweeps_converge_to_the_full_batch(name, bipartite, layout, directed):
    data, ptr = make_graph(name, directed)
    model = make_model(name, data).eval()
    expected = full_batch(model, data).detach()
    loader = gas.SubgraphLoader(
        data, ptr, batch_size=2, shuffle=True, layout=layout, bipartite=bipartite, log=False
    )
    model.histories.apply(lambda h: h.push(torch.randn_like(h.emb)) if hasattr(h, "emb") else None)
    out = torch.full_like(expected, float("nan"))
    with torch.no_grad():
        for sweep in range(model.num_layers):
            if sweep == 1:
                assert relative_error(out, expected) > 1e-5  # The histories were wrong at first.
            for batch, batch_size, n_id, *ranges in loader:
                rows = run(model, batch, batch_size, n_id, *ranges)
                assert rows.shape == (batch_size, 3)
                out[n_id[:batch_size]] = rows
    assert relative_error(out, expected) < 1e-5


@pytest.mark.slow(fast=31)
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.int8, 2e-2)],
)
@pytest.mark.parametrize(("name", "bipartite"), CASES)
def test_codecs_and_stores_stay_close(name, bipartite, dtype, bound, store):
    data, ptr = make_graph(name, directed=True)
    model = make_model(name, data, history=dtype, store=store).eval()
    assert all(history.codec.name in str(dtype) for history in model.histories)
    assert all(history.store.tier == store for history in model.histories)
    expected = full_batch(model, data).detach()
    for history in model.histories:
        history.push(torch.zeros(data.num_nodes, history.embedding_dim))
    loader = gas.EvalSubgraphLoader(data, ptr, bipartite=bipartite, log=False)
    swept = torch.zeros_like(expected)
    with torch.no_grad():
        for _ in range(model.num_layers):
            for batch, batch_size, n_id, *ranges in loader:
                swept[n_id[:batch_size]] = run(model, batch, batch_size, n_id, *ranges)
    for out in (swept, model(loader=loader)):
        assert (0 if dtype == torch.float32 else 1e-6) < relative_error(out, expected) < bound


@pytest.mark.slow(fast=41)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "undirected"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bipartite"), CASES)
def test_layer_wise_inference_equals_the_full_batch(name, bipartite, layout, directed):
    data, ptr = make_graph(name, directed)
    model = make_model(name, data).train()
    model.eval()
    expected = full_batch(model, data, fill=True).detach()
    hidden = [history.emb.clone() for history in model.histories]
    model.train()
    for history in model.histories:
        history.reset_parameters()
    loader = gas.EvalSubgraphLoader(
        data, ptr, batch_size=2, layout=layout, bipartite=bipartite, log=False
    )
    if layout == "fused":
        gas.fuse(model)
    out = model(loader=loader)
    assert model.training  # The mode is the caller's.
    assert relative_error(out, expected) < 1e-5
    for history, exact in zip(model.histories, hidden, strict=True):
        assert relative_error(history.emb, exact) < 1e-5
    first = out.clone()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert not torch.equal(model(loader=loader), first)
    assert torch.equal(out, first)  # A second inference leaves the first result alone.


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_layer_wise_inference_without_forward_layer(name, shuffle):
    data, ptr = make_graph(name, directed=True)
    model = make_model(name, data).eval()
    generic = make_model(name, data)
    generic.load_state_dict(model.state_dict())
    generic.__class__ = type(
        "Generic", (type(model),), {"forward_layer": gas.ScalableGNN.forward_layer}
    )
    loader = gas.SubgraphLoader(data, ptr, batch_size=2, shuffle=shuffle, log=False)
    assert torch.allclose(generic(loader=loader), model(loader=loader), atol=1e-6)
    for mine, other in zip(generic.histories, model.histories, strict=True):
        assert torch.allclose(mine.emb, other.emb, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_gradient_equals_dense_autograd_with_the_halo_detached(layout):
    data, ptr = make_graph("SharedGCN", directed=True, dtype=torch.float64)
    model = SharedGCN(data.num_nodes, 5, 3, dtype=torch.float64).double().eval()
    full_batch(model, data, fill=True)  # Exact histories ...
    history = [h.emb.clone() for h in model.histories]
    for table in history:
        table.add_(torch.randn_like(table))  # ... made stale.
    for h, table in zip(model.histories, history, strict=True):
        h.push(table)

    num_nodes = data.num_nodes
    adj = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    adj.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
    loader = gas.SubgraphLoader(data, ptr, batch_size=2, layout=layout, log=False)
    for batch, *args in loader:
        batch_size, n_id = args[0], args[1]
        own = n_id[:batch_size]
        x, outs = data.x, []
        for layer in range(3):
            conv = model.convs[layer]
            h = adj[own] @ (x @ conv.lin.weight.t()) + conv.bias
            if layer == 1:
                h = model.bn(h) + x[own]
            h = h.relu()
            outs.append(h)
            if layer < 2:  # Own rows with gradient, all others from the history, without.
                x = history[layer].index_copy(0, own, h)
                history[layer][own] = h.detach()
        expected = model.lin(torch.cat(outs, dim=-1))
        wanted = torch.autograd.grad(expected.pow(2).sum(), list(model.parameters()))

        out = run(model, batch, *args)
        assert relative_error(out, expected) < 1e-12
        found = torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))
        assert_gradients_equal(found, wanted, 1e-12)
    for h, table in zip(model.histories, history, strict=True):
        assert relative_error(h.emb, table) < 1e-12


def test_batches_push_in_train_and_in_eval_mode():
    data, ptr = make_graph("SAGE", directed=True)
    model = make_model("SAGE", data)
    full_batch(model.eval(), data, fill=True)
    for mode in (True, False):
        model.train(mode)
        before = [history.emb.clone() for history in model.histories]
        for conv in model.convs:
            conv.lin_l.weight.data.add_(0.1)
        for batch, *args in gas.SubgraphLoader(data, ptr, batch_size=2, log=False):
            run(model, batch, *args)
        for history, old in zip(model.histories, before, strict=True):
            assert not torch.equal(history.emb, old)


@pytest.mark.slow(fast=31)
@pytest.mark.parametrize(
    "edges",
    {
        "isolated": torch.tensor([[0, 1], [1, 0]]),
        "self_loops": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]),
        "duplicates": torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 2, 2]]),
        "none": torch.empty(2, 0, dtype=torch.long),
        "directed": torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(BIPARTITE))
def test_unusual_graphs_equal_pyg(edges, num_parts, layout, name):
    num_nodes = 8
    data = Data(x=torch.randn(num_nodes, 5), edge_index=edges[1], num_nodes=num_nodes)
    if name == "SharedGCN":
        data.edge_weight = torch.rand(edges[1].size(1))
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=num_nodes, log=False)
    data = gas.permute(data, perm, log=False)
    model = BIPARTITE[name](num_nodes, 5, 3).eval()
    loader = gas.EvalSubgraphLoader(data, ptr, layout=layout, log=False)
    expected = full_batch(model, data)
    if layout == "fused":
        gas.fuse(model)
    assert torch.allclose(model(loader=loader), expected, atol=1e-6)
