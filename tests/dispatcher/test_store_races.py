"""A save that is cancelled while a thread moves it into place: whole under its name, or absent."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
from dispatcher_fakes import in_loop, running

from remote_rl.dispatcher import store as module
from remote_rl.dispatcher.store import Store
from remote_rl.errors import ConflictError, InvalidRequestError, RunLostError
from remote_rl.requests import Export, Save
from remote_rl.types import CheckpointInfo

INFO = CheckpointInfo(name="a", version=1, optimizer=True)


def begun(store, kind="checkpoint"):
    partial = store.begin(kind, "a")
    (partial / "state" / "weights.bin").write_bytes(b"weights")
    return partial


def finish(store, kind, partial):
    if kind == "checkpoint":
        return store.finish_checkpoint(partial, INFO, {})
    return store.finish_export(partial, "a")


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_what_was_given_up_first_never_gets_its_name(tmp_path, kind, monkeypatch):
    store = Store(tmp_path)
    partial = begun(store, kind)
    monkeypatch.setattr(module.shutil, "rmtree", lambda path: None)  # it is quicker than that
    store.abandon(partial)
    with pytest.raises(ConflictError, match=f"{kind} 'a' was given up before it was whole"):
        finish(store, kind, partial)
    assert list((tmp_path / f"{kind}s").iterdir()) == []
    store.abandon(partial)  # as the failure of the finish does
    monkeypatch.undo()
    assert list(Store(tmp_path).root().glob(".partial*")) == []  # swept


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_what_has_its_name_first_stays_whole(tmp_path, kind):
    store = Store(tmp_path)
    partial = begun(store, kind)
    finish(store, kind, partial)
    store.abandon(partial)
    folder = tmp_path / f"{kind}s" / "a"
    inside = folder / "state" / "weights.bin" if kind == "checkpoint" else folder / "weights.bin"
    assert inside.read_bytes() == b"weights"
    assert [info.name for info in store.checkpoints()] == (["a"] if kind == "checkpoint" else [])


def test_a_writer_that_is_still_at_work_does_not_fail_the_cleaning(tmp_path, monkeypatch, caplog):
    store = Store(tmp_path)
    partial = begun(store)

    def busy(path):
        raise OSError("Directory not empty")

    monkeypatch.setattr(module.shutil, "rmtree", busy)
    store.abandon(partial)
    assert "left to be swept at the next start" in caplog.text
    monkeypatch.undo()
    Store(tmp_path)
    assert not partial.exists()


WEIGHTS = {"checkpoint": "state/weights.bin", "export": "weights.bin"}
USES = {
    "files": lambda store, kind: store.files(kind, "a"),
    "listing": lambda store, kind: store.listing(kind, "a"),
    "read": lambda store, kind: store.read(kind, "a", WEIGHTS[kind], 0, 9),
    "delete": lambda store, kind: store.delete(kind, "a"),
    "checkpoint": lambda store, kind: store.checkpoint("a"),
    "checkpoints": lambda store, kind: store.checkpoints(),
}


@pytest.mark.parametrize("again", [False, True], ids=["gone", "replaced"])
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
@pytest.mark.parametrize("use", USES)
def test_what_another_deletes_at_any_moment_is_refused_by_name(
    tmp_path, use, kind, again, monkeypatch
):
    """At each of the file system's own calls, with and without another one saved in its place: the
    answer is whole or a refusal by name, without a path of the server and without its own name as
    the one that was meant."""
    moment, refused = 0, []
    while True:
        folder = tmp_path / str(moment)
        store, other = Store(folder), Store(folder)
        finish(store, kind, begun(store, kind))
        calls, busy = 0, False

        def counted(moment=moment, other=other):
            nonlocal calls, busy
            if busy:
                return
            calls += 1
            if calls == moment + 1:
                busy = True
                other.delete(kind, "a")
                if again:
                    finish(other, kind, begun(other, kind))
                busy = False

        whole = store.listing(kind, "a")[0]
        with disturbed(monkeypatch, counted):
            try:
                answer = USES[use](store, kind)
                if use == "listing":
                    assert dict.fromkeys(answer[0]) == dict.fromkeys(whole)
                if use == "read":
                    assert answer == (b"weights", 7)
            except (InvalidRequestError, ConflictError) as error:
                refused.append(str(error))
        if calls <= moment:
            break
        moment += 1
    assert moment > 0
    for text in refused:
        assert "'a'" in text
        assert str(tmp_path) not in text
        assert "mean 'a'" not in text


def after(heard, call):
    def first(*arguments, **named):
        heard()
        return call(*arguments, **named)

    return first


@contextlib.contextmanager
def disturbed(monkeypatch, heard):
    """Calls `heard` before each look at the file system and each use of it."""
    with monkeypatch.context() as patched:
        for owner, name in (
            *((Path, name) for name in ("is_dir", "is_file", "is_symlink", "stat", "glob")),
            *((Path, name) for name in ("rglob", "open", "rename", "read_text")),
        ):
            patched.setattr(owner, name, after(heard, getattr(owner, name)))
        yield


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_read_is_of_what_was_listed_or_refused(tmp_path, kind):
    store = Store(tmp_path)
    finish(store, kind, begun(store, kind))
    files, identity = store.listing(kind, "a")
    path = next(path for path in files if path.endswith("weights.bin"))
    assert store.read(kind, "a", path, 0, 9, identity) == (b"weights", 7)
    assert Store(tmp_path).listing(kind, "a") == (files, identity)  # another start's too
    store.delete(kind, "a")
    with pytest.raises(InvalidRequestError, match=f"no {kind} 'a'"):
        store.read(kind, "a", path, 0, 9, identity)
    finish(store, kind, begun(store, kind))  # the same bytes, and yet another one
    for each in (path, "gone since"):
        with pytest.raises(ConflictError, match=r"was replaced .* start the download again"):
            store.read(kind, "a", each, 0, 9, identity)
    assert store.read(kind, "a", path, 0, 9) == (b"weights", 7)


@pytest.mark.parametrize("operation", ["save", "export"])
@in_loop
async def test_a_run_that_is_closed_in_mid_save_leaves_no_half_of_it(
    tmp_path, monkeypatch, operation
):
    held, reached = threading.Event(), threading.Event()
    place = Store._place

    def slow(self, *arguments, **named):
        reached.set()
        held.wait(60)
        return place(self, *arguments, **named)

    monkeypatch.setattr(Store, "_place", slow)
    request = Save(name="a") if operation == "save" else Export(name="a")
    async with running(checkpoint_dir=tmp_path) as talk:
        saving = asyncio.create_task(talk.error(operation, 1, request))
        assert await asyncio.to_thread(reached.wait, 60)
        await talk.dispatcher.close()
        held.set()
        assert type(await saving) is RunLostError
        for thread in talk.dispatcher.executors["training"]._threads:
            thread.join(60)
    again = Store(tmp_path)
    assert again.checkpoints() == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
