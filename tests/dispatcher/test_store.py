"""Checkpoints and exports on disk: whole or absent, by name, inside their directory."""

import json
import subprocess
import sys

import pytest

from remote_rl.dispatcher.store import Store
from remote_rl.errors import ConflictError, InvalidRequestError
from remote_rl.types import CheckpointInfo


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "run")


def save(store, name, version=1, **fields):
    partial = store.begin("checkpoint", name)
    (partial / "state" / "weights.bin").write_bytes(b"weights")
    info = CheckpointInfo(name=name, version=version, optimizer=True, **fields)
    return store.finish_checkpoint(partial, info, {0: 5, 1: 2})


def test_a_checkpoint_comes_back_as_it_was_saved(store, tmp_path):
    info = save(store, "a", version=3, metadata={"step": 7, "note": "ü"}, reference=True)
    assert info.bytes == len(b"weights")
    assert info.created > 0
    for reader in (store, Store(tmp_path / "run")):
        stored = reader.checkpoint("a")
        assert stored.info == info
        assert stored.counters == {0: 5, 1: 2}
        assert (stored.directory / "weights.bin").read_bytes() == b"weights"


def test_nothing_shows_before_it_is_whole(store, tmp_path):
    partial = store.begin("checkpoint", "a")
    (partial / "state" / "weights.bin").write_bytes(b"wei")
    assert store.checkpoints() == ()
    assert store.latest() is None
    with pytest.raises(InvalidRequestError, match="no checkpoint 'a'"):
        store.checkpoint("a")
    store.abandon(partial)
    assert [path.name for path in (tmp_path / "run").iterdir()] == []


CRASH = """
import os, sys
from pathlib import Path
from remote_rl.dispatcher.store import Store
store = Store(Path(sys.argv[1]))
store.begin("checkpoint", "half")
store.begin("export", "half")
os._exit(9)
"""


def test_what_a_crash_left_is_swept_at_the_start(store, tmp_path):
    save(store, "whole")
    (tmp_path / "run" / "note.txt").write_text("not ours")
    (tmp_path / "run" / ".partial-file").write_text("not ours either")
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path / "run")], timeout=60)
    assert crashed.returncode == 9
    assert len(list((tmp_path / "run").glob(".partial-*/"))) == 2
    swept = Store(tmp_path / "run")
    assert [info.name for info in swept.checkpoints()] == ["whole"]
    assert not list((tmp_path / "run").glob(".partial-*/"))


def test_what_another_run_is_writing_is_not_swept(store, tmp_path):
    partial = store.begin("checkpoint", "a")
    (partial / "state" / "weights.bin").write_bytes(b"weights")
    Store(tmp_path / "run")
    info = CheckpointInfo(name="a", version=1, optimizer=True)
    store.finish_checkpoint(partial, info, {})
    assert [info.name for info in Store(tmp_path / "run").checkpoints()] == ["a"]


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_of_two_runs_that_save_one_name_the_first_has_it(store, tmp_path, kind):
    other = Store(tmp_path / "run")
    first, second = store.begin(kind, "a"), other.begin(kind, "a")
    for partial in (first, second):
        (partial / "state" / "weights.bin").write_bytes(b"weights")
    finish(store, kind, first, "a")
    with pytest.raises(ConflictError, match="'a' exists"):
        finish(other, kind, second, "a")
    other.abandon(second)
    assert not list((tmp_path / "run").glob(".partial-*"))


def finish(store, kind, partial, name):
    if kind == "export":
        return store.finish_export(partial, name)
    return store.finish_checkpoint(
        partial, CheckpointInfo(name=name, version=9, optimizer=False), {}
    )


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_an_existing_name_is_refused_before_and_after_writing(store, kind):
    early, late = store.begin(kind, "a"), store.begin(kind, "a")
    for partial in (early, late):
        (partial / "state" / "written").write_text(partial.name)
    finish(store, kind, early, "a")
    message = f"{kind} 'a' exists; choose another name or delete it"
    with pytest.raises(ConflictError, match=message):
        store.begin(kind, "a")
    with pytest.raises(ConflictError, match=message):
        finish(store, kind, late, "a")
    path = "written" if kind == "export" else "state/written"
    assert store.read(kind, "a", path, 0, 100)[0] == early.name.encode()


def test_listing_is_oldest_first_and_latest_is_the_last(store, monkeypatch):
    clock = iter([300.0, 100.0, 200.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    for name in ("a", "b", "c"):
        save(store, name)
    assert [info.name for info in store.checkpoints()] == ["b", "c", "a"]
    assert store.latest() == "a"


def test_delete_removes_it_and_leaves_nothing(store, tmp_path):
    save(store, "a")
    save(store, "b")
    store.delete("checkpoint", "a")
    assert [info.name for info in store.checkpoints()] == ["b"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]
    with pytest.raises(InvalidRequestError, match="no checkpoint 'a'; valid names are 'b'"):
        store.delete("checkpoint", "a")
    assert save(store, "a").name == "a"


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_the_refusal_of_a_taken_name_says_what_helps(store, kind):
    other = {"checkpoint": "export", "export": "checkpoint"}[kind]
    for each in (kind, other):
        finish(store, each, store.begin(each, "a"), "a")
    with pytest.raises(ConflictError, match=r"first with training.delete\('a'.*\)") as caught:
        store.begin(kind, "a")
    assert ("kind='export'" in str(caught.value)) == (kind == "export")
    store.delete(kind, "a")
    with pytest.raises(InvalidRequestError, match=f"no {kind} 'a'"):
        store.delete(kind, "a")
    assert store.files(other, "a") is not None  # which stays
    finish(store, kind, store.begin(kind, "a"), "a")
    with pytest.raises(InvalidRequestError, match=f"no {kind} 'aa'; did you mean 'a'"):
        store.delete(kind, "aa")


@pytest.mark.parametrize("name", ["../outside", "..", "a/b", "/etc", ""])
def test_no_name_leads_out_of_the_directory(store, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (tmp_path / "run" / "checkpoints").mkdir()
    for use in (
        lambda: store.checkpoint(name),
        lambda: store.delete("checkpoint", name),
        lambda: store.delete("export", name),
        lambda: store.begin("checkpoint", name),
        lambda: store.begin("export", name),
        lambda: store.files("checkpoint", name),
        lambda: store.read("export", name, "manifest.json", 0, 10),
    ):
        with pytest.raises(InvalidRequestError, match="can't be the name of a file"):
            use()
    assert outside.is_dir()


@pytest.mark.parametrize(
    "path",
    [
        *("../manifest.json", "/etc/passwd", "state/../../b/manifest.json", "state", "link", ""),
        *("state/", "./manifest.json", "state//weights.bin", "state/../manifest.json", "a" * 5000),
        *("folder/passwd", "state/weights.bin/", "manifest.json\0", "\ud800"),
    ],
)
def test_only_listed_files_are_read(store, tmp_path, path):
    save(store, "a")
    save(store, "b")
    (tmp_path / "run" / "checkpoints" / "a" / "link").symlink_to("/etc/passwd")
    (tmp_path / "run" / "checkpoints" / "a" / "folder").symlink_to("/etc")
    assert path not in store.files("checkpoint", "a")
    with pytest.raises(InvalidRequestError, match="has no file"):
        store.read("checkpoint", "a", path, 0, 10)


def test_files_are_listed_and_read_in_pieces(store):
    partial = store.begin("export", "model")
    (partial / "state" / "sub").mkdir()
    (partial / "state" / "config.json").write_bytes(b"0123456789")
    (partial / "state" / "sub" / "part").write_bytes(b"ab")
    placed = store.finish_export(partial, "model")
    assert store.files("export", "model") == {"config.json": 10, "sub/part": 2}
    assert (placed / "config.json").is_file()
    assert store.read("export", "model", "config.json", 4, 3) == (b"456", 10)
    assert store.read("export", "model", "config.json", 8, 100) == (b"89", 10)
    assert store.read("export", "model", "config.json", 20, 3) == (b"", 10)
    assert store.read("export", "model", "config.json", 2**70, 3) == (b"", 10)
    with pytest.raises(InvalidRequestError, match="no export 'modle'; did you mean 'model'"):
        store.files("export", "modle")


def test_a_piece_is_read_without_listing_the_others(store, monkeypatch):
    """A folder of thousands of shards is listed once, not for each piece of each."""
    save(store, "a")
    monkeypatch.setattr(store, "files", None)
    assert store.read("checkpoint", "a", "state/weights.bin", 1, 3) == (b"eig", 7)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: json.dumps({**json.loads(text), "format": 99}),
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "version": "new"}),
        lambda text: json.dumps({**json.loads(text), "counters": 3}),
    ],
)
def test_a_damaged_checkpoint_is_named_and_hides_no_other(store, tmp_path, damage):
    save(store, "a")
    save(store, "b", version=2)
    manifest = tmp_path / "run" / "checkpoints" / "b" / "manifest.json"
    manifest.write_text(damage(manifest.read_text()))
    with pytest.raises(ConflictError, match="checkpoint 'b' has a manifest that can't be read"):
        store.checkpoint("b")
    assert [info.name for info in store.checkpoints()] == ["a"]
    assert store.latest() == "a"
    store.delete("checkpoint", "b")
    save(store, "b")
    assert store.latest() == "b"


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(InvalidRequestError, match=r"checkpoint_dir .* can't be used"):
        Store(tmp_path / "file")


def test_a_run_without_a_directory_says_how_to_give_one():
    store = Store(None)
    assert not store.available
    assert store.checkpoints() == ()
    assert store.latest() is None
    with pytest.raises(InvalidRequestError, match="pass checkpoint_dir= to connect"):
        store.begin("checkpoint", "a")
