"""Wire: typed objects to bytes and back (imports numpy, xxhash, errors and the contract's classes).

docs/protocol.md specifies the format. No pickle anywhere: only classes of a fixed list are built.
"""

from .codec import decode, decode_apart, digest, encode, seal
from .frames import ALIGNMENT, MAGIC, Frame, header_bytes, join, parse

__all__ = [
    "ALIGNMENT",
    "MAGIC",
    "Frame",
    "decode",
    "decode_apart",
    "digest",
    "encode",
    "header_bytes",
    "join",
    "parse",
    "seal",
]
