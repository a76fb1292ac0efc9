"""The draft engine of PEARL (arXiv 2408.11850): after a draft the drafter goes on along its chains while the target verifies.

Nobody on the host knows which chains go on. So a job decides it on the drafter's device, publishes what is ready at once, runs the k steps
that draft anew for the others, and publishes again. The target waits for words, not for an event: where every request of the batch has its
draft it goes on before those k steps, which then draft ahead. The steps beyond k are never more than fit into a verification.
"""

from __future__ import annotations

from functools import partial

import torch
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from minedraft_core.vllm.gpu.ahead_log import AheadLog, LookaheadTimer
from minedraft_core.vllm.gpu.chain_kernels import ring_length
from minedraft_core.vllm.gpu.chains import FIRST, NEXT, ChainShape, DraftChains
from minedraft_core.vllm.gpu.engine import RING, DraftEngine, Prompt, Shape
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.model import DraftModel
from minedraft_core.vllm.gpu.timing import DeviceTimer, PassTimer
from minedraft_core.vllm.gpu.word_kernels import certain_where_late, take

# Looks at the drafts before a drafter counts as hung: a look takes about a microsecond, so these are ten seconds.
_PATIENCE = 10_000_000


class LookaheadEngine(DraftEngine):
    """Drafts that are pieces of chains, which go on while the target verifies."""

    def __init__(
        self, model: DraftModel, target: torch.device, draft_logits: torch.Tensor | None, *, use_fp64: bool, scored: bool = False
    ) -> None:
        """As the base's. Jobs have no scores: TETRIS is refused beside lookahead."""
        assert not scored
        super().__init__(model, target, draft_logits, use_fp64=use_fp64)
        self._steps_ahead = self._steps_before = 0
        self._log = AheadLog(self.timer, self._device)
        self._kept: torch.Tensor | None = None
        if draft_logits is not None:
            slots, drafts, _ = draft_logits.shape
            with torch.cuda.device(self._device):
                shape = (slots, ring_length(drafts), model.vocab_size)
                self._kept = torch.zeros(shape, dtype=draft_logits.dtype, device=self._device)
        self._steps: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._drafting = [False] * RING
        with torch.cuda.device(target):
            self._late_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self._late = get_accelerator_view_from_cpu_tensor(self._late_host)

    def pace(self, steps: int) -> None:
        """Go so many steps ahead after the next job."""
        self._steps_ahead = steps

    def pass_timer(self, target: DeviceTimer) -> PassTimer:
        """A timer of passes that also tells what became of the tokens drafted ahead."""
        return LookaheadTimer(target, self.timer, self._log)

    def allocate(self, shape: Shape, num_blocks: int) -> None:
        """Allocate the KV cache, the buffers of jobs and the chains."""
        super().allocate(shape, num_blocks)
        chains = ChainShape(shape.max_num_reqs, shape.num_drafts, shape.block_size, shape.max_len)
        with torch.cuda.device(self._device):
            self._chains = DraftChains(self._model, chains, self._kept, use_fp64=self._use_fp64)
        self._tokens = torch.zeros(shape.max_num_reqs, shape.num_drafts, dtype=torch.int64, device=self._target)
        self.settle()

    def capture(self) -> None:
        """Capture a graph of each step for each batch size, and warm up what is not captured. Waits for the devices."""
        super().capture()
        self._warm_up()

    def start(self, job: DraftJob, prompt: Prompt | None, *, drafts: int) -> None:
        """Enqueue a job whose rows the target's current stream has packed and marked, and the steps ahead after it. Returns at once.

        Chains are drafted by pieces of k, however few `drafts` are wanted of them.

        Raises RuntimeError where the target has waited in vain for an earlier job.
        """
        if int(self._late_host[0]):
            raise RuntimeError("the drafts of a job did not come for about ten seconds")
        self._drafting[job.slot] = drafts > 0
        self._log.begin(job.number)
        super().start(job, prompt, drafts=drafts)
        if job.sampled:
            # The target lands a draft and forgets its job before the last publication has read where the logits go.
            job.idx.record_stream(self._copies if self._crosses else self._stream)
        ahead = self._steps_ahead if drafts else 0
        with self._streams():
            for _ in range(ahead):
                self._steps[self.bucket(job.num_reqs), NEXT, job.sampled].replay()
            self._log.end(job.number, ahead)
        if drafts:
            self._steps_before = ahead

    def land(self, job: DraftJob) -> torch.Tensor:
        """Make the target's current stream wait for a job's drafts. Returns them on the target's device, int64 [num_reqs, k]."""
        if not self._drafting[job.slot]:
            return super().land(job)
        tokens = self._tokens[: job.num_reqs]
        take(self._landing[job.slot], tokens, self._late, job.number, _PATIENCE)
        if job.sampled:
            assert self._draft_logits is not None
            certain_where_late(self._draft_logits, job.idx, self._late)
        return tokens

    def close(self) -> None:
        """Wait for the last job and drop the graphs."""
        super().close()
        self._steps.clear()

    def _run(self, job: DraftJob, rows: int, drafts: int) -> None:
        """Decide which chains go on and run k steps. What is ready is published when the chains that went on can be, and in the end."""
        self._decide(job, rows)
        # A chain that goes on holds the last token and one draft less than there were steps ahead.
        early = self._shape.num_drafts + 1 - self._steps_before
        for step in range(self._shape.num_drafts):
            if step == early:
                self._publish(job)
            self._steps[rows, NEXT if step else FIRST, job.sampled].replay()
        self._publish(job)

    def _decide(self, job: DraftJob, rows: int) -> None:
        self._chains.settle(self._pack[:rows], self._log.tallies, self._log.row(job.number))

    def _publish(self, job: DraftJob) -> None:
        """Send what is ready, logits before words, since the target may go on as soon as it has the words."""
        words = self._drafts[: job.num_reqs]
        if job.sampled:
            assert self._logits is not None
            self._chains.gather(self._logits[: job.num_reqs])
            self._land_logits(job)
        self._chains.publish(words, job.number)
        self._landing[job.slot, : job.num_reqs].copy_(words, non_blocking=True)

    def _warm_up(self) -> None:
        """Build the kernels that run outside graphs, for each place of the ring."""
        idx = torch.zeros(1, dtype=torch.int64, device=self._target)
        self.settle()
        for slot in range(RING):
            for sampled in self._ways:
                job = DraftJob(0, slot, frozenset(), idx, 1, sampled=sampled)
                with self._streams():
                    self._decide(job, 1)
                    self._publish(job)
                self.settle()
                self._drafting[slot] = True
                self.land(job)
        self._landing.zero_()
        self.settle()

    def _record(self, rows: int, pool: tuple[int, int], *, sampled: bool) -> None:
        for width in (FIRST, NEXT):
            step = partial(self._chains.step, self._pack[:rows], width, sampled=sampled)
            self._steps[rows, width, sampled] = self._captured(step, pool)
