"""Checkpoints in distributed training, which count once all ranks have completed them.

Each rank writes a series of checkpoints as a single process does. When all ranks have reported that
theirs is on the disk, rank 0 names it in ``newest.json``, which is replaced atomically. The
checkpoints that it named before are removed only afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from gas.checkpoint.files import (
    MANIFEST,
    OF_RANKS,
    NewestCheckpoint,
    Source,
    checkpoint_number,
    checkpoints,
    find_source,
    next_number,
    prune,
    rank_folder,
    read_newest,
    remove_after,
    sweep,
    write_newest,
)
from gas.checkpoint.reader import CheckpointReader
from gas.checkpoint.redistribution import Redistribution
from gas.checkpoint.target import Graph, LoadTarget
from gas.checkpoint.tensors import CheckpointError
from gas.checkpoint.writer import CheckpointWriter, history_writers
from gas.native import warn
from gas.scalable import ModelRanks, ScalableGNN, unwrap_loader

if TYPE_CHECKING:
    from gas.scalable import Exchange, Group

T = TypeVar("T")


def run_on_all_ranks(group: Group | None, what: str, function: Callable[[], T]) -> T:
    """Call a function in one process, or on every rank; see :meth:`Group.run`."""
    return function() if group is None else group.run(what, function, CheckpointError)


def _no_loader_error() -> ValueError:
    return ValueError(
        "'loader' isn't given, which tells which nodes this rank has: pass it, give the graph to "
        "gas.distribute(model, graph), or pass histories=False, which leaves them out"
    )


# Saving -------------------------------------------------------------------------------------------


def save_on_ranks(
    folder: Path,
    model: ScalableGNN,
    optimizer: Any,
    loader: Any,
    keep: int,
    histories: bool,
    state: Mapping[str, Any],
) -> Path:
    """See :func:`gas.save`."""
    ranks = cast(ModelRanks, model.ranks)
    group, graph = ranks.group, Graph.of(loader)
    mine = rank_folder(folder, group.size, group.rank)

    def gather() -> tuple[CheckpointWriter, int, int]:
        if histories and ranks.exchange is None and graph is None:
            raise _no_loader_error()
        newest = read_newest(folder)
        number = max(next_number(folder), next_number(mine))
        content = CheckpointWriter(folder, model, optimizer, loader, state)
        return content, number, 0 if newest is None else newest.number

    content, number, newest = run_on_all_ranks(group, "preparing a checkpoint", gather)
    told = group.gather_json([number, newest], "numbering a checkpoint")
    number, newest = max(each for each, _ in told), told[0][1]

    def write() -> Path:
        if histories and graph is not None:
            ranks.bind(model, graph.shard)
        content.add("ranks", _describe_rank(ranks, graph, histories))
        sweep(mine)
        if newest:
            remove_after(mine, newest)  # Not all ranks have completed these.
        return content.write(mine, number, history_writers(model, True) if histories else {})

    try:
        path = run_on_all_ranks(group, "writing a checkpoint", write)
    except (ValueError, OSError):  # After a RankError, other ranks may have completed it.
        remove_after(mine, number - 1)
        raise

    def publish() -> None:
        if group.rank == 0:
            write_newest(folder, NewestCheckpoint(group.size, number))

    run_on_all_ranks(group, "naming a checkpoint", publish)
    prune(mine, keep)
    if group.rank == 0 and len(checkpoints(mine)) >= keep:
        for other in _find_other_sizes(folder, group.size):
            prune(other, 0)
            with contextlib.suppress(OSError):  # It isn't empty, or not the last one.
                other.rmdir()
                other.parent.rmdir()
    return path


def _describe_rank(ranks: ModelRanks, graph: Graph | None, histories: bool) -> dict[str, Any]:
    """Describe the rank's checkpoint for the other ranks."""
    group, exchange = ranks.group, ranks.exchange
    found: dict[str, Any] = {"rank": group.rank, "world_size": group.size}
    if exchange is not None or graph is not None:
        shard = exchange.shard if exchange is not None else cast(Graph, graph).shard
        found["cut"] = None if shard is None else shard.fingerprint
    if graph is not None:
        found |= {"perm": graph.own, "sum": graph.sum}
    if histories and exchange is not None:
        found["exchange"] = exchange.state_dict()
    return found


def _find_other_sizes(folder: Path, world_size: int) -> Iterator[Path]:
    """Yield the folders of ranks of trainings with another number of ranks."""
    for path in folder.iterdir():
        match = OF_RANKS.fullmatch(path.name)
        if match is not None and int(match[1]) != world_size and path.is_dir():
            yield from (rank_folder(folder, int(match[1]), rank) for rank in range(int(match[1])))


# Loading ------------------------------------------------------------------------------------------


def load_on_ranks(folder: Path, into: LoadTarget) -> dict[str, Any]:
    """See :func:`gas.load`."""
    ranks = into.ranks
    group = None if ranks is None else ranks.group
    source = _find_source(folder, group)
    plan = run_on_all_ranks(group, "reading a checkpoint", lambda: _plan(source, into))
    sums = [plan.sum] if group is None else group.gather_json(plan.sum, "comparing graphs")
    if plan.sum_then is not None and None not in sums and sum(sums) % (1 << 63) != plan.sum_then:
        raise _other_graph_error(source)

    # Up to here, nothing has been changed on any rank.
    if ranks is not None and into.histories:
        model = cast(ScalableGNN, into.model)
        exchange = ranks.bind(model, into.shard)
        state = plan.exchange or {"arriving": []}
        run_on_all_ranks(
            group, "reading a checkpoint", lambda: _restore_exchange(exchange, state, model)
        )
    result = run_on_all_ranks(group, "going on from a checkpoint", plan.load)
    if plan.text and (group is None or group.rank == 0):
        warn(plan.text)
    return result


def _find_source(folder: Path, group: Group | None) -> Source:
    """Return the checkpoint that rank 0 finds, on all ranks."""

    def find() -> Source:
        return find_source(folder) if group is None or group.rank == 0 else Source(folder, 0, "")

    found = run_on_all_ranks(group, "looking for a checkpoint", find)
    if group is None:
        return found
    _, world_size, name = group.gather_json([None, *found[1:]], "looking for a checkpoint")[0]
    root = find_source(folder).root if (folder / MANIFEST).exists() else folder
    return Source(root, world_size, name)


class _Plan(NamedTuple):
    """Checked state of one rank, ready to be loaded."""

    load: Callable[[], dict[str, Any]]
    exchange: Any = None  # The state of the exchange; None: no rows are in transit.
    text: str = ""  # The text of a warning.
    sum: int | None = None  # The checksum of this rank's graph.
    sum_then: int | None = None  # The sum of the saved checksums.


def _plan(source: Source, into: LoadTarget) -> _Plan:
    """Read and check the state of this rank, redistributed if necessary."""
    if into.ranks is not None and into.histories and not into.is_known:
        raise _no_loader_error()
    if into.model is not None and max(source.world_size, 1) == into.size:
        rank = 0 if into.ranks is None else into.ranks.group.rank
        found = _read(source, rank)
        cut = None if into.shard is None else into.shard.fingerprint
        if found.about.get("cut", cut) == cut or not into.is_known:
            sums = [found.about.get("sum"), None if into.graph is None else into.graph.sum]
            if None not in sums and sums[0] != sums[1]:
                raise _other_graph_error(source)
            return _Plan(found.prepare(into), found.about.get("exchange"))
    sources = [_read(source, rank) for rank in range(max(source.world_size, 1))]
    load = sources[0].prepare(replace(into, loader=None, histories=False, random_state=False))
    moving = Redistribution(sources, into) if into.histories else None

    def restore() -> dict[str, Any]:
        state = load()
        if moving is not None:
            moving.restore(cast(ScalableGNN, into.model))
        order = getattr(unwrap_loader(into.loader), "order", None)
        if order is not None:
            order.forget()
        return state

    if not into.histories and into.loader is None:
        return _Plan(restore)
    then = [n for found in sources if isinstance(n := found.about.get("sum"), int)]
    sum_then = sum(then) % (1 << 63) if len(then) == len(sources) else None
    mine = None if into.graph is None else into.graph.sum
    same_size = len(sources) == into.size
    how = "of a graph that was cut otherwise" if same_size else f"by {len(sources)} processes"
    text = (
        f"the checkpoint was written {how}: histories go on by the nodes' ids; the loader begins "
        "an epoch, and random numbers go on as they are"
    )
    return _Plan(restore, None, text, mine, sum_then)


def _other_graph_error(source: Source) -> ValueError:
    return ValueError(
        f"'loader' has another graph than {source.root} was saved with, of as many nodes: load the "
        "graph as it was then, in however many shards"
    )


def _read(source: Source, rank: int) -> CheckpointReader:
    """Open the checkpoint of a rank."""
    path = source.path(rank)
    try:
        reader = CheckpointReader(path)
        saved_by = reader.about.get("rank"), reader.about.get("world_size")
        if source.world_size and saved_by != (rank, source.world_size):
            by = "one process" if None in saved_by else "rank {} of {}".format(*saved_by)
            raise CheckpointError(
                f"{path} was saved by {by}, but its folder is that of rank {rank} of "
                f"{source.world_size}: put it back into its folder"
            )
    except CheckpointError as error:
        if not source.world_size:
            raise
        raise CheckpointError(
            f"{error}. It is what rank {rank} of {source.world_size} has saved"
            f"{_suggest_checkpoint(source, path)}"
        ) from error
    return reader


def _suggest_checkpoint(source: Source, path: Path) -> str:
    """Return the end of an error: the newest earlier checkpoint that all ranks have, if any."""
    size = source.world_size
    folders = [rank_folder(source.root, size, rank) for rank in range(size)]
    names = [{each.name for each in checkpoints(folder)} for folder in folders]
    paths = [folders[0] / name for name in set.intersection(*names)]
    earlier = [each for each in paths if checkpoint_number(each) < checkpoint_number(path)]
    if not earlier:
        return ""
    return f". All ranks have one before it: load {str(max(earlier, key=checkpoint_number))!r}"


def _restore_exchange(exchange: Exchange, state: Any, model: ScalableGNN) -> None:
    """Restore the message that was in transit."""
    try:
        exchange.restore(state, model.histories)
    except ValueError as error:
        raise CheckpointError(
            f"{error}: choose 'dtype' of gas.distribute as it was then"
        ) from error
