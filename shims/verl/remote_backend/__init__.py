"""Shim (loop side, above the client): verl's RemoteBackend seam, which some versions of it have.

Imports nothing until `registering.register_seam` is called. Where V1's trainer is replaced by the
shim's own (`shims.verl.trainer`), here verl's trainer stays and drives a backend, a forwarder
worker and a replica; all three share the shim's other modules.
"""
