"""What vLLM's runner calls a speculator: it hands batches to the draft engine, and lands drafts when they are due."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from minedraft_core.types import DrafterRecord
from minedraft_core.vllm.gpu.engine import RING, DraftEngine, Prompt, Shape
from minedraft_core.vllm.gpu.jobs import DraftJob, PendingJobs
from minedraft_core.vllm.gpu.kernels import Verified, pack
from minedraft_core.vllm.gpu.timing import JobTicket

logger = init_logger(__name__)

_NO_LOGIT = float("-inf")


@dataclass(frozen=True)
class Outcome:
    """What a pass of the target leaves for the drafter, as vLLM hands it over; all tensors on the target's device.

    hidden: the hidden states that a head reads, each [tokens, hidden]. num_sampled, num_rejected: int32 [num_reqs]. last_sampled: int64
    [slots, 1], next_prefill: int32 [1, slots].
    """

    batch: InputBatch
    slot_mappings: dict[str, torch.Tensor]
    hidden: tuple[torch.Tensor, ...]
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill: torch.Tensor


class PipelineSpeculator(BaseSpeculator):
    """Drafts come from an engine of its own streams; `propose` only enqueues.

    Rank 0 has the engine, the other ranks of a tensor-parallel target receive what lands. All ranks keep the same queue of jobs, since it
    follows from the batches alone. Drafts of a failed drafter are token 0 with all its mass in the logits, which every sampler verifies
    exactly.
    """

    supports_mm_inputs = False

    def __init__(self, config: VllmConfig, device: torch.device, group: GroupCoordinator) -> None:
        speculative = config.speculative_config
        assert speculative is not None
        self._device, self._group = device, group
        self._engine: DraftEngine | None = None
        self._ready = False
        self._pending = PendingJobs(RING)
        self._started = 0
        self._failure: DrafterRecord | None = None
        self._failed_from: int | None = None
        self._table: torch.Tensor | None = None
        self._layer = ""
        self.num_drafts: int = speculative.num_speculative_tokens
        self.draft_logits: torch.Tensor | None = None
        draft = speculative.draft_model_config
        if speculative.draft_sample_method == "probabilistic":
            shape = (config.scheduler_config.max_num_seqs, self.num_drafts, draft.get_vocab_size())
            self.draft_logits = torch.zeros(shape, dtype=draft.head_dtype, device=device)
        # vLLM's names: whether it trims batches on the device, and the confidences it does so by, which land with the drafts here.
        self.enable_adaptive_verification: bool = speculative.enable_adaptive_verification
        self.draft_token_confidence_probs: None = None
        self.scores: torch.Tensor | None = None
        if self.enable_adaptive_verification:
            self.scores = torch.zeros(config.scheduler_config.max_num_seqs, self.num_drafts, dtype=torch.float32, device=device)

    def connect(self, engine: DraftEngine | None, states: RequestState, sampling: SamplingStates) -> None:
        """Give the speculator its engine, on rank 0, and the runner's states. Once both models are loaded."""
        self._engine, self._states, self._sampling = engine, states, sampling

    def bind(self, tables: BlockTables, group_id: int, layer: str, num_blocks: int, max_len: int) -> None:
        """Follow the target's block table of one KV cache group, of which `layer` is a layer. Once the target's KV cache is allocated."""
        self._table, self._layer = tables.input_block_tables[group_id], layer
        if self._engine is not None:
            shape = Shape(
                max_num_reqs=self._states.max_num_reqs,
                num_drafts=self.num_drafts,
                num_columns=self._table.shape[1],
                block_size=tables.block_sizes[group_id],
                max_len=max_len,
            )
            self._engine.allocate(shape, num_blocks)

    def prepare(self) -> None:
        """Capture the draft graphs; from here on batches are drafted for."""
        if self._engine is not None:
            self._engine.capture()
        self._buffer = torch.zeros(self._states.max_num_reqs, self.num_drafts, dtype=torch.int64, device=self._device)
        self._ready = True

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The draft graphs are captured by `prepare`: vLLM asks for them while it profiles memory, too."""

    def capture(self) -> None:
        """See `init_cudagraph_manager`."""

    def check(self) -> None:
        """Wait for the devices. Raises RuntimeError where the drafter has failed, which at the start stops the start."""
        if self._failed_from is None and self._engine is not None:
            self._engine.settle()
        if self._failed_from is not None:
            raise RuntimeError("the drafter failed while it was warmed up: see the error above")

    def begin_pass(self, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the target in copying KV blocks (source, destination), and keep the drafter's clock."""
        if self._engine is None or self._failed_from is not None:
            return
        try:
            self._engine.begin_pass(copies)
        except Exception as error:  # noqa: BLE001 -- see propose
            self._fail(self._started, error)

    def land(self, request_ids: Collection[str]) -> tuple[JobTicket, ...]:
        """Land the drafts of these requests on the current stream. Returns the jobs that landed."""
        due = self._pending.due(request_ids)
        return self._land_all(due)

    def take_failure(self) -> DrafterRecord | None:
        """The drafter's failure, once."""
        failure, self._failure = self._failure, None
        return failure

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Start a job for the batch. Returns the drafts of before, so that vLLM changes nothing: the new ones land when they are due."""
        if dummy_run or not self._ready:
            return torch.zeros(input_batch.num_reqs, self.num_drafts, dtype=torch.int64, device=self._device)
        self._land_all(self._pending.overdue())
        unchanged = self._states.draft_tokens[input_batch.idx_mapping]
        ends_prompt = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens >= input_batch.prefill_len_np
        wanted = self.num_drafts if num_speculative_tokens is None else num_speculative_tokens
        drafts = wanted if ends_prompt.any() else 0
        if not drafts and not input_batch.has_prefill:
            return unchanged
        prompt: Prompt | None = None
        job = DraftJob(
            number=self._started,
            slot=self._started % RING,
            request_ids=frozenset(input_batch.req_ids),
            idx=input_batch.idx_mapping,
            num_reqs=input_batch.num_reqs,
            sampled=self.draft_logits is not None and bool((self._sampling.temperature.np[input_batch.idx_mapping_np] > 0).any()),
            num_drafts=drafts,
        )
        if self._engine is not None and self._failed_from is None:
            outcome = Outcome(
                batch=input_batch,
                slot_mappings=slot_mappings,
                hidden=tuple(aux_hidden_states or (last_hidden_states,)),
                num_sampled=num_sampled,
                num_rejected=num_rejected,
                last_sampled=last_sampled,
                next_prefill=next_prefill_tokens,
            )
            try:
                if input_batch.has_prefill:
                    prompt = self._prompt(outcome)
                rows = self._engine.rows(job.slot, job.num_reqs)
                self._pack(rows, outcome, temperature, seeds)
                self._carry(job, outcome)
                self._engine.start(job, prompt, drafts=drafts)
            except Exception as error:  # noqa: BLE001 -- whatever ails the drafter, the target goes on
                self._fail(job.number, error)
        self._started += 1
        self._pending.add(replace(job, keep=(prompt,)))
        return unchanged

    def close(self) -> None:
        """End the engine."""
        self._ready = False
        if self._engine is not None and self._failed_from is None:
            try:
                self._engine.close()
            except Exception as error:  # noqa: BLE001 -- the end goes on, too
                logger.warning("The drafter did not end in order: %s", error)
        self._engine = None

    def _pack(self, rows: torch.Tensor, outcome: Outcome, temperature: torch.Tensor, seeds: torch.Tensor) -> None:
        assert self._table is not None
        pack(rows, self._verified(outcome), temperature, seeds, self._table)

    def _verified(self, outcome: Outcome) -> Verified:
        batch = outcome.batch
        return Verified(
            batch.num_reqs,
            batch.idx_mapping,
            batch.query_start_loc,
            batch.input_ids,
            outcome.num_sampled,
            outcome.num_rejected,
            outcome.last_sampled,
            self._states.num_computed_tokens.gpu,
        )

    def _carry(self, job: DraftJob, outcome: Outcome) -> None:
        """What a job has beside the rows of `pack`: nothing, for a model that knows tokens alone."""

    def _prompt(self, outcome: Outcome) -> Prompt:
        """Copies of what the target ran: its buffers are filled anew before the drafter has read them."""
        batch = outcome.batch
        tokens, rows = batch.num_tokens, batch.num_reqs
        return Prompt(
            ids=batch.input_ids[:tokens].clone(),
            positions=batch.positions[:tokens].clone(),
            slots=outcome.slot_mappings[self._layer][:tokens].clone(),
            query_start_loc=batch.query_start_loc[: rows + 1].clone(),
            seq_lens=batch.seq_lens[:rows].clone(),
            max_query_len=int(batch.num_scheduled_tokens.max()),
            max_seq_len=int(batch.seq_lens_cpu_upper_bound.max()),
        )

    def _land_all(self, jobs: list[DraftJob]) -> tuple[JobTicket, ...]:
        for job in jobs:
            self._land(job)
        return () if self._engine is None else tuple(job.ticket for job in jobs if not self._lost(job))

    def _lost(self, job: DraftJob) -> bool:
        return self._failed_from is not None and job.number >= self._failed_from

    def _land(self, job: DraftJob) -> None:
        tokens = self._landed(job)
        if self._group.world_size > 1:
            self._group.broadcast(tokens, src=0)
            if job.sampled:
                self._share_logits(job)
        self._states.draft_tokens[job.idx] = tokens
        if self.scores is not None:
            self._land_scores(job, self.scores)

    def _land_scores(self, job: DraftJob, scores: torch.Tensor) -> None:
        """Scores of a failed drafter stay as they were: they decide which drafts are verified, and its are wrong anyway."""
        rows = scores[job.idx]
        if self._engine is not None and not self._lost(job):
            rows = self._engine.scores(job)
        if self._group.world_size > 1:
            self._group.broadcast(rows, src=0)
        scores[job.idx] = rows

    def _landed(self, job: DraftJob) -> torch.Tensor:
        buffer = self._buffer[: job.num_reqs]
        if self._engine is None:
            return buffer
        if not self._lost(job):
            try:
                return self._engine.land(job)
            except Exception as error:  # noqa: BLE001 -- see propose; the other ranks wait for these drafts
                self._fail(job.number, error)
        if job.sampled:
            self._certain(job.idx)
        return buffer.zero_()

    def _share_logits(self, job: DraftJob) -> None:
        """The logits that landed on rank 0, on every rank."""
        assert self.draft_logits is not None
        logits = self.draft_logits[job.idx]
        self._group.broadcast(logits, src=0)
        if self._engine is None:
            self.draft_logits[job.idx] = logits

    def _certain(self, idx: torch.Tensor) -> None:
        """Logits that leave token 0 only: then it is a draw from them."""
        assert self.draft_logits is not None
        self.draft_logits[idx] = _NO_LOGIT
        self.draft_logits[idx, :, 0] = 0.0

    def _fail(self, number: int, error: Exception) -> None:
        """Give the drafter up: jobs from this number on are lost."""
        message = f"{type(error).__name__}: {error}"
        logger.error("The drafter failed (%s). The target goes on without drafts.", message, exc_info=error)
        self._failed_from = number
        self._failure = DrafterRecord(up=False, restarted=False, reason="fault", message=message)
        assert self._engine is not None
        try:
            self._engine.abandon()
        except Exception as another:  # noqa: BLE001 -- see propose
            logger.error("The drafter's streams do not answer either: %s", another)  # noqa: TRY400 -- its cause is logged above
