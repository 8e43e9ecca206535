"""Link prediction: the loss of pairs of nodes, and ranks of links among all nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.graph import Edges, check_ids, expand_ranges, to_csr
from gas.loader import SubData

BLOCK_BYTES = 1 << 26  # Bytes of scores computed at once.
SORTED = 16  # Number of links of a node from which its scores are sorted.


def link_loss(out: Tensor, batch: SubData) -> Tensor:
    """Return the loss of dot products of nodes in a batch of :class:`gas.loader.LinkLoader`.

    For positive and negative pairs it is the binary cross entropy with ``edge_label``, where
    categories of links, which PyG numbers from 1, count as 1; for triplets it is the Bayesian
    personalised ranking loss ``-log sigmoid(positive - negative)`` (Rendle et al., "BPR: Bayesian
    Personalized Ranking from Implicit Feedback", UAI 2009, equation 4.1 without the regulariser),
    the mean over all negatives. For a batch without pairs it is 0.

    Args:
        out: The model's outputs, of shape ``[batch_size, C]``.
        batch: The mini-batch.

    Raises:
        ValueError: If the batch has no pairs of nodes.
    """
    if "dst_neg_index" in batch.data:
        src, pos, neg = (batch.data[f"{name}_index"] for name in ("src", "dst_pos", "dst_neg"))
        positive = (out[src] * out[pos]).sum(-1)
        neg = neg.unsqueeze(1) if neg.dim() == 1 else neg
        negative = (out[src].unsqueeze(1) * out[neg]).sum(-1)
        difference = positive.unsqueeze(1) - negative
        return -F.logsigmoid(difference).sum() / max(difference.numel(), 1)
    if "edge_label_index" not in batch.data or "edge_label" not in batch.data:
        raise ValueError(
            "'batch' has no pairs of nodes: take batches of gas.loader.LinkLoader(graph), "
            "whose graph has an 'edge_label_index'"
        )
    src, dst = batch.data.edge_label_index
    scores = (out[src] * out[dst]).sum(-1)
    label = batch.data.edge_label.to(scores.dtype).clamp(0, 1)
    return F.binary_cross_entropy_with_logits(scores, label, reduction="sum") / max(len(label), 1)


def rank_links(
    out: Tensor,
    edge_label_index: Tensor,
    *,
    known: Tensor | None = None,
    undirected: bool = False,
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the ranks of links: the number of nodes that score higher than the true one.

    Scores of some first nodes with all nodes are computed at a time: 64 MiB, or the scores of one
    node if these are more.

    Args:
        out: The outputs of ``model.predict(graph)``, of shape ``[num_nodes, C]``.
        edge_label_index: The links, of shape ``[2, K]``, in the order of ``out``.
        known: Links that are excluded from the ranking of others with the same first node, such as
            the edges of the training graph, of shape ``[2, E]``. Those of ``edge_label_index`` are
            always excluded ("filtered" in Bordes et al., "Translating Embeddings for Modeling
            Multi-relational Data", NeurIPS 2013), and so is the first node itself.
            (default: none)
        undirected: Count both directions of a link, even if only one is given.
            (default: ``False``)
        score: Computes the scores ``[B, num_nodes]`` of ``B`` first nodes ``[B, C]`` with all nodes
            ``[num_nodes, C]``, higher ones for links. (default: dot products)

    Returns:
        Of shape ``[K]``, float64, from 1, which is best; equal scores have their mean rank.

    Raises:
        ValueError: If a node doesn't exist, or a score isn't finite.
    """
    num_nodes = out.size(0)
    lists = [edge_label_index] if known is None else [edge_label_index, known]
    for name, pairs in zip(("edge_label_index", "known"), lists, strict=False):
        if not isinstance(pairs, Tensor) or pairs.dim() != 2 or pairs.size(0) != 2:
            what = list(pairs.shape) if isinstance(pairs, Tensor) else type(pairs).__name__
            raise ValueError(f"'{name}' is {what}, expected pairs of nodes of shape [2, K]")
        if pairs.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"'{name}' is {pairs.dtype}, expected ids of nodes: {name}.long()")
        check_ids(pairs.long(), num_nodes, name)
    if not out.is_floating_point():
        raise ValueError(f"'out' is {out.dtype}, expected outputs of floating-point type")
    if out.dim() != 2:
        raise ValueError(f"'out' has shape {list(out.shape)}, expected a row for each node, [N, C]")
    src, dst = edge_label_index.long().cpu()
    left_out = torch.cat([pairs.long().cpu() for pairs in lists], dim=1)
    if undirected:
        left_out = torch.cat([left_out, left_out.flip(0)], dim=1)
    excluded = to_csr(Edges(left_out[1], left_out[0], None, num_nodes))  # By first node.
    ranks = torch.empty(src.numel(), dtype=torch.float64)
    first, group = src.unique(return_inverse=True)
    order = group.argsort(stable=True)
    bounds = torch.searchsorted(group[order], torch.arange(first.numel() + 1)).tolist()
    size = max(1, BLOCK_BYTES // (4 * max(1, num_nodes)))
    with torch.no_grad():
        for begin in range(0, first.numel(), size):
            nodes = first[begin : begin + size]
            queries = out[nodes.to(out.device)]
            scores = queries @ out.t() if score is None else score(queries, out)
            _check_scores(scores, nodes.numel(), num_nodes)
            which = order[bounds[begin] : bounds[begin + nodes.numel()]]
            row, column = (group[which] - begin).to(scores.device), dst[which].to(scores.device)
            own = scores[row, column]
            start = excluded.rowptr[nodes]
            count = excluded.rowptr[nodes + 1] - start
            entry = expand_ranges(start, count)
            hidden = torch.repeat_interleave(torch.arange(nodes.numel()), count).to(scores.device)
            scores = scores.index_put(
                (hidden, excluded.col[entry].to(scores.device)), scores.new_tensor(-torch.inf)
            )
            scores[torch.arange(nodes.numel()), nodes] = -torch.inf
            ranks[which] = 1 + _count_above(scores, row, own).cpu()
    return ranks


def _count_above(scores: Tensor, row: Tensor, own: Tensor) -> Tensor:
    """Count the scores ``[B, N]`` in its row that are higher than each of ``own``, ``[K]``.

    Equal ones count half. ``row`` has the rows of ``own``, ascending.
    """
    found = []
    for number, mine in enumerate(own.split(torch.bincount(row, minlength=len(scores)).tolist())):
        if mine.numel() < SORTED:
            each = scores[number] - mine[:, None]
            found.append((each > 0).sum(1) + 0.5 * (each == 0).sum(1))
        else:  # For hubs, sorting the row once is faster than comparing it with each score.
            rising = scores[number].sort().values
            above = rising.numel() - torch.searchsorted(rising, mine, right=True)
            found.append(0.5 * (above + rising.numel() - torch.searchsorted(rising, mine)))
    return torch.cat(found).double() if found else own.double()


def _check_scores(scores: Tensor, num_rows: int, num_nodes: int) -> None:
    """Refuse scores of another shape, or that aren't finite."""
    if scores.shape != (num_rows, num_nodes):
        raise ValueError(
            f"'score' gave {list(scores.shape)}, expected the scores of {num_rows} nodes with all "
            f"nodes: [{num_rows}, {num_nodes}]"
        )
    if not bool(scores.isfinite().all()):
        raise ValueError(
            "'out' gives scores that are NaN or infinite, expected finite ones: look for the first "
            "such outputs, torch.isfinite(out), or into 'score'"
        )


def compute_mrr(ranks: Tensor) -> float:
    """Compute the mean reciprocal rank.

    Args:
        ranks: Of shape ``[K]``, from :func:`rank_links`.

    Returns:
        Between 0 and 1, which is best; 0 without ranks.
    """
    return float(ranks.double().reciprocal().mean()) if ranks.numel() else 0.0


def compute_hits(ranks: Tensor, k: int) -> float:
    """Compute Hits@k: the share of links with a rank of at most ``k``.

    Args:
        ranks: Of shape ``[K]``, from :func:`rank_links`.
        k: The largest rank that counts, at least 1.

    Returns:
        Between 0 and 1, which is best; 0 without ranks.
    """
    return float((ranks <= k).double().mean()) if ranks.numel() else 0.0
