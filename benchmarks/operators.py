"""Time and memory of graph operators, forward and backward, against PyG, torch-sparse and DGL.

    python benchmarks/operators.py                       # the table that is kept, half an hour
    python benchmarks/operators.py --nodes 5000 --degrees 20 --widths 16 64
    python benchmarks/operators.py --device cuda --quick # on a GPU, some minutes

Random graphs: ``uniform`` gives every node the same number of edges on average, ``hubs`` draws
destinations by a power law (exponent 2.5), and in a ``star`` one node receives nine edges of ten,
so that sharing out whole rows would leave threads idle. Convolutions run on the whole graph, their
weights and the gradient towards the input included; products take a matrix with values and the
gradient towards the dense side. Transposes are made before: fixed batches keep theirs. Contenders
run in turn in one run, medians of some rounds. Memory is what a process holds at the peak of a
step, forward and backward, over what it held before, with all inputs there, in a process of its
own; it is measured on uniform graphs of degree 20. A convolution that didn't take the fused path
is an error; a contender that fails is left out, and the reason noted.

On a GPU a time is that of a call among ten, after which the host waits; memory is the peak of
PyTorch's allocator in this process, and PyG's layers and its gather and scatter run compiled, too
(``--compiled``), of which compiling takes most of the time. Results are saved after each operator,
and at Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
import torch_geometric.nn as pyg
from common import imports, make_parser, markdown, run_apart, save, time_in_turn
from torch import Tensor
from torch_geometric.utils import scatter

from gas import nn
from gas.cli.report import peak_rss_bytes, reset_peak_rss
from gas.nn import Adjacency
from gas.training import release_freed_memory

Step = Callable[[bool], object]  # Takes whether to run backward, too.
GRAPHS = ("uniform", "hubs", "star")
STAR = (20, 64)  # The degree and width that a star is measured with.
LARGE = ("GATConv", "uniform", 20, 256)  # Measured in any case: 8 heads of 32.
FIRST = ("spmm", "GATConv", "GATv2Conv")  # Of a quick run, which may be ended: what has goals.
CALLS = 10  # Of a GPU, between two waits.
# By kind of device: nodes, widths, and the most elements of edges x width.
SIZES: dict[str, tuple[int, list[int], int]] = {
    "cpu": (50_000, [16, 64, 256], 100_000_000),
    "cuda": (200_000, [8, 16, 32, 64, 128, 256], 1_100_000_000),
}


def make_graph(kind: str, nodes: int, degree: int) -> Tensor:
    """Return an ``edge_index`` of ``nodes * degree`` edges."""
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
        out = function(x)
        out.backward(torch.ones_like(out))
        x.grad = None  # It belongs to this step's memory, not to what was held before.

    return step


# Contenders, by name: what to run, given a graph --------------------------------------------------


def compiled(function: Any) -> Any:
    """Compile a function anew for every shape, without a limit."""
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return torch.compile(function, dynamic=False)


def products(
    edge_index: Tensor, nodes: int, width: int, compiles: bool
) -> dict[str, Callable[[], Step]]:
    device = edge_index.device
    value = torch.rand(edge_index.size(1), device=device)

    def x() -> Tensor:
        return torch.randn(nodes, width, device=device, requires_grad=True)

    def gather_and_scatter(x: Tensor) -> Tensor:
        messages = x.index_select(0, edge_index[0]) * value[:, None]
        return scatter(messages, edge_index[1], 0, nodes, "sum")

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
    if compiles:
        found["PyG"] = lambda: forward_backward(gather_and_scatter, x())
        found["PyG, compiled"] = lambda: forward_backward(compiled(gather_and_scatter), x())
    if imports("dgl"):
        found["DGL"] = lambda: dgl_product(edge_index, nodes, value, x())
    if imports("torch_sparse"):
        found["torch-sparse"] = torch_sparse
    return found


def convolutions(
    name: str, edge_index: Tensor, nodes: int, width: int, compiles: bool
) -> dict[str, Callable[[], Step]]:
    device = edge_index.device
    sizes: tuple[Any, ...] = (width, width)
    options: dict[str, Any] = {}
    if name in ("GATConv", "GATv2Conv"):
        sizes, options = (width, width // 8), {"heads": 8, "add_self_loops": False}
    if name == "GCNConv":
        options = {"normalize": False}
    if name == "GMMConv":
        options = {"dim": 2, "kernel_size": 3}

    def build(package: Any, adj: Any, compiles: bool = False) -> Step:
        arguments = sizes
        if name == "EdgeConv":
            linear = torch.nn.Linear(2 * width, width)
            arguments = (torch.nn.Sequential(linear, torch.nn.ReLU()),)
        conv = getattr(package, name)(*arguments, **options).to(device)
        x = torch.randn(nodes, width, device=device, requires_grad=True)
        extra: tuple[Tensor, ...] = ()
        if name == "GMMConv":
            extra = (torch.rand(edge_index.size(1), 2, device=device),)
        called = compiled(conv) if compiles else conv
        step = forward_backward(lambda x: called(x, adj, *extra), x)
        step(False)
        if package is nn and conv.path != "fused":
            raise RuntimeError(f"{name} took another way: {conv.path}")
        return step

    def ours() -> Step:
        adj = Adjacency.of(edge_index, nodes)
        _ = adj.matrix  # Makes the transpose.
        if name == "GCNConv":
            adj = Adjacency(adj.rowptr, adj.col, torch.ones(adj.num_entries, device=device))
            _ = adj.matrix
        return build(nn, adj)

    found = {
        "gas": ours,
        "PyG, edge_index": lambda: build(pyg, edge_index),
        "PyG, adj_t": lambda: build(pyg, Adjacency.of(edge_index, nodes).to_torch_sparse()),
    }
    if compiles:
        found["PyG, compiled"] = lambda: build(pyg, edge_index, compiles=True)
    if imports("dgl"):
        found["DGL"] = lambda: dgl_convolution(name, edge_index, nodes, width)
    return found


def dgl_graph(edge_index: Tensor, nodes: int) -> Any:
    """Return a graph of DGL in all of its formats, edges in the same order."""
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
    """Make the layer of DGL with that name; its EdgeConv has no activation."""
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
        extra = (torch.rand(edge_index.size(1), 2, device=edge_index.device),)
    elif name == "EdgeConv":
        conv = dgl_nn.EdgeConv(width, width, **options)
    else:
        conv = getattr(dgl_nn, name)(width, width // 8, 8, **options)
    conv = conv.to(edge_index.device)
    x = torch.randn(nodes, width, device=edge_index.device, requires_grad=True)
    return forward_backward(lambda x: conv(graph, x, *extra), x)


def contenders(
    operator: str,
    kind: str,
    nodes: int,
    degree: int,
    width: int,
    device: str,
    compiles: bool,
) -> dict[str, Callable[[], Step]]:
    edge_index = make_graph(kind, nodes, degree).to(device)
    if operator == "spmm":
        return products(edge_index, nodes, width, compiles)
    return convolutions(operator, edge_index, nodes, width, compiles)


def peak_on_gpu(step: Step) -> int:
    """Return the peak of PyTorch's allocator in one step, over the memory in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak(case: tuple[Any, ...], compiles: bool, name: str, threads: int) -> int:
    """Return the growth of resident memory in one step, in bytes; in a process of its own."""
    torch.set_num_threads(threads)
    step = contenders(*case, "cpu", compiles)[name]()
    step(True)
    release_freed_memory()
    reset_peak_rss()
    before = peak_rss_bytes()
    step(True)
    return peak_rss_bytes() - before


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--nodes", type=int, help="(default: 50,000, on a GPU 200,000)")
    parser.add_argument("--degrees", type=int, nargs="*")
    parser.add_argument("--widths", type=int, nargs="*")
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument(
        "--operators",
        nargs="*",
        default=["spmm", "GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "EdgeConv", "GMMConv"],
    )
    parser.add_argument("--most-elements", type=int, help="of edges x width")
    parser.add_argument("--repeats", type=int, help="(default: 5, with --quick 3)")
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="PyG by torch.compile, too (default: on a GPU)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="degree 20, no stars, convolutions of widths 64 and 256 on uniform graphs",
    )
    parser.add_argument("--name", help="of the results (default: operators, operators_cuda)")
    args = parser.parse_args()

    nodes, widths, most_elements = SIZES[args.device]
    nodes, most_elements = args.nodes or nodes, args.most_elements or most_elements
    degrees = args.degrees or ([20] if args.quick else [5, 20, 100])
    compiles = args.device == "cuda" if args.compiled is None else args.compiled
    repeats = args.repeats or (3 if args.quick else 5)
    name = args.name or ("operators" if args.device == "cpu" else "operators_cuda")
    operators = args.operators
    if args.quick:
        operators = sorted(operators, key=lambda operator: operator not in FIRST)

    results: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    for operator in operators:
        of_operator = [64, 256] if args.quick and operator != "spmm" else widths
        try:
            for kind, degree, width in itertools.product(
                args.graphs, degrees, args.widths or of_operator
            ):
                if kind == "star" and ((degree, width) != STAR or args.quick):
                    continue
                if kind == "hubs" and operator != "spmm" and args.quick:
                    continue
                large = nodes * degree * width > most_elements
                if large and (operator, kind, degree, width) != LARGE:
                    continue
                case = (operator, kind, nodes, degree, width)
                cell = measure(case, repeats, args.device, compiles)
                results.append({"case": case, "contenders": cell})
                rows.append([operator, kind, degree, width, *describe(cell)])
                print(rows[-1], flush=True)
        finally:  # Who is interrupted keeps what was measured.
            write(name, nodes, args.device, results, rows)


def write(
    name: str, nodes: int, device: str, results: list[dict[str, Any]], rows: list[list[Any]]
) -> None:
    header = ["operator", "graph", "degree", "width"]
    header += ["gas, forward", "others, time over gas"]
    header += ["gas, forward + backward", "others, time over gas"]
    header += ["gas, peak memory", "others, memory over gas"]
    peers = ("torch_sparse", "dgl") if device == "cpu" else ("torch_sparse", "dgl", "dgNN", "DFGNN")
    missing = [peer for peer in peers if not imports(peer)]
    note = f"\n\nNot measured, because not installed: {', '.join(missing)}." if missing else ""
    if "dgl" not in missing:
        note += f"\n\nDGL {importlib.metadata.version('dgl')}."
    failed = {
        f"{contender} ({entry['failed']})"
        for result in results
        for contender, entry in result["contenders"].items()
        if "failed" in entry
    }
    note += f"\n\nFailed: {'; '.join(sorted(failed))}." if failed else ""
    content = {"device": device, "nodes": nodes, "results": results, "not_measured": missing}
    save(name, content, markdown(header, rows) + note)


def measure(
    case: tuple[Any, ...], repeats: int, device: str, compiles: bool
) -> dict[str, dict[str, Any]]:
    cell: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, make in contenders(*case, device, compiles).items():
        try:
            step = make()
            step(True)
            steps[name] = step
        except Exception as error:
            if name == "gas":
                raise
            first_line = str(error).strip().partition("\n")[0]
            cell[name] = {"failed": f"{type(error).__name__}: {first_line}"}
    on_gpu = device == "cuda"

    def call(step: Step, backward: bool) -> None:
        for _ in range(CALLS if on_gpu else 1):
            step(backward)
        if on_gpu:
            torch.cuda.synchronize()

    for way in ("forward", "both"):
        functions = {name: partial(call, step, way == "both") for name, step in steps.items()}
        for name, times in time_in_turn(functions, repeats).items():
            cell.setdefault(name, {})[way] = times
            for key in ("median", "min", "max") if on_gpu else ():
                times[key] /= CALLS
    _, kind, _, degree, _ = case
    if kind == "uniform" and degree == 20:
        for name in steps:
            if on_gpu:
                cell[name]["peak_bytes"] = peak_on_gpu(steps[name])
                continue
            threads = torch.get_num_threads()
            cell[name]["peak_bytes"] = run_apart(peak, case, compiles, name, threads)
    return cell


def describe(cell: dict[str, dict[str, Any]]) -> list[str]:
    own = cell["gas"]
    others = {
        name: entry for name, entry in cell.items() if name != "gas" and "failed" not in entry
    }
    columns = []
    for way in ("forward", "both"):
        seconds = own[way]["median"]
        columns.append(f"{1000 * seconds:.1f} ms" if seconds > 0.01 else f"{1000 * seconds:.3f} ms")
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
