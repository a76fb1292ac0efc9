"""From the drafter's hidden states to draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from minedraft_core.vllm.cpu.noise import Draw, gumbel_argmax
from minedraft_core.vllm.cpu.query import Chosen


class DraftHead:
    """Scores the tokens that the drafter proposes and chooses one for each request."""

    def __init__(self, score: Callable[[torch.Tensor], torch.Tensor], token_ids: torch.Tensor, vocabulary: int) -> None:
        """`score` maps [n, hidden] to logits [n, m] of the tokens `token_ids`, int64 [m], ascending, out of `vocabulary`."""
        self._score, self._token_ids, self._vocabulary = score, token_ids, vocabulary
        self._whole = len(token_ids) == vocabulary

    def choose(self, hidden: torch.Tensor, draws: Sequence[Draw | None]) -> Chosen:
        """hidden [n, hidden] -> n tokens: the argmax, or drawn where the request samples."""
        return Chosen(self._tokens(self._scores(hidden), draws).tolist())

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        # PyTorch finds the argmax of float32 ten times faster than that of bfloat16 on a CPU.
        return self._score(hidden).float()

    def _tokens(self, scores: torch.Tensor, draws: Sequence[Draw | None]) -> torch.Tensor:
        chosen = self._token_ids[scores.argmax(dim=-1)]
        drawn = [row for row, draw in enumerate(draws) if draw is not None]
        if drawn:
            chosen[drawn] = gumbel_argmax(self._spread(scores[drawn]), [draw for draw in draws if draw is not None])
        return chosen

    def _spread(self, scores: torch.Tensor) -> torch.Tensor:
        """The noise belongs to token ids, so a token must stand in its place: [n, m] -> [n, vocabulary]."""
        if self._whole:
            return scores
        spread = scores.new_full((scores.shape[0], self._vocabulary), float("-inf"))
        spread[:, self._token_ids] = scores
        return spread


class ScoringHead(DraftHead):
    """Also says how likely each token is among those that the drafter proposes: at the temperature it is drawn at, the argmax at 1."""

    def choose(self, hidden: torch.Tensor, draws: Sequence[Draw | None]) -> Chosen:
        """hidden [n, hidden] -> n tokens and their log-probabilities, at most 0."""
        scores = self._scores(hidden)
        tokens = self._tokens(scores, draws)
        if any(draw is not None for draw in draws):
            scores = scores / torch.tensor([[1.0 if draw is None else draw.temperature] for draw in draws])
        # PyTorch runs softmax faster than logsumexp on a CPU.
        own = scores.softmax(dim=1).gather(1, torch.searchsorted(self._token_ids, tokens)[:, None]).squeeze(1)
        # Rounding may lift a certain token above 0.
        return Chosen(tokens.tolist(), own.log().clamp(max=0.0).tolist())


def narrow_scores(weight: torch.Tensor, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The output head over some tokens only, [vocabulary, hidden] at int64 [m], with the kernel that vLLM picks for this CPU."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight.detach()[token_ids].contiguous(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def score(hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = layer.cpu_linear(hidden, layer.weight, None)
        return scores

    return score
