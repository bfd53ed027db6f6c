"""Client: the model's tokenizer from what the backend sends
(imports the contract; transformers only where a Hugging Face tokenizer is loaded)."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ProtocolError, UnsupportedError
from ..protocol import TokenizerFiles


def load_tokenizer(received: TokenizerFiles) -> Any:
    """A `ByteTokenizer`, or transformers' own class for a Hugging Face directory."""
    if received.kind == "bytes":
        from ..byte_tokenizer import ByteTokenizer

        return ByteTokenizer(**received.options)
    if received.kind != "huggingface":
        raise ProtocolError(
            f"the backend's tokenizer is of kind {received.kind!r}, which this version of "
            "remote-rl doesn't know; install a newer one"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "the model's tokenizer is a Hugging Face one; pip install 'remote-rl[tokenizer]'"
        ) from error
    with tempfile.TemporaryDirectory(prefix="remote_rl-tokenizer-") as folder:
        for name, data in received.files.items():
            if PurePosixPath(name).name != name:
                raise ProtocolError(f"the tokenizer's file {name!r} is not a plain file name")
            (Path(folder) / name).write_bytes(bytes(data))
        return AutoTokenizer.from_pretrained(folder)
