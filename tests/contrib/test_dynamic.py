"""Graphs that grow: what they are, and what histories and outputs are, against graphs made anew."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from conftest import ROOT, random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GATConv, GINEConv, GraphSAGE, SAGEConv
from torch_geometric.utils import coalesce

import gas
from gas.contrib.dynamic import DynamicGraph
from gas.contrib.dynamic.attributes import extend_ids, find_differing_rows
from gas.history import MemoryStore

NUM_NODES = 60


class WithEdges(torch.nn.Module):
    """Takes features of edges."""

    def __init__(self):
        super().__init__()
        self.first = GINEConv(torch.nn.Linear(5, 8), edge_dim=3)
        self.last = GINEConv(torch.nn.Linear(8, 4), edge_dim=3)

    def forward(self, x, edge_index, edge_attr):
        return self.last(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [GATConv(5, 4, heads=2), GATConv(8, 4, heads=2), GATConv(8, 4)]
        )

    def forward(self, x, edge_index):
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


NETS = {
    "sage": lambda: GraphSAGE(5, 8, num_layers=3, out_channels=4),
    "gcn": lambda: GCN(5, 8, num_layers=3, out_channels=4),  # By degrees: weights follow.
    "gat": Attention,  # Self-loops of the whole graph.
    "gine": WithEdges,
}


def whole(kind="sage", num_edges=200):
    data = random_graph(NUM_NODES, num_edges=num_edges) if num_edges else random_graph(NUM_NODES)
    if kind == "gine":
        data.edge_attr = torch.randn(data.num_edges, 3)
    return data


def run(net, data):
    args = (data.x, data.edge_index) + ((data.edge_attr,) if "edge_attr" in data else ())
    with torch.no_grad():
        return net.eval()(*args)


class Replay:
    """A graph that was changed, and one that was made anew with the same edges."""

    def __init__(self, data, live):
        self.data, self.live = copy.copy(data), live

    def add(self, count, num_edges):
        total = self.data.num_nodes + count
        nodes = {
            key: torch.randn(count, 5) if key == "x" else torch.randint(3, (count,))
            for key in ("x", "y")
        }
        edge_index = torch.randint(total, (2, num_edges))
        edges = {}
        if "edge_attr" in self.data:
            edges["edge_attr"] = torch.randn(num_edges, 3)
        new = self.live.update(nodes if count else None, edge_index, edges)
        assert new.tolist() == list(range(total - count, total))
        self.data.edge_index = torch.cat([self.data.edge_index, edge_index], 1)
        for key, rows in {**(nodes if count else {}), **edges}.items():
            self.data[key] = torch.cat([self.data[key], rows])
        masks = {k: v for k, v in self.data if k.endswith("_mask")}
        for key, mask in masks.items():
            self.data[key] = torch.nn.functional.pad(mask, (0, count))
        self.data.num_nodes = total

    def remove(self, number):
        which = torch.randperm(self.data.num_edges)[:number]
        pairs = self.data.edge_index[:, which]
        self.live.update(remove=pairs)
        taken = {tuple(pair) for pair in pairs.t().tolist()}
        kept = [k for k, e in enumerate(self.data.edge_index.t().tolist()) if tuple(e) not in taken]
        self.data.edge_index = self.data.edge_index[:, kept]
        if "edge_attr" in self.data:
            self.data.edge_attr = self.data.edge_attr[kept]


def made(kind="sage", **options):
    data = whole(kind)
    net = NETS[kind]().eval()
    model = gas.to_scalable(net, data, **options).eval()
    live = DynamicGraph(data, 5, model=model, log=False)
    model.predict(live.graph)
    return net, model, Replay(data, live)


def hidden_states(model, data):
    """Return the histories after inference on a graph that was cut anew, by the ids of its data."""
    other = model.for_graph(data.num_nodes)
    graph = gas.cluster(data, 4, model=model, log=False)
    other.predict(graph)
    return [history.emb[graph.perm.argsort()] for history in other.histories]


@pytest.mark.parametrize("kind", NETS)
def test_it_is_the_graph_that_is_made_anew(kind):
    """Every node, edge and attribute, after additions and removals in turn."""
    torch.manual_seed(1)
    net, model, replay = made(kind)
    for change in ((0, 7), (6, 20), None, (1, 0), (14, 40), None):
        replay.remove(9) if change is None else replay.add(*change)
        live, data = replay.live, replay.data
        graph = live.graph
        assert live.num_nodes == data.num_nodes
        assert torch.equal(graph.x[graph.perm.argsort()], data.x)
        assert torch.equal(graph.train_mask[graph.perm.argsort()], data.train_mask)
        assert int(graph.parts[-1]) == data.num_nodes
        assert (graph.parts.diff() > 0).all()
        assert (graph.parts.diff() <= 2 * (-(-NUM_NODES // 5))).all()
        out = model.predict(graph)
        torch.testing.assert_close(out, run(net, data), rtol=1e-5, atol=1e-5)
        seen = torch.cat([batch.n_id[: batch.batch_size] for batch in live.loader(log=False)])
        assert torch.equal(seen.sort().values, torch.arange(data.num_nodes))


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("kind", NETS)
def test_a_refresh_makes_histories_exact(kind, store):
    torch.manual_seed(2)
    net, model, replay = made(kind, store=store)
    for change in ((1, 2), None, (0, 1)):
        out = run(net, replay.data)
        replay.remove(1) if change is None else replay.add(*change)
        assert replay.live.stale.numel()
        ids, graph = replay.live.update_histories(), replay.live.graph
        assert not replay.live.stale.numel()
        mine = [history.emb[graph.perm.argsort()] for history in model.histories]
        for one, other in zip(mine, hidden_states(model, replay.data), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for history in model.histories:
            assert history.num_embeddings == replay.data.num_nodes
        now = run(net, replay.data)
        size = out.size(0)
        differs = (now[:size] - out).abs().amax(1) > 1e-6
        others = set(differs.nonzero().view(-1).tolist()) | set(range(size, now.size(0)))
        assert others <= set(ids.tolist())
        few = torch.arange(0, replay.data.num_nodes, 7)
        torch.testing.assert_close(  # No warning: they are exact.
            model.predict(graph, nodes=few), now[few], rtol=1e-5, atol=1e-5
        )


def test_a_refresh_in_several_batches_warns_of_nothing():
    """Also if new nodes are each other's halo."""
    _, model, replay = made()
    replay.live._part_size = 2
    replay.add(9, 3)
    new = torch.arange(60, 69)
    edges = torch.stack([new, new.roll(1)])
    replay.live.update(edge_index=edges)
    replay.data.edge_index = torch.cat([replay.data.edge_index, edges], 1)
    replay.live.update_histories()
    graph = replay.live.graph
    mine = [history.emb[graph.perm.argsort()] for history in model.histories]
    for one, other in zip(mine, hidden_states(model, replay.data), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def ring_of(num_nodes):
    node = torch.arange(num_nodes)
    data = Data(x=torch.randn(num_nodes, 5), edge_index=torch.stack([node, (node + 1) % num_nodes]))
    data.train_mask = torch.ones(num_nodes, dtype=torch.bool)
    data.y = torch.zeros(num_nodes, dtype=torch.long)
    return data


def test_only_rows_within_reach_are_written():
    """In a ring of one direction, an edge into node 50 changes one row of the first history more
    than of the second, and so on."""
    data = ring_of(200)
    model = gas.to_scalable(GraphSAGE(5, 8, num_layers=3, out_channels=4), data)
    live = DynamicGraph(data, 4, model=model, log=False)
    model.predict(live.graph)
    pushes = [history.num_pushes for history in model.histories]
    live.update(edge_index=torch.tensor([[7], [50]]))
    assert live.stale.tolist() == [50]
    row_of = live.graph.perm.argsort()
    marked = [(history.written_at == 1).nonzero().view(-1) for history in model.histories]
    assert set(row_of[50:51].tolist()) <= set(marked[0].tolist())
    assert set(row_of[50:52].tolist()) <= set(marked[1].tolist())
    assert live.update_histories().tolist() == [50, 51, 52]
    for history, many in zip(model.histories, pushes, strict=True):
        written = live.graph.perm[(history.written_at > many).nonzero().view(-1)]
        assert written.sort().values.tolist() == [50, 51]


def outs(model, loader):
    return [(model(batch), batch.own.y) for batch in loader]


def test_new_rows_are_warned_about_once():
    _, model, replay = made()
    data, live = replay.data, replay.live
    new = live.update(
        {"x": torch.randn(2, 5), "y": torch.zeros(2, dtype=torch.long)},
        torch.tensor([[60, 61, 0], [0, 1, 60]]),
    )
    assert [int((history.age == -1).sum()) for history in model.histories] == [2, 2]
    loader = live.loader(log=False, batch_size=2)
    with pytest.warns(UserWarning, match="read before it was filled"):
        outs(model, loader)
    outs(model, loader)
    live.update({"x": torch.randn(1, 5), "y": torch.zeros(1, dtype=torch.long)})
    assert new.tolist() == [60, 61]
    assert data.num_nodes == 60


def test_training_writes_what_is_stale():
    """Batches of the new graph are those of a graph that was made so: equal losses."""
    _, model, replay = made()
    replay.add(10, 60)
    live, data = replay.live, replay.data
    twin = copy.deepcopy(model)
    graph = live.graph
    anew = gas.permute(data, graph.perm, log=False)
    loaders = [
        live.loader(batch_size=2, log=False),
        gas.SubgraphLoader(anew, graph.parts, batch_size=2, log=False, layout="fused"),
    ]
    losses = []
    for net, loader in zip((model, twin), loaders, strict=True):
        for history in net.histories:
            history.reset_parameters()
        with pytest.warns(UserWarning, match="read before"):
            found = outs(net, loader)
        losses.append(torch.stack([F.cross_entropy(out, y) for out, y in found]))
    assert torch.equal(*losses)


def test_an_old_loader_is_refused_and_a_new_one_follows():
    _, model, replay = made()
    loader = replay.live.loader(log=False)
    batch = next(iter(loader))
    replay.add(0, 3)
    with pytest.raises(ValueError, match="make a new loader"):
        next(iter(loader))
    replay.add(2, 3)
    with pytest.raises(ValueError, match="60 nodes"):
        model(batch)
    assert sum(b.batch_size for b in replay.live.loader(log=False)) == 62


def test_nothing_changes_where_something_is_wrong():
    _, model, replay = made("gine")
    live = replay.live
    before = copy.copy(live.graph)
    edge = torch.tensor([[0], [1]])
    attr = {"edge_attr": torch.zeros(1, 3)}
    for options in (
        {"edge_index": edge},
        {"edge_index": edge + 60, "edges": attr},
        {"nodes": {"y": torch.zeros(2).long()}},
        {"nodes": {"x": torch.zeros(2, 4), "y": torch.zeros(2)}},
        {"nodes": {"x": [[0.0] * 5], "y": torch.tensor([1])}},
        {"remove": torch.tensor([[0], [0]])},
        {"edges": [1]},
        {"nodes": {"x": torch.zeros(1, 5), "y": torch.tensor([77])}},
    ):
        with pytest.raises(ValueError, match=r"edge|nodes|remove"):
            live.update(**options)
    assert live.num_nodes == model.num_nodes == 60
    assert all(before[key] is live.graph[key] for key in ("x", "adj_t", "parts", "perm"))


def test_new_classes_that_the_graph_names_are_known():
    data = whole()
    data.classes = list(range(78))
    row = {"x": torch.zeros(1, 5), "y": torch.tensor([77])}
    live = DynamicGraph(data, 4, log=False)
    live.update(row)
    assert int(live.graph.y[-1]) == 77


def test_a_graph_without_a_model():
    data = whole()
    live = DynamicGraph(data, 3, log=False)
    live.update(edge_index=torch.tensor([[0], [59]]))
    assert live.graph.num_edges == data.num_edges + 1


def test_files_of_histories_grow_and_are_opened_again(tmp_path):
    data = whole()
    net = GraphSAGE(5, 8, num_layers=2, out_channels=4)
    model = gas.to_scalable(net, data, store="disk", path=tmp_path)
    live = DynamicGraph(data, 3, model=model, log=False)
    model.predict(live.graph)
    replay = Replay(data, live)
    replay.add(5, 10)
    live.update_histories()
    rows, ages = model.histories[0].emb.clone(), model.histories[0].written_at.clone()
    model.close()
    again = gas.History(65, 8, store="disk", path=tmp_path / "history_0")
    assert torch.equal(again.emb, rows)
    assert torch.equal(again.written_at, ages)
    again.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rounded_rows_stay_as_they_are(dtype):
    history = gas.History(10, 6, dtype=dtype)
    x = torch.randn(10, 6)
    history.push(x)
    before = history.pull()
    history.resize(13)
    assert torch.equal(history.pull(torch.arange(10)), before)
    assert history.age.tolist() == [0] * 10 + [-1] * 3
    history.push(torch.ones(3, 6), torch.arange(10, 13))
    assert history.pull(torch.arange(10, 13)).float().allclose(torch.ones(3, 6), atol=0.02)


def test_checkpoints_have_rows_that_were_marked(tmp_path):
    """A row that changed since the last checkpoint is written, however old it counts."""
    _, model, replay = made()
    for number in range(3):
        gas.save(tmp_path, model)
        for history in model.histories:
            history.push(torch.full((1, 8), float(number)), torch.tensor([5]))
            history.mark_stale(torch.tensor([5]))
    gas.save(tmp_path, model)
    other = gas.to_scalable(NETS["sage"](), replay.data)
    gas.load(tmp_path, other)
    assert torch.equal(other.histories[0].pull(torch.tensor([5])), torch.full((1, 8), 2.0))


def test_the_example(run_script):
    options = ["--dataset", "planted:600", "--arrivals", "2", "--epochs", "10", "--num-parts", "6"]
    done = run_script(ROOT / "examples" / "grow_graph.py", *options)
    assert done.code == 0, done.err
    rows = [line.split("|") for line in done.out.splitlines() if "%" in line]
    scores = [[float(cell.split("%")[0]) for cell in row[1:]] for row in rows]
    assert len(scores) == 2
    assert all(score > 40 for row in scores for score in row)  # Of 16 classes.


def all_exact(replay, net, model):
    """Return whether outputs, of chosen nodes and of all, equal those of a new graph."""
    expected = run(net, replay.data)
    for out in (
        torch.cat([model.predict(replay.live.graph, nodes=torch.tensor([n])) for n in range(60)]),
        model.predict(replay.live.graph)[:60],
    ):
        torch.testing.assert_close(out, expected[:60], rtol=1e-5, atol=1e-5)


class WithLoops(gas.ScalableGNN):
    """By hand; a transform gives edges, and what these have."""

    transform = T.AddRemainingSelfLoops(attr="edge_attr", fill_value=1.0)

    def __init__(self):
        super().__init__(60, 8, 2)
        self.first = GATConv(5, 8, edge_dim=3, add_self_loops=False)
        self.last = GATConv(8, 4, edge_dim=3, add_self_loops=False)

    def forward(self, x, edge_index, *args, edge_attr=None):
        x = self.first(x, edge_index, edge_attr).relu()
        x = self.push_and_pull(self.histories[0], x, *args)
        return self.last(x, edge_index, edge_attr)


class WithDegrees(gas.ScalableGNN):
    """By hand; a transform gives features that neighbours' edges change."""

    transform = T.LocalDegreeProfile()

    def __init__(self):
        super().__init__(60, 8, 2)
        self.first, self.last = SAGEConv(10, 8), SAGEConv(8, 4)

    def forward(self, x, edge_index, *args):
        x = self.push_and_pull(self.histories[0], self.first(x, edge_index).relu(), *args)
        return self.last(x, edge_index)


@pytest.mark.parametrize("cls", [WithLoops, WithDegrees])
def test_whatever_a_transform_makes_counts_as_changed(cls):
    data = whole("gine" if cls is WithLoops else "sage")
    data.edge_index, attr = coalesce(data.edge_index, data.get("edge_attr"), reduce="max")
    if attr is not None:
        data.edge_attr = attr
    model = cls().eval()
    live = DynamicGraph(data, 5, model=model, log=False)
    model.predict(live.graph, layout="edge_index")
    edge = data.edge_index[:, :1] if cls is WithLoops else torch.tensor([[7], [50]])
    if cls is WithLoops:  # The same edge, with another attribute.
        live.update(edge_index=edge, edges={"edge_attr": torch.full((1, 3), 5.0)}, remove=edge)
        data.edge_attr[0] = 5.0
    else:
        live.update(edge_index=edge)
        data.edge_index = torch.cat([data.edge_index, edge], 1)
    live.update_histories(layout="edge_index")
    after = cls.transform(copy.copy(data))
    args = (after.x, after.edge_index)
    with torch.no_grad():
        kwargs = {"edge_attr": after.edge_attr} if cls is WithLoops else {}
        expected = model(*args, **kwargs)
    out = [model(b, push=False) for b in live.loader(layout="edge_index", log=False)]
    torch.testing.assert_close(
        torch.cat(out)[live.graph.perm.argsort()], expected, rtol=1e-5, atol=1e-5
    )


def test_an_epoch_that_is_under_way_ends_or_keeps_its_graph():
    """No batch has edges of before the update, and attributes of after it."""
    _, _, replay = made("gine")
    live, data = replay.live, copy.copy(replay.data)
    loader = gas.SubgraphLoader(live.graph, log=False)
    perm, epochs = live.graph.perm, [iter(live.loader(log=False)), iter(loader)]
    assert all(next(epoch) for epoch in epochs)
    replay.add(0, 4)
    with pytest.raises(ValueError, match="make a new loader"):
        next(epochs[0])
    for batch in epochs[1]:
        where = torch.isin(data.edge_index[1], perm[batch.n_id[: batch.batch_size]])
        mine, theirs = batch.edge_attr.sum(1), data.edge_attr.sum(1)[where]
        assert torch.equal(mine.sort().values, theirs.sort().values)
    with pytest.raises(ValueError, match="make a new loader"):
        next(iter(loader))


@pytest.mark.parametrize("stage", ["cluster", "loader", "histories"])
def test_an_update_that_fails_has_changed_nothing(stage, monkeypatch):
    net, model, replay = made()
    live, calls = replay.live, []

    def fail(*args, **kwargs):
        calls.append(args)
        if stage != "histories" or len(calls) == 2:
            raise KeyboardInterrupt
        return resize(*args, **kwargs)

    resize = MemoryStore.resize
    nodes = {"x": torch.zeros(2, 5), "y": torch.zeros(2, dtype=torch.long)}
    edges = torch.tensor([[60, 7, 3], [7, 8, 9]])
    with monkeypatch.context() as patch:
        if stage == "histories":
            patch.setattr(MemoryStore, "resize", fail)
        elif stage == "loader":
            patch.setattr("gas.contrib.dynamic.graph.SubgraphLoader", fail)
        else:
            patch.setattr(live, "_prepare", fail)
        with pytest.raises(KeyboardInterrupt):
            live.update(nodes, edges)
    assert live.num_nodes == live.graph.num_nodes == 60
    assert [history.num_embeddings for history in model.histories] == [60, 60]
    model.predict(live.graph)
    all_exact(replay, net, model)
    live.update(nodes, edges)
    replay.data.edge_index = torch.cat([replay.data.edge_index, edges], 1)
    replay.data.x = torch.cat([replay.data.x, nodes["x"]])
    replay.data.num_nodes = 62
    live.update_histories()
    all_exact(replay, net, model)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_updates_in_inference_mode_are_of_use_to_training(store):
    net, model, replay = made("gcn", store=store)
    with torch.inference_mode():
        replay.add(1, 3)
        replay.live.update_histories()
    all_exact(replay, net, model)
    model.train()
    for batch in replay.live.loader(log=False):
        model(batch).sum().backward()
    replay.add(0, 2)


def test_inference_for_all_is_a_refresh():
    net, model, replay = made()
    replay.add(0, 2)
    model.predict(replay.live.graph)
    assert replay.live.stale.numel() == 0
    assert replay.live.update_histories().numel() == 0
    all_exact(replay, net, model)


def test_what_is_assigned_to_the_graph_stays():
    _, _, replay = made("gcn")
    live = replay.live
    live.graph.train_mask = torch.ones(60, dtype=torch.bool)
    live.graph.weight = torch.arange(60)
    live.graph.y[3] = 77
    replay.live.update(
        {"x": torch.zeros(1, 5), "y": torch.tensor([1]), "weight": torch.tensor([60])}
    )
    assert live.graph.train_mask.tolist() == [True] * 60 + [False]
    assert live.graph.weight.tolist() == list(range(61))
    assert live.graph.y[3] == 77
    live.graph.val_mask = torch.ones(61, dtype=torch.bool)
    assert all(bool(batch.own.val_mask.all()) for batch in live.loader(log=False))


def test_outputs_of_chosen_nodes_are_of_this_graph_or_a_warning_tells():
    """Also for a model that doesn't follow, and for features that were changed in place."""
    data = whole()
    model = gas.to_scalable(NETS["sage"](), data).eval()
    live = DynamicGraph(data, 5, log=False)
    few = torch.arange(5)
    model.predict(live.graph)
    model.predict(live.graph, nodes=few)
    live.update(edge_index=torch.tensor([[7], [3]]))
    with pytest.warns(UserWarning, match="something has changed"):
        model.predict(live.graph, nodes=few)
    model.predict(live.graph)
    model.predict(live.graph, nodes=few)
    live.graph.x += 1
    with pytest.warns(UserWarning, match="something has changed"):
        model.predict(live.graph, nodes=few)


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_features_that_change_between_an_update_and_that_of_the_histories(how):
    """The rows of other nodes stay those of the features before."""
    data = whole()
    model = gas.to_scalable(NETS["sage"](), data).eval()
    live = DynamicGraph(data, 5, model=model, log=False)
    model.refresh(live.graph, log=False)
    live.update(edge_index=torch.tensor([[7], [3]]))
    if how == "in place":
        live.graph.x += 1
    else:
        live.graph.x = live.graph.x + 1
    live.update_histories()
    with pytest.warns(UserWarning, match="something has changed"):
        model.predict(live.graph, nodes=torch.arange(5))
    model.predict(live.graph)
    live.update(edge_index=torch.tensor([[9], [4]]))
    live.update_histories()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(live.graph, nodes=torch.arange(5))


def test_rows_that_are_stale_are_older_than_others():
    """Also where all were written at once."""
    history = gas.History(4, 2)
    history.push(torch.ones(4, 2))
    history.mark_stale(torch.tensor([2]))
    assert history.age.tolist()[2] > max(history.age[[0, 1, 3]].tolist())


# Sparse features, labels and ids ------------------------------------------------------------------


def with_sparse_features(make):
    data = whole()
    data.x = torch.where(data.x > 0.5, data.x, 0).double()
    dense = copy.copy(data)
    data.x = make(data.x)
    return data, dense


@pytest.mark.parametrize("layout", ["csr", "coo", "dense"])
def test_sparse_features_grow_as_dense_ones_do(layout):
    sparse, dense = with_sparse_features(torch.Tensor.to_sparse_csr)
    torch.manual_seed(0)
    net = GraphSAGE(5, 8, num_layers=3, out_channels=4).double().eval()
    x = torch.where(torch.randn(3, 5) > 0.5, 1.0, 0.0).double()
    rows = {"csr": x.to_sparse_csr(), "coo": x.to_sparse(), "dense": x}[layout]
    edges = torch.tensor([[60, 5, 61, 62], [5, 60, 60, 1]])
    outs = []
    for data, new in ((sparse, rows), (dense, x)):
        model = gas.to_scalable(net, data, dtype=torch.double).eval()
        live = DynamicGraph(data, 5, model=model, log=False)
        model.predict(live.graph)
        live.update({"x": new, "y": torch.tensor([0, 1, 2])}, edges)
        live.update({"x": rows_of(new) if data is sparse else x[:1]}, None)
        changed = live.update_histories()
        outs.append((changed, model.predict(live.graph), live.graph))
    (changed, out, graph), (others, expected, other) = outs
    assert graph.x.layout == torch.sparse_csr
    assert torch.equal(graph.x.to_dense(), other.x)
    assert torch.equal(changed, others)
    torch.testing.assert_close(out, expected)


def rows_of(x):
    """Return the first row."""
    return x.to_dense()[:1].to_sparse_csr()


def test_sparse_features_under_a_transform_of_all():
    sparse, _ = with_sparse_features(torch.Tensor.to_sparse_csr)
    sparse.x = sparse.x.float()
    model = gas.models.GCN(60, 5, 8, 4, num_layers=2).eval()
    live = DynamicGraph(sparse, 5, model=model, log=False)
    model.predict(live.graph)
    live.update({"x": torch.eye(5)[:1]}, torch.tensor([[60, 3], [3, 60]]))
    live.update_histories()
    out = model.predict(live.graph, nodes=torch.arange(61))
    torch.testing.assert_close(out, model.predict(live.graph))


@pytest.mark.parametrize("make", [torch.Tensor.long, torch.Tensor.float])
def test_new_nodes_without_labels_are_unlabelled(make):
    data = whole()
    data.y = make(data.y)
    live = DynamicGraph(data, 5, log=False)
    live.update({"x": torch.ones(2, 5)})
    y = live.graph.y[-2:]
    assert bool((y.isnan() if y.is_floating_point() else y == -1).all())
    assert y.dtype == data.y.dtype
    assert not live.graph.train_mask[-2:].any()


@pytest.mark.parametrize("kind", ["text", "integers", "list"])
def test_ids_of_new_nodes(kind):
    data = whole()
    ids = [f"n{i}" for i in range(62)] if kind == "text" else [7 * i for i in range(62)]
    wrap = list if kind == "list" else np.array
    data.node_id = wrap(ids[:60])
    live = DynamicGraph(data, 5, log=False)
    live.update({"x": torch.ones(2, 5), "node_id": ids[60:]})
    assert type(live.graph.node_id) is type(data.node_id)
    assert list(live.graph.node_id) == ids
    assert len(data.node_id) == 60  # The graph of the user stays.
    live.update(edge_index=torch.tensor([[0], [61]]))
    assert list(live.graph.node_id) == ids


def test_an_update_that_is_refused_keeps_the_ids():
    data = whole()
    data.node_id = np.arange(60)
    live = DynamicGraph(data, 5, log=False)
    for wrong in ([59], ["a"], [60, 61], None):
        nodes = {"x": torch.ones(1, 5)} | ({} if wrong is None else {"node_id": wrong})
        with pytest.raises(ValueError, match="node_id"):
            live.update(nodes)
    assert len(live.graph.node_id) == live.num_nodes == 60


def test_ids_of_new_nodes_are_of_the_same_kind():
    for ids, wrong in ((["a", "b"], [1.5]), (["a", "b"], [None]), ([1, 2], [1.5])):
        with pytest.raises(ValueError, match="node_id"):
            extend_ids(np.array(ids), wrong, 1)
    longer = extend_ids(np.array([1, 2**64 - 1], np.uint64), [7], 1)
    assert longer.dtype == np.uint64
    assert longer.tolist() == [1, 2**64 - 1, 7]
    with pytest.raises(ValueError, match="node_id"):
        extend_ids(np.array([1, 2**64 - 1], np.uint64), [-7], 1)


def test_targets_that_stay_unknown_are_no_change():
    old = torch.tensor([0.5, float("nan"), 1, float("nan")])
    new = torch.tensor([0.5, float("nan"), 2, 0, 1])
    assert find_differing_rows(old, new).tolist() == [2, 3]


@pytest.mark.parametrize("sparse", [False, True])
def test_new_features_are_checked_like_those_of_a_graph_that_enters(sparse):
    data = whole("gine")
    if sparse:
        data.x = data.x.to_sparse_csr()
    live = DynamicGraph(data, 4, log=False)
    x = torch.zeros(2, 5)
    x[1, 3] = float("nan")
    before = live.graph
    new = {"x": x, "y": torch.zeros(2, dtype=data.y.dtype)}
    with pytest.raises(ValueError, match=r"'nodes\.x' holds a NaN.*row 1, column 3.*check=False"):
        live.update(nodes=new)
    pair, attr = torch.tensor([[0], [1]]), torch.full((1, 3), float("inf"))
    with pytest.raises(ValueError, match=r"'edges\.edge_attr' holds a NaN or infinite value"):
        live.update(edge_index=pair, edges={"edge_attr": attr})
    assert live.graph is before
    live = DynamicGraph(data, 4, log=False, check=False)
    live.update(nodes=new, edge_index=pair, edges={"edge_attr": attr})
    assert live.num_nodes == data.num_nodes + 2


def plain(num_nodes):
    data = random_graph(num_nodes)
    return Data(x=data.x, edge_index=data.edge_index)


def test_parts_of_new_nodes_have_the_mean_size_rounded_up():
    live = DynamicGraph(plain(61), 6, method="random", log=False)
    live.update(nodes={"x": torch.randn(12, 5)})
    assert live.graph.parts[-3:].tolist() == [61, 72, 73]
    live.update(nodes={"x": torch.randn(10, 5)})
    assert live.graph.parts[-3:].tolist() == [61, 72, 83]


def test_loaders_share_the_edges_unless_they_change_them():
    live = DynamicGraph(plain(60), 6, method="random", log=False)
    assert live.loader(log=False)._relabel is live.loader(log=False)._relabel
    for options in ({"edge_weight": False}, {"graph_transform": copy.copy}):
        first, second = (live.loader(log=False, **options) for _ in range(2))
        assert first._relabel is not second._relabel
        assert len(first) == 6


def test_an_update_prints_nothing_and_keeps_no_batches(capsys):
    live = DynamicGraph(plain(60), 6, method="random", log=False)
    live.update(nodes={"x": torch.randn(2, 5)})
    assert capsys.readouterr() == ("", "")
    assert not live._base.cache
