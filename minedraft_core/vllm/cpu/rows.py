"""One row a position: which request each row of logits belongs to, and vLLM's logits processors over such rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)


@dataclass(frozen=True)
class Rows:
    """`counts[i]` rows for request i, its draft tokens and one more. `request` and `position` are int64 [rows]."""

    counts: tuple[int, ...]
    request: torch.Tensor
    position: torch.Tensor
    first: tuple[int, ...]

    @classmethod
    def of(cls, num_drafts: Sequence[int]) -> Rows:
        """The rows for so many draft tokens of each request."""
        counts = torch.tensor(num_drafts, dtype=torch.int64) + 1
        first = torch.cumsum(counts, 0) - counts
        request = torch.repeat_interleave(torch.arange(len(num_drafts)), counts)
        return cls(tuple(counts.tolist()), request, torch.arange(request.numel()) - first[request], tuple(first.tolist()))

    def of_request(self, request: int) -> range:
        """The rows of one request."""
        return range(self.first[request], self.first[request] + self.counts[request])

    def flat_index(self, width: int) -> torch.Tensor:
        """Where each row lies in a flattened [requests, width] matrix."""
        return self.request * width + self.position


class _RowProcessor(LogitsProcessor):
    """Lives for one step: its state is taken from vLLM's processor, which keeps track of the requests."""

    def __init__(self) -> None:
        """Built by `row_processors`, not by vLLM."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy requests may skip it."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """vLLM's own processor does that."""


class _RowMinP(_RowProcessor):
    def __init__(self, min_p: torch.Tensor) -> None:
        self._min_p = min_p[:, None]

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(dim=-1)
        threshold = probabilities.amax(dim=-1, keepdim=True) * self._min_p
        return logits.masked_fill_(probabilities < threshold, float("-inf"))


class _RowBias(_RowProcessor):
    def __init__(self, rows: list[int], tokens: list[int], biases: list[float]) -> None:
        self._at = torch.tensor(rows), torch.tensor(tokens)
        self._biases = torch.tensor(biases, dtype=torch.float32)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[self._at] += self._biases
        return logits


class _RowForbid(_RowProcessor):
    def __init__(self, entries: list[tuple[int, list[int], bool]]) -> None:
        self._entries = entries

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, tokens, keep_last_resort in self._entries:
            kept = logits[row, tokens]
            logits[row, tokens] = float("-inf")
            if keep_last_resort and bool(torch.isneginf(logits[row]).all()):
                logits[row, tokens] = kept
        return logits


def row_processors(processors: LogitsProcessors, rows: Rows) -> LogitsProcessors:
    """vLLM's processors, which hold one row a request, over one row a position."""
    return LogitsProcessors(row for processor in processors.all if (row := _row_processor(processor, rows)) is not None)


def _row_processor(processor: LogitsProcessor, rows: Rows) -> LogitsProcessor | None:
    if isinstance(processor, MinPLogitsProcessor):
        return _RowMinP(processor.min_p_cpu_tensor[rows.request]) if processor.min_p_count else None
    if isinstance(processor, LogitBiasLogitsProcessor):
        cells = [
            (row, token, bias)
            for request, biases in processor.biases.items()
            for row in rows.of_request(request)
            for token, bias in biases.items()
        ]
        return _RowBias(*map(list, zip(*cells, strict=True))) if cells else None
    if isinstance(processor, MinTokensLogitsProcessor):
        forbidden = [
            (row, sorted(stop_ids), structured)
            for request, (minimum, output, stop_ids, structured) in processor.min_toks.items()
            for position, row in enumerate(rows.of_request(request))
            if stop_ids and len(output) + position < minimum
        ]
        return _RowForbid(forbidden) if forbidden else None
    raise TypeError(f"logits processor {type(processor).__name__} cannot be applied to draft positions")
