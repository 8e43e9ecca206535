import pytest
import torch
import torch_geometric.transforms as T
from adjacencies import HUBS, SHAPES, WITH_HUBS, is_close, make_adjacency
from conftest import clustered_graph
from torch.autograd import gradcheck
from torch_geometric.utils import scatter

import gas
from gas import native
from gas.graph.layout import layout_of
from gas.native import matrix as matrices
from gas.native import sparse as kernels
from gas.nn import Adjacency, spmm

REDUCES = ("sum", "mean", "max", "min")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def expected(adj, x, weight, reduce):
    row, col = adj.coo()
    rows = x[col] if weight is None else x[col] * weight[:, None]
    return scatter(rows, row, 0, adj.size(0), reduce)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_gather_and_scatter(shape, reduce, dtype):
    for width in (1, 3, 8, 20, 33, 64, 100):
        for weighted in (False, True) if reduce in ("sum", "mean") else (False,):
            adj = make_adjacency(*SHAPES[shape], weighted)
            x = torch.randn(adj.size(1), width, dtype=torch.float64).to(dtype)
            weight = None if adj.value is None else adj.value.to(dtype).double()
            out = spmm(adj, x, reduce=reduce)
            assert out.dtype == dtype
            wanted = expected(adj, x.double(), weight, reduce)
            largest = float(wanted.abs().max()) if wanted.numel() else 1.0
            assert torch.allclose(
                out.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * max(largest, 1)
            )


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, reduce):
    adj = make_adjacency(*SHAPES[shape])
    x = torch.randn(adj.size(1), 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: spmm(adj, x, reduce=reduce), (x,))
    if reduce in ("sum", "mean"):
        weight = torch.randn(adj.num_entries, dtype=torch.float64, requires_grad=True)
        assert gradcheck(lambda x, w: spmm(adj, x, w, reduce), (x, weight))


def test_second_derivatives_of_a_sum():
    adj = make_adjacency(*SHAPES["bipartite"])
    x = torch.randn(19, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: spmm(adj, x).pow(2), (x,))


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN"])
def test_second_derivatives_where_the_halo_is_read_in_place(name):
    """Of a mean and of a weighted sum, as of PyG's layers on the same batch."""
    data, ptr = clustered_graph(dtype=torch.float64)
    data = T.GCNNorm()(data)
    data.edge_weight = data.edge_weight.double() if name == "GCN" else None
    options = {"io": "serial", "dtype": torch.float64}
    model = getattr(gas.models, name)(60, 5, 8, 3, 3, **options).double()
    for history in model.histories:
        history.push(torch.randn(60, 8, dtype=torch.float64))
    found = []
    for layout in ("fused", "edge_index"):
        batch, *args = next(iter(gas.SubgraphLoader(data, ptr, 2, layout=layout, log=False)))
        x, adj_t, kwargs = model.inputs_of(batch)
        x = x.clone().requires_grad_()
        loss = model(x, adj_t, *args, **kwargs, push=False).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        weights = [p for p in model.parameters() if p.dim() == 2]
        found.append(torch.autograd.grad(grad.pow(2).sum(), (x, *weights)))
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-9)


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_twins(shape, dtype):
    adj = make_adjacency(*WITH_HUBS[shape])
    m = adj.matrix
    twin = matrices._transpose_torch(adj.rowptr, adj.col, adj.size(1), adj.size(1))
    for mine, other in zip(m.back, twin, strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == torch.int32
    x = torch.randn(adj.size(1), 9).to(dtype)
    y = torch.randn(adj.size(0), 9).to(dtype)
    w = torch.randn(adj.num_entries).to(dtype)
    for weight, precise in ((None, None), (w, w.double())):
        for mean in (False, True):
            exact = kernels._multiply_torch(m, precise, x.double(), mean, False)
            for found in (
                kernels.multiply(m, weight, x, None, None, mean, False, None),
                kernels._multiply_torch(m, weight, x, mean, False),
            ):
                assert found.dtype == dtype
                assert is_close(found, exact, 3 * TOLERANCE[dtype])
        exact = kernels._multiply_torch(m, precise, y.double(), False, True)
        for found in (
            kernels.multiply(m, weight, y, None, None, False, True, None),
            kernels._multiply_torch(m, weight, y, False, True),
        ):
            assert found.dtype == dtype
            assert is_close(found, exact, 3 * TOLERANCE[dtype])
    for largest in (True, False):
        out, entry = kernels.extreme(m, x, None, largest)
        wanted, wanted_entry = kernels._extreme_torch(m, x, largest)
        assert torch.equal(out, wanted)
        assert torch.equal(entry, wanted_entry)


@pytest.mark.requires("native")
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_bfloat16_is_rounded_once(shape):
    """A sum is that of float32 to its last bit, then rounded, pieces of hubs included."""
    adj = make_adjacency(*WITH_HUBS[shape])
    for columns, transposed in ((adj.size(1), False), (adj.size(0), True)):
        x = torch.randn(columns, 9).bfloat16()
        how = None, None, not transposed, transposed, None
        found = kernels.multiply(adj.matrix, None, x, *how)
        wanted = kernels.multiply(adj.matrix, None, x.float(), *how)
        assert torch.equal(found, wanted.bfloat16())


def test_extremes_of_equal_and_of_missing_numbers():
    adj = Adjacency(torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 3, 0]), num_cols=4)
    x = torch.tensor([[1.0], [2.0], [2.0], [float("nan")]], requires_grad=True)
    out = spmm(adj, x, reduce="max")
    assert out[0] == 2
    assert out[1].isnan()
    out[0].sum().backward()
    assert x.grad.view(-1).tolist() == [0, 1, 0, 0]  # The first of equals.


@pytest.mark.parametrize("graph", [(3000, 4000, 60000), *HUBS.values()])
def test_twice_the_same_and_whatever_the_number_of_threads(graph):
    adj = make_adjacency(*graph, weighted=True, dtype=torch.float32)
    x = torch.randn(adj.size(1), 24, requires_grad=True)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2):
        torch.set_num_threads(number)
        out = spmm(adj, x)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x)
        results.append((out.detach(), grad))
    torch.set_num_threads(threads)
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_compiled():
    adj = make_adjacency(*SHAPES["bipartite"], weighted=True, dtype=torch.float32)
    x = torch.randn(19, 8, requires_grad=True)

    def f(x):
        return spmm(adj, x * 2).relu() + spmm(adj, x, reduce="max")

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(out, f(x))
    grads = [torch.autograd.grad(o.pow(2).sum(), x)[0] for o in (out, f(x))]
    assert torch.allclose(*grads)


def testkernels_are_registered_properly():
    adj = make_adjacency(*SHAPES["bipartite"], weighted=True, dtype=torch.float32)
    x = torch.randn(19, 4, requires_grad=True)
    matrix, own = list(adj.matrix), torch.randn(7, 4, requires_grad=True)
    table, place = torch.randn(50, 4), torch.randperm(50)[:12]
    for rows in ((x, None, None), (own, table, place), (own, table[:12], None)):
        rest = (*rows, True, False, None)
        torch.library.opcheck(torch.ops.gas.multiply, (matrix, adj.value, *rest))
    for parts in ((x, None), (x.detach(), own)):
        torch.library.opcheck(torch.ops.gas.extreme, (matrix, *parts, True))
    back = (torch.randn(7, 4, requires_grad=True), None, None, False, True, 5)
    torch.library.opcheck(torch.ops.gas.multiply, (matrix, adj.value, *back))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "median"}, "'reduce' is 'median', expected one of sum, mean, max, min"),
        ({"x": torch.ones(5, 3)}, r"'x' has shape \[5, 3\], expected .* the 19 columns of 'adj'"),
        ({"x": torch.ones(19)}, r"'x' has shape \[19\], expected 2 dimensions"),
        ({"x": torch.ones(19, 2, dtype=torch.int64)}, "'x' has dtype torch.int64, expected one of"),
        ({"weight": torch.ones(3)}, r"'weight' is torch.float32 of shape \[3\], expected"),
        ({"weight": torch.ones(40).double()}, "'weight' is torch.float64 of shape"),
        ({"weight": torch.ones(40), "reduce": "max"}, "'weight' is given, but reduce='max' has no"),
        ({"adj": torch.eye(3)}, "'adj' is a Tensor, expected a gas.nn.Adjacency: use"),
    ],
)
def test_bad_input(change, message):
    given = {"adj": make_adjacency(*SHAPES["bipartite"]), "x": torch.ones(19, 3), **change}
    with pytest.raises(ValueError, match=message):
        spmm(**given)


# The adjacency ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "edge_index",
        "csr",
        "coo",
        pytest.param("sparse_tensor", marks=pytest.mark.requires("torch_sparse")),
    ],
)
def test_any_adjacency(kind):
    edge_index = torch.unique(torch.randint(9, (2, 30)), dim=1)
    weight = torch.rand(edge_index.size(1))
    dense = torch.zeros(9, 9)
    dense[edge_index[1], edge_index[0]] = weight
    given = {"edge_index": (edge_index, 9, weight), "coo": (dense.to_sparse(),)}
    given["csr"] = (dense.to_sparse_csr(),)
    if kind == "sparse_tensor":
        from torch_sparse import SparseTensor

        given[kind] = (SparseTensor.from_dense(dense),)
    adj = Adjacency.of(*given[kind])
    assert Adjacency.of(adj) is adj
    assert torch.equal(spmm(adj, torch.eye(9)), dense)
    assert torch.equal(adj.to_torch_sparse().to_dense(), dense)
    back, values = adj.to_edge_index()
    again = torch.zeros(9, 9)
    again[back[1], back[0]] = values
    assert torch.equal(again, dense)
    assert adj.shape == adj.size() == (9, 9)
    assert adj.degree().tolist() == (dense > 0).sum(dim=1).tolist()


def test_what_is_made_of_an_adjacency():
    adj = make_adjacency(*SHAPES["bipartite"], weighted=True)
    plain = adj.remove_values()
    assert plain.value is None
    assert plain.remove_values() is plain
    assert adj.remove_values().matrix is plain.matrix
    assert plain.matrix is adj.matrix
    loops = adj.with_self_loops()
    row, col = loops.coo()
    assert int((row == col).sum()) == 7
    old_row, old_col = adj.coo()
    assert loops.num_entries == int((old_row != old_col).sum()) + 7
    keep = torch.rand(adj.num_entries) < 0.5
    fewer = layout_of(adj).select_edges(adj, keep.nonzero().view(-1))
    assert torch.equal(fewer.coo()[0], old_row[keep])
    assert torch.equal(fewer.coo()[1], old_col[keep])
    assert torch.equal(fewer.value, adj.value[keep])
    assert fewer.shape == adj.shape
    moved = adj.to("cpu")
    assert torch.equal(moved.matrix.t_entry, adj.matrix.t_entry)
    assert repr(adj) == "Adjacency(7 x 19, 40 entries, weighted)"


@pytest.mark.parametrize("natively", [True, False])
def test_only_columns_with_a_gradient_are_transposed(monkeypatch, natively):
    if not natively:
        monkeypatch.setattr(native.extension, "on_cpu", lambda *_: False)
    adj = make_adjacency(*SHAPES["bipartite"])
    whole = Adjacency(adj.rowptr, adj.col, None, 19).matrix
    x = torch.randn(19, 3, dtype=torch.float64)
    assert not adj.matrix_for(x).t_rowptr.any()
    first = adj.matrix_for(x[:7].requires_grad_())
    entries = int(whole.t_rowptr[7])
    assert torch.equal(first.t_rowptr, whole.t_rowptr.clamp(max=entries))
    assert torch.equal(first.t_col[:entries], whole.t_col[:entries])
    assert torch.equal(first.t_entry[:entries], whole.t_entry[:entries])
    assert first.num_cols == 19
    assert adj.matrix_for(x) is first
    assert adj.remove_values().matrix_for(x) is first
    moved = adj.to("cpu")
    assert torch.equal(moved.matrix_for(x).t_rowptr, first.t_rowptr)
    for mine, other in zip(adj.matrix, whole, strict=True):  # Made anew, whole.
        assert torch.equal(mine, other)
    with torch.no_grad():
        assert adj.matrix_for(x.requires_grad_()) is adj.matrix


def test_wrong_adjacencies():
    with pytest.raises(ValueError, match=r"'value' has shape \[3\], expected \[2\]"):
        Adjacency(torch.tensor([0, 2]), torch.tensor([0, 0]), torch.ones(3))
    with pytest.raises(
        ValueError, match="'adj' is a NoneType, expected an integer tensor of shape"
    ):
        Adjacency.of(None)
    with pytest.raises(IndexError, match="7"):
        Adjacency(torch.tensor([0, 2]), torch.tensor([0, 7]))


def test_batches_of_the_loader_carry_it():
    data = gas.datasets.planted.planted_partition(600)
    loader = gas.SubgraphLoader(data, torch.tensor([0, 300, 600]), layout="fused", log=False)
    first, second = (next(iter(loader)).data for _ in range(2))
    assert first.adj_t.matrix is second.adj_t.matrix  # A fixed batch keeps the transpose.
    assert first.adj_t.shape == (300, first.num_nodes)
    assert gas.loader.batch.num_bytes(next(iter(loader))) > 0
    assert first.to("cpu").adj_t.shape == first.adj_t.shape
