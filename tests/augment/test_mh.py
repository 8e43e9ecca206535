"""The chain of MHAug: its steps, adaptation, checkpoints and options."""

import copy
import math
import re
import warnings

import pytest
import torch
from augment_graphs import follow, make_chain, same, seeded
from conftest import random_graph
from torch.utils._python_dispatch import TorchDispatchMode

import gas
from gas import native
from gas.augment import mh


def test_seeds_and_where_they_come_from():
    data = random_graph()
    assert same(follow(make_chain(data)), follow(make_chain(data)))
    assert not same(follow(make_chain(data)), follow(make_chain(data, generator=seeded(1))))
    torch.manual_seed(7)
    first = follow(make_chain(data, generator=None))
    torch.manual_seed(7)
    assert same(first, follow(make_chain(data, generator=None)))


def test_run_is_some_steps():
    data = random_graph()
    chain, other = make_chain(data), make_chain(data, num_steps=9)
    masks = follow(chain, 9)
    other.run()
    assert same(masks[-2:], [other.edge_mask, other.node_mask])
    assert chain.statistics() == other.statistics()
    other.run(0)
    assert other.statistics().steps == 9


@pytest.mark.parametrize("options", [{}, {"local": 0.5}, {"proposal": "walk"}], ids=str)
def test_twins_walk_the_same_chain(options, monkeypatch):
    data = random_graph(directed=False)
    chain = make_chain(data, undirected=True, **options)
    masks = follow(chain, 10)
    monkeypatch.setattr(native.extension, "has_kernels", lambda *tensors: False)
    assert same(masks, follow(make_chain(data, undirected=True, **options), 10))
    monkeypatch.setattr(mh, "on_host", lambda tensor: False)  # Accepts by torch.where.
    other = make_chain(data, undirected=True, **options)
    assert same(masks, follow(other, 10))
    assert chain.statistics() == other.statistics()


class NoReading(TorchDispatchMode):
    """Refuses what would make a host wait for a GPU, where tensors were there."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert not name.startswith(self.WAITS), name
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index"
        if name == "repeat_interleave":
            assert kwargs.get("output_size") is not None
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"local": 1.0}, {"proposal": "walk"}], ids=str)
def test_transitions_never_wait(options, monkeypatch):
    """As on a GPU: the twins, and acceptance by torch.where."""
    monkeypatch.setattr(native.extension, "has_kernels", lambda *tensors: False)
    monkeypatch.setattr(mh, "on_host", lambda tensor: False)
    data = random_graph(directed=False)
    for undirected in (False, True):
        chain = make_chain(
            data, undirected=undirected, target_acceptance=0.3, burn_in=5, hops=3, **options
        )
        with NoReading():
            chain.run(10)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReading():
        chain.step()  # Says whether it was accepted: the check can fail.


def test_inference_mode():
    """Tensors made by an evaluation in inference mode can be used and changed afterwards."""
    data = random_graph()
    chain, other = make_chain(data), make_chain(data)
    logits = torch.randn(60, 4)
    with torch.inference_mode():
        chain.update_entropy(logits + 0)
        chain.run(5)
        chain(data)
    for rows in torch.arange(60).split(30):
        chain.update_entropy(logits[rows], rows)
    other.update_entropy(logits)
    other.run(6)
    assert same(follow(chain), follow(other))


def test_adaptation_reaches_its_target_then_freezes():
    wide = dict(sigma_delta_e=0.5, sigma_delta_v=0.5)
    chain = make_chain(random_graph(2000, 8000), target_acceptance=0.4, burn_in=600, **wide)
    start = chain.sigma_delta
    chain.run(600)
    adapted = chain.sigma_delta
    assert chain.statistics().steps == 0
    assert float(adapted[1]) < float(start[1]) / 2
    assert float(adapted[0] / start[0]) == pytest.approx(float(adapted[1] / start[1]))
    chain.run(600)
    assert torch.equal(chain.sigma_delta, adapted)
    assert chain.statistics().steps == 600
    assert abs(chain.acceptance_rate - 0.4) < 0.15
    plain = make_chain(random_graph(2000, 8000), **wide)
    plain.run(600)
    assert plain.acceptance_rate < 0.2


def test_local_moves_keep_the_sizes():
    data = random_graph()
    chain = make_chain(data, local=1.0, swaps=3)
    edges = torch.ones(240, dtype=torch.bool)
    edges[(data.edge_index[0] != data.edge_index[1]).nonzero().view(-1)[:20]] = False
    nodes = torch.rand(60) < 0.5
    chain.reset(edges, nodes)
    assert torch.equal(chain.previous_edge_mask, edges)
    changed = 0
    for _ in range(50):
        chain.step()
        assert int((~chain.edge_mask).sum()) == 20
        assert int(chain.node_mask.sum()) == int(nodes.sum())
        change = int((chain.edge_mask != chain.previous_edge_mask).sum())
        assert change in (0, 6)
        changed += change > 0
    assert changed > 5
    chain.reset()
    assert chain.edge_mask.all()
    assert chain.step()  # At the graph itself there is nothing to swap.
    assert chain.edge_mask.all()


def test_a_stuck_chain_warns_once():
    settings = dict(lam3=1e6, mu_v=0.0, sigma_delta_v=1.0)
    chain = make_chain(random_graph(), **settings)
    with pytest.warns(UserWarning, match=r"accepted .* % of 1000 .*reference_size"):
        chain.run(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.run(1000)
    chain = make_chain(random_graph(), **settings)
    chain.run(999)
    with pytest.warns(UserWarning, match="accepted"):
        chain.step()


@pytest.mark.parametrize("options", [{}, {"target_acceptance": 0.3, "burn_in": 40}], ids=str)
def test_resuming(options):
    data = random_graph()
    chain = make_chain(data, **options)
    chain.update_entropy(torch.randn(60, 4))
    chain.run(25)
    state = {key: value.clone() for key, value in chain.state_dict().items()}
    masks = follow(chain)
    other = make_chain(data, generator=seeded(9), **options)
    other.run(3)
    other.load_state_dict(state)
    assert torch.equal(other.previous_edge_mask, make_chain(data).edge_mask)
    assert same(masks, follow(other))
    assert chain.statistics() == other.statistics()
    last, resumed = chain.state_dict(), other.state_dict()
    assert all(torch.equal(last[key], resumed[key]) for key in last)
    for key, value in chain.state_dict().items():  # Loading copies.
        assert value.data_ptr() != state[key].data_ptr()


def test_a_state_of_another_graph_or_class():
    chain = make_chain(random_graph())
    state = chain.state_dict()
    before = follow(copy.deepcopy(chain), 5)
    small = make_chain(random_graph(50, 100)).state_dict()
    with pytest.raises(ValueError, match="'state' has 'edges' of .*saved for another graph"):
        chain.load_state_dict(small)
    with pytest.raises(ValueError, match="'state' has 'eps' of torch.float64 and shape"):
        chain.load_state_dict({**state, "eps": state["eps"][:9]})
    with pytest.raises(ValueError, match=r"'state' has the entries .*saved from another class"):
        chain.load_state_dict(gas.augment.DropEdge(random_graph()).state_dict())
    assert same(before, follow(chain, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mu_e": 1.1}, "'mu_e' is 1.1, expected a number in [0, 1]"),
        ({"mu_v": math.nan}, "'mu_v' is nan, expected a number in [0, 1]"),
        ({"sigma_delta_e": 0.0}, "'sigma_delta_e' is 0.0, expected a finite number above 0"),
        ({"sigma_delta_v": math.inf}, "'sigma_delta_v' is inf, expected a finite number above 0"),
        ({"a_e": -1}, "'a_e' is -1, expected a finite number of at least 0"),
        ({"b_v": 0}, "'b_v' is 0, expected a finite number above 0"),
        ({"lam1": -0.5}, "'lam1' is -0.5, expected a finite number of at least 0"),
        ({"lam2": 5}, "'lam2' is 5, expected a number in [0, 1]"),
        ({"hops": 0}, "'hops' is 0, expected an integer of at least 1"),
        ({"hops": 2.0}, "'hops' is 2.0, expected an integer of at least 1"),
        ({"local": 1.5}, "'local' is 1.5, expected a probability in [0, 1]"),
        ({"swaps": 0}, "'swaps' is 0, expected an integer of at least 1"),
        ({"reference_size": 0}, "'reference_size' is 0, expected an integer of at least 1"),
        ({"proposal": "jump"}, "'proposal' is 'jump', expected one of 'binned', 'walk'"),
        ({"target_acceptance": 1.0, "burn_in": 5}, "'target_acceptance' is 1.0, expected a rate"),
        ({"burn_in": 5}, "'target_acceptance' is None and 'burn_in' is 5: expected both"),
        ({"num_steps": -1}, "'num_steps' is -1, expected an integer of at least 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_chain(**options)
