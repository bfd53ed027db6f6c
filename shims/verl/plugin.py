"""Shim (loop side, above the client): importing this module registers the shim in verl.

The target of the `verl.plugins` entry point, which verl imports and calls nothing of. Imports only
`registration`.
"""

from .registration import register_loudly

register_loudly()
