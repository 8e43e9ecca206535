"""Time of a layer of several relations that start at one type: their sums at once, or one by one.

    python benchmarks/relations.py                      # the table that is kept, some minutes
    python benchmarks/relations.py --sources 4000 --relations 2 --widths 64

``HeteroConv`` of SAGE layers, forward and backward with the gradient towards the sources, in one
thread and by its time on the processor. ``made anew`` includes what a mini-batch makes of its
edges: rows, transposes, and putting relations below one another; ``kept`` is a graph whose edges
stay. Products alone are what :func:`gas.nn.spmm` would do of the same. Contenders run in turn.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from itertools import product

import torch
from common import make_parser, markdown, save, time_in_turn
from torch_geometric.nn import HeteroConv, SAGEConv

import gas
from gas.nn import Adjacency, relations, spmm

Edges = dict[tuple[str, str, str], torch.Tensor]


def make_edges(sources: int, targets: int, degree: int, number: int) -> Edges:
    """Draw relations from one type to others, sorted as in mini-batches."""
    generator = torch.Generator().manual_seed(0)
    ends = (sources, targets)
    edges = {}
    for i in range(number):
        src, dst = (torch.randint(end, (targets * degree,), generator=generator) for end in ends)
        edges["s", "to", f"t{i}"] = torch.stack([src, dst.sort().values])
    return edges


def contenders(
    edges: Edges, sources: int, targets: int, width: int
) -> dict[str, Callable[[], object]]:
    sizes = {"s": sources} | {kind[2]: targets for kind in edges}
    theirs = HeteroConv({kind: SAGEConv(width, width) for kind in edges})
    ours = gas.fuse(HeteroConv({kind: SAGEConv(width, width) for kind in edges}))
    x_dict = {kind: torch.randn(size, width) for kind, size in sizes.items()}
    x = x_dict["s"].requires_grad_()
    grads = [torch.randn(targets, width) for _ in edges]

    def one_by_one() -> dict[tuple[str, str, str], Adjacency]:
        made = (relations({kind: each}, sizes) for kind, each in edges.items())
        return {kind: adj for each in made for kind, adj in each.items()}

    def together() -> dict[tuple[str, str, str], Adjacency]:
        return relations(edges, sizes)

    def layer(net: HeteroConv, edges: Callable[[], Edges]) -> Callable[[], None]:
        def step() -> None:
            x.grad = None
            out = net(x_dict, edges())
            torch.autograd.backward([out[kind] for kind in out], grads)

        return step

    def products(adjs: Callable[[], dict[tuple[str, str, str], Adjacency]]) -> Callable[[], None]:
        def step() -> None:
            x.grad = None
            made = adjs().values()
            sums = [
                spmm(adj, x, reduce="mean") if adj.sums_of is None else adj.sums_of(x, "mean")
                for adj in made
            ]
            torch.autograd.backward(sums, grads)

        return step

    kept = {"one by one": one_by_one(), "at once": together()}
    return {
        "PyG": layer(theirs, lambda: edges),
        "one by one, made anew": layer(ours, one_by_one),
        "at once, made anew": layer(ours, together),
        "one by one, kept": layer(ours, lambda: kept["one by one"]),
        "at once, kept": layer(ours, lambda: kept["at once"]),
        "products one by one, kept": products(lambda: kept["one by one"]),
        "products at once, kept": products(lambda: kept["at once"]),
    }


def main() -> None:
    parser = make_parser(__doc__, root=False)
    parser.add_argument("--sources", type=int, nargs="+", default=[500, 4000, 20000])
    parser.add_argument("--relations", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--degree", type=int, default=6, help="of a target (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "There exist node types")  # The sources.
    rows, kept = [], []
    for sources, number, width in product(args.sources, args.relations, args.widths):
        edges = make_edges(sources, sources // 2, args.degree, number)
        runs = contenders(edges, sources, sources // 2, width)
        times = time_in_turn(runs, args.rounds, warm_up=3, clock=time.process_time)
        ms = {name: 1e3 * time["median"] for name, time in times.items()}
        kept.append({"sources": sources, "relations": number, "width": width, "ms": ms})
        rows.append(
            [
                f"{sources:,}",
                number,
                width,
                f"{ms['at once, made anew']:.2f} ms",
                f"{ms['one by one, made anew'] / ms['at once, made anew']:.2f}x",
                f"{ms['PyG'] / ms['at once, made anew']:.2f}x",
                f"{ms['one by one, kept'] / ms['at once, kept']:.2f}x",
                f"{ms['products one by one, kept'] / ms['products at once, kept']:.2f}x",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    header = ["sources", "relations", "width", "at once", "one by one", "PyG"]
    header += ["one by one, both kept", "products alone"]
    save("relations", {"degree": args.degree, "rows": kept}, markdown(header, rows))


if __name__ == "__main__":
    main()
