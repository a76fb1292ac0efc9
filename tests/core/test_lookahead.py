"""Whether drafting ahead is worth it: learned from drafts that were accepted whole or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_model import PagedModel, continuation

from minedraft_core.types import DraftBatch, DraftItem
from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts
from minedraft_core.vllm.cpu.draft_loop import DraftLoop
from minedraft_core.vllm.cpu.lookahead import Chances

SURE, DOUBTFUL = -0.1, -9.0


def learned(*outcomes):
    chances = Chances()
    for logprob, whole in outcomes:
        chances.learn(logprob, whole=whole)
    return chances


def test_at_first_it_is_worth_it():
    assert Chances().worth([SURE] * 16 + [DOUBTFUL] * 16)


def test_what_is_learned_of_doubtful_drafts_does_not_touch_sure_ones():
    chances = learned(*[(DOUBTFUL, False)] * 100, *[(SURE, True)] * 100)
    assert chances.worth([SURE])
    assert not chances.worth([DOUBTFUL])
    assert not chances.worth([SURE, SURE, DOUBTFUL]), "the doubtful request needs the pass"


def test_a_drafter_that_is_right_though_it_doubts_is_gone_on_with_again():
    chances = learned(*[(DOUBTFUL, False)] * 100)
    for _ in range(15):
        chances.learn(DOUBTFUL, whole=True)
    assert chances.worth([DOUBTFUL])


def test_many_requests_are_less_often_accepted_whole_all_together():
    chances = learned(*[(SURE, number % 3 > 0) for number in range(200)])
    assert chances.worth([SURE] * 2)
    assert not chances.worth([SURE] * 4)


@given(st.lists(st.tuples(st.floats(-20, 0), st.booleans())))
def test_a_chance_is_a_probability(outcomes):
    assert all(0 <= rate <= 1 for rate in learned(*outcomes)._rates)


@pytest.mark.parametrize(
    ("delivered", "whole"),
    [([5, 6, 9], True), ([5, 6, 7], True), ([5, 9], False), ([9], False), ([5, 6, 7, 8], True), ([5], None), ([], None)],
)
def test_a_draft_was_accepted_whole_or_refused_or_cut(delivered, whole):
    context = DraftContext([1], [], 1, chain=[5, 6, 7], logprobs=[-1.0, -2.0, -4.0], given=2)
    assert context.sureness == -3.0
    assert context.accepted_whole(delivered) is whole
    context.extend(delivered)
    assert context.given == 0


def passes_ahead(accepted, orders):
    """How many of these orders the loop went on ahead of, where the target accepts so many of three drafts each time."""
    loop = DraftLoop(PagedModel(500, 4), DraftContexts(500, 4, 2000))
    context, base, ahead = [1, 2, 3], 0, []
    for number in range(orders):
        loop.answer(DraftBatch(number, 3, [DraftItem("a", base, context[base:], 3)], 4))
        ahead.append(loop.look_ahead())
        base = len(context)
        context = [*context, *continuation(context, accepted), 500]
    return ahead


def test_a_drafter_that_is_never_followed_stops_looking_ahead():
    assert passes_ahead(2, 40) == [True] * 3 + [False] * 37


def test_one_that_is_followed_goes_on():
    assert passes_ahead(3, 80) == [True] * 80
