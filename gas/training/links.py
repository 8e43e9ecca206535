"""Link prediction: the loss of pairs of nodes, and ranks of links among all nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.graph import Edges, check_ids, to_csr
from gas.loader import SubData

BLOCK_BYTES = 1 << 26  # Of scores that are held at once.
SORTED = 16  # Links of a node from which on its scores are sorted.


def link_loss(out: Tensor, batch: SubData) -> Tensor:
    """Return the loss of dot products of nodes in a batch of :class:`gas.loader.LinkLoader`.

    Of given and drawn pairs it is the binary cross entropy with ``edge_label``, where categories
    from 1 on, as PyG numbers those of links, count as 1; of triplets it is
    the Bayesian personalised ranking loss ``-log sigmoid(positive - negative)`` (Rendle et al.,
    "BPR: Bayesian Personalized Ranking from Implicit Feedback", UAI 2009, equation 4.1 without the
    regulariser), the mean over all negatives. Where a batch has no pair it is 0.

    Args:
        out: What the model returns, of shape ``[batch_size, C]``.
        batch: The mini-batch.

    Raises:
        ValueError: If it isn't one of pairs.
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

    Scores of some first nodes with all nodes are made at a time, 64 MiB of them, or those of one
    node where these are more.

    Args:
        out: What ``model.predict(graph)`` returns, of shape ``[num_nodes, C]``.
        edge_label_index: The links, of shape ``[2, K]``, in the order of ``out``.
        known: Links that are no rivals of others of their first node, such as the edges of the
            training graph, of shape ``[2, E]``; those of ``edge_label_index`` never are ("filtered"
            in Bordes et al., "Translating Embeddings for Modeling Multi-relational Data", NeurIPS
            2013). A node isn't its own rival either. (default: none)
        undirected: Both directions of a link are links, though lists may have one. (default:
            ``False``)
        score: Gives the scores ``[B, num_nodes]`` of ``B`` first nodes ``[B, C]`` with all nodes
            ``[num_nodes, C]``, higher ones for links. (default: dot products)

    Returns:
        Of shape ``[K]``, float64, from 1, which is best; of equal scores the mean rank.

    Raises:
        ValueError: If there are no such nodes, or scores aren't numbers.
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
    src, dst = edge_label_index.long().cpu()
    left_out = torch.cat([pairs.long().cpu() for pairs in lists], dim=1)
    if undirected:
        left_out = torch.cat([left_out, left_out.flip(0)], dim=1)
    rivals = to_csr(Edges(left_out[1], left_out[0], None, num_nodes))  # A row has its links.
    ranks = torch.empty(src.numel(), dtype=torch.float64)
    first, group = src.unique(return_inverse=True)
    order = group.argsort(stable=True)
    bounds = torch.searchsorted(group[order], torch.arange(first.numel() + 1)).tolist()
    size = max(1, BLOCK_BYTES // (4 * num_nodes))
    with torch.no_grad():
        for begin in range(0, first.numel(), size):
            nodes = first[begin : begin + size]
            queries = out[nodes.to(out.device)]
            scores = queries @ out.t() if score is None else score(queries, out)
            _check_scores(scores, nodes.numel(), num_nodes)
            which = order[bounds[begin] : bounds[begin + nodes.numel()]]
            row, column = (group[which] - begin).to(scores.device), dst[which].to(scores.device)
            own = scores[row, column]
            entry, count = _entries(rivals.rowptr, nodes)
            hidden = torch.repeat_interleave(torch.arange(nodes.numel()), count).to(scores.device)
            scores = scores.index_put(
                (hidden, rivals.col[entry].to(scores.device)), scores.new_tensor(-torch.inf)
            )
            scores[torch.arange(nodes.numel()), nodes] = -torch.inf
            ranks[which] = 1 + _above(scores, row, own).cpu()
    return ranks


def _above(scores: Tensor, row: Tensor, own: Tensor) -> Tensor:
    """Count the scores of its row above each score, equal ones counting half.

    Args:
        scores: Of shape ``[B, N]``.
        row: Rising, of shape ``[K]``.
        own: Of shape ``[K]``.
    """
    found = []
    for number, mine in enumerate(own.split(torch.bincount(row, minlength=len(scores)).tolist())):
        if mine.numel() < SORTED:
            each = scores[number] - mine[:, None]
            found.append((each > 0).sum(1) + 0.5 * (each == 0).sum(1))
        else:  # A hub's: once sorted, whole row by whole row needn't be looked at.
            rising = scores[number].sort().values
            above = rising.numel() - torch.searchsorted(rising, mine, right=True)
            found.append(0.5 * (above + rising.numel() - torch.searchsorted(rising, mine)))
    return torch.cat(found).double() if found else own.double()


def _entries(rowptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the entries of some rows, and their number in each."""
    begin, count = rowptr[rows], rowptr[rows + 1] - rowptr[rows]
    ends = count.cumsum(0)
    position = torch.arange(int(count.sum()))
    return position + torch.repeat_interleave(begin - ends + count, count), count


def _check_scores(scores: Tensor, num_rows: int, num_nodes: int) -> None:
    if scores.shape != (num_rows, num_nodes):
        raise ValueError(
            f"'score' gave {list(scores.shape)}, expected the scores of {num_rows} nodes with all "
            f"nodes: [{num_rows}, {num_nodes}]"
        )
    if not bool(scores.isfinite().all()):
        raise ValueError("'out' gives scores that are NaN or infinite: look for what makes them so")


def compute_mrr(ranks: Tensor) -> float:
    """Compute the mean reciprocal rank.

    Args:
        ranks: Of shape ``[K]``, from :func:`rank_links`.

    Returns:
        Between 0 and 1, which is best; 0 where there are no ranks.
    """
    return float(ranks.double().reciprocal().mean()) if ranks.numel() else 0.0


def compute_hits(ranks: Tensor, k: int) -> float:
    """Hits@k: which part of the links is among the best ``k`` of all nodes.

    Args:
        ranks: Of shape ``[K]``, from :func:`rank_links`.
        k: How many, at least 1.

    Returns:
        Between 0 and 1, which is best; 0 where there are no ranks.
    """
    return float((ranks <= k).double().mean()) if ranks.numel() else 0.0
