"""Models of typed graphs: equal to the module itself on the whole graph, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hetero.graphs import (
    NETS,
    SIZES,
    Convs,
    Embedded,
    bibliography,
    flat,
    gat,
    net_of,
    sage,
)
from scipy import sparse as scipy_sparse
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, GCNConv, HeteroConv, Linear, SAGEConv, to_hetero

import gas
from gas.native import progress
from gas.scalable.hetero import HeteroModel
from gas.scalable.hetero.layers import Visitor, visit_layers
from gas.scalable.hetero.plan import add_ids, collect_inputs


def converted(name, dtype=torch.double, num_parts=4, seed=0, **options):
    data = bibliography(seed, dtype)
    net = net_of(name, data)
    model = gas.to_scalable(net, data, dtype=dtype, **options)
    return data, net, model, gas.cluster(data, num_parts, log=False, method="random")


def whole(model, data):
    """Run the module on the whole graph in evaluation mode."""
    mode = model.net.training
    model.net.eval()
    with torch.no_grad():
        out = model.full_batch(data)
    model.net.train(mode)
    return out


def loader_of(graph, **options):
    return gas.SubgraphLoader(graph, log=False, **options)


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("num_parts", "batch_size"), [(1, 1), (4, 1), (9, 4)])
def test_sweeps_and_inference_equal_the_whole_graph(name, num_parts, batch_size):
    data, _, model, graph = converted(name, num_parts=num_parts)
    assert isinstance(model, HeteroModel)
    expected = flat(whole(model, data))
    torch.testing.assert_close(flat(model.predict(graph, batch_size)), expected)
    found = gas.verify(model, graph, batch_size)
    assert found
    assert max(found.errors) < 1e-12
    assert len(found.errors) == len(model.histories) + 1
    model.eval()
    for _ in range(model.plan.num_levels):
        for batch in loader_of(graph, batch_size=batch_size, shuffle=True):
            model(batch)
    loader = loader_of(graph, batch_size=batch_size)
    for batch in loader:
        out = model(batch)
        parts = out if isinstance(out, dict) else {model.plan.output: out}
        for kind, rows in parts.items():
            own = batch[kind].n_id[: batch[kind].batch_size]
            assert len(rows) == len(own)
            true = whole(model, graph)
            true = true[kind] if isinstance(true, dict) else true
            torch.testing.assert_close(rows, true[own])


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", NETS)
def test_histories_are_the_rows_of_a_full_batch_after_inference(name):
    _, _, model, graph = converted(name)
    twin = copy.deepcopy(model)
    twin.eval().full_batch(graph, fill=True)
    model.predict(graph)
    for mine, true in zip(model.histories, twin.histories, strict=True):
        torch.testing.assert_close(mine.emb, true.emb)
        assert bool(mine.written.all())


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", NETS)
def test_one_part_has_the_gradients_of_a_full_batch(name):
    _, net, model, graph = converted(name, num_parts=1)
    twin = copy.deepcopy(net).eval()
    (batch,) = list(loader_of(graph))
    flat(model.eval()(batch)).square().sum().backward()
    model.net = twin
    flat(model.full_batch(graph)).square().sum().backward()
    for mine, true in zip(net.parameters(), twin.parameters(), strict=True):
        if true.grad is None or mine.grad is None:
            assert mine.grad is true.grad
        else:
            torch.testing.assert_close(mine.grad, true.grad)


class Detached(Visitor):
    """A full batch in which rows of other nodes than a batch's give no gradient."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch

    def source(self, layer, kind, x):
        if (layer.number, kind) not in self.model.plan.reads:
            return x
        own = torch.zeros(len(x), 1, dtype=torch.bool)
        own[self.batch[kind].n_id[: self.batch[kind].batch_size]] = True
        return torch.where(own, x, x.detach())


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", NETS)
def test_a_batch_has_the_gradient_of_the_whole_graph_with_the_halo_detached(name):
    _, net, model, graph = converted(name, num_parts=3)
    model.eval()
    model.predict(graph)
    for batch in loader_of(graph):
        net.zero_grad()
        out = model(batch)
        flat(out).square().sum().backward()
        mine = [p.grad.clone() if p.grad is not None else None for p in net.parameters()]
        net.zero_grad()
        visitor = Detached(model, batch)
        arguments = collect_inputs(add_ids(graph), model.plan.inputs)
        with visit_layers(model.net, arguments[edges_of(model)], visitor):
            full = model.net(**arguments)
        full = full if isinstance(full, dict) else {model.plan.output: full}
        own = {k: batch[k].n_id[: batch[k].batch_size] for k in full}
        sum(full[k][own[k]].square().sum() for k in full if full[k] is not None).backward()
        for found, parameter in zip(mine, net.parameters(), strict=True):
            true = parameter.grad
            if found is None or true is None:
                assert found is None or not found.any()
                assert true is None or not true.any()
            else:
                torch.testing.assert_close(found, true)


def edges_of(model):
    return next(name for name, key in model.plan.inputs.items() if key == "edge_index")


class Alone(gas.ScalableGNN):
    """The same layers on a graph of one type."""

    def __init__(self, num_nodes, convs):
        super().__init__(num_nodes, 16, len(convs))
        self.convs = gas.fuse(convs)

    def forward(self, x, adj_t, *args):
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv((x, x[: args[0]]), adj_t).relu()
            x = self.push_and_pull(history, x, *args)
        return self.convs[-1]((x, x[: args[0]]), adj_t)


class Typed(torch.nn.Module):
    """The same of a graph whose one type is called so."""

    def __init__(self, convs):
        super().__init__()
        self.convs = torch.nn.ModuleList(HeteroConv({("n", "to", "n"): c}) for c in convs)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs[:-1]:
            x_dict = {k: x.relu() for k, x in conv(x_dict, edge_index_dict).items()}
        return self.convs[-1](x_dict, edge_index_dict)["n"]


def test_one_type_and_one_relation_are_a_graph_of_one_type_bit_by_bit():
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(120, 7, generator=generator),
        edge_index=torch.randint(120, (2, 700), generator=generator),
        y=torch.randint(4, (120,), generator=generator),
    )
    typed = HeteroData()
    typed["n"].x, typed["n"].y = data.x, data.y
    typed["n", "to", "n"].edge_index = data.edge_index
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([SAGEConv(7, 16), SAGEConv(16, 16), SAGEConv(16, 4)])
    one, other = Alone(120, convs), gas.to_scalable(Typed(copy.deepcopy(convs)), typed)
    graphs = [gas.cluster(each, 6, log=False, method="random") for each in (data, typed)]
    assert torch.equal(graphs[0].perm, graphs[1]["n"].perm)
    loaders = [
        gas.SubgraphLoader(graphs[0], batch_size=2, layout="fused", log=False),
        gas.SubgraphLoader(graphs[1], batch_size=2, log=False),
    ]
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (one, other)]
    one.predict(graphs[0])
    other.predict(graphs[1])
    for _ in range(3):
        for mine, its in zip(*loaders, strict=True):
            own = mine.batch_size
            assert torch.equal(mine.adj_t.to_edge_index()[0], its["n", "to", "n"].edge_index)
            losses = [
                F.cross_entropy(one(mine), mine.y[:own]),
                F.cross_entropy(other(its), its["n"].y[: its["n"].batch_size]),
            ]
            assert torch.equal(*losses)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for mine, its in zip(one.histories, other.histories, strict=True):
        assert torch.equal(mine.emb, its.emb)
        assert torch.equal(mine.age, its.age)
    assert torch.equal(one.predict(graphs[0]), other.predict(graphs[1]))


# What a graph may lack ----------------------------------------------------------------------------


def test_types_without_features_have_embeddings_with_sparse_gradients():
    data = bibliography()
    for kind in ("author", "venue"):
        size = data[kind].num_nodes
        del data[kind].x
        data[kind].num_nodes = size
    net = Embedded(Convs(data, sage, 2), {kind: SIZES[kind] for kind in ("author", "venue")})
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, log=False, method="random")
    assert gas.verify(model, graph)
    model.predict(graph)
    model.train()
    batch = loader_of(graph).cut([1])
    model(batch).sum().backward()
    grad = net.tables["author"].weight.grad
    assert grad.is_sparse
    assert set(grad.coalesce().indices()[0].tolist()) <= set(batch["author"].perm.tolist())
    n_id = {kind: torch.arange(size) for kind, size in SIZES.items()}
    expected = net.eval()(data.x_dict, data.edge_index_dict, n_id)
    for num_parts in (1, 7):  # However it is cut: tables are of the nodes of `data`.
        graph = gas.cluster(data, num_parts, log=False)
        torch.testing.assert_close(model.predict(graph), expected)


@pytest.mark.slow
def test_a_batch_without_nodes_of_a_type():
    data, _, model, _ = converted("HeteroConv-SAGE")
    graph = gas.cluster(data, 12, log=False, method="random")
    missing = [b for b in loader_of(graph) if not b["venue"].batch_size]
    assert missing
    expected = model.predict(graph)
    for batch in missing:
        own = graph["paper"].perm[batch["paper"].n_id[: batch["paper"].batch_size]]
        torch.testing.assert_close(model.eval()(batch), expected[own])
    assert gas.verify(model, graph)


def test_without_a_single_edge():
    data = bibliography()
    for kind in data.edge_types:
        data[kind].edge_index = data[kind].edge_index[:, :0]
    model = gas.to_scalable(net_of("HGT", data), data)
    graph = gas.cluster(data, 3, log=False)
    assert gas.verify(model, graph)


# In training --------------------------------------------------------------------------------------


def test_histories_hold_rows_as_they_were_before_dropout():
    data = bibliography(dtype=torch.double)
    torch.manual_seed(0)
    net = to_hetero(Plain(), data.metadata()).double()
    model = gas.to_scalable(net, data, dtype=torch.double)
    graph = gas.cluster(data, 4, log=False, method="random")
    batch = loader_of(graph).cut([2])
    model.predict(graph)
    model.eval()(batch)
    expected = [history.emb.clone() for history in model.histories]
    assert expected
    model.train()
    dropped = model(batch)
    for mine, true in zip(model.histories, expected, strict=True):
        assert torch.equal(mine.emb, true)
        assert bool(true.any())
    assert not torch.equal(flat(dropped), flat(model(batch)))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 4)
        self.dropout = torch.nn.Dropout(0.7)

    def forward(self, x, edge_index):
        return self.second(self.dropout(self.first(x, edge_index)), edge_index)


class InPlace(torch.nn.Module):
    """Two layers, one shared, with dropout that changes its input."""

    def __init__(self, data):
        super().__init__()
        self.encoders = torch.nn.ModuleDict({kind: Linear(-1, 16) for kind in data.node_types})
        self.conv = HeteroConv({kind: sage() for kind in data.edge_types})

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.encoders[kind](x) for kind, x in x_dict.items()}
        for _ in range(2):
            x_dict = self.conv(x_dict, edge_index_dict)
            x_dict = {
                kind: F.dropout(x.add_(1.0), 0.5, self.training, inplace=True)
                for kind, x in x_dict.items()
            }
        return x_dict


def test_changes_in_place_and_a_layer_that_is_called_twice():
    data = bibliography()
    model = gas.to_scalable(InPlace(data), data)
    graph = gas.cluster(data, 4, log=False, method="random")
    assert gas.verify(model, graph)
    model.predict(graph)
    model.train()
    flat(model(loader_of(graph).cut([0]))).sum().backward()


def test_rows_of_the_halo_are_dropped_out_as_well():
    data = bibliography()
    net = to_hetero(Plain(), data.metadata())
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, log=False, method="random")
    model.predict(graph)
    model.train()
    seen = []

    def look(layer, args):
        seen.append(args[0])

    for layer in net.second.values():
        layer.register_forward_pre_hook(look)
    batch = loader_of(graph).cut([0])
    model(batch)
    zeros = [(x[0] if isinstance(x, tuple) else x)[-5:] == 0 for x in seen]
    share = torch.cat([each.float().flatten() for each in zeros]).mean()
    assert 0.5 < share < 0.9


def test_batch_norm_counts_the_batchs_own_rows():
    _, net, model, graph = converted("HeteroConv-SAGE", num_parts=3)
    model.predict(graph)
    model.train()
    model.net.norms["venue"].eval()  # Of which a part may have one.
    seen = []
    net.norms["paper"].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    batch = loader_of(graph).cut([0])
    model(batch)
    assert seen == [batch["paper"].batch_size] * 3


@pytest.mark.slow
def test_training_lowers_the_loss_and_push_false_writes_nothing():
    _, _, model, graph = converted("to_hetero", torch.float32)
    model.predict(graph)
    model.train()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(30):
        for batch in loader_of(graph, batch_size=2, shuffle=True):
            paper = batch["paper"]
            mask = paper.train_mask[: paper.batch_size]
            loss = F.cross_entropy(model(batch)["paper"][mask], paper.y[: paper.batch_size][mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    before = [history.emb.clone() for history in model.histories]
    ages = [history.age for history in model.histories]
    model(batch, push=False)
    for history, rows, age in zip(model.histories, before, ages, strict=True):
        assert torch.equal(history.emb, rows)
        assert torch.equal(history.age, age)


@pytest.mark.slow(fast=2)
@pytest.mark.parametrize("options", [{"store": "disk"}, {"dtype": "bfloat16"}, {"dtype": "int8"}])
@pytest.mark.parametrize("io", ["serial", "concurrent"])
def test_stores_and_codecs(options, io, tmp_path):
    data = bibliography()
    if "store" in options:
        options = {**options, "path": tmp_path}
    model = gas.to_scalable(net_of("HGT", data), data, io=io, **options)
    graph = gas.cluster(data, 4, log=False, method="random")
    assert gas.verify(model, graph)
    model.predict(graph)
    assert all(bool(history.written.all()) for history in model.histories)
    model.close()


def test_a_checkpoint_has_the_histories(tmp_path):
    _, _, model, graph = converted("HGT", torch.float32)
    model.predict(graph)
    for batch in list(loader_of(graph, shuffle=True))[:2]:
        model(batch)
    gas.save(tmp_path, model)
    data = bibliography(dtype=torch.float32)
    torch.manual_seed(7)
    other = gas.to_scalable(NETS["HGT"](data), data)
    gas.load(tmp_path, other)
    for mine, its in zip(model.histories, other.histories, strict=True):
        assert torch.equal(mine.emb, its.emb)
        assert torch.equal(mine.age, its.age)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_what_is_printed_and_forgotten():
    _, _, model, graph = converted("HGT", torch.float32)
    assert "3 histories" in repr(model)
    assert "60 nodes of 'paper', 16 wide" in repr(model)
    model.predict(graph)
    assert [each.unwritten for each in model.staleness()] == [0.0] * 3
    model.reset_parameters()
    assert [each.unwritten for each in model.staleness()] == [1.0] * 3


# Refused ------------------------------------------------------------------------------------------


class Centred(torch.nn.Module):
    """Subtracts the mean over all nodes, between two layers."""

    def __init__(self, data):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: sage() for kind in data.edge_types}) for _ in range(2)
        )

    def forward(self, x_dict, edge_index_dict):
        x_dict = self.convs[0](x_dict, edge_index_dict)
        x_dict = {kind: x - x.mean(0) for kind, x in x_dict.items()}
        return self.convs[1](x_dict, edge_index_dict)


class Changing(Centred):
    """Changes rows between its layers."""

    def forward(self, x_dict, edge_index_dict):
        x_dict = self.convs[0](x_dict, edge_index_dict)
        x_dict = {kind: self.change(x) for kind, x in x_dict.items()}
        return self.convs[1](x_dict, edge_index_dict)


class OfLargeGraphs(Changing):
    """Does something else on more than a hundred nodes."""

    def change(self, x):
        return 2 * x if x.size(0) > 100 else x


class OfLargeNumbers(Changing):
    """Divides by a norm of all rows, which small graphs don't reach."""

    def change(self, x):
        return x / x.norm().clamp(min=40.0)


class Cut(torch.nn.Module):
    """Leaves out edges of its own choice."""

    def __init__(self, _):
        super().__init__()
        self.conv = SAGEConv(8, 4)

    def forward(self, x_dict, edge_index_dict):
        return {
            "paper": self.conv(x_dict["paper"], edge_index_dict["paper", "cites", "paper"][:, 1:])
        }


class Normalised(torch.nn.Module):
    def __init__(self, _):
        super().__init__()
        self.conv = GCNConv(8, 4)

    def forward(self, x_dict, edge_index_dict):
        return {"paper": self.conv(x_dict["paper"], edge_index_dict["paper", "cites", "paper"])}


class Wants(torch.nn.Module):
    def forward(self, x_dict, edge_index_dict, pos_dict):
        return x_dict


class Silent(torch.nn.Module):
    def forward(self, x_dict, edge_index_dict):
        return x_dict


class Summed(Normalised):
    def __init__(self, data):
        super().__init__(data)
        self.conv = SAGEConv(8, 4)

    def forward(self, x_dict, edge_index_dict):
        return super().forward(x_dict, edge_index_dict)["paper"].sum(0)


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (Centred, "isn't exact on mini-batches: what 'convs.1.* differs from a full batch"),
        (OfLargeGraphs, "isn't exact on mini-batches: what 'convs.1.* differs from a full batch"),
        (OfLargeNumbers, "isn't exact on mini-batches: what 'convs.1.* differs from a full batch"),
        (Cut, "'conv' .* is given other edges than those of the graph"),
        (Normalised, "'conv' .* isn't exact on mini-batches: it normalises by the degrees"),
        (lambda _: Wants(), "takes 'pos_dict', but no type of the graph has 'pos'"),
        (lambda _: Silent(), "calls no message passing layer"),
        (Summed, "returns 4 rows, which is not the number of nodes of one type"),
    ],
)
def test_what_is_refused(net, text):
    data = bibliography()
    with pytest.raises(ValueError, match=text):
        gas.to_scalable(net(data), data)


def test_attributes_that_no_layer_takes_are_named():
    """PyG's GAT takes ``edge_attr``, which its layers refuse if they were made without."""
    data = bibliography()
    net = to_hetero(GAT((-1, -1), 8, 2, 4, add_self_loops=False, v2=True), data.metadata())
    with torch.no_grad():
        net(data.x_dict, data.edge_index_dict)
    gas.to_scalable(net, data)
    for store in data.edge_stores:
        store.edge_attr = torch.rand(store.num_edges, 3)
    with pytest.raises(ValueError, match="AssertionError: ; without 'edge_attr' it can"):
        gas.to_scalable(net, data)


def test_a_norm_that_would_count_rows_of_the_halo_is_refused():
    data = bibliography()
    net = Convs(data, sage, 2, add=True)
    net.norms = torch.nn.ModuleDict({kind: torch.nn.BatchNorm1d(16) for kind in SIZES})
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, log=False, method="random")
    batch = loader_of(graph).cut([0])
    model.predict(graph)
    model.eval()(batch)
    with pytest.raises(ValueError, match="'norms.* is a batch norm that is given rows of the halo"):
        model.train()(batch)


def test_a_module_that_takes_another_way_is_refused():
    data = bibliography()
    net = Convs(data, gat, 2, p=0.0)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, log=False, method="random")
    model.predict(graph)
    model.eval()
    model.net.convs = net.convs[:1]
    model.net.convs.append(HeteroConv({kind: gat() for kind in list(data.edge_types)[:2]}))
    with pytest.raises(RuntimeError, match="as it did when it was converted"):
        model(loader_of(graph).cut([0]))


def test_batches_and_graphs_of_another_kind_are_refused():
    data, _, model, _graph = converted("HGT", torch.float32)
    with pytest.raises(ValueError, match="'batch' is a Data, expected a mini-batch of a heterog"):
        model(Data())
    with pytest.raises(ValueError, match="'batch' has no in-batch nodes of type 'paper'"):
        model(data)
    larger = bibliography()
    larger["venue"].x = torch.randn(6, 3)
    with pytest.raises(ValueError, match="'graph' has .* convert the module with this graph"):
        model.predict(gas.cluster(larger, 2, log=False))


# Sparse features ----------------------------------------------------------------------------------


def sparse_and_dense(make):
    """Return the same graph with features as a sparse matrix and as a tensor."""
    data = bibliography(0, torch.double)
    for kind in ("paper", "author"):
        data[kind].x = torch.where(data[kind].x > 0, data[kind].x, 0)
    sparse = copy.copy(data)
    sparse["paper"].x = make(data["paper"].x)
    sparse["author"].x = make(data["author"].x)
    return sparse, data


SPARSE = {
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "coo": torch.Tensor.to_sparse,
    "scipy": lambda x: scipy_sparse.csr_array(x.numpy()),
}


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("name", ["to_hetero", "HeteroConv-added", "HGT"])
def test_sparse_features_give_what_dense_ones_give(name):
    outs = []
    for data in sparse_and_dense(SPARSE["csr"]):
        net = net_of(name, bibliography(0, torch.double))
        torch.manual_seed(0)
        model = gas.to_scalable(net, data, dtype=torch.double)
        graph = gas.cluster(data, 4, log=False, method="random")
        out = [flat(model.predict(graph)), flat(whole(model, data))]
        assert gas.verify(model, graph)
        model.train()
        for batch in loader_of(graph, batch_size=2, num_workers=0):
            torch.manual_seed(3)
            loss = flat(model(batch)).square().sum()
            out += [loss, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]
        outs.append([value for value in out if value is not None])
    assert len(outs[0]) == len(outs[1])
    for mine, expected in zip(*outs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", SPARSE)
def test_sparse_features_stay_sparse_in_parts_and_batches(form):
    torch.set_default_dtype(torch.double)
    try:
        data, dense = sparse_and_dense(SPARSE[form])
        graph, other = (gas.cluster(d, 4, log=False, method="random") for d in (data, dense))
    finally:
        torch.set_default_dtype(torch.float32)
    assert graph["paper"].x.layout == torch.sparse_csr
    for mine, expected in zip(loader_of(graph), loader_of(other), strict=True):
        assert mine["paper"].x.layout == torch.sparse_csr
        for kind in ("paper", "author"):
            torch.testing.assert_close(mine[kind].x.to_dense(), expected[kind].x)


def test_sparse_features_of_a_type_without_nodes():
    data = bibliography(0, torch.double)
    data["empty"].x = torch.zeros(0, 3).double().to_sparse_csr()
    for kind in (("empty", "in", "paper"), ("paper", "of", "empty")):
        data[kind].edge_index = torch.zeros(2, 0, dtype=torch.long)
    net = NETS["HeteroConv-SAGE"](data).double()
    model = gas.to_scalable(net, data, dtype=torch.double)
    graph = gas.cluster(data, 4, log=False, method="random")
    torch.testing.assert_close(model.predict(graph), whole(model, data))


def test_inference_reports_how_far_it_is(monkeypatch, capfd):
    monkeypatch.setattr(progress, "EVERY", 0.001)
    _, _, model, graph = converted("HeteroConv-SAGE")
    for run in (model.predict, model.refresh):
        run(graph, log=False)
        assert not capfd.readouterr().err
        run(graph)
        assert "Layer-wise inference, layers: 0 of 3" in capfd.readouterr().err


def test_histories_have_the_precision_of_a_module_in_float64():
    data = bibliography(dtype=torch.float64)
    net = NETS["HeteroConv-SAGE"](data).double()
    for options, kind in (({}, torch.float64), ({"dtype": "bfloat16"}, torch.bfloat16)):
        model = gas.to_scalable(net, data, **options)
        assert {history.emb.dtype for history in model.histories} == {kind}
