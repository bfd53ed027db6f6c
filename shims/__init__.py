"""Package: the shims (loop side, above the client), which translate frameworks to remote_rl
(imports nothing)."""
