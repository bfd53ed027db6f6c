"""A model whose tokenizer doesn't tell its tokens' bytes: stop strings are not offered, and whoever
asks for them hears it before any work is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from arctic_faults import PATIENCE, PROMPTS
from arctic_models import write_model
from sampler_tokenizers import save, word_piece

from remote_rl import SamplingParams, connect
from remote_rl.errors import UnsupportedError
from remote_rl.testing.conformance.runner import Target, run


def test_stop_strings_are_offered_where_they_can_be_found(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3", head_dim=32)
    save(word_piece(), model)
    with connect("arctic", model=str(model), placement={"device": "cpu"}) as session:
        offered = session.info().result().capabilities
        assert "tokenizer" in offered.operations
        assert "stop_token_ids" in offered.sampling_options
        assert "stop" not in offered.sampling_options
        with pytest.raises(UnsupportedError, match="stop"):
            session.sampling.generate(PROMPTS, SamplingParams(max_tokens=4, stop=("x",)))
        groups = session.sampling.generate(PROMPTS, SamplingParams(max_tokens=4)).result(PATIENCE)
        assert len(groups) == len(PROMPTS)
        target = Target(session=session, tolerance=1e-4, learning_rate=1e-2)
        reports = run(target, areas=("Endings", "Refusals"))
        assert {each.name: each.reason for each in reports if each.verdict == "failed"} == {}
        refused = [each for each in reports if "stop" in each.name and each.verdict == "skipped"]
        assert refused, "nothing was skipped for want of stop strings"
