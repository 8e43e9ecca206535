"""Ranks of links: by enumeration, filtered or not, with ties, in blocks."""

import runpy

import pytest
import torch
import torch_geometric.transforms as T
from conftest import ROOT
from torch_geometric.data import Data

from gas.training import compute_hits, compute_mrr, links, rank_links


def enumerated(scores, pairs, known):
    """Return the mean of the best and the worst rank that equal scores allow, pair by pair."""
    linked = {tuple(pair) for pair in known.t().tolist() + pairs.t().tolist()}
    ranks = []
    for src, dst in pairs.t().tolist():
        others = [
            float(scores[src, node])
            for node in range(scores.size(1))
            if node not in (src, dst) and (src, node) not in linked
        ]
        mine = float(scores[src, dst])
        best = 1 + sum(score > mine for score in others)
        worst = 1 + sum(score >= mine for score in others)
        ranks.append((best + worst) / 2)
    return torch.tensor(ranks, dtype=torch.float64)


@pytest.mark.parametrize("bytes_held", [1, 500, 1 << 26])
@pytest.mark.parametrize("filtered", [False, True])
def test_ranks_are_those_of_enumeration(filtered, bytes_held, monkeypatch):
    monkeypatch.setattr(links, "BLOCK_BYTES", bytes_held)
    out = torch.randint(-2, 3, (40, 3)).float()  # Whole numbers: equal scores, exact sums.
    pairs = torch.randint(40, (2, 70))
    pairs[0, :30] = 5  # A hub.
    known = torch.randint(40, (2, 200)) if filtered else torch.empty(2, 0, dtype=torch.long)
    ranks = rank_links(out, pairs, known=known if filtered else None)
    assert torch.equal(ranks, enumerated(out @ out.t(), pairs, known))


def test_a_score_of_ones_own():
    out = torch.randn(30, 4)
    pairs = torch.randint(30, (2, 20))

    def nearer(src, every):
        return -torch.cdist(src, every).round(decimals=3)

    none = torch.empty(2, 0, dtype=torch.long)
    expected = enumerated(nearer(out, out), pairs, none)
    torch.testing.assert_close(rank_links(out, pairs, score=nearer), expected)


def test_memory_does_not_grow_with_the_square_of_nodes(monkeypatch):
    """Never are more scores made at once than fit the block."""
    monkeypatch.setattr(links, "BLOCK_BYTES", 4 * 10 * 500)
    sizes = []

    def score(src, every):
        sizes.append(src.size(0) * every.size(0))
        return src @ every.t()

    rank_links(torch.randn(500, 2), torch.randint(500, (2, 900)), score=score)
    assert max(sizes) == 10 * 500


def test_an_empty_graph_has_no_ranks():
    assert rank_links(torch.empty(0, 4), torch.empty(2, 0, dtype=torch.long)).numel() == 0


def test_means_over_ranks():
    ranks = torch.tensor([1.0, 2.0, 4.0, 10.5])
    assert compute_mrr(ranks) == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 10.5) / 4)
    assert [compute_hits(ranks, k) for k in (1, 3, 10, 11)] == [0.25, 0.5, 0.75, 1.0]
    assert compute_mrr(ranks[:0]) == compute_hits(ranks[:0], 3) == 0.0


@pytest.mark.parametrize("loss", ["binary", "triplet"])
def test_the_example(run_script, loss):
    options = ["--dataset", "planted:600", "--epochs", "15", "--num-parts", "8", "--loss", loss]
    done = run_script(ROOT / "examples" / "train_links.py", *options)
    assert done.code == 0, done.err
    test = float(done.out.split("test: MRR ")[1].split(",")[0])
    chance = float(done.out.split("about ")[1].split(".)")[0])
    assert test > 1.5 * chance


def test_both_directions_of_undirected_links_are_left_out():
    """A model that ranks every link above all others has the rank 1 for each."""
    links_ = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 2]])
    scores = torch.full((5, 5), -1.0)
    scores[links_[0], links_[1]] = 1.0
    scores[links_[1], links_[0]] = 1.0

    def known(src, every):
        return scores[src[:, 0].long()]

    nodes = torch.arange(5.0)[:, None]
    assert rank_links(nodes, links_, score=known, undirected=True).tolist() == [1.0] * 4
    assert rank_links(nodes, links_, score=known).max() > 1


@pytest.mark.parametrize("directed", [True, False])
def test_the_example_uses_every_edge(directed):
    torch.manual_seed(0)
    edge_index = torch.randint(80, (2, 400))
    data = Data(edge_index=edge_index[:, edge_index[0] != edge_index[1]], num_nodes=80)
    data = (data if directed else T.ToUndirected()(data)).coalesce()
    assert data.is_undirected() == (not directed)
    split_links = runpy.run_path(str(ROOT / "examples" / "train_links.py"))["split_links"]
    train, val, test = split_links(data, data.is_undirected())

    def pairs(edges):
        return {(u, v) for u, v in edges.t().tolist()}

    chosen = [pairs(each.edge_label_index) for each in (train, val, test)]
    told = set.union(*chosen)
    closed = told | {(v, u) for u, v in told}
    assert sum(map(len, chosen)) == len(told)
    links = data.num_edges if directed else data.num_edges // 2
    sizes = [len(chosen[1]), len(chosen[2])]
    assert sizes == pytest.approx([0.05 * links, 0.1 * links], abs=2)  # Pairs of a directed graph.
    assert pairs(data.edge_index) <= pairs(train.edge_index) | closed
    for each, mine in zip((train, val, test), chosen, strict=True):
        assert not pairs(each.edge_index) & (mine | {(v, u) for u, v in mine})
    for number, held in enumerate(chosen[1:], 1):  # No reverse was known before, in any way.
        before = set.union(pairs(train.edge_index), *chosen[:number])
        assert not before & {(v, u) for u, v in held}
