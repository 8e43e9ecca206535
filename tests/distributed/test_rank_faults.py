"""Ranks that are killed, hang or come late: nothing is lost but the work since the checkpoint."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_on
from test_train_distributed import SMALL, losses, output, torchrun
from torch_geometric.nn import GCN

import gas

pytestmark = pytest.mark.slow  # Processes for every rank.

KILLS = int(os.environ.get("GAS_KILLS", "2"))
# Otherwise, the processes of the next attempt find addresses of the last (PyTorch's issue 135712).
ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def train(rank, folder, fault):
    """Train on two ranks; on one of them something goes wrong."""
    if fault == "late" and rank == 1:
        time.sleep(5)  # The other waits for it.
    store = dist.FileStore(f"{folder}/ranks", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    data, features, classes = gas.get_data(folder, "planted:600")
    if fault == "graph" and rank == 1:
        data.edge_index = data.edge_index[:, 2:]
    net = GCN(features, 8 + 8 * (fault == "model" and rank), 3, classes)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 8, 2, model=model, log=False, cache=False)
    loader = gas.SubgraphLoader(graph, log=False)
    if fault == "version" and rank == 1:
        torch.__version__ = "0.1"
    model = gas.distribute(model, timeout=4)
    step = 0
    for _ in range(3):
        for batch in loader:
            step += 1
            wrong = rank == 1 and step == 6
            if wrong and fault == "hang":
                time.sleep(8)  # Longer than it is waited for.
            if wrong and fault == "skip":
                continue
            own = batch.own
            loss = F.cross_entropy(model(batch)[own.train_mask], own.y[own.train_mask])
            if wrong and fault == "backward":
                time.sleep(8)  # Longer than it is waited for.
            loss.backward()
    return step


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", r"agreeing on step 6 failed .*No answer came from rank 1 \(has begun step 5"),
        ("backward", r"averaging the gradients failed .*No answer came from rank 1 \(has begun"),
        ("skip", r"rank 0 of 2 can't go on: .*No answer came from rank 1 \(has begun step 11"),
        ("graph", r"rank 1 has the graph \d+ in 2 shards, but rank 0 has"),
        ("version", r"rank 1 has PyTorch 0\.1, but rank 0 has"),
        ("model", r"rank 1 has parameters "),
    ],
)
def test_what_goes_wrong_on_a_rank_is_named(fault, said, tmp_path):
    with pytest.raises(AssertionError, match=f"RankError: .*{said}"):
        run_on(2, train, tmp_path, tmp_path, fault, sharing=False)


def test_a_rank_that_starts_late(tmp_path):
    steps = 3 * 4  # Each of two ranks has half of the eight parts.
    assert run_on(2, train, tmp_path, tmp_path, "late", sharing=False) == [steps, steps]


def workers(parent):
    """Return the processes that torchrun has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True)
    return [int(pid) for pid in listed.stdout.split()]


def test_kill_9_of_a_random_rank(tmp_path, monkeypatch):
    """The curve is that of a run which wasn't killed, to the last digit that is printed."""
    for name, value in ANEW.items():
        monkeypatch.setenv(name, value)
    epochs = ["--epochs", str(10 + 15 * KILLS)]
    want = losses(output(torchrun(tmp_path, *SMALL, *epochs)))
    options = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        str(2 * KILLS),
        "--monitor-interval",
        "0.1",
    ]
    process = torchrun(tmp_path, *SMALL, *epochs, "--checkpoints", "run", options=options)
    drawn, killed, seen = random.Random(KILLS), 0, set()
    newest = tmp_path / "run" / "newest.json"
    try:
        while killed < KILLS and process.poll() is None:
            ready = [pid for pid in workers(process.pid) if pid not in seen]
            if len(ready) < 2 or not newest.exists():
                time.sleep(0.05)  # Until both have started, and one checkpoint is there.
                continue
            before = newest.read_text()
            while newest.read_text() == before and process.poll() is None:  # It has gone on.
                time.sleep(0.01)  # Until another checkpoint is there.
                ready = [pid for pid in workers(process.pid) if pid not in seen]
            time.sleep(drawn.uniform(0, 0.3))
            seen.update(ready)
            with contextlib.suppress(ProcessLookupError):
                os.kill(drawn.choice(ready), signal.SIGKILL)
                killed += 1
    finally:
        out = output(process, seconds=120 + 20 * KILLS)
    assert killed == KILLS
    found = {int(n): float(loss) for n, loss in re.findall(r"epoch (\d+): loss ([\d.]+)", out)}
    assert [found[n] for n in range(len(want))] == want
