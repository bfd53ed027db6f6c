"""What acts on samples that are being drawn: pause, abort, the cache; and engines that serve
nothing yet, have no tokenizer, or can't start. Tiny models in a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from arctic_models import write_model
from sampler_engine import PATIENCE, PROMPT, Running, tied_qwen3, untied_llama

from backends.arctic.sampling.engine import SamplerEngine
from backends.arctic.sampling.settings import SamplerSettings
from remote_rl.errors import BackendError, InvalidRequestError


@pytest.fixture
def running() -> Iterator[Running]:
    engine = tied_qwen3()
    yield engine
    engine.run(engine.engine.resume())
    engine.until(lambda: engine.engine.in_flight == 0)


def test_a_pause_holds_every_sample_at_its_next_token(running: Running) -> None:
    whole = running.draw(count=3, max_tokens=200)
    future = running.held()
    drawn = running.engine.pulse()
    newcomer = running.begin(name="newcomer")
    running.until(lambda: running.engine.in_flight >= 2)
    running.run(running.engine.pause())  # a second one changes nothing
    assert running.engine.pulse() == drawn
    assert not future.done()
    assert not newcomer.done()
    running.run(running.engine.resume())
    assert _ids(future.result(PATIENCE)) == _ids(whole), "a pause changed what was drawn"
    assert len(newcomer.result(PATIENCE)) == 1


def test_an_abort_keeps_what_was_drawn(running: Running) -> None:
    whole = running.draw(count=3, max_tokens=200)
    future = running.held(name="named")
    other = running.begin(name="other", count=2)
    running.until(lambda: running.engine.in_flight >= 3)
    running.run(running.engine.abort(["named", "never was"]))
    samples = future.result(PATIENCE)
    assert "abort" in {sample.finish_reason for sample in samples}
    for sample, uncut in zip(samples, whole):
        assert sample.tokens.tolist() == uncut.tokens.tolist()[: len(sample)]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample)
        short = len(sample) < len(uncut)
        assert sample.finish_reason == ("abort" if short else uncut.finish_reason)
    assert not other.done()
    running.run(running.engine.resume())
    assert all(sample.finish_reason != "abort" for sample in other.result(PATIENCE))


def test_an_abort_before_the_first_token(running: Running) -> None:
    running.run(running.engine.pause())
    flying = [running.begin(name=name) for name in ("one", "other")]
    running.until(lambda: running.engine.in_flight == 2)
    running.run(running.engine.abort())
    version, label = running.run(running.serving())
    for future in flying:
        [sample] = future.result(PATIENCE)
        assert (len(sample), sample.finish_reason) == (0, "abort")
        assert (sample.first_version, sample.last_version, sample.label) == (
            version,
            version,
            label,
        )
    running.run(running.engine.abort())  # nothing flies


def test_an_abort_that_overtakes_its_generate_ends_it(running: Running) -> None:
    """Ray starts what an actor is asked in any order."""
    running.run(running.engine.abort(["early"]))
    [sample] = running.draw(name="early", max_tokens=200)
    assert (len(sample), sample.finish_reason) == (0, "abort")
    [other] = running.draw(name="another", max_tokens=3)
    assert other.finish_reason != "abort"


def test_who_stops_listening_aborts(running: Running) -> None:
    future = running.held()
    future.cancel()
    running.until(lambda: running.engine.in_flight == 0)
    running.run(running.engine.resume())
    assert len(running.draw()) == 1


def test_the_cache_can_be_dropped_while_samples_run(running: Running) -> None:
    whole = running.draw(count=3, max_tokens=200)
    future = running.held()
    running.run(running.engine.reset_prefix_cache())
    running.run(running.engine.resume())
    assert _ids(future.result(PATIENCE)) == _ids(whole)


def test_min_tokens_hold_for_samples_that_are_computed_anew(running: Running) -> None:
    given: dict[str, Any] = {"max_tokens": 200, "min_tokens": 150, "count": 3}
    given["stop_token_ids"] = tuple(range(60))
    whole = running.draw(**given)
    future = running.held(**given)
    running.run(running.engine.reset_prefix_cache())
    running.run(running.engine.resume())
    assert _ids(future.result(PATIENCE)) == _ids(whole)
    for sample in whole:
        assert min(sample.tokens[:150]) >= 60
        assert (len(sample) < 200) == (sample.finish_reason == "stop")
    assert any(sample.finish_reason == "stop" for sample in whole)


def test_more_samples_than_the_cache_holds_end_all_the_same(running: Running) -> None:
    alone = running.draw(count=1, max_tokens=150)
    many = running.draw(count=60, max_tokens=150)
    assert len(many) == 60
    assert _ids(many)[:1] == _ids(alone)


def test_an_abort_reaches_samples_of_an_engine_that_sleeps(running: Running) -> None:
    future = running.held(name="asleep")
    running.run(running.engine.sleep())
    running.run(running.engine.resume())
    running.run(running.engine.abort(["asleep"]))
    assert "abort" in {sample.finish_reason for sample in future.result(PATIENCE)}
    assert running.engine.in_flight == 0
    running.run(running.engine.wake(whole=True))


def test_an_engine_that_sleeps_draws_nothing_and_then_goes_on_where_it_was(
    running: Running,
) -> None:
    engine = running.engine
    whole = _ids(running.draw(count=3, max_tokens=200))
    future = running.held()
    running.run(engine.sleep())
    running.run(engine.sleep())
    running.run(engine.resume())
    newcomer, drawn = running.begin(name="newcomer"), engine.pulse()
    for _ in range(2):
        running.until(lambda: engine.in_flight == 4)
        assert engine.pulse() == drawn
        running.run(engine.wake(whole=False))  # its weights' memory only
    running.run(engine.wake(whole=True))
    assert _ids(future.result(PATIENCE)) == whole
    assert len(newcomer.result(PATIENCE)) == 1
    running.run(engine.wake(whole=True))
    assert _ids(running.draw(count=3, max_tokens=200)) == whole


def test_an_engine_whose_memory_cannot_be_moved_is_of_no_use(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    for name, what in (("sleep", "put to sleep"), ("wake", "woken")):
        with monkeypatch.context() as patch:
            patch.setattr(running.engine._core.core, name, broken)
            arguments = (True,) if name == "wake" else ()
            with pytest.raises(BackendError, match=f"not be {what} .*no room.*started") as caught:
                running.run(getattr(running.engine, name)(*arguments))
        assert caught.value.details["failed"] is True
        assert "MemoryError" in caught.value.details["traceback"]


def test_without_a_tokenizer_ids_are_all_there_is() -> None:
    engine = untied_llama()
    if engine.run(engine.serving()) == (None, None):
        with pytest.raises(BackendError, match=r"it has just started.*sync again"):
            engine.draw()
        engine.deliver(engine.model)
    engine.serves(engine.model, engine.version)
    assert not engine.engine.offers_stop_strings()
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        engine.draw(stop=("the",))


def _ids(samples: Any) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


# -- engines that don't start -------------------------------------------------------------------


def _start(settings: SamplerSettings) -> None:
    async def start() -> None:
        engine = SamplerEngine()
        await engine.start(settings)

    asyncio.run(start())


@pytest.mark.parametrize(
    ("option", "message"),
    [("no_such", "'no_such' is none of vLLM's"), ("dtype", "'dtype' is set by the backend")],
)
def test_an_option_that_is_not_vllms_is_named(option: str, message: str) -> None:
    settings = attrs.evolve(tied_qwen3().settings, options={option: 1})
    with pytest.raises(InvalidRequestError, match=message):
        _start(settings)


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
def test_what_vllm_cannot_run_is_known_at_the_start(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen3", head_dim=8)
    settings = attrs.evolve(tied_qwen3().settings, model=str(model))
    with pytest.raises(BackendError, match="vLLM did not start") as caught:
        _start(settings)
    assert "head" in caught.value.details["traceback"]


def test_an_engine_that_was_not_started_says_so() -> None:
    with pytest.raises(BackendError, match="was not started"):
        SamplerEngine().serving()


def test_stop_strings_and_prompts_are_ids(running: Running) -> None:
    assert len(running.draw(PROMPT, stop=("never there",))) == 1


def test_the_processes_of_one_engine_are_its_own_children() -> None:
    """In a Ray placement group vLLM would ask Ray for them by default."""
    from backends.arctic.sampling.vllm_core import _configuration

    told = _configuration(attrs.evolve(tied_qwen3().settings, tensor_parallel=2)).parallel_config
    assert (told.tensor_parallel_size, told.distributed_executor_backend) == (2, "mp")
