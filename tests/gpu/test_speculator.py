"""Jobs from batches, landings, and what a failure leaves behind: the speculator with an engine that drafts by a rule, on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minedraft_core.vllm.gpu import chain_kernels, kernels, pearl, speculator
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.pearl import LookaheadSpeculator
from minedraft_core.vllm.gpu.speculator import PipelineSpeculator

SLOTS, K, VOCAB, COLUMNS = 6, 3, 50, 4
CPU = torch.device("cpu")


def rule(last: int, position: int) -> list[int]:
    return [(last + position + step) % VOCAB for step in range(K)]


class RuleEngine:
    """Drafts from the packed rows alone."""

    def __init__(self, fail_at: int | None = None, fail_landing: int | None = None) -> None:
        self.fail_landing = fail_landing
        self.copied: list[tuple[int, int]] = []
        self.started: list[tuple[DraftJob, Any, int]] = []
        self.abandoned = False
        self.fail_at = fail_at
        self._rows = torch.zeros(4, SLOTS, kernels.row_width(COLUMNS), dtype=torch.int32)
        self._landing: dict[int, torch.Tensor] = {}

    def allocate(self, shape: Any, num_blocks: int) -> None:
        self.shape = shape

    def capture(self) -> None:
        pass

    def rows(self, slot: int, num_reqs: int) -> torch.Tensor:
        return self._rows[slot]

    def start(self, job: DraftJob, prompt: Any, *, drafts: int) -> None:
        if job.number == self.fail_at:
            raise RuntimeError("broke")
        self.started.append((job, prompt, drafts))
        rows = self._rows[job.slot, : job.num_reqs].tolist()
        self._landing[job.slot] = torch.tensor([rule(row[1], row[2]) if row[3] else [0] * K for row in rows])

    def scores(self, job: DraftJob) -> torch.Tensor:
        return -self._landing[job.slot].float() - 0.5

    def land(self, job: DraftJob) -> torch.Tensor:
        if job.number == self.fail_landing:
            raise RuntimeError("lost")
        return self._landing[job.slot]

    def begin_pass(self, copies: Any) -> None:
        self.copied += copies
        if copies == [(0, 0)]:
            raise RuntimeError("no copy")

    def settle(self) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned = True
        raise RuntimeError("streams are broken, too")


class Group:
    """Ranks in one process: what rank 0 sends, the others receive in order."""

    def __init__(self, world_size: int, mailbox: list[torch.Tensor], rank: int) -> None:
        self.world_size, self._mailbox, self._rank = world_size, mailbox, rank

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self._rank == src:
            self._mailbox.append(tensor.clone())
        else:
            tensor.copy_(self._mailbox.pop(0))
        return tensor


@pytest.fixture(autouse=True)
def plain_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "pack", kernels.pack_reference)


def made(
    engine: RuleEngine | None,
    group: Group | None = None,
    temperature: float = 0.0,
    *,
    scored: bool = False,
    kind: type[PipelineSpeculator] = PipelineSpeculator,
) -> PipelineSpeculator:
    draft = SimpleNamespace(get_vocab_size=lambda: VOCAB, head_dtype=torch.float32)
    speculative = SimpleNamespace(
        num_speculative_tokens=K,
        draft_model_config=draft,
        draft_sample_method="probabilistic",
        enable_adaptive_verification=scored,
    )
    config = SimpleNamespace(speculative_config=speculative, scheduler_config=SimpleNamespace(max_num_seqs=SLOTS))
    result = kind(config, CPU, group or Group(1, [], 0))
    states = SimpleNamespace(
        max_num_reqs=SLOTS,
        draft_tokens=torch.full((SLOTS, K), 49),
        num_computed_tokens=SimpleNamespace(gpu=torch.arange(10, 10 + SLOTS, dtype=torch.int32)),
    )
    result.connect(engine, states, SimpleNamespace(temperature=SimpleNamespace(np=np.full(SLOTS, temperature, dtype=np.float32))))
    tables = SimpleNamespace(input_block_tables=[torch.ones(SLOTS, COLUMNS, dtype=torch.int32)], block_sizes=[16])
    result.bind(tables, 0, "layer", 100, 256)
    result.prepare()
    return result


def propose(
    proposer: PipelineSpeculator,
    slots: list[int],
    *,
    prompt: bool = False,
    sampled: list[int] | None = None,
    chunk: bool = False,
    name: str = "r",
    **extra: Any,
) -> torch.Tensor:
    count = len(slots)
    computed = np.full(count, 5)
    batch = SimpleNamespace(
        num_reqs=count,
        req_ids=[f"{name}{slot}" for slot in slots],
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32) * 2,
        input_ids=torch.arange(2 * count, dtype=torch.int32),
        positions=torch.zeros(2 * count, dtype=torch.int64),
        seq_lens=torch.full((count,), 7, dtype=torch.int32),
        num_tokens=2 * count,
        num_scheduled_tokens=np.full(count, 2),
        num_computed_tokens_np=computed,
        prefill_len_np=np.full(count, 99 if chunk else 6),
        has_prefill=prompt,
        seq_lens_cpu_upper_bound=torch.full((count,), 7),
    )
    return proposer.propose(
        batch,
        {},
        {"layer": torch.zeros(2 * count, dtype=torch.int64)},
        torch.empty(0),
        None,
        torch.tensor(sampled or [1] * count, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        torch.arange(SLOTS)[:, None] + 20,
        torch.empty(0),
        torch.zeros(SLOTS),
        torch.zeros(SLOTS, dtype=torch.int64),
        **extra,
    )


def expected(slot: int) -> list[int]:
    return rule(20 + slot, 10 + slot)


def test_drafts_land_when_they_are_due_and_not_before() -> None:
    proposer = made(RuleEngine())
    assert propose(proposer, [4, 1]).tolist() == [[49] * K] * 2
    propose(proposer, [2])
    tokens = proposer._states.draft_tokens
    assert proposer.land(["r4"])[0].number == 0
    assert [tokens[slot].tolist() for slot in (4, 1, 2)] == [expected(4), expected(1), [49] * K]
    assert [ticket.num_reqs for ticket in proposer.land(["r1", "r2"])] == [1]
    assert tokens[2].tolist() == expected(2)
    assert proposer.land(["r2", "r4"]) == ()


def test_a_full_ring_lands_the_oldest() -> None:
    engine = RuleEngine()
    proposer = made(engine)
    for slot in range(5):
        propose(proposer, [slot])
    assert [job.slot for job, _, _ in engine.started] == [0, 1, 2, 3, 0]
    assert proposer._states.draft_tokens[0].tolist() == expected(0)
    assert proposer._states.draft_tokens[1].tolist() == [49] * K


def test_prompts_travel_with_their_batch_and_chunks_are_not_drafted_for() -> None:
    engine = RuleEngine()
    proposer = made(engine)
    propose(proposer, [0, 1], prompt=True)
    propose(proposer, [2], prompt=True, chunk=True)
    propose(proposer, [0, 1])
    prompts = [(prompt is not None, drafts) for _, prompt, drafts in engine.started]
    assert prompts == [(True, K), (True, 0), (False, K)]


def test_as_many_are_drafted_as_are_scheduled_and_without_drafts_only_prompts_run() -> None:
    engine = RuleEngine()
    proposer = made(engine)
    propose(proposer, [0], num_speculative_tokens=0)
    propose(proposer, [1], prompt=True, num_speculative_tokens=0)
    propose(proposer, [0], num_speculative_tokens=1)
    assert [drafts for _, _, drafts in engine.started] == [0, 1]


def test_dummy_runs_and_the_time_before_the_graphs_start_nothing() -> None:
    engine = RuleEngine()
    proposer = made(engine)
    assert propose(proposer, [0, 1], dummy_run=True).shape == (2, K)
    proposer._ready = False
    propose(proposer, [0])
    assert engine.started == []


def test_logits_travel_only_where_a_request_samples() -> None:
    greedy, sampling = RuleEngine(), RuleEngine()
    propose(made(greedy), [0])
    propose(made(sampling, temperature=0.7), [0])
    assert [engine.started[0][0].sampled for engine in (greedy, sampling)] == [False, True]


def test_a_failure_fails_no_request_and_leaves_exact_drafts() -> None:
    engine = RuleEngine(fail_at=1)
    proposer = made(engine, temperature=1.0)
    propose(proposer, [0])
    propose(proposer, [1])
    propose(proposer, [2])
    assert engine.abandoned
    failure = proposer.take_failure()
    assert failure is not None
    assert (failure.up, failure.reason, failure.message) == (False, "fault", "RuntimeError: broke")
    assert proposer.take_failure() is None
    assert [ticket.number for ticket in proposer.land(["r0", "r1", "r2"])] == [0]
    tokens, logits = proposer._states.draft_tokens, proposer.draft_logits
    assert tokens[0].tolist() == expected(0)
    for slot in (1, 2):
        assert tokens[slot].tolist() == [0] * K
        assert torch.softmax(logits[slot], dim=-1)[:, 0].tolist() == [1.0] * K
    proposer.close()


def test_a_job_that_cannot_land_gives_the_drafter_up() -> None:
    engine = RuleEngine(fail_landing=1)
    proposer = made(engine, temperature=1.0)
    for slot in (0, 1, 2):
        propose(proposer, [slot])
    assert [ticket.number for ticket in proposer.land(["r0", "r1", "r2"])] == [0]
    assert proposer.take_failure() is not None
    assert proposer._states.draft_tokens[:3].tolist() == [expected(0), [0] * K, [0] * K]
    propose(proposer, [3])
    assert len(engine.started) == 3
    with pytest.raises(RuntimeError, match="warmed up"):
        proposer.check()


def test_block_copies_reach_the_drafter_until_it_fails() -> None:
    engine = RuleEngine()
    proposer = made(engine)
    propose(proposer, [0])
    proposer.begin_pass([(3, 4)])
    proposer.check()
    proposer.begin_pass([(0, 0)])
    proposer.begin_pass([(5, 6)])
    assert engine.copied == [(3, 4), (0, 0)]
    assert proposer.land(["r0"])[0].number == 0, "what was drafted before is as good as ever"
    assert proposer._states.draft_tokens[0].tolist() == expected(0)


def test_a_slot_given_to_another_request_gets_that_ones_drafts() -> None:
    proposer = made(RuleEngine())
    tokens = proposer._states.draft_tokens
    propose(proposer, [3, 4])
    tokens[3].zero_()
    proposer._states.num_computed_tokens.gpu[3] = 40
    batch = propose(proposer, [3], name="other", prompt=True)
    assert batch.tolist() == [[0] * K]
    assert [ticket.number for ticket in proposer.land(["other3"])] == [0, 1]
    assert tokens[3].tolist() == rule(23, 40)
    assert tokens[4].tolist() == expected(4)


def test_lookahead_marks_rows_and_passes_its_pace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pearl, "mark", chain_kernels.mark_reference)
    engine = RuleEngine()
    proposer = made(engine, kind=LookaheadSpeculator)
    proposer._states.prefill_len = SimpleNamespace(gpu=torch.tensor([10, 5, 5, 5, 5, 5], dtype=torch.int32))
    paced: list[int] = []
    engine.pace = paced.append
    proposer.pace(3)
    propose(proposer, [0, 4, 2])
    assert paced == [3]
    assert engine.rows(0, 3)[:3, chain_kernels.MARK].tolist() == [-1, 5, 3], "slot 0 has just ended its prompt"
    assert [ticket.number for ticket in proposer.land(["r0"])] == [0]
    made(None, kind=LookaheadSpeculator).pace(2)


@pytest.mark.parametrize(("fail_at", "fail_landing"), [(None, None), (1, None), (None, 1)])
def test_all_ranks_land_the_same(fail_at: int | None, fail_landing: int | None) -> None:
    mailbox: list[torch.Tensor] = []
    ranks = [
        made(RuleEngine(fail_at, fail_landing), Group(2, mailbox, 0), temperature=1.0, scored=True),
        made(None, Group(2, mailbox, 1), temperature=1.0, scored=True),
    ]
    ranks[0].draft_logits.normal_()
    for slots in ([0, 1], [2], [3]):
        for proposer in ranks:
            propose(proposer, slots)
    for due in (["r1"], ["r2", "r3"]):
        for proposer in ranks:
            proposer.land(due)
    assert mailbox == []
    first, second = ranks
    assert torch.equal(first._states.draft_tokens, second._states.draft_tokens)
    assert torch.equal(first.draft_logits[:4], second.draft_logits[:4])
    assert torch.equal(first.scores, second.scores)
    assert first.scores[0].tolist() == [-token - 0.5 for token in expected(0)]
