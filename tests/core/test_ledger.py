"""The ledger: what the drafter was told, which order is open, what comes late."""

from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.ledger import Context, DraftLedger
from minedraft_core.types import Draft, DraftItem, DraftResult, Sampling, Span


def answer(batch, rows):
    return DraftResult(batch.round, [item.request_id for item in batch.items], rows, Span(0, 0))


def test_an_order_carries_only_what_is_new():
    ledger = DraftLedger()
    first = ledger.order({"a": Context([1, 2, 3], 9)}, 4)
    assert first.items == [DraftItem("a", 0, [1, 2, 3], 4)]
    second = ledger.order({"a": Context([1, 2, 3, 4, 5], 2), "b": Context([7], 9)}, 4)
    assert second.items == [DraftItem("a", 3, [4, 5], 2), DraftItem("b", 0, [7], 4)]
    assert (first.round, second.round) == (1, 2)
    assert second.num_tokens == 4


def test_an_order_says_how_a_request_is_drawn():
    sampling = Sampling(0.5, 7, 3)
    batch = DraftLedger().order({"a": Context([1, 2, 3], 9, sampling)}, 4)
    assert batch.items == [DraftItem("a", 0, [1, 2, 3], 4, sampling)]


def test_an_answer_counts_once_and_only_for_the_open_order():
    ledger = DraftLedger()
    old = ledger.order({"a": Context([1], 9), "b": Context([2], 9)}, 3)
    new = ledger.order({"a": Context([1, 5], 9)}, 3)
    assert ledger.waiting(["a", "b", "c"]) == {"a", "b"}
    assert ledger.settle(answer(old, [[10, 11], [20, 21, 22]])) == ({"b": Draft([20, 21, 22])}, 2)
    assert ledger.waiting(["a", "b"]) == {"a"}
    assert ledger.settle(answer(new, [[12]])) == ({"a": Draft([12])}, 0)
    assert ledger.settle(answer(new, [[12]])) == ({}, 1)
    assert ledger.waiting(["a", "b"]) == set()


def test_log_probabilities_stay_with_their_tokens():
    ledger = DraftLedger()
    batch = ledger.order({"a": Context([1], 9), "b": Context([2], 9)}, 2)
    result = DraftResult(batch.round, ["a", "b"], [[3, 4], [5]], Span(0, 0), logprobs=[[-1.0, -2.0], [-3.0]])
    assert ledger.settle(result)[0] == {"a": Draft([3, 4], [-1.0, -2.0]), "b": Draft([5], [-3.0])}


def test_an_empty_row_is_an_answer():
    ledger = DraftLedger()
    batch = ledger.order({"a": Context([1], 9)}, 3)
    assert ledger.settle(answer(batch, [[]])) == ({"a": Draft([])}, 0)
    assert ledger.waiting(["a"]) == set()


def test_what_is_given_up_comes_late_but_stays_told():
    ledger = DraftLedger()
    batch = ledger.order({"a": Context([1, 2], 9)}, 3)
    ledger.give_up(["a", "stranger"])
    assert ledger.waiting(["a"]) == set()
    assert ledger.settle(answer(batch, [[3, 4, 5]])) == ({}, 3)
    assert ledger.order({"a": Context([1, 2, 3], 9)}, 3).items == [DraftItem("a", 2, [3], 3)]


def test_a_forgotten_request_is_told_anew_and_its_answer_is_late():
    ledger = DraftLedger()
    batch = ledger.order({"a": Context([1, 2], 9)}, 3)
    assert ledger.forget("a")
    assert not ledger.forget("a")
    assert not ledger.forget("stranger")
    assert ledger.settle(answer(batch, [[3]])) == ({}, 1)
    assert ledger.order({"a": Context([1, 2, 3], 9)}, 3).items == [DraftItem("a", 0, [1, 2, 3], 3)]


def test_after_a_reset_everything_is_told_anew_and_rounds_go_on():
    ledger = DraftLedger()
    before = ledger.order({"a": Context([1, 2], 9), "b": Context([3], 9)}, 3)
    ledger.reset()
    assert ledger.waiting(["a", "b"]) == set()
    assert ledger.settle(answer(before, [[1], [2, 3]])) == ({}, 3)
    after = ledger.order({"a": Context([1, 2, 4], 9)}, 3)
    assert after.items == [DraftItem("a", 0, [1, 2, 4], 3)]
    assert after.round > before.round


@given(st.data())
def test_the_items_of_a_request_put_together_are_its_context(data):
    ledger = DraftLedger()
    contexts, heard = {}, {}
    for step in range(data.draw(st.integers(1, 12))):
        for name in "abc":
            match data.draw(st.sampled_from(["order", "grow", "forget"])):
                case "order" if name in contexts:
                    (item,) = ledger.order({name: Context(contexts[name], 5)}, 4).items
                    known = heard.setdefault(name, [])
                    assert item.base == len(known)
                    known += item.tokens
                    assert known == contexts[name]
                case "forget":
                    assert ledger.forget(name) == (name in heard)
                    contexts.pop(name, None)
                    heard.pop(name, None)
                case _:
                    contexts[name] = [*contexts.get(name, []), step]
