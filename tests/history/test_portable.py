"""Features of Linux have substitutes elsewhere, or are refused with a reason."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import gas
from gas.cli import report
from gas.history import DiskStore, disk
from gas.history.store import check_fits
from gas.native import cores, memory

# As on Windows, which has none of these; torch and its like are loaded before.
WITHOUT = """
import os, sys, torch, torch_geometric.data, torch_geometric.nn, tqdm
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("sched_getaffinity", "posix_fallocate", "sysconf"):
    delattr(os, name)
"""


def test_cores(monkeypatch):
    monkeypatch.undo()  # The fixtures' own number.
    assert cores.num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores.num_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.num_cores() == 1
    gas.History(4, 2).push(torch.ones(4, 2))


def test_space_is_taken_without_posix_fallocate(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(disk, "ZEROS_BYTES", 4096)
    store = DiskStore(1000, 5, torch.float32, tmp_path / "rows")
    status = (tmp_path / "rows").stat()
    assert status.st_size == 4096 + 1000 * 5 * 4
    assert status.st_blocks * 512 >= status.st_size
    assert not store.table.any()
    store.table[-1] = 3
    store.close()
    again = DiskStore(1000, 5, torch.float32, tmp_path / "rows")
    assert again.resumed
    assert again.table.sum() == 15
    again.close()


def test_a_full_disk_without_posix_fallocate(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="the disk has no room for a history of 4,136 bytes"):
        DiskStore(5, 2, torch.float32, tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_without_locks_disks_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "fcntl", None)
    message = r"histories on disk need a system that can lock files .*: use store='host'"
    with pytest.raises(RuntimeError, match=message):
        gas.History(5, 2, store="disk", path=tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_memory_that_nobody_tells(monkeypatch):
    monkeypatch.setattr(memory, "bytes_in_proc", lambda file, field: None)
    monkeypatch.setattr(memory, "CGROUPS", {})
    monkeypatch.setattr(memory, "resource", None)
    assert memory.free_memory() == 2**63
    check_fits(10**12)


@pytest.mark.parametrize("controllers", ["4:cpu,memory", "0:"])
def test_the_memory_of_control_groups(tmp_path, monkeypatch, controllers):
    """The own group may take 500 bytes more, and the one above 300 and its page cache of 50."""
    monkeypatch.setattr(memory, "CGROUPS", dict.fromkeys(["memory", ""], (f"{tmp_path}", "a", "b")))
    own = tmp_path / "job" / "step"
    own.mkdir(parents=True)
    for folder, limit, used in ((own, "700", "200"), (own.parent, "1300", "1000")):
        (folder / "a").write_text(limit + "\n")
        (folder / "b").write_text(used + "\n")
    (own.parent / "memory.stat").write_text("active_file 20\ninactive_file 30\n")
    (tmp_path / "a").write_text("max")
    (tmp_path / "b").write_text("2000")
    groups = tmp_path / "cgroup"
    groups.write_text(f"5:pids:/\n{controllers}:/job/step\n")
    assert list(memory._free_cgroup_bytes(str(groups))) == [500, 350]
    assert list(memory._free_cgroup_bytes(f"{tmp_path}/missing")) == []


def test_reports(monkeypatch):
    monkeypatch.setattr(report, "resource", None)
    monkeypatch.setattr(report, "Path", lambda file: Path("/nowhere"))
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(memory, "Path", lambda file: Path("/nowhere"))
    report.reset_peak_rss()
    assert math.isnan(report.peak_rss_bytes())
    with memory.PeakMemory() as peak:
        pass
    assert math.isnan(peak.own)
    assert math.isnan(peak.mapped)
    assert report.machine()["memory_bytes"] is None


@pytest.mark.slow
def test_a_system_that_has_none_of_it():
    code = WITHOUT + (
        "import gas\n"
        "history = gas.History(6, 2)\n"
        "history.push(torch.ones(6, 2))\n"
        "assert history.pull(torch.tensor([5, 0])).tolist() == [[1, 1], [1, 1]]\n"
        "try:\n"
        "    gas.History(6, 2, store='disk')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "use store='host'" in done.stdout
