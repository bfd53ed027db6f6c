"""Shim (loop side, above the client): a run that is lost, in verl's words.

Imports verl's finder of checkpoints, remote_rl and what all shims share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from remote_rl import errors

from ..common.checkpoints import SavedFolders
from .options import Options

#: what a session raises whose run it can't reach, or no longer has
LOST: Final = (errors.RunLostError, errors.UnreachableError)


def what_happened(error: errors.RemoteRLError) -> str:
    """The error's own words without its advice, which is of one session: another process may have
    saved checkpoints that this session has not seen."""
    return error.message.partition("; ")[0]


def run_lost(config: DictConfig, error: Any) -> errors.RunLostError:
    """What a training ends with that has lost its run: why, and how verl goes on.

    config: verl's whole configuration. error: one of LOST, of whichever process noticed it first,
    perhaps in Ray's wrapping. `details["last_checkpoint"]` is the server's name of verl's last
    checkpoint, None where there is none.
    """
    url = Options.of(config.actor_rollout_ref.rollout).url
    why = what_happened(getattr(error, "cause", error))
    found = find_latest_ckpt_path(str(Path(config.trainer.default_local_dir).absolute()))
    saved = None if found is None else SavedFolders.manifest(Path(found) / "actor")
    if saved is None:
        return errors.RunLostError(
            f"the training has lost its run ({why}) before its first checkpoint was saved; once a "
            f"server answers at {url}, start it anew, and see trainer.save_freq",
            last_checkpoint=None,
        )
    name = saved["checkpoint"]
    return errors.RunLostError(
        f"the training has lost its run ({why}); once a server with the same --checkpoint-dir "
        f"answers at {url}, start it again with trainer.resume_mode=auto: it goes on from {found}, "
        f"which is {name!r} on the server",
        last_checkpoint=name,
    )
