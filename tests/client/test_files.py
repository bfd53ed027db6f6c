"""Export, download and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client_support import SessionFactory, learn, small_mock

from remote_rl import Batch, Session
from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.errors import ConflictError, InvalidRequestError, UnsupportedError


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_export_writes_a_hugging_face_directory(mocked: Session, batch: Batch) -> None:
    learn(mocked, batch, steps=2)
    receipt = mocked.training.export("final").result()
    written = files(Path(receipt.path))
    assert set(receipt.files) == set(written) >= {"config.json", "model.safetensors"}
    assert receipt.bytes == sum(map(len, written.values()))
    assert (receipt.name, receipt.version) == ("final", 2)
    assert json.loads(written["config.json"])["model_type"] == "remote_rl_mock"
    with pytest.raises(ConflictError, match="export 'final' exists"):
        mocked.training.export("final").result()


def test_export_holds_the_weights_of_its_moment(mocked: Session, batch: Batch) -> None:
    first = mocked.training.export("first")
    learn(mocked, batch)
    second = mocked.training.export("second")
    weights = [
        (Path(each.result().path) / "model.safetensors").read_bytes() for each in (first, second)
    ]
    assert weights[0] != weights[1]


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_download_copies_every_file(
    kind: str, mocked: Session, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remote_rl.client import download

    monkeypatch.setattr(download, "_CHUNK", 1000)  # so that the files come in several pieces
    learn(mocked, batch)
    if kind == "checkpoint":
        mocked.training.save("a").result()
        source = tmp_path / "run" / "checkpoints" / "a"
    else:
        source = Path(mocked.training.export("a").result().path)
    destination = mocked.download(kind, "a", tmp_path / "here" / "deep")
    assert destination == tmp_path / "here" / "deep"
    assert files(destination) == files(source)
    assert max(map(len, files(source).values())) > 2000


def test_a_downloaded_checkpoint_can_be_loaded_elsewhere(
    session_factory: SessionFactory, mocked: Session, batch: Batch, tmp_path: Path
) -> None:
    learn(mocked, batch, steps=2)
    expected = mocked.training.forward(batch).result().logprobs
    mocked.training.save("a").result()
    mocked.download("checkpoint", "a", tmp_path / "other" / "checkpoints" / "a")
    other = session_factory(small_mock(), checkpoint_dir=tmp_path / "other")
    other.training.load("a").result()
    assert other.training.forward(batch).result().logprobs == expected


def test_download_refuses(mocked: Session, tmp_path: Path) -> None:
    mocked.training.export("first").result()
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("keep")
    with pytest.raises(ConflictError, match="not an empty directory"):
        mocked.download("export", "first", full)
    with pytest.raises(ConflictError, match="not an empty directory"):
        mocked.download("export", "first", full / "mine")
    assert files(full) == {"mine": b"keep"}
    with pytest.raises(InvalidRequestError, match="no export 'frist'; did you mean 'first'"):
        mocked.download("export", "frist", tmp_path / "b")
    with pytest.raises(InvalidRequestError, match="did you mean 'export'"):
        mocked.download("exports", "first", tmp_path / "c")
    assert not (tmp_path / "b").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mocked.download("export", "first", empty) == empty


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
@pytest.mark.parametrize("before", ["read 1", "read 2", "read 3", "read 5"])
def test_a_download_is_of_one_checkpoint_or_fails(
    kind: str,
    before: str,
    mocked: Session,
    batch: Batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever it is deleted, and another one saved under its name."""
    from remote_rl.client import download

    monkeypatch.setattr(download, "_CHUNK", 1000)
    training = mocked.training
    write = training.save if kind == "checkpoint" else training.export
    write("a").result()
    submit, reads = mocked._submit, 0

    def replacing(name: str, request: Any, *more: Any, **named: Any) -> Any:
        nonlocal reads
        if name == "read_file":
            reads += 1
            if f"read {reads}" == before:
                training.delete("a", kind=kind).result()  # type: ignore[arg-type]
                learn(mocked, batch)
                write("a").result()
        return submit(name, request, *more, **named)

    monkeypatch.setattr(mocked, "_submit", replacing)
    with pytest.raises(ConflictError, match=f"{kind} 'a' was replaced .* the download again"):
        mocked.download(kind, "a", tmp_path / "here")
    assert not (tmp_path / "here").exists()
    again = mocked.download(kind, "a", tmp_path / "here")
    assert files(again) == files(tmp_path / "run" / f"{kind}s" / "a")


@pytest.mark.parametrize(("size", "piece"), [(9, b"12345"), (5, b""), (5, b"123456")])
def test_a_file_of_another_size_than_was_listed_is_no_download(
    size: int, piece: bytes, mocked: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remote_rl.dispatcher.store import Store

    mocked.training.export("a").result()
    monkeypatch.setattr(Store, "files", lambda *_: {"weights": 5})
    monkeypatch.setattr(Store, "read", lambda *_: (piece, size))
    with pytest.raises(ConflictError, match="'weights' of export 'a' was listed with 5 bytes"):
        mocked.download("export", "a", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_short_pieces_are_put_together(
    mocked: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may give less than was asked for."""
    from remote_rl.dispatcher.store import Store

    path = mocked.training.export("a").result().path
    read = Store.read

    def short(
        self: Store, kind: str, name: str, file: str, offset: int, length: int, *more: Any
    ) -> Any:
        return read(self, kind, name, file, offset, min(length, 777), *more)

    monkeypatch.setattr(Store, "read", short)
    assert files(mocked.download("export", "a", tmp_path / "here")) == files(Path(path))


def test_a_server_that_lists_a_path_outside_is_not_followed(
    mocked: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remote_rl.dispatcher.store import Store

    mocked.training.export("a").result()
    monkeypatch.setattr(Store, "files", lambda *_: {"../../evil": 4})
    with pytest.raises(InvalidRequestError, match="leads out of the directory"):
        mocked.download("export", "a", tmp_path / "in" / "here")
    assert not (tmp_path / "evil").exists()


# -- the tokenizer --------------------------------------------------------------------------------


def test_the_mocks_tokenizer(session_factory: SessionFactory) -> None:
    rl = session_factory(small_mock(vocab_size=300))
    tokenizer = rl.tokenizer().result()
    assert isinstance(tokenizer, ByteTokenizer)
    assert len(tokenizer) == 300
    text = "Gr\u00fc\u00dfe \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < rl.info().result().model.vocab_size


def test_no_tokenizer_where_the_vocabulary_is_too_small(mocked: Session) -> None:
    with pytest.raises(UnsupportedError, match="does not offer the operation 'tokenizer'"):
        mocked.tokenizer()


@pytest.mark.parametrize("prompts", ["text", ["text"], ("a", "b"), [[1], "b"]])
def test_text_is_no_prompt(prompts: Any, mocked: Session) -> None:
    from remote_rl import SamplingParams

    with pytest.raises(
        InvalidRequestError, match=r"token ids, not text: encode prompts with Session\.tokenizer"
    ):
        mocked.sampling.generate(prompts, SamplingParams(max_tokens=1))
