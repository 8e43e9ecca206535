"""Checks of the arguments of a call, and explanations of PyTorch's errors."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from gas.graph import Adjacency
from gas.history import Rows
from gas.loader import GRAPH_SIZE, OF_BATCH
from gas.native import check_integer, is_sparse

# Parameters of ``forward`` and ``forward_layer`` that are passed by position.
POSITIONAL = frozenset(
    ("self", "x", "adj_t", "edge_index", "batch_size", "n_id", "offset", "count", "layer", "state")
)
# Matches PyTorch's errors about operations that torch.sparse_csr doesn't support.
MISMATCH = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
TWICE = re.compile(r"multiple values for argument '(\w+)'")
SIZES = re.compile(r"tensor with size (\d+) in dimension \d+, but expected size (\d+)")
SPARSE = re.compile(r"sparse|layout|strides", re.IGNORECASE)
WIDTHS = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
DTYPES = re.compile(r"same dtype, but got:? (?:c10::)?([\w ]+?) (?:and|!=) (?:c10::)?(\w+)")
NAMES = {  # In errors, of which some have the names of C.
    torch.float64: ("Double", "double"), torch.float32: ("Float", "float"),
    torch.bfloat16: ("BFloat16",), torch.float16: ("Half",), torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"), torch.bool: ("Bool", "bool"),
}  # fmt: skip


def missing_push_error(calls: int, num_histories: int) -> RuntimeError:
    """Make the error of a model that doesn't fill each of its histories once."""
    return RuntimeError(
        f"forward called push_and_pull {calls} times, expected once for each of the model's "
        f"{num_histories} histories: pass every hidden layer's output through it, or set "
        "'num_layers' to one more than the histories it needs"
    )


def check_call(
    x: Tensor | Rows | None,
    batch_size: int | None,
    n_id: Tensor | None,
    fill: bool,
    num_nodes: int,
    buffer_size: int | None,
) -> None:
    """Refuse arguments of a model that aren't one mini-batch or one full batch."""
    if isinstance(x, DataLoader):
        raise ValueError(
            f"'x' is a {type(x).__name__}, expected a mini-batch of it, model(batch); all of them "
            "are model(loader=loader)"
        )
    if isinstance(x, Data):
        raise ValueError(
            f"'x' is a {type(x).__name__}, expected features, model(data.x, data.edge_index), or a "
            "mini-batch of gas.SubgraphLoader, model(batch); model.predict(graph) is for all nodes"
        )
    if (batch_size is None) != (n_id is None):
        raise ValueError(
            "'batch_size' and 'n_id' describe a mini-batch together: pass all that the loader "
            "yields, model(batch.x, batch.adj_t, *args)"
        )
    if n_id is not None and not isinstance(n_id, Tensor):
        raise ValueError(
            f"'n_id' is {n_id!r}, expected a tensor of ids: the arguments after the adjacency are "
            "batch_size, n_id, offset and count, in this order, as the loader yields them"
        )
    if batch_size is not None and n_id is not None:
        wanted = f"an integer between 0 and the {n_id.numel()} nodes in 'n_id'"
        check_integer("batch_size", batch_size, 0, n_id.numel(), wanted)
        if fill:
            raise ValueError("'fill' is for full batches: a mini-batch always writes histories")
        check_graph(n_id, num_nodes)
        check_halo(batch_size, n_id, buffer_size)
    expected = num_nodes if n_id is None else n_id.numel()
    if (fill or n_id is not None) and isinstance(x, Tensor | Rows) and x.size(0) != expected:
        raise ValueError(f"'x' has {x.size(0)} rows, expected one per node: {expected}")


def check_graph(n_id: Tensor, num_nodes: int) -> None:
    """Refuse nodes of a graph of another size."""
    graph = getattr(n_id, GRAPH_SIZE, num_nodes)
    if n_id.device.type == "cpu" and n_id.numel():
        graph = max(graph, int(n_id.max()) + 1)
    if graph != num_nodes:
        raise wrong_size_error(f"'n_id' names nodes of a graph of {graph} nodes", num_nodes)


def wrong_size_error(what: str, num_rows: int) -> ValueError:
    """Make the error of a graph that hasn't as many nodes as the histories have rows."""
    return ValueError(
        f"{what}, but the histories are for {num_rows}: use model.for_graph(num_nodes), which "
        "shares the weights"
    )


def check_order(model: Any, order: tuple[int, int] | None) -> None:
    """Refuse a batch of a graph whose nodes are in another order than the histories' rows.

    Args:
        model: The model. ``_calls.order`` is the order of its rows; ``None`` is set.
        order: That of a batch, or of a loader; ``None`` is unknown.
    """
    calls = model._calls
    if order is None or order == calls.order or model._engine.io == "none" or not model.histories:
        return
    if calls.order is not None and order[0] == calls.order[0]:
        other = (
            f"model.for_graph({order[0]})"
            if hasattr(model, "for_graph")
            else "gas.to_scalable(net, data)"
        )
        raise ValueError(
            "the batch is of another clustering than those before, gas.cluster, and the histories "
            "have a row for each node in the order of the first: call model.refresh(graph) with "
            f"the new graph, which fills them anew, or make a model for it, {other}"
        )
    calls.order = order


def check_halo(batch_size: int, n_id: Tensor, buffer_size: int | None) -> None:
    """Refuse a batch whose halo exceeds ``buffer_size``."""
    halo = n_id.numel() - batch_size
    if buffer_size is not None and halo > buffer_size:
        raise ValueError(
            f"'buffer_size' is {buffer_size}, but the batch has {halo} halo nodes: raise "
            "it, or leave it out to have buffers sized automatically"
        )


def check_full_batch_adjacency(adj_t: Any) -> None:
    """Refuse the adjacency of a mini-batch, which was passed without its ids."""
    is_matrix = isinstance(adj_t, Adjacency) or is_sparse(adj_t)
    if is_matrix and adj_t.size(0) != adj_t.size(1):
        what = f"'adj_t' has shape {list(adj_t.shape)}, that"
    elif getattr(adj_t, OF_BATCH, False):
        what = f"'{'adj_t' if is_matrix else 'edge_index'}' is that"
    else:
        return
    raise ValueError(
        f"{what} of a mini-batch, which comes with ids: pass all that the loader yields, "
        "model(batch.x, batch.adj_t, *args), or model(batch)"
    )


def check_output(model: object, out: Any) -> Tensor:
    """Refuse outputs of a subclass that aren't one tensor, where one is assembled or scored."""
    if not isinstance(out, Tensor):
        raise ValueError(
            f"forward of {type(model).__name__} returns a {type(out).__name__}, expected one "
            "tensor here, with a row for each node: return one, such as all columns in a row, or "
            "convert a plain module by gas.to_scalable, which may return several"
        )
    return out


def apply_transform(transform: Callable[[Data], Data], data: Data) -> Data:
    """Apply a transform of the whole graph to a copy of it.

    Raises:
        ValueError: If it fails on weights of edges that are integers.
    """
    try:
        return transform(copy.copy(data))
    except RuntimeError as error:
        weight = data.get("edge_weight")
        if not isinstance(weight, Tensor) or weight.is_floating_point():
            raise
        raise ValueError(
            f"'edge_weight' is {weight.dtype}, expected floating-point numbers, as {transform} "
            f"computes weights of it ({error}): data.edge_weight = data.edge_weight.float()"
        ) from error


def attributes(data: Data) -> Mapping[str, Any]:
    """Return the attributes of a graph by name; ``name in data`` itself takes 20 calls."""
    return data._store._mapping


def adjacency(data: Data) -> Any:
    """Return the adjacency of a batch, in its layout."""
    known = attributes(data)
    if "adj_t" in known:
        return known["adj_t"]
    return data.edge_index


@functools.lru_cache(maxsize=128)
def _parameters(function: Callable[..., Tensor]) -> tuple[str, ...]:
    """Return the parameters that a function takes by name; cached, as inspection is slow."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
    return tuple(name for name in named if name not in POSITIONAL)


def collect_kwargs(function: Callable[..., Tensor], data: Data) -> dict[str, Any]:
    """Return the attributes of a batch that are parameters of ``function``: ``pos``, ..."""
    named, known = _parameters(getattr(function, "__func__", function)), attributes(data)
    kwargs = {name: data[name] for name in named if name in known}
    if "adj_t" in known:  # Its values are the edge weights.
        kwargs.pop("edge_weight", None)
    return kwargs


def _describe_halo(error: BaseException, batch_size: int | None, n_id: Tensor) -> str:
    """Describe an error about in-batch rows that are combined with rows of the halo, too."""
    return (
        f"forward combines rows of the batch's {batch_size} nodes with rows of all "
        f"{n_id.numel()}, halo included ({error}): 'adj_t' has a row for each node of the "
        "batch alone, so that layers with a root term, such as SAGEConv, take "
        "conv((x, x[:batch_size]), adj_t); or load with bipartite=False, or layout='edge_index' "
        "for layers with edge_attr"
    )


def _explain_value_error(
    error: ValueError, adj_t: Any, batch_size: int | None, n_id: Any
) -> ValueError | None:
    """Return an error with the cure if it is about one node, other layers or the halo."""
    text = str(error)
    if "more than 1 value per channel" in text:
        return ValueError(
            f"a batch norm is given the row of one node ({error}): take mini-batches of more "
            "nodes, by fewer parts, a larger 'batch_size', or more 'memory'"
        )
    if "MessagePassing.propagate" in text and isinstance(adj_t, Adjacency):
        return ValueError(
            f"a layer of PyG takes no fused adjacency ({error}): after a layer was replaced in a "
            "model that had been called, gas.fuse(model)"
        )
    found = SIZES.search(text)
    if found and n_id is not None and {*found.groups()} == {str(batch_size), str(n_id.numel())}:
        return ValueError(_describe_halo(error, batch_size, n_id))
    return None


def explain(
    error: BaseException, x: Any, adj_t: Any, batch_size: int | None = None, n_id: Any = None
) -> RuntimeError | ValueError | None:
    """Return an error with the cure if PyTorch's is about features, sparse matrices or the halo."""
    text, width = str(error), x.size(1) if isinstance(x, Tensor | Rows) and x.dim() == 2 else None
    if isinstance(error, ValueError):
        return _explain_value_error(error, adj_t, batch_size, n_id)
    if isinstance(error, TypeError) and (found := TWICE.search(text)) is not None:
        return ValueError(
            f"forward takes {found[1]!r} where the ids of a mini-batch are passed ({error}): put "
            f"it behind them, forward(self, x, adj_t, *args, {found[1]}=None)"
        )
    if not isinstance(error, RuntimeError):
        return None
    if (found := WIDTHS.search(text)) is not None and found[1] == str(width):
        return RuntimeError(
            f"'x' has {width} columns, and a layer takes {found[2]} ({error}): give the graph the "
            "features that the model was made for, or make a model for these"
        )
    names = NAMES.get(x.dtype, ()) if isinstance(x, Tensor | Rows) else ()
    if (found := DTYPES.search(text)) is not None and found[1] in names:
        return RuntimeError(
            f"'x' is {x.dtype}, and a layer has weights of another type ({error}): convert either, "
            "such as data.x = data.x.float(), or model.double()"
        )
    is_matrix = not isinstance(adj_t, Tensor) or is_sparse(adj_t)
    if n_id is not None and is_matrix and MISMATCH.findall(text) in (
        [(str(batch_size), str(n_id.numel()))], [(str(n_id.numel()), str(batch_size))],
    ):  # fmt: skip
        return RuntimeError(_describe_halo(error, batch_size, n_id))
    is_csr = isinstance(adj_t, Tensor) and adj_t.layout == torch.sparse_csr
    if is_csr and "scalar type" in text and not re.search("half|bfloat16", text, re.IGNORECASE):
        return RuntimeError(
            f"'adj_t' is a torch.sparse_csr matrix of {adj_t.dtype}, which PyTorch multiplies by "
            f"rows of that type alone ({error}): give features and edge weights the type of the "
            "model before the graph is loaded, such as data.edge_weight.double() for "
            "model.double(), or load with layout='fused'"
        )
    if is_csr and ("sparse_csr" in text or "scalar type" in text):
        return RuntimeError(
            "'adj_t' is a torch.sparse_csr matrix, which PyTorch can't multiply by "
            f"bfloat16 or float16 ({error}): load with layout='edge_index'"
        )
    if is_sparse(x) and SPARSE.search(text):
        return RuntimeError(
            "'x' is a torch.sparse_csr matrix, of which PyTorch can't do what forward does "
            f"({text.split('. ')[0]}): use gas.nn.dropout for F.dropout, gas.nn.Linear or a "
            "layer of gas.nn (gas.fuse(model) makes them of PyTorch's and PyG's), or x.to_dense(), "
            "of the batch alone"
        )
    return None
