"""Mini-batches of typed graphs: every edge once, nothing of a batch lost, in PyG's names."""

import copy

import pytest
import torch
from hetero.graphs import SIZES, bibliography
from torch_geometric.data import HeteroData

import gas
from gas.loader import HeteroLoader


@pytest.fixture
def data():
    data = bibliography()
    kind = "author", "writes", "paper"
    data[kind].edge_attr = torch.arange(150.0)[:, None]
    data["paper"].ids = [f"p{i}" for i in range(60)]
    data["paper"].train_idx = data["paper"].train_mask.nonzero().view(-1)
    data["paper"].row = torch.arange(60)
    return data


def clustered(data, num_parts=5, **options):
    return gas.cluster(data, num_parts, log=False, cache=False, **options)


@pytest.mark.parametrize("method", ["metis", "random"])
def test_a_clustered_graph_is_the_same_graph(data, method):
    before = copy.deepcopy(data)
    graph = clustered(data, method=method)
    assert isinstance(graph, HeteroData)
    for kind, size in SIZES.items():
        store = graph[kind]
        assert store.parts.tolist() == sorted(store.parts.tolist())
        assert store.parts[0] == 0
        assert store.parts[-1] == size
        assert len(store.parts) == 6
        assert torch.equal(store.x, data[kind].x[store.perm])
        assert sorted(store.perm.tolist()) == list(range(size))
    assert torch.equal(graph["paper"].row, graph["paper"].perm)
    assert torch.equal(graph["paper"].train_mask.nonzero().view(-1).sort().values,
                       graph["paper"].train_idx.sort().values)  # fmt: skip
    for kind in data.edge_types:
        src, dst = graph[kind].edge_index
        first = torch.stack([graph[kind[0]].perm[src], graph[kind[2]].perm[dst]])
        assert torch.equal(first, data[kind].edge_index)
    for store, old in zip(data.stores, before.stores, strict=True):
        for key in old:
            same = store[key] == old[key]
            assert bool(same.all()) if isinstance(same, torch.Tensor) else same


def test_parts_have_as_many_of_each_type_and_of_labelled_ones(data):
    graph = clustered(data, 3)
    for kind, size in SIZES.items():
        assert int(graph[kind].parts.diff().max()) <= size / 3 * 1.1 + 2
    labelled = torch.stack(
        [graph["paper"].train_mask[a:b].sum() for a, b in graph["paper"].parts.unfold(0, 2, 1)]
    )
    assert int(labelled.max()) <= float(labelled.sum()) / 3 * 1.1 + 1


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 2, "shuffle": True}])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_edge_once(data, options, workers):
    graph = clustered(data)
    loader = gas.SubgraphLoader(graph, log=False, num_workers=workers, **options)
    assert isinstance(loader, HeteroLoader)
    edges = {kind: [] for kind in data.edge_types}
    nodes = {kind: [] for kind in SIZES}
    for _ in range(2):
        for batch in loader:
            assert batch.node_types == data.node_types
            assert batch.edge_types == data.edge_types
            for kind in SIZES:
                store = batch[kind]
                own = store.n_id[: store.batch_size]
                halo = store.n_id[store.batch_size :]
                nodes[kind] += own.tolist()
                ranges = zip(store.offset.tolist(), store.count.tolist(), strict=True)
                assert own.tolist() == [i for a, n in ranges for i in range(a, a + n)]
                assert halo.tolist() == sorted(set(halo.tolist()) - set(own.tolist()))
                assert torch.equal(store.x, graph[kind].x[store.n_id])
                assert store.num_nodes == len(store.n_id)
            for kind in data.edge_types:
                store = batch[kind]
                src, dst = store.edge_index
                assert bool((dst < batch[kind[2]].batch_size).all())
                true = graph[kind].edge_index[:, store.e_id]
                assert torch.equal(batch[kind[0]].n_id[src], true[0])
                assert torch.equal(batch[kind[2]].n_id[dst], true[1])
                edges[kind] += store.e_id.tolist()
            kind = "author", "writes", "paper"
            assert torch.equal(batch[kind].edge_attr[:, 0], batch[kind].e_id.float())
            assert batch["paper"].ids == data["paper"].ids
    for kind, found in edges.items():
        assert sorted(found) == sorted([*range(data[kind].num_edges)] * 2)
    for kind, found in nodes.items():
        assert sorted(found) == sorted([*range(SIZES[kind])] * 2)


def test_no_node_of_the_halo_is_without_an_edge(data):
    for batch in gas.SubgraphLoader(clustered(data), log=False):
        for kind in SIZES:
            ids = [batch[e].edge_index[0] for e in data.edge_types if e[0] == kind]
            used = set(torch.cat(ids).tolist())
            assert set(range(batch[kind].batch_size, batch[kind].num_nodes)) <= used


def test_changes_of_features_are_seen_and_a_loader_resumes(data):
    graph = clustered(data)
    loader = gas.SubgraphLoader(graph, shuffle=True, batch_size=2, log=False)
    graph["venue"].x = torch.zeros(5, 3)
    assert not any(batch["venue"].x.any() for batch in loader)
    torch.manual_seed(0)
    order = [batch["paper"].n_id for batch in loader]
    torch.manual_seed(0)
    epoch = iter(loader)
    next(epoch)
    state = loader.state_dict()
    other = gas.SubgraphLoader(graph, shuffle=True, batch_size=2, log=False)
    other.load_state_dict(state)
    rest = [batch["paper"].n_id for batch in other]
    assert len(rest) == len(order) - 1
    assert all(map(torch.equal, rest, order[1:]))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"layout": "csr"}, "layout"),
        ({"epoch_transform": object()}, "epoch_transform"),
        ({"graph_transform": lambda data: data}, "graph_transform"),
        ({"ptr": torch.tensor([0, 98])}, "ptr"),
        ({"bipartite": False}, "bipartite"),
    ],
)
def test_options_of_graphs_of_one_type_are_refused(data, options, name):
    with pytest.raises(ValueError, match=f"'{name}' is "):
        gas.SubgraphLoader(clustered(data), log=False, **options)


def test_graphs_that_cannot_be(data):
    with pytest.raises(ValueError, match="has no 'parts': cut it"):
        gas.SubgraphLoader(data, log=False)
    with pytest.raises(ValueError, match="has 'parts' already"):
        clustered(clustered(data))
    with pytest.raises(ValueError, match="'shards' is given, which gas.cluster doesn't have"):
        clustered(data, 4, shards=2)
    kind = "paper", "cites", "paper"
    wrong = copy.copy(data)
    wrong[kind].edge_index = torch.tensor([[0], [60]])
    with pytest.raises(ValueError, match="holds the node id 60"):
        clustered(wrong)
    wrong = copy.copy(data)
    wrong["paper", "to", "nothing"].edge_index = torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match="joins nodes of type 'nothing'"):
        clustered(wrong)
    wrong = copy.copy(data)
    wrong["venue"].x = data["venue"].x[:3]
    wrong["venue"].num_nodes = 5
    with pytest.raises(ValueError, match=r"data\['venue'\].x has 3 rows, but there are 5"):
        clustered(wrong)
    with pytest.raises(ValueError, match=r"expected different parts between 0 and 4"):
        gas.SubgraphLoader(clustered(data), log=False).cut([5])
