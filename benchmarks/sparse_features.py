"""Time of a training epoch with sparse features, over that with the same ones dense, in one run.

    python benchmarks/sparse_features.py --root data

The GCN of ``epoch_time.py``, with histories and in our own full batch, on Cora (1.3 % of its
features aren't zero) and on generated graphs: of 3,703 features at 1 %, as many as CiteSeer has,
and of 500 at growing shares, which show from where on sparse features don't pay. Epochs alternate.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from common import make_parser, markdown, save, time_in_turn
from contenders import Case, Graph, make_gas, make_own_full_batch, partition, prepare
from tqdm import tqdm

import gas

CORA = Case("Cora", 2, 16, 40, 10, 0.5)
GENERATED = ((3703, 0.01), (500, 0.05), (500, 0.1), (500, 0.2))


def generated(case: Case, width: int, share: float) -> Graph:
    """Return a planted graph with features of ones, of which so many aren't zero."""
    data, _, out_channels = gas.get_data("data", case.dataset)
    data.x = (torch.rand(data.num_nodes, width) < share).float()
    return partition(data, case, out_channels)


def measure(case: Case, graph: Graph, repeats: int) -> dict[str, Any]:
    """Return seconds of an epoch of each contender."""
    thin = graph._replace(data=copy.copy(graph.data))
    thin.data.x = graph.data.x.to_sparse_csr()
    epochs = {}
    for name, given in (("dense", graph), ("sparse", thin)):
        epochs[f"histories, {name}"] = make_gas(case, given).epoch
        epochs[f"full batch, {name}"] = make_own_full_batch(case, given).epoch
    return time_in_turn(epochs, repeats, warm_up=2)


def main() -> None:
    parser = make_parser(__doc__, name="sparse_features")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--nodes", type=int, default=20_000, help="of generated graphs")
    args = parser.parse_args()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")

    results: list[dict[str, Any]] = []
    rows: list[list[object]] = []
    planted = Case(f"planted:{args.nodes}", 2, 64, 40, 10, 0.5)
    for width, share in tqdm(((None, None), *GENERATED)):
        case = CORA if width is None else planted
        graph = prepare(args.root, case) if width is None else generated(case, width, share or 0.0)
        share = float((graph.data.x != 0).float().mean())
        about = f"{case.dataset}, {graph.data.x.size(1):,} features, {100 * share:.1f} %"
        for threads in args.threads:
            torch.set_num_threads(threads)
            times = measure(case, graph, args.repeats if width else 5 * args.repeats)
            results.append({"graph": about, "threads": threads, "seconds": times})
            row: list[object] = [about, threads]
            for way in ("histories", "full batch"):
                dense, sparse = (times[f"{way}, {x}"]["median"] for x in ("dense", "sparse"))
                ratio = f"{dense / sparse:.2f}x"
                row.append(f"{1000 * dense:.1f} / {1000 * sparse:.1f} ms ({ratio})")
            rows.append(row)
    header = [
        "graph, features, not zero",
        "threads",
        "histories, dense / sparse",
        "full batch, dense / sparse",
    ]
    notes = "In brackets: how many times faster sparse features are."
    content = {"median_of": args.repeats, "cases": results}
    save(args.name, content, f"{markdown(header, rows)}\n\n{notes}")


if __name__ == "__main__":
    main()
