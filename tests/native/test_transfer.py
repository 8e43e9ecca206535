"""Tables and codecs: native code equals its twin bit by bit, both equal plain indexing."""

from typing import Any, NamedTuple

import pytest
import torch

from gas import native
from gas.native.dropout import dropout, gather_decode, gather_decode_dropout
from gas.native.transfer import (
    CODECS,
    Job,
    decode_torch,
    encode_torch,
    num_stored_columns,
)

STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.uint8}


@pytest.fixture(params=["twin", pytest.param("native", marks=pytest.mark.requires("native"))])
def implementation(request, monkeypatch):
    if request.param == "twin":
        monkeypatch.setattr(native.extension, "C", None)
    return request.param


def hard_values(width):
    """Return rows with every kind of number, of which encoding is most likely to go wrong."""
    special = [0.0, -0.0, 1.0, -1.0, 1e-45, 6e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e38]
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 0.5 / 127]
    values = torch.tensor(special + ties + [-v for v in special + ties])
    x = torch.cat([values, torch.randn(997) * 10 ** torch.randint(-9, 9, (997,))])
    x = x[: x.numel() // max(width, 1) * width].view(-1, width)
    return torch.cat([x, torch.zeros(2, width), torch.full((1, width), 1e-44)])


class Table(NamedTuple):
    """Rows and how they are encoded, as jobs take them."""

    rows: torch.Tensor
    codec: tuple[Any, ...]

    def pull(self, index, out):
        return Job.pull(self.rows, index, out, *self.codec)

    def push(self, x, where):
        return Job.push(self.rows, x, where, *self.codec)


def new_table(codec, n, width, dtype=torch.float32):
    columns = num_stored_columns(codec, width) if codec else width
    rows = torch.zeros(n, columns, dtype=STORED[codec] if codec else dtype)
    return Table(rows, (codec, width))


@pytest.mark.requires("native")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 13, 16, 64, 100])
def test_codecs_equal_their_twins(codec, width):
    x = hard_values(width)
    table = new_table(codec, len(x), width)
    table.push(x, [(0, len(x))]).run()
    expected = encode_torch(codec, x)
    assert torch.equal(table.rows.view(torch.uint8), expected.view(torch.uint8))
    index = torch.randint(len(x), (50,))
    out = torch.empty(50, width)
    table.pull(index, out).run()
    twin = decode_torch(codec, expected, width)[index]
    assert torch.equal(out, twin)
    assert torch.equal(out.signbit(), twin.signbit())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 2, 3, 13, 64, 5000])
def test_rows_that_are_decoded_and_dropped(implementation, codec, width):
    x = torch.randn(60, width)
    rows = encode_torch(codec, x)
    index = torch.randint(60, (2, 43))[0]
    expected = decode_torch(codec, rows, width)[index]
    assert torch.equal(gather_decode(rows, codec, width, index), expected)
    for p in (0.0, 0.3, 0.9999):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = gather_decode_dropout(rows, codec, width, index, p, 11)
            assert torch.equal(out, dropout(expected, p, 11))
        assert gather_decode_dropout(rows, codec, width, index[:0], p, 11).shape == (0, width)
        for outside in (-1, 60):
            with pytest.raises(IndexError):
                gather_decode_dropout(rows, codec, width, torch.tensor([0, outside]), p, 11)


@pytest.mark.parametrize("codec", CODECS)
def test_infinities_and_nans(implementation, codec):
    x = torch.ones(4, 3)
    x[0, 1], x[1, 2], x[2, 0] = torch.inf, -torch.inf, torch.nan
    table, out = new_table(codec, 4, 3), torch.empty(4, 3)
    table.push(x, [(0, 4)]).run()
    table.pull(torch.arange(4), out).run()
    assert out[2, 0].isnan()
    assert torch.equal(out[3], x[3])
    if codec == "int8":  # The scale identifies a row.
        assert out[:3].isnan().all()
    else:
        assert torch.equal(out[:2], x[:2])


@pytest.mark.parametrize(
    ("codec", "error"), [("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 1 / 254)]
)
def test_errors_of_codecs(codec, error):
    """Of a value, relative, for types of numbers; of the row's largest value for int8."""
    x = torch.randn(1000, 32)
    y = decode_torch(codec, encode_torch(codec, x), 32)
    scale = x.abs().amax(1, keepdim=True) if codec == "int8" else x.abs().clamp(min=2**-14)
    found = ((x - y).abs() / scale).max()
    assert error / 2 < found <= error * 1.001


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("n", [0, 1, 3000])
@pytest.mark.parametrize("width", [0, 1, 5, 16])
def test_pulls_and_pushes_are_indexing(implementation, codec, n, width):
    table = new_table(codec, 2000, width)
    expected = torch.zeros(2000, width)
    x, index = torch.randint(-127, 128, (n, width)).float(), torch.randint(2000, (n,))
    if codec == "int8" and width and n:  # Exact with a scale of one.
        x[:, 0] = 127
    table.push(x, index).run()
    for i, row in zip(index.tolist(), x, strict=True):
        expected[i] = row  # The last one wins.
    every, out = torch.arange(2000), torch.empty(2000, width)
    table.pull(every, out).run()
    assert torch.equal(out, expected)
    offset, count = [1500, 3, 0], [min(n, 400), 0, min(n, 3)]
    x = x[: sum(count)] if n > 403 else x.repeat(2, 1)[: sum(count)]
    table.push(x, list(zip(offset, count, strict=True))).run()
    expected[1500 : 1500 + count[0]], expected[: count[2]] = x[: count[0]], x[count[0] :]
    table.pull(every, out).run()
    assert torch.equal(out, expected)
    table.push(x[:0], []).run()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_any_type_move_as_they_are(implementation, dtype):
    table = new_table(None, 50, 7, dtype)
    x = torch.randn(50, 7).to(dtype)
    table.push(x, torch.arange(50).flip(0)).run()
    out = torch.empty(50, 7, dtype=dtype)
    table.pull(torch.arange(50), out).run()
    assert torch.equal(out, x.flip(0))


def test_bad_arguments_make_no_job(implementation):
    table = new_table("int8", 4, 3)
    good, out = torch.tensor([0, 3]), torch.empty(2, 3)
    for bad in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        for make in (lambda bad=bad: table.pull(bad, out), lambda bad=bad: table.push(out, bad)):
            with pytest.raises(IndexError, match=str(int(bad.abs().max() if bad[0] == 0 else -1))):
                make()
    with pytest.raises(ValueError, match=r"'index' is torch.float32"):
        table.pull(good.float(), out)
    for wrong in (torch.empty(3, 3), torch.empty(2, 4), torch.empty(2, 3).double()):
        with pytest.raises(ValueError, match=r"'out' is .*, expected a contiguous torch.float32"):
            table.pull(good, wrong)
    with pytest.raises(ValueError, match="'x' is"):
        table.push(torch.empty(3, 2).t(), good)
    for offset, count in (([3], [2]), ([-1], [2]), ([2, 1], [3, -1])):
        with pytest.raises(IndexError, match="the range"):
            table.push(torch.empty(2, 3), list(zip(offset, count, strict=True)))
    assert not table.rows.any()


def test_jobs_of_python(implementation):
    seen = []
    Job.from_function(lambda: seen.append(1)).run()
    assert seen == [1]
