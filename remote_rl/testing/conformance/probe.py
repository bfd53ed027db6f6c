"""Testing: what a conformance test works with: a session, its model's facts, data and comparisons
(imports pytest, numpy, the contract and the client)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from ...client import GenerateOperation, Session
from ...errors import RemoteRLError
from ...losses import CrossEntropy, Loss
from ...protocol import Capabilities, ModelInfo
from ...run_info import RunInfo
from ...types import AdamW, Batch, Group, OptimStepResult, Sample, SamplingParams
from .messages import Messages

Floats: TypeAlias = npt.NDArray[np.float64]
Prompts: TypeAlias = list[list[int]]

#: capability kind -> field of Capabilities
FIELDS = {
    "operation": "operations",
    "output": "outputs",
    "loss": "losses",
    "sampling_option": "sampling_options",
    "sampling_output": "sampling_outputs",
    "in_flight": "in_flight",
    "push_dtype": "push_dtypes",
    "policy": "policies",
}
#: a generate that is to be caught while it runs grows by this, so often
_GROWTH, _TRIES = 4, 4
#: ids of a long text, prompt and response together: more than engines' short cuts are made for,
#: few enough for a CPU
_LONGEST = 256


class Probe:
    """One test's hold on the target.

    rl: the session. info: of the run, as the session began. tolerance: how far two logprobs may
    lie apart that are the same by contract; gradient norms may ten times as far, relatively.
    rate: the learning rate of training steps. wire: the messages below the session's faces.
    """

    def __init__(self, rl: Session, info: RunInfo, tolerance: float, rate: float) -> None:
        self.rl = rl
        self.info = info
        self.tolerance = tolerance
        self.rate = rate
        self.wire = Messages(rl)
        self._named: dict[str, str] = {}
        self._controls = 0

    @property
    def model(self) -> ModelInfo:
        """The run's model."""
        return self.info.model

    @property
    def capabilities(self) -> Capabilities:
        """What the backend declares."""
        return self.info.capabilities

    # -- what is declared -----------------------------------------------------------------------

    def offers(self, kind: str, name: str) -> bool:
        """Whether the backend declares it; kind is a key of FIELDS."""
        return name in getattr(self.capabilities, FIELDS[kind])

    def needs(self, *operations: str, **options: str) -> None:
        """Skips the test, with the reason, where an operation or option is not declared; options
        are `kind="name"`, such as loss="PPO"."""
        wanted = [("operation", name) for name in operations] + list(options.items())
        for kind, name in wanted:
            if not self.offers(kind, name):
                what = kind.replace("_", " ")
                pytest.skip(f"backend {self.info.backend!r} does not declare the {what} {name!r}")

    def needs_training(self) -> None:
        """Skips where the backend can't take supervised steps and show their effect."""
        self.needs("forward", "forward_backward", "optim_step", "zero_grad", loss="CrossEntropy")
        self.needs(output="logprobs")

    def needs_checkpoints(self) -> None:
        """Skips where nothing can be saved and loaded."""
        self.needs("save", "load")
        if not self.info.checkpoint_dir:
            pytest.skip("the run has no checkpoint_dir")

    # -- before and after a test ----------------------------------------------------------------

    def begin(self) -> None:
        """Leaves nothing of earlier tests: base weights where `reset` is declared, else no
        gradient, and the sampler at the trainer's weights."""
        self._controls = self._control_number
        if self.offers("operation", "reset"):
            self.rl.reset().result()
            return
        for name, face in (("zero_grad", self.rl.training), ("sync", self.rl.weights)):
            if self.offers("operation", name):
                getattr(face, name)().result()

    def end(self) -> None:
        """Stops what still runs, lifts a pause, and removes the checkpoints and exports that the
        test wrote. Failures that nobody has looked at are the test's own, and end with it."""
        self.wire.end()
        connection = self.rl._connection
        while connection.failures.first(lambda call: True) is not None:
            pass
        if self._controls != self._control_number and self.rl.info().result().paused:
            self.rl.sampling.resume().result()
        if any(call.row.name == "generate" for call in connection.pending()):
            self.rl.sampling.abort().result()
        for name, kind in self._named.items():
            with contextlib.suppress(RemoteRLError):  # most tests have not written all they named
                self.rl.training.delete(name, kind).result()  # type: ignore[arg-type]

    @property
    def _control_number(self) -> int:
        return self.rl._connection._numbers["control"]

    def name(self, stem: str, kind: str = "checkpoint") -> str:
        """A name of the test's own for a checkpoint or export, removed at the test's end."""
        name = f"conformance-{self.info.instance_id[:8]}-{stem}"
        self._named[name] = kind
        return name

    # -- data -----------------------------------------------------------------------------------

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """Token ids that end nothing, different ones where the vocabulary has so many."""
        ends = set(self.model.eos_token_ids)
        below = min(self.model.vocab_size, 200)
        usable = [token for token in range(below) if token not in ends] or [0]
        order = np.random.default_rng(seed).permutation(len(usable))
        return [usable[order[place % len(usable)]] for place in range(count)]

    @property
    def prompts(self) -> Prompts:
        """Three prompts, of one, three and two tokens."""
        ids = self.ids(6, seed=1)
        return [ids[:1], ids[1:4], ids[4:]]

    def batch(self, seed: int = 2) -> Batch:
        """Four responses of 3, 2, 4 and 1 tokens over three prompts, the first one shared."""
        ids = self.ids(10, seed)
        return Batch(
            prompts=self.prompts,
            prompt_index=[0, 0, 1, 2],
            responses=[ids[:3], ids[3:5], ids[5:9], ids[9:]],
            temperature=1.0,
            advantages=[1.0, -0.5, 0.75, -1.25],
        )

    def long_batch(self) -> Batch:
        """Texts as long as the context has room for, up to _LONGEST ids, beside short ones: a long
        response, a long prompt with three tokens, both, and one token after one."""
        room = min(self.model.context_length or _LONGEST, _LONGEST)
        half, ids = room // 2, self.ids(200, seed=6)
        text = [ids[place] for place in np.random.default_rng(7).integers(len(ids), size=3 * room)]
        short, long = text[:1], text[1 : 1 + half]
        return Batch(
            prompts=[short, long],
            prompt_index=[0, 1, 1, 0],
            responses=[
                text[room : room + half],
                text[-3:],
                text[2 * room : 3 * room - half],
                text[-1:],
            ],
            temperature=1.0,
        )

    def singles(self) -> Batch:
        """Six responses of one token over three prompts."""
        return Batch(
            prompts=self.prompts,
            prompt_index=[0, 0, 1, 1, 2, 2],
            responses=[[token] for token in self.ids(6, seed=3)],
            temperature=1.0,
        )

    # -- training -------------------------------------------------------------------------------

    def logprobs(self, batch: Batch, policy: str = "current") -> Floats:
        """[tokens], of a forward."""
        outputs = self.rl.training.forward(batch, policy=policy).result()
        return outputs.logprobs.values.astype(np.float64)

    def value(self, batch: Batch, loss: Loss) -> float:
        """What forward_backward reports; the gradient is discarded."""
        backward = self.rl.training.forward_backward(batch, loss)
        discarded = self.rl.training.zero_grad()
        value = backward.result().value
        discarded.result()
        return value

    def measured(self, batch: Batch, loss: Loss) -> tuple[float, float]:
        """Value and gradient norm of one forward_backward, by a step that leaves the weights
        alone."""
        backward = self.rl.training.forward_backward(batch, loss)
        step = self.rl.training.optim_step(AdamW(lr=0.0, weight_decay=0.0))
        return backward.result().value, step.result().grad_norm

    def gradient_norm(self, batch: Batch, loss: Loss) -> float:
        """The second of `measured`."""
        return self.measured(batch, loss)[1]

    def applied_norm(self) -> float:
        """Of what is accumulated, by a step that leaves the weights alone."""
        still = AdamW(lr=0.0, weight_decay=0.0)
        return self.rl.training.optim_step(still).result().grad_norm

    def train(self, batch: Batch, loss: Loss | None = None, **knobs: Any) -> OptimStepResult:
        """One step, at `rate` and without decay unless `knobs` say otherwise."""
        backward = self.rl.training.forward_backward(batch, loss or CrossEntropy())
        options = {"lr": self.rate, "weight_decay": 0.0, **knobs}
        step = self.rl.training.optim_step(AdamW(**options))
        backward.result()
        return step.result()

    def sync(self) -> int:
        """The version that the sampler serves afterwards."""
        return self.rl.weights.sync().result().version

    # -- sampling -------------------------------------------------------------------------------

    def params(self, **params: Any) -> SamplingParams:
        """Six tokens with their logprobs, where declared, unless `params` say otherwise."""
        outputs = {"logprobs"} & self.capabilities.sampling_outputs
        return SamplingParams(**{"max_tokens": 6, "outputs": outputs, **params})

    def draw(self, prompts: Prompts | None = None, **params: Any) -> tuple[Group, ...]:
        """Groups of samples of the prompts, by default of all three."""
        drawn = self.rl.sampling.generate(prompts or self.prompts, self.params(**params))
        return drawn.result()

    def greedy(self, prompts: Prompts | None = None, **params: Any) -> tuple[Sample, ...]:
        """One sample of each prompt without chance."""
        self.needs("generate", sampling_option="temperature")
        return tuple(group[0] for group in self.draw(prompts, temperature=0.0, **params))

    def ends(self, *others: int) -> set[int]:
        """The ids that end a response."""
        return {*self.model.eos_token_ids, *others}

    def long_generates(self) -> Iterator[tuple[GenerateOperation, SamplingParams]]:
        """Generates that run long, each longer than the one before, for a test that has to catch
        one while it runs; fails where it has caught none."""
        prompt = self.prompts[0]
        for size in range(_TRIES):
            longest = 256 * _GROWTH**size
            if self.model.context_length is not None:
                longest = min(longest, self.model.context_length - len(prompt))
            params = self.params(n=16 * _GROWTH**size, max_tokens=longest)
            yield self.rl.sampling.generate([prompt], params), params
        pytest.fail(f"none of {params.n} samples of up to {longest} tokens ended before its end")

    def cut_short(self, groups: tuple[Group, ...], params: SamplingParams) -> list[Sample]:
        """The samples that neither reached their length nor an end id."""
        ends = self.ends(*params.stop_token_ids)
        return [
            sample
            for group in groups
            for sample in group
            if len(sample) < params.max_tokens
            and not (len(sample) and int(sample.tokens[-1]) in ends)
        ]

    # -- comparisons ----------------------------------------------------------------------------

    def same(self, actual: Any, wanted: Any, what: str) -> None:
        """Fails where two numbers or arrays lie further apart than the tolerance."""
        left, right = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
        assert left.shape == right.shape, f"{what}: shape {left.shape}, not {right.shape}"
        far = _farthest(left, right)
        assert far <= self.tolerance, (
            f"{what}: {_numbers(left)}, expected {_numbers(right)}; they lie {far:.3g} apart, "
            f"tolerance {self.tolerance:g}"
        )

    def same_norm(self, actual: float, wanted: float, what: str) -> None:
        """Fails where two positive numbers differ by more than ten tolerances, relatively."""
        far = abs(actual - wanted) / max(abs(wanted), 1e-30)
        assert far <= 10 * self.tolerance, (
            f"{what}: {actual:.8g}, expected {wanted:.8g}; they differ by {far:.3g} of it, "
            f"tolerance {10 * self.tolerance:g}"
        )

    def differ(self, left: Any, right: Any, what: str) -> None:
        """Fails where two arrays are the same within ten tolerances."""
        far = _farthest(np.asarray(left, np.float64), np.asarray(right, np.float64))
        assert far > 10 * self.tolerance, (
            f"{what}: {_numbers(np.asarray(left))} and {_numbers(np.asarray(right))} should differ "
            f"and lie only {far:.3g} apart"
        )


def _farthest(left: Floats, right: Floats) -> float:
    if left.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        far = np.abs(left - right)
    return float(np.max(np.where(np.isnan(far), np.inf, far)))


def _numbers(values: Floats) -> str:
    return np.array2string(values, precision=6, threshold=8, edgeitems=4, max_line_width=200)
