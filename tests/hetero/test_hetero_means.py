"""HAN weighs relations by means over all nodes: of the batch's own rows, and the others' last."""

import copy
import math

import pytest
import torch
from hetero.graphs import SIZES, WIDTHS, bibliography, flat
from torch import nn
from torch_geometric.nn import HANConv, HeteroConv, SAGEConv

import gas
from gas.scalable.hetero.layers import HANConv as OurHANConv
from gas.scalable.hetero.layers import Visitor, mean_rows, visit_layers
from gas.scalable.hetero.plan import add_ids, collect_inputs


class Attended(nn.Module):
    """HAN layers behind one another, with another layer between, or none."""

    def __init__(self, data, num_layers=2, between=False, heads=2, dropout=0.0):
        super().__init__()
        widths, options = dict.fromkeys(WIDTHS, 8), {"heads": heads, "dropout": dropout}
        self.convs = nn.ModuleList(
            HANConv(WIDTHS if i == 0 else widths, 8, data.metadata(), **options)
            for i in range(num_layers)
        )
        self.between = None
        if between:
            self.between = HeteroConv({kind: SAGEConv(8, 8) for kind in data.edge_types})

    def forward(self, x_dict, edge_index_dict):
        for i, conv in enumerate(self.convs):
            x_dict = conv(x_dict, edge_index_dict)
            if i == 0 and self.between is not None:
                x_dict = self.between(x_dict, edge_index_dict)
        return x_dict


NETS = {
    "one": lambda data: Attended(data, 1),
    "two": Attended,
    "three": lambda data: Attended(data, 3, heads=1),
    "another between": lambda data: Attended(data, 2, between=True),
}
LEVELS = {"one": 1, "two": 3, "three": 5, "another between": 4}


def converted(name, num_parts=4, dtype=torch.double, **options):
    data = bibliography(dtype=dtype)
    torch.manual_seed(0)
    net = NETS[name](data).to(dtype)
    with torch.no_grad():  # So that weights of relations are far from alike.
        for conv in net.convs:
            conv.q.mul_(20)
    model = gas.to_scalable(net, data, **{"dtype": dtype, **options})
    return data, net, model, gas.cluster(data, num_parts, log=False, method="random")


def loader_of(graph, **options):
    return gas.SubgraphLoader(graph, log=False, **options)


@pytest.mark.slow(fast=3)
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("num_parts", "batch_size"), [(1, 1), (9, 4), (7, 1)])
def test_sweeps_and_inference_equal_pyg_on_the_whole_graph(name, num_parts, batch_size):
    data, net, model, graph = converted(name, num_parts)
    expected = net.eval()(data.x_dict, data.edge_index_dict)
    assert type(net.convs[0]) is HANConv
    pred = model.predict(graph, batch_size)
    torch.testing.assert_close(flat(pred), flat(expected))
    found = gas.verify(model, graph, batch_size)
    assert found
    assert max(found.errors) < 1e-12
    assert model.plan.num_levels == LEVELS[name]
    fresh = gas.to_scalable(net, data, dtype=torch.double).eval()
    for _ in range(fresh.plan.num_levels):
        for batch in loader_of(graph, batch_size=batch_size, shuffle=True):
            out = fresh(batch)
    for batch in loader_of(graph, batch_size=batch_size):
        out = fresh(batch)
        for kind, rows in out.items():
            own = batch[kind].n_id[: batch[kind].batch_size]
            torch.testing.assert_close(rows, expected[kind][graph[kind].perm[own]])


@pytest.mark.slow(fast=1)
@pytest.mark.filterwarnings("ignore:A history was read before it was filled")
@torch.no_grad()
@pytest.mark.parametrize("name", NETS)
def test_fewer_sweeps_are_not_enough(name):
    _, _, model, graph = converted(name)
    model.eval()
    exact = flat(model.full_batch(graph))
    errors = []
    for _ in range(model.plan.num_levels + 1):
        outs = {kind: torch.zeros(SIZES[kind], 8, dtype=torch.double) for kind in SIZES}
        for batch in loader_of(graph):
            for kind, rows in model(batch).items():
                outs[kind][batch[kind].n_id[: batch[kind].batch_size]] = rows
        errors.append(float((flat(outs) - exact).norm() / exact.norm()))
    assert errors[-1] < 1e-12
    assert errors[0] > 1e-4


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("name", NETS)
def test_one_part_has_the_gradients_of_pyg_on_the_whole_graph(name):
    data, net, model, graph = converted(name, 1)
    twin = copy.deepcopy(net).eval()
    model.predict(graph)
    (batch,) = list(loader_of(graph))
    flat(model.eval()(batch)).square().sum().backward()
    expected = twin(data.x_dict, data.edge_index_dict)
    flat(expected).square().sum().backward()
    assert any(bool(conv.q.grad.any()) for conv in twin.convs)
    for mine, true in zip(net.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (true.grad is None)
        if true.grad is not None:
            torch.testing.assert_close(mine.grad, true.grad)


class Detached(Visitor):
    """A full batch in which rows of other nodes than a batch's give no gradient."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch

    def _own(self, kind, x):
        own = torch.zeros(len(x), 1, dtype=torch.bool)
        own[self.batch[kind].n_id[: self.batch[kind].batch_size]] = True
        return torch.where(own, x, x.detach())

    def source(self, layer, kind, x):
        return self._own(kind, x) if (layer.number, kind) in self.model.plan.reads else x

    def mean(self, layer, kind, rows):
        return mean_rows(kind, self._own(kind, rows))


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("name", NETS)
def test_a_batch_has_the_gradient_of_the_whole_graph_with_others_detached(name):
    _, net, model, graph = converted(name, 3)
    model.eval().predict(graph)
    for batch in loader_of(graph):
        net.zero_grad()
        flat(model(batch)).square().sum().backward()
        mine = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        arguments = collect_inputs(add_ids(graph), model.plan.inputs)
        with visit_layers(model.net, arguments["edge_index_dict"], Detached(model, batch)):
            full = model.net(**arguments)
        own = {kind: batch[kind].n_id[: batch[kind].batch_size] for kind in full}
        sum(full[kind][own[kind]].square().sum() for kind in full).backward()
        for found, parameter in zip(mine, net.parameters(), strict=True):
            if parameter.grad is not None:
                torch.testing.assert_close(found, parameter.grad)


def mean_positions(model):
    return sorted(model.plan.means.values())


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("change", ["nothing", "by hand", "forgotten", "loaded"])
def test_sums_follow_what_is_in_the_histories(change, tmp_path):
    _, _, model, graph = converted("two")
    model.predict(graph)
    loader = loader_of(graph, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gas.save(tmp_path, model)
    for _ in range(3):
        for batch in loader:
            flat(model.train()(batch)).square().sum().backward()
            optimizer.step()
    for position in mean_positions(model):
        history = model.histories[position]
        known = model.totals._known[position]
        if change == "by hand":
            history.emb.add_(1)
        elif change == "forgotten":
            history.reset_parameters()
        elif change == "loaded":
            gas.load(tmp_path, model)
        total = model.totals.of(position, history)
        assert (total is known[1]) == (change == "nothing")
        torch.testing.assert_close(total, history.emb.sum(0), rtol=1e-12, atol=1e-12)


def test_nothing_is_pushed_if_it_is_not_wanted():
    _, _, model, graph = converted("two")
    model.predict(graph)
    batch = loader_of(graph).cut([1])
    model(batch)
    before = [history.emb.clone() for history in model.histories]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model(batch, push=False)
    for history, rows in zip(model.histories, before, strict=True):
        assert torch.equal(history.emb, rows)


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize(
    ("options", "io"),
    [
        ({"dtype": "bfloat16"}, "serial"),
        ({"dtype": "int8"}, "concurrent"),
        ({"store": "disk"}, "concurrent"),
    ],
)
def test_stores_and_codecs(options, io):
    data = bibliography()
    torch.manual_seed(0)
    model = gas.to_scalable(Attended(data), data, io=io, **options)
    graph = gas.cluster(data, 4, log=False, method="random")
    assert gas.verify(model, graph)
    model.predict(graph)
    model.train()
    for batch in loader_of(graph, batch_size=2):
        flat(model(batch)).sum().backward()
    model.close()


@pytest.mark.slow
def test_training_with_dropout_lowers_the_loss():
    data = bibliography()
    torch.manual_seed(0)
    model = gas.to_scalable(Attended(data, dropout=0.3), data)
    graph = gas.cluster(data, 4, log=False, method="random")
    model.predict(graph)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.02), []
    for _ in range(30):
        for batch in loader_of(graph, batch_size=2, shuffle=True):
            paper = batch["paper"]
            y = paper.y[: paper.batch_size]
            loss = nn.functional.cross_entropy(model.train()(batch)["paper"], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.85 * sum(losses[:4])


def test_the_layer_alone_is_that_of_pyg():
    data = bibliography(dtype=torch.double)
    torch.manual_seed(0)
    conv = HANConv(WIDTHS, 8, data.metadata(), heads=2).double()
    expected = conv(data.x_dict, data.edge_index_dict)
    weights = conv(data.x_dict, data.edge_index_dict, True)[1]
    assert math.isclose(weights["paper"].sum().item(), 1.0)
    conv.__class__ = OurHANConv
    out = conv(data.x_dict, data.edge_index_dict)
    assert list(out) == list(expected)
    for kind, rows in expected.items():
        torch.testing.assert_close(out[kind], rows)
    again, same = conv(data.x_dict, data.edge_index_dict, True)
    assert torch.equal(again["paper"], expected["paper"])
    assert torch.equal(same["paper"], weights["paper"])
    none = {kind: x[:0] for kind, x in data.x_dict.items()}
    empty = conv(none, {kind: e[:, :0] for kind, e in data.edge_index_dict.items()})
    assert empty["paper"].shape == (0, 8)


def test_what_is_printed():
    _, _, model, _ = converted("one")
    assert "60 nodes of 'paper', 4 wide, read by 'convs.0' as a mean" in repr(model)
