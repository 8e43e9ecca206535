"""The training processes, and collectives whose errors name the ranks that didn't answer."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")

SOURCE = re.compile(r"^\[\S+\] ")  # The place in gloo's sources that an error begins with.
FAILED = "failed: "
GRACE = 3.0  # Seconds in which the others say that they failed, too.


class RankError(RuntimeError):
    """Error after which the processes can't go on; it names the rank, the step and the cause."""


class Group:
    """The processes of ``torch.distributed``, with a group of their own for rows of histories.

    It is a gloo group, which sends host memory, where the rows are. Gradients on the CPU are sent
    by a second gloo group, gradients on a device by the program's own group. All ranks have to
    create it, and call its methods, in the same order.

    Args:
        timeout: The seconds after which a process that doesn't answer raises an error.
            (default: that of ``init_process_group``)

    Raises:
        RuntimeError: If ``torch.distributed`` hasn't been initialised.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed has no processes yet: call "
                "torch.distributed.init_process_group('gloo') first, in a script that torchrun "
                "starts"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        limit = _timeout() if timeout is None else timedelta(seconds=timeout)
        self._group, self.gradients = (
            dist.new_group(backend="gloo", timeout=limit) for _ in range(2)
        )
        self._seen = dist.PrefixStore("gas", dist.distributed_c10d._get_default_store())
        self.waited = 0.0
        """Seconds that this process has waited for others."""

    def close(self) -> None:
        """Release the process groups; nothing can be sent afterwards."""
        for group in (self._group, self.gradients):
            with contextlib.suppress(Exception):  # All groups may have been given back.
                dist.destroy_process_group(group)

    # Collectives --------------------------------------------------------------------------------

    def start_all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> dist.Work:
        """Begin to send ``sizes[r]`` rows of ``x`` to each rank, and to receive ``out``."""
        work = dist.all_to_all_single(
            out, x, list(out_sizes), list(sizes), group=self._group, async_op=True
        )
        assert work is not None
        return work

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for an exchange.

        Args:
            work: From :meth:`start_all_to_all`.
            what: The operation that is waited for, as the error names it.

        Raises:
            RankError: If a process has gone, or doesn't come in time.
        """
        with self.name_failures(what):
            start = time.perf_counter()
            work.wait()
            self.waited += time.perf_counter() - start

    def start_sum(self, x: Tensor, what: str, is_last: bool) -> Future[Tensor]:
        """Begin to sum ``x`` in place over all ranks; ``what`` describes it in errors.

        It counts as waiting if it ``is_last``: nothing is computed meanwhile.
        """
        group = self.gradients if x.device.type == "cpu" else None
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        start = time.perf_counter()

        def done(future: Future[Any]) -> Tensor:
            if is_last:
                self.waited += time.perf_counter() - start
            with self.name_failures(what):
                return future.value()[0]

        return work.get_future().then(done)

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """Return the tensors of all ranks, which may differ in their numbers of rows."""
        start = time.perf_counter()
        with self.name_failures(what):
            sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([x.size(0)]), group=self._group)
            rows = [int(size) for size in sizes]
            mine = x.new_zeros(max(rows), *x.shape[1:])
            mine[: x.size(0)] = x
            outs = [torch.empty_like(mine) for _ in rows]
            dist.all_gather(outs, mine, group=self._group)
            self.waited += time.perf_counter() - start
            return [out[:n] for out, n in zip(outs, rows, strict=True)]

    def gather_json(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks: numbers and text."""
        sent = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(x.tolist())) for x in self.gather(sent, what)]

    def broadcast(self, x: Tensor, what: str) -> None:
        """Set ``x`` to its values on rank 0."""
        with self.name_failures(what):
            here = x.detach().cpu().contiguous()
            dist.broadcast(here, 0, group=self._group)
            x.detach().copy_(here)

    def check_equal_on_ranks(self, mine: dict[str, Any]) -> None:
        """Refuse ranks that differ in values that must be equal.

        Args:
            mine: This rank's values by name; numbers and text.

        Raises:
            RankError: On every rank, naming the first rank that differs from rank 0.
        """
        found = self.gather_json(mine, "comparing the ranks")
        for rank, other in enumerate(found):
            for name, first in found[0].items():
                if other[name] != first:
                    raise RankError(
                        f"rank {rank} has {name} {other[name]}, but rank 0 has {first}: start all "
                        "ranks with the same program, packages, graph and options"
                    )

    def run(self, what: str, function: Callable[[], T], *kinds: type[Exception]) -> T:
        """Call a function on every rank; if it fails on one, raise on all.

        Args:
            what: The task in words, for the error of a rank that does not answer.
            function: Must not wait for another rank.
            *kinds: Classes of errors, besides ``ValueError`` and ``OSError``, that the other ranks
                raise as well; subclasses first.

        Raises:
            ValueError: Or one of ``kinds``, or ``OSError``: the error of the first rank that
                failed, with that rank in its text.
            RankError: For any other error, or if a rank has gone, or doesn't come in time.
        """
        named = {kind.__name__: kind for kind in (*kinds, ValueError)}
        result, failed = None, None
        try:
            result = function()
        except RankError:
            raise
        except Exception as error:  # Whatever it is, the others wait.
            failed = error
        for rank, told in enumerate(self.gather_json(_describe_error(failed, named), what)):
            if told is not None:
                raise _make_error(rank, named, *told) from failed
        return cast(T, result)

    # Failures -----------------------------------------------------------------------------------

    def report(self, step: int) -> None:
        """Publish the step that this rank has begun, for the errors on other ranks."""
        self._publish_status(f"has begun step {step}")

    def _publish_status(self, what: str) -> None:
        """Publish what this rank has begun, or failed in."""
        with contextlib.suppress(Exception):  # It matters only where something else fails, too.
            self._seen.set(str(self.rank), f"{what}\n{time.time()}")

    @contextlib.contextmanager
    def name_failures(self, what: str) -> Iterator[None]:
        """Name the rank that failed in this context, and the ranks that didn't answer."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            self._publish_status(f"{FAILED}{what}")
            reason = SOURCE.sub("", str(error).strip()).split("\n")[0].split(". ")[0]
            raise RankError(
                f"rank {self.rank} of {self.size} can't go on: {what} failed ({reason}). "
                f"{self._describe_silent_ranks(what)} Once the cause is gone, torchrun "
                "--max-restarts has all ranks start again, from their newest checkpoint"
            ) from error

    def _describe_silent_ranks(self, what: str) -> str:
        """Describe the ranks that didn't answer, or that failed in something else."""
        silent, others = set(range(self.size)) - {self.rank}, []
        last = dict.fromkeys(silent, "hasn't begun a step")
        end = time.monotonic() + GRACE
        while silent and time.monotonic() < end:
            for rank in sorted(silent):
                try:
                    if not self._seen.check([str(rank)]):
                        continue
                    told, when = self._seen.get(str(rank)).decode().split("\n")
                except Exception as error:  # The process of the store has ended.
                    reason = str(error).splitlines()[0]
                    return f"Who is missing isn't known: rank 0 or torchrun has gone ({reason})."
                if told.startswith(FAILED):
                    silent.discard(rank)
                    others.append((rank, told.removeprefix(FAILED)))
                else:
                    last[rank] = f"{told} {time.time() - float(when):.0f} s ago"
            time.sleep(0.1)  # The others fail when their own time is up.
        if silent:
            named = ", ".join(f"rank {rank} ({last[rank]})" for rank in sorted(silent))
            return f"No answer came from {named}: it hangs, is slow or was killed; see its output."
        for rank, other in others:
            if other != what:
                return (
                    f"Rank {rank} was in another operation, {other}: all ranks have to do the "
                    "same, with as many mini-batches each."
                )
        return "All ranks have answered: the first error of another one is the cause."


def _describe_error(error: Exception | None, kinds: dict[str, type[Exception]]) -> list[Any] | None:
    """Describe an error in values that JSON can hold."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return ["OSError", error.strerror or str(error), error.errno, str(error.filename or "")]
    kind = next((name for name, cls in kinds.items() if isinstance(error, cls)), "")
    return [kind, str(error) if kind else f"{type(error).__name__}: {error}", None, ""]


def _make_error(
    rank: int,
    kinds: dict[str, type[Exception]],
    kind: str,
    text: str,
    number: int | None,
    file: str,
) -> Exception:
    """Make the error that another rank has described."""
    text = f"rank {rank}: {text}"
    if kind == "OSError":
        return OSError(text) if number is None else OSError(number, text, *([file] if file else []))
    return kinds.get(kind, RankError)(text)


def _timeout() -> timedelta | None:
    """Return the timeout of the program's process group, if it can be read."""
    world: Any = dist.group.WORLD
    try:
        return world._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
