"""Shim (loop side, above the client): what SkyRL's trainer may ask of the dispatch, and what not.

Imports remote_rl's errors.
"""

from __future__ import annotations

from typing import Any, NoReturn

from remote_rl import errors


def policy_or_reference(model: str) -> str:
    """`model`, "policy" or "ref"; any other is refused."""
    if model not in ("policy", "ref"):
        raise errors.UnsupportedError(
            f"the model {model!r} is not there: a run holds the policy and its reference; leave "
            "trainer.critic.model.path unset"
        )
    return model


def policy_only(model: str) -> None:
    """Refuses all but "policy"."""
    if policy_or_reference(model) != "policy":
        raise errors.UnsupportedError(f"the model {model!r} is not trained, only 'policy' is")


def refuse_arguments(
    loss_fn: str | None,
    loss_fn_config: dict[str, Any] | None,
    model_id: str | None,
    others: dict[str, Any],
) -> None:
    """Refuses what a call of SkyRL's dispatch can carry and the shim does not."""
    given = {"loss_fn": loss_fn, "loss_fn_config": loss_fn_config, "model_id": model_id, **others}
    for name, value in given.items():
        if value is not None:
            raise errors.UnsupportedError(
                f"{name}={value!r} is not carried to the server: the loss is that of "
                "trainer.algorithm, and a run holds one model"
            )


def refuse_profiler() -> NoReturn:
    """The workers that SkyRL's profiler would trace are the server's."""
    raise errors.UnsupportedError(
        "SkyRL's profiler traces workers of its own, and here the server has them; leave "
        "trainer.policy.torch_profiler_config.enable as it is"
    )
