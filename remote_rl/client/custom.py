"""Client: losses that run here: forward, the caller's function, cotangents back
(imports losses)."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ..errors import InvalidRequestError, UnsupportedError
from ..losses import Cotangents, Custom, run_custom
from ..requests import Forward, ForwardBackward
from ..types.batch import Batch
from ..types.ragged import Ragged
from ..types.results import ForwardBackwardResult, Outputs
from ..types.work import Work
from .faces import check_deadline, time_left
from .operation import Call, Operation

if TYPE_CHECKING:
    from .training import Training


def submit_custom(
    face: Training,
    batch: Batch,
    loss: Custom,
    outputs: Outputs | None,
    model: str,
    deadline: float | None,
) -> Operation[ForwardBackwardResult]:
    """Reserves the numbers of forward and forward_backward together, so that whatever is called
    next comes after both; the function runs on a thread of its own.

    If it raises, the second number becomes a failed forward_backward, and the caller's operation
    raises the function's own exception. deadline: for both together, from now.
    """
    check_deadline(deadline)
    if outputs is not None:
        _check_outputs(outputs, batch, loss)
    begin = time.monotonic()
    sent = batch.only(())
    forward = Forward(batch=sent, outputs=loss.required_outputs, model=model)
    # stands for what the function will give: the same batch and the same names of outputs
    placeholder = Cotangents(
        values={
            name: sent.mask.with_values(sent.mask.values * 0.0) for name in loss.required_outputs
        },
        version=0,
    )
    face._check("forward", forward)
    face._check("forward_backward", ForwardBackward(batch=sent, loss=placeholder, model=model))
    if loss.framework == "torch" and importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "losses.custom runs its function with torch, which is not installed here; "
            "pip install 'remote-rl[torch]', or pass framework=None and return the derivatives"
        )
    told: dict[str, Any] = {}

    def convert(result: ForwardBackwardResult) -> ForwardBackwardResult:
        metrics = {**result.metrics, **told["metrics"]}
        work = Work.total([*told["work"], result.work])
        return attrs.evolve(result, value=told["value"], metrics=metrics, work=work)

    connection = face._connection
    connection.worker.ready()
    digest = connection.transport.digest(forward)
    first: Call | None = None

    def work() -> None:
        try:
            held = outputs if first is None else first.own_outcome()
            assert held is not None
            value, cotangents, metrics = run_custom(loss, batch, held)
            told["value"] = value
            told["metrics"] = {**metrics, "custom/forwards": 0.0 if first is None else 1.0}
            told["work"] = () if first is None else (held.work,)
            request = ForwardBackward(batch=sent, loss=cotangents, model=model)
            own = connection.transport.digest(request)
            left = time_left(deadline, begin, "the custom loss was computed")
        except BaseException as error:  # noqa: BLE001 - whatever the caller's function raises is the outcome
            connection.abandon(call, error)
        else:
            connection.send(call, request, own, left)

    with connection.ordering:
        if outputs is None:
            first = connection.reserve("forward", lambda response: response)
            connection.send(first, forward, digest, deadline)
        call = connection.reserve("forward_backward", convert)
        # in the lock: a job that stood before an earlier one's would wait for it for ever
        connection.worker.submit(work)
    return Operation(call)


def _check_outputs(outputs: Outputs, batch: Batch, loss: Custom) -> None:
    if not isinstance(outputs, Outputs):
        raise InvalidRequestError(
            f"outputs= takes the result of a forward, not a {type(outputs).__name__}",
            field="outputs",
        )
    for name in sorted(loss.required_outputs):
        rows: Ragged = getattr(outputs, name)
        if not np.array_equal(rows.offsets, batch.responses.offsets):
            raise InvalidRequestError(
                f"the rows of outputs.{name} are not those of the batch's responses; take them "
                "from a forward of this batch",
                field="outputs",
            )

    if outputs.computed_for not in (None, computed_for(batch, "current")):
        raise InvalidRequestError(
            "outputs= were computed for other tokens, temperatures or another policy than this "
            "batch's; take them from training.forward of this batch",
            field="outputs",
        )


def computed_for(batch: Batch, policy: str) -> str:
    """A digest of all that a forward's outputs depend on besides the weights."""
    import xxhash

    state = xxhash.xxh3_128(policy.encode())
    for array in (
        batch.prompts.values,
        batch.prompts.offsets,
        batch.prompt_index,
        batch.responses.values,
        batch.responses.offsets,
        batch.temperature,
    ):
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
