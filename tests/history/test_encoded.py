"""Encoded features: a tensor to everybody, of the values that its codec keeps."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_store import DictStore
from torch_geometric.data import Data

import gas
from gas import native
from gas.history import Encoded, encoded
from gas.history.codec import Codec
from gas.native.dropout import dropout
from gas.native.transfer import CODECS, decode_torch, encode_torch

DTYPES = ("float64", "float32", "bfloat16", "float16", "int8")
STORES = {"host": "host", "disk": "disk", "user": DictStore}
BOUNDS = {"float64": 0.0, "float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}


def features(rows=50, width=7):
    return torch.randn(rows, width)


def kept(x, dtype):
    """Return features as a codec stores them, by PyTorch alone."""
    if dtype in CODECS:
        return decode_torch(dtype, encode_torch(dtype, x.float()), x.size(1))
    return x.to(getattr(torch, dtype))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, store):
    x = features()
    given = gas.quantize(x, dtype, STORES[store])
    assert isinstance(given, Encoded)
    assert isinstance(given, torch.Tensor)
    assert given.shape == x.shape
    assert given.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert given.store.nbytes == 50 * Codec.of(dtype).row_bytes(7)
    assert torch.equal(given.dequantize(), kept(x, dtype))
    error = (given.dequantize() - x).abs()
    if dtype == "int8":
        assert bool((error <= x.abs().amax(1, keepdim=True) / 254 * 1.001).all())
    else:
        assert bool((error <= BOUNDS[dtype] * x.abs()).all())


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_any_type_of_numbers(dtype, given):
    x = features().to(given)
    assert torch.equal(gas.quantize(x, dtype).dequantize(), kept(x, dtype))
    back = gas.quantize(gas.quantize(x, "float64"), dtype)  # Of encoded rows, too.
    assert torch.equal(back.dequantize(), kept(x, dtype))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (5, 1), (2000, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(dtype, shape):
    x = features(*shape)
    given = gas.quantize(x, dtype)
    assert torch.equal(given.dequantize(), kept(x, dtype))
    assert torch.equal(given.select_rows(torch.arange(shape[0])).dequantize(), kept(x, dtype))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_encoded_some_rows_at_a_time(dtype, store, monkeypatch):
    monkeypatch.setattr(encoded, "BLOCK_VALUES", 20)
    x, seen = features(), []
    cast = gas.history.Codec.cast
    monkeypatch.setattr(
        gas.history.Codec, "cast", lambda codec, x, *r: seen.append(x.shape) or cast(codec, x, *r)
    )
    given = gas.quantize(x, dtype, STORES[store])
    assert seen == [(2, 7)] * 25
    assert torch.equal(given.dequantize(), kept(x, dtype))
    order = torch.randint(50, (33,))
    assert torch.equal(given.select_rows(order).dequantize(), kept(x, dtype)[order])


def test_of_a_mapped_file(tmp_path):
    x = features(300, 5)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    given = gas.quantize(mapped, "float16", "disk", tmp_path / "rows")
    assert torch.equal(given.dequantize(), kept(x, "float16"))
    assert (tmp_path / "rows").stat().st_size == 4096 + 300 * 5 * 2


# Rows ---------------------------------------------------------------------------------------------

ROWS = {
    "ids": torch.tensor([3, 0, 3, 49]),
    "from the end": torch.tensor([-1, -50, 3]),
    "int32": torch.tensor([3, 4], dtype=torch.int32),
    "none": torch.tensor([], dtype=torch.long),
    "a table of ids": torch.tensor([[3, 4], [5, 6]]),
    "a mask": torch.arange(50) % 3 == 0,
    "a range": slice(5, 20),
    "steps": slice(2, -3, 4),
    "all": slice(None),
    "a row": 7,
    "the last row": -1,
    "an id": torch.tensor(4),
}
OTHERS = {
    "columns": (slice(None), 2),
    "an element": (3, 4),
    "rows and columns": (slice(3, 9), slice(1, 3)),
    "pairs": (torch.tensor([1, 2]), torch.tensor([3, 4])),
    "elements": torch.arange(50 * 7).view(50, 7) % 2 == 0,
    "a list": [1, 2],
    "numpy": np.array([1, 2]),
    "a new dimension": None,
    "the rest": ...,
}


@pytest.mark.parametrize("index", [*ROWS, *OTHERS])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows(dtype, index, monkeypatch):
    given = gas.quantize(features(), dtype)
    every = given.dequantize()
    if index in ROWS:  # No others are decoded.
        monkeypatch.setattr(Encoded, "dequantize", lambda _: pytest.fail("all are decoded"))
    how = {**ROWS, **OTHERS}[index]
    rows = given[how]
    assert type(rows) is torch.Tensor
    assert torch.equal(rows, every[how])
    rows.zero_()  # A copy, that of the caller.
    assert torch.equal(given[how], every[how])


def test_rows_by_functions(monkeypatch):
    given = gas.quantize(features())
    every = given.dequantize()
    monkeypatch.setattr(Encoded, "dequantize", lambda _: pytest.fail("all are decoded"))
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(given.index_select(0, ids), every[ids])
    assert torch.equal(torch.index_select(given, -2, ids.int()), every[ids])
    assert torch.equal(given.narrow(0, 2, 5), every[2:7])
    assert torch.equal(given.narrow(-2, 2, 5), every[2:7])
    assert torch.equal(torch.narrow(given, 0, 45, 5), every[45:])
    monkeypatch.undo()  # Without an end, or by name, all rows are decoded.
    assert torch.equal(torch.ops.aten.slice(given, 0, 2), every[2:])
    assert torch.equal(torch.ops.aten.slice(given), every)
    assert torch.equal(torch.ops.aten.slice(given, 0, start=2, end=7), every[2:7])


@pytest.mark.parametrize("index", [50, -51, torch.tensor([50]), torch.tensor([0, -51])])
def test_rows_that_are_not_there(index):
    given = gas.quantize(features())
    with pytest.raises(IndexError):
        given[index]
    with pytest.raises(IndexError):
        given.select_rows(torch.tensor([0, 50]))


@pytest.mark.parametrize("native_code", [True, False])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_and_dropping_in_one(dtype, store, native_code, monkeypatch):
    if not native_code:
        monkeypatch.setattr(native.extension, "C", None)
    given = gas.quantize(features(50, 9), dtype, STORES[store])
    index = torch.randint(50, (33,))
    expected = dropout(given.dequantize()[index], 0.3, 77)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(given.read(index, 0.3, 77), expected)
        assert torch.equal(given.read(index), given.dequantize()[index])
    for p in (0.0, 0.5):
        with pytest.raises(IndexError):
            given.read(torch.tensor([50]), p)
    with pytest.raises(ValueError, match="int64"):
        given.read(torch.tensor([0.5]))


# A tensor -----------------------------------------------------------------------------------------

FUNCTIONS = {
    "sum": lambda x: x.sum(),
    "transpose": lambda x: x.t() @ x,
    "plus": lambda x: 1 + x * 2,
    "double": lambda x: x.double(),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x[:3], x[:3]]),
    "split": lambda x: x.split(20)[2],
    "iter": lambda x: list(x)[3],
    "view": lambda x: x.view(-1)[::3],
    "where": lambda x: torch.where(x > 0, x, 0),
    "isfinite": lambda x: x.isfinite().all(),
    "numpy": lambda x: torch.from_numpy(np.asarray(x)),
    "numpy()": lambda x: torch.from_numpy(x.numpy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: torch.tensor(x[0, 0].item()),
    "copied to another": lambda x: torch.empty(50, 7).copy_(x),
    "assigned to another": lambda x: torch.zeros(50, 7).index_copy_(0, torch.arange(50), x),
    "by autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(F.linear)(x, torch.ones(3, 7)),
    "masked": lambda x: x.masked_fill(x > 0, 0),
    "unique": lambda x: x.unique(dim=0),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    given = gas.quantize(features())
    found = FUNCTIONS[name](given)
    assert type(found) is torch.Tensor
    assert torch.equal(found, FUNCTIONS[name](given.dequantize()))


def test_gradients_of_what_it_is_multiplied_by():
    given = gas.quantize(features())
    grads = []
    for x in (given, given.dequantize()):
        layer = torch.nn.Linear(7, 3)
        layer.load_state_dict({"weight": torch.ones(3, 7), "bias": torch.ones(3)})
        layer(x).square().sum().backward()
        grads.append((layer.weight.grad, layer.bias.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert given.grad is None


def torch_saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": torch_saved,
    "PyG's clone": lambda x: Data(x=x).clone().x,
}
ALIASES = {
    "copy": copy.copy,
    "detach": lambda x: x.detach(),
    "PyG's copy": lambda x: copy.copy(Data(x=x)).x,
    "cpu": lambda x: x.cpu(),
    "float": lambda x: x.float(),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("way", [*COPIES, *ALIASES])
def test_copies_are_encoded(way, store):
    given = gas.quantize(features(), "int8", store)
    other = {**COPIES, **ALIASES}[way](given)
    assert isinstance(other, Encoded)
    assert other.codec == given.codec
    assert other.store.tier == store
    assert torch.equal(other.dequantize(), given.dequantize())
    assert (other.store is given.store) == (way in ALIASES)


def test_copies_in_a_store_of_ones_own():
    given = gas.quantize(features(), "int8", DictStore)
    for other in (given.clone(), copy.deepcopy(given), given.select_rows(torch.arange(50))):
        assert isinstance(other.store, DictStore)
        assert torch.equal(other.dequantize(), given.dequantize())


def test_in_a_graph_of_pyg():
    x = gas.quantize(features(10, 4))
    data = Data(x=x, edge_index=torch.tensor([[0, 1], [1, 2]]), edge_attr=gas.quantize(features(2)))
    assert (data.num_nodes, data.num_features, data.num_edge_features) == (10, 4, 7)
    assert data.is_node_attr("x")
    assert data.is_edge_attr("edge_attr")
    assert data.validate()
    assert str(data) == "Data(x=[10, 4], edge_index=[2, 2], edge_attr=[2, 7])"
    part = data.subgraph(torch.tensor([0, 1]))
    assert torch.equal(part.x, x.dequantize()[:2])
    assert repr(x) == "Encoded([10, 4], int8, store='host')"


def test_what_is_taken_for_a_view_is_a_copy():
    given = gas.quantize(features())
    before = given.dequantize()
    for view in (given.t(), given.narrow(0, 1, 3), given.view(-1)):
        view.zero_()
    assert torch.equal(given.dequantize(), before)
    assert given._version == 0


def test_one_of_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        given = gas.quantize(features())
        other = given.clone()
    assert not given.is_inference()
    assert not other.is_inference()


def test_files_go_when_nobody_needs_them():
    given = gas.quantize(features(), "int8", "disk")
    other = copy.copy(given)
    path = given.store.path
    del given
    assert path.exists()
    del other
    assert not path.exists()


def test_nothing_is_left_of_what_failed(tmp_path):
    x = features()
    x[40, 3] = 1e6
    with pytest.raises(ValueError, match=r"1e\+06 in row 40, column 3, but float16 ends at"):
        gas.quantize(x, "float16", "disk", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(("shape", "place"), [((4,), "row 12"), ((4, 2, 2), "row 12, column 1, 0")])
def test_what_is_too_large_is_named_in_any_shape(shape, place):
    x = torch.zeros(shape, dtype=torch.double)
    x[(2, 1, 0)[: len(shape)]] = 1e6
    with pytest.raises(
        ValueError, match=f"x.npy holds 1e\\+06 in {place}, .* store them as float32"
    ):
        gas.history.Codec("float16").cast(x, 10, "x.npy")
    x[x > 0] = 1e300
    with pytest.raises(ValueError, match="int8 ends at .*: scale the features$"):
        gas.history.Codec("int8").cast(x)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype, value):
    x = features()
    x[3, 2] = value
    row = gas.quantize(x, dtype)[3]
    assert not row[2].isfinite()
    assert row.isnan().all() if dtype == "int8" else row[3] == kept(x, dtype)[3, 3]
