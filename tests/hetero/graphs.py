"""Typed graphs, and modules of them, for the tests."""

import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GATConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    Linear,
    SAGEConv,
    to_hetero,
)

SIZES = {"paper": 60, "author": 33, "venue": 5}
WIDTHS = {"paper": 8, "author": 5, "venue": 3}


def bibliography(seed=0, dtype=torch.float32):
    """Papers, authors and venues; papers cite papers, and nothing is in one relation."""
    generator = torch.Generator().manual_seed(seed)

    def ids(kind, size):
        return torch.randint(SIZES[kind], (size,), generator=generator)

    data = HeteroData()
    for kind, size in SIZES.items():
        data[kind].x = torch.randn(size, WIDTHS[kind], generator=generator, dtype=dtype)
    data["paper"].y = torch.randint(4, (60,), generator=generator)
    data["paper"].train_mask = torch.rand(60, generator=generator) < 0.5
    for src, name, dst, size in (
        ("author", "writes", "paper", 150),
        ("paper", "appears_in", "venue", 60),
        ("paper", "cites", "paper", 170),
        ("author", "reviews", "paper", 0),
    ):
        edges = torch.stack([ids(src, size), ids(dst, size)])
        data[src, name, dst].edge_index = edges
        if src != dst:
            data[dst, f"rev_{name}", src].edge_index = edges.flip(0)
    return data


class Convs(torch.nn.Module):
    """Encoders, some HeteroConv with a norm and dropout, and scores of papers."""

    def __init__(self, data, make, num_layers=3, p=0.5, add=False):
        super().__init__()
        kinds = data.node_types
        self.encoders = torch.nn.ModuleDict({kind: Linear(-1, 16) for kind in kinds})
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: make() for kind in data.edge_types}) for _ in range(num_layers)
        )
        self.norms = torch.nn.ModuleDict(
            {kind: torch.nn.LayerNorm(16) if add else torch.nn.BatchNorm1d(16) for kind in kinds}
        )
        self.scores, self.p, self.add = Linear(16, 4), p, add

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.encoders[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            out = conv(x_dict, edge_index_dict)
            out = {kind: self.norms[kind](x).relu() for kind, x in out.items()}
            if self.add:
                out = {kind: out[kind] + x for kind, x in x_dict.items()}
            x_dict = {kind: F.dropout(x, self.p, self.training) for kind, x in out.items()}
        return self.scores(x_dict["paper"])


class Transformer(torch.nn.Module):
    """HGT, with the outputs of all types."""

    def __init__(self, data):
        super().__init__()
        self.encoders = torch.nn.ModuleDict({kind: Linear(-1, 16) for kind in data.node_types})
        self.convs = torch.nn.ModuleList(HGTConv(16, 16, data.metadata(), 2) for _ in range(2))

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.encoders[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict


class ByHand(torch.nn.Module):
    """Layers of single relations, called one by one, with weights of edges."""

    def __init__(self, data):
        super().__init__()
        self.writes = GraphConv((5, 8), 8)
        self.cites = torch.nn.ModuleList(GraphConv(8, 8) for _ in range(2))

    def forward(self, x_dict, edge_index_dict, edge_weight_dict):
        writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
        x = self.writes((x_dict["author"], x_dict["paper"]), edge_index_dict[writes]).tanh()
        for conv in self.cites:
            x = conv(x, edge_index_dict[cites], edge_weight_dict[cites]).tanh()
        return {"paper": x}


class Embedded(torch.nn.Module):
    """Types without features have embeddings, whose gradients are sparse."""

    def __init__(self, net, sizes):
        super().__init__()
        self.net = net
        self.tables = torch.nn.ModuleDict(
            {kind: torch.nn.Embedding(size, 6, sparse=True) for kind, size in sizes.items()}
        )

    def forward(self, x_dict, edge_index_dict, n_id_dict):
        rows = {kind: table(n_id_dict[kind]) for kind, table in self.tables.items()}
        return self.net({**x_dict, **rows}, edge_index_dict)


def sage():
    return SAGEConv((-1, -1), 16)


def gat():
    return GATConv((-1, -1), 16, add_self_loops=False)


NETS = {
    "to_hetero": lambda data: to_hetero(
        GraphSAGE((-1, -1), 16, 3, 4, dropout=0.5), data.metadata()
    ),
    "to_hetero-jk": lambda data: to_hetero(
        GraphSAGE((-1, -1), 16, 2, 4, jk="cat"), data.metadata()
    ),
    "HeteroConv-SAGE": lambda data: Convs(data, sage),
    "HeteroConv-GAT": lambda data: Convs(data, gat, 2),
    "HeteroConv-added": lambda data: Convs(data, sage, 3, add=True),
    "HGT": Transformer,
    "by hand": ByHand,
}


def net_of(name, data):
    """Return a module, and what it reads of the graph is set."""
    torch.manual_seed(1)
    if name == "by hand":
        kind = "paper", "cites", "paper"
        data[kind].edge_weight = torch.rand(data[kind].num_edges, dtype=data["paper"].x.dtype)
    return NETS[name](data).to(data["paper"].x.dtype)


def flat(out):
    """Return all outputs in one row."""
    if isinstance(out, torch.Tensor):
        return out.flatten()
    return torch.cat([out[kind].flatten() for kind in sorted(out) if out[kind] is not None])
