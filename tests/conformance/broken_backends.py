"""Backends that each break one rule on purpose, to see the conformance suite find it.

Each is the mock with one method changed; the first sentence of its docstring is what a user would
report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np

from backends.mock.backend import MockBackend
from backends.mock.config import MockConfig
from backends.mock.optimizer import OptimizerState
from backends.mock.sampler import Sampler
from backends.mock.trainer import Policy, Trainer
from backends.mock.weights import WeightPath
from remote_rl import Batch, losses
from remote_rl.messages import Message, Submit
from remote_rl.types.flops import packed_tokens
from remote_rl.types.generation import FINISH_REASONS, Generation

SMALL: dict[str, Any] = {
    "window": 3,
    "embedding_size": 4,
    "hidden_size": 16,
    "initial_scale": 1.0,
}
ABORT, LENGTH, STOP = (FINISH_REASONS.index(name) for name in ("abort", "length", "stop"))


class Broken(MockBackend):
    """The mock, small, of the three classes that a subclass names. `again`: what happens to the
    backend when an operation is said twice (None: nothing, as it should be)."""

    trainer: ClassVar[type[Trainer]] = Trainer
    sampler: ClassVar[type[Sampler]] = Sampler
    path: ClassVar[type[WeightPath]] = WeightPath
    again: Callable[[Submit], None] | None = None

    def __init__(self) -> None:
        super().__init__(MockConfig(**SMALL))
        self._trainer = self.trainer(self.config, self._journal)
        self._sampler = self.sampler(self.config, self._journal)
        self._weights = self.path(self._trainer, self._sampler, self._journal)


class Resending:
    """A transport in front of a server that takes what is said twice for two."""

    def __init__(self, transport: Any, again: Callable[[Submit], None]) -> None:
        self._transport = transport
        self._again = again
        self._seen: set[tuple[str, int]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, message: Message, timeout: float) -> Any:
        reply = await self._transport.call(message, timeout)
        if isinstance(message, Submit):
            key = (message.operation, message.number)
            if key in self._seen:
                self._again(message)
            self._seen.add(key)
        return reply


def _rolled(rows: Any) -> Any:
    """Each row turned by one."""
    turned = [np.roll(row, 1) for row in rows]
    return rows.with_values(np.concatenate(turned) if turned else rows.values)


# -- forward and backward -------------------------------------------------------------------------


class ForwardOffByOne(Broken):
    """Logprobs of a forward are shifted by one token."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            result = await super().forward(request, context)
            values = {**result.values}
            if "logprobs" in values:
                values["logprobs"] = _rolled(values["logprobs"])
            return attrs.evolve(result, values=values)


class TrainerIgnoresTemperature(Broken):
    """A forward gives the logprobs at temperature 1 whatever the batch says."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            plain = request.batch.replace(temperature=1.0)
            return await super().forward(attrs.evolve(request, batch=plain), context)


class MaskInDenominator(Broken):
    """Masked tokens count in the denominators."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            batch = request.batch
            counts = batch.responses.lengths
            resolved = request.loss.resolved(int(counts.sum()), int(np.count_nonzero(counts)))
            return await super().forward_backward(attrs.evolve(request, loss=resolved), context)


class LastTokenNeverTrained(Broken):
    """The gradient leaves out the last token of each response of several."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            before = self._state.gradient
            result = await super().forward_backward(request, context)
            self._state.gradient = before
            await super().forward_backward(_without_last(request), context)
            return result


def _without_last(request: Any) -> Any:
    responses = request.batch.responses
    last = np.isin(np.arange(len(responses.values)), responses.offsets[1:] - 1)
    return _only(request, ~last | (responses.lengths[responses.row_numbers()] == 1))


class LongResponsesCut(Broken):
    """Only the first 16 tokens of a response are trained."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            places = _places(request.batch.responses)
            return await super().forward_backward(_only(request, places < 16), context)


class LongForwardsCut(Broken):
    """Outputs of a forward end at the 100th token; what follows is zero."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            result = await super().forward(request, context)
            keep = _places(request.batch.responses) < 100
            values = {
                name: rows.with_values(rows.values * keep) for name, rows in result.values.items()
            }
            return attrs.evolve(result, values=values)


class LongPromptsCut(Broken):
    """Of a long prompt only the first 16 tokens are seen, in training and in a forward."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            cut = _cut(request.batch)
            return await super().forward(attrs.evolve(request, batch=cut), context)

        async def forward_backward(self, request: Any, context: Any) -> Any:
            cut = _cut(request.batch)
            return await super().forward_backward(attrs.evolve(request, batch=cut), context)


def _cut(batch: Batch) -> Batch:
    return batch.replace(prompts=[prompt[:16] for prompt in batch.prompts])


class LastMicroBatchDropped(Broken):
    """Where rows don't divide by four, those left over are not trained."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            rows = request.batch.responses.row_numbers()
            whole = len(request.batch) // 4 * 4
            keep = rows < whole if whole else rows >= 0
            return await super().forward_backward(_only(request, keep), context)


class PromptsCountedForEachPiece(Broken):
    """A prompt's tokens are counted again for each five rows."""

    class trainer(Trainer):
        def _work(self, batch: Batch, forwards: int, begin: float) -> Any:
            rows = np.arange(len(batch))
            tokens = sum(packed_tokens(batch, rows[start : start + 5]) for start in rows[::5])
            return attrs.evolve(super()._work(batch, forwards, begin), tokens=tokens)


class BackwardNotCounted(Broken):
    """Work of a forward_backward is that of its forward."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            result = await super().forward_backward(request, context)
            forward = attrs.evolve(result.work, flops=result.work.flops / 3)
            return attrs.evolve(result, work=forward)


class HalfPrecisionAccumulator(Broken):
    """The gradient is accumulated in half precision."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            before = self._state.gradient
            result = await super().forward_backward(request, context)
            if before is not None:
                total = self._state.gradient
                assert total is not None
                self._state.gradient = {
                    name: each.astype(np.float16).astype(each.dtype) for name, each in total.items()
                }
            return result


class TemperatureOfTheFirstRow(Broken):
    """A forward takes the first row's temperature for all rows."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            batch = request.batch.replace(temperature=float(request.batch.temperature[0]))
            return await super().forward(attrs.evolve(request, batch=batch), context)


class EntropyIgnoresTemperature(Broken):
    """The entropy of a forward is that at temperature 1."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            result = await super().forward(request, context)
            batch = request.batch.replace(temperature=1.0)
            plain = await super().forward(attrs.evolve(request, batch=batch), context)
            values = {**result.values, **{n: v for n, v in plain.values.items() if n == "entropy"}}
            return attrs.evolve(result, values=values)


class GradientIgnoresTemperature(Broken):
    """The gradient lacks the factor of one by the temperature."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            before = self._state.gradient
            result = await super().forward_backward(request, context)
            after = self._state.gradient
            assert after is not None
            factor = float(request.batch.temperature.mean()) if len(request.batch) else 1.0
            self._state.gradient = {
                name: factor * each
                if before is None
                else before[name] + factor * (each - before[name])
                for name, each in after.items()
            }
            return result


class PenaltiesUnmasked(Broken):
    """The entropy term counts masked tokens, too."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            entropy = getattr(request.loss, "entropy", None)
            if entropy is None or request.batch.mask.values.all():
                return await super().forward_backward(request, context)
            plain = attrs.evolve(request, loss=attrs.evolve(request.loss, entropy=None))
            result = await super().forward_backward(plain, context)
            everything = request.batch.replace(mask=None, advantages=[0.0] * len(request.batch))
            more = await super().forward_backward(attrs.evolve(request, batch=everything), context)
            return attrs.evolve(result, value=result.value + more.value)


class EntropyDetached(Broken):
    """The entropy is in the loss's value and not in its gradient."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            if getattr(request.loss, "entropy", None) is None:
                return await super().forward_backward(request, context)
            before = self._state.gradient
            result = await super().forward_backward(request, context)
            self._state.gradient = before
            without = attrs.evolve(request, loss=attrs.evolve(request.loss, entropy=None))
            await super().forward_backward(without, context)
            return result


def _places(rows: Any) -> Any:
    """Each value's place in its row."""
    return np.arange(len(rows.values)) - rows.offsets[rows.row_numbers()]


def _only(request: Any, keep: Any) -> Any:
    """The request with the gradient and value of these tokens alone, its denominators kept."""
    batch: Batch = request.batch
    if isinstance(request.loss, losses.Cotangents):
        values = {
            name: rows.with_values(rows.values * keep) for name, rows in request.loss.values.items()
        }
        return attrs.evolve(request, loss=attrs.evolve(request.loss, values=values))
    loss = losses.resolve(request.loss, batch)
    mask = batch.mask.with_values((batch.mask.values * keep).astype(np.uint8))
    return attrs.evolve(request, loss=loss, batch=batch.replace(mask=mask))


class GradientTwice(Broken):
    """The gradient is twice what it should be, as where two ranks both add it."""

    class trainer(Trainer):
        async def forward_backward(self, request: Any, context: Any) -> Any:
            result = await super().forward_backward(request, context)
            gradient = self._state.gradient
            self._state.gradient = None
            again = await super().forward_backward(request, context)
            fresh = self._state.gradient
            assert gradient is not None
            assert fresh is not None
            self._state.gradient = {name: gradient[name] + fresh[name] for name in fresh}
            assert again.value == result.value
            return result


class GradientDoubledOnResend(Broken):
    """A forward_backward that is sent again adds its gradient again."""

    def again(self, message: Submit) -> None:
        gradient = self._trainer._state.gradient
        if message.operation == "forward_backward" and gradient is not None:
            self._trainer._state.gradient = {name: 2 * each for name, each in gradient.items()}


class StepTwiceOnResend(Broken):
    """An optim_step that is sent again moves the weights again."""

    def again(self, message: Submit) -> None:
        if message.operation == "optim_step":
            held = self._trainer._state
            weights = {name: 0.9 * each for name, each in held.policy.weights.items()}
            held.policy = Policy(weights, held.policy.version)


# -- the optimizer --------------------------------------------------------------------------------


class _Knob(Broken):
    """One knob of AdamW is accepted and ignored."""


def _ignoring(**knobs: Any) -> type[Trainer]:
    class trainer(Trainer):
        async def optim_step(self, request: Any, context: Any) -> Any:
            options = attrs.evolve(request.optimizer, **knobs)
            return await super().optim_step(attrs.evolve(request, optimizer=options), context)

    return trainer


class WeightDecayIgnored(_Knob):
    """weight_decay is accepted and ignored."""

    trainer = _ignoring(weight_decay=0.0)


class BetasIgnored(_Knob):
    """betas are those of the first configuration for ever."""

    trainer = _ignoring(betas=(0.9, 0.999))


class EpsIgnored(_Knob):
    """eps is accepted and ignored."""

    trainer = _ignoring(eps=1e-8)


class ClippingIgnored(_Knob):
    """max_grad_norm is accepted and ignored."""

    trainer = _ignoring(max_grad_norm=None)


class NormAfterClipping(Broken):
    """grad_norm is that of the clipped gradient."""

    class trainer(Trainer):
        async def optim_step(self, request: Any, context: Any) -> Any:
            result = await super().optim_step(request, context)
            limit = request.optimizer.max_grad_norm
            clipped = result.grad_norm if limit is None else min(limit, result.grad_norm)
            return attrs.evolve(result, grad_norm=clipped)


class SkipUnsaid(Broken):
    """A step on infinities takes a version and does not say that it was skipped."""

    class trainer(Trainer):
        async def optim_step(self, request: Any, context: Any) -> Any:
            result = await super().optim_step(request, context)
            if not result.skipped:
                return result
            self._state.policy = Policy(self.policy.weights, context.next_version)
            return attrs.evolve(result, skipped=False, version=context.next_version)


# -- kept weights ---------------------------------------------------------------------------------


class SnapshotFollows(Broken):
    """A forward of a snapshot gives the current weights."""

    class trainer(Trainer):
        async def forward(self, request: Any, context: Any) -> Any:
            snapshot = request.policy not in ("current", "reference")
            policy = "current" if snapshot else request.policy
            return await super().forward(attrs.evolve(request, policy=policy), context)


class RestoreKeepsGradient(Broken):
    """A gradient from before a restore_snapshot is in the next step."""

    class trainer(Trainer):
        async def restore_snapshot(self, request: Any, context: Any) -> None:
            gradient = self._state.gradient
            await super().restore_snapshot(request, context)
            self._state.gradient = gradient


class ReferenceOfASnapshotIsCurrent(Broken):
    """set_reference(SNAPSHOT) takes the current weights."""

    class trainer(Trainer):
        async def set_reference(self, request: Any, context: Any) -> None:
            source = "base" if request.source == "base" else "current"
            await super().set_reference(attrs.evolve(request, source=source), context)


class ReferenceNotInCheckpoints(Broken):
    """A load forgets the reference."""

    class trainer(Trainer):
        async def load(self, request: Any, context: Any) -> None:
            await super().load(request, context)
            self._state.reference = self._state.base


class OptimizerRestoredAnyway(Broken):
    """load(optimizer=False) restores the optimizer."""

    class trainer(Trainer):
        async def load(self, request: Any, context: Any) -> None:
            held = (context.directory / "optimizer.safetensors").exists()
            await super().load(attrs.evolve(request, optimizer=held), context)


class OptimizerStaysCold(Broken):
    """load(optimizer=True) begins a fresh optimizer."""

    class trainer(Trainer):
        async def load(self, request: Any, context: Any) -> None:
            await super().load(request, context)
            self._state.optimizer = OptimizerState.fresh(self.policy.weights)


class VersionRepeats(Broken):
    """After a load a forward goes by a version that other weights had before."""

    class trainer(Trainer):
        repeated: dict[int, int] | None = None

        async def load(self, request: Any, context: Any) -> None:
            await super().load(request, context)
            self.repeated = {context.next_version: context.version}

        async def forward(self, request: Any, context: Any) -> Any:
            result = await super().forward(request, context)
            version = (self.repeated or {}).get(result.version, result.version)
            return attrs.evolve(result, version=version)


# -- the sampler ----------------------------------------------------------------------------------


class SamplerIgnoresTemperature(Broken):
    """Everything but greedy is drawn at temperature 1."""

    class sampler(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            if request.params.temperature:
                plain = attrs.evolve(request.params, temperature=1.0)
                request = attrs.evolve(request, params=plain)
            return await super().generate(request, context)


class _Seeded:
    """A context with another seed."""

    def __init__(self, context: Any, seed: int) -> None:
        self._context = context
        self.seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class SeedIgnored(Broken):
    """The seed of a request is accepted and ignored."""

    class sampler(Sampler):
        count = 0

        async def generate(self, request: Any, context: Any) -> Generation:
            if request.params.seed is not None:
                self.count += 1
                context = _Seeded(context, 1000 + self.count)
            return await super().generate(request, context)


class UnseededByItself(Broken):
    """A generate without a seed draws from the sampler's own random numbers."""

    class sampler(Sampler):
        count = 0

        async def generate(self, request: Any, context: Any) -> Generation:
            if request.params.seed is None:
                self.count += 1
                context = _Seeded(context, 1000 + self.count)
            return await super().generate(request, context)


class _Columns(Broken):
    """Changes the columns of a generate's answer."""


def _changing(change: Callable[[Any, Generation], Generation]) -> type[Sampler]:
    class sampler(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            return change(request, await super().generate(request, context))

    return sampler


class SamplerOffByOne(_Columns):
    """Logprobs of samples are shifted by one token."""

    sampler = _changing(
        lambda _, answer: attrs.evolve(
            answer, logprobs=None if answer.logprobs is None else _rolled(answer.logprobs)
        )
    )


class AbortAsLength(_Columns):
    """An aborted sample says "length"."""

    sampler = _changing(
        lambda _, answer: attrs.evolve(
            answer,
            finish_reason=np.where(answer.finish_reason == ABORT, LENGTH, answer.finish_reason),
        )
    )


class StopIdAsLength(_Columns):
    """A sample that ended at one of the request's stop ids says "length"."""

    sampler = _changing(
        lambda request, answer: attrs.evolve(
            answer,
            finish_reason=np.where(
                bool(request.params.stop_token_ids), LENGTH, answer.finish_reason
            ),
        )
    )


class TruncatedLogprobs(_Columns):
    """Where a truncation holds, `logprobs` are those of the truncated distribution."""

    sampler = _changing(
        lambda request, answer: (
            attrs.evolve(answer, logprobs=answer.drawn_logprobs)
            if request.params.truncates and answer.drawn_logprobs is not None
            else answer
        )
    )


class GreedyIsCertain(_Columns):
    """At temperature 0 each token's logprob is 0, that of a certain event."""

    sampler = _changing(
        lambda request, answer: (
            attrs.evolve(answer, logprobs=answer.tokens.with_values(answer.tokens.values * 0.0))
            if request.params.temperature == 0 and answer.logprobs is not None
            else answer
        )
    )


class CacheSaltMatters(_Columns):
    """Another cache_salt gives other tokens."""

    sampler = _changing(
        lambda request, answer: (
            attrs.evolve(answer, tokens=answer.tokens.with_values((answer.tokens.values + 1) % 256))
            if request.params.cache_salt
            else answer
        )
    )


class SamplesOfAPromptAreOne(Broken):
    """All n samples of a prompt are the same."""

    class sampler(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            one = attrs.evolve(request, params=attrs.evolve(request.params, n=1))
            answer = await super().generate(one, context)
            samples = [
                attrs.evolve(sample, index=index)
                for sample in answer.samples()
                for index in range(request.params.n)
            ]
            return Generation.from_samples(samples)


class StopsOfSeveralIgnored(Broken):
    """Stop ids and stop strings are ignored where several samples are asked for."""

    class sampler(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            if request.params.n > 1:
                params = attrs.evolve(request.params, stop_token_ids=(), stop=())
                request = attrs.evolve(request, params=params)
            return await super().generate(request, context)


class PromptsShareTheirSeed(Broken):
    """All prompts of a generate draw with the same random numbers."""

    class sampler(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            samples = []
            for place in range(len(request.prompts)):
                one = attrs.evolve(request, prompts=request.prompts.select([place]))
                answer = await super().generate(one, _Silent(context))
                for sample in answer.samples():
                    samples.append(attrs.evolve(sample, prompt_index=place))
                    context.emit(samples[-1])
            return Generation.from_samples(samples)


class _Silent:
    """A context that gives no samples on."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def emit(self, sample: Any) -> None:
        pass

    def progress(self, *arguments: Any) -> None:
        pass


class LongSamplesUnscored(_Columns):
    """Logprobs beyond the 32nd token of a sample are zero."""

    sampler = _changing(
        lambda _, answer: attrs.evolve(
            answer,
            logprobs=None
            if answer.logprobs is None
            else answer.logprobs.with_values(
                answer.logprobs.values * (_places(answer.logprobs) < 32)
            ),
        )
    )


def _asking(change: Callable[[Any], dict[str, Any]]) -> type[Sampler]:
    """A sampler that is asked for something else: by the params, which of them are others."""

    class Asked(Sampler):
        async def generate(self, request: Any, context: Any) -> Generation:
            params = attrs.evolve(request.params, **change(request.params))
            return await super().generate(attrs.evolve(request, params=params), context)

    return Asked


class StopStringKept(Broken):
    """The stop string is part of the sample."""

    sampler = _asking(lambda _: {"include_stop": True})


class StopStringNeverKept(Broken):
    """The stop string is left out of the sample where it was to be included, too."""

    sampler = _asking(lambda _: {"include_stop": False})


class MinTokensIgnored(Broken):
    """An end id comes before min_tokens tokens are there."""

    sampler = _asking(lambda params: {} if params.stop else {"min_tokens": 0})


class MinTokensOneTooMany(Broken):
    """An end id that might be the first one after min_tokens tokens is not drawn."""

    sampler = _asking(
        lambda params: (
            {"min_tokens": min(params.min_tokens + 1, params.max_tokens)}
            if params.min_tokens and params.stop_token_ids
            else {}
        )
    )


class StopStringsIgnoreMinTokens(Broken):
    """A stop string ends a sample before min_tokens tokens are there."""

    sampler = _asking(lambda params: {"min_tokens": 0} if params.stop else {})


class DrawnLogprobsIgnoreMinTokens(_Columns):
    """With min_tokens, drawn_logprobs are those of the full vocabulary."""

    sampler = _changing(
        lambda request, answer: (
            attrs.evolve(answer, drawn_logprobs=answer.logprobs)
            if request.params.min_tokens and answer.drawn_logprobs is not None
            else answer
        )
    )


class PauseIgnored(Broken):
    """Generation goes on while it is paused."""

    class sampler(Sampler):
        async def pause(self, request: Any, context: Any) -> None:
            pass


# -- the path between them ------------------------------------------------------------------------


class SyncDeliversNothing(Broken):
    """A sync delivers nothing and says success."""

    class path(WeightPath):
        async def sync(self, request: Any, context: Any) -> Any:
            old = self._sampler.served.weights
            receipt = await super().sync(request, context)
            self._sampler.replace(attrs.evolve(self._sampler.served, weights=old))
            return receipt


class SamplerFollowsTrainer(Broken):
    """The sampler serves new weights before any sync, under the old version."""

    class trainer(Trainer):
        follower: ClassVar[list[Sampler]] = []

        async def optim_step(self, request: Any, context: Any) -> Any:
            result = await super().optim_step(request, context)
            for sampler in self.follower:
                sampler.replace(attrs.evolve(sampler.served, weights=self.policy.weights))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.trainer.follower[:] = [self._sampler]  # type: ignore[attr-defined]


class SyncOfSomeTensors(Broken):
    """A sync delivers the first tensors only."""

    class path(WeightPath):
        async def sync(self, request: Any, context: Any) -> Any:
            old = self._sampler.served.weights
            receipt = await super().sync(request, context)
            new = self._sampler.served.weights
            weights = {name: (new if place < 3 else old)[name] for place, name in enumerate(new)}
            self._sampler.replace(attrs.evolve(self._sampler.served, weights=weights))
            return receipt


class PartsServedAtOnce(Broken):
    """The sampler serves the tensors of a push in parts as they come."""

    class path(WeightPath):
        async def push_part(self, request: Any, context: Any) -> None:
            await super().push_part(request, context)
            served = self._sampler.served
            new = {name: self.staging._bytes[name].view("<f8") for name in request.pieces}
            weights = {
                name: new[name].reshape(old.shape) if name in new else old
                for name, old in served.weights.items()
            }
            self._sampler.replace(attrs.evolve(served, weights=weights))


class OffsetsOfPiecesIgnored(Broken):
    """Each piece of a tensor is written to its beginning."""

    class path(WeightPath):
        async def push_part(self, request: Any, context: Any) -> None:
            pieces = {name: attrs.evolve(each, offset=0) for name, each in request.pieces.items()}
            await super().push_part(attrs.evolve(request, pieces=pieces), context)


class ExportOfTheBase(Broken):
    """An export holds the weights that the run began with."""

    class trainer(Trainer):
        async def export(self, request: Any, context: Any) -> None:
            current = self._state.policy
            self._state.policy = self._state.base
            try:
                await super().export(request, context)
            finally:
                self._state.policy = current


class LabelLost(Broken):
    """A sync's label gets lost on the way."""

    class path(WeightPath):
        async def sync(self, request: Any, context: Any) -> Any:
            return await super().sync(attrs.evolve(request, label=None), context)


class ReceiptOfNothing(Broken):
    """A receipt says that no bytes moved."""

    class path(WeightPath):
        async def sync(self, request: Any, context: Any) -> Any:
            return attrs.evolve(await super().sync(request, context), bytes=0)
