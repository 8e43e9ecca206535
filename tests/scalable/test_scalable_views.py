"""``ScalableGNN.views``: a batch and its views, with the histories of the original graph."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.utils import coalesce

import gas
from gas.augment import DropEdge, mh_aug_loss
from gas.loader.batch import iter_tensors
from gas.scalable import run_forward

LAYOUTS = [
    "csr",
    "edge_index",
    "fused",
    pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
]
TRANSFORMS = {"GCN": T.GCNNorm(), "GraphSAGE": None, "GAT": T.AddRemainingSelfLoops()}
ARGUMENTS = {"GCN": (5, 8, 3, 3), "GraphSAGE": (5, 8, 3, 3), "GAT": (5, 4, 2, 3, 2, 3)}
CHAIN = dict(
    mu_e=0.3, mu_v=0.4, sigma_delta_e=0.2, sigma_delta_v=0.2, a_e=1, b_e=1, a_v=1, b_v=1, lam1=1,
    lam2=0.99, lam3=1, lam4=0.99, num_steps=10,
)  # fmt: skip


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_graph(num_parts=6):
    data = random_graph(dtype=torch.get_default_dtype())
    data.edge_index = coalesce(data.edge_index)
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=60, log=False)
    return gas.permute(data, perm, log=False), ptr


def make_model(name, seed=0, **kwargs):
    torch.manual_seed(seed)
    dtype = torch.get_default_dtype()
    return getattr(gas.models, name)(60, *ARGUMENTS[name], dtype=dtype, **kwargs)


def make_loader(name, data, ptr, augmentation, batch_size=2, **kwargs):
    return gas.SubgraphLoader(
        data, ptr, batch_size, log=False, epoch_transform=augmentation,
        graph_transform=TRANSFORMS[name], **kwargs,
    )  # fmt: skip


def fill(name, model, data):
    data = data if TRANSFORMS[name] is None else TRANSFORMS[name](data)
    weight = {"edge_weight": data.edge_weight} if name == "GCN" else {}
    with torch.no_grad():
        return model(data.x, data.edge_index, fill=True, **weight)


def train(model, loader, outputs, epochs=3):
    """Loss by loss, of the logits that ``outputs`` yields for a batch."""
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    curve = []
    for _ in range(epochs):
        for batch in loader:
            own = slice(batch.batch_size)
            mask = batch.data.train_mask[own]
            loss = F.cross_entropy(outputs(model, batch)[mask], batch.data.y[own][mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(float(loss.detach()))
    return curve


def plain(model, batch):
    x, adj_t, kwargs = model.inputs_of(batch.data)
    return model(x, adj_t, *batch[1:], **kwargs)


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("bank", ["original", "per_view"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_full_masks_are_plain_training(name, layout, bank):
    data, ptr = make_graph()
    drop = DropEdge(data, p=0.0)
    curves = []
    for number in range(3):
        model = make_model(name)
        fill(name, model, data)
        loader = make_loader(name, data, ptr, drop if number else None, layout=layout, shuffle=True)

        def view(model, batch, number=number):
            outs = model.views(batch, bank)
            assert torch.equal(outs[0], outs[1])
            assert torch.equal(outs[0], outs[2])
            return outs[number]

        curves.append(train(model, loader, view if number else plain))
    assert curves[0] == curves[1] == curves[2]
    assert curves[0][-1] != curves[0][0]


class PyG(torch.nn.Module):
    """The same model as a user of PyG writes it, on the augmented graph; it normalises itself."""

    def __init__(self, name, model):
        super().__init__()
        self.name = name
        widths = [(5, 8), (8, 8), (8, 3)]
        if name == "GAT":
            made = [pyg.GATConv(5, 4, 2), pyg.GATConv(8, 4, 2), pyg.GATConv(8, 3, 2, concat=False)]
        else:
            cls = {"GCN": pyg.GCNConv, "GraphSAGE": pyg.SAGEConv}[name]
            made = [cls(i, o) for i, o in widths]
        self.convs = torch.nn.ModuleList(made)
        self.load_state_dict(model.state_dict())

    def forward(self, data):
        x = data.x
        for conv in self.convs[:-1]:
            x = conv(x, data.edge_index)
            x = F.elu(x) if self.name == "GAT" else x.relu()
        return self.convs[-1](x, data.edge_index)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("bank", ["original", "per_view"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_one_part_is_full_batch_mh_aug(name, layout, bank):
    data, _ = make_graph()
    chain = gas.MHAug(data, reference_size=6, **CHAIN)
    model = make_model(name)
    expected_model = PyG(name, model)
    whole = torch.tensor([0, 60])
    loader = make_loader(name, data, whole, chain, layout=layout)
    for _ in range(2):
        (batch,) = loader
        graphs = [data, chain.apply(data, previous=True), chain.apply(data)]
        expected = [expected_model(graph) for graph in graphs]
        outs = model.views(batch, bank)
        for mine, theirs in zip(outs, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
        found, wanted = (
            torch.autograd.grad(
                mh_aug_loss(*logits, data.y, data.train_mask), list(net.parameters())
            )
            for logits, net in ((outs, model), (expected, expected_model))
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-11)
    assert chain.acceptance_rate > 0.1
    assert not torch.allclose(outs[0], outs[2])
    assert not torch.allclose(outs[1], outs[2])


@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_views_read_the_histories_of_the_original_and_never_write(name, layout, io):
    data, ptr = make_graph()
    drop = DropEdge(data, p=0.5)
    drop.run()  # So that the previous state isn't the graph itself.
    model, twin = (make_model(name, io=io).eval() for _ in range(2))
    for each in (model, twin):
        fill(name, each, data)
        for history in each.histories:
            history.push(torch.randn(60, 8, generator=torch.Generator().manual_seed(1)))
    ages = [history.age for history in model.histories]
    for batch in make_loader(name, data, ptr, drop, layout=layout):
        moved = gas.scalable.moved_bytes(model), gas.scalable.moved_bytes(twin)
        outs = model.views(batch)
        assert torch.equal(outs[0], plain(twin, batch))
        # The same rows, and those once: views move none.
        assert (
            gas.scalable.moved_bytes(model) - moved[0] == gas.scalable.moved_bytes(twin) - moved[1]
        )
        for history, other in zip(model.histories, twin.histories, strict=True):
            assert torch.equal(history.emb, other.emb)
            assert torch.equal(history.age, other.age)
        # What a view computes: as its batch, on a model with those histories.
        for out, view in zip(outs[1:], batch.data.views, strict=True):
            alone = copy.deepcopy(twin)
            assert torch.equal(out, plain(alone, batch._replace(data=view)))
            assert not torch.equal(out, outs[0])
    assert not torch.equal(model.histories[0].age, ages[0])


def test_a_bank_per_view():
    """Each view has its own histories, which begin as the original's."""
    data, ptr = make_graph()
    model = make_model("GraphSAGE").eval()
    fill("GraphSAGE", model, data)
    models = [copy.deepcopy(model) for _ in range(3)]
    drop = DropEdge(data, p=0.5)
    loader = make_loader("GraphSAGE", data, ptr, drop)
    for _ in range(2):
        for batch in loader:
            outs = model.views(batch, bank="per_view")
            graphs = (batch.data, *batch.data.views)
            for out, alone, graph in zip(outs, models, graphs, strict=True):
                assert torch.equal(out, plain(alone, batch._replace(data=graph)))
    banks = [model.histories, *model.view_histories]
    for bank, alone in zip(banks, models, strict=True):
        for history, other in zip(bank, alone.histories, strict=True):
            assert torch.equal(history.emb, other.emb)
    assert not torch.equal(banks[0][0].emb, banks[1][0].emb)
    assert not any("histor" in key for key in model.state_dict())
    assert model.for_graph(60).view_histories is None
    model.reset_parameters()
    assert all(not history.written.any() for bank in banks for history in bank)
    model.close()
    with pytest.raises(RuntimeError, match="this history has been closed"):
        banks[2][1].pull()


class InPlace(gas.ScalableGNN):
    """Changes what it has pulled."""

    def __init__(self):
        super().__init__(60, 5, 3)
        self.lin = torch.nn.Linear(5, 5)

    def forward(self, x, adj_t, batch_size, *args):
        for history in self.histories:
            x = self.push_and_pull(history, self.lin(adj_t @ x), batch_size, *args)
            x.relu_()
        return adj_t @ x


def test_rows_may_be_changed_in_place():
    data, ptr = make_graph()
    model = InPlace()
    for history in model.histories:
        history.push(torch.randn(60, 5))
    twin = copy.deepcopy(model)
    for batch in make_loader("GraphSAGE", data, ptr, DropEdge(data)):
        outs = model.views(batch)
        for out, graph in zip(outs, (batch.data, *batch.data.views), strict=True):
            alone = copy.deepcopy(twin)
            assert torch.equal(out, alone(graph.x, graph.adj_t, *batch[1:]))
        twin(batch.data.x, batch.data.adj_t, *batch[1:])
        outs[2].sum().backward()


@pytest.mark.parametrize("bank", ["original", "per_view"])
def test_prefetched_views(bank):
    data, ptr = make_graph()
    curves = []
    for prefetch in (None, 0, 1, 1):
        model = make_model("GCN", prefetch=prefetch or 0)
        fill("GCN", model, data)
        drop = DropEdge(data, generator=torch.Generator().manual_seed(0))
        loader = make_loader("GCN", data, ptr, drop)
        loader = loader if prefetch is None else gas.PrefetchLoader(loader, model)
        curves.append(train(model, loader, lambda model, batch: model.views(batch, bank)[1]))
    assert curves[0] == curves[1]
    assert curves[2] == curves[3]


def test_a_wrong_model_leaves_no_trace():
    class Forgetful(InPlace):
        def forward(self, x, adj_t, batch_size, *args):
            return self.push_and_pull(self.histories[0], adj_t @ x, batch_size, *args)

    data, ptr = make_graph()
    model = Forgetful()
    for history in model.histories:
        history.push(torch.randn(60, 5))
    before = [history.emb.clone() for history in model.histories]
    batch = next(iter(make_loader("GraphSAGE", data, ptr, DropEdge(data))))
    with pytest.raises(RuntimeError, match="forward called push_and_pull 1 times, expected once"):
        model.views(batch)
    for history, rows in zip(model.histories, before, strict=True):
        assert torch.equal(history.emb, rows)


def test_bad_input():
    data, ptr = make_graph()
    model = make_model("GraphSAGE")
    batch = next(iter(make_loader("GraphSAGE", data, ptr, DropEdge(data))))
    with pytest.raises(ValueError, match="'bank' is 'shared', expected one of 'original', 'per_v"):
        model.views(batch, "shared")
    batch.data.views = None
    with pytest.raises(ValueError, match="'batch' has no views: load with gas.SubgraphLoader"):
        model.views(batch)
    assert not any(history.written.any() for history in model.histories)


def test_the_batch_stays_where_it_is():
    """A computation on another device moves a copy."""
    data, ptr = make_graph()
    model = make_model("GraphSAGE")
    fill("GraphSAGE", model, data)
    model.to("meta")
    batches = list(make_loader("GraphSAGE", data, ptr, DropEdge(data), layout="edge_index"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: model.views(batches[0]),
        lambda: model(loader=batches),
        lambda: list(gas.PrefetchLoader(batches, model)),
        lambda: gas.training.train_epoch(model, batches, optimizer),
    ]
    for call in calls:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            call()  # Some can't be computed without values.
        for batch in batches:
            for graph in (batch.data, *batch.data.views):
                assert not any(tensor.is_meta for tensor in iter_tensors(graph))


def test_measuring_leaves_the_histories_as_they_are():
    data, ptr = make_graph()
    model = make_model("GraphSAGE")
    fill("GraphSAGE", model, data)
    before = [history.emb.clone() for history in model.histories]
    batch = next(iter(make_loader("GraphSAGE", data, ptr, DropEdge(data, p=0.5))))
    assert len(run_forward(model, batch)) == 3  # With two views.
    for history, rows in zip(model.histories, before, strict=True):
        assert torch.equal(history.emb, rows)
    model.views(batch)
    assert any(
        not torch.equal(history.emb, rows)
        for history, rows in zip(model.histories, before, strict=True)
    )
