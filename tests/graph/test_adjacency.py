"""An adjacency and what it keeps: nothing of values that have changed, nothing out of bounds."""

import copy
import pickle

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_dense_adj

import gas
from gas.graph import Uses
from gas.nn import Adjacency, spmm
from gas.nn import GCNConv as FusedGCNConv

ROWPTR, COL = torch.tensor([0, 2, 3, 5]), torch.tensor([0, 2, 1, 0, 1])


def make(value=None, dtype=torch.int32):
    return Adjacency(ROWPTR.to(dtype), COL.to(dtype), value)


def weights():
    return torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def layers():
    torch.manual_seed(0)
    theirs, ours = GCNConv(4, 2), FusedGCNConv(4, 2)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def trained(adj, x):
    """Return the gradient of a product towards ``x``."""
    x = x.clone().requires_grad_()
    spmm(adj, x).pow(2).sum().backward()
    return x.grad


# Values that change -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["in place", "another", "none", "by an optimizer"])
def test_a_normalisation_follows_its_values(change):
    theirs, ours = layers()
    adj, x = make(weights()), torch.randn(3, 4)
    if change == "by an optimizer":
        adj.value.requires_grad_()
    before = ours(x, adj)
    assert torch.allclose(before, theirs(x, *adj.to_edge_index()), atol=1e-6)
    if change == "in place":
        adj.value[1] *= 7
    elif change == "another":
        adj.value = torch.ones(5)
    elif change == "none":
        adj.value = None
    else:
        before.sum().backward()
        torch.optim.SGD([adj.value], lr=1.0).step()
    found = ours(x, adj)
    assert torch.allclose(found, theirs(x, *adj.to_edge_index()), atol=1e-6)
    assert not torch.allclose(found, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_normalisation_follows_its_values_through_the_compiler():
    theirs, ours = layers()
    adj, x = make(weights()), torch.randn(3, 4)
    ours(x, adj)  # Kept.
    compiled = torch.compile(lambda x: ours(x, adj), backend="eager")
    for factor in (7, 2):
        adj.value[1] *= factor
        with torch.no_grad():
            found, expected = compiled(x), theirs(x, *adj.to_edge_index())
        assert torch.allclose(found, expected, atol=1e-6)


def test_values_that_learn_through_a_normalisation():
    theirs, ours = layers()
    x, value = torch.randn(3, 4), weights().requires_grad_()
    adj = make(value)
    with torch.no_grad():
        ours(x, adj)  # What is made here has no graph, and is of no use below.
    edge_index, _ = adj.to_edge_index()
    for _ in range(2):  # The first backward pass frees its graph.
        (found,) = torch.autograd.grad(ours(x, adj).pow(2).sum(), value)
        (wanted,) = torch.autograd.grad(theirs(x, edge_index, value).pow(2).sum(), value)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_what_is_made_of_rows_and_columns_stays():
    adj = make(weights())
    loops, plain = adj.with_self_loops(), adj.remove_values()
    adj.value.mul_(2)
    assert adj.with_self_loops() is loops
    assert adj.remove_values().matrix is plain.matrix


def test_a_transpose_of_more_columns_is_kept():
    structure = make()._structure
    few = structure.get(1)
    more = structure.get(3)
    assert more is not few
    assert structure.get(3) is more
    assert structure.get(1) is more


@pytest.mark.parametrize("what", ["rowptr", "col"])
@pytest.mark.parametrize("warm", [False, True])
def test_rows_and_columns_that_change_are_noticed(what, warm):
    rowptr, col = ROWPTR.int(), COL.int()
    adj, x = Adjacency(rowptr, col), torch.randn(3, 4, requires_grad=True)
    if warm:
        spmm(adj, x)
    (rowptr if what == "rowptr" else col)[1] = 1
    for use in (
        lambda: spmm(adj, x),
        lambda: spmm(adj, x.detach()),
        adj.with_self_loops,
        adj.clone,
        lambda: pickle.dumps(adj),
    ):
        with pytest.raises(RuntimeError, match="'rowptr' or 'col' of an Adjacency was changed in"):
            use()
    with pytest.raises(AttributeError, match=what):
        setattr(adj, what, COL)


def test_a_value_that_does_not_fit():
    adj = make()
    for value, message in (
        (torch.ones(4), r"'value' has shape \[4\], expected \[5\]"),
        (torch.ones(5, dtype=torch.complex64), "'value' is torch.complex64, expected real"),
        (torch.ones(5, device="meta"), "'value' is on meta, but 'col' is on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            adj.value = value
        with pytest.raises(ValueError, match=message):
            make(value)
    assert adj.value is None


# Inference mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["made", "used", "moved"])
def test_what_inference_makes_is_of_use_to_training(where):
    x = torch.randn(3, 4)
    wanted = trained(make(weights()), x)
    theirs, ours = layers()
    with torch.inference_mode(where == "made"):
        adj = make(weights().clone())
    with torch.inference_mode():
        ours(x, adj)
        adj.with_self_loops()
        adj.remove_values()
        _ = adj.matrix
        _ = adj.with_self_loops().matrix
        if where == "moved":
            adj = pickle.loads(pickle.dumps(adj.to(torch.float64).to(torch.float32).clone()))
    assert not any(tensor.is_inference() for tensor in adj.tensors())
    assert torch.allclose(trained(adj, x), wanted)
    for each in (adj.with_self_loops(), adj.remove_values()):
        trained(each, x)
    x.requires_grad_()
    ours(x, adj).sum().backward()
    (wanted,) = torch.autograd.grad(theirs(x, *adj.to_edge_index()).sum(), x)
    assert torch.allclose(x.grad, wanted, atol=1e-6)


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rowptr", "col", "num_cols", "error", "message"),
    [
        ([1, 2, 3], [0, 0, 0], None, ValueError, "'rowptr' does not rise from 0 to the 3 entries"),
        ([0, 2, 1, 3], [0, 0, 0], None, ValueError, "'rowptr' does not rise from 0"),
        ([0, 2], [0, 0, 0], None, ValueError, "'rowptr' does not rise from 0"),
        ([0, 4], [0, 0, 0], None, ValueError, "'rowptr' does not rise from 0"),
        ([0, 2**32 + 3], [0, 0, 0], None, ValueError, "'rowptr' does not rise from 0"),
        ([0, 2], [0, 1], None, IndexError, r"'col' holds 1, which is outside \[0, 1\).*'num_cols'"),
        ([0, 2], [-1, 0], None, IndexError, r"'col' holds -1, which is outside \[0, 1\)"),
        ([0, 2], [0, 2**32], 4, IndexError, r"'col' holds 4294967296, which is outside \[0, 4\)"),
        ([0, 2], [0, 4], 4, IndexError, r"'col' holds 4, which is outside \[0, 4\)"),
        ([0.0, 2.0], [0, 4], 5, ValueError, r"'rowptr' is torch.float32 of shape \[2\], expected"),
        ([0, 2], [0.0, 0.5], 5, ValueError, r"'col' is torch.float32 of shape \[2\], expected"),
        ([[0, 2]], [0, 4], 5, ValueError, r"'rowptr' is torch.int64 of shape \[1, 2\], expected"),
        ([], [], None, ValueError, "'rowptr' is torch.float32"),
        ([0], [], -1, ValueError, "'col' is torch.float32"),
    ],
)
def test_rows_and_columns_out_of_bounds(rowptr, col, num_cols, error, message):
    with pytest.raises(error, match=message):
        Adjacency(torch.tensor(rowptr), torch.tensor(col), None, num_cols)


def test_a_matrix_of_pytorch_out_of_bounds():
    """Its own constructor doesn't check it by default."""
    for rowptr, error in (
        ([0, 3, 2], ValueError),
        ([0, 1, 3], ValueError),
        ([0, 1, 2], IndexError),
    ):
        adj = torch.sparse_csr_tensor(
            torch.tensor(rowptr),
            torch.tensor([0, 5]),
            torch.ones(2),
            (2, 2),
            check_invariants=False,
        )
        with pytest.raises(error, match="'rowptr' does not rise|'col' holds 5"):
            Adjacency.of(adj)


def test_numbers_of_rows_and_columns():
    empty = torch.zeros(0, dtype=torch.long)
    for rowptr, num_cols in (
        (empty, 3),
        (torch.zeros(1).long(), -1),
        (torch.zeros(1).long(), 2**31),
    ):
        with pytest.raises(ValueError, match="expected .rows \\+ 1. and a number of columns below"):
            Adjacency(rowptr, empty, None, num_cols)
    assert Adjacency(torch.zeros(1).long(), empty).shape == (0, 0)
    with pytest.raises(ValueError, match="'rowptr' is on meta, but 'col' is on cpu"):
        Adjacency(ROWPTR.to("meta"), COL)


# What PyG, data loaders and other processes call --------------------------------------------------


def warm(value=None):
    """With everything that is kept."""
    adj = make(value)
    _, ours = layers()
    ours(torch.randn(3, 4, requires_grad=True), adj)
    _ = adj.matrix, adj.with_self_loops().matrix, adj.remove_values().matrix
    return adj


def assert_equal(adj, other, x=None):
    assert adj.shape == other.shape
    assert torch.equal(adj.rowptr, other.rowptr)
    assert torch.equal(adj.col, other.col)
    assert (adj.value is None) == (other.value is None)
    assert adj.value is None or torch.equal(adj.value, other.value)
    for mine, wanted in zip(adj.matrix, other.matrix, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "copied",
    [
        lambda adj: Data(adj_t=adj).clone().adj_t,
        lambda adj: pickle.loads(pickle.dumps(adj)),
        copy.copy,
        copy.deepcopy,
        lambda adj: Data(adj_t=adj).cpu().adj_t,
        lambda adj: Data(adj_t=adj).to("cpu").adj_t,
        lambda adj: adj.to(device=torch.device("cpu"), non_blocking=True),
        lambda adj: adj.to(torch.ones(3)),
        lambda adj: Data(adj_t=adj).detach().adj_t,
    ],
)
def test_copies(copied, weighted):
    adj = warm(weights() if weighted else None)
    twin = copied(adj)
    assert_equal(twin, adj)
    if weighted:  # Each has values, and what is made of them, of its own.
        twin.value = torch.ones(5)
        theirs, ours = layers()
        x = torch.randn(3, 4)
        for each in (adj, twin):
            assert torch.allclose(ours(x, each), theirs(x, *each.to_edge_index()), atol=1e-6)


def test_a_copy_takes_along_what_is_kept():
    adj = warm(weights())
    twin = adj.clone()
    assert len(twin.tensors()) == len(adj.tensors())
    given = {tensor.data_ptr() for tensor in adj.tensors()}
    assert not given & {tensor.data_ptr() for tensor in twin.tensors()}
    made = twin.tensors()
    _, ours = layers()
    ours(torch.randn(3, 4), twin)
    twin.with_self_loops()
    assert [id(tensor) for tensor in twin.tensors()] == [id(tensor) for tensor in made]
    adj.value.mul_(2)  # What was made of other values stays behind.
    theirs, ours = layers()
    x = torch.randn(3, 4)
    assert torch.allclose(ours(x, adj.clone()), theirs(x, *adj.to_edge_index()), atol=1e-6)


def test_another_has_what_one_was_asked_for():
    adj, other = warm(weights()), make(weights())
    other.prepare(adj.uses)
    assert other.uses == adj.uses
    made = other.tensors()
    assert len(made) == len(adj.tensors()) > 15
    _, ours = layers()
    ours(torch.randn(3, 4, requires_grad=True), other).sum().backward()
    _ = other.matrix, other.with_self_loops().matrix, other.remove_values().matrix
    assert [id(tensor) for tensor in other.tensors()] == [id(tensor) for tensor in made]
    assert make().uses == Uses()


def test_where_it_is_already_it_stays():
    adj = warm(weights())
    assert adj.to("cpu") is adj.cpu() is adj.to(torch.float32) is adj
    assert Adjacency.of(adj) is adj


def test_another_type_is_of_values():
    adj = warm(weights())
    for kind in (torch.bfloat16, torch.float64):
        other = adj.to(kind)
        assert other.value.dtype == kind
        assert_equal(other.remove_values(), adj.remove_values())
        assert spmm(other, torch.ones(3, 2, dtype=kind)).dtype == kind
    with pytest.raises(ValueError, match="'dtype' is torch.int32, expected a floating point type"):
        adj.to(torch.int32)
    exact = make(weights().double() + 1e-9)
    theirs, ours = layers()
    ours(torch.randn(3, 4), exact)
    half = exact.to(torch.bfloat16)  # Not the normalisation of what was more precise.
    x = torch.randn(3, 4)
    edge_index, value = half.to_edge_index()
    assert torch.allclose(ours(x, half), theirs(x, edge_index, value).float(), atol=1e-2)


def test_gradients_of_values():
    value = weights().requires_grad_()
    adj = make(value)
    assert adj.detach().value.requires_grad is False
    assert adj.detach().matrix is adj.matrix
    assert make(weights()).requires_grad_().value.requires_grad
    assert make().requires_grad_().value is None
    with torch.no_grad():
        assert not adj.clone().value.requires_grad
    spmm(adj.clone(), torch.ones(3, 1)).sum().backward()
    assert torch.equal(value.grad, torch.ones(5))


def test_shared_memory():
    data = Data(adj_t=warm(weights()))
    adj = data.adj_t
    assert not adj.is_shared()
    assert data.share_memory_().adj_t is adj
    assert adj.is_shared()
    assert all(tensor.is_shared() for tensor in adj.tensors())
    trained(adj, torch.ones(3, 2))


@pytest.mark.requires("cuda")
def test_pinned_memory_and_devices():
    data = Data(adj_t=warm(weights()))
    adj = data.adj_t
    assert not adj.is_pinned()
    pinned = data.pin_memory().adj_t
    assert pinned.is_pinned()
    assert all(tensor.is_pinned() for tensor in pinned.tensors())
    assert pinned.pin_memory() is pinned
    there = pinned.to("cuda", non_blocking=True)
    assert len(there.tensors()) == len(adj.tensors())
    assert all(tensor.is_cuda for tensor in there.tensors())
    there.record_stream(torch.cuda.current_stream())
    assert_equal(there.cpu(), adj)
    assert_equal(data.cuda().adj_t.cpu(), adj)


def test_workers_send_it():
    data = random_data()
    ptr = torch.tensor([0, 100, 200, 300])
    kinds = {"layout": "fused", "log": False}
    here = list(gas.SubgraphLoader(data, ptr, **kinds))
    there = list(gas.SubgraphLoader(data, ptr, num_workers=2, **kinds))
    assert len(here) == len(there) == 3
    for mine, other in zip(here, there, strict=True):
        assert_equal(mine.data.adj_t, other.data.adj_t)
        x = torch.randn(mine.data.num_nodes, 3)
        assert torch.equal(trained(mine.data.adj_t, x), trained(other.data.adj_t, x))


def random_data():
    return Data(x=torch.randn(300, 4), edge_index=torch.randint(300, (2, 2000)))


@pytest.mark.requires("cuda")
def test_batches_in_pinned_memory():
    loader = gas.SubgraphLoader(
        random_data(), torch.tensor([0, 150, 300]), layout="fused", log=False, pin_memory=True
    )
    assert all(batch.data.adj_t.is_pinned() for batch in loader)


def test_dense():
    adj = make(weights())
    edge_index, value = adj.to_edge_index()
    dense = to_dense_adj(edge_index, edge_attr=value)[0].t()
    assert torch.equal(spmm(adj, torch.eye(3)), dense)


def test_a_matrix_has_its_own_weights_and_size():
    adj = gas.nn.Adjacency.of(
        torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, torch.tensor([1.0, 2.0, 3.0])
    )
    assert gas.nn.Adjacency.of(adj, 3) is adj
    assert gas.nn.Adjacency.of(adj.to_torch_sparse(), 3).shape == (3, 3)
    for matrix in (adj, adj.to_torch_sparse()):
        with pytest.raises(ValueError, match="'edge_weight' is given with a matrix"):
            gas.nn.Adjacency.of(matrix, 3, torch.ones(3))
        with pytest.raises(ValueError, match="'num_nodes' is given with a matrix"):
            gas.nn.Adjacency.of(matrix, 4)
    for count in (1, 2, 4):
        with pytest.raises(ValueError, match=rf"'edge_weight' has shape \[{count}\]"):
            gas.nn.Adjacency.of(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, torch.ones(count))
