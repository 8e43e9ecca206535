"""Views of mini-batches, against PyG on the augmented graph."""

import copy
import multiprocessing
import pickle

import pytest
import torch
import torch_geometric.transforms as T
from augment_graphs import SETTINGS
from conftest import random_graph
from torch_geometric.nn import GCN

import gas
from gas.augment import DropEdge, MaskFeatures, Views
from gas.augment.units import mask_node_features
from gas.graph.layout import layout_of

LAYOUTS = [
    "csr",
    "edge_index",
    "fused",
    pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
]
TRANSFORMS = {
    "none": None,
    "gcn": T.GCNNorm(),
    "gcn without loops": T.GCNNorm(add_self_loops=False),
    "loops": T.AddRemainingSelfLoops(),
    "more loops": T.AddSelfLoops(),
}


def make(weighted=False, attributed=False, num_parts=6):
    data = random_graph()
    if weighted:
        data.edge_weight = torch.rand(data.num_edges) + 0.1
    if attributed:
        data.edge_attr = torch.randn(data.num_edges, 2)
    perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=data.num_nodes, log=False)
    return gas.permute(data, perm, log=False), ptr


def make_chain(data, **options):
    generator = torch.Generator().manual_seed(1)
    options = {"num_steps": 20, "reference_size": 6, "generator": generator, **options}
    return gas.MHAug(data, **{**SETTINGS, **options})


def triples(data, nodes=None):
    """Every edge of a batch or a graph as destination, source and weight, in one order."""
    if data.get("adj_t") is not None:
        adj = data.adj_t
        if isinstance(adj, gas.nn.Adjacency):
            (row, col), value = adj.coo(), adj.value
        else:
            (row, col), csr = layout_of(adj).entries(adj), isinstance(adj, torch.Tensor)
            value = adj.values() if csr else adj.storage.value()
    else:
        row, col, value = data.edge_index[1], data.edge_index[0], data.get("edge_weight")
    if nodes is not None:
        row, col = nodes[row], nodes[col]
    value = torch.ones(row.numel()) if value is None else value
    return sorted(zip(row.tolist(), col.tolist(), value.tolist(), strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bipartite", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_views_are_the_augmented_graph(transform, layout, bipartite, weighted):
    data, ptr = make(weighted)
    transform = TRANSFORMS[transform]
    chain = make_chain(data)
    loader = gas.SubgraphLoader(
        data, ptr, 2, bipartite, log=False, layout=layout, epoch_transform=chain,
        graph_transform=transform,
    )  # fmt: skip
    for _ in range(2):
        found = [[], []]
        for batch, own, n_id, *_ in loader:
            for view, edges, previous in zip(batch.views, found, [True, False], strict=True):
                expected = chain.apply(data, previous)
                assert torch.equal(view.x, expected.x[n_id])
                assert view.num_nodes == batch.num_nodes
                edges += triples(view, n_id)
                if layout != "edge_index":
                    rows = own if bipartite else n_id.numel()
                    size = view.adj_t.sizes() if layout == "sparse_tensor" else view.adj_t.shape
                    assert tuple(size) == (rows, n_id.numel())
        for edges, previous in zip(found, [True, False], strict=True):
            expected = chain.apply(data, previous)
            expected = expected if transform is None else transform(expected)
            assert sorted(edges) == triples(expected)
    assert 0 < int(chain.edge_mask.sum()) < data.num_edges
    assert chain.acceptance_rate > 0.05


@pytest.mark.parametrize("layout", ["edge_index", "fused"])
@pytest.mark.parametrize("of_pyg", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_of_a_converted_model_are_those_of_each_state(weighted, of_pyg, layout):
    data, ptr = make(weighted)
    net = GCN(data.num_features, 8, 1).eval()
    model = gas.to_scalable(net, data).eval()
    drop = DropEdge(data)
    loader = gas.SubgraphLoader(
        data, ptr, 6, log=False, layout=layout, epoch_transform=drop,
        graph_transform=T.GCNNorm() if of_pyg else model.transform,
    )  # fmt: skip
    (whole,) = loader
    if of_pyg and weighted:  # Whether they are normalised can't be known.
        with pytest.raises(ValueError, match="load with graph_transform=model.transform"):
            model.views(whole)
    else:
        outs = model.views(whole)[1:]
        for out, previous in zip(outs, [True, False], strict=True):
            state = drop.apply(data, previous)
            expected = net(state.x, state.edge_index, state.get("edge_weight"))
            torch.testing.assert_close(out, expected)
    found = [[], []]
    for batch, _, n_id, *_ in loader:
        for view, edges in zip(batch.views, found, strict=True):
            edges += triples(view, n_id)
    for edges, previous in zip(found, [True, False], strict=True):
        assert sorted(edges) == triples(T.GCNNorm()(drop.apply(data, previous)))
    assert 0 < int(drop.edge_mask.sum()) < data.num_edges


def test_the_original_is_as_without_views():
    data, ptr = make()
    plain = gas.SubgraphLoader(T.GCNNorm()(data), ptr, 2, log=False)
    chain = make_chain(data)
    options = {"log": False, "graph_transform": T.GCNNorm()}
    for other in (
        gas.SubgraphLoader(data, ptr, 2, **options),
        gas.SubgraphLoader(data, ptr, 2, epoch_transform=chain, **options),
    ):
        for mine, theirs in zip(other, plain, strict=True):
            assert torch.equal(mine.n_id, theirs.n_id)
            assert torch.equal(mine.data.e_id, theirs.data.e_id)
            assert torch.equal(mine.data.x, theirs.data.x)
            assert torch.equal(mine.data.adj_t.values(), theirs.data.adj_t.values())
            assert torch.equal(mine.data.adj_t.col_indices(), theirs.data.adj_t.col_indices())


@pytest.mark.parametrize("make_augmentation", [make_chain, DropEdge, MaskFeatures])
@pytest.mark.parametrize("cache", [None, False, True])
def test_every_epoch_has_new_views(make_augmentation, cache):
    data, ptr = make(attributed=True)
    augmentation = make_augmentation(data)
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, cache=cache, epoch_transform=augmentation)
    seen = []
    for _ in range(3):
        before = augmentation.edge_mask, augmentation.node_mask
        for batch, *_ in loader:
            first, second = batch.views
            assert torch.equal(augmentation.previous_edge_mask, before[0])
            assert torch.equal(first.e_id, batch.e_id[before[0][batch.e_id]])
            assert torch.equal(second.e_id, batch.e_id[augmentation.edge_mask[batch.e_id]])
            assert torch.equal(second.edge_attr, data.edge_attr[second.e_id])
        seen.append((augmentation.edge_mask, augmentation.node_mask))
    assert not all(
        torch.equal(a, b) for a, b in zip(seen[0] + seen[1], seen[1] + seen[2], strict=True)
    )


def test_an_epoch_keeps_its_views():
    data, ptr = make()
    drop = DropEdge(data)
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, epoch_transform=drop)
    (before,) = loader
    drop.run()
    after = loader.cut(range(6))
    for one, other in zip(before.data.views, after.data.views, strict=True):
        assert torch.equal(one.e_id, other.e_id)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_see_the_views_of_the_epoch(context):
    data, ptr = make()
    chain, twin = make_chain(data), make_chain(data)
    options = {"log": False, "graph_transform": T.GCNNorm()}
    here = gas.SubgraphLoader(data, ptr, 2, epoch_transform=twin, **options)
    there = gas.SubgraphLoader(
        data, ptr, 2, epoch_transform=chain, num_workers=1,
        multiprocessing_context=multiprocessing.get_context(context), **options,
    )  # fmt: skip
    for _ in range(2):
        for mine, other in zip(there, here, strict=True):
            for view, expected in zip(mine.data.views, other.data.views, strict=True):
                assert torch.equal(view.x, expected.x)
                assert triples(view) == triples(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_belongs_to_its_iterator(workers):
    """Others, inference among them, don't change its masks."""
    data, ptr = make()
    augmentation = DropEdge(data, generator=torch.Generator().manual_seed(0))
    options = {"log": False, "num_workers": workers}
    loader = gas.SubgraphLoader(data, ptr, epoch_transform=augmentation, **options)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    epoch = iter(loader)
    batches = [next(epoch)]
    masks = augmentation.previous_edge_mask, augmentation.edge_mask
    next(iter(loader))
    augmentation.run()
    model(loader=loader)
    for batch in (*batches, *epoch):
        for view, mask in zip(batch.data.views, masks, strict=True):
            assert torch.equal(view.e_id, batch.data.e_id[mask[batch.data.e_id]])
    assert not torch.equal(augmentation.edge_mask, masks[1])


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_inference_leaves_the_augmentation_alone(workers, prefetch):
    data, ptr = make()
    chain = make_chain(data)
    options = {"log": False, "num_workers": workers}
    loader = gas.SubgraphLoader(data, ptr, 2, epoch_transform=chain, **options)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    expected = model(loader=gas.SubgraphLoader(data, ptr, 2, log=False))
    if prefetch:
        loader = gas.PrefetchLoader(loader, model)
    next(iter(loader))
    before = chain.state_dict()
    assert torch.equal(model(loader=loader), expected)
    model.staleness(loader)
    for key, tensor in chain.state_dict().items():
        assert torch.equal(tensor, before[key])
    plain = loader.plain_loader()
    assert not any("views" in batch.data for batch in plain)
    assert len(plain) == len(loader)
    assert all("views" in batch.data for batch in loader)


def test_views_of_an_epoch_have_weights_unless_told_otherwise():
    data, ptr = make(weighted=True)
    (batch,) = (sub.data for sub in gas.SubgraphLoader(data, ptr, 6, layout="fused", log=False))
    batch.adj_t = batch.adj_t.remove_values()
    batch.e_id, n_id = torch.arange(data.num_edges), torch.arange(60)
    epoch = Views(DropEdge(data), data).run()
    for view, bare in zip(epoch.cut(batch, n_id), epoch.cut(batch, n_id, False), strict=True):
        assert torch.equal(view.adj_t.value, data.edge_weight[view.e_id])
        assert bare.adj_t.value is None


def test_views_of_an_earlier_epoch():
    data, _ = make()
    views = Views(DropEdge(data), data)
    data.e_id, n_id = torch.arange(data.num_edges), torch.arange(60)
    first = views.run()
    before = views.cut(data, n_id)
    views.run()
    for one, other in zip(first.cut(data, n_id), before, strict=True):
        assert torch.equal(one.e_id, other.e_id)
    assert not torch.equal(views.cut(data, n_id)[1].e_id, before[1].e_id)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_a_chain_that_stayed_are_apart(layout):
    data, ptr = make(weighted=True, attributed=True)
    chain = make_chain(data, num_steps=0)
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, layout=layout, epoch_transform=chain)
    ((batch, *_),) = loader
    first, second = batch.views
    before = triples(second)
    for tensor in (first.x, first.edge_attr, first.edge_weight, first.e_id):
        tensor.zero_()
    assert torch.equal(second.x, batch.x)
    assert torch.equal(second.edge_attr, data.edge_attr[second.e_id])
    assert triples(second) == before


def test_loaders_with_views_can_be_pickled_and_copied():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, epoch_transform=make_chain(data))
    (batch,) = loader
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert torch.equal(twin.cut(range(6)).data.views[1].e_id, batch.data.views[1].e_id)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_views_move_with_the_batch(layout):
    data, ptr = make()
    loader = gas.SubgraphLoader(
        data, ptr, 6, log=False, layout=layout, epoch_transform=make_chain(data)
    )
    (batch,) = loader
    for view in batch.to("meta").data.views:
        key = "edge_index" if layout == "edge_index" else "adj_t"
        assert view.x.device.type == view[key].device.type == "meta"


def test_views_can_be_prefetched():
    data, ptr = make()
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    drop = DropEdge(data, generator=torch.Generator().manual_seed(0))
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, epoch_transform=drop)
    for batch, *_ in gas.PrefetchLoader(loader, model):
        assert torch.equal(batch.views[1].e_id, batch.e_id[drop.edge_mask[batch.e_id]])


def test_views_of_an_epoch_begun_in_inference_mode_can_be_trained_on():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 6, log=False, epoch_transform=make_chain(data))
    with torch.inference_mode():
        (batch,) = loader
    assert not any(view.x.is_inference() for view in batch.data.views)


def test_states_made_in_inference_mode_can_be_trained_on():
    data, _ = make()
    views = Views(make_chain(data), data, T.GCNNorm())
    with torch.inference_mode():
        views.run()
    batch = copy.copy(views.graph)
    batch.e_id = torch.arange(batch.num_edges)
    weight = torch.ones(5, requires_grad=True)
    for view in views.cut(batch, torch.arange(60)):
        assert not view.edge_weight.is_inference()
        ((view.x * weight).sum() * view.edge_weight).sum().backward()
    for state in views.augmentation.states:
        assert not any(t.is_inference() for t in (state.edge_mask, state.node_mask, state.scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("learns", [False, True])
def test_masked_features(dtype, learns):
    x = torch.randn(6, 2, 3).to(dtype)
    x[0] = torch.nan
    x.requires_grad_(learns)
    mask, scale = torch.tensor([0, 1, 1, 0, 1, 1]).bool(), torch.tensor(1.5)
    out = mask_node_features(x, mask, scale)
    expected = torch.zeros(6, 2, 3, dtype=dtype)
    expected[mask] = x.detach()[mask] * scale.to(dtype)
    assert torch.equal(out.detach(), expected)
    assert out.requires_grad == learns
    if learns:
        out.abs().sum().backward()
        assert bool((x.grad[mask] != 0).all())


def test_views_of_other_loaders():
    """Batches that know their ``e_id``: here, the subgraph of some nodes."""
    data, _ = make()
    drop = DropEdge(data)
    views = Views(drop, data)
    views.run()
    n_id = torch.randperm(60)[:30]
    batch = data.subgraph(n_id)
    inside = torch.isin(data.edge_index, n_id).all(dim=0)
    batch.e_id = inside.nonzero().view(-1)
    for view, previous in zip(views.cut(batch, n_id), [True, False], strict=True):
        expected = drop.apply(data, previous).subgraph(n_id)
        assert torch.equal(view.edge_index, expected.edge_index)
        assert torch.equal(view.x, expected.x)


def reversed_edges(data):
    data.edge_index = data.edge_index.flip(0)
    return data


def without_an_edge_of_few(data):
    few = data.num_edges < 200
    data.edge_index = data.edge_index[:, int(few) :]
    data.edge_weight = torch.ones(data.num_edges)
    return data


def degrees(data):
    data.degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    return data


def weights_and_degrees_of_sources(data):
    data = T.GCNNorm()(data)
    data.source = torch.bincount(data.edge_index[0])[data.edge_index[0]]
    return data


def weights_of_features(data):
    data.edge_weight = data.x[data.edge_index[0], 0]
    return data


def random_weights(data):
    data.edge_weight = torch.rand(data.num_edges)
    return data


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (T.ToSparseTensor(), "it makes no 'edge_index', or an 'adj_t'"),
        (reversed_edges, "it changes nodes or edges other than self-loops"),
        (T.ToUndirected(), "it changes nodes or edges other than self-loops"),
        (weights_of_features, r"it needs more of the graph \('NoneType' .*\)"),
        (random_weights, "its weights don't follow from the edges alone"),
        (degrees, "its 'degree' depends on which edges are kept"),
        (weights_and_degrees_of_sources, "its 'source' depends on which edges are kept"),
    ],
)
def test_unsuitable_transforms(transform, message):
    data, ptr = make()
    with pytest.raises(ValueError, match=f"'graph_transform' is .*{message}: expected one"):
        gas.SubgraphLoader(
            data, ptr, log=False, epoch_transform=DropEdge(data), graph_transform=transform
        )


def test_transforms_with_other_edges_of_a_part():
    data, ptr = make()
    loader = gas.SubgraphLoader(
        data, ptr, log=False, epoch_transform=DropEdge(data), graph_transform=without_an_edge_of_few
    )
    with pytest.raises(ValueError, match="its edges depend on which others are kept"):
        next(iter(loader))


def test_bad_input():
    data, ptr = make()
    drop = DropEdge(data)
    options = {"log": False, "epoch_transform": drop}
    with pytest.raises(ValueError, match="'persistent_workers' is True, but workers that stay"):
        gas.SubgraphLoader(data, ptr, num_workers=1, persistent_workers=True, **options)
    with pytest.raises(ValueError, match="'epoch_transform' is a GCNNorm, expected an aug"):
        gas.SubgraphLoader(data, ptr, log=False, epoch_transform=T.GCNNorm())
    for transform in (T.GCNNorm(), None):
        normalised = T.GCNNorm()(data)
        with pytest.raises(ValueError, match="'data' has a self-loop at each of its 60 nodes and"):
            gas.SubgraphLoader(
                normalised, ptr, log=False, epoch_transform=DropEdge(normalised),
                graph_transform=transform,
            )  # fmt: skip
    with pytest.raises(ValueError, match="'data' has 60 nodes and .* edges, but the augmentation"):
        gas.SubgraphLoader(T.AddRemainingSelfLoops()(data), ptr, **options)
    other, _ = make()
    with pytest.raises(ValueError, match="'data' has other edges, or in another order"):
        gas.SubgraphLoader(other, ptr, **options)
    data.x = data.x.long()
    with pytest.raises(ValueError, match="'x' is torch.int64 of shape .*, expected floating"):
        gas.SubgraphLoader(data, ptr, **options)
