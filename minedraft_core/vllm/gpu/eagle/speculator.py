"""The speculator of a head: the target's hidden states of every row that was kept go to the engine with the job."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu.eagle.engine import EagleEngine, EaglePrompt
from minedraft_core.vllm.gpu.eagle.kernels import carry, shifted
from minedraft_core.vllm.gpu.engine import Prompt
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.speculator import Outcome, PipelineSpeculator


class EagleSpeculator(PipelineSpeculator):
    """Drafts come from an `EagleEngine`. EAGLE reads the target's last hidden states, EAGLE-3 those of some of its layers."""

    _engine: EagleEngine | None

    def _carry(self, job: DraftJob, outcome: Outcome) -> None:
        assert self._engine is not None
        rows, carried = self._engine.rows(job.slot, job.num_reqs), self._engine.carried(job.slot, job.num_reqs)
        carry(rows, self._engine.column, carried, outcome.hidden, self._verified(outcome))

    def _prompt(self, outcome: Outcome) -> Prompt:
        plain, batch = super()._prompt(outcome), outcome.batch
        ids = shifted(
            plain.ids,
            plain.query_start_loc,
            batch.idx_mapping,
            outcome.num_sampled,
            outcome.num_rejected,
            outcome.last_sampled,
            outcome.next_prefill,
        )
        hidden = torch.cat([source[: batch.num_tokens] for source in outcome.hidden], dim=1)
        return EaglePrompt(**{**vars(plain), "ids": ids}, hidden=hidden)
