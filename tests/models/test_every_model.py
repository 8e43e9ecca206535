"""Properties of every model: parameter groups, reset, dropout, and its definition."""

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.nn import PNAConv as PyGPNAConv
from torch_geometric.utils import degree

import gas
from gas.models import layered

PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"]}
ZOO = {
    "GCN": (gas.models.GCN, (5, 8, 3, 3), {}),
    "GCN linear": (gas.models.GCN, (5, 8, 3, 3), {"linear": True, "batch_norm": True}),
    "GraphSAGE": (gas.models.GraphSAGE, (5, 8, 3, 3), {"batch_norm": True}),
    "GIN": (gas.models.GIN, (5, 8, 3, 3), {"batch_norm": True, "noise": 0.1}),
    "GAT": (gas.models.GAT, (5, 4, 2, 3, 2, 3), {}),
    "APPNP": (gas.models.APPNP, (5, 8, 3, 3), {}),
    "GCN2": (gas.models.GCN2, (5, 8, 3, 3), {"batch_norm": True, "shared_weights": False}),
    "PNA": (gas.models.PNA, (5, 8, 3, 3), {**PNA, "batch_norm": True}),
    "PNA_JK": (gas.models.PNA_JK, (5, 8, 3, 3), {**PNA, "batch_norm": True}),
}
WIDTHS = {"GAT": [8, 8], "APPNP": [3, 3]}


def make(name, dropout=0.0, **kwargs):
    cls, args, options = ZOO[name]
    torch.manual_seed(0)
    data = random_graph(directed=False)
    data = data if cls.transform is None else cls.transform(data)
    if "aggregators" in options:
        options = {**options, "deg": degree(data.edge_index[1], data.num_nodes)}
    return cls(60, *args, **{**options, **kwargs, "dropout": dropout}), data


def run(model, data, **kwargs):
    weight = {"edge_weight": data.edge_weight} if "edge_weight" in data else {}
    return model(data.x, data.edge_index, **weight, **kwargs)


def dense(data):
    adj = torch.zeros(60, 60)
    weight = data.edge_weight if "edge_weight" in data else torch.ones(data.edge_index.size(1))
    return adj.index_put_((data.edge_index[1], data.edge_index[0]), weight, accumulate=True)


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_grouped_once(name):
    model, _ = make(name)
    groups = model.param_groups(0.5, 0.25)
    assert all(group["weight_decay"] in (0.5, 0.25) for group in groups)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    by_id = {id(parameter): key for key, parameter in model.named_parameters()}
    second = [group["params"] for group in groups if group["weight_decay"] == 0.25]
    other = {by_id[id(parameter)] for params in second for parameter in params}
    last = {"GCN": "convs.2.", "GraphSAGE": "convs.2.", "PNA": "convs.2.", "GIN": "mlps.2."}
    prefixes = {"GAT": (), "APPNP": ("lins.1.",), **{key: (value,) for key, value in last.items()}}
    wanted = prefixes.get(name, ("lins.",))
    names = [key for key, _ in model.named_parameters()]
    assert other == {key for key in names if wanted and key.startswith(wanted)}


@pytest.mark.parametrize("name", ZOO)
def test_what_histories_hold(name):
    """The width of each layer; rows that the activation could have made."""
    model, data = make(name)
    run(model.eval(), data, fill=True)
    widths = [history.embedding_dim for history in model.histories]
    assert widths == WIDTHS.get(name, [8, 8])
    for history in model.histories:
        low = {"GAT": -1, "APPNP": -math.inf}.get(name, 0)
        assert low <= float(history.emb.min()) < float(history.emb.max())


@pytest.mark.parametrize("name", ZOO)
def test_reset_parameters(name):
    model, data = make(name)
    run(model, data, fill=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    model.reset_parameters()
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    fixed = ("bias", "bns", "eps", "mean_log_degree", "num_batches", "running", "norm")
    matrices = {key for key, value in before.items() if value.dim() == 2}
    assert matrices <= changed
    assert all(
        key in changed or any(f in key for f in fixed) or before[key].dim() < 2 for key in before
    )
    assert all((history.emb == 0).all() for history in model.histories)
    torch.manual_seed(1)
    model.reset_parameters()
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("drop_input", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_dropping_the_input(name, drop_input):
    model, data = make(name, dropout=0.9, drop_input=drop_input)
    first = model.lins[0] if model.lins else model.convs[0]
    first = first[0] if isinstance(first, torch.nn.Sequential) else first
    seen = []
    first.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    run(model.train(), data)
    assert torch.equal(seen[0], data.x) != drop_input
    run(model.eval(), data)
    assert torch.equal(seen[1], data.x)


@pytest.mark.parametrize("name", ["GCN linear", "APPNP", "GCN2", "PNA_JK"])
def test_the_last_linear_layer_drops_its_input(name):
    model, data = make(name, dropout=0.99)
    seen = []
    model.lins[-1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    run(model.train(), data)
    run(model.eval(), data)
    dropped, whole = ((x != 0).float().mean() for x in seen)
    assert dropped < 0.05
    assert whole > 0.25


@pytest.mark.parametrize("name", ZOO)
def test_dropout_changes_training_alone(name):
    model, data = make(name, dropout=0.5)
    out = run(model.eval(), data)
    assert torch.equal(run(model, data), out)
    for bn in model.modules():
        if isinstance(bn, torch.nn.BatchNorm1d):
            bn.momentum = 0.0
    assert not torch.allclose(run(model.train(), data), run(model, data))
    with pytest.raises(ValueError, match=r"'dropout' is 1.5, expected a probability in \[0, 1\)"):
        make(name, dropout=1.5)


@pytest.mark.parametrize("name", ZOO)
def test_copies_are_independent(name):
    """After training, so that no copied module holds on to a graph of autograd."""
    model, data = make(name)
    run(model.train(), data, fill=True).sum().backward()
    twin = copy.deepcopy(model).eval()
    expected = run(model.eval(), data)
    assert torch.equal(run(twin, data), expected)
    for parameter in twin.parameters():
        parameter.data.zero_()
    for history in twin.histories:
        history.reset_parameters()
    assert torch.equal(run(model, data), expected)
    assert all(history.emb.abs().sum() > 0 for history in model.histories)


@pytest.mark.parametrize("name", ZOO)
def test_layer_wise_inference_keeps_nothing_between_layers(name):
    """At constant memory: no state per batch, whatever a layer takes of earlier ones."""
    model, data = make(name)
    perm, ptr = gas.metis(data.edge_index, 4, num_nodes=60, log=False)
    loader = gas.EvalSubgraphLoader(gas.permute(data, perm, log=False), ptr, log=False)
    original = model.forward_layer
    layers = []

    def forward_layer(layer, x, adj_t, state, edge_weight=None):
        out = original(layer, x, adj_t, state, edge_weight)
        assert set(state) == {"batch"}
        layers.append(layer)
        return out

    model.forward_layer = forward_layer
    model(loader=loader)
    assert layers == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.slow(fast=31)
@pytest.mark.parametrize("bipartite", [True, False])
@pytest.mark.parametrize("layout", ["fused", "edge_index", "csr"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_batches_of_every_shape_equal_the_full_batch(name, residual, layout, bipartite):
    """Square batches have empty rows for the halo, which aren't read."""
    kwargs = {} if name == "APPNP" else {"residual": residual}
    model, data = make(name, **kwargs)
    perm, ptr = gas.metis(data.edge_index, 4, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    expected = run(model.eval(), data, fill=True)
    for batch, *args in gas.SubgraphLoader(data, ptr, 1, bipartite, layout=layout, log=False):
        x, adj_t, kwargs = model.inputs_of(batch)
        out = model(x, adj_t, *args, **kwargs)
        assert torch.allclose(out, expected[args[1][: args[0]]], atol=1e-4)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_the_residual_is_a_layers_input(name, residual):
    """Of the hidden layers, which are as wide as their inputs."""
    if name == "APPNP":
        return  # Its teleport is one.
    model, data = make(name, residual=residual)
    assert model.residual == residual
    norms = model.bns or [torch.nn.Identity()] * 3
    seen = []
    model.convs[1].register_forward_hook(lambda conv, args, out: seen.append((args[0], out)))
    run(model.eval(), data, fill=True)
    ((x, h),) = seen
    if name == "GIN":
        h = model.mlps[1](h)
    h = norms[1](h) + (x if residual else 0)
    assert torch.allclose(model.histories[1].emb, model.activation(h), atol=1e-5)


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_what_is_normalised(name, batch_norm):
    """Hidden layers, or all where a linear layer follows; and inside of GIN's perceptrons."""
    if name in ("GAT", "APPNP"):
        return  # They have no batch norm.
    model, _ = make(name, batch_norm=batch_norm)
    layers = 3 if model.lins else 2
    assert len(model.bns) == (layers if batch_norm else 0)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    more = {"GIN": 3, "PNA_JK": 1}.get(name, 0)
    assert len(norms) == (layers + more if batch_norm else 0)


# Definitions, in dense algebra --------------------------------------------------------------------


def test_gat():
    model, data = make("GAT")
    adj = dense(data)
    x = data.x
    for conv, heads, last in zip(model.convs, (2, 2, 2), (False, False, True), strict=True):
        h = (x @ conv.lin.weight.t()).view(60, heads, -1)
        score = (h * conv.att_src).sum(-1)[None, :, :] + (h * conv.att_dst).sum(-1)[:, None, :]
        weight = adj[:, :, None] * F.leaky_relu(score, 0.2).exp()  # Duplicate edges count twice.
        out = torch.einsum("ijh,jhc->ihc", weight / weight.sum(1, keepdim=True), h)
        out = out.mean(1) if last else out.flatten(1)
        x = out + conv.bias
        x = x if last else F.elu(x)
    assert torch.allclose(run(model.eval(), data), x, atol=1e-5)
    assert bool((adj.diagonal() >= 1).all())  # The transform has added self-loops.


def test_appnp():
    model, data = make("APPNP", alpha=0.3)
    first, second = model.lins
    start = second(first(data.x).relu())
    x = start
    for _ in range(3):
        x = 0.7 * dense(data) @ x + 0.3 * start
    assert torch.allclose(run(model.eval(), data), x, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_gcn2(shared):
    model, data = make("GCN2", shared_weights=shared, batch_norm=False, alpha=0.2, theta=0.7)
    start = x = model.lins[0](data.x).relu()
    for layer, conv in enumerate(model.convs):
        beta = math.log(0.7 / (layer + 1) + 1)
        h, h_0 = 0.8 * dense(data) @ x, 0.2 * start
        if shared:
            x = (1 - beta) * (h + h_0) + beta * (h + h_0) @ conv.weight1
        else:
            x = (1 - beta) * (h + h_0) + beta * (h @ conv.weight1 + h_0 @ conv.weight2)
        x = x.relu()
    assert torch.allclose(run(model.eval(), data), model.lins[1](x), atol=1e-5)


def test_sage():
    model, data = make("GraphSAGE", batch_norm=False)
    adj, x = dense(data), data.x
    for layer, conv in enumerate(model.convs):
        mean = adj @ x / adj.sum(1, keepdim=True).clamp(min=1)
        x = conv.lin_l(mean) + conv.lin_r(x)
        x = x.relu() if layer < 2 else x
    assert torch.allclose(run(model.eval(), data), x, atol=1e-5)


def test_gin():
    model, data = make("GIN", batch_norm=False, noise=0.0)
    adj, x = dense(data), data.x
    for layer, (conv, mlp) in enumerate(zip(model.convs, model.mlps, strict=True)):
        conv.eps.data.fill_(0.5)
        x = mlp(adj @ x + 1.5 * x)
        x = x.relu() if layer < 2 else x
    assert torch.allclose(run(model.eval(), data), x, atol=1e-4)


def test_the_noise_regulariser_of_gin():
    model, data = make("GIN", batch_norm=False, noise=0.1)
    run(model.eval(), data)
    assert model.reg_loss == 0
    run(model.train(), data)
    small = model.reg_loss
    assert float(small.detach()) > 0
    small.backward()
    assert model.convs[1].eps.grad is not None
    # What doesn't depend on its input doesn't feel the noise.
    for mlp in model.mlps:
        mlp[0].weight.data.zero_()
    run(model, data)
    assert float(model.reg_loss.detach()) == 0
    normed, _ = make("GIN", batch_norm=True, noise=10.0)
    plain, _ = make("GIN", batch_norm=True, noise=0.0)
    plain.load_state_dict(normed.state_dict())
    for _ in range(2):
        run(normed.train(), data)
        run(plain.train(), data)  # The noise isn't remembered by batch norm.
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(normed.buffers(), plain.buffers(), strict=True)
    )
    one = gas.models.GIN(60, 5, 8, 3, 1, noise=0.1)
    run(one, data)
    assert one.reg_loss == 0  # There is no history to be wrong.
    with pytest.raises(ValueError, match="'noise' is -1, expected a standard deviation"):
        gas.models.GIN(60, 5, 8, 3, 2, noise=-1)


def test_noise_leaves_norms_without_statistics_as_they_are():
    model, data = make("GIN", batch_norm=True, noise=0.1)
    norms = [mlp[1] for mlp in model.mlps]
    norms[1].track_running_stats = False
    run(model.train(), data)
    assert [norm.track_running_stats for norm in norms] == [True, False, True]


REFUSED = {
    "GCN": {"dropout": 2.0},
    "GCN linear": {"hidden_channels": [8, 8]},
    "GraphSAGE": {"aggr": "middle"},
    "GIN": {"noise": -1},
    "GAT": {"out_heads": 0},
    "APPNP": {"alpha": -1},
    "GCN2": {"theta": -5},
    "PNA": {"scalers": ["none"]},
    "PNA_JK": {"deg": torch.zeros(60)},
}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_that_is_refused_leaves_no_files(name, tmp_path):
    cls, args, options = ZOO[name]
    names = [each for each in inspect.signature(cls).parameters if each != "num_nodes"]
    given = {**dict(zip(names, args, strict=False)), "deg": torch.ones(60), **options}
    given = {**{key: value for key, value in given.items() if key in names}, **REFUSED[name]}
    with pytest.raises(ValueError, match="(?s)is .*, expected"):
        cls(60, **given, store="disk", path=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_the_width_of_features_is_inferred(name):
    cls, (_, *args), options = ZOO[name]
    model, data = make(name)
    lazy = cls(60, -1, *args, **options)
    assert run(lazy, data).shape == run(model, data).shape


def test_no_perceptron_of_gin_is_a_bottleneck_of_classes():
    model = gas.models.GIN(60, 5, 8, 3, 3)
    assert [mlp[0].out_features for mlp in model.mlps] == [8, 8, 8]
    assert gas.models.GIN(60, 5, 8, 3, 1).mlps[0][0].out_features == 3


def test_the_noise_of_gin_has_its_size():
    torch.manual_seed(0)
    model = gas.models.GIN(4000, 8, 8, 8, 2, noise=0.1, train_eps=False)
    for mlp in model.mlps:
        for linear in (mlp[0], mlp[3]):
            linear.weight.data.copy_(torch.eye(8))
            linear.bias.data.fill_(50.0)  # Far from where ReLU bends.
    nothing = torch.empty(2, 0, dtype=torch.long)
    model.train()(torch.zeros(4000, 8), nothing)
    # Without edges, the noise of 8 elements passes unchanged: 0.1 times the mean of a chi(8).
    expected = 0.1 * math.sqrt(2) * math.gamma(4.5) / math.gamma(4)
    assert float(model.reg_loss.detach()) == pytest.approx(expected, rel=0.02)


def test_pna():
    """One aggregator and scaler at a time, against dense algebra."""
    data = random_graph()
    adj = dense(data)
    deg = adj.sum(1)
    mean_log = (deg + 1).log().mean()
    for aggregator in ("sum", "mean", "max", "min"):
        for scaler in ("identity", "amplification", "attenuation"):
            conv = gas.models.pna.PNAConv(5, 4, [aggregator], [scaler], deg)
            h = conv.pre_lins[0](data.x).relu()
            if aggregator in ("sum", "mean"):
                out = adj @ h / (deg.clamp(min=1)[:, None] if aggregator == "mean" else 1)
            else:
                largest = aggregator == "max"
                fill = -torch.inf if largest else torch.inf
                each = torch.where((adj > 0)[:, :, None], h[None], torch.tensor(fill))
                out = each.amax(1) if largest else each.amin(1)
                out = torch.where((deg > 0)[:, None], out, torch.tensor(0.0))
            out = conv.post_lins[0](out)
            if scaler == "amplification":
                out = out * ((deg + 1).log() / mean_log)[:, None]
            if scaler == "attenuation":
                out = out * (mean_log / (deg.clamp(min=1) + 1).log())[:, None]
            expected = conv.lin(data.x) + out
            assert torch.allclose(conv(data.x, data.edge_index), expected, atol=1e-5)
    both = gas.models.pna.PNAConv(5, 4, ["mean", "max"], ["identity", "amplification"], deg)
    assert len(both.pairs) == len(both.pre_lins) == 4


def test_pna_scales_as_pyg_does():
    data = random_graph()
    deg = degree(data.edge_index[1], 60).long()
    theirs = PyGPNAConv(5, 4, ["mean"], ["identity"], torch.bincount(deg))
    ours = gas.models.pna.PNAConv(5, 4, ["mean"], ["identity"], deg)
    assert float(ours.mean_log_degree) == pytest.approx(theirs.aggr_module.avg_deg_log.item())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregators": ["median"]}, r"'aggregators' is \['median'\], expected some of sum, mean"),
        ({"aggregators": []}, "'aggregators' is"),
        ({"scalers": "identity"}, "'scalers' is 'identity', expected some of identity, ampl"),
    ],
)
def test_wrong_arguments_of_pna(change, message):
    with pytest.raises(ValueError, match=message):
        gas.models.PNA(60, 5, 8, 3, 3, **{**PNA, "deg": torch.ones(60), **change})


def test_pna_jk():
    model, data = make("PNA_JK", batch_norm=False)
    x = model.lins[0](data.x)
    outs = [x]
    for conv in model.convs:
        x = conv(x, data.edge_index).relu()
        outs.append(x)
    expected = model.lins[1](torch.cat(outs, dim=1))
    assert torch.allclose(run(model.eval(), data), expected, atol=1e-5)


def test_widths_of_layers():
    data = T.GCNNorm()(random_graph())
    model = gas.models.GCN(60, 5, [16, 8], 3, 3)
    run(model, data, fill=True)
    assert [history.embedding_dim for history in model.histories] == [16, 8]
    with pytest.raises(ValueError, match="'hidden_channels' has 1 widths, expected one for each"):
        gas.models.GCN(60, 5, [16], 3, 3)
    with pytest.raises(ValueError, match="expected one width with linear=True"):
        gas.models.GCN(60, 5, [16, 8], 3, 3, linear=True)


@pytest.mark.parametrize("name", ["APPNP", "GCN2"])
def test_missing_weights_are_refused(name):
    model, data = make(name)
    del data.edge_weight
    with pytest.raises(ValueError, match=r"has no edge weights.*GCNNorm"):
        run(model, data)


@pytest.mark.parametrize("name", ZOO)
def test_inference_needs_a_row_of_features_for_each_node(name):
    model, data = make(name)
    data.x = data.x[:, 0]
    loader = gas.SubgraphLoader(gas.cluster(data, 2, log=False), log=False)
    with pytest.raises(ValueError, match=r"'x' has shape \[\d+\], expected features of shape"):
        model.predict(loader, log=False)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", sorted({*ZOO} - {"APPNP", "GAT", "PNA_JK"}))
def test_training_is_the_same_with_relu_and_dropout_apart(name, residual, whole, monkeypatch):
    """Losses, weights and histories are those of one function after the other.

    Bitwise, but where a batch norm joins them.
    """
    calls = []
    original = layered.relu_dropout
    monkeypatch.setattr(layered, "relu_dropout", lambda *args: calls.append(1) or original(*args))

    def train(apart):
        model, data = make(name, dropout=0.4, residual=residual)
        if apart:  # Any other method than that of the class is called with what has a gradient.
            model.push_and_pull = lambda *args, **kwargs: type(model).push_and_pull(
                model, *args, **kwargs
            )
        graph = gas.cluster(data, 4, log=False)
        model.refresh(graph)
        loader = gas.SubgraphLoader(graph, batch_size=2, log=False)
        batches = gas.training.FullBatch(data) if whole else loader
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses = [gas.train_epoch(model, batches, optimizer, full_batch=whole) for _ in range(2)]
        tensors = [*model.state_dict().values(), *(h.emb for h in model.histories)]
        return [torch.tensor(losses), *tensors], bool(model.bns) and not residual

    found, joins_norm = train(apart=False)
    assert len(calls) == 2 * 2 * (1 if whole else 2)
    expected, _ = train(apart=True)
    assert len(calls) == 2 * 2 * (1 if whole else 2)
    tolerance = 1e-5 if joins_norm else 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_appnp_propagates_alike_in_training(monkeypatch):
    """Dropout is before the propagations, between which there is no activation."""
    model, data = make("APPNP", dropout=0.5)
    start = torch.randn(data.num_nodes, model.histories[0].embedding_dim)
    monkeypatch.setattr(model, "_start", lambda x: start)
    whole = gas.training.FullBatch(data)
    out = whole(model.train())
    assert torch.equal(out, whole(model.eval()))
    assert bool((out < 0).any())
