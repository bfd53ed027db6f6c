"""Package: the backends that come with remote_rl, each imported on first use, through its entry
point (imports nothing)."""
