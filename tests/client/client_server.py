"""The HTTP server in this process, on a loop and thread of its own."""

from remote_rl.testing import LoopbackServer as Server

__all__ = ["Server"]
