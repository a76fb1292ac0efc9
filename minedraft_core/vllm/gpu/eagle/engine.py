"""The draft engine of a head: the target's hidden states travel with a job, and every later step feeds on the one before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minedraft_core.vllm.gpu.eagle.kernels import first_rows
from minedraft_core.vllm.gpu.eagle.model import EagleModel
from minedraft_core.vllm.gpu.engine import DraftEngine, Prompt, Shape
from minedraft_core.vllm.gpu.kernels import HEADER, row_width


@dataclass(frozen=True)
class EaglePrompt(Prompt):
    """A batch with prompts in it as a head reads it: `ids` are the tokens after each row. hidden: [tokens, width], the target's."""

    hidden: torch.Tensor


class EagleEngine(DraftEngine):
    """Drafts with a head.

    The token that a request was given last is at position p, the last row of the target at p - 1: there the head reads both and drafts
    the token of p + 1.
    """

    _model: EagleModel

    def allocate(self, shape: Shape, num_blocks: int) -> None:
        """Allocate the KV cache and the buffers of jobs."""
        self._shape = shape
        size = (shape.max_num_reqs, self._first, self._model.width)
        with torch.cuda.device(self._device):
            self._hidden = torch.zeros(size, dtype=self._model.dtype, device=self._device)
            self._feed = torch.zeros(shape.max_num_reqs, self._model.feed, dtype=self._model.dtype, device=self._device)
        self._carried = [torch.zeros(size, dtype=self._model.dtype, device=self._target) for _ in self._ready]
        super().allocate(shape, num_blocks)

    def carried(self, slot: int, num_reqs: int) -> torch.Tensor:
        """Where the target packs the hidden states of a job: [bucket, k + 1, width]."""
        return self._carried[slot][: self.bucket(num_reqs)]

    @property
    def column(self) -> int:
        """First column of a job's tokens in its rows."""
        return HEADER + self._shape.num_columns

    @property
    def _first(self) -> int:
        return self._shape.num_drafts + 1

    @property
    def _width(self) -> int:
        return row_width(self._shape.num_columns + self._first)

    def _fetch(self, slot: int, rows: int) -> None:
        super()._fetch(slot, rows)
        self._hidden[:rows].copy_(self._carried[slot][:rows], non_blocking=True)

    def _table(self, rows: int) -> torch.Tensor:
        return self._pack[:rows, HEADER : self.column]

    def _run_prompt(self, prompt: Prompt, num_reqs: int) -> None:
        assert isinstance(prompt, EaglePrompt)

        ids, positions, slots, starts, seq_lens = self._prompt_inputs(prompt)
        hidden, table = self._model.combine(self._here(prompt.hidden)), self._table(num_reqs)
        self._model.states(ids, positions, hidden, slots, starts, seq_lens, table, prompt.max_query_len, prompt.max_seq_len)

    def _begin(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, first = self._shape, self._first
        first_rows(
            self._pack[:rows],
            self.column,
            first,
            self._first_ids,
            self._first_positions,
            self._first_slots,
            self._seq_lens[0],
            self._temperature,
            self._seeds,
            self._model.vocab_size,
            shape.block_size,
            shape.max_len,
        )
        last, feed = self._model.states(
            self._first_ids[: first * rows],
            self._first_positions[: first * rows],
            self._model.combine(self._hidden[:rows].flatten(0, 1)),
            self._first_slots[: first * rows],
            self._by_first[: rows + 1],
            self._seq_lens[0, :rows],
            self._table(rows),
            first,
            shape.max_len,
            planned=True,
        )
        self._feed[:rows].copy_(feed[first - 1 :: first])
        # vLLM keys the noise of a draw by the position before the token that is drawn.
        return last[first - 1 :: first].contiguous(), self._first_positions[first - 1 : first * rows : first] + 1

    def _next(self, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, positions, slots, seq_lens = self._next_inputs(step, rows)
        by_one, longest, read = self._by_one[: rows + 1], self._shape.max_len, self._feed[:rows]
        last, feed = self._model.states(ids, positions, read, slots, by_one, seq_lens, self._table(rows), 1, longest, planned=True)
        read.copy_(feed)
        return last, positions + 1
