"""The draft engine: the drafter's stream, its buffers on both devices, and CUDA graphs for each batch size and way of choosing tokens.

A job runs on streams of its own. The pack is copied to the drafter's device, a prompt runs eagerly, each step of the draft is a graph, so
that fewer than k can be taken, and the drafts are copied back; an event marks the end. Nothing is ever copied between devices from the
target's main stream: such a copy waits for both devices' current streams. On one device nothing waits by itself, so every order is given
by an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

from minedraft_core.vllm.gpu.draws import draw
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.kernels import HEADER, buckets, first_inputs, next_inputs, row_width
from minedraft_core.vllm.gpu.model import DraftModel
from minedraft_core.vllm.gpu.timing import DeviceTimer, PassTimer

RING = 4


@dataclass(frozen=True)
class Prompt:
    """Everything the target ran in a batch with prompts in it, for the drafter to run as well. Tensors are copies on the target's device.

    ids int32 [tokens], positions and slots int64 [tokens], query_start_loc int32 [n + 1], seq_lens int32 [n].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class Shape:
    """Sizes that never change: requests, draft tokens, block table columns, tokens of a block, longest context of the drafter."""

    max_num_reqs: int
    num_drafts: int
    num_columns: int
    block_size: int
    max_len: int


class DraftEngine:
    """Drafts on one device for a target on another one, or on the same."""

    def __init__(
        self, model: DraftModel, target: torch.device, draft_logits: torch.Tensor | None, *, use_fp64: bool, scored: bool = False
    ) -> None:
        """`draft_logits` [slots, k, vocabulary] on the target's device is where logits land for jobs whose drafts are sampled.

        `scored`: jobs also tell how likely the most likely token of each position is.
        """
        self._model, self._target, self._device = model, target, model.device
        self._crosses = target != self._device
        self._draft_logits, self._use_fp64, self._scored = draft_logits, use_fp64, scored
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
        self._copies = torch.cuda.Stream(target)
        self.timer = DeviceTimer(self._device)
        self._ready = [torch.cuda.Event() for _ in range(RING)]
        self._done = [torch.cuda.Event() for _ in range(RING)]
        self._logits: torch.Tensor | None = None
        self._staging: torch.Tensor | None = None
        if draft_logits is not None:
            slots, drafts, _ = draft_logits.shape
            with torch.cuda.device(self._device):
                self._logits = torch.zeros(slots, drafts, model.vocab_size, dtype=draft_logits.dtype, device=self._device)
            if self._crosses:
                self._staging = torch.zeros_like(draft_logits)
        self._graphs: dict[tuple[int, bool], list[torch.cuda.CUDAGraph]] = {}

    def allocate(self, shape: Shape, num_blocks: int) -> None:
        """Allocate the KV cache and the buffers of jobs."""
        self._shape = shape
        self._buckets = buckets(shape.max_num_reqs)
        rows, drafts, width, first = shape.max_num_reqs, shape.num_drafts, self._width, self._first
        with torch.cuda.device(self._device):
            self._model.bind_cache(num_blocks, shape.block_size, shape.max_num_reqs)

            def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
                return torch.zeros(*size, dtype=dtype, device=self._device)

            self._pack = zeros(rows, width)
            self._first_ids, self._first_positions = zeros(first * rows), zeros(first * rows, dtype=torch.int64)
            self._first_slots = zeros(first * rows, dtype=torch.int64)
            self._ids, self._positions = zeros(drafts, rows), zeros(drafts, rows, dtype=torch.int64)
            self._slots, self._seq_lens = zeros(drafts, rows, dtype=torch.int64), zeros(drafts, rows)
            self._temperature, self._seeds = zeros(rows, dtype=torch.float32), zeros(rows, dtype=torch.int64)
            self._rows = torch.arange(rows, dtype=torch.int64, device=self._device)
            self._columns = torch.arange(drafts, dtype=torch.int64, device=self._device)
            self._by_one = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
            self._by_first = first * self._by_one
            self._drafts = zeros(rows, drafts, dtype=torch.int64)
            self._scores = zeros(rows, drafts, dtype=torch.float32)
        self._packs = torch.zeros(RING, rows, width, dtype=torch.int32, device=self._target)
        self._landing = torch.zeros(RING, rows, drafts, dtype=torch.int64, device=self._target)
        self._landing_scores = torch.zeros(RING, rows, drafts, dtype=torch.float32, device=self._target)
        self.settle()

    def bucket(self, num_reqs: int) -> int:
        """Rows of a job for so many requests."""
        return next(size for size in self._buckets if size >= num_reqs)

    def rows(self, slot: int, num_reqs: int) -> torch.Tensor:
        """Where the target packs a job: int32 [bucket, HEADER + blocks]."""
        return self._packs[slot, : self.bucket(num_reqs)]

    def capture(self) -> None:
        """Warm the copies up and capture graphs for each batch size. Call once the KV cache is allocated; waits for the devices."""
        self.timer.calibrate()
        with self._streams():
            self._fetch(0, self._shape.max_num_reqs)
            self._landing[0].copy_(self._drafts, non_blocking=True)
        self.settle()
        pool = torch.cuda.graph_pool_handle()
        # A collected Triton kernel would unload its module in the middle of a capture.
        with torch.cuda.device(self._device), freeze_gc_for_cudagraph_capture():
            for rows in reversed(self._buckets):
                for sampled in self._ways:
                    self._record(rows, pool, sampled=sampled)
        self.settle()

    def pass_timer(self, target: DeviceTimer) -> PassTimer:
        """A timer of passes on the target's device, with this engine's jobs."""
        return PassTimer(target, self.timer)

    def start(self, job: DraftJob, prompt: Prompt | None, *, drafts: int) -> None:
        """Enqueue a job whose rows the target's current stream has packed. Returns at once.

        `drafts`: tokens to draft, up to k; none where no request of the batch can be drafted for yet, so that only its prompts run.
        """
        rows = self.bucket(job.num_reqs)
        ready = self._ready[job.slot]
        ready.record(torch.cuda.current_stream(self._target))
        with self._streams():
            self._copies.wait_event(ready)
            self._stream.wait_event(ready)
            self.timer.log.stamp(job.ticket.begin)
            self._fetch(job.slot, rows)
            if prompt is not None:
                self._run_prompt(prompt, job.num_reqs)
            if drafts:
                self._run(job, rows, drafts)
            self.timer.log.stamp(job.ticket.end)
            self._done[job.slot].record(self._stream)

    def land(self, job: DraftJob) -> torch.Tensor:
        """Make the target's current stream wait for a job. Returns its drafts on the target's device, int64 [num_reqs, k]."""
        torch.cuda.current_stream(self._target).wait_event(self._done[job.slot])
        return self._landing[job.slot, : job.num_reqs]

    def scores(self, job: DraftJob) -> torch.Tensor:
        """Of a job that `land` waited for: logarithms of the largest draft probabilities at temperature 1, float32 [num_reqs, k]."""
        return self._landing_scores[job.slot, : job.num_reqs]

    def abandon(self) -> None:
        """Make the target's current stream wait for all that was enqueued, so that nothing of it lands later."""
        main = torch.cuda.current_stream(self._target)
        main.wait_stream(self._stream)
        main.wait_stream(self._copies)

    def begin_pass(self, copies: Sequence[tuple[int, int]]) -> None:
        """Keep the clock, and follow the target in copying KV blocks (source, destination). Ordered with the jobs; never waits."""
        self.timer.tick()
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64, pin_memory=True)
            with torch.cuda.stream(self._stream):
                self._model.copy_blocks(pairs.to(self._device, non_blocking=True))

    def settle(self) -> None:
        """Wait for both devices; raises what they failed with."""
        torch.cuda.synchronize(self._target)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for the last job and drop the graphs."""
        self.settle()
        self._graphs.clear()

    @property
    def _first(self) -> int:
        """Tokens of a request in the first step of a draft."""
        return 2

    @property
    def _width(self) -> int:
        """Columns of a job's rows."""
        return row_width(self._shape.num_columns)

    @property
    def _ways(self) -> tuple[bool, ...]:
        """Whether the jobs there are graphs for are sampled."""
        return (False,) if self._draft_logits is None else (False, True)

    def _record(self, rows: int, pool: tuple[int, int], *, sampled: bool) -> None:
        """Capture what jobs of a size replay."""
        steps = range(self._shape.num_drafts)
        self._graphs[rows, sampled] = [self._captured(partial(self._step, step, rows, sampled=sampled), pool) for step in steps]

    def _captured(self, run: Callable[[], None], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self._stream), self._model.building():
            run()
            run()
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def _run(self, job: DraftJob, rows: int, drafts: int) -> None:
        """Draft for the rows of a job that were fetched, and send what was drafted. What is beyond those drafts is of earlier ones."""
        for graph in self._graphs[rows, job.sampled][:drafts]:
            graph.replay()
        self._landing[job.slot, : job.num_reqs].copy_(self._drafts[: job.num_reqs], non_blocking=True)
        if self._scored:
            self._landing_scores[job.slot, : job.num_reqs].copy_(self._scores[: job.num_reqs], non_blocking=True)
        if job.sampled:
            self._land_logits(job)

    def _fetch(self, slot: int, rows: int) -> None:
        """Copy what the target has packed to the drafter's device."""
        self._pack[:rows].copy_(self._packs[slot, :rows], non_blocking=True)

    def _run_prompt(self, prompt: Prompt, num_reqs: int) -> None:
        ids, positions, slots, starts, seq_lens = self._prompt_inputs(prompt)
        table = self._table(num_reqs)
        self._model.hidden(ids, positions, slots, starts, seq_lens, table, prompt.max_query_len, prompt.max_seq_len)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _prompt_inputs(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A prompt's ids, positions, slots, query_start_loc and seq_lens on the drafter's device, held to its vocabulary and length."""
        longest = self._shape.max_len
        positions = self._here(prompt.positions)
        return (
            self._here(prompt.ids).clamp(0, self._model.vocab_size - 1),
            positions.clamp(max=longest - 1),
            torch.where(positions < longest, self._here(prompt.slots), -1),
            self._here(prompt.query_start_loc),
            self._here(prompt.seq_lens),
        )

    def _land_logits(self, job: DraftJob) -> None:
        assert self._logits is not None
        assert self._draft_logits is not None
        logits = self._logits[: job.num_reqs]
        if self._staging is None:
            self._draft_logits.index_copy_(0, job.idx, logits)
            return
        staging = self._staging[: job.num_reqs]
        # The copy waits for both current streams, so also for the scatter of the job before, which reads the same staging rows.
        staging.copy_(logits, non_blocking=True)
        with torch.cuda.stream(self._copies):
            self._draft_logits.index_copy_(0, job.idx, staging)
        self._stream.wait_stream(self._copies)

    def _step(self, step: int, rows: int, *, sampled: bool) -> None:
        """Enqueue one step of a draft on the current stream."""
        hidden, positions = self._next(step, rows) if step else self._begin(rows)
        self._choose(hidden, positions, step, rows, sampled=sampled)

    def _begin(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first step: the rows that the first draft comes from, [rows, hidden], and the positions that key the noise of a draw."""
        shape = self._shape
        first_inputs(
            self._pack[:rows],
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
        hidden = self._model.hidden(
            self._first_ids[: 2 * rows],
            self._first_positions[: 2 * rows],
            self._first_slots[: 2 * rows],
            self._by_first[: rows + 1],
            self._seq_lens[0, :rows],
            self._table(rows),
            2,
            shape.max_len,
            planned=True,
        )
        return hidden[1::2].contiguous(), self._first_positions[1 : 2 * rows : 2]

    def _next(self, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_begin`, a later step."""
        ids, positions, slots, seq_lens = self._next_inputs(step, rows)
        by_one, longest = self._by_one[: rows + 1], self._shape.max_len
        return self._model.hidden(ids, positions, slots, by_one, seq_lens, self._table(rows), 1, longest, planned=True), positions

    def _next_inputs(self, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write what a step after the first one reads: ids int32, positions and slots int64, seq_lens int32, [rows] each."""
        ids, positions, slots, seq_lens = self._ids[step], self._positions[step], self._slots[step], self._seq_lens[step]
        shape = self._shape
        next_inputs(
            self._pack[:rows],
            self._drafts,
            step,
            ids,
            positions,
            slots,
            seq_lens,
            self._model.vocab_size,
            shape.block_size,
            shape.max_len,
        )
        return ids[:rows], positions[:rows], slots[:rows], seq_lens[:rows]

    def _choose(self, hidden: torch.Tensor, positions: torch.Tensor, step: int, rows: int, *, sampled: bool) -> None:
        """The token of a step: the argmax, or a draw with its logits kept as vLLM's own speculators keep them."""
        logits = self._model.logits(hidden)
        if self._scored:
            self._scores[:rows, step] = logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1)
        if not sampled:
            self._drafts[:rows, step] = logits.argmax(dim=-1)
            return
        assert self._logits is not None
        self._drafts[:rows, step] = draw(
            logits,
            self._logits,
            self._rows[:rows],
            self._columns[step],
            self._temperature,
            self._seeds,
            positions,
            use_fp64=self._use_fp64,
        )

    def _table(self, rows: int) -> torch.Tensor:
        return self._pack[:rows, HEADER:]

    @contextmanager
    def _streams(self) -> Iterator[None]:
        """Both streams current, the drafter's device too: what copies between the devices then waits for these two only."""
        with ExitStack() as stack:
            if self._crosses:
                stack.enter_context(torch.cuda.stream(self._copies))
            stack.enter_context(torch.cuda.stream(self._stream))
            yield
