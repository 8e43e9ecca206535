"""Imports a graph that needn't fit memory into a graph folder, perhaps cut into parts.

    python examples/import_graph.py tables graph                  # tables/edges.csv, nodes.csv, ...
    python examples/import_graph.py edges.parquet graph --undirected --memory 4GB
    python examples/import_graph.py tables graph --columns source=payer target=payee --num-parts 400

What was interrupted goes on when it is called again. ``gas.open_graph("graph")`` maps the result.
With ``--num-parts`` the graph is cut as well, which takes memory for all its edges: the parts are
in the folder, the imported graph next to it (``graph.imported``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gas
from gas.datasets import import_graph


def pair(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't ROLE=NAME, such as source=payer")
    return role, name


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="folder of tables and arrays, or a file of edges")
    parser.add_argument("out", help="the graph folder, which isn't there yet, or was unfinished")
    parser.add_argument("--undirected", action="store_true", help="add the reverse of each edge")
    parser.add_argument(
        "--columns", nargs="+", type=pair, default=[], metavar="ROLE=NAME", help="their names"
    )
    parser.add_argument("--dtype", help="of stored features: float16, bfloat16, int8, ...")
    parser.add_argument("--memory", default="1GB", help="for reading and sorting (%(default)s)")
    parser.add_argument("--num-parts", type=int, help="cut the graph into so many parts")
    parser.add_argument("--method", default="auto", help="that cuts it (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    whole = args.out if args.num_parts is None else f"{args.out}.imported"
    if args.num_parts is not None and Path(whole, "graph.json").exists():
        graph = gas.open_graph(whole)  # An earlier call has got that far.
    else:
        graph = import_graph(
            args.source,
            whole,
            undirected=args.undirected,
            columns=dict(args.columns),
            dtype=args.dtype,
            memory=args.memory,
        )
    if args.num_parts is not None:
        graph = gas.cluster(graph, args.num_parts, method=args.method, out=args.out)
    print(graph)


if __name__ == "__main__":
    main()
