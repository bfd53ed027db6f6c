"""Dispatcher: runs one backend for many clients (imports the contract; no transport, no client)."""

from .clock import Clock, SystemClock
from .dispatcher import Dispatcher

__all__ = ["Clock", "Dispatcher", "SystemClock"]
