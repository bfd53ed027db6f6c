"""Shim (loop side, above the client): what the shims of all frameworks share (imports nothing;
its modules import attrs, numpy, torch and remote_rl, never a framework)."""
