"""Cutting mini-batches: gas's relabelling against pyg_autoscale's, which hashes every edge.

    python benchmarks/relabel.py --root data

Both cut the same batches of METIS parts out of the same weighted graph. Medians of blocks of calls,
A B A B; pyg_autoscale is listed as not measured where it can't be imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_geometric.transforms as T
from common import imports, make_parser, markdown, save, time_in_turn

import gas
from gas.datasets import get_data
from gas.graph.edges import read_graph, to_csr
from gas.native.graph import Relabeler

CASES = {"Cora": (40, 10), "FacebookPagePage": (64, 8), "planted:200000": (64, 8)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()

    results: dict[str, object] = {}
    rows = []
    for dataset, (num_parts, batch_size) in CASES.items():
        data = T.GCNNorm()(get_data(args.root, dataset)[0])
        perm, ptr = gas.metis(data.edge_index, num_parts, num_nodes=data.num_nodes, log=False)
        edges = read_graph(gas.permute(data, perm, log=False))
        rowptr, col, e_id = to_csr(edges)
        weight = edges.weight if e_id is None else edges.weight[e_id]
        chosen = torch.randperm(num_parts, generator=torch.Generator().manual_seed(0))[:batch_size]
        nodes = torch.cat([torch.arange(ptr[p], ptr[p + 1]) for p in chosen.sort().values])
        relabel = Relabeler(rowptr, col, weight=weight)
        contenders: dict[str, Callable[[], object]] = {"gas": lambda: relabel(nodes)}  # noqa: B023
        if imports("torch_geometric_autoscale"):
            import torch_geometric_autoscale  # noqa: F401

            theirs = torch.ops.torch_geometric_autoscale.relabel_one_hop
            contenders["pyg_autoscale"] = lambda: theirs(rowptr, col, weight, nodes, True)  # noqa: B023
        times = time_in_turn(contenders, args.repeats, warm_up=2, calls=20)
        out_rowptr, _, _, n_id, _ = relabel(nodes)
        results[dataset] = {"seconds": times, "edges": int(out_rowptr[-1]), "nodes": n_id.numel()}
        mine = times["gas"]["median"]
        other = times.get("pyg_autoscale")
        rows.append(
            [
                dataset,
                f"{nodes.numel():,} + {n_id.numel() - nodes.numel():,}",
                f"{int(out_rowptr[-1]):,}",
                f"{1e3 * mine:.3f} ms",
                f"{1e3 * other['median']:.3f} ms" if other else "not measured",
                f"{other['median'] / mine:.1f}x" if other else "-",
            ]
        )
    header = ["graph", "nodes + halo", "edges", "gas", "pyg_autoscale", "ratio"]
    save("relabel", {"cases": results}, markdown(header, rows))


if __name__ == "__main__":
    main()
