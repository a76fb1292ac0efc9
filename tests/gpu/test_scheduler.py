"""The cadence over vLLM's asynchronous scheduler, with two passes in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from minedraft_core.control import ModeOrder
from minedraft_core.types import DRAFT_LIMIT, DrafterRecord, DraftRecord, Lookahead, LookaheadRecord, Mode, ModeRecord, Span, StepRecord
from minedraft_core.vllm.gpu.output import PacedOutput
from minedraft_core.vllm.gpu.timing import DraftTimes, PassTimes
from tests.gpu.simulation import Loop, request, scheduler

K = 4


def started(tmp_path: Path, mode: str, count: int = 6, **options: object) -> Loop:
    loop = Loop(scheduler(tmp_path, mode, k=K, **options))
    for index in range(count):
        loop.scheduler.add_request(request(f"r{index}", tokens=20 + index))
    return loop


def steps(loop: Loop) -> list[StepRecord]:
    return [record for record in loop.scheduler._feed.records if isinstance(record, StepRecord)]


@pytest.mark.parametrize("mode", ["off", "sequential", "parallel", "pearl"])
def test_every_request_gets_its_tokens(tmp_path: Path, mode: str) -> None:
    loop = started(tmp_path, mode)
    loop.run(80)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(6)}
    assert not loop.scheduler.has_requests()
    assert sum(step.generated_num for step in steps(loop)) == sum(loop.tokens.values())
    assert steps(loop)[-1].side_requests == (0, 0)


def test_two_sides_are_verified_in_turn(tmp_path: Path) -> None:
    loop = started(tmp_path, "parallel")
    loop.run(7)
    prompts, *passes = [set(made.num_scheduled_tokens) for made in loop.passes]
    assert len(prompts) == 6
    assert [len(made) for made in passes] == [3] * 6
    assert all(passes[at] == passes[at % 2] for at in range(6))
    assert passes[0] | passes[1] == prompts
    assert all(len(drafts) == K for made in loop.passes[1:] for drafts in made.scheduled_spec_decode_tokens.values())
    assert [step.side for step in steps(loop)][1:5] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_one_side_verifies_all_every_time(tmp_path: Path) -> None:
    loop = started(tmp_path, "sequential")
    loop.run(5)
    assert all(len(made.num_scheduled_tokens) == 6 for made in loop.passes)
    assert [(step.accepted_num, step.verify_len) for step in steps(loop)][1:3] == [(12, 24), (12, 24)]


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_larger_batches_get_fewer_drafts(tmp_path: Path, mode: str) -> None:
    asked = {1: 3, 2: 3, 3: 2, 4: 2, 5: 2, 6: 1}
    loop = Loop(scheduler(tmp_path, mode, k=K, keys={"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 2], [6, 8, 1]]}))
    for index in range(6):
        loop.scheduler.add_request(request(f"r{index}", tokens=20 + 30 * index))
    loop.run(400)
    assert loop.tokens == {f"r{index}": 20 + 30 * index for index in range(6)}
    ordered: dict[str, int] = {}
    for made in loop.passes:
        for name, drafts in made.scheduled_spec_decode_tokens.items():
            assert len(drafts) == ordered[name], "what was ordered when it was last in a pass"
        ordered |= dict.fromkeys(made.num_scheduled_tokens, asked[len(made.num_scheduled_tokens)])
        assert made.num_spec_tokens_to_schedule == asked[len(made.num_scheduled_tokens)]
    assert {made.num_spec_tokens_to_schedule for made in loop.passes[1:]} == ({1, 2, 3} if mode == "sequential" else {2, 3})


def test_an_order_is_the_most_that_a_batch_gets(tmp_path: Path) -> None:
    loop = started(tmp_path, "sequential", keys={"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 3]]})
    loop.scheduler._obey(ModeOrder(Mode.SEQUENTIAL, 2))
    loop.run(4)
    assert {made.num_spec_tokens_to_schedule for made in loop.passes} == {2}


def test_a_grammar_goes_without_drafts(tmp_path: Path) -> None:
    loop = started(tmp_path, "parallel", count=2)
    constrained = loop.scheduler.requests["r0"]
    constrained.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="a*"))
    assert constrained.use_structured_output
    drafts = loop.scheduler._can_draft
    assert not drafts(constrained, K)
    assert drafts(loop.scheduler.requests["r1"], K)


def test_a_context_past_the_drafters_goes_on_without_drafts(tmp_path: Path) -> None:
    loop = Loop(scheduler(tmp_path, "parallel", k=K, draft_length=40))
    loop.scheduler.add_request(request("long", prompt=60, tokens=10))
    loop.scheduler.add_request(request("grows", prompt=10, tokens=60))
    loop.run(120)
    assert loop.tokens == {"long": 10, "grows": 60}
    drafted = [name for made in loop.passes for name in made.scheduled_spec_decode_tokens]
    assert "long" not in drafted
    assert drafted.count("grows") > 3
    assert sum("grows" in made.num_scheduled_tokens and "grows" not in made.scheduled_spec_decode_tokens for made in loop.passes) > 10


def test_a_failed_drafter_is_no_longer_waited_for(tmp_path: Path) -> None:
    loop = started(tmp_path, "parallel")
    loop.run(6)
    failure = DrafterRecord(up=False, restarted=False, reason="fault", message="broke")
    loop.extra = {"failure": failure}
    loop.run(80)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(6)}
    assert failure in loop.scheduler._feed.records
    assert loop.passes[-1].scheduled_spec_decode_tokens == {}
    assert len(loop.passes[-10].num_scheduled_tokens) > 3, "both sides go on together"
    assert steps(loop)[-1].fallback_reason == "down"


def test_preemption_and_aborts(tmp_path: Path) -> None:
    loop = Loop(scheduler(tmp_path, "parallel", k=K, num_blocks=8))
    for index in range(6):
        loop.scheduler.add_request(request(f"r{index}", prompt=20, tokens=60))
    loop.run(12)
    loop.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    loop.run(300)
    assert {name: count for name, count in loop.tokens.items() if name != "r0"} == {f"r{index}": 60 for index in range(1, 6)}
    assert sum(step.preempted_requests for step in steps(loop)) > 0
    assert not loop.scheduler.has_requests()
    assert loop.scheduler.cadence.counts == (0, 0)


def test_chunked_prompts_join_after_their_last_chunk(tmp_path: Path) -> None:
    loop = Loop(scheduler(tmp_path, "parallel", k=K, max_num_batched_tokens=64))
    loop.scheduler.add_request(request("long", prompt=150, tokens=10))
    loop.scheduler.add_request(request("short", prompt=10, tokens=30))
    loop.run(80)
    assert loop.tokens == {"long": 10, "short": 30}
    assert sum(step.is_prompt_run for step in steps(loop)) >= 3


def test_times_of_the_devices_reach_the_records(tmp_path: Path) -> None:
    loop = started(tmp_path, "parallel")
    loop.run(4)
    loop.extra = {"times": PassTimes(1_000, 1_500, 7, 3, (DraftTimes(9, 1_100, 1_400, 3, K),))}
    loop.run(3)
    step = next(step for step in steps(loop) if step.start_us == 1_000)
    assert (step.end_us, step.gap_us, step.drafter_wait_us, step.measured_draft_time) == (1_500, 7, 3, pytest.approx(0.0003))
    drafted = next(record for record in loop.scheduler._feed.records if isinstance(record, DraftRecord))
    assert (drafted.round, drafted.hidden_us, drafted.drafted_per_position) == (9, 300, [3] * K)


def test_lookahead_can_have_a_fixed_pace(tmp_path: Path) -> None:
    loop = started(tmp_path, "pearl", drafter={"steps_ahead": 2})
    loop.run(3)
    assert {made.steps_ahead for made in loop.passes} == {2}


def test_lookahead_is_paced_by_what_was_measured(tmp_path: Path) -> None:
    loop = started(tmp_path, "pearl")
    assert loop.scheduler.num_lookahead_tokens == 2 * K + 1, "blocks for the next draft, too"
    loop.run(4)
    assert {made.steps_ahead for made in loop.passes} == {0}, "nothing is known of the times yet"
    ahead = Lookahead(2, 1, 5, Span(2_100, 2_900))
    loop.extra = {"times": PassTimes(2_000, 22_000, 7, 3, (DraftTimes(9, 1_000, 5_000, 3, K),), (ahead,))}
    loop.run(4)
    assert isinstance(loop.passes[-1], PacedOutput)
    assert loop.passes[-1].steps_ahead == K + 1, "20 ms hold 2 K + 1 steps of 1 ms"
    records = [record for record in loop.scheduler._feed.records if isinstance(record, LookaheadRecord)]
    assert records == [LookaheadRecord(2_100, 2_900, 800, 2, 1, 5)]
    loop.scheduler._orders = Scripted(loop, {len(loop.passes): ModeOrder(Mode.SEQUENTIAL, K)})
    loop.run(2)
    assert loop.passes[-1].steps_ahead == 0
    loop.run(80)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(6)}


def test_lookahead_rests_where_its_drafts_are_of_no_use(tmp_path: Path) -> None:
    loop = Loop(scheduler(tmp_path, "pearl", k=K))
    loop.scheduler.add_request(request("r", tokens=60))
    missed = Lookahead(0, 1, 5, Span(2_100, 2_900))
    times = PassTimes(2_000, 22_000, 7, 3, (DraftTimes(9, 1_000, 5_000, 1, K),), (missed,))
    for _ in range(10):
        loop.extra = {"times": times}
        loop.run(1)
    rested = [made.steps_ahead for made in loop.passes]
    assert rested[-1] == 0
    assert K + 1 in rested, "it was tried"


class Scripted:
    """Orders by pass."""

    def __init__(self, loop: Loop, orders: dict[int, ModeOrder]) -> None:
        self._loop, self._orders = loop, orders

    def take(self) -> ModeOrder | None:
        return self._orders.pop(len(self._loop.passes), None)

    def close(self) -> None:
        pass


def test_modes_change_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    loop = started(tmp_path, "parallel", max_num_batched_tokens=128)
    loop.scheduler._orders = Scripted(loop, {4: ModeOrder(Mode.SEQUENTIAL, 2), 7: ModeOrder(Mode.OFF, 0), 10: ModeOrder(Mode.PARALLEL, 3)})
    loop.run(9)
    for index in range(6, 10):
        loop.scheduler.add_request(request(f"r{index}", tokens=20 + index))
    loop.run(120)
    assert loop.tokens == {f"r{index}": 20 + index for index in range(10)}
    drafted = [{len(drafts) for drafts in made.scheduled_spec_decode_tokens.values()} for made in loop.passes]
    assert drafted[2] == {K}
    assert drafted[6] == {2}
    assert drafted[9] == set()
    late = [made.scheduled_spec_decode_tokens for made in loop.passes[12:]]
    assert {len(drafts) for made in late for drafts in made.values()} == {3}
    assert not {name for made in late for name in made} & {f"r{index}" for index in range(6)}, (
        "nothing was drafted for what the drafter missed"
    )
    assert [made.num_spec_tokens_to_schedule for made in loop.passes[3:8]] == [K, 2, 2, 2, 0]
    modes = [record.mode for record in loop.scheduler._feed.records if isinstance(record, ModeRecord)]
    assert modes == [Mode.SEQUENTIAL, Mode.OFF, Mode.PARALLEL]
    assert not loop.scheduler.has_requests()


def test_a_client_can_ask_for_fewer_drafts_or_none(tmp_path: Path) -> None:
    loop = Loop(scheduler(tmp_path, "sequential", k=K))
    loop.scheduler.add_request(request("none", extra_args={DRAFT_LIMIT: 0}))
    loop.scheduler.add_request(request("two", extra_args={DRAFT_LIMIT: 2}))
    loop.run(60)
    assert loop.tokens == {"none": 20, "two": 20}
    lengths = {(name, len(drafts)) for made in loop.passes for name, drafts in made.scheduled_spec_decode_tokens.items()}
    assert lengths == {("two", 2)}
