"""The supervisor over a scripted drafter and a clock moved by hand."""

import msgspec
import pytest
from core_doubles import Clock, ScriptedDrafter

from minedraft_core.config import DrafterConfig
from minedraft_core.drafter import DrafterError, InlineDrafter
from minedraft_core.ledger import Context
from minedraft_core.supervisor import DraftSupervisor, Gathered, NoDrafting
from minedraft_core.types import Draft, DraftBatch, DrafterRecord, DraftItem

CONFIG = DrafterConfig(start_timeout=20.0, answer_timeout=10.0, restart_backoff=1.0, restart_backoff_max=8.0)
DIED = DrafterError("died", "the draft process ended with code -9")
VOCABULARY = 100


class Bench:
    """A supervisor, its clock, every drafter it launched and every record it gave."""

    def __init__(self, *scripts, config=CONFIG):
        """`scripts` are the settings of the drafters launched in turn, the last one for all that follow; a fault is a failed launch."""
        self.clock, self.records, self.drafters, self.launches = Clock(), [], [], 0
        self._scripts = scripts or ({},)
        self.supervisor = DraftSupervisor(self._launch, config, VOCABULARY, self.records.append, self.clock)

    def _launch(self):
        script = self._scripts[min(self.launches, len(self._scripts) - 1)]
        self.launches += 1
        if isinstance(script, DrafterError):
            raise script
        self.drafters.append(ScriptedDrafter(self.clock, **script))
        return self.drafters[-1]

    def started(self):
        self.supervisor.start()
        return self.supervisor

    def order(self, **contexts):
        self.supervisor.order({name: Context(tokens, 9) for name, tokens in contexts.items()}, 3)


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch):
    monkeypatch.setattr("minedraft_core.supervisor.time.sleep", lambda _: None)


def expected_drafts(tokens, count=3):
    return Draft([(sum(tokens) + step) % 100 for step in range(count)])


def test_orders_come_back_as_drafts():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1, 2], b=[3])
    gathered = supervisor.gather(["a", "b"])
    assert gathered.drafts == {"a": expected_drafts([1, 2]), "b": expected_drafts([3])}
    assert (gathered.late, gathered.lost, gathered.reason) == (0, 0, None)
    assert gathered.waited == pytest.approx(0.1)
    assert [answer.round for answer in gathered.answers] == [1]
    assert bench.records == [DrafterRecord(up=True, restarted=False, reason="loaded")]


def test_gather_waits_for_the_due_requests_only():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1])
    bench.order(b=[2])
    assert supervisor.gather(["a"]).drafts == {"a": expected_drafts([1])}
    assert bench.clock.now == pytest.approx(1_000.1)
    assert supervisor.gather(["b"]).drafts == {"b": expected_drafts([2])}
    assert supervisor.gather(["c"]) == Gathered()


def test_drafts_stay_until_their_side_is_due():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    assert supervisor.gather(["a"]).drafts == {"a": expected_drafts([1])}
    assert supervisor.gather(["a"]).drafts == {}
    assert supervisor.gather(["b"]).drafts == {"b": expected_drafts([2])}


def test_a_draft_that_a_new_order_overtakes_is_late():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    supervisor.gather(["a"])
    bench.order(b=[2, 3])
    gathered = supervisor.gather(["b"])
    assert (gathered.drafts, gathered.late) == ({"b": expected_drafts([2, 3])}, 3)


def test_log_probabilities_travel_with_the_drafts():
    scores = [[-0.5, -0.25, 0.0], [float("-inf"), -1.0, -2.0]]
    bench = Bench({"edit": spoil(logprobs=lambda answer: scores)})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    drafts = supervisor.gather(["a", "b"]).drafts
    assert [draft.logprobs for draft in drafts.values()] == scores


def test_an_order_says_how_far_to_go_on():
    bench = Bench()
    supervisor = bench.started()
    supervisor.order({"a": Context([1], 9)}, 3, 4)
    bench.order(a=[1, 2])
    assert [(order.num_tokens, order.ahead) for order in bench.drafters[0].orders] == [(3, 4), (3, 0)]


def test_no_contexts_is_no_order():
    bench = Bench()
    supervisor = bench.started()
    supervisor.order({}, 3)
    assert bench.drafters[0].orders == []


def test_start_waits_until_the_model_is_loaded():
    bench = Bench({"load_time": 12.0})
    assert bench.started().up
    assert bench.clock.now == pytest.approx(1_012.0)


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


def spoil(**changes):
    """An edit that replaces fields of an answer; callables get the answer."""
    return lambda answer: msgspec.structs.replace(answer, **{key: value(answer) for key, value in changes.items()})


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


def behind(latency=2.0):
    """A drafter that took 0.1 s so far and now takes far longer; its order for `a` has been given up."""
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1])
    supervisor.gather(["a"])
    bench.drafters[0].latency = latency
    bench.order(a=[1, 2], b=[5])
    gathered = supervisor.gather(["a"])
    assert (gathered.drafts, gathered.reason) == ({}, "late")
    assert gathered.waited == pytest.approx(4 * 0.1)
    return bench, supervisor


def test_patience_is_a_few_times_what_answers_took_and_never_less_than_a_quarter_second():
    bench = Bench({"latency": 0.001})
    supervisor = bench.started()
    bench.order(a=[1])
    supervisor.gather(["a"])
    bench.drafters[0].latency = 5.0
    bench.order(a=[1, 2])
    assert supervisor.gather(["a"]).waited == pytest.approx(0.25)


def test_the_first_answer_may_take_two_seconds():
    bench = Bench({"latency": 1.9})
    supervisor = bench.started()
    bench.order(a=[1])
    gathered = supervisor.gather(["a"])
    assert gathered.drafts == {"a": expected_drafts([1])}
    assert gathered.waited == pytest.approx(1.9)


def test_while_the_drafter_is_behind_nobody_waits_and_nothing_is_ordered():
    bench, supervisor = behind()
    sent = len(bench.drafters[0].orders)
    bench.drafters[0].waits.clear()
    for _ in range(4):
        bench.clock.now += 0.1
        bench.order(a=[1, 2, 3])
        gathered = supervisor.gather(["a"])
        assert (gathered.drafts, gathered.reason, gathered.waited) == ({}, "late", 0.0)
    assert set(bench.drafters[0].waits) == {0.0}
    assert len(bench.drafters[0].orders) == sent


def test_while_the_drafter_is_behind_the_other_side_does_not_wait_either():
    _, supervisor = behind()
    gathered = supervisor.gather(["b"])
    assert (gathered.drafts, gathered.reason, gathered.waited) == ({}, "late", 0.0)


def test_late_tokens_are_counted_and_the_drafter_is_back_once_it_has_answered():
    bench, supervisor = behind()
    bench.clock.now += 5.0
    gathered = supervisor.gather(["a"])
    assert gathered.late == 3
    assert gathered.drafts == {}
    assert gathered.waited == 0.0
    assert gathered.reason is None
    assert supervisor.gather(["b"]).drafts == {"b": expected_drafts([5])}, "another side's draft of the same order is still of use"
    assert supervisor.up
    bench.drafters[0].latency = 0.1
    bench.order(a=[1, 2, 3])
    assert bench.drafters[0].orders[-1].items == [DraftItem("a", 2, [3], 3)]
    assert supervisor.gather(["a"]).drafts == {"a": expected_drafts([1, 2, 3])}
    assert len(bench.records) == 1


def test_an_answer_for_a_request_that_ended_is_late():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    supervisor.forget("a")
    assert bench.drafters[0].forgotten == ["a"]
    gathered = supervisor.gather(["b"])
    assert gathered.drafts == {"b": expected_drafts([2])}
    assert gathered.late == 3
    supervisor.forget("a")
    supervisor.forget("stranger")
    assert bench.drafters[0].forgotten == ["a"], "the drafter hears of an end once"


def test_drafts_that_came_in_while_the_engine_paused_are_late_for_a_request_that_ended():
    bench = Bench({"latency": 0.1})
    supervisor = bench.started()
    bench.order(a=[1], b=[2])
    bench.clock.now += 100.0
    bench.order(c=[3])
    supervisor.forget("a")
    gathered = supervisor.gather(["b", "c"])
    assert gathered.drafts == {"b": expected_drafts([2]), "c": expected_drafts([3])}
    assert gathered.late == 3


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


def test_no_drafting_gives_nothing():
    drafting = NoDrafting()
    drafting.order({"a": Context([1], 9)}, 3)
    assert drafting.gather(["a"]) == Gathered()
    drafting.forget("a")
    drafting.close()


def test_the_inline_drafter_keeps_contexts_and_refuses_gaps():
    heard = []
    drafter = InlineDrafter(lambda context, limit: heard.append(list(context)) or context[-1:] * limit)
    assert drafter.ready()
    drafter.start(DraftBatch(1, 2, [DraftItem("a", 0, [1, 2], 2)]))
    drafter.start(DraftBatch(2, 2, [DraftItem("a", 2, [3], 1)]))
    assert [(answer.round, answer.request_ids, answer.tokens) for answer in drafter.collect(0.0)] == [
        (1, ["a"], [[2, 2]]),
        (2, ["a"], [[3]]),
    ]
    assert drafter.collect(0.0) == []
    assert heard == [[1, 2], [1, 2, 3]]
    with pytest.raises(DrafterError, match="told 1 tokens, know 3"):
        drafter.start(DraftBatch(3, 2, [DraftItem("a", 1, [3], 1)]))
    drafter.forget(["a", "stranger"])
    drafter.start(DraftBatch(4, 2, [DraftItem("a", 0, [9], 1)]))
    assert heard[-1] == [9]
    drafter.close()
