"""Dispatcher: runs one backend for many clients (imports the contract; no transport, no client)."""

from .budget import DEFAULT_BUDGET
from .clock import Clock, SystemClock
from .dispatcher import Dispatcher

__all__ = ["DEFAULT_BUDGET", "Clock", "Dispatcher", "SystemClock"]
