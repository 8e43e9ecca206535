"""Models as a user writes them: a subclass, a few PyG layers, ``push_and_pull``; and their use."""

import itertools

import torch
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gas


class UserModel(gas.ScalableGNN):
    """A model of three layers with batch norm, a residual and jumping knowledge."""

    def __init__(self, num_nodes, in_channels, out_channels, hidden=8, **kwargs):
        super().__init__(num_nodes, hidden, num_layers=3, **kwargs)
        widths = [in_channels, hidden, hidden, hidden]
        self.convs = torch.nn.ModuleList(self.conv(i, o) for i, o in itertools.pairwise(widths))
        self.bn = torch.nn.BatchNorm1d(hidden)
        self.bn.running_mean.uniform_(-1, 1)
        self.bn.running_var.uniform_(0.5, 2)
        self.lin = torch.nn.Linear(3 * hidden, out_channels)

    def apply_conv(self, conv, x, adj_t, batch_size, edge_weight):
        return conv((x, x[:batch_size]), adj_t)

    def forward(self, x, adj_t, *args, edge_weight=None):
        batch_size = args[0] if args else None
        outs = []
        for layer, conv in enumerate(self.convs):
            h = self.apply_conv(conv, x, adj_t, batch_size, edge_weight)[:batch_size]
            if layer == 1:
                h = self.bn(h) + x[: h.size(0)]
            h = h.relu()
            outs.append(h)
            if layer < 2:
                x = self.push_and_pull(self.histories[layer], h, *args)
        return self.lin(torch.cat(outs, dim=-1))


class SAGE(UserModel):
    conv = staticmethod(SAGEConv)


class GIN(UserModel):
    @staticmethod
    def conv(i, o):
        return GINConv(torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU()), train_eps=True)


class GAT(UserModel):
    @staticmethod
    def conv(i, o):
        return GATConv(i, o // 2, heads=2, add_self_loops=False)


class SquareSAGE(SAGE):
    """Calls its layers as on a full graph, which needs square batches."""

    def apply_conv(self, conv, x, adj_t, batch_size, edge_weight):
        return conv(x, adj_t)


class SquareGIN(GIN):
    """Calls its layers as on a full graph, which needs square batches."""

    def apply_conv(self, conv, x, adj_t, batch_size, edge_weight):
        return conv(x, adj_t)


class SquareGAT(GAT):
    """With PyG's default self-loops, which it adds to halo rows too."""

    @staticmethod
    def conv(i, o):
        return GATConv(i, o // 2, heads=2)

    def apply_conv(self, conv, x, adj_t, batch_size, edge_weight):
        return conv(x, adj_t)


class SharedGCN(UserModel):
    """One layer's weights used for all layers but the first."""

    @staticmethod
    def conv(i, o):
        return GCNConv(i, o, normalize=False)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.convs[2] = self.convs[1]

    def apply_conv(self, conv, x, adj_t, batch_size, edge_weight):
        return conv(x, adj_t, edge_weight)


BIPARTITE = {"SAGE": SAGE, "GIN": GIN, "GAT": GAT, "SharedGCN": SharedGCN}
SQUARE = {"SquareSAGE": SquareSAGE, "SquareGIN": SquareGIN, "SquareGAT": SquareGAT}


def batch_of(graph, number=0, **options):
    return list(gas.SubgraphLoader(*graph, batch_size=2, log=False, **options))[number]


def fill(model, graph):
    """Fill the histories; return what they hold then."""
    model(graph[0].x, graph[0].edge_index, fill=True)
    return [history.emb.clone() for history in model.histories]


def unchanged(model, before):
    """Return whether the histories are unchanged."""
    return all(torch.equal(h.emb, b) for h, b in zip(model.histories, before, strict=True))
