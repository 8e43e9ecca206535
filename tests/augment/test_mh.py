"""The interface of MHAug: masks, views, checkpoints, adaptation, errors."""

import copy
import math
import re
import warnings

import pytest
import torch
from augment_graphs import PAPER, SETTINGS, chain_on, path
from conftest import random_graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import gas
from gas import _masks
from gas.augment import entropy, mh
from gas.augment.units import mask_features


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make(data=None, **options):
    data = random_graph() if data is None else data
    return gas.MHAug(data, **{**PAPER, "generator": seeded(), **options})


def follow(chain, steps=30):
    """The masks after each step."""
    masks = []
    for _ in range(steps):
        chain.step()
        masks += [chain.edge_mask.clone(), chain.node_mask.clone()]
    return masks


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def test_views():
    data = random_graph()
    data.edge_attr = torch.arange(240.0)
    before = copy.deepcopy(data)
    chain = make(data, num_steps=20)
    out = chain(data)
    assert chain.edge_mask.shape == (240,)
    assert chain.node_mask.shape == (60,)
    assert 0 < int((~chain.edge_mask).sum()) < 240
    assert torch.equal(out.edge_index, data.edge_index[:, chain.edge_mask])
    assert torch.equal(out.edge_attr, data.edge_attr[chain.edge_mask])
    kept = chain.node_mask
    assert (out.x[~kept] == 0).all()
    assert torch.allclose(out.x[kept], data.x[kept] * 60 / int(kept.sum()))
    assert torch.equal(out.y, data.y)
    for key in before.keys():  # noqa: SIM118
        assert torch.equal(before[key], data[key])

    assert chain.previous_edge_mask.all()  # Where the call began.
    assert chain.previous_node_mask.all()
    assert bool(chain.previous_is_milder)
    first = chain.edge_mask, chain.node_mask
    chain.run(30)
    assert same(first, [chain.previous_edge_mask, chain.previous_node_mask])
    past = chain.apply(data, previous=True)
    assert torch.equal(past.edge_index, out.edge_index)
    assert torch.equal(past.x, out.x)
    assert torch.equal(chain.apply(data).edge_index, data.edge_index[:, chain.edge_mask])
    steps = chain.statistics().steps
    assert steps == 50
    assert chain.forward(data).num_nodes == 60
    assert chain.statistics().steps == 70
    assert str(chain) == f"MHAug(num_nodes=60, num_edges={chain.units.size})"
    assert str(make(path(), undirected=True)) == "MHAug(num_nodes=4, num_pairs=3)"
    # Plain PyG training, normalised by the degrees of the view.
    GCN(5, 8, 2, 3)(out.x, out.edge_index).sum().backward()


def test_a_view_masks_nan_features_too():
    data = random_graph()
    data.x[3] = math.nan
    chain = make(data)
    nodes = torch.ones(60, dtype=torch.bool)
    nodes[3] = False
    chain.reset(node_mask=nodes)
    assert (chain.apply(data).x[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_masked_features_of_any_type(dtype):
    x = (10 * torch.randn(6, 3, 2)).to(dtype)
    mask = torch.tensor([True, False, True, True, False, True])
    expected = x * torch.tensor(2, dtype=dtype)
    expected[~mask] = 0
    found = mask_features(x, mask, torch.tensor(2.0))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_masked_features_have_gradients():
    x = torch.randn(4, 3, requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    mask_features(x, mask, torch.tensor(2.0)).sum().backward()
    assert torch.equal(x.grad, 2.0 * mask[:, None].expand(4, 3))


def test_seeds_and_where_they_come_from():
    data = random_graph()
    assert same(follow(make(data)), follow(make(data)))
    assert not same(follow(make(data)), follow(make(data, generator=seeded(1))))
    torch.manual_seed(7)
    first = follow(make(data, generator=None))
    torch.manual_seed(7)
    assert same(first, follow(make(data, generator=None)))


def test_run_is_some_steps():
    data = random_graph()
    chain, other = make(data), make(data, num_steps=9)
    masks = follow(chain, 9)
    other.run()
    assert same(masks[-2:], [other.edge_mask, other.node_mask])
    assert chain.statistics() == other.statistics()
    other.run(0)
    assert other.statistics().steps == 9


@pytest.mark.parametrize("options", [{}, {"local": 0.5}, {"proposal": "walk"}], ids=str)
def test_twins_walk_the_same_chain(options, monkeypatch):
    data = random_graph(directed=False)
    chain = make(data, undirected=True, **options)
    masks = follow(chain, 10)
    monkeypatch.setattr(_masks, "has_kernels", lambda *tensors: False)
    assert same(masks, follow(make(data, undirected=True, **options), 10))
    monkeypatch.setattr(mh, "on_host", lambda tensor: False)  # Accepts by torch.where.
    other = make(data, undirected=True, **options)
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
    monkeypatch.setattr(_masks, "has_kernels", lambda *tensors: False)
    monkeypatch.setattr(mh, "on_host", lambda tensor: False)
    data = random_graph(directed=False)
    for undirected in (False, True):
        chain = make(
            data, undirected=undirected, target_acceptance=0.3, burn_in=5, hops=3, **options
        )
        with NoReading():
            chain.run(10)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReading():
        chain.step()  # Says whether it was accepted: the check can fail.


def test_log_prob():
    """Against the formula, node by node."""
    data = random_graph()
    chain = chain_on(data)
    edge_mask = chain.units.spread(torch.rand(chain.units.size) < 0.7)
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
    chain = make(data)
    chain.run(20)
    masks = chain.edge_mask, chain.node_mask
    assert float(chain._state.log_p) == float(chain.log_prob(*masks))
    before = float(chain._state.log_p)
    logits = torch.randn(60, 4, requires_grad=True)
    chain.update_entropy(logits)
    assert float(chain._state.log_p) == float(chain.log_prob(*masks))
    assert float(chain._state.log_p) != before

    other = make(data)
    for n_id in torch.randperm(60).split(17):  # In batches.
        other.update_entropy(logits[n_id], n_id)
    assert torch.allclose(other._target.eps, chain._target.eps, rtol=0, atol=1e-7)
    chain.update_entropy(torch.zeros(60, 4))  # Sure of nothing: as before the first call.
    assert torch.allclose(chain._target.eps, make(data)._target.eps)
    chain.update_entropy(torch.eye(4)[torch.randint(4, (60,))] * 100)
    assert float(chain._target.eps.max()) < 1e-6


def test_inference_mode():
    """What an evaluation in inference mode leaves behind can be used, and changed, afterwards."""
    data = random_graph()
    chain, other = make(data), make(data)
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


def test_tempering():
    data = random_graph()
    plain, tempered = make(data), make(data, reference_size=6)
    assert torch.equal(tempered._target.lam_delta, plain._target.lam_delta / 10)
    assert torch.allclose(1 - tempered._target.lam_choose, (1 - plain._target.lam_choose) / 10)
    same_size = make(data, reference_size=60)
    assert torch.equal(same_size._target.lam_delta, plain._target.lam_delta)
    assert torch.allclose(same_size._target.lam_choose, plain._target.lam_choose)
    large = random_graph(4000, 20_000)
    wide = dict(sigma_delta_e=0.5, sigma_delta_v=0.5)
    cold, warm = make(large, **wide), make(large, reference_size=100, **wide)
    cold.run(300)
    warm.run(300)
    assert warm.acceptance_rate > 2 * cold.acceptance_rate


def test_adaptation_reaches_its_target_then_freezes():
    wide = dict(sigma_delta_e=0.5, sigma_delta_v=0.5)
    chain = make(random_graph(2000, 8000), target_acceptance=0.4, burn_in=600, **wide)
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
    plain = make(random_graph(2000, 8000), **wide)
    plain.run(600)
    assert plain.acceptance_rate < 0.2


def test_local_moves_keep_the_sizes():
    data = random_graph()
    chain = make(data, local=1.0, swaps=3)
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
    chain = make(random_graph(), **settings)
    with pytest.warns(UserWarning, match=r"accepted .* % of 1000 .*reference_size"):
        chain.run(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.run(1000)
    chain = make(random_graph(), **settings)
    chain.run(999)
    with pytest.warns(UserWarning, match="accepted"):
        chain.step()


@pytest.mark.parametrize("options", [{}, {"target_acceptance": 0.3, "burn_in": 40}], ids=str)
def test_resuming(options):
    data = random_graph()
    chain = make(data, **options)
    chain.update_entropy(torch.randn(60, 4))
    chain.run(25)
    state = {key: value.clone() for key, value in chain.state_dict().items()}
    masks = follow(chain)
    other = make(data, generator=seeded(9), **options)
    other.run(3)
    other.load_state_dict(state)
    assert torch.equal(other.previous_edge_mask, make(data).edge_mask)
    assert same(masks, follow(other))
    assert chain.statistics() == other.statistics()
    last, resumed = chain.state_dict(), other.state_dict()
    assert all(torch.equal(last[key], resumed[key]) for key in last)
    for key, value in chain.state_dict().items():  # Loading copies.
        assert value.data_ptr() != state[key].data_ptr()


def test_a_state_of_another_graph_or_class():
    chain = make(random_graph())
    state = chain.state_dict()
    before = follow(copy.deepcopy(chain), 5)
    small = make(random_graph(50, 100)).state_dict()
    with pytest.raises(ValueError, match="'state' has 'edges' of .*saved for another graph"):
        chain.load_state_dict(small)
    with pytest.raises(ValueError, match="'state' has 'eps' of torch.float64 and shape"):
        chain.load_state_dict({**state, "eps": state["eps"][:9]})
    with pytest.raises(ValueError, match=r"'state' has the entries .*saved from another class"):
        chain.load_state_dict(gas.augment.DropEdge(random_graph()).state_dict())
    assert same(before, follow(chain, 5))


def ones(size):
    return torch.ones(size, dtype=torch.bool)


def test_masks_of_another_graph():
    data = random_graph(directed=False)
    chain = make(data, undirected=True)
    edges = data.num_edges
    for call in (chain.log_prob, chain.delta, chain.reset):
        with pytest.raises(ValueError, match=rf"'edge_mask' is .*\[7\].*expected.*\[{edges}\]"):
            call(ones(7), ones(60))
        with pytest.raises(ValueError, match=r"'node_mask' is .*\[8\].*expected.*\[60\]"):
            call(ones(edges), ones(8))
        with pytest.raises(ValueError, match="'edge_mask' is torch.float32"):
            call(torch.ones(edges), ones(60))
        with pytest.raises(ValueError, match="'node_mask' drops all 60 nodes"):
            call(ones(edges), ~ones(60))
    loop = (data.edge_index[0] == data.edge_index[1]).nonzero()[0]
    other = (data.edge_index[0] != data.edge_index[1]).nonzero()[0]
    for edge in (loop, other):
        mask = ones(edges)
        mask[edge] = False
        with pytest.raises(ValueError, match="'edge_mask' drops a self-loop, or one direction"):
            chain.log_prob(mask, ones(60))


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
        make(**options)


def test_graphs_that_can_not_be_augmented():
    x = torch.ones(3, 2)
    loops = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ValueError, match=r"'data' has 2 edges.*none to drop.*MaskFeatures"):
        make(Data(x=x, edge_index=loops))
    with pytest.raises(ValueError, match=r"'data' has 0 edges"):
        make(Data(x=x, edge_index=loops[:, :0]))
    with pytest.raises(ValueError, match=r"'data' has no 'edge_index'.*delete 'adj_t'"):
        make(Data(x=x, adj_t=torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match=r"'data' has no nodes"):
        make(Data(x=x[:0], edge_index=loops[:, :0]))
    one_way = torch.tensor([[0, 1, 1, 1], [1, 0, 2, 2]])
    with pytest.raises(ValueError, match=r"'undirected' is True, but the edge 1 -> 2 .*ToUnd"):
        make(Data(x=x, edge_index=one_way), undirected=True)
    twice = torch.tensor([[0, 1, 1], [1, 0, 0]])
    with pytest.raises(ValueError, match=r"the edge 1 -> 0 is stored more often"):
        make(Data(x=x, edge_index=twice), undirected=True)


def test_another_graph():
    data = random_graph()
    chain = make(data)
    same_graph = data.clone()
    same_graph.x = torch.zeros(60, 2)
    chain(same_graph)
    with pytest.raises(ValueError, match=r"'data' has 50 nodes and 240 edges, but .* 60 and 240"):
        chain(random_graph(50))
    reordered = data.clone()
    reordered.edge_index = data.edge_index.flip(1)
    with pytest.raises(ValueError, match="'data' has other edges, or in another order"):
        chain(reordered)
    for x in (None, torch.ones(60, 2, dtype=torch.long), torch.ones(7, 2)):
        wrong = Data(x=x, edge_index=data.edge_index, num_nodes=60)
        steps = chain.statistics().steps
        with pytest.raises(ValueError, match="'x' is .*expected floating-point features"):
            chain(wrong)
        assert chain.statistics().steps == steps
    moved = Data(x=torch.empty(60, 2, device="meta"), edge_index=data.edge_index)
    with pytest.raises(ValueError, match="'x' is on meta, but the augmentation was built on cpu"):
        chain(moved)
    data.edge_index[0, 0] = 1
    for call in (chain, chain.apply):
        with pytest.raises(ValueError, match="'edge_index' was changed in place"):
            call(data)


def test_wrong_logits():
    chain = make()
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
