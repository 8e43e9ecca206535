"""Cost of many ranks: cuts of generated graphs, and extrapolation to larger ones.

    python benchmarks/ranks.py                          # graphs of 10 million edges, half an hour
    python benchmarks/ranks.py --large --root data      # and one of 100 million, up to 8 GiB
    python benchmarks/ranks.py --only tables            # what was measured, told again

* *Counted*: planted graphs (communities; 30 % of the edges run anywhere) and R-MAT graphs (those of
  Graph500: a law of degrees, no communities), 20 edges per node, are cut by KaMinPar into 4 to
  1,024 shards, and what is cut is counted. Shards have as many nodes each; those of "R-MAT,
  weighed" as many edges plus 20 times the nodes.
* *Held out*: the power law of ``PartitionStatistics.scaled`` is fitted to 4, 16 and 64 shards, and
  compared with what was counted for 256 and 1,024, and for the larger graph.
* *Measured*: mini-batches of a GCN of 3 layers of 256, on 128 features, on one core of this
  machine, in CPU time, of two planted graphs side by side, whose parts differ in edges per node.
* *Validated*: local processes train, and their CPU time and bytes are compared with those predicted
  from mini-batches that as many processes have measured at once.
* *Extrapolated*: ``simulate`` of larger graphs, on 1 to 64 machines with one rank
  each. What is assumed of links and accelerators is printed with it.

Results of earlier runs are kept for what ``--only`` leaves out.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, load, make_parser, run_ranks, save, say_result
from hundred_million import AVG_DEGREE, PART_NODES, alone
from ranks_tables import FEATURES, RANKS, VALIDATED_PARTS, model_of, tables
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.cli import peak_rss_bytes
from gas.contrib.simulation import Machine, partition_statistics, simulate
from gas.datasets import open_mapped, write_planted_partition
from gas.datasets.planted import planted_partition
from gas.graph.edges import Edges
from gas.graph.partitioners import undirected_graph
from gas.native import write_json

LARGE_RANKS = (4, 64, 1024)
NODES, LARGE_NODES = 500_000, 5_000_000
KINDS = ("planted", "R-MAT", "R-MAT, weighed")
QUADRANTS = (0.57, 0.19, 0.19)  # Of R-MAT, as Graph500 has them; the rest is the fourth.

DEGREES = (4, 25)  # Of the two graphs whose mini-batches are measured; papers100M: 14.4.
VALIDATED_RANKS, VALIDATED_NODES, VALIDATED_EPOCHS = (1, 2, 4), (40_000, 200_000), 3
STEPS = ("statistics", "large", "machine", "validation", "tables")


# Graphs -------------------------------------------------------------------------------------------


def rmat(num_nodes: int, num_edges: int, seed: int = 0) -> Data:
    """Draw an undirected R-MAT graph (Chakrabarti, Zhan, Faloutsos, SDM 2004), ids shuffled.

    Every bit of both ends is drawn by the quadrants' probabilities; ends beyond ``num_nodes`` are
    drawn again by taking the remainder. Both directions are stored.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b, c = QUADRANTS
    src = torch.zeros(num_edges // 2, dtype=torch.long)
    dst = torch.zeros_like(src)
    for _ in range(math.ceil(math.log2(num_nodes))):
        drawn = torch.rand(src.numel(), generator=generator)
        src = src * 2 + (drawn >= a + b)
        dst = dst * 2 + (((drawn >= a) & (drawn < a + b)) | (drawn >= a + b + c))
    shuffled = torch.randperm(num_nodes, generator=generator)
    src, dst = shuffled[src % num_nodes], shuffled[dst % num_nodes]
    edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    return Data(edge_index=edge_index, num_nodes=num_nodes)


def planted(num_nodes: int) -> Data:
    data = planted_partition(num_nodes, AVG_DEGREE, num_features=1)
    return Data(edge_index=data.edge_index, num_nodes=num_nodes)


def weighed_parts(edge_index: Tensor, num_nodes: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Partition by KaMinPar, with a node's weight its degree plus the mean degree."""
    import kaminpar

    src, dst = edge_index
    graph = undirected_graph(Edges(src, dst, None, num_nodes))
    weight = torch.bincount(dst, minlength=num_nodes) + AVG_DEGREE
    no_edge_weights, small_ids = 1, 8
    header = np.array([no_edge_weights | small_ids, num_nodes, graph.col.numel()], dtype=np.uint64)
    offsets = graph.rowptr.numpy() * 4 + (len(header) + num_nodes + 1) * 8
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/graph.parhip", "wb") as stream:
            for array in (header, offsets, graph.col.numpy(), weight.numpy()):
                array.tofile(stream)
        loaded = kaminpar.load_graph(stream.name, kaminpar.GraphFileFormat.PARHIP, False)
    kaminpar.reseed(0)
    partitioner = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.default_context())
    part = torch.tensor(partitioner.compute_partition(loaded, num_parts, 0.03), dtype=torch.long)
    ptr = torch.zeros(num_parts + 1, dtype=torch.long)
    ptr[1:] = torch.bincount(part, minlength=num_parts).cumsum(0)
    return part.sort(stable=True).indices, ptr


def count(data: Data, num_shards: int, weighed: bool = False) -> dict[str, Any]:
    """Partition a graph and count its cut; for one shard also the statistics of its parts."""
    start = time.perf_counter()
    num_nodes, edge_index = data.num_nodes, data.edge_index
    parts = max(1, num_nodes // PART_NODES) if num_shards == 1 else num_shards
    if weighed:
        perm, ptr = weighed_parts(edge_index, num_nodes, parts)
    else:
        perm, ptr = gas.metis(
            edge_index, parts, num_nodes=num_nodes, method="kaminpar", cache=False, log=False
        )
    cut_seconds, start = time.perf_counter() - start, time.perf_counter()
    new = torch.empty(num_nodes, dtype=torch.int32)
    new[perm] = torch.arange(num_nodes, dtype=torch.int32)
    del perm
    graph = Data(adj_t=_rows(edge_index, new), num_nodes=num_nodes, parts=ptr)
    graph.shards = torch.tensor([0, num_nodes]) if num_shards == 1 else ptr
    found = dataclasses.asdict(partition_statistics(graph))
    return {
        "statistics": found,
        "cut_seconds": cut_seconds,
        "count_seconds": time.perf_counter() - start,
        "peak_bytes": peak_rss_bytes(),
    }


def _rows(edge_index: Tensor, new: Tensor) -> Tensor:
    """Renumber a graph into compressed rows with sorted columns, in little more than its memory."""
    num_nodes, num_edges = new.numel(), edge_index.size(1)
    key = torch.empty(num_edges, dtype=torch.long)
    for begin in range(0, num_edges, 2**24):
        some = slice(begin, begin + 2**24)
        key[some] = new[edge_index[1, some]].long() * num_nodes + new[edge_index[0, some]]
    key.numpy().sort()
    rowptr = torch.searchsorted(key, torch.arange(num_nodes + 1) * num_nodes)
    col = key.remainder_(num_nodes).int()
    value = torch.ones(1).expand(num_edges)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    return torch.sparse_csr_tensor(
        rowptr, col, value, (num_nodes, num_nodes), check_invariants=False
    )


# Steps, each in a process of its own --------------------------------------------------------------


def count_small(kind: str, num_nodes: int) -> dict[str, Any]:
    data = planted(num_nodes) if kind == "planted" else rmat(num_nodes, num_nodes * AVG_DEGREE)
    weighed = kind.endswith("weighed")
    return {str(ranks): count(data, ranks, weighed) for ranks in (1, *RANKS)}


def count_large(folder: str, ranks: int) -> dict[str, Any]:
    return count(open_mapped(folder), ranks)


def make_large(folder: str) -> dict[str, Any]:
    write_planted_partition(folder, LARGE_NODES, AVG_DEGREE, num_features=1)
    return {}


def measure(num_nodes: int) -> dict[str, Any]:
    """Return a machine with the measured part of it; what is said of the link is replaced later."""
    torch.set_num_threads(1)
    half = num_nodes // 2
    one, other = (planted_partition(half, degree, num_features=FEATURES) for degree in DEGREES)
    data = Data(
        x=torch.cat([one.x, other.x]),
        edge_index=torch.cat([one.edge_index, other.edge_index + half], dim=1),
    )
    model = model_of(num_nodes)
    graph = gas.cluster(
        data, num_nodes // PART_NODES, model=model, method="kaminpar", log=False, cache=False
    )
    loader = gas.SubgraphLoader(graph, layout="fused", log=False)
    measured = Machine.measure(model, loader, 1e9, 0.0, ranks=2, clock=time.process_time)
    return dataclasses.asdict(measured)


# Validation ---------------------------------------------------------------------------------------


def validated(num_ranks: int, num_nodes: int) -> tuple[Data, gas.ScalableGNN]:
    """Return the graph, in shards, and the model that local processes train."""
    data = planted_partition(num_nodes, AVG_DEGREE)
    data.train_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    torch.manual_seed(0)
    model = gas.models.GCN(data.num_nodes, data.num_features, 128, int(data.y.max()) + 1, 3, 0.3)
    options = {"model": model, "shards": num_ranks, "method": "kaminpar", "log": False}
    return gas.cluster(data, VALIDATED_PARTS, **options), model


def worker(num_nodes: int) -> None:
    """Train in one process of ``torchrun``, and print its time and bytes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank > 0:  # The first keeps the parts that the others find.
        torch.distributed.barrier()
    graph, model = validated(num_ranks, num_nodes)
    if rank == 0:
        torch.distributed.barrier()
    loader = gas.SubgraphLoader(graph, shuffle=True, layout="fused", log=False, cache=False)
    model = gas.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    warnings.filterwarnings("ignore", "A history was read before it was filled")
    gas.train_epoch(model, loader, optimizer)
    sent, waited = model.traffic.sent_bytes, model.traffic.waited_seconds
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(VALIDATED_EPOCHS):
        gas.train_epoch(model, loader, optimizer)
    found = {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "waited_seconds": model.traffic.waited_seconds - waited,
        "sent_bytes": model.traffic.sent_bytes - sent,
    }
    found = {key: value / VALIDATED_EPOCHS for key, value in found.items()}
    say_result(found)


def measure_one(num_nodes: int, ranks: int) -> dict[str, Any]:
    """Measure mini-batches of one thread, and messages of several processes."""
    torch.set_num_threads(1)
    graph, model = validated(1, num_nodes)
    loader = gas.SubgraphLoader(graph, layout="fused", log=False, cache=False)
    known = Machine.measure(model, loader, 1e9, 0.0, ranks=ranks, clock=time.process_time)
    return dataclasses.asdict(known)


COMPUTED = tuple(f"seconds_per_{name}" for name in ("step", "row", "halo_row", "edge"))


def measure_beside(memory: int, number: int, num_nodes: int) -> dict[str, Any]:
    """Return a machine on which so many processes compute at once: they share caches and memory."""
    one = alone(memory, measure_one, num_nodes, number if number > 1 else 0)
    with ThreadPoolExecutor(number) as pool:
        jobs = [pool.submit(alone, memory, measure_one, num_nodes, 0) for _ in range(number)]
        found = [one, *(job.result() for job in jobs)]
    failed = [each for each in found if "not_measured" in each]
    if failed:
        return failed[0]
    return one | {name: statistics.mean(each[name] for each in found[1:]) for name in COMPUTED}


def predict(num_ranks: int, num_nodes: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction for local processes of one thread."""
    graph, model = validated(num_ranks, num_nodes)
    known = Machine(**{**machine, "widths": tuple(machine["widths"])})
    if num_ranks == 1:
        graph.shards = torch.tensor([0, graph.num_nodes])
    found = simulate(graph, model, known)
    rows = found.total_history_bytes / num_ranks
    sending = 2 * rows / known.copy_bandwidth
    if num_ranks > 1:
        sending += known.seconds_per_exchange * found.steps
    return {
        "cpu_seconds": found.mean_compute_seconds + sending,
        "most_cpu_seconds": found.compute_seconds + found.copy_seconds,
        "history_bytes": rows,
        "sent_bytes": rows + found.header_bytes,
        "statistics": dataclasses.asdict(found.statistics),
    }


def validate(memory: int) -> list[dict[str, Any]]:
    """Compare predictions and measurements of one, two and four processes."""
    results: list[dict[str, Any]] = []
    for num_nodes in VALIDATED_NODES:
        for num_ranks in VALIDATED_RANKS:
            machine = measure_beside(memory, num_ranks, num_nodes)
            if "not_measured" in machine:
                return [machine]
            predicted = alone(memory, predict, num_ranks, num_nodes, machine)
            if "not_measured" in predicted:
                return [predicted]
            found = run_ranks(__file__, num_ranks, "--worker", str(num_nodes))
            known = {"ranks": num_ranks, "nodes": num_nodes, "machine": machine}
            results.append(known | {"predicted": predicted, "found": found})
    return results


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--root", default="data", help="where the larger graph is kept, 1.7 GB")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=STEPS)
    parser.add_argument("--large", action="store_true", help="100 million edges, too")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that a process may take")
    parser.add_argument(
        "--worker", type=int, help="be one process of a validation, of so many nodes"
    )
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return

    memory, content = int(args.memory * 2**30), load("ranks")
    content = {key: content[key] for key in STEPS if key in content}
    if "statistics" in args.only:
        found = {kind: alone(memory, count_small, kind, NODES) for kind in KINDS}
        content["statistics"] = found
    if args.large and "large" in args.only:
        folder = Path(args.root) / f"planted_ranks_{LARGE_NODES}"
        if not folder.exists():
            alone(memory, make_large, str(folder))
        content["large"] = {}
        for ranks in LARGE_RANKS:
            content["large"][str(ranks)] = alone(memory, count_large, str(folder), ranks)
            write_json(RESULTS / "ranks.json", content)  # It takes minutes: what is done is kept.
    if "validation" in args.only:
        content["validation"] = validate(memory)
    if "machine" in args.only:
        content["machine"] = alone(memory, measure, 64 * PART_NODES)
    text, results = tables(content)
    save("ranks", content | {"simulated": results}, text)


if __name__ == "__main__":
    main()
