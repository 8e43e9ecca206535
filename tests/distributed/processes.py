"""Runs a function on several ranks, each a process of its own."""

import contextlib
import itertools
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import FORKS

LIMIT = 120  # Seconds that a rank may take.


def run_on(num_ranks, function, folder, *args, sharing=True):
    """Run ``function(rank, *args)`` on every rank of a gloo group; return the results.

    The function is one of a module's own, not a closure. An error on a rank is raised here.
    """
    folder = next(
        Path(folder) / f"ranks_{n}"
        for n in itertools.count()
        if not (Path(folder) / f"ranks_{n}").exists()
    )
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(num_ranks):
            args_of_all = (function, rank, num_ranks, str(folder), args, sharing)
            surroundings = (list(sys.path), dict(os.environ))
            process = FORKS.Process(target=_main, args=(surroundings, *args_of_all))
            process.start()
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            process.join(LIMIT)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    errors = [(folder / f"{rank}.txt") for rank in range(num_ranks)]
    told = "\n".join(file.read_text() for file in errors if file.exists())
    assert not hung, f"ranks {hung} hang\n{told}"
    if told:
        raise AssertionError(told)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _main(surroundings, function, rank, num_ranks, folder, args, sharing):
    sys.path[:], environment = surroundings
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if sharing:
            store = dist.FileStore(f"{folder}/store", num_ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        found = function(rank, *args)
        torch.save(found, f"{folder}/{rank}.pt")
        if sharing:
            dist.barrier()  # The store is kept by rank 0.
            dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
