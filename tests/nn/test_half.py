"""float16, and autocast to either half type: what PyG's layers give, in the same type."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from adjacencies import make_adjacency
from conftest import random_graph
from convs import CONVS, WEIGHTED, call, pair

import gas
from gas import nn
from gas.history.rows import Rows
from gas.nn import edge_conv, gat_attention, gatv2_attention, gaussian_mixture, spmm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires("cuda"))]
HALVES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


def near(found, exact, tolerance):
    gap = (found.double() - exact.double()).norm()
    return gap <= tolerance * exact.double().norm().clamp(min=1e-3)


@pytest.mark.slow(fast=101)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["autocast", "autocast, half features", "half layer"])
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", CONVS)
def test_layers_give_what_those_of_pyg_give(name, kind, way, device):
    torch.manual_seed(1)
    adj = make_adjacency(40, 40, 200, weighted=name.split()[0] in WEIGHTED, dtype=torch.float32)
    adj.value = None if adj.value is None else adj.value.abs()  # GCNConv takes the root of sums.
    inputs = torch.randn(40, 5)
    layer_type = kind if way == "half layer" else torch.float32
    adj = adj.to(device, torch.float32 if way == "autocast" else kind)
    found = []
    for conv, edges in zip(pair(name), (adj.to_edge_index(), (adj, None)), strict=True):
        conv = conv.to(device, layer_type)
        x = inputs.to(device, torch.float32 if way == "autocast" else kind, copy=True)
        x.requires_grad_()  # A tensor for each: gradients of one would be added up.
        with torch.autocast(device, kind, enabled=way != "half layer"):
            out = call(conv, x, *edges)
        out.float().pow(2).sum().backward()
        found.append((conv, out, x.grad, [p.grad for p in conv.parameters()]))
    (theirs, expected, grad, grads), (ours, out, own_grad, own_grads) = found
    assert ours.path == "fused"
    if kind == torch.float16:  # bfloat16 stays what it is, as kernels know it.
        assert out.dtype == expected.dtype
    assert out.dtype in (kind, expected.dtype)
    assert near(out, expected, TOLERANCE[kind])
    assert own_grad.dtype == grad.dtype
    for mine, other, parameter in zip(own_grads, grads, ours.parameters(), strict=True):
        assert mine.dtype == other.dtype == parameter.dtype
        assert near(mine, other, 40 * TOLERANCE[torch.float16])
    if theirs.aggr not in ("max", "min"):  # Of nearly equal rows others are the largest.
        assert near(own_grad, grad, 20 * TOLERANCE[kind])


@pytest.mark.parametrize("device", DEVICES)
def test_sums_before_a_linear_layer_have_the_type_of_messages(device):
    adj = make_adjacency(40, 40, 200, weighted=True, dtype=torch.float32).to(device)
    x = torch.randn(40, 3, device=device)
    assert nn.sum_convs.should_aggregate_first(adj, x, 64)
    assert nn.mixture.should_sum_first(adj, x, 2, 64)
    for conv in (
        nn.GCNConv(3, 64, normalize=False, bias=False),
        nn.GMMConv(3, 64, 1, 2, root_weight=False, bias=False),
    ):
        with torch.autocast(device, torch.float16):
            out = conv.to(device)(x, adj)
        assert conv.path == "fused"
        assert out.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_operators_in_float16_are_computed_in_float32(device):
    """And rounded once; of wider weights they aren't rounded at all."""
    adj = make_adjacency(30, 50, 400).to(device)
    x, ends = (torch.randn(n, 2, 8, device=device).half() for n in (50, 30))
    scores = [torch.randn(n, 2, device=device) for n in (50, 30)]
    att, weight = torch.randn(2, 8, device=device), torch.randn(400, device=device)
    points = [torch.rand(n, 3, device=device) for n in (400, 2, 2)]
    operators = {
        "sum": (spmm, (x[:, 0], None)),
        "weighted sum": (spmm, (x[:, 0], weight)),
        "largest": (lambda adj, x: spmm(adj, x, reduce="max"), (x[:, 0],)),
        "attention": (gat_attention, (x, *scores)),
        "attention, both ends": (gatv2_attention, (x, ends, att)),
        "edges": (edge_conv, (ends[:, 0], x[:, 0], torch.nn.ELU(), "sum")),
        "mixture": (gaussian_mixture, (x, *points)),
    }
    for name, (operator, inputs) in operators.items():
        floats = [t.float() if isinstance(t, torch.Tensor) else t for t in inputs]
        halves = [t.half() if isinstance(t, torch.Tensor) else t for t in inputs]
        assert torch.equal(operator(adj, *halves), operator(adj, *map(rounded, floats)).half()), (
            name
        )
        out = operator(adj, *inputs)
        wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in inputs)
        assert out.dtype == (torch.float32 if wide else torch.float16), name
        assert torch.equal(out, operator(adj, *floats).to(out.dtype)), name


def rounded(value):
    return value.half().float() if isinstance(value, torch.Tensor) else value


def test_values_of_an_adjacency_widen_messages():
    adj = make_adjacency(1, 40, 3000, weighted=True, dtype=torch.float32)
    adj.value.fill_(1.0)
    x = torch.full((40, 2), 100.0, dtype=torch.float16)
    out = spmm(adj, x)
    assert out.dtype == torch.float32
    assert out.eq(300_000).all()  # float16 ends at 65,504.
    assert spmm(adj.to(torch.float64), x).dtype == torch.float64
    assert spmm(adj.remove_values(), x).eq(torch.inf).all()
    assert spmm(adj, x, reduce="max").dtype == torch.float16


def test_degrees_that_float16_does_not_hold():
    adj = make_adjacency(1, 1, 70_000)
    conv = nn.GCNConv(1, 1, bias=False, add_self_loops=False).half()
    torch.nn.init.ones_(conv.lin.weight)
    out = conv(torch.ones(1, 1, dtype=torch.float16), adj)
    assert out.dtype == torch.float16
    assert torch.allclose(out, torch.ones_like(out), atol=1e-2)


def test_rows_of_a_batch():
    adj = make_adjacency(20, 50, 300)
    own, halo = torch.randn(20, 4).half().requires_grad_(), torch.randn(30, 4).half()
    for reduce in ("sum", "mean", "max"):
        out = spmm(adj, Rows(own, halo), reduce=reduce)
        assert torch.equal(out, spmm(adj, torch.cat([own, halo]), reduce=reduce))
        out.sum().backward()
        assert own.grad.dtype == torch.float16
        assert own.grad.any()


def test_relations_in_float16():
    edges = {("a", name, "b"): torch.randint(9, (2, 40)) for name in ("to", "from")}
    x = torch.randn(9, 4)
    for kind, adj in nn.relations(edges, {"a": 9, "b": 9}).items():
        out = nn.SAGEConv(4, 3).half()((x.half(), x.half()), adj)
        assert out.dtype == torch.float16, kind


MODELS = {
    "GCN": {},
    "GraphSAGE": {},
    "GAT": {"hidden_heads": 2, "out_channels": 3, "out_heads": 1},
    "APPNP": {},
    "PNA": {"aggregators": ["sum", "max"], "scalers": ["identity", "amplification"]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_histories(name, kind, device):
    """Close to what they give without autocast; parameters learn in their own type."""
    torch.manual_seed(1)
    data = random_graph()
    options = dict(MODELS[name])
    if name == "PNA":
        options["deg"] = torch.bincount(data.edge_index[1], minlength=60)
    sizes = {"in_channels": 5, "hidden_channels": 8, "out_channels": 3, "num_layers": 3}
    model = getattr(gas.models, name)(60, **{**sizes, **options}, device=device).to(device)
    graph = gas.cluster(data, num_parts=6, method="random", model=model, log=False)
    loader = gas.SubgraphLoader(graph, batch_size=2, layout="fused", log=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of histories that weren't filled.
        for batch in loader:
            batch = batch.to(device)
            exact = model(batch, push=False)
            with torch.autocast(device, kind):
                out = model(batch, push=False)
                F.cross_entropy(model(batch).float(), batch.own.y).backward()
            assert near(out, exact, 3 * TOLERANCE[kind])
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert all(history.emb.isfinite().all() for history in model.histories)
