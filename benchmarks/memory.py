"""Peak memory of a training epoch: as models get deeper, and as the graph grows.

    python benchmarks/memory.py --root data
    python benchmarks/memory.py --device cuda --quick    # a minute, on generated graphs

Every number is the median of some trainings of one epoch; slow ones run once. In host memory each
has a process of its own, and the number is the growth of the resident set: the peak over what was
resident before, when the graph, the model, the loader and gas's histories were all in place, and a
small graph had been trained on, so that libraries had been loaded. Resident memory is what the
system gave, so it includes what the allocator keeps of freed blocks. On CUDA it is all that PyTorch
has allocated on the device at the peak, but for the workspaces of libraries: the graph only for the
full batch, of gas the next batch as well, and never the histories, which stay in host memory.

Percentages are edges used: those over which an epoch aggregates, of all edges into the nodes that
its steps compute. The rest were not sampled, or leave the batch. gas uses every edge; behind those
that leave the batch is a history. The last column is gas, with its histories, over its own full
batch.

The memory of the whole process, libraries, graph and histories included, is that of a deep GCN
after some epochs, with smaller batches and less exact histories.

As the graph grows, parts and parts per batch stay as large as they were. Where edges lead anywhere
and hubs grow with the graph (``planted``), batches get more halo nodes nevertheless; where the
neighbours of a node are near it (``ring``), they don't.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch_geometric.transforms as T
from common import add_options, make_parser, markdown, read_options, run_apart, save
from contenders import MAKERS, Case, Contender, Graph, ahead, own_model, prepare
from torch_geometric.data import Data
from tqdm import tqdm

import gas
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.training import release_freed_memory, train_epoch

METHODS = ("PyG full batch", "gas full batch", "NeighborLoader", "ClusterLoader", "gas")
SMALL = Case("planted:2000", 2, 128, 64, 4, 0.3)
CASES = (
    Case("FacebookPagePage", 2, 128, 64, 4, 0.3),
    Case("planted:200000", 2, 128, 64, 8, 0.3),
)
QUICK = (Case("planted:20000", 2, 128, 64, 8, 0.3),)
NODES_PER_PART = 250
PARTS_PER_BATCH = 2
# Of a whole process: contender, parts, parts per batch, precision of histories.
WHOLE = (
    ("gas full batch", 64, 8, "float32"),
    ("gas", 64, 8, "float32"),
    ("gas", 512, 8, "float32"),
    ("gas", 512, 8, "bfloat16"),
)
EPOCHS = 3
# As graphs grow, so do epochs: all train until the allocator has settled, and not much longer.
LEAST_STEPS, MOST_STEPS = 100, 1000


# One measurement ----------------------------------------------------------------------------------


def train(path: str, method: str, case: Case, device: str, least_steps: int) -> int:
    """Train for an epoch, or for more of them to reach a number of steps; return bytes."""
    graph, small = torch.load(path, weights_only=False)
    torch.manual_seed(0)
    make = BY_SIZE[method] if least_steps > 1 else MAKERS[method]
    make(case, small, device).epoch()
    if device == "cuda":
        release_freed_memory()
        workspaces = torch.cuda.memory_allocated()  # Of libraries, which keep them.
    contender = make(case, graph, device)
    release_freed_memory()  # An epoch can't reuse it unnoticed.
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    reset_peak_rss()
    before = peak_rss_bytes()
    for _ in range(0, least_steps, case.num_steps):
        contender.epoch()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() - workspaces
    return peak_rss_bytes() - before


def train_whole(path: str, method: str, case: Case, dtype: str) -> dict[str, float]:
    """Train for some epochs; return the peak of the process's memory, and seconds of an epoch."""
    graph, _ = torch.load(path, weights_only=False)
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, dtype)} if method == "gas" else {}
    contender = MAKERS[method](case, graph, "cpu", **options)
    if isinstance(contender.batches, gas.SubgraphLoader):
        contender.batches.forget_edges()
    del graph  # Its edges; loaders and full batches have their own.
    release_freed_memory()
    reset_peak_rss()
    seconds = []
    for _ in range(1 + EPOCHS):
        start = time.perf_counter()
        contender.epoch()
        seconds.append(time.perf_counter() - start)
    return {"peak_bytes": peak_rss_bytes(), "epoch_seconds": statistics.median(seconds[1:])}


def make_some_steps(case: Case, graph: Graph, device: str = "cpu") -> Contender:
    """Make a training function of gas with a limit of steps; histories start as zeros."""
    model = own_model(case, graph).to(device)
    for history in model.histories:
        history.push(torch.zeros(graph.data.num_nodes, case.hidden_channels))
    loader = gas.SubgraphLoader(
        graph.data, graph.ptr, case.batch_size, shuffle=True, layout="fused", log=False
    )
    batches = ahead(loader, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return Contender(
        model, batches, lambda: train_epoch(model, batches, optimizer, max_steps=MOST_STEPS)
    )


BY_SIZE = {"gas": make_some_steps}


# Cells of the tables ------------------------------------------------------------------------------


@contextmanager
def stored(graph: Graph, small: Graph) -> Iterator[str]:
    """Write what processes read: they would count it as their own if they made it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "graph.pt")
        torch.save((graph, small), path)
        yield path


def measure(
    args: argparse.Namespace,
    path: str,
    graph: Graph,
    method: str,
    case: Case,
    device: str,
    least_steps: int = 1,
) -> dict[str, Any]:
    """Measure one cell; return it, or the reason of its absence."""
    values: list[int] = []
    seconds = 0.0
    try:
        while len(values) < args.repeats and seconds < args.slow_seconds:
            start = time.perf_counter()
            job = path, method, case, device, least_steps
            # On a device there are exact counts without a process of its own.
            values.append(train(*job) if device == "cuda" else run_apart(train, *job))
            seconds = time.perf_counter() - start
    except Exception as error:  # Absent packages, and processes that ran out of memory.
        if method == "gas":
            raise
        return {"not_measured": f"{type(error).__name__}: {error}"}
    data = copy.copy(graph.data)
    data.degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    make = BY_SIZE[method] if least_steps > 1 else MAKERS[method]
    contender = make(case, graph._replace(data=data))
    histories = getattr(contender.model, "histories", ())
    return {
        "peak_bytes": statistics.median(values),
        "peak_bytes_values": values,
        "history_bytes": sum(history.store.nbytes for history in histories),
        "graph_bytes": sum(value.nbytes for _, value in graph.data),
        **count(contender),
    }


def count(contender: Contender) -> dict[str, Any]:
    """Return the nodes of the largest batch, and the fraction of edges that an epoch uses."""
    nodes = used = available = 0
    for batch in contender.batches:
        data = batch.data if isinstance(batch, gas.SubData) else batch
        nodes = max(nodes, data.num_nodes)
        fused = isinstance(data.adj_t, gas.nn.Adjacency)
        edges = data.adj_t.degree() if fused else data.adj_t.crow_indices().diff()
        computed = edges > 0  # The others, of degree 1 at least, are read but not computed.
        used += int(edges.sum())
        available += int(data.degree[: edges.numel()][computed].sum())
    return {"most_nodes": nodes, "edges_used": used / available}


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def ring(num_nodes: int, degree: int = 20, reach: int = 100) -> Data:
    """Make a ring with edges to near nodes: neighbourhoods are the same at any size."""
    generator = torch.Generator().manual_seed(0)
    src = torch.arange(num_nodes).repeat_interleave(degree // 2)
    step = torch.randint(1, reach + 1, src.shape, generator=generator)
    dst = (src + step) % num_nodes
    return Data(
        x=torch.randn(num_nodes, 64, generator=generator),
        y=torch.randint(16, (num_nodes,), generator=generator),
        edge_index=torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.5,
    )


def cut_ring(num_nodes: int, num_parts: int) -> Graph:
    """Return a normalised ring, and arcs of it, which no partition could better."""
    ptr = torch.arange(num_parts + 1) * num_nodes // num_parts
    return Graph(T.GCNNorm()(ring(num_nodes)), ptr, 16)


# Tables -------------------------------------------------------------------------------------------


def by_depth(args: argparse.Namespace, small: Graph) -> tuple[list[dict[str, Any]], str]:
    """Return peak memory of every method as the model gets deeper."""
    results, rows = [], []
    for case in QUICK if args.quick else CASES:
        if args.datasets is not None and case.dataset not in args.datasets:
            continue
        graph = prepare(args.root, case)
        with stored(graph, small) as path:
            for depth in tqdm(args.layers, desc=f"{case.dataset}, {args.device}"):
                deep = replace(case, num_layers=depth)
                cells = {
                    method: measure(args, path, graph, method, deep, args.device)
                    for method in METHODS
                }
                results.append({"device": args.device, "settings": vars(deep), "methods": cells})
                rows.append([case.dataset, args.device, depth, *depth_row(cells)])
    header = ["graph", "device", "layers", *METHODS, "gas, with histories", "over gas full batch"]
    return results, markdown(header, rows)


def depth_row(cells: dict[str, dict[str, Any]]) -> list[str]:
    row = [
        "not measured"
        if "not_measured" in cell
        else f"{mebibytes(cell['peak_bytes'])}, {cell['edges_used']:.0%}"
        for cell in cells.values()
    ]
    own, whole = cells["gas"], cells["gas full batch"]
    bytes_of_all = own["peak_bytes"] + own["history_bytes"]
    if "not_measured" in whole:
        return [*row, mebibytes(bytes_of_all), "not measured"]
    return [*row, mebibytes(bytes_of_all), f"{bytes_of_all / whole['peak_bytes']:.2f}x"]


def by_size(args: argparse.Namespace, small: Graph) -> tuple[list[dict[str, Any]], str]:
    """Return peak memory of gas as the graph grows, while its parts and batches don't."""
    results, rows = [], []
    first: dict[str, float] = {}
    device = args.device
    for kind, all_sizes in (("planted", args.sizes), ("ring", args.ring_sizes)):
        for size in tqdm(all_sizes, desc=kind):
            parts = max(size // NODES_PER_PART, 1)
            case = Case(f"{kind}:{size}", 3, 128, parts, PARTS_PER_BATCH, 0.3)
            graph = cut_ring(size, parts) if kind == "ring" else prepare("", case)
            with stored(graph, small) as path:
                cell = measure(args, path, graph, "gas", case, device, LEAST_STEPS)
            base = first.setdefault(kind, cell["peak_bytes"])
            cell["ratio_over_smallest"] = cell["peak_bytes"] / base
            results.append({"device": device, "settings": vars(case), "gas": cell})
            rows.append([kind, f"{size:,}", device, *size_row(cell)])
    header = ["graph", "nodes", "device", "gas", "over smallest", "largest batch + halo, nodes"]
    return results, markdown([*header, "histories", "graph"], rows)


def of_process(args: argparse.Namespace, small: Graph) -> tuple[list[dict[str, Any]], str]:
    """Return the memory of whole processes on the CPU, and the time of their epochs, in turn."""
    if args.device != "cpu":
        return [], ""
    base = QUICK[0] if args.quick else CASES[1]
    deep = replace(base, num_layers=max(args.layers))
    cases = [replace(deep, num_parts=way[1], batch_size=way[2]) for way in WHOLE]
    found: list[list[dict[str, float]]] = [[] for _ in WHOLE]
    for _ in tqdm(range(args.repeats), desc="whole processes"):
        for (method, _, _, dtype), case, values in zip(WHOLE, cases, found, strict=True):
            with stored(prepare(args.root, case), small) as path:
                values.append(run_apart(train_whole, path, method, case, dtype))
    results, rows = [], []
    for way, case, values in zip(WHOLE, cases, found, strict=True):
        middle = {key: statistics.median(each[key] for each in values) for key in values[0]}
        results.append({"settings": vars(case), "method": way[0], "dtype": way[3], **middle})
        peak, seconds = (middle[key] / results[0][key] for key in middle)
        name = way[0] if way[0] != "gas" else f"{way[1]} parts, {way[2]} per batch, {way[3]}"
        rows.append([
            f"{case.dataset}, {case.num_layers} layers", name, mebibytes(middle["peak_bytes"]),
            f"{peak:.2f}x", f"{middle['epoch_seconds']:.2f} s", f"{seconds:.2f}x",
        ])  # fmt: skip
    header = ["graph", "training", "whole process", "over gas full batch", "epoch", "over its"]
    return results, markdown(header, rows)


def size_row(cell: dict[str, Any]) -> list[str]:
    return [
        mebibytes(cell["peak_bytes"]),
        f"{cell['ratio_over_smallest']:.2f}x",
        f"{cell['most_nodes']:,}",
        mebibytes(cell["history_bytes"]),
        mebibytes(cell["graph_bytes"]),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    add_options(parser, "memory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow-seconds", type=float, default=30.0)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4, 6])
    sizes = [2_000, 20_000, 200_000]
    parser.add_argument("--sizes", type=int, nargs="*", default=sizes)
    parser.add_argument("--ring-sizes", type=int, nargs="*", default=[*sizes, 1_000_000, 5_000_000])
    parser.add_argument("--datasets", nargs="*", help="a part of the cases")
    args = read_options(parser)
    if args.quick:  # Most of the time is that of starting processes.
        args.repeats, args.layers = 1, args.layers[:1]
        args.sizes, args.ring_sizes = args.sizes[:2], args.ring_sizes[:2]

    small = prepare(args.root, SMALL)
    depths, depth_table = by_depth(args, small)
    sizes, size_table = by_size(args, small)
    whole, whole_table = of_process(args, small)
    content = {"median_of": args.repeats, "by_depth": depths, "by_size": sizes, "process": whole}
    save(args.name, content, f"{depth_table}\n\n{size_table}\n\n{whole_table}")


if __name__ == "__main__":
    main()
