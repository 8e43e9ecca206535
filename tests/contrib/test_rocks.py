"""Features in a RocksDB: the same rows, which may be written while training."""

import subprocess
import sys

import pytest
import torch
from conftest import random_graph

import gas
from gas.contrib.rocks import open_rows, write_rows

pytestmark = pytest.mark.requires("rocksdict")
CODECS = ("float64", "float32", "float16", "bfloat16", "int8")


@pytest.mark.parametrize("codec", CODECS)
def test_rows_come_back(codec, tmp_path, monkeypatch):
    monkeypatch.setattr("gas.contrib.rocks.BLOCK_ROWS", 7)
    x = open_rows(tmp_path / "db", 30, 5, codec)
    assert x.shape == (30, 5)
    assert x.store.tier == "rocksdb"
    assert torch.equal(x.dequantize(), torch.zeros(30, 5, dtype=x.dtype))
    rows, index = torch.randn(20, 5), torch.randperm(30)[:20]
    write_rows(x, index, rows)
    expected = gas.quantize(rows, codec).dequantize()
    assert torch.equal(x[index], expected)
    write_rows(x, index[:1], torch.ones(1, 5))
    assert torch.equal(x[index[1:]], expected[1:])
    assert torch.equal(x[index[:1]], gas.quantize(torch.ones(1, 5), codec).dequantize())
    twin = x.clone()  # Of its own.
    write_rows(x, index, rows)
    assert not torch.equal(twin[index[:1]], x[index[:1]])
    x.store.close()
    again = open_rows(tmp_path / "db", 30, 5, codec)
    assert torch.equal(again[index], expected)
    again.store.close()


def test_another_process_finds_them_after_a_crash(tmp_path):
    program = """
import os, torch
from gas.contrib.rocks import open_rows, write_rows
x = open_rows("db", 4, 2)
write_rows(x, torch.tensor([1, 3]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path)
    x = open_rows(tmp_path / "db", 4, 2)
    assert x.dequantize().tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    x.store.close()


def test_what_is_written_while_training_is_read(tmp_path):
    """The curve is that of a tensor that is written to alike."""
    graph = gas.cluster(random_graph(), 6, log=False)
    rocks, plain = graph.clone(), graph.clone()
    rocks.x = open_rows(tmp_path / "db", 60, 5)
    write_rows(rocks.x, torch.arange(60), graph.x)

    def curve(data, write):
        torch.manual_seed(0)
        model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
        model.predict(data)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            for batch in gas.SubgraphLoader(data, batch_size=2, precompute=False, log=False):
                own = batch.own
                loss = torch.nn.functional.cross_entropy(model(batch), own.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                write(own.n_id, own.x * 0.9)
        return losses, model.predict(data)

    found = curve(rocks, lambda index, rows: write_rows(rocks.x, index, rows))
    expected = curve(plain, lambda index, rows: plain.x.index_copy_(0, index, rows))
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    rocks.x.store.close()


def test_one_at_a_time(tmp_path):
    x = open_rows(tmp_path / "db", 4, 2)
    with pytest.raises(ValueError, match="can't be opened as a RocksDB .*: close it where it is"):
        open_rows(tmp_path / "db", 4, 2)
    x.store.close()
    with pytest.raises(ValueError, match="holds 4 rows of 2 as float32 x 2, expected 4 rows of 3"):
        open_rows(tmp_path / "db", 4, 3)
    open_rows(tmp_path / "db", 4, 2).store.close()


def test_rows_of_one_value(tmp_path):
    x = open_rows(tmp_path / "db", 3, 1)
    write_rows(x, torch.tensor([2, 0]), torch.tensor([[2.0], [1.0]]))
    assert x.dequantize().tolist() == [[1.0], [0.0], [2.0]]
    x.store.close()


def test_features_are_encoded_into_it(tmp_path):
    from gas.contrib.rocks import RocksStore

    x = torch.randn(50, 3)
    found = gas.quantize(x, "int8", lambda *shape: RocksStore(*shape, path=tmp_path / "db"))
    assert torch.equal(found.dequantize(), gas.quantize(x, "int8").dequantize())
    found.store.flush()
    found.store.close()
