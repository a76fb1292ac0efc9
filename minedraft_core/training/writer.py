"""The target writes conversations: many at once, one token a step, with its own distribution noted at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from minedraft_core.config import ConfigError
from minedraft_core.training.template import Template

_ATTENTION = "lockstep_decode"
# Without cuDNN's attention, which is planned anew for every length: that takes longer than the step.
STEPWISE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Start:
    """How one conversation begins: given tokens, and whether the target goes on with the answer or with the user's words.

    The user's first turn does not end before the target wrote `least` tokens of it; then `closer` follows, and the target goes on.
    """

    tokens: tuple[int, ...]
    answering: bool
    temperature: float
    least: int = 0
    closer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Written:
    """What n conversations of length L hold; entry t of the last two is the target's distribution after tokens 0..t.

    tokens int32 [n, L]; answer bool [n, L], true where the target chose the token as part of an answer; top_ids int32 [n, L, K];
    top_logprobs float16 [n, L, K], natural logarithms at temperature 1, highest first.
    """

    tokens: Tensor
    answer: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class _FixedLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers of the final size; all sequences have the same length, so no mask is needed."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.filled = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        n, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(n, heads, self.length, width)
        self.values = value_states.new_empty(n, heads, self.length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.filled + key_states.shape[2]
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.length


def _attend(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # The query heads that share a key head become rows of one small matrix, so that each key is read from memory once.
    n, heads, length, width = query.shape
    grouped = query.reshape(n, key.shape[1], -1, width)
    out = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return out.reshape(n, heads, length, -1).transpose(1, 2), None


class Decoder:
    """One step at a time through a causal model, for n sequences in lockstep. Full attention only."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        window = getattr(model.config, "sliding_window", None)
        if window is not None and window < length and getattr(model.config, "use_sliding_window", True):
            raise ConfigError(f"the model attends to a window of {window} tokens; write texts of at most that length")
        AttentionInterface.register(_ATTENTION, _attend)
        self._model, self._usual = model, model.config._attn_implementation  # noqa: SLF001  (has no public name)
        self._cache = Cache(layers=[_FixedLayer(length) for _ in range(model.config.num_hidden_layers)])
        self._position = 0
        self._kernels = sdpa_kernel(STEPWISE)

    def __enter__(self) -> Callable[[Tensor], Any]:
        self._model.set_attn_implementation(_ATTENTION)
        self._kernels.__enter__()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._kernels.__exit__(None, None, None)
        self._model.set_attn_implementation(self._usual)

    def _step(self, tokens: Tensor) -> Any:
        """Token ids int64 [n] -> the model's output after them, with a sequence dimension of 1."""
        position = torch.full((1, 1), self._position, device=tokens.device)
        self._position += 1
        return self._model(input_ids=tokens[:, None], position_ids=position, past_key_values=self._cache, use_cache=True)


def _padded(rows: list[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    return table, torch.tensor([len(row) for row in rows], device=device)


def write(
    target: PreTrainedModel,
    template: Template,
    starts: list[Start],
    *,
    length: int,
    top: int,
    user_limit: int,
    answer_limit: int,
    user_temperature: float,
    generator: torch.Generator,
    on_step: Callable[[], None] = lambda: None,
) -> Written:
    """Let the target write one conversation of `length` tokens from each start.

    A turn ends with a stop token or at its limit, the user's first one also not before `Start.least`; the template's tokens lead to the
    next one. Greedy where the temperature is 0.
    Every conversation has the full length, so nothing is padded.
    """
    device, n = target.device, len(starts)
    given, given_len = _padded([start.tokens[: length - 1] for start in starts], device)
    pieces, piece_len = _padded([template.to_user, template.to_answer], device)
    stops = torch.tensor(template.stops, device=device)
    limits = torch.tensor([user_limit, answer_limit], device=device)
    answer_temperature = torch.tensor([start.temperature for start in starts], device=device)
    answering = torch.tensor([int(start.answering) for start in starts], device=device)
    least = torch.tensor([min(start.least, user_limit - 1) for start in starts], device=device)
    closers, closer_len = _padded([start.closer or (0,) for start in starts], device)
    closer_len = torch.where(torch.tensor([bool(start.closer) for start in starts], device=device), closer_len, 0)
    closing = closer_len.clone()
    cursor, used = piece_len[answering], torch.zeros(n, dtype=torch.long, device=device)
    tokens = torch.zeros(n, length, dtype=torch.int32, device=device)
    answer = torch.zeros(n, length, dtype=torch.bool, device=device)
    top_ids = torch.zeros(n, length, top, dtype=torch.int32, device=device)
    top_logprobs = torch.zeros(n, length, top, dtype=torch.float16, device=device)
    token = given[:, 0]
    with torch.inference_mode(), Decoder(target, length) as decode:
        for t in range(length):
            tokens[:, t] = token
            logits = decode(token).logits[:, -1].float()
            best, ids = logits.topk(top)
            top_ids[:, t], top_logprobs[:, t] = ids, best - logits.logsumexp(-1, keepdim=True)
            on_step()
            if t + 1 == length:
                break
            temperature = torch.where(answering == 1, answer_temperature, user_temperature)
            held = (answering == 0) & (used < least)
            logits[:, stops] = logits[:, stops].masked_fill(held[:, None], -torch.inf)
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            sampled = torch.addcmul(logits, noise, temperature[:, None], value=-1).argmax(-1)
            was_given = given_len > t + 1
            forced = cursor < piece_len[answering]
            closes = ~was_given & ~forced & (closing < closer_len)
            chosen = ~(was_given | forced | closes)
            token = torch.where(forced, pieces[answering, cursor.clamp(max=pieces.shape[1] - 1)], sampled)
            token = torch.where(closes, closers.gather(1, closing.clamp(max=closers.shape[1] - 1)[:, None])[:, 0], token)
            token = torch.where(was_given, given[:, min(t + 1, given.shape[1] - 1)], token)
            answer[:, t + 1] = chosen & (answering == 1)
            cursor = torch.where(forced & ~was_given, cursor + 1, cursor)
            used = torch.where(chosen, used + 1, used)
            closing = torch.where(closes, closing + 1, closing)
            closing = torch.where(chosen & (answering == 0) & (used == least), 0, closing)
            stopped = chosen & torch.isin(token, stops)
            ended = stopped | (chosen & (used >= limits[answering]))
            answering = torch.where(ended, 1 - answering, answering)
            # A stop token that opens the next piece has been written already.
            skip = (stopped & (token == pieces[answering, 0])).long()
            cursor = torch.where(ended, skip, cursor)
            used = torch.where(ended, 0, used)
            least = torch.where(ended, 0, least)
    return Written(tokens, answer, top_ids, top_logprobs)
