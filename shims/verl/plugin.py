"""Shim (loop side, above the client): importing this module registers the shim in verl.

The target of the `verl.plugins` entry point and of VERL_USE_EXTERNAL_MODULES, both of which import
a module and call nothing. Imports only `registration`.
"""

from .registration import register_loudly

register_loudly()
