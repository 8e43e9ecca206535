"""Outputs of some nodes, from one mini-batch around them and histories of their neighbours."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data

from gas.graph import MAPPED, PARTS, PERM, Ids, invert_permutation, to_original_order, version
from gas.loader import SubgraphLoader, unwrap_loader
from gas.native import check_range, share_cores, warn
from gas.scalable.base import preserve_modes
from gas.scalable.call import BatchModel

MOST_CHECKED = 1 << 22  # Numbers of a tensor, which take about a millisecond.
_TensorVersions = dict[str, tuple["weakref.ref[Tensor]", int]]
NotedState = tuple[Any, _TensorVersions]


class NodePredictor:
    """Compute the outputs of some nodes of a clustered graph.

    Args:
        loader: A loader of it.
    """

    def __init__(self, loader: SubgraphLoader) -> None:
        self.loader = loader
        self.row_of = invert_permutation(loader.data[PERM])
        self._ids: tuple[Any, Ids] | None = None  # The graph's node_id, and an index of it.

    def find_nodes(self, ids: Any) -> Tensor:
        """Find nodes by the user's ids, those of ``node_id``.

        Args:
            ids: The ids, a list, or an array or tensor of shape ``[B]``; some may be repeated.

        Returns:
            The rows of the graph before clustering, of shape ``[B]``.

        Raises:
            ValueError: If the graph has no ids, or lacks one of them.
        """
        data = graph_of(self.loader)
        given = data.get("node_id")
        if given is None:
            raise ValueError(
                "'ids' are given, but the graph has no 'node_id': set data.node_id, an array of "
                "the ids of its nodes, before gas.cluster, or pass their rows, nodes="
            )
        wanted = np.asarray(ids.tolist() if isinstance(ids, Tensor) else ids)
        if wanted.ndim != 1 or wanted.size == 0:
            raise ValueError(
                f"'ids' is {ids!r}, expected a list of one id or more: pass [id] for one"
            )
        if self._ids is None or not _are_equal(self._ids[0], given):
            found = _id_array(data, given)
            if len(found) != self.row_of.numel():
                raise ValueError(
                    f"'node_id' has {len(found)} ids, but the graph has {self.row_of.numel()} "
                    "nodes: expected one for each node"
                )
            self._ids = copy.deepcopy(given), Ids(found, self.row_of.numel())
            twice = self._ids[1].find_duplicate()
            if twice is not None:
                self._ids = None
                raise ValueError(
                    f"'node_id' of the graph has {twice!r} several times, expected an id for each "
                    "node: pass rows instead, nodes="
                )
        rows = self._ids[1].rows(wanted)
        if (rows < 0).any():
            missing = wanted[rows < 0].tolist()
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"'ids' holds {missing[0]!r}{more}, which no node of the graph has: "
                f"expected ids of its 'node_id', such as {_id_array(data, given)[:1].tolist()[0]!r}"
            )
        return torch.from_numpy(rows)

    def choose(self, nodes: Any = None, ids: Any = None) -> Tensor:
        """Return the rows of nodes before clustering, of shape ``[B]``, by a mask, rows, or ids."""
        if nodes is None:
            return self.find_nodes(ids)
        if not isinstance(nodes, Tensor):
            raise ValueError(
                f"'nodes' is {nodes!r}, expected a tensor of rows, or a mask: torch.tensor(nodes)"
            )
        is_mask, size = nodes.dtype == torch.bool, self.row_of.numel()
        if nodes.is_floating_point() or nodes.dim() != 1 or (is_mask and nodes.numel() != size):
            raise ValueError(
                f"'nodes' is {nodes.dtype} of shape {list(nodes.shape)}, expected the rows of "
                f"nodes, whole numbers of shape [B], or a mask of shape [{size}]"
            )
        if is_mask:
            return nodes.cpu().nonzero().view(-1)
        check_range("nodes", nodes, size)
        return nodes.cpu().long()

    @torch.no_grad()
    def predict(self, model: BatchModel, nodes: Tensor) -> Tensor:
        """Compute the outputs of some nodes, given their rows before clustering."""
        rows, place = self.row_of[nodes].unique(return_inverse=True)
        batch = self.loader.cut_nodes(rows)
        with preserve_modes(model, False), share_cores(self.loader.leave_cores):
            out = model._join_outputs(model(batch, push=False))
        _warn_if_stale(model, self.loader.data, batch.n_id[batch.batch_size :])
        return out.cpu()[place]


def graph_of(graph: Any) -> Data:
    """Return a graph, or that of a loader."""
    return graph if isinstance(graph, Data) else unwrap_loader(graph).data


def _are_equal(ids: Any, others: Any) -> bool:
    """Return whether two lists, arrays or tensors of ids are equal."""
    if type(ids) is not type(others):
        return False
    if isinstance(ids, Tensor):
        return torch.equal(ids, others)
    return np.array_equal(ids, others) if isinstance(ids, np.ndarray) else ids == others


def _id_array(data: Data, ids: Any) -> np.ndarray:
    """Return node ids as an array in the order of the original graph; tensors are permuted."""
    if isinstance(ids, Tensor):
        return to_original_order(data, ids.cpu()).numpy()
    return np.asarray(ids)


# State and graph of each model when its histories were last exact.
_exact: weakref.WeakKeyDictionary[BatchModel, NotedState]
_exact = weakref.WeakKeyDictionary()


def mark_exact(model: BatchModel, graph: Data | None) -> None:
    """Record that histories are exact for a model's current weights, and a graph if it is known."""
    _exact[model] = note_state(model, graph)


def is_exact(model: BatchModel, graph: Data) -> bool:
    """Return whether neither model nor graph have changed since the histories were exact."""
    return has_state(model, graph, _exact.get(model))


def note_state(model: BatchModel, graph: Data | None) -> NotedState:
    """Note what outputs depend on: the model's weights and histories, and a graph's tensors."""
    return state_fingerprint(model), {} if graph is None else _tensor_versions(graph)


def has_state(model: BatchModel, graph: Data, noted: NotedState | None) -> bool:
    """Return whether model and graph are as :func:`note_state` has noted; not for ``None``."""
    if noted is None or noted[0] != state_fingerprint(model):
        return False
    seen, now = noted[1], _tensor_versions(graph)
    both = ((now[key], seen[key]) for key in now.keys() & seen.keys())
    return all(new[0]() is old[0]() and new[1] == old[1] for new, old in both)


def state_fingerprint(model: BatchModel) -> Any:
    """Return a value that differs after changes of weights or histories, and under autocast."""
    tensors = [*model.parameters(), *model.buffers()]
    changes = [history.changes for history in model.histories]
    kind = model.device.type
    has_autocast = torch.amp.is_autocast_available(kind)  # Not of "meta".
    autocast = has_autocast and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return [_note_tensor(tensor) for tensor in tensors], changes, _checksums(tensors), autocast


def _note_tensor(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's identity, its address, 0 if it has none, and its version."""
    if torch.nn.parameter.is_lazy(tensor):
        return id(tensor), 0, 0
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return id(tensor), address, version(tensor)


def _checksums(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return sums of float32 numbers' bits: ``weight.data.mul_(2)`` leaves the version as it was.

    Large tensors, such as embeddings of nodes, are left out. Each device is waited for once.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        is_plain = type(each) in (Tensor, torch.nn.Parameter) and each.layout == torch.strided
        if is_plain and each.dtype == torch.float32 and 0 < each.numel() <= MOST_CHECKED:
            bits = each.detach().reshape(-1).view(torch.int32)
            sums.setdefault(each.device, []).append(bits.sum())
    sums.pop(torch.device("meta"), None)
    return [torch.stack(found).tolist() for found in sums.values()]


def _tensor_versions(graph: Data) -> _TensorVersions:
    """Return the tensors that outputs may depend on, as weak references, and their versions.

    Tensors of a graph folder are new ones each time it is opened, so that they aren't compared.
    """
    tensors = {key: value for key, value in graph.to_dict().items() if isinstance(value, Tensor)}
    if any(hasattr(value, MAPPED) for value in tensors.values()):
        return {}
    return {
        key: (weakref.ref(value), version(value))
        for key, value in tensors.items()
        if key not in ("y", PERM, PARTS) and not key.endswith("_mask")
    }


def _warn_if_stale(model: BatchModel, graph: Data, halo: Tensor) -> None:
    """Warn if rows that were read may not be exact, with their age."""
    if not model.histories or not halo.numel() or is_exact(model, graph):
        return
    ages = [h.num_pushes - int(h.written_at[halo.cpu()].min()) for h in model.histories]
    if all(bool((h.written_at[halo.cpu()] > 0).all()) for h in model.histories):
        which = (
            f"up to {max(ages)} pushes old, and something has changed since they were exact: "
            "model.predict(graph) makes them so"
        )
    else:
        which = "that were never written: model.predict(graph) fills them"
    warn(f"the outputs of chosen nodes read rows of histories {which}")


def predict_nodes(
    model: BatchModel, graph: Any, nodes: Tensor | None, ids: Any, options: Mapping[str, Any]
) -> Tensor:
    """Predict some nodes, by ``nodes`` or ``ids``; see :meth:`gas.ScalableGNN.predict`.

    Raises:
        ValueError: If the graph isn't clustered, or the model or an option isn't for some nodes.
        IndexError: If a node doesn't exist.
    """
    name = "nodes" if ids is None else "ids"
    if nodes is not None and ids is not None:
        raise ValueError("'nodes' and 'ids' are given, which both choose nodes: leave one out")
    if options or model.ranks is not None:
        what = "the model is one of several ranks" if not options else f"{min(options)!r} is given"
        raise ValueError(
            f"'{name}' are chosen, but {what}: pass a loader with its options, to a model of one "
            "process"
        )
    for norm, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"'{name}' are chosen, but the batch norm '{norm}' has no running statistics, and "
                "needs those of all nodes: predict all, model.predict(graph)[nodes], or make it "
                "with track_running_stats=True"
            )
    known, graph = model._node_predictor, unwrap_loader(graph)
    is_known = known is not None and any(
        graph is each for each in (known.loader, known.loader._source)
    )
    if not is_known or (graph is not known.loader and known.loader.is_outdated()):
        loader = graph
        if isinstance(graph, Data):
            loader = SubgraphLoader(graph, log=False, cache=False)
        if PERM not in loader.data:
            raise ValueError(
                "the graph has no 'perm', by which nodes are found: use gas.cluster(data, "
                "num_parts), or model(loader.cut_nodes(nodes)), by their rows in the loader"
            )
        known = model._node_predictor = NodePredictor(loader)
    return known.predict(model, known.choose(nodes, ids))
