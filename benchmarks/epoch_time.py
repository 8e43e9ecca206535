"""Time of a training epoch: gas against full-batch PyG and pyg_autoscale, in one run.

    python benchmarks/epoch_time.py --root data

Every contender trains the same GCN with the same settings on the same graph; epochs alternate. A
contender whose package can't be imported is listed as not measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from common import has, markdown, save, time_in_turn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from tqdm import tqdm

import gas
from gas.datasets import get_data
from gas.training import FullBatch, split_mask, train_epoch

CONTENDERS = ("gas", "PyG full batch", "pyg_autoscale")


@dataclass(frozen=True)
class Case:
    """One row of the table: a graph and the settings of its GCN."""

    dataset: str
    num_layers: int
    hidden_channels: int
    num_parts: int
    batch_size: int
    dropout: float


CASES = (
    Case("Cora", 2, 16, 40, 10, 0.5),
    Case("FacebookPagePage", 2, 64, 64, 8, 0.3),
    Case("planted:200000", 3, 128, 64, 8, 0.3),
)


class PlainGCN(torch.nn.Module):
    """The GCN as a user of PyG writes it."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            GCNConv(i, o, normalize=False) for i, o in itertools.pairwise(widths)
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor, adj_t: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = conv(F.dropout(x, self.dropout, self.training), adj_t).relu()
        return self.convs[-1](F.dropout(x, self.dropout, self.training), adj_t)


def gas_epoch(case: Case, data: Data, ptr: torch.Tensor, out_channels: int) -> Callable[[], object]:
    loader = gas.SubgraphLoader(data, ptr, case.batch_size, shuffle=True, log=False)
    model = gas.models.GCN(
        data.num_nodes,
        data.num_features,
        case.hidden_channels,
        out_channels,
        case.num_layers,
        case.dropout,
    )
    FullBatch(data)(model.eval(), fill=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return lambda: train_epoch(model, loader, optimizer)


def pyg_epoch(case: Case, data: Data, ptr: torch.Tensor, out_channels: int) -> Callable[[], object]:
    widths = [data.num_features, *[case.hidden_channels] * (case.num_layers - 1), out_channels]
    model = PlainGCN(widths, case.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    whole = FullBatch(data).data
    mask = split_mask(whole.train_mask, 0)

    def epoch() -> None:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(whole.x, whole.adj_t)[mask], whole.y[mask]).backward()
        optimizer.step()

    return epoch


def autoscale_epoch(
    case: Case, data: Data, ptr: torch.Tensor, out_channels: int
) -> Callable[[], object]:
    from torch_geometric_autoscale import SubgraphLoader
    from torch_geometric_autoscale.models import GCN

    data = T.ToSparseTensor(attr="edge_weight")(data.clone())
    loader = SubgraphLoader(data, ptr, batch_size=case.batch_size, shuffle=True, log=False)
    model = GCN(
        data.num_nodes,
        data.num_features,
        case.hidden_channels,
        out_channels,
        case.num_layers,
        dropout=case.dropout,
        device="cpu",
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> None:
        model.train()
        for batch, batch_size, n_id, offset, count in loader:
            mask = split_mask(batch.train_mask[:batch_size], 0)
            if not mask.any():
                continue
            optimizer.zero_grad()
            out = model(batch.x, batch.adj_t, batch_size, n_id, offset, count)
            F.cross_entropy(out[mask], batch.y[:batch_size][mask]).backward()
            optimizer.step()

    return epoch


def without_pinning() -> None:
    """Lets pyg_autoscale run without CUDA, where it asks for pinned memory nevertheless."""
    if torch.cuda.is_available():
        return
    empty = torch.empty

    def unpinned(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs)

    torch.empty = unpinned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--datasets", nargs="*", help="a part of the cases")
    args = parser.parse_args()

    makers = {"gas": gas_epoch, "PyG full batch": pyg_epoch}
    if has("torch_geometric_autoscale"):
        without_pinning()
        makers["pyg_autoscale"] = autoscale_epoch
    results: dict[str, object] = {}
    rows = []
    for case in tqdm([c for c in CASES if not args.datasets or c.dataset in args.datasets]):
        torch.manual_seed(0)
        data, _, out_channels = get_data(args.root, case.dataset)
        data = T.GCNNorm()(data)
        perm, ptr = gas.metis(data.edge_index, case.num_parts, num_nodes=data.num_nodes, log=False)
        data = gas.permute(data, perm, log=False)
        epochs = {name: make(case, data, ptr, out_channels) for name, make in makers.items()}
        repeats = args.repeats if data.num_nodes > 100_000 else 3 * args.repeats
        times = time_in_turn(epochs, repeats, warm_up=2)
        results[case.dataset] = {"settings": vars(case), "seconds": times}
        cells = [
            f"{1000 * times[name]['median']:.1f} ms" if name in times else "not measured"
            for name in CONTENDERS
        ]
        ratios = [
            f"{times[name]['median'] / times['gas']['median']:.2f}x" if name in times else "-"
            for name in CONTENDERS[1:]
        ]
        shape = (
            f"GCN {case.num_layers}x{case.hidden_channels}, {case.num_parts} / {case.batch_size}"
        )
        rows.append([case.dataset, shape, *cells, *ratios])
    table = markdown(
        ["graph", "model, parts / per batch", *CONTENDERS, "PyG / gas", "pyg_autoscale / gas"], rows
    )
    save("epoch_time", {"median_of": args.repeats, "cases": results}, table)


if __name__ == "__main__":
    main()
