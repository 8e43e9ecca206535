"""Load graphs by name, with labels and masks: data sets of PyG, files, generated graphs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected

from gas.datasets.edges import with_reverse
from gas.datasets.files import SAFE_GLOBALS
from gas.datasets.masks import NUM_SPLITS, gen_masks, index2mask, select_split, with_masks
from gas.datasets.opening import open_graph
from gas.datasets.planted import planted_partition
from gas.datasets.tables import PARQUET, TEXT, format_of
from gas.graph import (
    MASKS,
    check_finite,
    is_graph_folder,
    permute,
    read_graph,
    to_csr_features,
    with_edge_index,
)
from gas.native import (
    accept_beta_state,
    cache_dir,
    check_flags,
    check_path,
    is_sparse,
    make_folder,
)


@check_flags
def get_data(
    root: str | Path,
    name: str | Path,
    check: bool = True,
    *,
    undirected: bool = False,
    columns: Mapping[str, str] | None = None,
    sparse_features: bool = False,
    split: int | Literal["all"] = 0,
    in_place: bool = False,
    log: bool = False,
) -> tuple[Data, int, int]:
    """Load a graph for node classification, with masks for training, validation and test.

    Args:
        root: The folder of PyG's data sets, with one folder per data set.
        name: One of :func:`dataset_names`, ignoring case and dashes; or ``planted:NUM_NODES`` for a
            generated graph; or a path that :func:`gas.open_graph` reads.
        check: Refuse NaN and infinite features. (default: ``True``)
        undirected: Add the reverse of every edge that lacks it. (default: ``False``)
        columns: Names of the columns of tables; see :func:`gas.open_graph`.
        sparse_features: Make ``x`` a ``torch.sparse_csr`` matrix. (default: as it is stored)
        split: The split whose masks are returned, if there are several, or ``"all"`` of them.
            (default: ``0``)
        in_place: Leave a graph folder where it is: the mapped graph of :func:`gas.open_graph`, in
            the order of its parts, with masks. (default: ``False``: in memory, as the original)
        log: Print a summary of files on standard error. (default: ``False``)

    Returns:
        The graph, its number of features, and its number of classes (of labels, for multi-label
        targets; 1 for real numbers). Masks have shape ``[N]``; with ``split="all"``,
        ``[N, splits]`` if there are several. ``data.split`` describes a random split.

    Raises:
        ValueError: If there is no such data set or split, or a file doesn't hold a usable graph.
        ConnectionError: If raw files are missing and can't be downloaded, naming them.
        ImportError: If pyarrow, for tables, or ogb, for its data sets, is missing.
    """
    name = _check_places(root, name)
    if columns and not _is_path(name):
        raise ValueError(f"'columns' is for tables, but 'dataset' is {name!r}: leave it out")
    if _is_planted(name):
        size = name.partition(":")[2]
        if not size.isdigit() or int(size) < 1:
            raise ValueError(
                f"'dataset' is {name!r}, expected planted:NUM_NODES, such as planted:200000"
            )
        data = planted_partition(int(size))
    elif _is_path(name):
        if not Path(name).exists():
            tables = Path(name).suffix not in (".pt", ".npz")
            what = ": expected a .pt or an .npz file, or tables, see gas.open_graph" * tables
            raise ValueError(f"'dataset' is {name!r}, but there is no such file{what}")
        data = open_graph(
            name, undirected=undirected, columns=columns, num_splits=None, check=check, log=log
        )
        for key in ("x", "y"):
            if key not in data:
                raise ValueError(f"{name} has no {key!r}: {_CURES[key]}")
        if is_graph_folder(name):
            data = _with_masks_in_place(data) if in_place else with_masks(undo_clustering(data))
    else:
        key = dataset_key(name)
        if key not in _DATASETS:
            raise ValueError(
                f"'dataset' is {name!r}, expected one of {', '.join(dataset_names())}; or "
                "planted:NUM_NODES; or the path of a folder of tables or of a .pt or .npz file"
            )
        make_folder("root", Path(root))
        data = _DATASETS[key][1](str(_writable_root(Path(root))))
    if not _is_path(name):
        read_graph(data)
        if check:
            check_finite("x", data.get("x"))
        if undirected:
            data = with_reverse(data)
        with_masks(data)
    if sparse_features and not is_sparse(data.x):
        accept_beta_state()
        data.x = to_csr_features(data.x.to_sparse_csr())
    if split != "all":
        select_split(data, split)
    return data, data.x.size(1), num_outputs(data.y)


def undo_clustering(data: Data) -> Data:
    """Return the graph of a folder in its original order, with an ``edge_index``."""
    perm = data.get("perm")
    data = with_edge_index(data)
    for key in ("perm", "parts", "shards", "batch_size"):
        if key in data:
            del data[key]
    if perm is None or torch.equal(perm, torch.arange(perm.numel())):
        return data
    return permute(data, torch.argsort(perm), log=False)


def _with_masks_in_place(data: Data) -> Data:
    """Set the masks of a clustered graph; random ones are those of the graph before."""
    perm, is_given = data.get("perm"), "split" in data
    with_masks(data)
    if perm is not None and not is_given and "split" in data:
        original = Data(y=torch.empty_like(data.y).index_copy_(0, perm, data.y))
        original.num_nodes = data.num_nodes
        with_masks(original)
        for key in MASKS:
            data[key] = original[key][perm]
    return data


# Cures for a missing attribute.
_CURES = {
    "x": "give columns of numbers in nodes.csv, or x.npy, with the features of nodes",
    "y": "call the column of nodes.csv that is to be predicted 'label', or pass "
    "columns={'label': ...}; or give y.npy",
}


def _check_places(root: Any, name: Any) -> str:
    """Refuse a folder and a data set that are none; return the name of the data set."""
    check_path("root", root, "the folder of PyG's data sets")
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"'dataset' is {name!r}, expected a name, such as 'Cora' or 'planted:5000', or a path"
        )
    return os.fspath(name)


def _is_path(name: str) -> bool:
    """Return whether the name of a data set is a path."""
    path = Path(name)
    known = format_of(path) in (".pt", ".npz", ".npy", *PARQUET, *TEXT)
    return known or os.sep in name or (path.is_dir() and dataset_key(name) not in _DATASETS)


def dataset_names() -> list[str]:
    """Return the names that :func:`get_data` knows."""
    return [name for name, _ in _DATASETS.values()]


def _is_planted(name: str) -> bool:
    """Return whether the name is ``planted:NUM_NODES``."""
    return name.partition(":")[0] == "planted" and not Path(name).is_file()


def dataset_key(name: str) -> str:
    """Return the normalised name of a data set."""
    if _is_planted(name):
        return "planted"
    key = name.lower().replace("-", "").replace("_", "")
    return {"reddit": "reddit2", "arxiv": "ogbnarxiv", "products": "ogbnproducts"}.get(key, key)


def num_outputs(y: Tensor) -> int:
    """Return the number of outputs of a model for given targets; see :func:`get_data`."""
    if y.dim() == 1 and y.is_floating_point():
        return 1
    return y.size(1) if y.dim() == 2 and y.size(1) > 1 else int(y.max()) + 1


# PyG's data sets ----------------------------------------------------------------------------------


def load_pyg(cls_name: str, root: str, *args: Any, **kwargs: Any) -> Data:
    """Load a data set of PyG; if the download fails, name the missing files and their folder."""
    base = getattr(importlib.import_module("torch_geometric.datasets"), cls_name)

    def download(self: Any) -> None:
        try:
            base.download(self)
        except Exception as error:
            missing = [path for path in self.raw_paths if not os.path.exists(path)]
            raise ConnectionError(
                f"the data set {cls_name} could not be downloaded ({error}): get these files on a "
                f"machine with network access and put them there:\n  " + "\n  ".join(missing)
            ) from error

    dataset = type(cls_name, (base,), {"download": download})(root, *args, **kwargs)
    return dataset[0] if len(dataset) == 1 else Batch.from_data_list(list(dataset))


def load_planetoid(root: str, name: str) -> Data:
    """Load Cora, CiteSeer or PubMed from ``root/name``; the features of a node sum to 1."""
    return T.NormalizeFeatures()(load_pyg("Planetoid", root, name))


def _load_with_few_labels(root: str, cls_name: str, name: str) -> Data:
    """Load Amazon and Coauthor with 20 training and 30 validation nodes per class."""
    data = load_pyg(cls_name, f"{root}/{cls_name}", name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        data.train_mask, data.val_mask, data.test_mask = gen_masks(data.y, 20, 30, NUM_SPLITS)
    return data


def load_wikics(folder: str) -> Data:
    """Load WikiCS; use its masks for early stopping as validation masks."""
    data = load_pyg("WikiCS", folder, is_undirected=True)
    data.val_mask = data.stopping_mask
    del data.stopping_mask
    return data


def load_standardised(cls_name: str, folder: str) -> Data:
    """Load a data set, and standardise its features to mean 0 and standard deviation 1."""
    data = load_pyg(cls_name, folder)
    data.x = (data.x - data.x.mean(dim=0)) / data.x.std(dim=0).clamp(min=1e-12)
    return data


def _load_ppi(root: str) -> Data:
    """Load all graphs of PPI as one, with masks for training, validation and test."""
    parts = [load_pyg("PPI", f"{root}/PPI", split) for split in ("train", "val", "test")]
    union = Batch.from_data_list([Data(x=p.x, y=p.y, edge_index=p.edge_index) for p in parts])
    data = Data(x=union.x, y=union.y, edge_index=union.edge_index)
    for number, key in enumerate(MASKS):
        data[key] = union.batch == number
    return data


def _load_ogb(root: str, name: str) -> Data:
    """Load a data set of OGB, with reverse edges."""
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f"the data set {name} needs the package ogb: pip install ogb") from error
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            dataset = PygNodePropPredDataset(name, f"{root}/OGB")
    except OSError as error:
        folder = Path(root, "OGB", name.replace("-", "_"))
        raise ConnectionError(
            f"the data set {name} could not be downloaded ({error}): unpack its archive in "
            f"{folder}, so that {folder}/raw exists"
        ) from error
    data, split = dataset[0], dataset.get_idx_split()
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        data[key] = index2mask(split[part], data.num_nodes)
    data.y = data.y.view(-1)
    data.edge_index = to_undirected(data.edge_index, num_nodes=data.num_nodes)
    return data


_load_heterophilous = partial(load_pyg, "HeterophilousGraphDataset")
_HETEROPHILOUS = ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions")
_NAMED: dict[str, Callable[[str], Data]] = {
    **{name: partial(load_planetoid, name=name) for name in ("Cora", "CiteSeer", "PubMed")},
    "AmazonComputers": partial(_load_with_few_labels, cls_name="Amazon", name="Computers"),
    "AmazonPhoto": partial(_load_with_few_labels, cls_name="Amazon", name="Photo"),
    "CoauthorCS": partial(_load_with_few_labels, cls_name="Coauthor", name="CS"),
    "CoauthorPhysics": partial(_load_with_few_labels, cls_name="Coauthor", name="Physics"),
    "WikiCS": lambda root: load_wikics(f"{root}/WikiCS"),
    "FacebookPagePage": lambda root: T.ToUndirected()(  # The file has each edge once.
        load_pyg("FacebookPagePage", f"{root}/FacebookPagePage")
    ),
    **{name: partial(_load_heterophilous, name=name) for name in _HETEROPHILOUS},
    "PPI": _load_ppi,
    "Flickr": lambda root: load_pyg("Flickr", f"{root}/Flickr"),
    "Reddit2": lambda root: load_standardised("Reddit2", f"{root}/Reddit2"),
    "Yelp": lambda root: load_standardised("Yelp", f"{root}/Yelp"),
    **{name: partial(_load_ogb, name=name) for name in ("ogbn-arxiv", "ogbn-products")},
}
_DATASETS = {dataset_key(name): (name, load) for name, load in _NAMED.items()}


def _writable_root(root: Path) -> Path:
    """Return the folder, or if it isn't writable, a cache folder with links to its raw files."""
    if not root.exists() or os.access(root, os.W_OK):
        return root
    mirror = cache_dir() / "datasets" / str(root.resolve()).strip(os.sep).replace(os.sep, "_")
    for raw in root.glob("**/raw/*"):
        link = mirror / raw.relative_to(root)
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(raw.resolve())
    return mirror
