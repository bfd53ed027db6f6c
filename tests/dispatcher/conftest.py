"""Hypothesis draws the same examples every time; a busy machine fails nothing."""

from hypothesis import settings

settings.register_profile("remote_rl", deadline=None, derandomize=True)
settings.load_profile("remote_rl")
