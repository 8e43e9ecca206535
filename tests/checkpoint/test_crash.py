"""A process is killed, a disk is full, the power fails: the last checkpoint is there."""

import builtins
import contextlib
import errno
import os
import random
import time

import pytest
import torch
from conftest import FORKS

import gas
from gas.checkpoint import checkpoints
from gas.checkpoint import files as of_disk
from gas.cli import Experiment, Settings
from gas.cli.checkpoints import Checkpoints
from gas.training import Run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs the calls of POSIX")


def model_of(number):
    """Return a model whose weights and histories say which it is."""
    model = gas.models.GraphSAGE(20, 3, 4, 2, num_layers=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    for history in model.histories:
        history.push(torch.full((20, 4), float(number)))
    return model


def check(folder, *numbers):
    """Return the newest checkpoint is sound, and one of these."""
    model = model_of(-1)
    number = gas.load(folder, model)["number"]
    assert number in numbers
    assert all(bool((values == number).all()) for values in model.parameters())
    for history in model.histories:
        assert bool((history.emb[:3] == number).all())
        assert len(history.emb.unique()) <= 2
    return number


def change(model, number):
    """Another number in all weights, and in some rows of the histories."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    for history in model.histories:
        history.push(torch.full((3, 4), float(number)), torch.arange(3))
    return model


# The power fails ----------------------------------------------------------------------------------


class Disk:
    """Files and folders as of their last sync: the state after a power failure.

    After a power failure, an entry of a folder that was not synced may be there or not, and what
    wasn't synced of a file may be there, or zeros, or nothing.
    """

    CALLS = ("mkdir", "rename", "link", "unlink", "rmdir")

    def __init__(self, root, monkeypatch):
        self.root = root
        self.files, self.folders, self.held = {}, {}, []
        self.points = 0
        self.crash = lambda: None
        self._take(root)
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._watching(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._watching(self._fsync(os.fsync)))

    def _take(self, path):
        """Everything is on the disk."""
        if path.is_dir():
            self.folders[path.stat().st_ino] = self._entries(path)
            for child in path.iterdir():
                self._take(child)
        else:
            self.files[path.stat().st_ino] = path.read_bytes()

    @staticmethod
    def _entries(path):
        return {child.name: (child.stat().st_ino, child.is_dir()) for child in path.iterdir()}

    def _fsync(self, call):
        def fsync(handle):
            call(handle)
            path = self.root / os.readlink(f"/proc/self/fd/{handle}")
            number = path.stat().st_ino
            if path.is_dir():
                self.folders[number] = self._entries(path)
            else:
                self.files[number] = path.read_bytes()

        return fsync

    def _watching(self, call):
        def watched(*args, **kwargs):
            if call.__name__ == "unlink":  # Its number must not be given to another.
                self.held.append(os.open(args[0], os.O_RDONLY))
            self.crash()
            result = call(*args, **kwargs)
            self.crash()
            return result

        return watched

    def after(self, target, listing, content):
        """Write what a crash may leave; the others say what becomes of what wasn't synced."""

        def build(number, path, where):
            path.mkdir()
            synced = self.folders.get(number, {})
            current = {} if where is None else self._entries(where)
            names = {
                name: entry
                for name in {*synced, *current}
                if (entry := self._choose(listing, synced.get(name), current.get(name)))
            }
            for name, (inode, is_dir) in names.items():
                now = None if where is None else where / name
                if now is None or current.get(name) != (inode, is_dir):
                    now = None
                if is_dir:
                    build(inode, path / name, now)
                    continue
                known = self.files.get(inode)
                if known is None:
                    written = b"" if now is None else now.read_bytes()
                    known = {"nothing": b"", "zeros": bytes(len(written)), "all": written}[content]
                (path / name).write_bytes(known)

        build(self.root.stat().st_ino, target, self.root)

    @staticmethod
    def _choose(listing, synced, current):
        if synced == current:
            return synced
        if listing == "some":
            listing = random.choice(("synced", "current"))
        return synced if listing == "synced" else current


@pytest.mark.slow
@pytest.mark.parametrize("listing", ["synced", "current", "some"])
@pytest.mark.parametrize("content", ["nothing", "zeros", "all"])
def test_the_power_fails(tmp_path, monkeypatch, listing, content):
    random.seed(0)
    folder = tmp_path / "disk"
    folder.mkdir()
    model = model_of(1)
    for number in (1, 2):
        change(model, number)
        gas.save(folder, model, keep=2, number=number)
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        found = []

        def crash():
            disk.crash = lambda: None  # What follows isn't part of it.
            disk.points += 1
            target = tmp_path / f"after_{disk.points}"
            disk.after(target, listing, content)
            found.append(check(target, 2, 3))
            disk.crash = crash

        disk.crash = crash
        gas.save(folder, change(model, 3), keep=2, number=3)  # Rows that changed, and a link.
    assert disk.points > 30
    assert found[0] == 2
    assert found[-1] == 3
    assert found == sorted(found) or listing == "some"
    check(folder, 3)
    for handle in disk.held:
        os.close(handle)


def test_the_disk_tells_a_file_that_was_not_synced(tmp_path, monkeypatch):
    """That the simulation above finds what it is for."""
    folder = tmp_path / "disk"
    folder.mkdir()
    gas.save(folder, model_of(1), number=1)
    monkeypatch.setattr(of_disk, "flush_to_disk", lambda stream: stream.flush())
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        gas.save(folder, model_of(2), number=2)
        disk.after(tmp_path / "after", "current", "zeros")
    with pytest.raises(gas.checkpoint.CheckpointError, match="can't be read as JSON"):
        check(tmp_path / "after", 1)


# The disk is full ---------------------------------------------------------------------------------


class Full:
    """A disk that is full after so many bytes, or when something is done for the n-th time."""

    def __init__(self, monkeypatch, calls):
        self.left = calls
        monkeypatch.setattr(of_disk, "open", self.open, raising=False)
        for name in ("fsync", "mkdir", "rename"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def counted(self, call):
        def counting(*args, **kwargs):
            self.count()
            return call(*args, **kwargs)

        return counting

    def open(self, *args, **kwargs):
        stream = builtins.open(*args, buffering=0, **kwargs)  # noqa: SIM115
        full = self

        class Stream:
            def write(self, piece):
                full.count()
                return stream.write(piece)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                stream.close()

            def __getattr__(self, name):
                return getattr(stream, name)

        return Stream()


def test_the_disk_is_full(tmp_path, monkeypatch):
    folder = tmp_path / "disk"
    model = model_of(1)
    gas.save(folder, model, number=1)
    change(model, 2)
    calls, errors = 0, set()
    for calls in range(1000):
        with monkeypatch.context() as patched:
            Full(patched, calls)
            try:
                gas.save(folder, model, number=2)
            except OSError as error:
                errors.add(error.errno)
            else:
                break
        whole = check(folder, 1, 2)
        left = {path.name for path in folder.iterdir()}
        assert left <= {"checkpoint_000001", "checkpoint_000002"}
        if whole == 2:  # It was the last sync of the folder that failed.
            break
    assert calls > 30
    assert errors == {errno.ENOSPC}
    gas.save(folder, change(model, 3), number=3)
    check(folder, 3)


# The process is killed ----------------------------------------------------------------------------


def experiment():
    data, _, classes = gas.get_data("data", "planted:400")
    settings = Settings.default("gcn").replace(
        num_layers=3, hidden_channels=16, num_parts=8, batch_size=1, epochs=25
    )
    return Experiment(data, classes, "gcn", settings, log=False)


def train(folder, every, losses):
    """Train in a process that may be killed."""
    torch.set_num_threads(1)
    run = Run()
    points = None if folder is None else Checkpoints(folder, every, resume=True)
    experiment().run(7, run=run, checkpoints=points)
    losses.put(run.loss)


@pytest.mark.slow  # Kills a process at many moments.
@pytest.mark.parametrize("every", [1, "0.02s"])
def test_killed_at_any_moment(tmp_path, every):
    losses = FORKS.Queue()
    whole = FORKS.Process(target=train, args=(None, every, losses))
    whole.start()
    expected = losses.get(timeout=120)
    whole.join()
    draw = random.Random(str(every))
    kills = 0
    for _ in range(5):
        process = FORKS.Process(target=train, args=(tmp_path, every, losses))
        process.start()
        enough = of_disk.next_number(tmp_path) + draw.randint(1, 4)
        while process.is_alive() and of_disk.next_number(tmp_path) < enough and kills < 4:
            time.sleep(0.001)
        if kills < 4:
            time.sleep(draw.uniform(0, 0.05))
            kills += process.is_alive()
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
    assert kills >= 3
    assert losses.get(timeout=60) == expected
    assert len(checkpoints(tmp_path)) == 1


def test_killed_while_it_writes(tmp_path):
    """Unfinished files of another process are removed, unless it is still writing."""
    gas.save(tmp_path, model_of(1), number=1)
    with contextlib.suppress(RuntimeError), of_disk.write_checkpoint(tmp_path, 2) as writer:
        writer.write("model.safetensors", lambda stream: stream.write(b"x") and None)
        other = tmp_path / ".checkpoint_000007.writing"
        other.mkdir()
        (other / "state.safetensors").write_bytes(b"left")
        path = gas.save(tmp_path, model_of(3), number=3)  # While the first is being written.
        assert path.name == "checkpoint_000003"
        assert not other.exists()
        assert (tmp_path / ".checkpoint_000002.writing").exists()
        raise RuntimeError
    assert not (tmp_path / ".checkpoint_000002.writing").exists()
    check(tmp_path, 3)
