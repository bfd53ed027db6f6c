"""Arctic backend: stop strings on the bytes that tokens stand for (imports transformers on use).

What a token stands for is known as bytes, so a match is exact also where a character is spread over
tokens: no UTF-8 character is part of another.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..model_directory import has_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space
_TRIALS, _TRIAL_LENGTH = 32, 24
_TRIAL_TEXT = "a b  c, gr\u00fc\u00dfe \u4f60\u597d \U0001f642"


class TokenBytes:
    """What each id adds to the text, as bytes; special tokens add nothing."""

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._tokenizer = backend
        self._byte_level = "ByteLevel" in decoder
        self._added = {
            number: b"" if token.special else token.content.encode()
            for number, token in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_CHARACTER[each] for each in piece)
        match = _BYTE_TOKEN.fullmatch(piece)
        if match:
            return bytes([int(match.group(1), 16)])
        return str(piece).replace(_SPACE, " ").encode()

    def agrees(self) -> bool:
        """Whether ids read the same here and by the tokenizer itself: random ones that are whole
        characters (what decoders make of broken ones differs), and a text's. A space at the very
        beginning is not compared: some tokenizers drop it."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            whole = [token for token in range(size) if _is_text(self[token])]
        except KeyError:  # a character that stands for no byte
            return False
        numbers = random.Random(0)
        trials = [numbers.choices(whole, k=_TRIAL_LENGTH) for _ in range(_TRIALS)] if whole else []
        trials.append(self._tokenizer.encode(_TRIAL_TEXT, add_special_tokens=False).ids)
        return all(
            b"".join(self[token] for token in ids).decode(errors="replace").lstrip(" ")
            == self._tokenizer.decode(ids, skip_special_tokens=True).lstrip(" ")
            for ids in trials
        )


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    # how byte-level BPE writes bytes as printable characters (Radford et al. 2019, GPT-2)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def token_bytes(directory: Path, trust_remote_code: bool = False) -> TokenBytes | None:
    """For the tokenizer in this directory; None where there is none, or one whose tokens can't be
    told apart as bytes, and stop strings are not offered."""
    if not has_tokenizer(directory):
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    table = TokenBytes(tokenizer)
    return table if table.agrees() else None


class StopStrings:
    """The tail of one sample's text, and the token that each byte of it came from. first: position
    from which on a token may complete a stop string."""

    def __init__(self, stops: Sequence[str], table: TokenBytes, first: int = 0) -> None:
        self._first = first
        self._patterns = sorted({stop.encode() for stop in stops}, key=len, reverse=True)
        self._longest = len(self._patterns[0])
        self._table = table
        self._text = bytearray()
        self._origins: list[int] = []

    def add(self, token: int, position: int) -> int | None:
        """Takes in the token at this position; the position of the first token that holds part of
        the stop string that is now complete (the earliest in the text, of these the longest), else
        None."""
        piece = self._table[token]
        self._text += piece
        self._origins += [position] * len(piece)
        if position >= self._first:
            # what an earlier token completed did not count then, and does not now
            known = len(self._text) - len(piece)
            found = [
                (place, -len(pattern))
                for pattern in self._patterns
                if (place := self._text.find(pattern, max(known - len(pattern) + 1, 0))) >= 0
            ]
            if found:
                return self._origins[min(found)[0]]
        spare = len(self._text) - self._longest + 1
        if spare > 0:
            del self._text[:spare], self._origins[:spare]
        return None
