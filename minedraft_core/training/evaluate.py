"""How many draft tokens the target accepts: per position and as acceptance length, without running the two in turn.

What is accepted of a draft depends only on the tokens before it, which are the target's own. So one pass over a text of the target
tells for every token with what probability it is accepted as a draft. Greedy: 1 where the drafter's argmax is the target's token.
At temperature 1 with draft probabilities q and target probabilities p (rejection sampling, arXiv 2211.17192): a draft x comes with
q(x) and is accepted with min(1, p(x)/q(x)), and the position emits x with p(x) in all, so an emitted x was an accepted draft with
min(1, q(x)/p(x)).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from minedraft_core.training.model import Drafter
from minedraft_core.training.writer import STEPWISE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Prompt:
    """A prompt to evaluate on: the token ids up to where the answer starts."""

    tokens: list[int]
    category: str


@dataclass(frozen=True)
class Reference:
    """A prompt and what the target wrote after it: `logprobs` float32 [n] of these tokens at temperature 1, none if greedy."""

    prompt: Prompt
    written: list[int]
    logprobs: Tensor | None


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts over `rounds` verifications of k draft tokens each; `emitted` counts their tokens, the target's own included.

    `per_position[i]` is the share of rounds that accepted draft i (and with it all before).
    """

    rounds: int
    emitted: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean tokens a verification emits: accepted drafts and one of the target's."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that accepted draft 1, 2, ..."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.accepted]

    def __add__(self, other: Acceptance) -> Acceptance:
        accepted = tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True))
        return Acceptance(self.rounds + other.rounds, self.emitted + other.emitted, accepted)

    def as_row(self) -> dict[str, Any]:
        """The figures for a table or a JSON file."""
        return {"acceptance_length": round(self.length, 4), "per_position": [round(p, 4) for p in self.per_position], "rounds": self.rounds}


@torch.inference_mode()
@sdpa_kernel(STEPWISE)
def references(target: PreTrainedModel, prompts: Sequence[Prompt], *, tokens: int, sample: bool, seed: int, batch: int) -> list[Reference]:
    """Let the target go on after each prompt for up to `tokens` tokens: greedily, or sampled at temperature 1 from the whole vocabulary."""
    torch.manual_seed(seed)
    stops = target.generation_config.eos_token_id
    ends = set(stops if isinstance(stops, list) else [stops]) - {None}
    pad = min(ends, default=0)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=tokens, pad_token_id=pad, eos_token_id=sorted(ends) or None, **settings)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
    found: dict[int, Reference] = {}
    for at in range(0, len(by_length), batch):
        chunk = by_length[at : at + batch]
        width = max(len(prompts[index].tokens) for index in chunk)
        ids = torch.tensor([[pad] * (width - len(prompts[i].tokens)) + prompts[i].tokens for i in chunk], device=target.device)
        mask = torch.tensor([[0] * (width - len(prompts[i].tokens)) + [1] * len(prompts[i].tokens) for i in chunk], device=target.device)
        output = target.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        for index, row in zip(chunk, output, strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            found[index] = Reference(prompts[index], row[:end], None)
    ordered = [found[index] for index in range(len(prompts))]
    if not sample:
        return ordered
    scored = []
    for chunk_references, sequence in _padded(ordered, batch // 8 or 1, target.device):
        hidden = target.base_model(input_ids=sequence, use_cache=False).last_hidden_state
        for reference, states in zip(chunk_references, hidden, strict=True):
            scores = target.get_output_embeddings()(states[_span(reference)]).float().log_softmax(-1)
            scored.append(replace(reference, logprobs=_chosen(scores, reference.written).cpu()))
    return scored


def _span(reference: Reference) -> slice:
    start = len(reference.prompt.tokens) - 1
    return slice(start, start + len(reference.written))


def _chosen(logprobs: Tensor, tokens: list[int]) -> Tensor:
    return logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0]


def _padded(found: Sequence[Reference], batch: int, device: torch.device) -> Iterator[tuple[Sequence[Reference], Tensor]]:
    # Padding on the right is never seen by a causal model's earlier positions.
    for at in range(0, len(found), batch):
        chunk = found[at : at + batch]
        rows = [torch.tensor(reference.prompt.tokens + reference.written) for reference in chunk]
        yield chunk, pad_sequence(rows, batch_first=True).to(device)


@torch.inference_mode()
@torch.compiler.set_stance("force_eager")  # texts of many lengths: compiling for each takes longer than the pass
def acceptance_probabilities(drafter: Drafter, found: Sequence[Reference], batch: int = 32) -> list[Tensor]:
    """For each reference, the probability that each written token is accepted as a draft: float32 [n], on the CPU."""
    vocabulary = drafter.model.config.vocab_size
    index = torch.full((vocabulary,), -1, dtype=torch.long, device=drafter.token_ids.device)
    index[drafter.token_ids] = torch.arange(len(drafter.token_ids), device=index.device)
    result = []
    for chunk, sequence in _padded(found, batch, drafter.model.device):
        for reference, logits in zip(chunk, drafter.logits(sequence), strict=True):
            scores = logits[_span(reference)].float()
            places = index[torch.tensor(reference.written, device=index.device)]
            if reference.logprobs is None:
                result.append((scores.argmax(-1) == places).float().cpu())
                continue
            own = scores.log_softmax(-1).gather(-1, places.clamp(min=0)[:, None])[:, 0]
            ratio = (own - reference.logprobs.to(own.device)).exp().clamp(max=1.0)
            result.append(torch.where(places >= 0, ratio, 0.0).cpu())
    return result


def count_rounds(probabilities: Tensor, k: int, generator: torch.Generator) -> Acceptance:
    """Walk through one text in verifications of k drafts each: float32 [n] -> what they accepted.

    The first token comes with the prompt's prefill and belongs to no verification; the last one is cut at the end of the text.
    """
    accepted_here = (torch.rand(len(probabilities), generator=generator) < probabilities).tolist()
    accepted, rounds, at = [0] * k, 0, 1
    while at < len(accepted_here):
        run = 0
        while run < k and at + run < len(accepted_here) and accepted_here[at + run]:
            accepted[run] += 1
            run += 1
        rounds += 1
        at += run + 1
    return Acceptance(rounds, max(0, len(accepted_here) - 1), tuple(accepted))


def evaluate(
    drafter: Drafter, found: Sequence[Reference], *, k: int, seed: int, repeats: int = 1, batch: int = 32
) -> dict[str, Acceptance]:
    """Acceptance by category, and under "overall". `repeats` walks each sampled text several times with other chances."""
    generator = torch.Generator().manual_seed(seed)
    nothing = Acceptance(0, 0, (0,) * k)
    result: dict[str, Acceptance] = defaultdict(lambda: nothing, overall=nothing)
    for reference, probabilities in zip(found, acceptance_probabilities(drafter, found, batch), strict=True):
        for _ in range(repeats if reference.logprobs is not None else 1):
            counted = count_rounds(probabilities, k, generator)
            result[reference.prompt.category] += counted
            result["overall"] += counted
    return dict(result)
