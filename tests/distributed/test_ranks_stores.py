"""Replicated rows of other ranks, in every store, codec and layout; ranks without labels."""

import pytest
import torch
import torch.nn.functional as F
from processes import run_on
from test_ranks import CLASSES, NODES, graph_data
from torch_geometric.nn import GCN

import gas
from gas.augment import PUBLISHED, MHAug
from gas.history import Store
from gas.scalable.distributed import RankError
from gas.training import train_epoch

pytestmark = pytest.mark.slow  # Processes for every rank.

RANKS = 3
PARTS = 9
OPTIONS = {"method": "random", "log": False, "cache": False}


class Dictionary(Store):
    """Rows in a dictionary."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = {}

    def read(self, index, out):
        for place, row in enumerate(index.tolist()):
            out[place] = self.rows.get(row, torch.zeros(self.columns, dtype=self.dtype))

    def write(self, index, rows):
        self.rows.update(zip(index.tolist(), rows.clone(), strict=True))


HISTORIES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "disk": {"store": "disk"},
    "packed": {"store": "disk", "dtype": "int8"},
    "a store of one's own": {"store": Dictionary},
    "serial": {"io": "serial"},
}
ON_THE_WAY = {"bfloat16 on the way": "bfloat16", "int8 on the way": "int8"}


def float_data(**changes):
    data = graph_data()
    data.x = data.x.float()
    for name, value in changes.items():
        data[name] = value
    return data


def float_net(data, dropout=0.0):
    torch.manual_seed(1)
    return GCN(data.num_features, 4, 3, CLASSES, dropout)


def held(model, shard):
    """Return the stored row of every node on a rank."""
    model.ranks.exchange.receive_messages()
    rows = torch.arange(shard.nodes.numel())
    return {
        "nodes": shard.nodes,
        "num_own": shard.num_own,
        "rows": [history.read_stored(rows).clone() for history in model.histories],
        "values": [history.pull() for history in model.histories],
        "age": [history.age for history in model.histories],
    }


def trained(rank, options, dtype=None, layout=None, pack=False):
    data = float_data()
    model = gas.to_scalable(float_net(data), data, **options)
    graph = gas.cluster(data, PARTS, RANKS, model=model, **OPTIONS)
    wrapped = gas.distribute(model, graph, dtype=dtype)
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, layout=layout, log=False)
    if pack:
        model.pack(loader)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        train_epoch(wrapped, loader, optimizer)
    found = held(model, loader.shard)
    model.eval()
    with torch.no_grad():
        for _ in range(4):  # Weights fixed: as many sweeps as layers, and one.
            outs = [(batch.n_id[: batch.batch_size], wrapped(batch)) for batch in loader]
        out = torch.cat([out for _, out in outs])
        rows = loader.shard.nodes[torch.cat([n_id for n_id, _ in outs])]
        net = float_net(data)
        net.load_state_dict(model._checkpoint_module.state_dict())
        exact = net.eval()(data.x, data.edge_index)[graph.perm[rows]]
    return {**found, "out": out, "exact": exact}


def labelled_on_one_rank(rank, with_loop):
    """Train an epoch in which one rank has no labels, by a loop or by train_epoch."""
    data = float_data()
    model = gas.to_scalable(float_net(data), data)
    graph = gas.cluster(data, PARTS, RANKS, model=model, **OPTIONS)
    graph.train_mask = torch.arange(NODES) < int(graph.shards[1])
    wrapped = gas.distribute(model)
    loader = gas.SubgraphLoader(graph, batch_size=3, log=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    loss = 0.0
    if with_loop:
        for batch in loader:
            own = batch.own
            optimizer.zero_grad()
            F.cross_entropy(wrapped(batch)[own.train_mask], own.y[own.train_mask]).backward()
            optimizer.step()
    else:
        loss = train_epoch(wrapped, loader, optimizer, edge_dropout=0.0)
    return loss, [parameter.detach().clone() for parameter in model.parameters()]


def views_of(loader, shard):
    """Return the edges of both views of every batch of an epoch, in ids of the whole graph."""
    kept = [set(), set()]
    for batch in loader:
        for edges, view in zip(kept, batch.data.views, strict=True):
            n_id = batch.n_id if shard is None else shard.nodes[batch.n_id]
            src, dst = n_id[view.edge_index]
            edges.update(zip(src.tolist(), dst.tolist(), strict=True))
    return kept


def augmented(rank, seed=3):
    """Return the views of two epochs, and weights after training with them."""
    data = float_data()
    edges = data.edge_index
    data.edge_index = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    model = gas.to_scalable(float_net(data), data)
    graph = gas.cluster(data, PARTS, RANKS, **OPTIONS)
    generator = torch.Generator().manual_seed(seed)
    chain = MHAug(graph, **PUBLISHED["cora"].chain, generator=generator)
    views = {"epoch_transform": chain, "graph_transform": model.transform}
    loader = gas.SubgraphLoader(graph, layout="edge_index", log=False, **views)
    if rank is None:
        return [views_of(loader, None) for _ in range(2)]
    found = [views_of(loader, loader.shard) for _ in range(2)]
    wrapped = gas.distribute(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    train_epoch(wrapped, loader, optimizer)
    return found, [parameter.detach().clone() for parameter in model.parameters()]


def everything(rank, folder):
    found = {}
    for name, options in HISTORIES.items():
        path = {"path": f"{folder}/{name}_{rank}"} if options.get("store") == "disk" else {}
        found[name] = trained(rank, {**options, **path}, pack=name == "packed")
    for name, dtype in ON_THE_WAY.items():
        found[name] = trained(rank, {}, dtype=dtype)
    for layout in ("csr", "edge_index", "fused"):
        found[layout] = trained(rank, {}, layout=layout)
    for with_loop in (True, False):
        found["loop" if with_loop else "train_epoch"] = labelled_on_one_rank(rank, with_loop)
    found["augmented"] = augmented(rank)
    try:
        augmented(rank, seed=rank)
    except RankError as error:
        found["other views"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_on(RANKS, everything, folder, str(folder))


CASES = [*HISTORIES, *ON_THE_WAY, "csr", "edge_index", "fused"]


@pytest.mark.parametrize("case", CASES)
def test_replicas_are_what_their_owners_have(case, ranks):
    found = [of_rank[case] for of_rank in ranks]
    codec = gas.history.Codec.of(ON_THE_WAY.get(case, "float32"))
    for layer in range(2):
        owned = torch.cat([each["rows"][layer][: each["num_own"]] for each in found])
        assert float(owned.float().abs().sum()) > 0
        for each in found:
            mine, own = each["rows"][layer], each["num_own"]
            want = owned[each["nodes"]]
            assert torch.equal(mine[:own], want[:own])
            assert own < len(mine)
            if case == "bfloat16 on the way":
                want = want.bfloat16().float()
            if case == "int8 on the way":
                close = want.abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)
                assert bool(((mine - want).abs() <= close)[own:].all())
            else:
                assert torch.equal(mine[own:], want[own:]), codec
            assert int(each["age"][layer].min()) >= 0


@pytest.mark.parametrize("case", CASES)
def test_sweeps_over_ranks_are_the_full_batch(case, ranks):
    coarse = any(name in case for name in ("bfloat16", "int8", "packed"))
    for each in (of_rank[case] for of_rank in ranks):
        error = (each["out"] - each["exact"]).abs().max() / each["exact"].abs().max()
        assert error < (2e-2 if coarse else 1e-5)


@pytest.mark.parametrize("case", ["loop", "train_epoch"])
def test_ranks_without_labels_take_part(case, ranks):
    for loss, weights in (of_rank[case] for of_rank in ranks):
        assert loss == ranks[0][case][0]
        for mine, first in zip(weights, ranks[0][case][1], strict=True):
            assert torch.equal(mine, first)
            assert bool(mine.isfinite().all())
    for one, other in zip(ranks[0]["loop"][1], ranks[0]["train_epoch"][1], strict=True):
        torch.testing.assert_close(one, other)
    before = float_net(float_data()).parameters()
    assert any(not torch.equal(p, q) for p, q in zip(before, ranks[0]["loop"][1], strict=False))


def test_chain_of_mh_aug_is_the_same_on_all_ranks(ranks):
    want = augmented(None)
    for epoch in range(2):
        for view in range(2):
            parts = [of_rank["augmented"][0][epoch][view] for of_rank in ranks]
            assert set().union(*parts) == want[epoch][view]
            assert sum(map(len, parts)) == len(want[epoch][view])
    assert want[0] != want[1]
    for _, weights in (of_rank["augmented"] for of_rank in ranks):
        assert all(map(torch.equal, weights, ranks[0]["augmented"][1]))


def test_other_views_on_a_rank_are_refused(ranks):
    for rank, of_rank in enumerate(ranks):
        assert f"other views of the graph than rank {rank}" in of_rank["other views"]
