"""Shim (loop side, above the client): weights that verl's decoupled PPO keeps aside.

Imports remote_rl. verl copies a model to its workers' memory by a number; here the number stands
for a snapshot, which the run holds beside the weights.
"""

from __future__ import annotations

import uuid

from remote_rl import Session, errors


class WeightsAside:
    """The snapshots of one training, by verl's numbers. Their names are this training's own, so
    that those of another one on the same run are left alone."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefix = f"verl-{uuid.uuid4().hex[:12]}"
        self._held: set[int] = set()

    def save(self, number: int) -> None:
        """Keeps the current weights, in the place of those of the same number."""
        self.clear(number)
        self._session.training.snapshot(self._name(number)).result()
        self._held.add(number)

    def restore(self, number: int) -> None:
        """Makes those weights the current ones; the optimizer's state stays as it is."""
        if number not in self._held:
            raise errors.InvalidRequestError(
                f"restore_model_from_cpu({number}) was called before save_model_to_cpu({number})"
            )
        self._session.training.restore_snapshot(self._name(number)).result()

    def clear(self, number: int) -> None:
        """Forgets them, where there are any, as verl does."""
        if number in self._held:
            self._session.training.drop_snapshot(self._name(number)).result()
            self._held.remove(number)

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"
