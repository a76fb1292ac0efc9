"""The draft process's memory of the requests: tokens, blocks, and what of the KV cache is valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft_core.types import DraftItem
from minedraft_core.vllm.cpu.contexts import DraftContext, DraftContexts, OutOfSyncError


def drafted(tokens, drafts):
    """A context right after its draft: everything before the drafts is cached."""
    return DraftContext(list(tokens), [], len(tokens), list(drafts))


@pytest.mark.parametrize(
    ("delivered", "cached"),
    [([9], 2), ([7], 3), ([7, 8], 4), ([7, 9], 3), ([7, 8, 6], 4), ([7, 8, 6, 5], 4), ([], 2)],
)
def test_entries_of_accepted_drafts_stay_valid_but_for_the_last(delivered, cached):
    context = drafted([1, 2], [7, 8, 6])
    context.extend(delivered)
    assert context.cached == cached
    assert context.tokens == [1, 2, *delivered]
    assert context.drafted == []


def test_a_context_whose_cache_lags_gains_nothing_from_a_match():
    context = DraftContext([1, 2, 3], [], 1, [7, 8])
    context.extend([7, 8])
    assert context.cached == 1


def test_a_second_delivery_matches_no_old_draft():
    context = drafted([1, 2], [7, 8, 6])
    context.extend([7])
    context.extend([8])
    assert context.cached == 3


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
