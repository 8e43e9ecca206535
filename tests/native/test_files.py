import json
import os

import pytest

from gas.native import files, lock, parse_json, replace_file, sync_folder, write_json


def test_write_json_is_whole_or_nothing(tmp_path):
    file = tmp_path / "below" / "metrics.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_modes_are_the_users(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "a", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    (tmp_path / "a").chmod(0o604)
    write_json(tmp_path / "a", {})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o604


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    write_json(tmp_path / "a", [1])
    assert (tmp_path / "a").is_symlink()
    assert parse_json((tmp_path / "b").read_bytes()) == [1]


def test_lists_of_whole_numbers_take_one_line(tmp_path):
    write_json(tmp_path / "a.json", {"shape": [3, 4], "values": [0.5]})
    text = (tmp_path / "a.json").read_text()
    assert '"shape": [ 3, 4 ]' in text
    assert json.loads(text) == {"shape": [3, 4], "values": [0.5]}


def test_what_replaces_a_file_has_reached_the_disk_before(tmp_path, monkeypatch):
    """The content first, then the name, then the folder that has it."""
    calls = []
    monkeypatch.setattr(files, "flush_to_disk", lambda stream: calls.append("content"))
    monkeypatch.setattr(files, "sync_folder", lambda path: calls.append("folder"))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("name"), rename(*paths)))
    with replace_file(tmp_path / "a.npy") as file:
        file.write_bytes(b"new")
    assert calls == ["content", "name", "folder"]
    assert (tmp_path / "a.npy").read_bytes() == b"new"


@pytest.mark.parametrize("temporary", [None, ".a.writing"])
def test_a_failure_leaves_the_old_file_alone(tmp_path, temporary):
    (tmp_path / "a").write_bytes(b"old")

    def fail():
        with replace_file(tmp_path / "a", temporary) as file:
            file.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_crash_left_is_overwritten(tmp_path):
    (tmp_path / ".a.writing").write_bytes(b"longer than the new one")
    with replace_file(tmp_path / "a", ".a.writing") as file:
        file.write_bytes(b"new")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'{"a": NaN}', "NaN, which is no number"),
        (b"\xff", "decode"),
        (b"[" * 100000, "nested too deeply"),
        (b"", "Expecting value"),
    ],
)
def test_json_is_read_strictly(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse_json(text)


def test_folders_are_synced_where_the_system_can(tmp_path):
    sync_folder(tmp_path)
    sync_folder(tmp_path / "missing")  # As one that can't be opened.


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_a_lock_excludes_others(tmp_path):
    with lock(tmp_path), pytest.raises(BlockingIOError), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass
