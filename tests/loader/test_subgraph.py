import copy
import multiprocessing
import pickle

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from loaders import LAYOUTS, dense_of, make
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import coalesce

import gas
from gas.native.rows import gather_rows


@pytest.mark.parametrize("bipartite", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 4, 6, 100])
def test_batches_hold_every_edge_once(layout, bipartite, batch_size):
    data, ptr = make()
    full = torch.zeros(60, 60)
    full.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
    loader = gas.SubgraphLoader(
        data, ptr, batch_size, bipartite, log=False, layout=layout, shuffle=True
    )
    assert len(loader) == -(-6 // batch_size)
    seen_nodes, seen_edges = [], []
    for batch, own, n_id, offset, count in loader:
        ranges = [torch.arange(o, o + c) for o, c in zip(offset, count, strict=True)]
        assert torch.equal(torch.cat(ranges), n_id[:own])
        assert len(set(n_id.tolist())) == n_id.numel() == batch.num_nodes
        for key in ("x", "y", "train_mask"):
            assert torch.equal(batch[key], data[key][n_id])
        for key in ("edge_attr", "edge_weight"):
            assert torch.equal(batch[key], data[key][batch.e_id])

        rows = own if bipartite and layout != "edge_index" else n_id.numel()
        dense = dense_of(batch, layout)
        assert dense.shape == (rows, n_id.numel())
        assert torch.allclose(dense[:own], full[n_id[:own]][:, n_id])
        assert (dense[own:] == 0).all()
        if layout == "edge_index":
            assert torch.equal(n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        if layout == "csr":
            for row in batch.adj_t.col_indices().tensor_split(batch.adj_t.crow_indices()[1:-1]):
                assert (row.diff() >= 0).all()
        seen_nodes += n_id[:own].tolist()
        seen_edges += batch.e_id.tolist()
    assert sorted(seen_nodes) == list(range(60))
    assert sorted(seen_edges) == list(range(data.num_edges))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edge_weight_can_be_left_out(layout):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, log=False, layout=layout, edge_weight=False)
    for batch, *_ in loader:
        if layout == "csr":
            assert (batch.adj_t.values() == 1).all()
        elif layout == "sparse_tensor":
            assert not batch.adj_t.has_value()
        else:
            assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])


@pytest.mark.parametrize("columns", [(), (1,)])
def test_edge_weight_and_values_of_the_adjacency_are_one(columns):
    data, ptr = make()
    data.edge_weight = data.edge_weight.view(-1, *columns)
    for layout in ("csr", "fused"):
        for batch, *_ in gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout):
            value = batch.adj_t.value if layout == "fused" else batch.adj_t.values()
            assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
            assert torch.equal(batch.edge_weight.view(-1), value)
            assert batch.edge_weight.data_ptr() == value.data_ptr()
    sevens = torch.full((data.num_edges,), 7.0)  # A matrix with values of its own.
    data.adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), sevens, (60, 60))
    for batch, *_ in gas.SubgraphLoader(data, ptr, 2, log=False, layout="fused"):
        assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
        assert (batch.adj_t.value == 7).all()


def test_ones_have_the_type_of_the_features():
    data, ptr = make()
    data.x = data.x.double()
    ((batch, *_),) = gas.SubgraphLoader(data, ptr, 6, log=False, edge_weight=False)
    assert batch.adj_t.dtype == torch.float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_given_as_adj_t(layout):
    data, ptr = make()
    dense = torch.zeros(60, 60)
    dense.index_put_((data.edge_index[1], data.edge_index[0]), data.edge_weight, accumulate=True)
    given = Data(x=data.x, adj_t=dense.to_sparse_csr())
    for batch, own, n_id, *_ in gas.SubgraphLoader(given, ptr, 2, log=False, layout=layout):
        assert ("adj_t" in batch) == (layout != "edge_index")
        assert torch.equal(dense_of(batch, layout)[:own], dense[n_id[:own]][:, n_id])


@pytest.mark.requires("torch_sparse")
def test_sparse_tensors_stay_sparse_tensors():
    from torch_sparse import SparseTensor

    data, ptr = make()
    given = Data(
        x=data.x, adj_t=SparseTensor.from_edge_index(data.edge_index, sparse_sizes=(60, 60))
    )
    loader = gas.SubgraphLoader(given, ptr, 2, log=False)
    assert loader.layout == "sparse_tensor"
    assert all(isinstance(batch.adj_t, SparseTensor) for batch, *_ in loader)
    loader = gas.SubgraphLoader(given, ptr, 2, log=False, layout="csr")
    assert all(batch.adj_t.layout == torch.sparse_csr for batch, *_ in loader)


def test_the_graph_is_not_modified():
    data, ptr = make()
    before = data.clone()
    for batch, *_ in gas.SubgraphLoader(data, ptr, 2, log=False):
        batch.x = torch.zeros(1)
        batch.y.zero_()
    assert data.keys() == before.keys()
    for key, value in before:
        assert torch.equal(data[key], value)


def test_shuffling_follows_the_seed():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2, log=False, shuffle=True)

    def epoch(seed):
        torch.manual_seed(seed)
        return [tuple(n_id[:own].tolist()) for _, own, n_id, *_ in loader]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_epoch_leaves_the_generator_as_one_that_was_not_stopped(stop):
    def loader_of(seed):
        generator = torch.Generator().manual_seed(seed)
        return gas.SubgraphLoader(data, ptr, shuffle=True, generator=generator, log=False)

    data, ptr = make()
    whole = loader_of(7)
    expected = [[batch.n_id.tolist() for batch in whole] for _ in range(3)]
    first = loader_of(7)
    found = [batch.n_id.tolist() for batch in first]
    assert found == expected[0]
    batches = iter(first)
    before = [next(batches).n_id.tolist() for _ in range(stop)]
    state = first.state_dict()
    other = loader_of(8)
    other.load_state_dict(state)
    assert before + [batch.n_id.tolist() for batch in other] == expected[1]
    assert [batch.n_id.tolist() for batch in other] == expected[2]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "kind", ["csr", pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse"))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_of_adj_t_keep_their_attributes(kind, layout, keep):
    """From PyG's transforms through permute to the batch, also where ``edge_index`` is kept."""
    data = T.GCNNorm()(random_graph())
    data.edge_index, (data.edge_weight, _) = coalesce(
        data.edge_index, [data.edge_weight, data.edge_weight]
    )
    full = torch.zeros(60, 60)
    full[data.edge_index[1], data.edge_index[0]] = data.edge_weight
    data.edge_attr = torch.stack([data.edge_index[0] * 100 + data.edge_index[1]], dim=1)
    data.node = torch.arange(60)
    options = {"layout": torch.sparse_csr} if kind == "csr" else {}
    data = T.ToSparseTensor("edge_weight", remove_edge_index=not keep, **options)(data)
    perm, ptr = gas.metis(data.adj_t, 5, log=False)
    data = gas.permute(data, perm, log=False)
    for batch, own, *_ in gas.SubgraphLoader(data, ptr, 2, log=False, layout=layout):
        node = batch.node
        assert torch.equal(dense_of(batch, layout)[:own], full[node[:own]][:, node])
        src = batch.edge_attr.view(-1) // 100
        dst = batch.edge_attr.view(-1) % 100
        if layout == "edge_index":
            assert torch.equal(node[batch.edge_index], torch.stack([src, dst]))
        elif layout == "csr":
            assert torch.equal(node[batch.adj_t.col_indices()], src)


def test_two_different_graphs_are_refused():
    data, ptr = make()
    data.adj_t = torch.eye(60).to_sparse_csr()
    with pytest.raises(ValueError, match="whose edges differ, or differ in order: delete one"):
        gas.SubgraphLoader(data, ptr, log=False)


def test_tensors_that_are_not_by_row_pass_through():
    data, ptr = make()
    data.pair_index = torch.zeros(2, 60, dtype=torch.long)
    data = gas.permute(data, torch.randperm(60), log=False)
    for batch, *_ in gas.SubgraphLoader(data, ptr, log=False):
        assert batch.pair_index.shape == (2, 60)


def test_only_batches_of_a_link_loader_have_pairs():
    """Pairs of the graph are no rows of a batch's outputs."""
    data, ptr = make()
    data.edge_label_index = torch.tensor([[0, 59], [59, 0]])
    batch = gas.SubgraphLoader(data, ptr, log=False).cut([1])
    assert "edge_label_index" not in batch.data
    with pytest.raises(ValueError, match="'batch' has no pairs of nodes"):
        gas.training.link_loss(torch.randn(batch.batch_size, 3), batch)


def test_rows_under_the_name_of_an_index():
    """PyG's names with "index" go along the last dimension, which is that of the nodes here."""
    data, ptr = make()
    data.old_index, data.edge_color_index = torch.arange(60) * 10, torch.arange(data.num_edges)
    perm = torch.randperm(60)
    permuted = gas.permute(data, perm, log=False)
    assert torch.equal(permuted.old_index, perm * 10)
    assert torch.equal(permuted.edge_color_index, data.edge_color_index)
    for batch, _, n_id, *_ in gas.SubgraphLoader(permuted, ptr, log=False):
        assert torch.equal(batch.old_index, permuted.old_index[n_id])
        assert torch.equal(batch.edge_color_index, batch.e_id)


def test_what_is_not_by_row_is_a_copy():
    data, ptr = make()
    data.scale, data.prompt = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    for cache in (None, True, False):
        for batch, *_ in gas.SubgraphLoader(data, ptr, log=False, cache=cache):
            batch.scale.mul_(2)
            assert batch.prompt is data.prompt  # For its gradient.
    assert torch.equal(data.scale, torch.ones(3))


def test_features_with_gradients_and_strides():
    data, ptr = make()
    wide = torch.randn(60, 10, requires_grad=True)
    data.x = wide[:, ::2]
    with pytest.warns(UserWarning, match="'x' of the graph is computed of a tensor that requires"):
        loader = gas.SubgraphLoader(data, ptr, log=False)
    for batch, _, n_id, *_ in loader:
        assert torch.equal(batch.x, wide.detach()[n_id][:, ::2])


@pytest.mark.parametrize("cache", [None, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, "fused"])
def test_what_is_learnt_of_a_graph_gets_its_gradient(layout, cache):
    """Features, and other attributes by row; each row once for every batch that has it."""
    data, ptr = make()
    names = ("x", "edge_attr", "pos")
    data.pos, data.edge_attr = torch.randn(60, 2), data.edge_attr.float()
    for name in names:
        data[name] = torch.nn.Parameter(data[name])
    loader = gas.SubgraphLoader(data, ptr, 2, layout=layout, cache=cache, log=False)
    optimizer = torch.optim.SGD([data[name] for name in names], lr=0.1)
    for _ in range(2):  # Kept batches, and values that have changed.
        times = {name: torch.zeros(data[name].size(0)) for name in names}
        before = [data[name].detach().clone() for name in names]
        optimizer.zero_grad()
        for batch in loader:
            for name in names:
                index = batch.data.e_id if name == "edge_attr" else batch.n_id
                times[name].index_add_(0, index, torch.ones(index.numel()))
                assert torch.equal(batch.data[name], data[name][index])
                batch.data[name].sum().backward()
        for name, value in zip(names, before, strict=True):
            assert torch.equal(data[name].grad, times[name].view(-1, 1).expand_as(value))
        optimizer.step()
        assert not torch.equal(data.x, before[0])
    with torch.no_grad():
        assert not any(batch.x.requires_grad for batch in loader)


@pytest.mark.parametrize("make_model", [
    lambda data: gas.models.GraphSAGE(60, 5, 8, 3, num_layers=3),
    lambda data: gas.to_scalable(GraphSAGE(5, 8, 3, 3), data),
])  # fmt: skip
def test_features_are_learnt_as_on_the_graph(make_model):
    data = random_graph()
    model = make_model(data).eval()
    graph = gas.cluster(data, 4, model=model, log=False)
    graph.x = torch.nn.Parameter(graph.x)
    (batch,) = gas.SubgraphLoader(graph, batch_size=4, log=False)
    model(batch).square().sum().backward()
    found, graph.x.grad = graph.x.grad, None
    model(graph.x, graph.edge_index).square().sum().backward()
    assert torch.allclose(found, graph.x.grad, atol=1e-5)


def test_graphs_without_features():
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    for x, dtype in ((None, torch.float32), (torch.ones(4, 1, dtype=torch.long), torch.float32)):
        data = Data(x=x, edge_index=edge_index, num_nodes=4)
        for batch in gas.SubgraphLoader(data, torch.tensor([0, 2, 4]), log=False):
            assert batch.data.adj_t.values().tolist() == [1.0, 1.0]
            assert batch.data.adj_t.dtype == dtype


def test_cut():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, batch_size=2, log=False)
    for parts, expected in zip(([1, 0], (2, 3), range(4, 6)), loader, strict=True):
        batch = loader.cut(parts)
        assert torch.equal(batch.n_id, expected.n_id)
        assert torch.equal(batch.data.x, expected.data.x)
        assert torch.equal(dense_of(batch.data, "csr"), dense_of(expected.data, "csr"))
    for wrong in ([], [-1], [6], [1, 1]):
        with pytest.raises(ValueError, match="expected different parts between 0 and 5"):
            loader.cut(wrong)


def test_empty_parts():
    data, ptr = make()
    ptr = torch.cat([ptr[:1], ptr, ptr[-1:]])
    sizes = [own for _, own, *_ in gas.SubgraphLoader(data, ptr, log=False)]
    assert sizes[0] == sizes[-1] == 0
    assert sum(sizes) == 60
    model = gas.models.GCN(60, 5, 8, 3, 2)
    model.histories[0].push(torch.zeros(60, 8))
    for batch, *args in gas.SubgraphLoader(data, ptr, log=False):
        assert model(batch.x, batch.adj_t, *args).shape == (args[0], 3)


@pytest.mark.slow
def test_worker_processes():
    data, ptr = make()
    big = torch.randn(50_000, 64)
    gather_rows(big, torch.arange(50_000))  # Starts the thread pool, which no fork survives.
    expected = {tuple(b.n_id.tolist()) for b in gas.SubgraphLoader(data, ptr, 2, log=False)}
    for context in ("fork", "spawn"):
        loader = gas.SubgraphLoader(
            data, ptr, 2, log=False, num_workers=1,
            multiprocessing_context=multiprocessing.get_context(context),
        )  # fmt: skip
        assert {tuple(batch.n_id.tolist()) for batch in loader} == expected


def test_eval_loader_joins_parts():
    data, ptr = make()
    batches = list(gas.EvalSubgraphLoader(data, ptr, batch_size=4, log=False))
    assert [b.offset.tolist() for b in batches] == [[0], [int(ptr[4])]]
    assert [b.count.tolist() for b in batches] == [[int(ptr[4])], [60 - int(ptr[4])]]
    assert torch.cat([b.n_id[: b.batch_size] for b in batches]).tolist() == list(range(60))
    with pytest.raises(ValueError, match="'shuffle' is True"):
        gas.EvalSubgraphLoader(data, ptr, shuffle=True)


def test_repr_and_log(capsys):
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2)
    assert str(loader) == "SubgraphLoader(num_parts=6, batch_size=2, layout='csr')"
    assert "Loading 6 parts, 2 per batch" in capsys.readouterr().err


def test_loader_can_be_pickled_and_copied():
    data, ptr = make()
    loader = gas.SubgraphLoader(data, ptr, 2, log=False)
    size = len(pickle.dumps(loader))
    for other in (loader, pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert sum(own for _, own, *_ in other) == 60
    assert len(pickle.dumps(loader)) == size  # What is cached stays here.


@pytest.mark.parametrize("cls", [gas.SubgraphLoader, gas.EvalSubgraphLoader])
@pytest.mark.parametrize(
    ("change", "kwargs", "message"),
    [
        ({}, {"batch_size": 0}, "'batch_size' is 0, expected a whole number of parts, at least 1"),
        ({}, {"batch_size": 1.5}, "'batch_size' is 1.5"),
        ({}, {"layout": "coo"}, "'layout' is 'coo', expected one of 'csr', 'edge_index'"),
        ({}, {"ptr": torch.tensor([0, 30])}, "'ptr' runs from 0 to 30.*number of nodes, 60"),
        (
            {},
            {"ptr": torch.tensor([0, 40, 30, 60])},
            "'ptr' runs from 0 to 60, falling in between",
        ),
        ({}, {"ptr": torch.tensor([0.0, 60.0])}, "'ptr' is torch.float32"),
        ({}, {"ptr": [0, 60]}, r"'ptr' is \[0, 60\]"),
        ({"train_mask": torch.ones(59).bool()}, {}, "'train_mask' has 59 rows, but .* 60 nodes"),
        ({"val_mask": torch.ones(61, 2).bool()}, {}, "'val_mask' has 61 rows"),
        ({"y": torch.ones(3)}, {}, "'y' has 3 rows"),
        ({"edge_index": torch.tensor([[0], [60]])}, {}, "node id 60, but 'num_nodes' is 60"),
        ({"edge_index": torch.tensor([[0], [-1]])}, {}, "node id -1"),
        ({"edge_index": torch.rand(2, 4)}, {}, "dtype torch.float32, expected integers"),
        ({"edge_index": None}, {}, "neither 'edge_index' nor 'adj_t'"),
        ({"edge_weight": torch.ones(4)}, {}, r"'edge_weight' has shape \[4\], expected one weight"),
        ({"x": torch.tensor([[1.0]] * 59 + [[float("nan")]])}, {"check": True}, "NaN .* row 59"),
        ({"x": torch.tensor([[float("inf")]] * 60)}, {"check": True}, "infinite value in row 0"),
    ],
)
def test_bad_input(cls, change, kwargs, message):
    data, ptr = make()
    for key, value in change.items():
        data[key] = value
    arguments = {"ptr": ptr, "log": False, **kwargs}
    with pytest.raises(ValueError, match=message):
        cls(data, **arguments)


def test_num_nodes_must_fit():
    data, ptr = make()
    for key in ("x", "y", "train_mask"):
        del data[key]
    data.num_nodes = 12
    with pytest.raises(ValueError, match="but 'num_nodes' is 12"):
        gas.SubgraphLoader(data, ptr, log=False)


def test_nan_is_refused_unless_it_is_accepted():
    data, ptr = make()
    data.x[3, 2] = float("nan")
    gas.SubgraphLoader(data, ptr, log=False, check=False)
    with pytest.raises(ValueError, match="row 3, column 2"):
        gas.SubgraphLoader(data, ptr, log=False)


def test_missing_torch_sparse(monkeypatch):
    data, ptr = make()
    monkeypatch.setattr("gas.graph.layout.WITH_TORCH_SPARSE", False)
    with pytest.raises(ImportError, match="needs torch-sparse: pip install"):
        gas.SubgraphLoader(data, ptr, log=False, layout="sparse_tensor")
