import math

import pytest
import torch
from scipy import special, stats

from gas.augment.distributions import PROPOSALS, log_choose, log_interval_mass, truncated_normal


def normal(z):
    return torch.from_numpy(special.ndtr(z.numpy()))


def double(*values):
    return torch.tensor(values, dtype=torch.double)


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("sd", [0.005, 0.03, 0.1])
@pytest.mark.parametrize("mean", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("high", [1.0, 0.97])
def test_truncated_normal(mean, sd, high):
    mean = min(mean, high)
    law = stats.truncnorm(-mean / sd, (high - mean) / sd, loc=mean, scale=sd)
    u = torch.rand(100_000, dtype=torch.double)
    drawn = truncated_normal(double(mean), double(sd), u, double(high))
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= high
    assert stats.kstest(drawn.numpy(), law.cdf).pvalue > 1e-3
    assert stats.kstest(drawn.numpy() + 0.02 * sd, law.cdf).pvalue < 1e-3  # Can fail.
    ends = double(0.0, 1e-12, 1e-4, 0.3, 0.7, 1 - 1e-4, 1 - 1e-12, 1 - 2**-53)
    z = (truncated_normal(double(mean), double(sd), ends, double(high)) - mean) / sd
    below, above = (special.ndtr(-abs(end - mean) / sd) for end in (0.0, high))
    inside = 1 - below - above  # Each tail by the smaller number: scipy's ppf takes the left alone.
    left, right = below + ends * inside, above + (1 - ends) * inside
    found = torch.from_numpy(special.ndtr(-z.abs().numpy()))
    assert torch.allclose(found, torch.minimum(left, right), rtol=1e-11, atol=0)


@pytest.mark.parametrize("m", [10, 1000, 10**6, 10**8, 10**9])
def test_log_choose(m):
    k = double(0, 1, 2, m // 3, m // 2, m - 2, m - 1, m)
    beta = torch.from_numpy(special.betaln((m - k + 1).numpy(), (k + 1).numpy()))
    wanted = -beta - math.log(m + 1)
    tolerance = 4 * torch.finfo(torch.double).eps * special.gammaln(m + 1) + 1e-14
    assert float((log_choose(double(m), k) - wanted).abs().max()) < tolerance
    assert (log_choose(double(m), k)[[0, -1]] == 0).all()
    few = [math.log(math.comb(m, i)) for i in (0, 1, 2)]
    assert torch.allclose(log_choose(double(m), k)[:3], double(*few), rtol=0, atol=tolerance)


def test_masses_between():
    ends = double(-40, -12, -5, -1, -1e-3, 0, 1e-3, 0.5, 3, 9, 20, 39)
    low, high = ends[:-1], ends[1:]
    wanted = torch.where(
        low >= 0,
        normal(-low) - normal(-high),
        normal(high) - normal(low),
    ).log()
    assert torch.allclose(log_interval_mass(low, high), wanted, rtol=1e-12, atol=0)
    assert torch.equal(
        log_interval_mass(low, high), log_interval_mass(-high, -low)
    )  # Mirrored, to the bit.
    far = log_interval_mass(double(60.0), double(61.0))
    assert float(far) == pytest.approx(special.log_ndtr(-60.0))
    width = 1e-7  # One bin of ten million edges.
    for at in (-6.0, 0.0, 2.0):
        narrow = log_interval_mass(double(at), double(at + width))
        assert float(narrow) == pytest.approx(
            math.log(width) + stats.norm.logpdf(at + width / 2), abs=1e-7
        )


@pytest.mark.parametrize("name", ["binned", "walk"])
@pytest.mark.parametrize("sd", [0.02, 0.3, 4.0])
def test_draws_follow_their_masses(name, sd):
    size, most = double(12, 12), double(12, 11)
    proposal = PROPOSALS[name](size, most)
    u = torch.rand(50_000, 2, dtype=torch.double)
    for old in (0.0, 5.0, 11.0):
        drawn = proposal.draw(double(old, old), double(sd, sd), u)
        for side in (0, 1):
            k = torch.arange(int(most[side]) + 1, dtype=torch.double)
            pairs = torch.stack([k, k], dim=1)
            mass = proposal.log_mass(pairs, double(old, old), double(sd, sd)).exp()[:, side]
            inside = (drawn[:, side] >= 0) & (drawn[:, side] <= most[side])
            count = torch.bincount(drawn[inside, side].long(), minlength=len(k)).double()
            outside = 1 - float(mass.sum())
            if name == "binned":
                assert inside.all()
                assert abs(outside) < 1e-14
                wanted = mass
            else:
                count = torch.cat([count, (~inside).sum().view(1).double()])
                wanted = torch.cat([mass, double(max(outside, 1e-300))])
            likely = wanted * len(u) > 5
            rest = count[~likely].sum(), wanted[~likely].sum() * len(u)
            count = torch.cat([count[likely], rest[0].view(1)])
            wanted = torch.cat([wanted[likely] * len(u), rest[1].view(1)])
            if wanted[-1] < 5:
                assert count[-1] < 30
                count, wanted = count[:-1], wanted[:-1] / wanted[:-1].sum() * count[:-1].sum()
            assert len(count) == 1 or stats.chisquare(count.numpy(), wanted.numpy()).pvalue > 1e-4


def test_every_number_is_reachable():
    proposal = PROPOSALS["binned"](double(10, 10), double(10, 9))
    ends = double(0.0, 1 - 2**-53)
    low, high = (proposal.draw(double(5, 5), double(9, 9), u.expand(2)) for u in ends)
    assert low.tolist() == [0, 0]
    assert high.tolist() == [10, 9]
    walk = PROPOSALS["walk"](double(10, 10), double(10, 9))
    low, high = (walk.draw(double(5, 5), double(9, 9), u.expand(2)) for u in ends)
    assert low.tolist() == [-1, -1]
    assert high.tolist() == [11, 10]
