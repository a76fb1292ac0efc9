"""The draft process's memory of the requests: tokens, blocks, and what of the KV cache is valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.types import DraftItem, Lookahead, Sampling, Span
from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts, OutOfSyncError


def drafted(tokens, drafts):
    """A context right after its draft: everything before the drafts is cached."""
    return DraftContext(list(tokens), [], len(tokens), list(drafts), [-float(token) for token in drafts])


@pytest.mark.parametrize(
    ("delivered", "cached", "chain"),
    [
        ([9], 2, []),
        ([7], 3, [8, 6]),
        ([7, 8], 4, [6]),
        ([7, 9], 3, []),
        ([7, 8, 6], 4, []),
        ([7, 8, 6, 5], 4, []),
        ([], 2, [7, 8, 6]),
    ],
)
def test_what_is_accepted_stays_cached_and_the_rest_of_a_chain_goes_on(delivered, cached, chain):
    context = drafted([1, 2], [7, 8, 6])
    context.ahead = 1
    on_chain = context.extend(delivered)
    assert on_chain == (delivered == [7, 8, 6][: len(delivered)])
    assert context.cached == cached
    assert context.tokens == [1, 2, *delivered]
    assert (context.chain, context.logprobs, context.ahead) == (chain, [-float(token) for token in chain], 0)


def test_a_second_delivery_matches_the_rest_of_the_chain():
    context = drafted([1, 2], [7, 8, 6, 5])
    assert context.extend([7])
    assert context.extend([8, 6])
    assert (context.cached, context.chain) == (5, [5])
    assert not context.extend([4])
    assert (context.cached, context.chain) == (5, [])


def test_other_noise_ends_a_chain():
    contexts = DraftContexts(8, 4, 100)
    context = contexts.update(DraftItem("a", 0, [1, 2], 3))
    context.append(7)
    context.append(8)
    assert contexts.update(DraftItem("a", 2, [7], 3)).chain == [8]
    assert contexts.update(DraftItem("a", 3, [], 3, Sampling(1.0, 5, 2))).chain == []


def test_what_was_drafted_ahead_hits_misses_or_ends():
    contexts = DraftContexts(8, 4, 100)
    for delivered, ahead in (([7, 8], 2), ([7, 9], 2), (None, 2), ([7], 0)):
        context = contexts.update(DraftItem("a", 0, [1, 2], 3))
        for token in (7, 8, 6):
            context.append(token)
        context.ahead = ahead
        if delivered is None:
            contexts.forget("a")
        else:
            contexts.update(DraftItem("a", 2, delivered, 3))
    contexts.tally.work(Span(10, 12))
    contexts.tally.work(Span(13, 20))
    assert contexts.tally.take() == Lookahead(hits=1, misses=2, discarded=4, span=Span(10, 20))
    assert contexts.tally.take() is None


def test_updates_follow_one_another():
    contexts = DraftContexts(8, 4, 100)
    assert contexts.update(DraftItem("a", 0, [1, 2], 3)).tokens == [1, 2]
    assert contexts.update(DraftItem("a", 2, [3], 3)).tokens == [1, 2, 3]
    assert contexts.update(DraftItem("a", 3, [], 3)).tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("item", "known"), [(DraftItem("a", 3, [4], 1), 2), (DraftItem("a", 1, [4], 1), 2), (DraftItem("b", 2, [4], 1), None)]
)
def test_a_gap_is_out_of_sync(item, known):
    contexts = DraftContexts(8, 4, 100)
    contexts.update(DraftItem("a", 0, [1, 2], 3))
    with pytest.raises(OutOfSyncError, match=f"assumes {item.base} known tokens, known are {known}"):
        contexts.update(item)


def test_a_base_of_zero_begins_anew_and_frees_the_blocks():
    contexts = DraftContexts(3, 4, 100)
    old = contexts.update(DraftItem("a", 0, [1] * 8, 3))
    assert contexts.reserve(old, 0)
    new = contexts.update(DraftItem("a", 0, [1] * 5, 3))
    assert (new.blocks, new.cached) == ([], 0)
    assert contexts.reserve(new, 3)
    assert sorted(new.blocks) == [1, 2]


def test_room_is_what_the_blocks_and_the_model_have():
    contexts = DraftContexts(4, 4, 11)
    context = contexts.update(DraftItem("a", 0, [1] * 6, 9))
    assert contexts.reserve(context, 2)
    assert len(context.blocks) == 2
    assert contexts.reserve(context, 5)
    assert len(context.blocks) == 3
    assert not contexts.reserve(context, 6), "twelve positions are more than the model takes"
    other = contexts.update(DraftItem("b", 0, [1], 9))
    assert not contexts.reserve(other, 1), "no block is left"
    assert other.blocks == []
    contexts.forget("a")
    contexts.forget("a")
    contexts.forget("stranger")
    assert contexts.reserve(other, 10)
    assert len(set(other.blocks)) == 3
    assert 0 not in other.blocks


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["grow", "forget", "anew"]), st.integers(0, 9)), max_size=40))
def test_no_block_is_lost_or_given_twice(events):
    contexts, alive = DraftContexts(6, 4, 1_000), {}
    for name, event, count in events:
        if event == "forget":
            contexts.forget(name)
            alive.pop(name, None)
            continue
        base = len(alive[name].tokens) if event == "grow" and name in alive else 0
        alive[name] = contexts.update(DraftItem(name, base, [1] * count, 3))
        held = sum(len(context.blocks) for context in alive.values())
        needed = -(-(len(alive[name].tokens) + 3) // 4) - len(alive[name].blocks)
        assert contexts.reserve(alive[name], 3) == (needed <= 5 - held)
        blocks = [block for context in alive.values() for block in context.blocks]
        assert len(blocks) == len(set(blocks))
        assert set(blocks) <= {1, 2, 3, 4, 5}
    for name in list(alive):
        contexts.forget(name)
    last = contexts.update(DraftItem("z", 0, [1] * 17, 3))
    assert contexts.reserve(last, 3)
    assert sorted(last.blocks) == [1, 2, 3, 4, 5]
