"""Backends that come with remote_rl; each is imported on first use, through its entry point."""
