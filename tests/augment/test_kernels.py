"""Kernels of masks: exact subsets and ego-graphs, native and in torch."""

import itertools

import pytest
import torch
from augment_graphs import PAPER, SETTINGS, chain_on, follow, make_chain, same
from conftest import no_sync, random_graph
from scipy import stats
from torch_geometric.data import Data

import gas
from gas import native
from gas.native import augment as kernels
from gas.native.dropout import random_bits
from gas.native.matrix import find_starts

CPU = torch.device("cpu")


def whole(number):
    return torch.tensor(float(number), dtype=torch.double)


@pytest.mark.requires("native")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 2, 9, 1000, 100_003])
def test_subsets_equal_their_twin(size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for k in sorted({0, min(1, size), size // 3, max(size - 1, 0), size}):
            for seed in (0, 1, 2**63 - 1):
                drawn = kernels.subset(size, whole(k), seed, CPU)
                assert int(drawn.sum()) == k
                assert torch.equal(drawn, kernels._subset_torch(size, whole(k), seed, CPU, None))
            among = kernels.subset(size, whole(k), 4, CPU)
            for few in sorted({0, min(1, k), k // 2, k}):
                for seed in (4, 5):  # Of the very keys that made `among`, too.
                    args = (size, whole(few), seed, CPU, among)
                    drawn = kernels.subset(*args, whole(k))
                    assert int(drawn.sum()) == few
                    assert not (drawn & ~among).any()
                    assert torch.equal(drawn, kernels._subset_torch(*args))
    finally:
        torch.set_num_threads(before)


def test_twin_of_few_draws():
    key = random_bits(500, 7, CPU)
    order = sorted(range(500), key=lambda i: int(key[i]) % 2**64)
    for k in (0, 1, 250, 500):
        drawn = kernels._subset_torch(500, whole(k), 7, CPU, None)
        assert drawn.nonzero().view(-1).tolist() == sorted(order[:k])


@pytest.mark.parametrize("k", [1, 4, 11])
def test_subsets_are_uniform(k):
    size, draws = 12, 20_000
    found = torch.stack([kernels.subset(size, whole(k), seed, CPU) for seed in range(draws)])
    assert (found.sum(dim=1) == k).all()
    single = found.sum(dim=0).double()  # Each element with probability k / size ...
    # (The counts of elements have a fixed sum: their variance is that of size - 1 free ones.)
    variance = draws * k / size * (1 - k / size) * size / (size - 1)
    squares = float((single - draws * k / size).square().sum() / variance)
    assert 1e-3 < stats.chi2(size - 1).cdf(squares) < 1 - 1e-3
    for a, b in ((0, 1), (3, 10), (5, 11)):  # ... and pairs without replacement.
        both = int((found[:, a] & found[:, b]).sum())
        p = k * (k - 1) / (size * (size - 1))
        assert stats.binomtest(both, draws, p).pvalue > 1e-3
    half = found[:, : size // 2].sum(dim=1)
    wanted = stats.hypergeom(size, k, size // 2).pmf(range(size // 2 + 1)) * draws
    few = wanted > 0
    assert (torch.bincount(half, minlength=size // 2 + 1)[~torch.from_numpy(few)] == 0).all()
    count = torch.bincount(half, minlength=size // 2 + 1).numpy()[few]
    assert stats.chisquare(count, wanted[few]).pvalue > 1e-3


def test_masks_of_a_proposal_have_exact_sizes():
    chain = gas.MHAug(random_graph(), **PAPER)
    dropped = 0
    for u in torch.rand(50, 2, dtype=torch.double):
        view, k = chain._propose(u, chain._seeds(2))
        assert (view.drop_fractions * chain._size).round().tolist() == k.tolist()
        dropped += float(k.sum())
    assert dropped > 0


def dense_delta(data, hops, edge_mask, node_mask):
    n = data.num_nodes
    eye = torch.eye(n, dtype=torch.double)

    def matrix(edge_index):
        a = torch.zeros(n, n, dtype=torch.double)
        a.index_put_((edge_index[1], edge_index[0]), torch.ones(()).double(), accumulate=True)
        return torch.linalg.matrix_power(a + eye, hops)

    whole, ones = matrix(data.edge_index), torch.ones(n, dtype=torch.double)
    masked = matrix(data.edge_index[:, edge_mask])
    return torch.stack(
        [1 - masked @ ones / (whole @ ones), 1 - whole @ node_mask.double() / (whole @ ones)], dim=1
    )


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("natively", [True, False])
def test_ego_graphs(hops, undirected, natively, monkeypatch):
    """On graphs with self-loops, duplicate edges, isolated nodes and, or not, directions."""
    if not natively:
        monkeypatch.setattr(native.extension, "has_kernels", lambda *tensors: False)
    data = random_graph(directed=not undirected)
    chain = gas.MHAug(data, **PAPER, hops=hops, undirected=undirected)
    ones = chain.edge_mask, chain.node_mask
    assert (chain.delta(*ones) == 0).all()
    loops = data.edge_index[0] == data.edge_index[1]
    for share in (0.1, 0.5, 1.0):
        units = torch.rand(chain.units.size) > share
        edge_mask = chain.units.to_edge_mask(units)
        assert edge_mask[loops].all()
        assert torch.equal(chain.units.gather(edge_mask), units)
        node_mask = torch.rand(data.num_nodes) < 0.5
        found = chain.delta(edge_mask, node_mask)
        wanted = dense_delta(data, hops, edge_mask, node_mask)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-15)
        if share == 1.0 and hops == 1:  # Nothing but the node itself and its self-loops.
            total = torch.bincount(data.edge_index[1], minlength=data.num_nodes) + 1
            alone = torch.bincount(data.edge_index[1][loops], minlength=data.num_nodes) + 1
            assert torch.equal(found[:, 0], 1 - alone.double() / total)


def test_pairs_of_duplicate_edges():
    """The i-th copies of both directions belong together, whatever the order."""
    src, dst = torch.tensor([0, 1, 1, 0, 2, 1, 3]), torch.tensor([1, 0, 0, 1, 1, 2, 3])
    data = Data(x=torch.ones(4, 1), edge_index=torch.stack([src, dst]))
    units = chain_on(data, undirected=True).units
    assert units.size == 3
    masks = [
        units.to_edge_mask(torch.tensor(kept))
        for kept in itertools.product([False, True], repeat=3)
    ]
    assert {tuple(mask.tolist()) for mask in masks} == {
        (a, a, b, b, c, c, True) for a, b, c in itertools.product([False, True], repeat=3)
    }


@pytest.mark.requires("native")
@pytest.mark.parametrize("undirected", [False, True])
def test_ego_hop_equals_its_twin(undirected):
    chain = chain_on(random_graph(3000, 30_000, directed=not undirected), undirected=undirected)
    kept = torch.rand(chain.units.size) < 0.5
    x = torch.randint(1000, (3000, 2)).double()
    found = kernels.ego_hop(chain.units.graph, kept, x)
    assert torch.equal(found, kernels._ego_hop_torch(chain.units.graph, kept, x))


@pytest.mark.requires("cuda_kernels")
def test_kernels_take_what_their_twins_on_the_cpu_take(monkeypatch):
    """Without rows nothing is launched, which needs no device, but arguments are looked at."""
    called = []

    def run(name, device, *arguments):
        stream = native.C.Stream(0, lambda size: pytest.fail("no scratch is needed"))
        getattr(native.C, name)(*native.extension.to_addresses(arguments), stream)
        called.append(name)

    monkeypatch.setattr(kernels, "on_host", lambda tensor: False)
    monkeypatch.setattr(native.extension, "run", run)
    none = torch.empty(0, dtype=torch.bool)
    for among in (None, none):
        assert kernels.subset(0, whole(0), 2**63 - 1, CPU, among).numel() == 0
    index = torch.zeros(1, dtype=torch.int32)
    for unit in (None, index[1:]):
        loops = torch.empty(0, dtype=torch.double)
        graph = kernels.EgoGraph(index, index[1:], unit, loops, index[1:])
        x = torch.empty(0, 2, dtype=torch.double)
        assert kernels.ego_hop(graph, none, x).shape == x.shape
    assert called == ["draw_subset", "draw_subset", "ego_hop", "ego_hop"]


def moved(graph, device):
    *parts, _ = (None if t is None else t.to(device) for t in graph)
    return kernels.EgoGraph(*parts, find_starts(parts[0], parts[1].numel()))


SIZES = [0, 1, pytest.param(257, marks=pytest.mark.sanitized), 100_003]


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("size", SIZES)
def test_subsets_on_a_device_equal_their_twin(size, device):
    for k in sorted({0, min(1, size), size // 3, max(size - 1, 0), size}):
        for seed in (0, 2**63 - 1):
            drawn = kernels.subset(size, whole(k).to(device), seed, device)
            assert drawn.device == device
            wanted = kernels._subset_torch(size, whole(k), seed, CPU, None)
            assert torch.equal(drawn.cpu(), wanted)
        among = kernels._subset_torch(size, whole(k), 4, CPU, None)
        for few in sorted({0, min(1, k), k // 2, k}):
            for seed in (4, 5):
                args = whole(few).to(device), seed, device, among.to(device)
                drawn = kernels.subset(size, *args)
                wanted = kernels._subset_torch(size, whole(few), seed, CPU, among)
                assert torch.equal(drawn.cpu(), wanted)


@pytest.mark.requires("cuda")
def test_a_large_subset_on_a_device(device):
    """Of more blocks than a device holds; its twin takes seconds, so one draw among another."""
    size, k, few = 20_000_000, 6_666_667, 1_234_567
    among = kernels.subset(size, whole(k).to(device), 4, device)
    assert int(among.sum()) == k
    drawn = kernels.subset(size, whole(few).to(device), 5, device, among)
    wanted = kernels._subset_torch(size, whole(few), 5, CPU, among.cpu())
    assert torch.equal(drawn.cpu(), wanted)


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("num_nodes", [5, 3000])  # Hubs that many threads share, or none.
@pytest.mark.sanitized
def test_ego_hop_on_a_device_equals_its_twin(num_nodes, undirected, device):
    data = random_graph(num_nodes, 30_000, directed=not undirected)
    graph = chain_on(data, undirected=undirected).units.graph
    there = moved(graph, device)
    size = graph.col.numel() if graph.unit is None else graph.col.numel() // 2
    kept = torch.rand(size) < 0.5
    x = torch.randint(1000, (num_nodes, 2)).double()
    wanted = kernels._ego_hop_torch(graph, kept, x)
    shifted = torch.empty(2 * num_nodes + 1, dtype=torch.double, device=device)[1:].view(-1, 2)
    for on_device in (x.to(device), shifted.copy_(x)):  # Aligned to vectors, or not.
        assert torch.equal(kernels.ego_hop(there, kept.to(device), on_device).cpu(), wanted)


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("undirected", [False, True])
def test_a_chain_on_a_device_takes_the_same_steps(undirected, device):
    data = random_graph(300, 3000, directed=not undirected)
    logits = torch.randn(300, 3)
    masks = []
    for place in (CPU, device):
        chain = make_chain(data.clone().to(place), undirected=undirected, **SETTINGS)
        chain.update_entropy(logits.to(place))
        masks.append([mask.cpu() for mask in follow(chain, 20)])
        assert chain.edge_mask.device == place
    assert same(*masks)
    assert not same(masks[0][:2], masks[0][-2:])  # It did move.


@pytest.mark.requires("cuda")
def test_kernels_never_wait_for_the_device(device):
    units = chain_on(random_graph(3000, 30_000)).units
    graph = moved(units.graph, device)
    k = whole(1000).to(device)
    kept = kernels.subset(units.size, k, 1, device)
    x = torch.ones(3000, 2, dtype=torch.double, device=device)
    half = k / 2
    kernels.ego_hop(graph, kept, x)
    with no_sync():
        kernels.subset(units.size, half, 2, device, kept, k)
        kernels.ego_hop(graph, kept, x)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_kept_entries(share, monkeypatch):
    rowptr = torch.tensor([0, 0, 3, 40, 40, 41, 90, 90], dtype=torch.int32)
    ids = torch.randint(200, (90,))
    kept = torch.rand(200) < share
    entry, rows = kernels.find_kept_entries(rowptr, ids, kept)
    assert torch.equal(entry, kept[ids].nonzero().view(-1))
    counts = [int(kept[ids[a:b]].sum()) for a, b in itertools.pairwise(rowptr.tolist())]
    assert rows.diff().tolist() == counts
    assert rows[0] == 0
    assert rows.dtype == torch.int32
    monkeypatch.setattr(native.extension, "on_cpu", lambda *_: False)
    twin = kernels.find_kept_entries(rowptr, ids, kept)
    assert torch.equal(twin[0], entry)
    assert torch.equal(twin[1], rows)
    assert twin[1].dtype == torch.int32
