"""Drafters that die, hang, do not load or answer nonsense: each fault is contained, and the drafter starts anew."""

import pytest
from supervisor_bench import CONFIG, DIED, VOCABULARY, Bench, expected_drafts, spoil

from minedraft_core.drafter import DrafterError
from minedraft_core.types import Draft, DrafterRecord, DraftItem

pytestmark = pytest.mark.usefixtures("no_sleep")


@pytest.mark.parametrize(
    ("script", "reason"),
    [({"load_time": 1e9}, "hang"), ({"faults": {"ready": DrafterError("failed", "no such model")}}, "failed")],
)
def test_start_that_fails_closes_the_drafter_and_says_why(script, reason):
    bench = Bench(script)
    with pytest.raises(DrafterError, match=r"not loaded within 20 s|no such model") as caught:
        bench.supervisor.start()
    assert caught.value.reason == reason
    assert bench.drafters[0].closed == 1
    assert not bench.supervisor.up
    assert bench.records == []


def test_a_launch_that_fails_at_start_is_raised():
    with pytest.raises(DrafterError, match="code -9"):
        Bench(DIED).supervisor.start()


def test_closing_ends_the_drafter_once_and_stays_quiet():
    bench = Bench()
    supervisor = bench.started()
    supervisor.close()
    supervisor.close()
    assert bench.drafters[0].closed == 1
    assert not supervisor.up


@pytest.mark.parametrize("method", ["start", "collect", "forget"])
def test_a_death_anywhere_is_contained_and_the_drafter_starts_anew(method):
    bench = Bench({"latency": 0.1}, {"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1, 2])
    assert supervisor.gather(["a"]).drafts
    bench.drafters[0].faults[method] = DIED
    bench.order(a=[1, 2, 3])
    if method == "forget":
        supervisor.forget("a")
    gathered = supervisor.gather(["a"])
    assert (gathered.drafts, gathered.reason) == ({}, "down")
    assert gathered.waited == 0.0
    assert bench.drafters[0].closed == 1
    assert bench.records[1:] == [DrafterRecord(up=False, restarted=False, reason="died", message=str(DIED))]
    bench.order(a=[1, 2, 3])
    assert bench.launches == 1, "not before the pause is over"
    bench.clock.now += 1.0
    assert supervisor.gather(["a"]).reason == "down"
    assert bench.launches == 2
    bench.order(a=[1, 2, 3, 4])
    assert bench.records[2:] == [DrafterRecord(up=True, restarted=True, reason="loaded")]
    assert bench.drafters[1].orders[0].items == [DraftItem("a", 0, [1, 2, 3, 4], 3)]
    assert supervisor.gather(["a"]).drafts == {"a": expected_drafts([1, 2, 3, 4])}


def failures_until(bench, until, step=0.25):
    """The clock's readings at each launch while the engine keeps asking."""
    launched = []
    while bench.clock.now < until:
        seen = bench.launches
        bench.order(a=[1])
        bench.supervisor.gather(["a"])
        if bench.launches > seen:
            launched.append(bench.clock.now)
        bench.clock.now += step
    return launched


def test_the_pause_doubles_up_to_its_cap():
    bench = Bench({"faults": {"start": DIED}}, DIED)
    bench.started()
    launched = failures_until(bench, 1_050.0)
    assert [after - before for before, after in zip([1_000.0, *launched], launched, strict=False)] == [1, 2, 4, 8, 8, 8, 8, 8]
    assert len(bench.records) == 1 + 1 + len(launched)


def test_an_answer_ends_the_row_of_failures():
    bench = Bench({"faults": {"start": DIED}}, DIED, {})
    supervisor = bench.started()
    launched = failures_until(bench, 1_004.0)
    assert [moment - 1_000.0 for moment in launched] == [1, 3]
    assert supervisor.up
    bench.drafters[-1].faults["start"] = DIED
    bench.order(a=[1, 1])
    before, down_at = bench.launches, bench.clock.now
    bench.clock.now = down_at + 0.99
    supervisor.gather([])
    assert bench.launches == before
    bench.clock.now = down_at + 1.0
    supervisor.gather([])
    assert bench.launches == before + 1


def test_failures_without_end_do_not_overflow_the_pause():
    bench = Bench({"faults": {"start": DIED}}, DIED)
    supervisor = bench.started()
    bench.order(a=[1])
    for _ in range(1_100):
        bench.clock.now += CONFIG.restart_backoff_max
        supervisor.gather(["a"])
    assert bench.launches == 1_101
    assert supervisor.gather(["a"]).reason == "down"


def test_a_model_that_does_not_load_again_in_time_counts_as_hung():
    bench = Bench({"faults": {"start": DIED}}, {"load_time": 1e9})
    supervisor = bench.started()
    bench.order(a=[1])
    bench.clock.now += 1.0
    supervisor.gather([])
    assert bench.launches == 2
    bench.clock.now += CONFIG.start_timeout - 2.0
    supervisor.gather([])
    assert bench.drafters[1].closed == 0
    bench.clock.now += 2.0
    supervisor.gather([])
    assert bench.drafters[1].closed == 1
    assert bench.records[-1].reason == "hang"
    assert not supervisor.up


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(spoil(round=lambda answer: answer.round + 5), id="a round never ordered"),
        pytest.param(spoil(request_ids=lambda answer: ["x", *answer.request_ids[1:]]), id="another request"),
        pytest.param(spoil(request_ids=lambda answer: answer.request_ids[::-1]), id="another order"),
        pytest.param(spoil(tokens=lambda answer: answer.tokens[:1]), id="a row too few"),
        pytest.param(spoil(tokens=lambda answer: [*answer.tokens, [1]]), id="a row too many"),
        pytest.param(spoil(tokens=lambda answer: [[0, 1, VOCABULARY], [1]]), id="a token behind the vocabulary"),
        pytest.param(spoil(tokens=lambda answer: [[0, -1], [1]]), id="a negative token"),
        pytest.param(spoil(tokens=lambda answer: [[0, 1, 2, 3], [1]]), id="a row longer than its limit"),
        pytest.param(spoil(logprobs=lambda answer: [[-0.1] * 3]), id="log-probabilities of a row too few"),
        pytest.param(spoil(logprobs=lambda answer: [[-0.1] * 3, [-0.1] * 2]), id="a log-probability too few"),
        pytest.param(spoil(logprobs=lambda answer: [[-0.1] * 3, [-0.1, 0.1, -0.1]]), id="a probability above one"),
        pytest.param(spoil(logprobs=lambda answer: [[-0.1] * 3, [-0.1, float("nan"), -0.1]]), id="no probability"),
    ],
)
def test_rubbish_is_a_fault(edit):
    bench = Bench({"edit": edit})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    gathered = supervisor.gather(["a", "b"])
    assert (gathered.drafts, gathered.answers, gathered.reason) == ({}, [], "down")
    assert bench.records[-1].reason == "rubbish"
    assert not bench.records[-1].up
    assert bench.drafters[0].closed == 1


def test_the_same_answer_twice_is_rubbish():
    bench = Bench()
    supervisor = bench.started()
    bench.order(a=[1])
    supervisor.gather(["a"])
    bench.drafters[0].edit = spoil(round=lambda answer: 1)
    bench.order(a=[1, 2])
    assert supervisor.gather(["a"]).reason == "down"
    assert bench.records[-1].reason == "rubbish"


def test_the_longest_row_and_the_largest_token_are_no_rubbish():
    bench = Bench({"edit": spoil(tokens=lambda answer: [[VOCABULARY - 1] * 3, []])})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    assert supervisor.gather(["a", "b"]).drafts == {"a": Draft([99, 99, 99]), "b": Draft([])}


def test_tokens_that_a_fault_takes_are_counted_and_the_good_answer_is_kept_on_record():
    bench = Bench({"latency": 1.0})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    bench.drafters[0].edit = spoil(tokens=lambda answer: [[7, 7, 7, 7]])
    bench.order(c=[3])
    bench.clock.now += 5.0
    gathered = supervisor.gather(["a", "b", "c"])
    assert (gathered.drafts, gathered.reason) == ({}, "down")
    assert gathered.lost == 3 + 3 + 4
    assert [answer.round for answer in gathered.answers] == [1]
    assert supervisor.gather(["a"]).lost == 0


def test_a_drafter_that_never_answers_is_closed_after_the_limit():
    bench = Bench({"latency": 1e9}, {"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1])
    gathered = supervisor.gather(["a"])
    assert gathered.reason == "late"
    assert gathered.waited == pytest.approx(2.0)
    bench.clock.now += CONFIG.answer_timeout - 2.0 + 0.01
    bench.order(a=[1, 2])
    assert bench.drafters[0].closed == 1
    assert (bench.records[-1].up, bench.records[-1].reason) == (False, "hang")
    bench.clock.now += 1.0
    supervisor.gather(["a"])
    bench.order(a=[1, 2])
    assert bench.drafters[1].orders[0].items == [DraftItem("a", 0, [1, 2], 3)]
    assert supervisor.gather(["a"]).drafts == {"a": expected_drafts([1, 2])}


def test_a_pause_of_the_engine_is_not_taken_for_a_hang():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1])
    bench.clock.now += 3_600.0
    bench.order(b=[2])
    assert supervisor.up
    assert bench.drafters[0].closed == 0
    assert supervisor.gather(["a", "b"]).drafts == {"a": expected_drafts([1]), "b": expected_drafts([2])}
    assert len(bench.records) == 1
