"""What travels between the engine and the draft process, over a socket pair: length-prefixed msgpack, in order."""

from __future__ import annotations

import msgspec

from minedraft_core.types import DraftBatch, DraftResult


class DraftProcessConfig(msgspec.Struct, frozen=True):
    """What the draft process needs to start.

    `kv_tokens` is the room of its KV cache, `max_model_len` the longest context with its drafts. `scored` asks for the
    log-probabilities of drafts.
    """

    model: str
    target_model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    vocab_size: int
    cores: tuple[int, ...]
    trust_remote_code: bool = False
    scored: bool = False
    replay: str | None = None
    replay_acceptance: float = 1.0


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """These requests ended."""

    request_ids: list[str]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The draft model is loaded; `max_context` tokens of a request can be held."""

    max_context: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process cannot go on, and why."""

    message: str


ToProcess = DraftBatch | Forget
FromProcess = Ready | DraftResult | Failed
