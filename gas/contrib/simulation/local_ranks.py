"""Measurement of a step's exchange with other ranks, on local processes.

:func:`measure_ranks` starts this module by torchrun, and reads what it prints.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from gas import ScalableGNN, SubData, SubgraphLoader, distribute

NODES = 128, 32768  # Of each rank, each a replica on another one.
STEPS, ROUNDS = 20, 3
MARK = "gas.contrib.simulation.local_ranks: "


class RankCost(NamedTuple):
    """Cost of an exchange with other ranks, in time of a core.

    * ``seconds_per_exchange``: for the headers and gradients of a step;
    * ``bandwidth``: bytes of rows that are sent and received per second of a core.
    """

    seconds_per_exchange: float
    bandwidth: float


class _HistoriesOnly(ScalableGNN):
    """Model of negligible computation, with histories and parameters of given sizes."""

    def __init__(self, num_nodes: int, widths: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__(num_nodes, list(widths), len(widths) + 1)
        self.weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
        self.rows = [torch.ones(num_nodes, width) for width in widths]

    def forward(self, x: Tensor, adj_t: object, batch_size: int, *where: Tensor) -> Tensor:
        for history, rows in zip(self.histories, self.rows, strict=True):
            self.push_and_pull(history, rows[:batch_size], batch_size, *where, rows=True)
        return torch.stack([weight.sum() for weight in self.weights]).sum().view(1, 1)


def measure_ranks(num_ranks: int, widths: Sequence[int], sizes: Sequence[int]) -> RankCost:
    """Measure the cost of an exchange between local processes, in about ten seconds.

    Args:
        num_ranks: The number of processes, at least 2.
        widths: The widths of the histories, which store float32.
        sizes: The number of elements of each parameter.

    Raises:
        RuntimeError: If the processes fail, with their error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "--module", __name__]
    command += [json.dumps([[*widths], [*sizes]])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        raise RuntimeError(
            f"{num_ranks} local processes could not be measured: {done.stderr.strip()}"
        )
    return RankCost(*json.loads(told[0].removeprefix(MARK)))


def _measure_exchange(
    num_own: int, widths: Sequence[int], sizes: Sequence[int]
) -> tuple[float, int]:
    """Return the extra time of a step with other ranks, and the bytes that it moves."""
    num_nodes = num_own * dist.get_world_size()
    node, bounds = torch.arange(num_nodes), torch.arange(0, num_nodes + 1, num_own)
    edges = torch.stack([node, (node + num_own) % num_nodes])
    x = torch.ones(num_nodes, 1)
    graph = Data(x=x, edge_index=edges, perm=node, parts=bounds, shards=bounds)
    loader = SubgraphLoader(graph, log=False, layout="csr")
    (batch,) = list(loader)
    local = _HistoriesOnly(loader.num_nodes, widths, sizes)
    alone = _time_step(local, batch._replace(n_id=batch.n_id.clone()))  # Without shards.
    model = distribute(_HistoriesOnly(num_nodes, widths, sizes), graph)
    together = _time_step(model, batch)
    return together - alone, 2 * num_own * sum(4 * width for width in widths)


def _time_step(model: torch.nn.Module, batch: SubData) -> float:
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(STEPS):
            model(batch).sum().backward()
        found.append((time.process_time() - start) / STEPS)
    return min(found)


def _main() -> None:
    widths, sizes = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    (few, moved_few), (many, moved) = (_measure_exchange(nodes, widths, sizes) for nodes in NODES)
    per_byte = max(0.0, many - few) / (moved - moved_few) if widths else 0.0
    found = torch.tensor([few - moved_few * per_byte, per_byte], dtype=torch.double)
    dist.all_reduce(found)
    per_step, per_byte = (found / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:
        print(MARK + json.dumps([max(0.0, per_step), 1 / per_byte if per_byte else math.inf]))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
