"""TETRIS on the device: which drafts of a batch are verified is decided where they lie, and nothing waits for it.

The runner asks these methods as it asks vLLM's own adaptive verification, which trims batches in the same way and whose number of tokens
follows from estimated times in place of a capacity.

GPUs verify distributions, so the choice must not look at a token drawn from them (see `minedraft_core.tetris`). A position is scored by the
largest probability of its draft distribution, a function of the tokens before it. Whether it is kept depends on the scores up to it and on
other requests, since sums never grow along a draft; so every token verified was drawn from the law that it is verified against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from minedraft_core.config import ConfigError, MineDraftConfig
from minedraft_core.sides import cadence_of
from minedraft_core.tetris import Room, choose
from minedraft_core.vllm.scheduler import tetris_of

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Trim:
    """What the host knows of a batch: scheduled drafts and other tokens of each request, and how many drafts are verified in all."""

    drafts: dict[str, int]
    others: dict[str, int]
    kept: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return sum(self.others.values()) + self.kept


def room_of(config: MineDraftConfig, max_requests: int) -> Room | None:
    """What TETRIS verifies of a batch, None without it. Worked out once: the devices do not hear of another mode or k."""
    tetris = tetris_of(config, max_requests)
    return None if tetris is None else tetris.room(config.num_speculative_tokens, cadence_of(config.mode).sides)


class DeviceTetris:
    """Trims the drafts of each batch to the best ones. For one runner; every rank of a tensor-parallel target decides the same.

    A request is sampled from at its drafts and at one position more.
    """

    def __init__(self, scores: torch.Tensor, query_start_loc: torch.Tensor, room: Room, most_logits: int) -> None:
        """Follow the runner's buffers.

        scores: float32 [slots, k], where the logarithms of the largest draft probabilities land. query_start_loc: int32 [slots + 1], which
        tells the target's kernels where each request begins. `most_logits` rows can be sampled from in one go.
        Raises ConfigError where a full batch has more.
        """
        slots, num_drafts = scores.shape
        most = room.most(slots, num_drafts)
        if most + slots > most_logits:
            raise ConfigError(
                f"'tetris' verifies up to {most} draft tokens and {slots} others in a pass; this vocabulary allows {most_logits}: "
                "lower 'tetris_capacity', 'tetris_turn_on_batch_size' or --max-num-seqs"
            )
        self._scores, self._query_start_loc, self._room = scores, query_start_loc, room
        self._trim = Trim({}, {}, 0)

    def add_request(self, slot: int) -> None:
        """Nothing to do: drafts land with their scores before they are verified."""

    def batches_to_profile(self, capture_sizes: Sequence[int]) -> Iterable[dict[str, int]]:
        """None: the capacity does not depend on times."""
        return ()

    def set_initial_cost_curves(self, samples: Sequence[Any]) -> None:
        """See `batches_to_profile`."""

    def record_confidences(self, confidences: None, batch: Any) -> None:
        """Nothing to do: the scores land when the drafts do."""

    def get_num_tokens(self, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> int:
        """Begin a pass with these scheduled tokens and drafts of each request; how many tokens it has once trimmed."""
        scheduled = {request_id: len(drafts.get(request_id, ())) for request_id in num_tokens}
        others = {request_id: count - scheduled[request_id] for request_id, count in num_tokens.items()}
        self._trim = Trim(scheduled, others, self._room.kept(scheduled.values()))
        return self._trim.num_tokens

    def compact_batch(self, drafts: Counts, num_tokens: Counts, logits_bounds: Counts) -> tuple[Counts, Counts]:
        """Tokens of each request and bounds of its logits as the host has to see them, which does not know the true ones.

        drafts, num_tokens: int32 [n], as scheduled; logits_bounds: int32 [n + 1]. The sum of the tokens is right: the drafts kept are
        spread evenly. The bounds stay as scheduled.
        """
        has_drafts = drafts > 0
        count = int(has_drafts.sum())
        if not count:
            return num_tokens, logits_bounds
        share, rest = divmod(self._trim.kept, count)
        even = np.where(has_drafts, share + (np.cumsum(has_drafts) <= rest), 0)
        return (num_tokens - drafts + even).astype(num_tokens.dtype), logits_bounds

    def reallocate_drafts(self, request_ids: Sequence[str], idx_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Choose the drafts of the pass that was begun, for requests in this order with slots `idx_mapping`, int [n].

        Returns the bounds of each request's logits, int32 [n + 1], and of its tokens, int32 [slots + 1] (the runner's buffer), both on the
        device, and the number of drafts kept.
        """
        count, trim, bounds = len(request_ids), self._trim, self._query_start_loc
        host = np.array([[trim.drafts[name], trim.others[name]] for name in request_ids], dtype=np.int64)
        lengths, others = async_tensor_h2d(host.T.copy(), device=idx_mapping.device)
        kept = choose(self._scores[idx_mapping], lengths, trim.kept)
        logits = torch.zeros(count + 1, dtype=torch.int32, device=idx_mapping.device)
        logits[1:] = torch.cumsum(kept + 1, 0)
        bounds[:1] = 0
        bounds[1 : count + 1] = torch.cumsum(kept + others, 0)
        bounds[count + 1 :] = trim.num_tokens
        return logits, bounds, trim.kept
