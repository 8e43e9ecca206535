"""The distribution that MHAug samples from, and the entropies that it takes."""

import math

import pytest
import torch
from augment_graphs import SETTINGS, chain_on, make_chain, seeded
from conftest import random_graph

from gas.augment import entropy


def test_log_prob():
    """Against the formula, node by node."""
    data = random_graph()
    chain = chain_on(data)
    edge_mask = chain.units.to_edge_mask(torch.rand(chain.units.size) < 0.7)
    node_mask = torch.rand(60) < 0.6
    delta = chain.delta(edge_mask, node_mask)
    eps = entropy(torch.randn(60, 3, generator=seeded(5))) / math.log(3)
    total, s = 0.0, SETTINGS
    for i in range(60):
        sigma_e, sigma_v = (s[f"a_{x}"] * float(eps[i]) + s[f"b_{x}"] for x in "ev")
        total -= s["lam1"] * (float(delta[i, 0]) - s["mu_e"]) ** 2 / (2 * sigma_e**2)
        total -= s["lam3"] * (float(delta[i, 1]) - s["mu_v"]) ** 2 / (2 * sigma_v**2)
    m, n = chain.units.size, 60
    total -= s["lam2"] * math.log(math.comb(m, int((~edge_mask).sum())))
    total -= s["lam4"] * math.log(math.comb(n, int((~node_mask).sum())))
    assert float(chain.log_prob(edge_mask, node_mask)) == pytest.approx(total, rel=1e-6)


def test_entropy_changes_the_target():
    data = random_graph()
    chain = make_chain(data)
    chain.run(20)
    masks = chain.edge_mask, chain.node_mask
    assert float(chain._state.log_p) == float(chain.log_prob(*masks))
    before = float(chain._state.log_p)
    logits = torch.randn(60, 4, requires_grad=True)
    chain.update_entropy(logits)
    assert float(chain._state.log_p) == float(chain.log_prob(*masks))
    assert float(chain._state.log_p) != before

    other = make_chain(data)
    for n_id in torch.randperm(60).split(17):  # In batches.
        other.update_entropy(logits[n_id], n_id)
    assert torch.allclose(other._target.eps, chain._target.eps, rtol=0, atol=1e-7)
    chain.update_entropy(torch.zeros(60, 4))  # Sure of nothing: as before the first call.
    assert torch.allclose(chain._target.eps, make_chain(data)._target.eps)
    chain.update_entropy(torch.eye(4)[torch.randint(4, (60,))] * 100)
    assert float(chain._target.eps.max()) < 1e-6


def test_two_classes_are_enough():
    chain = make_chain()
    chain.update_entropy(torch.zeros(60, 2))
    assert torch.allclose(chain._target.eps, torch.ones(60, dtype=torch.double))
    chain.update_entropy(torch.tensor([[100.0, -100.0]]).expand(60, 2))
    assert float(chain._target.eps.max()) < 1e-6


def test_tempering():
    data = random_graph()
    plain, tempered = make_chain(data), make_chain(data, reference_size=6)
    assert torch.equal(tempered._target.lam_delta, plain._target.lam_delta / 10)
    assert torch.allclose(1 - tempered._target.lam_choose, (1 - plain._target.lam_choose) / 10)
    same_size = make_chain(data, reference_size=60)
    assert torch.equal(same_size._target.lam_delta, plain._target.lam_delta)
    assert torch.allclose(same_size._target.lam_choose, plain._target.lam_choose)
    large = random_graph(4000, 20_000)
    wide = dict(sigma_delta_e=0.5, sigma_delta_v=0.5)
    cold, warm = make_chain(large, **wide), make_chain(large, reference_size=100, **wide)
    cold.run(300)
    warm.run(300)
    assert warm.acceptance_rate > 2 * cold.acceptance_rate


def test_wrong_logits():
    chain = make_chain()
    for shape in ((60,), (59, 3), (60, 1)):
        with pytest.raises(ValueError, match=r"'logits' has shape .*expected \[60, classes\]"):
            chain.update_entropy(torch.zeros(shape))
    with pytest.raises(ValueError, match="'logits' holds NaN or infinite"):
        chain.update_entropy(torch.full((60, 3), math.nan))
    with pytest.raises(IndexError, match="'n_id' holds 60"):
        chain.update_entropy(torch.zeros(2, 3), torch.tensor([0, 60]))
    with pytest.raises(ValueError, match="'n_id' is torch.float32"):
        chain.update_entropy(torch.zeros(2, 3), torch.zeros(2))
    assert (chain._target.eps == 1).all()
