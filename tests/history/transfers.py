"""A model whose transfers overlap with the computation, its training, and a store that is slow."""

import time

import torch
from user_models import SAGE

from gas.history import MemoryStore


def make_model(graph, **kwargs):
    torch.manual_seed(0)
    model = SAGE(200, 5, 3, **kwargs)
    with torch.no_grad():
        model(graph[0].x, graph[0].edge_index, fill=True)
    return model


def train(model, loader, epochs=2):
    """Return the losses of some epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for batch, *args in loader:
            optimizer.zero_grad()
            loss = model(batch.x, batch.adj_t, *args).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


class Slow(MemoryStore):
    """A store whose jobs take a while."""

    seconds = 0.001

    def read(self, index, out):
        time.sleep(self.seconds)
        super().read(index, out)

    def write(self, index, rows):
        time.sleep(self.seconds)
        super().write(index, rows)
