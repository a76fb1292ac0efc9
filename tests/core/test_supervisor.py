"""What the supervisor orders and gathers, how long it waits, and what it counts."""

import pytest
from supervisor_bench import Bench, expected_drafts, spoil

from minedraft_core.drafter import DrafterError, InlineDrafter
from minedraft_core.ledger import Context
from minedraft_core.supervisor import Gathered, NoDrafting
from minedraft_core.types import DraftBatch, DrafterRecord, DraftItem

pytestmark = pytest.mark.usefixtures("no_sleep")


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
