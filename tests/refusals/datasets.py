"""Errors of ``gas.datasets``: names, downloads, and files that hold no graph."""

import io
import sys
import zipfile

import numpy as np
import torch
from torch_geometric.data import Data

import gas
from refusals import raising

EDGES = np.array([[0, 1], [1, 0]])
ONES = np.ones((2, 3))
CLASSES = np.array([0, 1])
NO_NETWORK = OSError("Network is unreachable")


def get(t, name, **options):
    return gas.get_data(t.path, name, **options)


def npz(t, **changes):
    arrays = {"x": ONES, "y": CLASSES, "edge_index": EDGES, **changes}
    np.savez(t.path / "g.npz", **{key: value for key, value in arrays.items() if value is not None})
    get(t, str(t.path / "g.npz"))


def pt(t, content):
    torch.save(content, t.path / "g.pt")
    get(t, str(t.path / "g.pt"))


def damaged(t, name, content=b"letters"):
    (t.path / name).write_bytes(content)
    get(t, str(t.path / name))


def cut_off(t):
    np.savez(t.path / "whole.npz", x=ONES)
    damaged(t, "g.npz", (t.path / "whole.npz").read_bytes()[:200])


def short_array(t):
    whole = io.BytesIO()
    np.save(whole, ONES)
    with zipfile.ZipFile(t.path / "g.npz", "w") as file:
        file.writestr("x.npy", whole.getvalue()[:64])
    get(t, str(t.path / "g.npz"))


def unreachable(t, name):
    t.patch.setattr("torch_geometric.datasets.Planetoid.download", raising(NO_NETWORK))
    get(t, name)


def ogb(t, package):
    t.patch.setitem(sys.modules, "ogb", package)
    t.patch.setitem(sys.modules, "ogb.nodeproppred", package)
    get(t, "ogbn-arxiv")


class Ogb:
    """The package, without a network."""

    PygNodePropPredDataset = raising(NO_NETWORK)


MASKS = {f"{part}_mask": np.array([True, False]) for part in ("train", "val", "test")}

CASES = {
    "get_data, an unknown name": lambda t: get(t, "coral"),
    "get_data, planted without a size": lambda t: get(t, "planted:many"),
    "get_data, no network": lambda t: unreachable(t, "cora"),
    "get_data, ogb is missing": lambda t: ogb(t, None),
    "get_data, ogb without a network": lambda t: ogb(t, Ogb),
    "get_data, a file of another kind": lambda t: get(t, str(t.path / "graph.csv")),
    "get_data, a file that isn't there": lambda t: get(t, str(t.path / "graph.npz")),
    "npz, letters": lambda t: damaged(t, "g.npz"),
    "npz, empty": lambda t: damaged(t, "g.npz", b""),
    "npz, cut off": cut_off,
    "npz, an array cut off": short_array,
    "npz, pickled objects": lambda t: npz(t, y=np.array([{}, {}])),
    "npz, text": lambda t: npz(t, y=np.array(["a", "b"])),
    "npz, no features": lambda t: npz(t, x=None),
    "npz, features in one row": lambda t: npz(t, x=np.ones(2)),
    "npz, features that are NaN": lambda t: npz(t, x=np.full((2, 3), np.nan)),
    "npz, real targets that are NaN": lambda t: npz(t, y=np.array([0.5, np.nan])),
    "npz, classes below -1": lambda t: npz(t, y=np.array([0, -2])),
    "npz, a mask of indices": lambda t: npz(t, train_mask=np.array([0, 5])),
    "npz, a training mask alone": lambda t: npz(t, train_mask=MASKS["train_mask"]),
    "npz, a training node of no class": lambda t: npz(t, **MASKS, y=np.array([-1, 0])),
    "npz, an edge to a missing node": lambda t: npz(t, edge_index=EDGES + 1),
    "npz, no edges": lambda t: npz(t, edge_index=None),
    "pt, letters": lambda t: damaged(t, "g.pt"),
    "pt, a list": lambda t: pt(t, [torch.ones(1)]),
    "pt, code": lambda t: pt(t, {"x": Ogb()}),
    "pt, a Data without targets": lambda t: pt(t, Data(x=torch.ones(2, 3))),
}
