"""Cost of an update of a dynamic graph, against partitioning and computing it anew.

    python benchmarks/dynamic.py

A GraphSAGE (3 layers of 64) on a planted graph of 200,000 nodes and 4 million edges, in 64 parts.
New nodes arrive with ten edges each to any nodes, in both directions, which reach as many others as
may be. ``update`` is what ``DynamicGraph`` does with them, ``refresh`` makes histories exact where
they have changed, ``predict`` gives the outputs of the new nodes; "anew" is ``gas.cluster`` without
its cache, and inference for all nodes. The last columns are how many outputs have changed, and the
largest difference from outputs on a graph that was made anew.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import make_parser, markdown, save
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gas
from gas.contrib.dynamic import DynamicGraph

DEGREE = 10


def arrival(data: Data, first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw new nodes with features of older ones, and edges between new and old nodes."""
    like = torch.randint(first, (count,))
    nodes = {"x": data.x[like % data.num_nodes], "y": data.y[like % data.num_nodes]}
    new = torch.arange(first, first + count).repeat_interleave(DEGREE)
    old = torch.randint(first, (count * DEGREE,))
    return nodes, torch.stack([torch.cat([new, old]), torch.cat([old, new])])


def timed(function: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    out = function()
    return time.perf_counter() - start, out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dataset", default="planted:200000", help="(%(default)s)")
    parser.add_argument("--num-parts", type=int, default=64)
    parser.add_argument("--arrivals", type=int, nargs="+", default=[1, 100, 10000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--note", default="", help="printed with the table")
    args = parser.parse_args()

    data, in_channels, out_channels = gas.get_data(args.root, args.dataset)
    data = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    net = GraphSAGE(in_channels, 64, num_layers=3, out_channels=out_channels).eval()
    model = gas.to_scalable(net, data)
    live = DynamicGraph(data, args.num_parts, model=model, log=False)
    model.predict(live.graph)
    edges, x = data.edge_index, data.x
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for count in args.arrivals:
        found: dict[str, list[float]] = {name: [] for name in ("update", "refresh", "predict")}
        for _ in range(args.repeats):
            nodes, added = arrival(data, live.num_nodes, count)
            update, new = timed(lambda n=nodes, e=added: live.update(n, e))
            refresh, changed = timed(live.update_histories)
            predict, out = timed(lambda n=new: model.predict(live.graph, nodes=n))
            for name, seconds in (("update", update), ("refresh", refresh), ("predict", predict)):
                found[name].append(seconds)
            edges, x = torch.cat([edges, added], 1), torch.cat([x, nodes["x"]])
        grown = Data(x=x, edge_index=edges)
        cut, graph = timed(
            lambda g=grown: gas.cluster(g, args.num_parts, model=model, cache=False, log=False)
        )
        twin = model.for_graph(grown.num_nodes)
        infer, every = timed(lambda t=twin, g=graph: t.predict(g))
        error = float((out - every[new]).abs().max() / every.abs().max())
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        anew = cut + infer
        results[str(count)] = {
            "seconds": found,
            "cluster_seconds": cut,
            "inference_seconds": infer,
            "refreshed": changed.numel(),
            "relative_error": error,
        }
        rows.append(
            [
                f"{count:,}",
                *(f"{1000 * medians[name]:.0f} ms" for name in found),
                f"{1000 * cut:.0f} ms",
                f"{1000 * infer:.0f} ms",
                f"{anew / sum(medians.values()):.1f}x",
                f"{changed.numel():,}",
                f"{error:.0e}",
            ]
        )
    header = ["new nodes", "update", "refresh", "predict", "anew: cut", "anew: inference"]
    header += ["anew over update", "outputs that changed", "difference"]
    about = (
        f"{args.dataset}, {data.num_edges:,} edges to begin with; medians of {args.repeats} "
        f"updates, anew once. {args.note}"
    ).strip()
    save("dynamic", {"note": args.note, "results": results}, f"{markdown(header, rows)}\n\n{about}")


if __name__ == "__main__":
    main()
