"""Verification on CPU: vLLM's own sampler draws a token at every position, drafts are accepted while they match.

Replaces vLLM's rejection sampler, whose CPU path writes floats into an integer copy and so corrupts sampling requests. Each
position of a request is given to vLLM's plain sampler as a row of its own, so that everything a request can ask for (penalties, bad
words, `logit_bias`, `min_p`, `min_tokens`, seeds, log-probabilities) means the same with and without drafts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from minedraft_core.acceptance import PAD, accept_matching
from minedraft_core.vllm.cpu.rows import Rows, row_processors


class MatchingSampler(nn.Module):
    """Called by vLLM's runner in place of its rejection sampler."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Draw at every position and keep what matches.

        logits: [rows, vocabulary], for each request one row a draft token and one more. draft_probs: none, since drafts are the argmax.
        Returns int32 tokens [requests, most drafts + 1], padded with -1, and log-probabilities in the same order.
        """
        if draft_probs is not None:
            raise ValueError("drafts of the CPU pipeline are the argmax and carry no distributions")
        rows = Rows.of(metadata.num_draft_tokens)
        expanded = expand(sampling_metadata, rows)
        before = {index: generator.get_state() for index, generator in sampling_metadata.generators.items()}
        drawn = self.sampler(logits, expanded)
        tokens = accept_matching(drawn.sampled_token_ids.squeeze(-1), metadata.draft_token_ids, metadata.num_draft_tokens)
        if not self.sampler.use_fp64_gumbel:
            rewind(sampling_metadata.generators, before, tokens)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=_spread(drawn.logprobs_tensors, rows, tokens.shape[1]))


def expand(metadata: SamplingMetadata, rows: Rows) -> SamplingMetadata:
    """One row a position instead of one a request: each position sees the drafts before it as output."""
    index = rows.request

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index]

    outputs: list[list[int]] = []
    if metadata.output_token_ids:
        spec = metadata.spec_token_ids or []
        for request, count in enumerate(rows.counts):
            output, drafts = metadata.output_token_ids[request], spec[request] if request < len(spec) else []
            outputs += [[*output, *drafts[:position]] if position else output for position in range(count)]
    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators={row: generator for request, generator in sorted(metadata.generators.items()) for row in rows.of_request(request)},
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=metadata.frequency_penalties[index],
        presence_penalties=metadata.presence_penalties[index],
        repetition_penalties=metadata.repetition_penalties[index],
        output_token_ids=outputs,
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids={row: words for request, words in metadata.bad_words_token_ids.items() for row in rows.of_request(request)},
        logprob_token_ids=None
        if metadata.logprob_token_ids is None
        else {row: ids for request, ids in metadata.logprob_token_ids.items() for row in rows.of_request(request)},
        logitsprocs=row_processors(metadata.logitsprocs, rows),
        spec_token_ids=None,
        thinking_budget_state_holder=None,
    )


def rewind(generators: dict[int, torch.Generator], before: dict[int, torch.Tensor], tokens: torch.Tensor) -> None:
    """Take back the draws of rejected positions, so that a seed gives the same tokens whatever was drafted.

    vLLM's CPU sampler draws one integer a row from a request's generator; only delivered tokens may have used one up.
    """
    for request, state in before.items():
        generator = generators[request]
        generator.set_state(state)
        for _ in range(int((tokens[request] != PAD).sum())):
            torch.randint(0, 2**31, (1,), generator=generator)


def all_processors(vllm_config: VllmConfig, device: torch.device) -> LogitsProcessors:
    """vLLM's logits processors, all of them: with speculation vLLM itself keeps `min_tokens` only."""
    return LogitsProcessors(processor(vllm_config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS)


def _spread(logprobs: LogprobsTensors | None, rows: Rows, width: int) -> LogprobsTensors | None:
    if logprobs is None:
        return None
    at = rows.flat_index(width)
    return LogprobsTensors(*(_scatter(values, at, len(rows.counts) * width) for values in logprobs))


def _scatter(values: torch.Tensor | None, at: torch.Tensor, length: int) -> torch.Tensor | None:
    if values is None or values.numel() == 0 or values.shape[0] != at.shape[0]:
        return values
    spread = values.new_zeros((length, *values.shape[1:]))
    spread[at] = values
    return spread
