"""The chain's stationary distribution: exactly, by listing every state, and by running it."""

import itertools
import math

import pytest
import torch
from augment_graphs import chain_on, number, path, states, target
from scipy import stats

from gas.augment.distributions import log_choose


def fresh_masks(chain, log_p, k):
    """Return the transition matrix of fresh masks, by the chain's own proposal and acceptance."""
    new, old = k[None, :], k[:, None]
    masks = log_choose(chain._size, k).sum(dim=-1)  # Every subset of a size is equally likely.
    proposed = (chain.log_proposal(new, old) - masks).exp()
    ratio = chain.log_acceptance(log_p[None, :], log_p[:, None], new, old)
    return staying(proposed * ratio.clamp(max=0).exp()), proposed


def swapped_masks(chain, log_p, k):
    """Return the transition matrix of swaps."""
    listed = states(chain)
    masks = torch.stack([torch.cat([units, nodes]) for units, _, nodes in listed])
    sides = masks[:, : chain.units.size].double(), masks[:, chain.units.size :].double()
    proposed = torch.ones(len(listed), len(listed), dtype=torch.double)
    for side, size, dropped in zip(sides, chain._size, k.T, strict=True):
        count = torch.minimum(dropped, size - dropped).clamp(max=chain.swaps)
        out = (side[:, None] * (1 - side[None])).sum(dim=-1)
        back = ((1 - side[:, None]) * side[None]).sum(dim=-1)
        ways = (log_choose(size - dropped, count) + log_choose(dropped, count)).exp()
        proposed *= ((out == count[:, None]) & (back == count[:, None])) / ways[:, None]
    ratio = chain.log_acceptance(log_p[None, :], log_p[:, None], k[None, :], k[:, None])
    return staying(proposed * ratio.clamp(max=0).exp()), proposed


def accepted(chain, log_p, k, proposed):
    """Return the probability that a proposal is accepted, of each state."""
    ratio = chain.log_acceptance(log_p[None, :], log_p[:, None], k[None, :], k[:, None])
    return (proposed * ratio.clamp(max=0).exp()).sum(dim=1)


def staying(moves):
    """Add the probability of rejection to the diagonal."""
    moves = moves.clone().fill_diagonal_(0)
    return moves + torch.diag(1 - moves.sum(dim=1))


def stationary(matrix):
    system = torch.cat([matrix.T - torch.eye(len(matrix)), torch.ones(1, len(matrix))])
    right = torch.zeros(len(matrix) + 1, dtype=torch.double)
    right[-1] = 1
    return torch.linalg.lstsq(system, right[:, None]).solution[:, 0]


def total_variation(p, q):
    return float((p - q).abs().sum() / 2)


def check(matrix, wanted):
    assert (matrix >= 0).all()
    flow = wanted[:, None] * matrix
    assert float((flow - flow.T).abs().max()) < 1e-15
    assert total_variation(stationary(matrix), wanted) < 1e-12


@pytest.mark.parametrize("proposal", ["binned", "walk"])
@pytest.mark.parametrize("undirected", [False, True])
def test_every_state_of_a_path(proposal, undirected):
    chain = chain_on(path(), proposal=proposal, undirected=undirected)
    log_p, k, wanted = target(chain)
    assert len(log_p) == (8 if undirected else 64) * 15
    matrix, proposed = fresh_masks(chain, log_p, k)
    total = proposed.sum(dim=1)
    if proposal == "binned":
        assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-13)
        assert (proposed > 0).all()
    else:  # What is missing lies outside.
        assert (total < 1 + 1e-13).all()
        assert float(total.min()) < 0.9
    check(matrix, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [1, 2])
def test_every_state_with_swaps(swaps):
    chain = chain_on(path(), local=0.5, swaps=swaps)
    log_p, k, wanted = target(chain)
    fresh, _ = fresh_masks(chain, log_p, k)
    swapped, proposed = swapped_masks(chain, log_p, k)
    total = proposed.sum(dim=1)
    assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-13)
    check((fresh + swapped) / 2, wanted)


def test_scoring_the_continuous_fraction_is_noticed():
    """The published chain: floors, and scores densities; here of the edges alone."""
    chain = chain_on(path())
    edges = [torch.tensor(mask) for mask in itertools.product([True, False], repeat=6)]
    nodes = torch.ones(4, dtype=torch.bool)
    log_p = torch.stack([chain.log_prob(chain.units.to_edge_mask(mask), nodes) for mask in edges])
    k = torch.tensor([float((~mask).sum()) for mask in edges], dtype=torch.double)
    wanted, m, sd = log_p.softmax(dim=0), 6, float(chain.sigma_delta[0])
    size = torch.tensor(float(m), dtype=torch.double)

    points = 100  # In each bin, of Delta'.
    share = (torch.arange(m * points, dtype=torch.double) + 0.5) / (m * points)

    def density(at, mean):
        a, b = -mean / sd, (1 - mean) / sd
        return torch.from_numpy(stats.truncnorm.logpdf(at, a, b, loc=mean, scale=sd))

    old = k[:, None, None] / m
    there = density(share.view(1, m, points), old)
    back = density(old, share.view(1, m, points))
    moves = torch.zeros(64, 64, dtype=torch.double)
    for column, count in enumerate(k.long().tolist()):
        if count == m:
            continue  # Never reached.
        choose = log_choose(size, k[column]) - log_choose(size, k)
        ratio = (log_p[column] - log_p + choose)[:, None] + (back - there)[:, count]
        chance = there[:, count].exp() / (m * points) / math.comb(m, count)
        moves[:, column] = (chance * ratio.clamp(max=0).exp()).sum(dim=1)
    assert total_variation(stationary(staying(moves)), wanted) > 0.05

    both = torch.stack([k, torch.zeros_like(k)], dim=1)  # The chain itself, in the same way.
    proposed = chain._proposal.log_mass(both[None], both[:, None], chain.sigma_delta)[..., 0]
    ratio = chain.log_acceptance(log_p[None], log_p[:, None], both[None], both[:, None])
    moves = (proposed - log_choose(size, k) + ratio.clamp(max=0)).exp()
    check(staying(moves), wanted)


def correlation_time(values):
    """Return the integrated autocorrelation time, by Geyer's initial positive pairs."""
    values = values - values.mean()
    spectrum = torch.fft.rfft(values, 2 * len(values)).abs().square()
    correlation = torch.fft.irfft(spectrum)[: len(values)]
    pairs = (correlation / correlation[0])[: len(values) // 2 * 2].view(-1, 2).sum(dim=1)
    positive = int((pairs <= 0).nonzero()[0])
    return float(2 * pairs[:positive].sum() - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"undirected": True, "proposal": "walk"},
        {"undirected": True, "local": 0.5, "swaps": 1},
    ],
    ids=str,
)
def test_a_long_chain(options):
    chain = chain_on(path(), **options)
    log_p, k, wanted = target(chain)
    visits = []
    for _ in range(10_000):
        chain.step()
        visits.append(number(chain._current.edges, chain.node_mask))
    visits = torch.tensor(visits)
    # As often as the listed chain does ...
    moves = [fresh_masks(chain, log_p, k)]
    if chain.local:
        moves.append(swapped_masks(chain, log_p, k))
    rates = [accepted(chain, log_p, k, proposed) for _, proposed in moves]
    rate = float((wanted * sum(rates) / len(rates)).sum())
    # ... and at the same places.
    found = torch.bincount(visits, minlength=len(wanted)) / len(visits)
    slowest = max(correlation_time(values[visits]) for values in (log_p, k[:, 0], k[:, 1]))
    independent = len(visits) / slowest
    floor = float((2 * wanted * (1 - wanted) / (math.pi * independent)).sqrt().sum() / 2)
    assert total_variation(found, wanted) < 3 * floor
    assert abs(chain.acceptance_rate - rate) < 4 * math.sqrt(rate * (1 - rate) / independent)
    # Which could fail: other wishes are another distribution.
    other = target(chain_on(path(), mu_e=0.8, mu_v=0.1, **options))[2]
    assert total_variation(found, other) > 3 * floor
    statistics = chain.statistics()
    assert statistics.steps == len(visits)
    assert statistics.distinct_states == int((found > 0).sum())
    shares = k[visits].mean(dim=0) / chain._size
    assert statistics.mean_edge_drop == pytest.approx(float(shares[0]))
    assert statistics.mean_node_drop == pytest.approx(float(shares[1]))
    assert statistics.acceptance_rate == chain.acceptance_rate


@pytest.mark.slow  # Runs the chain long enough for its distribution.
@pytest.mark.parametrize("proposal", ["binned", "walk"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_without_ego_graphs(weight, proposal):
    """The number of dropped elements is uniform, or binomial, by the weight of its normaliser."""
    chain = chain_on(
        path(6), lam1=0, lam3=0, lam2=weight, lam4=weight, sigma_delta_e=0.5, sigma_delta_v=0.5,
        proposal=proposal,
    )  # fmt: skip
    found = []
    for _ in range(10_000):
        chain.step()
        found.append(chain._state.k)
    found = torch.stack(found)
    slowest = max(correlation_time(values) for values in found.T)
    found = found[:: math.ceil(2 * slowest)].long()  # About independent.
    assert len(found) > 300
    for side, size, most in ((0, 10, 10), (1, 6, 5)):
        uniform = torch.ones(most + 1, dtype=torch.double)
        binomial = uniform * torch.tensor([math.comb(size, k) for k in range(most + 1)])
        count = torch.bincount(found[:, side], minlength=most + 1)

        def p_value(weights, count=count):
            return stats.chisquare(count, weights / weights.sum() * len(found)).pvalue

        wanted, other = (uniform, binomial) if weight else (binomial, uniform)
        assert p_value(wanted) > 1e-3
        assert p_value(other) < 1e-3  # The check can fail.
