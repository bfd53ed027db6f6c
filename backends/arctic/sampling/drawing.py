"""Arctic backend: how a token is drawn, with both of its logprobs (imports torch and vllm).

vLLM gives logprobs either before temperature and truncation or after both. The contract wants those
of the full vocabulary at the temperature, and those of what was drawn from; so this sampler takes
the place of vLLM's in the model runner, and does what vLLM's does: ends that come before min_tokens
left out, min-p, top-k, top-p, draw. The temperature, which vLLM applies after the first of these,
comes before all of them. In vLLM's table of logprobs each token has three columns (LOGPROB, DRAWN,
SERIAL of flight.py): the two logprobs, and the serial number of the weights, put there where they
were used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from .seeds import draw_seeds

#: in SamplingParams.extra_args: the sample's key of seeds.py
KEY = "remote_rl_key"
#: temperatures below are greedy; vLLM's own limit
_GREEDY = 1e-5


class TwofoldSampler(Sampler):
    """Draws, and says both logprobs. serial: of the weights that the model holds."""

    def __init__(self, runner: Any, serial: int) -> None:
        super().__init__()
        self._runner = [runner]  # in a list, so that torch doesn't take it for a submodule
        self.serial = serial

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """One token for each row of logits [rows, V]."""
        del logprobs_mode_override  # both kinds always come
        del predict_bonus_token  # there are no speculative tokens
        tokens, full, drawn = self.draw(logits.to(torch.float32), sampling_metadata)
        columns = torch.stack([full, drawn, torch.full_like(full, self.serial)], dim=1)
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1),
            logprobs_tensors=LogprobsTensors(
                tokens.to(torch.int32).unsqueeze(-1).expand(-1, columns.shape[1]).contiguous(),
                columns,
                torch.zeros_like(tokens),
            ),
        )

    def draw(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [rows] int64; their logprobs, float32, of the full vocabulary at the temperature
        (0 counts as 1) and of the truncated distribution (0 where greedy, which leaves no
        choice)."""
        if metadata.all_greedy:
            normaliser = logits.logsumexp(dim=-1)
            logits = self._without_early_ends(logits, metadata)
            tokens = logits.argmax(dim=-1)
            full = _of(logits, tokens) - normaliser
            return tokens, full, torch.zeros_like(full)
        temperature = metadata.temperature
        greedy = temperature < _GREEDY
        logits = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
        normaliser = logits.logsumexp(dim=-1)
        logits = self._without_early_ends(logits, metadata)
        cut = _truncated(logits, metadata)
        tokens = self._choose(cut)
        if not metadata.all_random:
            tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        full = _of(logits, tokens) - normaliser
        whole = cut is logits and not _early_ends(metadata)
        drawn = full if whole else _of(cut, tokens) - cut.logsumexp(dim=-1)
        return tokens, full, torch.where(greedy, 0.0, drawn)

    def _without_early_ends(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Logits, written over, with -inf for the ids that min_tokens doesn't let come yet; the
        others keep theirs."""
        return self.apply_logits_processors(logits, metadata, False)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """An id of each row by the Gumbel-max rule, with noise from the row's own seed."""
        seeds = self._seeds(len(logits))
        if logits.device.type == "cpu":
            chosen: torch.Tensor = torch.ops._C.fused_gumbel_argmax(
                logits.contiguous(), torch.from_numpy(seeds)
            )
            return chosen.long()
        noise = torch.empty_like(logits)
        generator = torch.Generator(device=logits.device)
        for row, seed in enumerate(seeds.tolist()):
            generator.manual_seed(seed)
            noise[row].exponential_(generator=generator)
        return (logits - noise.log_()).argmax(dim=-1)

    def _seeds(self, rows: int) -> Any:
        [runner] = self._runner
        names = runner.input_batch.req_ids[:rows]
        if len(names) != rows:
            raise RuntimeError(f"{rows} rows of logits, and {len(names)} requests in the batch")
        requests = [runner.requests[name] for name in names]
        keys = [request.sampling_params.extra_args[KEY] for request in requests]
        positions = [len(request.output_token_ids) for request in requests]
        return draw_seeds(np.array(keys, np.int64), np.array(positions, np.int64))


def _early_ends(metadata: SamplingMetadata) -> bool:
    """Whether a row has fewer tokens than its min_tokens."""
    return any(
        each.min_toks
        for each in metadata.logitsprocs.non_argmax_invariant
        if isinstance(each, MinTokensLogitsProcessor)
    )


def _truncated(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Logits with -inf for what min-p, top-k and top-p leave out; the tensor itself where no row
    leaves anything out."""
    processors = metadata.logitsprocs.argmax_invariant  # min-p
    cutting = any(getattr(each, "min_p_count", 1) for each in processors)
    if not cutting and metadata.top_k is None and metadata.top_p is None:
        return logits
    cut = logits.clone()  # what follows works in place
    for processor in processors:
        cut = processor.apply(cut)
    return apply_top_k_top_p(cut, metadata.top_k, metadata.top_p)


def _of(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
