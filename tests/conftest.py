"""What all tests share: hypothesis draws the same examples every time, and a busy machine fails
nothing; REMOTE_RL_NIGHTLY=1 draws many others."""

import os

from hypothesis import settings

settings.register_profile("remote_rl", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=3000)
settings.load_profile("nightly" if os.environ.get("REMOTE_RL_NIGHTLY") == "1" else "remote_rl")
