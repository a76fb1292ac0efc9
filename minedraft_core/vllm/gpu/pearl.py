"""The speculator of PEARL: packed rows say which chains can go on, and the scheduler says how far the drafter goes ahead."""

from __future__ import annotations

from minedraft_core.vllm.gpu.chain_kernels import mark
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from minedraft_core.vllm.gpu.speculator import Outcome, PipelineSpeculator


class LookaheadSpeculator(PipelineSpeculator):
    """As the pipeline's speculator, with an engine that drafts ahead."""

    _engine: LookaheadEngine | None

    def pace(self, steps: int) -> None:
        """Go so many steps ahead after the draft that the next pass orders."""
        if self._engine is not None:
            self._engine.pace(steps)

    def _carry(self, job: DraftJob, outcome: Outcome) -> None:
        assert self._engine is not None
        rows, states = self._engine.rows(job.slot, job.num_reqs), self._states
        mark(rows, outcome.batch.idx_mapping, outcome.num_rejected, states.num_computed_tokens.gpu, states.prefill_len.gpu)
