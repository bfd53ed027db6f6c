"""Shims (loop side, above the client): translate frameworks to remote_rl. Imports nothing."""
