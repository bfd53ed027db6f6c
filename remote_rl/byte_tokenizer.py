"""Contract: the dependency-free tokenizer of the mock, shared by client and backend (imports attrs,
numpy, errors, fields)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import attrs
import numpy as np

from .errors import InvalidRequestError
from .types.fields import integer, plain, strict

_BYTES = 256


@strict
@attrs.frozen(kw_only=True)
class ByteTokenizer:
    """One token a byte of UTF-8, and three special ids after them.

    Ids 0 to 255 are bytes; 256, 257 and 258 are beginning, end and padding. `vocab_size` may be
    larger than these 259; the ids above stand for no text.
    """

    bos_token_id: ClassVar[int] = 256
    eos_token_id: ClassVar[int] = 257
    pad_token_id: ClassVar[int] = 258
    bos_token: ClassVar[str] = "<bos>"
    eos_token: ClassVar[str] = "<eos>"
    pad_token: ClassVar[str] = "<pad>"

    vocab_size: int = attrs.field(default=259, converter=plain, validator=integer(minimum=259))

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`, with the beginning's id before them if wanted. Lone surrogates have
        no bytes and are refused."""
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"character {error.start} of the text is a lone surrogate, which has no UTF-8 form"
            ) from error
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8, as at a cut inside a character, become U+FFFD.

        Special ids give their names, or nothing with `skip_special_tokens`."""
        pieces: list[bytes] = []
        names = {
            self.bos_token_id: self.bos_token,
            self.eos_token_id: self.eos_token,
            self.pad_token_id: self.pad_token,
        }
        for token in np.asarray(list(ids), dtype=np.int64).tolist():
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} lies outside the vocabulary of {self.vocab_size}"
                )
            if token < _BYTES:
                pieces.append(bytes((token,)))
            elif not skip_special_tokens:
                pieces.append(names.get(token, "").encode())
        return b"".join(pieces).decode("utf-8", errors="replace")
