"""Testing: what is not declared is refused by name (imports numpy, the contract, base, checks,
probe)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import pytest

from ... import losses, requests
from ...errors import InvalidRequestError, UnknownNameError
from ...ops import ALWAYS_OFFERED, OPERATIONS
from ...protocol import PROTOCOL_VERSIONS
from ...requests import Request
from ...types import AdamW, Batch, Ragged, SamplingParams, Tensor, TensorForm
from ...types.results import TENSOR_DTYPES
from .base import Conformance
from .checks import refuses, unsupported
from .probe import FIELDS, Probe

#: a value for every sampling option, other than its default
OPTIONS: Mapping[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 2,
    "min_p": 0.5,
    "min_tokens": 1,
    "stop": ("x",),
    "include_stop": True,
    "stop_token_ids": (0,),
    "seed": 1,
    "session_id": "session",
    "priority": 1,
    "cache_salt": "salt",
}


class Refusals(Conformance):
    """Nothing is silently ignored: not by the client, and not by the run where a client asks."""

    def test_a_run_says_what_it_is(self, probe: Probe) -> None:
        """info names backend, model, protocol and versions, and what can be asked of it."""
        info = probe.rl.info().result()
        assert info.backend
        assert info.model == probe.model
        assert set(info.protocol_versions) & set(PROTOCOL_VERSIONS)
        assert all(0 <= each < info.model.vocab_size for each in info.model.eos_token_ids)
        assert info.versions == probe.rl.weights.version().result()
        assert info.driver, "this session drives it"
        assert info.lost is None
        assert info.capabilities.operations >= ALWAYS_OFFERED
        assert info.capabilities.operations <= set(OPERATIONS)

    @pytest.mark.parametrize("kind", FIELDS)
    def test_what_is_not_declared_is_refused_by_name(self, probe: Probe, kind: str) -> None:
        """Each operation and option that the backend does not declare is an UnsupportedError that
        names it: from the client, and from the run itself."""
        refused = [
            (name, operation, request)
            for name, operation, request in EXAMPLES[kind](probe)
            if not probe.offers(kind, name)
            and (kind == "operation" or probe.offers("operation", operation))
        ]
        if not refused:
            what = kind.replace("_", " ")
            pytest.skip(f"backend {probe.info.backend!r} leaves no {what} undeclared")
        version = probe.rl.weights.version().result()
        for name, operation, request in refused:
            with unsupported(name):
                probe.capabilities.check(operation, request, probe.info.backend)
            with unsupported(name):
                probe.wire.unchecked(operation, request).result()
        assert probe.rl.weights.version().result() == version

    def test_ids_outside_the_vocabulary_are_refused(self, probe: Probe) -> None:
        """A token id that the model does not have is refused with its row, by the run too."""
        outside = probe.model.vocab_size
        prompts = [*probe.prompts[:1], [outside]]
        if probe.offers("operation", "generate"):
            request = requests.Generate(prompts=Ragged.of(prompts, np.int32), params=probe.params())
            with refuses(InvalidRequestError, str(outside), "prompt 1"):
                probe.rl.sampling.generate(prompts, probe.params()).result()
            with refuses(InvalidRequestError, str(outside), "prompt 1"):
                probe.wire.unchecked("generate", request).result()
        if probe.offers("operation", "forward"):
            batch = Batch(
                prompts=probe.prompts[:1],
                prompt_index=[0],
                responses=[[0, outside]],
                temperature=1.0,
            )
            with refuses(InvalidRequestError, str(outside), "response 0"):
                probe.rl.training.forward(batch).result()
            with refuses(InvalidRequestError, str(outside), "response 0"):
                probe.wire.unchecked("forward", requests.Forward(batch=batch)).result()

    def test_texts_longer_than_the_context_are_refused(self, probe: Probe) -> None:
        """A prompt and response that do not fit the model's context are refused with the row."""
        limit = probe.model.context_length
        if limit is None:
            pytest.skip("the model's context is unlimited")
        probe.needs("generate")
        with refuses(InvalidRequestError, "row 1", str(limit)):
            probe.rl.sampling.generate(probe.prompts, probe.params(max_tokens=limit - 1)).result()

    def test_names_that_do_not_exist_come_back_with_the_nearest(self, probe: Probe) -> None:
        """A misspelt option or argument is refused with the name that exists; another model than
        the run's by its own."""
        with refuses(UnknownNameError, "temprature", "temperature"):
            SamplingParams(max_tokens=1, temprature=0.5)  # type: ignore[call-arg]
        probe.needs("generate")
        with refuses(UnknownNameError, "parms", "params"):
            probe.rl.sampling.generate(probe.prompts, parms=probe.params())  # type: ignore[call-arg]
        with refuses(InvalidRequestError, "critic"):
            probe.rl.sampling.generate(probe.prompts, probe.params(), model="critic")

    def test_a_refused_operation_takes_no_place_in_the_order(self, probe: Probe) -> None:
        """After a refusal, by client or run, training goes on as if it had not been asked."""
        probe.needs_training()
        batch = probe.batch()
        norm = probe.gradient_norm(batch, losses.CrossEntropy())
        probe.rl.training.forward_backward(batch, losses.CrossEntropy()).result()
        bad = requests.Forward(batch=batch.only(()), outputs={"no_such_output"})
        with unsupported("no_such_output"):
            probe.wire.unchecked("forward", bad).result()
        probe.same_norm(probe.applied_norm(), norm, "gradient norm with a refusal in between")


Examples = Iterator[tuple[str, str, Request]]


def _operations(probe: Probe) -> Examples:
    """(what is asked for, operation, request), here of every operation."""
    batch = probe.batch().only(())
    prompts = Ragged.of(probe.prompts, np.int32)
    fields: Mapping[str, dict[str, Any]] = {
        "forward": {"batch": batch},
        "forward_backward": {"batch": batch, "loss": losses.CrossEntropy()},
        "optim_step": {"optimizer": AdamW(lr=0.0)},
        "set_reference": {"source": "current"},
        "push": {"tensors": {"any": np.zeros(1)}},
        "push_part": {
            "transfer": "conformance",
            "forms": {"any": TensorForm(shape=(1,), dtype="float64")},
        },
        "generate": {"prompts": prompts, "params": probe.params()},
        "finish_session": {"session_id": "none"},
        "sleep": {"half": "training"},
        "wake": {"half": "training"},
    }
    for name in sorted(set(OPERATIONS) - ALWAYS_OFFERED):
        cls = OPERATIONS[name].request
        named = any(field.name == "name" for field in attrs.fields(cls))
        given = {"name": "conformance"} if named else fields.get(name, {})
        yield name, name, cls(**given)


def _outputs(probe: Probe) -> Examples:
    batch = probe.batch().only(())
    for name in ("logprobs", "entropy", "values", "no_such_output"):
        yield name, "forward", requests.Forward(batch=batch, outputs={name})


def _losses(probe: Probe) -> Examples:
    batch = probe.batch()
    full = batch.replace(
        old_logprobs=batch.responses.with_values(np.zeros(len(batch.responses.values), np.float32))
    )
    for cls in losses.LOSSES.values():
        if cls is losses.Cotangents:
            zeros = {"logprobs": full.old_logprobs}
            version = probe.rl.weights.version().result().trainer
            loss: losses.Loss = losses.Cotangents(zeros, version=version)
        else:
            loss = cls()
        request = requests.ForwardBackward(batch=full.only(loss.required_fields), loss=loss)
        yield cls.__name__, "forward_backward", request


def _sampling_options(probe: Probe) -> Examples:
    own = ("n", "max_tokens", "outputs")
    names = {field.name for field in attrs.fields(SamplingParams)} - set(own)
    assert names == set(OPTIONS), f"the suite has no example of {names ^ set(OPTIONS)}"
    prompts = Ragged.of(probe.prompts, np.int32)
    for name, value in OPTIONS.items():
        params = probe.params(**{name: value})
        yield name, "generate", requests.Generate(prompts=prompts, params=params)


def _sampling_outputs(probe: Probe) -> Examples:
    prompts = Ragged.of(probe.prompts, np.int32)
    for name in ("logprobs", "drawn_logprobs"):
        params = probe.params(outputs={name})
        yield name, "generate", requests.Generate(prompts=prompts, params=params)


def _in_flight(probe: Probe) -> Examples:
    for name in ("keep", "wait", "abort"):
        yield name, "sync", requests.Sync(in_flight=name)


def _push_dtypes(probe: Probe) -> Examples:
    for name, dtype in TENSOR_DTYPES.items():
        tensor = Tensor(data=np.zeros(1, dtype), dtype=name)
        in_flight: Any = min(probe.capabilities.in_flight, default="keep")
        yield name, "push", requests.Push(tensors={"any": tensor}, in_flight=in_flight)


def _policies(probe: Probe) -> Examples:
    batch = probe.batch().only(())
    for name, policy in (("reference", "reference"), ("snapshot", "conformance")):
        yield name, "forward", requests.Forward(batch=batch, policy=policy)


EXAMPLES: Mapping[str, Callable[[Probe], Examples]] = {
    "operation": _operations,
    "output": _outputs,
    "loss": _losses,
    "sampling_option": _sampling_options,
    "sampling_output": _sampling_outputs,
    "in_flight": _in_flight,
    "push_dtype": _push_dtypes,
    "policy": _policies,
}
