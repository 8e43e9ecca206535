"""Time and memory of graph operators, forward and backward, against PyG, torch-sparse and DGL.

    python benchmarks/operators.py                       # the table that is kept, half an hour
    python benchmarks/operators.py --nodes 5000 --degrees 20 --widths 16 64

Random graphs: ``uniform`` gives every node the same number of edges on average, ``hubs`` draws
destinations by a power law (exponent 2.5), and in a ``star`` one node receives nine edges of ten,
so that sharing out whole rows would leave threads idle. Convolutions run on the whole graph, their
weights and the gradient towards the input included; products take a matrix with values and the
gradient towards the dense side. Transposes are made before: fixed batches keep theirs. Contenders
run in turn in one run, medians of some rounds. Memory is what a process holds at the peak of a
step, forward and backward, over what it held before, with all inputs there, in a process of its
own; it is measured on uniform graphs of degree 20. A convolution that didn't take the fused path
is an error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from common import imports, markdown, save, time_in_turn
from torch import Tensor

from gas import nn
from gas.nn import Adjacency
from gas.training.report import peak_rss_bytes, reset_peak_rss

Step = Callable[[bool], object]  # Takes whether to run backward, too.
GRAPHS = ("uniform", "hubs", "star")
STAR = (20, 64)  # The degree and width that a star is measured with.
LARGE = ("GATConv", "uniform", 20, 256)  # Measured in any case: 8 heads of 32.


def make_graph(kind: str, nodes: int, degree: int) -> Tensor:
    """An ``edge_index`` of ``nodes * degree`` edges."""
    generator = torch.Generator().manual_seed(0)
    size = nodes * degree
    src = torch.randint(nodes, (size,), generator=generator)
    if kind == "uniform":
        return torch.stack([src, torch.randint(nodes, (size,), generator=generator)])
    if kind == "star":
        dst = torch.randint(nodes, (size,), generator=generator)
        dst[torch.rand(size, generator=generator) < 0.9] = nodes // 2
        return torch.stack([src, dst])
    rank = torch.rand(size, generator=generator).clamp(min=1e-9).pow(-1 / 1.5) - 1
    order = torch.randperm(nodes, generator=generator)
    return torch.stack([src, order[(rank * nodes / 50).long().clamp(max=nodes - 1)]])


def forward_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    def step(backward: bool) -> None:
        if not backward:
            with torch.no_grad():
                function(x)
            return
        x.grad = None
        out = function(x)
        out.backward(torch.ones_like(out))

    return step


# Contenders, by name: what to run, given a graph --------------------------------------------------


def products(edge_index: Tensor, nodes: int, width: int) -> dict[str, Callable[[], Step]]:
    value = torch.rand(edge_index.size(1))

    def x() -> Tensor:
        return torch.randn(nodes, width, requires_grad=True)

    def ours() -> Step:
        adj = Adjacency.of(edge_index, nodes, value)
        _ = adj.matrix  # Makes the transpose.
        return forward_backward(lambda x: nn.spmm(adj, x), x())

    def torch_csr() -> Step:
        adj = Adjacency.of(edge_index, nodes, value).to_torch_sparse()
        return forward_backward(lambda x: adj @ x, x())

    def torch_sparse() -> Step:
        from torch_sparse import SparseTensor

        adj = SparseTensor(
            row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=(nodes, nodes)
        )
        adj.fill_cache_()
        return forward_backward(lambda x: adj @ x, x())

    def edge_index_class() -> Step:
        from torch_geometric import EdgeIndex

        sorted_index, perm = EdgeIndex(edge_index, sparse_size=(nodes, nodes)).sort_by("col")
        sorted_index.fill_cache_()
        return forward_backward(
            lambda x: sorted_index.matmul(x, input_value=value[perm], transpose=True), x()
        )

    found: dict[str, Callable[[], Step]] = {"gas": ours, "torch.sparse_csr": torch_csr}
    found["PyG EdgeIndex"] = edge_index_class
    if imports("dgl"):
        found["DGL"] = lambda: dgl_product(edge_index, nodes, value, x())
    if imports("torch_sparse"):
        found["torch-sparse"] = torch_sparse
    return found


def convolutions(
    name: str, edge_index: Tensor, nodes: int, width: int
) -> dict[str, Callable[[], Step]]:
    sizes: tuple[Any, ...] = (width, width)
    options: dict[str, Any] = {}
    if name in ("GATConv", "GATv2Conv"):
        sizes, options = (width, width // 8), {"heads": 8, "add_self_loops": False}
    if name == "GCNConv":
        options = {"normalize": False}
    if name == "GMMConv":
        options = {"dim": 2, "kernel_size": 3}

    def build(package: Any, adj: Any) -> Step:
        arguments = sizes
        if name == "EdgeConv":
            linear = torch.nn.Linear(2 * width, width)
            arguments = (torch.nn.Sequential(linear, torch.nn.ReLU()),)
        conv = getattr(package, name)(*arguments, **options)
        x = torch.randn(nodes, width, requires_grad=True)
        extra = (torch.rand(edge_index.size(1), 2),) if name == "GMMConv" else ()
        step = forward_backward(lambda x: conv(x, adj, *extra), x)
        step(False)
        if package is nn and conv.path != "fused":
            raise RuntimeError(f"{name} took another way: {conv.path}")
        return step

    def ours() -> Step:
        adj = Adjacency.of(edge_index, nodes)
        _ = adj.matrix  # Makes the transpose.
        if name == "GCNConv":
            adj = Adjacency(adj.rowptr, adj.col, torch.ones(adj.num_entries))
            _ = adj.matrix
        return build(nn, adj)

    found = {
        "gas": ours,
        "PyG, edge_index": lambda: build(pyg, edge_index),
        "PyG, adj_t": lambda: build(pyg, Adjacency.of(edge_index, nodes).to_torch_sparse()),
    }
    if imports("dgl"):
        found["DGL"] = lambda: dgl_convolution(name, edge_index, nodes, width)
    return found


def dgl_graph(edge_index: Tensor, nodes: int) -> Any:
    """A graph of DGL in all of its formats, edges in the same order."""
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes)
    graph = graph.formats(["coo", "csr", "csc"])
    graph.create_formats_()
    return graph


def dgl_product(edge_index: Tensor, nodes: int, value: Tensor, x: Tensor) -> Step:
    import dgl.ops

    graph = dgl_graph(edge_index, nodes)
    return forward_backward(lambda x: dgl.ops.u_mul_e_sum(graph, x, value[:, None]), x)


def dgl_convolution(name: str, edge_index: Tensor, nodes: int, width: int) -> Step:
    """DGL's layer of that name; its EdgeConv has no activation."""
    import dgl.nn.pytorch as dgl_nn

    graph = dgl_graph(edge_index, nodes)
    options = {"allow_zero_in_degree": True}
    extra: tuple[Tensor, ...] = ()
    if name == "GCNConv":
        conv = dgl_nn.GraphConv(width, width, norm="none", **options)
    elif name == "SAGEConv":
        conv = dgl_nn.SAGEConv(width, width, "mean")
    elif name == "GMMConv":
        conv = dgl_nn.GMMConv(width, width, 2, 3, "mean", **options)
        extra = (torch.rand(edge_index.size(1), 2),)
    elif name == "EdgeConv":
        conv = dgl_nn.EdgeConv(width, width, **options)
    else:
        conv = getattr(dgl_nn, name)(width, width // 8, 8, **options)
    x = torch.randn(nodes, width, requires_grad=True)
    return forward_backward(lambda x: conv(graph, x, *extra), x)


def contenders(
    operator: str, kind: str, nodes: int, degree: int, width: int
) -> dict[str, Callable[[], Step]]:
    edge_index = make_graph(kind, nodes, degree)
    if operator == "spmm":
        return products(edge_index, nodes, width)
    return convolutions(operator, edge_index, nodes, width)


def peak(case: tuple[Any, ...], name: str, threads: int) -> int:
    """The growth of resident memory in one step, in bytes; in a process of its own."""
    torch.set_num_threads(threads)
    step = contenders(*case)[name]()
    step(True)
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    reset_peak_rss()
    before = peak_rss_bytes()
    step(True)
    return peak_rss_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--degrees", type=int, nargs="*", default=[5, 20, 100])
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument(
        "--operators",
        nargs="*",
        default=["spmm", "GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "EdgeConv", "GMMConv"],
    )
    parser.add_argument("--most-elements", type=int, default=100_000_000, help="of edges x width")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="operators", help="of the results")
    args = parser.parse_args()

    results, rows = [], []
    for operator in args.operators:
        for kind in args.graphs:
            for degree in args.degrees:
                for width in args.widths:
                    if kind == "star" and (degree, width) != STAR:
                        continue
                    large = args.nodes * degree * width > args.most_elements
                    if large and (operator, kind, degree, width) != LARGE:
                        continue
                    case = (operator, kind, args.nodes, degree, width)
                    cell = measure(case, args.repeats)
                    results.append({"case": case, "contenders": cell})
                    rows.append([operator, kind, degree, width, *describe(cell)])
                    print(rows[-1], flush=True)
    header = ["operator", "graph", "degree", "width"]
    header += ["gas, forward", "others, time over gas"]
    header += ["gas, forward + backward", "others, time over gas"]
    header += ["gas, peak memory", "others, memory over gas"]
    missing = [name for name in ("torch_sparse", "dgl") if not imports(name)]
    note = f"\n\nNot measured, because not installed: {', '.join(missing)}." if missing else ""
    if "dgl" not in missing:
        note += f"\n\nDGL {importlib.metadata.version('dgl')}."
    content = {"nodes": args.nodes, "results": results, "not_measured": missing}
    save(args.name, content, markdown(header, rows) + note)


def measure(case: tuple[Any, ...], repeats: int) -> dict[str, dict[str, Any]]:
    steps = {name: make() for name, make in contenders(*case).items()}
    times = {
        way: time_in_turn({n: partial(step, way == "both") for n, step in steps.items()}, repeats)
        for way in ("forward", "both")
    }
    cell: dict[str, dict[str, Any]] = {
        name: {way: times[way][name] for way in times} for name in steps
    }
    _, kind, _, degree, _ = case
    if kind == "uniform" and degree == 20:
        del steps
        for name in cell:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                size = process.submit(peak, case, name, torch.get_num_threads()).result()
            cell[name]["peak_bytes"] = size
    return cell


def describe(cell: dict[str, dict[str, Any]]) -> list[str]:
    own = cell["gas"]
    others = {name: entry for name, entry in cell.items() if name != "gas"}
    columns = []
    for way in ("forward", "both"):
        seconds = own[way]["median"]
        columns.append(f"{1000 * seconds:.1f} ms")
        columns.append(
            ", ".join(f"{n} {e[way]['median'] / seconds:.1f}x" for n, e in others.items())
        )
    if "peak_bytes" not in own:
        return [*columns, "", ""]
    size = max(own["peak_bytes"], 1)
    columns.append(f"{size / 2**20:.0f} MiB")
    columns.append(", ".join(f"{n} {e['peak_bytes'] / size:.1f}x" for n, e in others.items()))
    return columns


if __name__ == "__main__":
    main()
