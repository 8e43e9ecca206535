"""Pairs of nodes: what batches have, what is drawn, losses and gradients of PyG's full batch."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch_geometric.nn import GATConv, GraphSAGE
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import coalesce

import gas
from gas.graph import remove_links
from gas.loader import LinkLoader
from gas.training import link_loss

NUM_NODES = 60


def split_graph(directed=False):
    """Return a graph whose edges are split; to tell are some that it hasn't."""
    data = random_graph(NUM_NODES)
    both = data.edge_index if directed else torch.cat([data.edge_index, data.edge_index.flip(0)], 1)
    data.edge_index = coalesce(both, num_nodes=NUM_NODES)
    train, *_ = RandomLinkSplit(
        is_undirected=not directed, disjoint_train_ratio=0.4, add_negative_train_samples=False
    )(data)
    return remove_links(train)  # The other direction of what is told, where it is directed.


def linked(data):
    """Every pair of nodes that an edge or a pair to tell joins, in both directions."""
    ends = torch.cat([data.edge_index, data.edge_label_index], 1)
    return {(s, d) for pair in ends.t().tolist() for s, d in (pair, pair[::-1])}


def made(data, num_parts=6, **options):
    graph = gas.cluster(data, num_parts, log=False)
    return graph, LinkLoader(graph, log=False, **options)


@pytest.mark.parametrize("is_of_nodes", [False, True])
def test_attributes_of_pairs_are_those_of_a_batch(is_of_nodes):
    """Also if there are as many pairs as nodes, whose attributes are renumbered."""
    data = split_graph()
    if is_of_nodes:
        data.edge_label_index = data.edge_label_index[:, :NUM_NODES]
        data.edge_label = data.edge_label[:NUM_NODES]
    count = data.edge_label.numel()
    data.edge_label_time = torch.arange(count) * 10
    data.edge_label_number, data.edge_label_names = torch.tensor(count), ["a", "b"]
    _, loader = made(data, batch_size=2, shuffle=True)
    batches = [batch.data for batch in loader]
    for batch in batches:
        assert torch.equal(batch.edge_label_time, 10 * batch.input_id)
        assert (batch.edge_label_number, batch.edge_label_names) == (count, ["a", "b"])
    assert sum(batch.edge_label_time.numel() for batch in batches) == count


@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
@pytest.mark.parametrize("directed", [False, True], ids=["undirected", "directed"])
def test_an_epoch_has_every_pair_once_and_no_edge_of_them(directed, layout):
    data = split_graph(directed)
    graph, loader = made(data, batch_size=2, shuffle=True, layout=layout)
    told = {tuple(pair) for pair in data.edge_label_index.t().tolist()}
    either = told | {pair[::-1] for pair in told}
    seen, ids = [], []
    for batch in loader:
        size = batch.input_id.numel()
        first = graph.perm[batch.n_id]  # Ids of `data`.
        given = first[batch.edge_label_index[:, :size]]
        assert torch.equal(given, data.edge_label_index[:, batch.input_id])
        assert int(batch.edge_label_index.max()) < batch.batch_size
        assert batch.edge_label.tolist() == [1.0] * size + [0.0] * size
        seen += [tuple(pair) for pair in given.t().tolist()]
        ids += batch.input_id.tolist()
        if layout == "edge_index":
            edges = first[batch.edge_index]
            assert not either & {tuple(pair) for pair in edges.t().tolist()}
    assert sorted(seen) == sorted(told)
    assert sorted(ids) == list(range(data.edge_label_index.size(1)))


@pytest.mark.parametrize("pool", ["graph", "batch"])
@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_no_edge_joins_what_is_drawn(mode, pool):
    data = split_graph()
    graph, loader = made(
        data, batch_size=2, neg_sampling=NegativeSampling(mode, amount=3), neg_pool=pool
    )
    known = linked(data)
    drawn = []
    for number, batch in enumerate(loader):
        first = graph.perm[batch.n_id]
        if mode == "binary":
            assert batch.edge_label_index.size(1) == 4 * batch.input_id.numel()
            pairs = first[batch.edge_label_index[:, batch.input_id.numel() :]]
        else:
            assert batch.dst_neg_index.shape == (batch.input_id.numel(), 3)
            both = torch.stack([batch.src_index, batch.dst_pos_index])
            assert torch.equal(first[both], data.edge_label_index[:, batch.input_id])
            src = batch.src_index.unsqueeze(1).expand_as(batch.dst_neg_index)
            pairs = first[torch.stack([src.flatten(), batch.dst_neg_index.flatten()])]
        if pool == "batch":
            rows = graph.perm.argsort()[pairs[1]]
            parts = torch.searchsorted(graph.parts, rows, right=True) - 1
            assert set(parts.tolist()) <= {2 * number, 2 * number + 1}
        drawn += [tuple(pair) for pair in pairs.t().tolist()]
    assert len(drawn) == 3 * data.edge_label_index.size(1)
    assert not known & set(drawn)
    assert all(src != dst for src, dst in drawn)


def test_second_nodes_are_drawn_as_likely():
    """Over many epochs each node that no edge joins with the first comes up as often."""
    data = random_graph(8)
    data.edge_index = torch.tensor([[0, 1], [1, 0]])
    data.edge_label_index = torch.tensor([[2], [3]])
    _, loader = made(data, num_parts=2, batch_size=2, neg_sampling=NegativeSampling("triplet", 400))
    counts = torch.zeros(8)
    for _ in range(10):
        for batch in loader:
            nodes = loader.data.perm[batch.n_id[batch.dst_neg_index.flatten()]]
            counts += torch.bincount(nodes, minlength=8)
    assert counts[2] == counts[3] == 0
    expected = counts.sum() / 6
    others = counts[[0, 1, 4, 5, 6, 7]]
    assert float(((others - expected) ** 2 / expected).sum()) < 20.5  # Chi², 5 degrees, p = 0.001.


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_one_batch_has_the_loss_and_gradients_of_pygs_full_batch(kind, mode):
    data = split_graph()
    net = GraphSAGE(data.num_features, 8, num_layers=2, out_channels=4)
    if kind == "gat":
        net = TwoGAT(data.num_features)
    twin = copy.deepcopy(net)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    (batch,) = LinkLoader(graph, batch_size=4, log=False, neg_sampling=mode)
    out = model(batch)
    loss = link_loss(out, batch)
    loss.backward()

    full = twin(data.x, data.edge_index)
    first = graph.perm[batch.n_id]
    if mode == "binary":
        src, dst = first[batch.edge_label_index]
        expected = F.binary_cross_entropy_with_logits(
            (full[src] * full[dst]).sum(1), batch.edge_label
        )
    else:
        src, pos, neg = (
            first[ids] for ids in (batch.src_index, batch.dst_pos_index, batch.dst_neg_index)
        )
        difference = (full[src] * full[pos]).sum(1) - (full[src] * full[neg]).sum(1)
        expected = -difference.sigmoid().log().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


class TwoGAT(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.first = GATConv(num_features, 4, heads=2)
        self.last = GATConv(8, 4)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


def test_batches_after_a_refresh_are_those_of_the_full_batch():
    """End of other parts are computed, too: no output of a pair is read from a history."""
    data = split_graph()
    net = GraphSAGE(data.num_features, 8, num_layers=3, out_channels=4).eval()
    model = gas.to_scalable(net, data).eval()
    graph, loader = made(data, num_parts=8, batch_size=2, shuffle=True)
    pred = model.predict(graph)
    torch.testing.assert_close(pred, net(data.x, data.edge_index), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.predict(loader), pred)  # Without pairs.
    for batch in loader:
        with torch.no_grad():
            out = model(batch)
        own = graph.perm[batch.n_id[: batch.batch_size]]
        torch.testing.assert_close(out, pred[own], rtol=1e-5, atol=1e-5)


def losses(model, loader, optimizer, epochs, on_step=None):
    curve = []
    for _ in range(epochs):
        for batch in loader:
            loss = link_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
            if on_step is not None:
                on_step(len(curve))
    return curve


def training(workers=0):
    torch.manual_seed(0)
    data = split_graph()
    model = gas.to_scalable(GraphSAGE(data.num_features, 8, num_layers=2, out_channels=4), data)
    graph = gas.cluster(data, 6, model=model, log=False)
    model.predict(graph)
    loader = LinkLoader(graph, batch_size=2, shuffle=True, log=False, num_workers=workers)
    return model, loader, torch.optim.Adam(model.parameters(), lr=0.01)


def test_the_same_seed_draws_the_same_and_workers_too():
    first = losses(*training(), epochs=3)
    assert first == losses(*training(), epochs=3)
    assert len(set(first)) == len(first)
    draws = [[batch.edge_label_index for batch in training(workers)[1]] for workers in (0, 2)]
    assert all(torch.equal(one, two) for one, two in zip(*draws, strict=True))


def test_epochs_draw_anew():
    data = split_graph()
    _, loader = made(data, batch_size=6)
    (one,), (two,) = loader, loader
    size = one.input_id.numel()
    assert torch.equal(
        one.n_id[one.edge_label_index][:, :size], two.n_id[two.edge_label_index][:, :size]
    )
    assert not torch.equal(one.n_id[one.edge_label_index], two.n_id[two.edge_label_index])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_run_draws_the_same(tmp_path, stop):
    whole = losses(*training(), epochs=3)
    path = tmp_path / "checkpoint"
    model, loader, optimizer = training()

    def save(step):
        if step == stop:
            gas.save(path, model, optimizer, loader=loader)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        losses(model, loader, optimizer, 3, save)
    model, loader, optimizer = training()
    torch.manual_seed(7)
    gas.load(path, model, optimizer, loader=loader)
    rest = losses(model, loader, optimizer, 3 - (stop - 1) // 3)
    assert rest == whole[stop:]


def test_pairs_are_read_anew_when_the_graph_has_others():
    data = split_graph()
    graph, loader = made(data, batch_size=6)
    pairs = graph.edge_label_index[:, :3]
    loader.data.edge_label_index, loader.data.edge_label = pairs, torch.ones(3)
    (batch,) = loader
    assert torch.equal(batch.n_id[batch.edge_label_index[:, :3]], pairs[:, batch.input_id])
    assert batch.edge_label_index.size(1) == 6


def test_labels_stay_and_drawn_pairs_have_none():
    data = split_graph()
    data.edge_label = torch.randint(1, 4, (data.edge_label_index.size(1),))
    _, loader = made(data, batch_size=2)
    for batch in loader:
        size = batch.input_id.numel()
        assert torch.equal(batch.edge_label[:size], data.edge_label[batch.input_id])
        assert not batch.edge_label[size:].any()


def test_pairs_as_they_are():
    data = split_graph()
    _, loader = made(data, batch_size=2, neg_sampling=None)
    assert sum(batch.edge_label_index.size(1) for batch in loader) == data.edge_label_index.size(1)


def test_a_batch_may_have_no_pair():
    data = random_graph(20)
    data.edge_label_index = torch.tensor([[0], [0]])
    model = gas.to_scalable(GraphSAGE(data.num_features, 8, num_layers=1, out_channels=4), data)
    for mode in ("binary", "triplet"):
        _, loader = made(data, num_parts=2, neg_sampling=mode)
        found = [link_loss(model(batch), batch).item() for batch in loader]
        assert 0.0 in found
        assert sum(found) > 0


@pytest.mark.parametrize("undirected", [False, True])
def test_links_are_taken_out_in_both_directions(undirected):
    data = random_graph(30)
    data.edge_attr = torch.arange(data.num_edges)
    data.edge_index[:, 0] = 5  # A self-loop.
    told = data.edge_index[:, [0, 3, 4]]
    told = told.flip(0) if undirected else told
    out = remove_links(data, told)
    pairs = {tuple(pair) for pair in told.t().tolist() if pair[0] != pair[1]}
    pairs |= {pair[::-1] for pair in pairs}
    kept = [k for k, e in enumerate(data.edge_index.t().tolist()) if tuple(e) not in pairs]
    assert torch.equal(out.edge_index, data.edge_index[:, kept])
    assert out.edge_attr.tolist() == kept
    assert out.edge_label_index is told
    assert out.num_nodes == 30
    assert torch.equal(out.x, data.x)
    assert "edge_label_index" not in data


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_links_are_taken_out_of_a_matrix(layout):
    data = random_graph(30)
    data.edge_index = coalesce(data.edge_index)
    ones = torch.ones(data.num_edges)
    matrix = torch.sparse_coo_tensor(data.edge_index.flip(0), ones, (30, 30))
    told = data.edge_index[:, :3]
    expected = remove_links(data, told).edge_index
    data.adj_t = getattr(matrix, f"to_sparse_{layout}")()
    del data.edge_index
    assert torch.equal(coalesce(remove_links(data, told).edge_index), expected)


def test_other_nodes_of_a_batch_are_second_nodes_of_its_pairs():
    """In-batch nodes are those of the parts, and ends of pairs that are elsewhere; no more."""
    data = split_graph()
    graph, loader = made(data, batch_size=2, neg_pool="batch")
    for number, batch in enumerate(loader):
        parts = torch.searchsorted(graph.parts, batch.n_id[: batch.batch_size], right=True) - 1
        others = (parts // 2 != number).nonzero().view(-1)
        assert others.numel()
        assert set(others.tolist()) <= set(batch.edge_label_index[1].tolist())


def test_a_folder_has_its_pairs(tmp_path):
    data = split_graph()
    graph = gas.cluster(data, 4, log=False, out=tmp_path / "graph")
    told = itertools.chain.from_iterable(
        graph.perm[batch.n_id][batch.edge_label_index[:, : batch.input_id.numel()]].t().tolist()
        for batch in LinkLoader(tmp_path / "graph", batch_size=2, log=False)
    )
    assert sorted(told) == sorted(data.edge_label_index.t().tolist())


def test_pairs_that_change_within_an_epoch_are_of_the_next():
    data = split_graph()
    graph, loader = made(data, num_parts=6, neg_sampling=None)
    before = graph.edge_label_index
    for number, batch in enumerate(loader):
        assert torch.equal(batch.n_id[batch.edge_label_index], before[:, batch.input_id])
        assert batch.edge_label.numel() == batch.edge_label_index.size(1)
        if number == 1:
            graph.edge_label_index, graph.edge_label = before[:, :4], torch.full((4,), 3.0)
    assert sum(batch.input_id.numel() for batch in loader) == 4


def test_pairs_that_were_refused_are_refused_again():
    data = split_graph()
    graph, loader = made(data)
    graph.edge_label_index, graph.edge_label = graph.edge_index[:, :5], torch.ones(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="are edges of the graph"):
            next(iter(loader))


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("like", ["nodes", "edges"])
def test_labels_stay_with_their_pairs_however_many_there_are(like, as_folder, tmp_path):
    """As many pairs as nodes, or edges, whose rows are in another order afterwards."""
    data = random_graph(30, num_edges=80)
    data.edge_index = coalesce(data.edge_index, num_nodes=30)
    joined = torch.zeros(30, 30, dtype=torch.bool)
    joined[data.edge_index[0], data.edge_index[1]] = True
    free = (~(joined | joined.t())).nonzero()
    size = 30 if like == "nodes" else data.num_edges
    data.edge_label_index = free[torch.randperm(len(free))[:size]].t().contiguous()
    data.edge_label = torch.arange(1, size + 1)
    out = tmp_path / "graph" if as_folder else None
    graph = gas.cluster(data, 4, log=False, out=out)
    for batch in LinkLoader(graph, neg_sampling=None, log=False):
        pairs = graph.perm[batch.n_id[batch.edge_label_index]]
        assert torch.equal(pairs, data.edge_label_index[:, batch.edge_label - 1])


def test_categories_of_links_are_links():
    data = split_graph()
    data.edge_label = torch.randint(1, 4, (data.edge_label_index.size(1),))
    model = gas.to_scalable(GraphSAGE(data.num_features, 8, num_layers=1, out_channels=4), data)
    _, loader = made(data)
    for batch in loader:
        out = model(batch)
        loss = link_loss(out, batch)
        batch.data.edge_label = batch.edge_label.clamp(max=1)
        assert torch.equal(loss, link_loss(out, batch))
        assert loss > 0


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_a_batch_that_is_a_community_has_negatives_of_elsewhere(mode):
    """All nodes of a part are joined: none of its links, and no node with itself, is drawn."""
    groups = [torch.combinations(torch.arange(8 * k, 8 * k + 8)).t() for k in range(3)]
    pairs = torch.cat(groups, 1)
    data = random_graph(24)
    told = torch.arange(pairs.size(1)) % 3 == 0
    rest = pairs[:, ~told]
    data.edge_index = torch.cat([rest, rest.flip(0)], 1)
    data.edge_label_index = pairs[:, told]
    loader = LinkLoader(
        data, torch.tensor([0, 8, 16, 24]), neg_sampling=mode, neg_pool="batch", log=False
    )
    count = 0
    for batch in loader:
        if mode == "binary":
            src, dst = batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]]
        else:
            src, dst = batch.n_id[torch.stack([batch.src_index, batch.dst_neg_index])]
        assert (src // 8 != dst // 8).all()
        count += src.numel()
    assert count == int(told.sum())


def test_a_node_that_is_joined_with_nearly_all_gets_the_one_that_is_left():
    size = 400
    data = random_graph(size)
    others = torch.arange(1, size - 2)
    data.edge_index = torch.stack([others, torch.zeros_like(others)])
    data.edge_label_index = torch.tensor([[0], [size - 1]])
    (batch,) = LinkLoader(data, torch.tensor([0, size]), neg_sampling="triplet", log=False)
    assert batch.n_id[batch.dst_neg_index].tolist() == [size - 2]


def test_a_graph_whose_nodes_are_all_joined_has_no_negatives():
    """Its pairs are a view of a transposed tensor, of which PyTorch mustn't warn."""
    data = random_graph(8)
    pairs = torch.combinations(torch.arange(8)).t()
    data.edge_label_index, rest = pairs[:, :3], pairs[:, 3:]
    data.edge_index = torch.cat([rest, rest.flip(0)], 1)
    (batch,) = LinkLoader(data, torch.tensor([0, 8]), neg_sampling="binary", log=False)
    assert batch.edge_label.tolist() == [1.0] * 3


def test_pairs_that_are_labelled_0_get_no_others():
    """As RandomLinkSplit draws some by itself, unless it is told not to."""
    data = split_graph()
    size = data.edge_label_index.size(1)
    free = torch.stack([torch.zeros(40, dtype=torch.long), torch.arange(20, 60)])
    free = free[:, [(0, int(d)) not in linked(data) for d in free[1]]]
    data.edge_label_index = torch.cat([data.edge_label_index, free], 1)
    data.edge_label = torch.cat([torch.ones(size), torch.zeros(free.size(1))])
    _, loader = made(data, batch_size=2)
    counts = [
        (int((b.edge_label > 0).sum()), b.edge_label.numel(), b.input_id.numel()) for b in loader
    ]
    assert sum(linked for linked, _, _ in counts) == size
    assert all(total - given == linked for linked, total, given in counts)


def test_a_generator_governs_what_is_drawn():
    data = split_graph()
    graph = gas.cluster(data, 4, log=False)
    draws = []
    for state in (1, 2):
        torch.manual_seed(state)
        generator = torch.Generator().manual_seed(7)
        loader = LinkLoader(graph, shuffle=True, generator=generator, log=False)
        draws.append([batch.n_id[batch.edge_label_index] for batch in loader])
    assert all(torch.equal(one, two) for one, two in zip(*draws, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_the_loader_within_an_epoch_changes_nothing(workers):
    torch.manual_seed(3)
    data = split_graph()
    graph = gas.cluster(data, 4, log=False)
    epochs = []
    for peeks in (False, True):
        torch.manual_seed(5)
        loader = LinkLoader(graph, log=False, num_workers=workers)
        found = []
        for batch in loader:
            found.append(batch.n_id[batch.edge_label_index])
            if peeks:
                next(iter(loader))
        epochs.append(found)
    assert all(torch.equal(one, two) for one, two in zip(*epochs, strict=True))


@pytest.mark.parametrize("side", ["src", "dst"])
def test_nodes_of_unequal_weight_are_refused(side):
    data = split_graph()
    weights = {f"{side}_weight": torch.ones(data.num_nodes)}
    with pytest.raises(ValueError, match="'neg_sampling' has weights of nodes"):
        made(data, neg_sampling=NegativeSampling("binary", **weights))
