"""The noise with which vLLM's CPU sampler draws a request's tokens, known to the drafter too.

vLLM draws by the Gumbel-max rule with noise that is a function of one integer a token, taken from the request's generator, and of the
token's id. A drafter that draws from its own distribution with the same noise agrees with the target far more often than the argmax
does, while what the target draws does not depend on the drafts at all (Daliri, Musco and Suresh, arXiv 2408.07978). So nothing but
tokens has to travel, and a seed gives the same output with any drafter and with none.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.request import Request

from minedraft_core.types import Sampling

_AT_ONCE = 64
_SEED_LIMIT = 1 << 31
_SEED_BITS = 63


@dataclass(frozen=True)
class Draw:
    """How one token is drawn: at `temperature`, above 0, with the noise of the integer `seed`."""

    temperature: float
    seed: int


class SeedStream:
    """The integers that vLLM's sampler takes from a request's generator, one a token of output."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[int] = []

    def at(self, index: int) -> int:
        """The integer for output token number `index`, from 0."""
        while len(self._drawn) <= index:
            self._drawn += torch.randint(0, _SEED_LIMIT, (_AT_ONCE,), generator=self._generator).tolist()
        return self._drawn[index]


def seeded(params: SamplingParams | None) -> SamplingParams | None:
    """The same parameters with a random seed, where they sample and have none."""
    if params is None or params.seed is not None or params.sampling_type is SamplingType.GREEDY:
        return params
    own = copy.copy(params)
    own.seed = secrets.randbits(_SEED_BITS)
    # vLLM keeps the type of sampling, once asked for, beside the parameters.
    own.__dict__.pop("sampling_type", None)
    return own


def sampling_of(request: Request, temperature: float | None = None) -> Sampling | None:
    """How the drafter draws the request's tokens: as the target will, or at another `temperature`. None where it takes the most likely."""
    params = request.sampling_params
    if params is None or params.seed is None or params.sampling_type is SamplingType.GREEDY or temperature == 0:
        return None
    return Sampling(params.temperature if temperature is None else temperature, params.seed, request.num_prompt_tokens)


def gumbel_argmax(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """A token of each row as vLLM's CPU sampler draws it: float32 [n, vocabulary] -> int64 [n]. Draws nothing where a logit is -inf."""
    temperatures = torch.tensor([draw.temperature for draw in draws], dtype=torch.float32)
    seeds = torch.tensor([draw.seed for draw in draws], dtype=torch.int64)
    tokens: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits / temperatures[:, None], seeds)  # noqa: SLF001 - the name vLLM gives its operators
    return tokens
