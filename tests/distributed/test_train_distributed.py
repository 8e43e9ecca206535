"""``examples/train_distributed.py`` as torchrun starts it, on one machine and as on two."""

import re
import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from torch_geometric.nn import GCN

import gas

pytestmark = pytest.mark.slow  # Processes for every rank.

SCRIPT = ROOT / "examples" / "train_distributed.py"
SMALL = ["--dataset", "planted:600", "--epochs", "3", "--hidden-channels", "16", "--num-parts", "8"]


def torchrun(tmp_path, *args, options=("--nproc-per-node", "2"), script=SCRIPT):
    """Start it; what it prints is in one stream."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=tmp_path, **pipes)


def output(process, code=0, seconds=120):
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == code, out
    return out


def losses(out):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the losses of two ranks on one machine."""
    return losses(output(torchrun(tmp_path_factory.mktemp("whole"), *SMALL)))


def test_one_machine(tmp_path):
    out = output(torchrun(tmp_path, *SMALL, "--model", "sage", "--overlap", "--dtype", "bfloat16"))
    assert len(losses(out)) == 3
    assert losses(out)[-1] < losses(out)[0]
    assert re.search(r"Traffic\(rank=1, steps=6, sent_bytes=[1-9]", out)


def test_two_machines_are_two_terminals(whole, tmp_path):
    port = str(free_port())
    started = []
    for node in ("0", "1"):
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node]
        options += ["--master-addr", "localhost", "--master-port", port]
        started.append(torchrun(tmp_path, *SMALL, options=options))
    first, second = map(output, started)
    assert losses(first) == whole
    assert not losses(second)  # Rank 0 prints.


def test_a_graph_folder(whole, tmp_path):
    data, _, classes = gas.get_data(tmp_path, "planted:600")
    net = GCN(data.num_features, 16, 3, classes)
    model = gas.to_scalable(net, data)
    gas.cluster(data, 8, 2, model=model, out=tmp_path / "graph", log=False)
    out = output(torchrun(tmp_path, *SMALL, "--graph", "graph"))
    assert losses(out) == pytest.approx(whole, rel=1e-3)


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ["--nproc-per-node", "2", "--master-addr", "localhost", "--master-port"]
        out = output(torchrun(tmp_path, *SMALL, options=[*options, str(port)]), code=1)
    assert "EADDRINUSE" in out
    assert str(port) in out
