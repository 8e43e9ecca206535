"""Training for the tests of checkpoints, rebuilt as another process would."""

import warnings

import torch
from torch.nn import functional as F

import gas
from gas.datasets.planted import planted_partition

EPOCHS = 3


def small_graph():
    data = planted_partition(300, avg_degree=6, num_classes=4, num_features=8, seed=1)
    data.train_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    return data


def training(data, augment=False, store=None, path=None, dtype=torch.float32, prefetch=None):
    """Return a model, its optimizer and its loader, as a program makes them whenever it starts."""
    torch.manual_seed(0)
    options = {"store": store, "path": path, "dtype": dtype, "prefetch": prefetch or 0}
    if augment:
        model = gas.models.GCN(
            data.num_nodes, 8, 16, 4, num_layers=3, dropout=0.3, batch_norm=True, **options
        )
        perm, ptr = gas.metis(data.edge_index, 6, num_nodes=data.num_nodes, log=False)
        graph = gas.permute(data, perm, log=False)
        chain = gas.MHAug(graph, **gas.augment.PUBLISHED["cora"][0], num_steps=3)
        loader = gas.SubgraphLoader(
            graph, ptr, 2, shuffle=True, layout="fused", epoch_transform=chain,
            graph_transform=gas.models.GCN.transform, log=False,
        )  # fmt: skip
    else:
        model = gas.models.GraphSAGE(data.num_nodes, 8, 16, 4, num_layers=3, dropout=0.3, **options)
        graph = gas.cluster(data, 6, model=model, log=False)
        loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    if prefetch is not None:
        loader = gas.PrefetchLoader(loader, model)
    return model, optimizer, loader


def losses(model, optimizer, loader, epochs, stop=None, save=None):
    """Return the loss of every step; ``stop`` after this many, once ``save`` was called."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(epochs):
            model.train()
            for batch in loader:
                if batch.data.get("views") is not None:
                    outs = model.views(batch, "per_view")
                    loss = gas.augment.mh_aug_loss(*outs, batch.own.y, torch.arange(len(outs[0])))
                else:
                    loss = F.cross_entropy(model(batch), batch.own.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(float(loss))
                if len(found) == stop:
                    save()
                    return found
    return found


CASES = {
    "host": {},
    "disk": {"store": "disk"},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": "int8"},
    "views": {"augment": True},
    "prefetch": {"prefetch": 0},
}
