import copy
import warnings

import pytest
import torch

import gas
from gas.native import check_row_index


def filled(num_embeddings=10, dim=4, **kwargs):
    history = gas.History(num_embeddings, dim, **kwargs)
    history.push(torch.randn(num_embeddings, dim))
    return history


def test_push_everything_and_pull():
    history = gas.History(10, 4)
    x = torch.randn(10, 4)
    history.push(x)
    assert torch.equal(history.emb, x)
    assert torch.equal(history.pull(), x)
    n_id = torch.tensor([3, 3, 9, 0])
    assert torch.equal(history.pull(n_id), x[n_id])
    assert history.pull(n_id[:0]).shape == (0, 4)


def test_push_by_id():
    history = filled()
    expected = history.emb.clone()
    x, n_id = torch.randn(3, 4), torch.tensor([7, 0, 2])
    history.push(x, n_id)
    expected[n_id] = x
    assert torch.equal(history.emb, expected)


@pytest.mark.parametrize("as_list", [False, True])
def test_push_by_ranges(as_list):
    history = filled()
    expected = history.emb.clone()
    x = torch.randn(5, 4)
    offset, count = torch.tensor([8, 4, 1]), torch.tensor([2, 0, 3])
    expected[8:10], expected[1:4] = x[:2], x[2:]
    ranges = (offset.tolist(), count.tolist()) if as_list else (offset, count)
    history.push(x, None, *ranges)
    assert torch.equal(history.emb, expected)


def test_push_stores_the_values_at_the_call():
    history = gas.History(3, 2)
    for kwargs in ({}, {"n_id": torch.arange(3)}, {"offset": [0], "count": [3]}):
        x = torch.ones(3, 2, requires_grad=True)
        history.push(x, **kwargs)
        with torch.no_grad():
            x.zero_()
        assert (history.emb == 1).all()
        assert not history.emb.requires_grad
        history.emb.zero_()


def test_a_pulled_tensor_is_the_callers():
    history = filled()
    everything, rows = history.pull(), history.pull(torch.arange(10))
    old = everything.clone()
    history.push(torch.zeros(10, 4))
    assert torch.equal(everything, old)
    assert torch.equal(rows, old)
    rows.fill_(7)
    assert (history.emb == 0).all()


def test_strided_rows():
    history = gas.History(4, 3)
    x = torch.randn(3, 4).t()
    history.push(x, torch.tensor([3, 2, 1, 0]))
    assert torch.equal(history.emb, x.flip(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    history = gas.History(4, 3, dtype=dtype)
    x = torch.randn(4, 3)
    history.push(x)
    assert history.emb.dtype == history.pull().dtype == dtype
    assert torch.equal(history.pull(), x.to(dtype))
    history.push(x.double(), torch.arange(4))
    assert torch.equal(history.pull(torch.arange(4)), x.to(dtype))


def test_age():
    history = gas.History(4, 1)
    assert history.age.tolist() == [-1, -1, -1, -1]
    assert not history.written.any()
    history.push(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert history.age.tolist() == [0, 0, -1, -1]
    history.push(torch.zeros(2, 1), offset=[1], count=[2])
    assert history.age.tolist() == [1, 0, 0, -1]
    history.push(torch.zeros(4, 1))
    assert history.age.tolist() == [0, 0, 0, 0]
    assert history.age.dtype == torch.int32
    assert history.written.all()
    history.reset_parameters()
    assert history.age.tolist() == [-1, -1, -1, -1]


def test_reading_what_nobody_wrote_warns_once():
    history = gas.History(4, 1)
    history.push(torch.ones(2, 1), torch.tensor([0, 1]))
    assert (history.pull(torch.tensor([0, 1])) == 1).all()
    with pytest.warns(UserWarning, match=r"1 of 2 rows are zeros .* call model\.refresh\(graph\)"):
        history.pull(torch.tensor([1, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history.pull(torch.tensor([1, 3]))
    history.reset_parameters()
    with pytest.warns(UserWarning, match="4 of 4 rows"):
        history.pull()


def test_rows_nobody_wrote_are_counted():
    history = gas.History(6, 1)
    for rows in ([0, 1], [1, 2], [3, 3]):
        history.push(torch.zeros(2, 1), torch.tensor(rows))
    history.push(torch.zeros(2, 1), None, [3], [2])
    assert history._num_unwritten == int((history.age == -1).sum()) == 1
    history.push(torch.zeros(6, 1))
    assert history._num_unwritten == 0


def test_rows_that_ranges_write_twice_count_once():
    history = gas.History(10, 2)
    for offset, count in (([0, 2], [2, 2]), ([3, 3], [3, 3]), ([9], [1]), ([0], [10])):
        history.push(torch.ones(sum(count), 2), offset=offset, count=count)
        assert history._num_unwritten == int((history.age == -1).sum())
    assert history._num_unwritten == 0


def test_histories_stay_where_they_are():
    module = torch.nn.ModuleList([filled()])
    assert module.state_dict() == {}
    emb = module[0].emb
    module.double().to("cpu")
    assert module[0].emb is emb
    assert emb.dtype == torch.float32
    twin = copy.deepcopy(module[0])
    twin.push(torch.zeros(10, 4))
    assert (emb != 0).any()


def test_repr():
    assert str(gas.History(10, 4)) == "History(10, 4, dtype=float32, store='host')"


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"'x' has shape \[10, 3\], expected \[rows, 4\]", (torch.ones(10, 3),)),
        (ValueError, r"'x' has shape \[4\]", (torch.ones(4),)),
        (ValueError, "'x' has 9 rows, but the history has 10: pass 'n_id'", (torch.ones(9, 4),)),
        (ValueError, "'x' has 2 rows, but 'n_id' names 3", (torch.ones(2, 4), torch.arange(3))),
        (IndexError, "10", (torch.ones(2, 4), torch.tensor([0, 10]))),
        (IndexError, "-1", (torch.ones(2, 4), torch.tensor([0, -1]))),
        (ValueError, "'n_id' is torch.float32", (torch.ones(2, 4), torch.ones(2))),
        (ValueError, "pass both or neither", (torch.ones(2, 4), None, [0])),
        (ValueError, "describe 3 rows in 1 and 1 ranges", (torch.ones(2, 4), None, [0], [3])),
        (ValueError, "2 and 1 ranges", (torch.ones(2, 4), None, [0, 1], [2])),
        (ValueError, "disagree: row 0 belongs", (torch.ones(2, 4), torch.tensor([7, 8]), [0], [2])),
        (ValueError, "dtype torch.int64", (torch.ones(10, 4, dtype=torch.long),)),
        (IndexError, "the range 9 to 11", (torch.ones(2, 4), None, [9], [2])),
        (IndexError, "the range -1 to 1", (torch.ones(2, 4), None, [-1], [2])),
        (IndexError, "the range 4 to 3", (torch.ones(2, 4), None, [0, 4], [3, -1])),
    ],
)
def test_bad_pushes_change_nothing(error, message, arguments):
    history = filled()
    before, age = history.emb.clone(), history.age
    with pytest.raises(error, match=message):
        history.push(*arguments)
    assert torch.equal(history.emb, before)
    assert torch.equal(history.age, age)


def test_rows_made_in_inference_mode_can_be_changed():
    with torch.inference_mode():
        history = gas.History(4, 2)
        history.push(torch.ones(4, 2))
    history.emb.mul_(2)
    assert torch.equal(history.pull(), torch.full((4, 2), 2.0))
    history.reset_parameters()
    assert not history.written.any()


def test_bad_pulls():
    with pytest.raises(IndexError, match="10"):
        filled().pull(torch.tensor([10]))
    with pytest.raises(ValueError, match="'n_id' is torch.float32"):
        filled().pull(torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1, 4), "'num_embeddings' is -1"), ((4, 1.5), "'embedding_dim' is 1.5")],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        gas.History(*arguments)
    with pytest.raises(ValueError, match="'dtype' is torch.int64"):
        gas.History(4, 4, dtype=torch.int64)


def test_only_many_short_ranges_are_moved_by_rows():
    n_id, offset, count = torch.tensor([3, 9, 10]), torch.tensor([3, 9]), torch.tensor([1, 2])
    assert check_row_index(3, n_id, offset, count, 50) is n_id
    assert check_row_index(3, n_id, [3, 9], [1, 2], 50) == [(3, 1), (9, 2)]
    assert check_row_index(3, None, offset, count, 50) == [(3, 1), (9, 2)]
    many = torch.arange(20)
    assert check_row_index(20, many, torch.tensor([0]), torch.tensor([20]), 50) == [(0, 20)]


@pytest.mark.parametrize("shift", [0, 1])
def test_many_short_ranges_are_the_rows_that_they_name(shift):
    """Ranges of a row or two are moved one by one; those that aren't ``n_id`` are refused."""
    history, other = gas.History(50, 4), gas.History(50, 4)
    offset, count = torch.tensor([3, 9, 20, 41]), torch.tensor([1, 2, 1, 0])
    n_id = torch.tensor([3, 9, 10, 20])
    x = torch.randn(4, 4)
    if shift:
        with pytest.raises(ValueError, match="disagree"):
            history.push(x, n_id + shift, offset, count)
        assert not history.written.any()
        return
    history.push(x, n_id, offset, count)
    other.push(x, n_id)
    assert torch.equal(history.emb, other.emb)
    assert torch.equal(history.age, other.age)
    with pytest.raises(IndexError, match="outside"):
        history.push(
            x, torch.tensor([3, 9, 10, 50]), torch.tensor([3, 9, 50]), torch.tensor([1, 2, 1])
        )
