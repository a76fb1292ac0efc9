"""The speculator of PEARL: packed rows say which chains can go on, and the scheduler says how far the drafter goes ahead."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from minedraft_core.vllm.gpu.chain_kernels import mark
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from minedraft_core.vllm.gpu.speculator import PipelineSpeculator


class LookaheadSpeculator(PipelineSpeculator):
    """As the pipeline's speculator, with an engine that drafts ahead."""

    _engine: LookaheadEngine | None

    def pace(self, steps: int) -> None:
        """Go so many steps ahead after the draft that the next pass orders."""
        if self._engine is not None:
            self._engine.pace(steps)

    def _pack(
        self,
        rows: torch.Tensor,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        super()._pack(rows, batch, num_sampled, num_rejected, last_sampled, temperature, seeds)
        mark(rows, batch.idx_mapping, num_rejected, self._states.num_computed_tokens.gpu, self._states.prefill_len.gpu)
