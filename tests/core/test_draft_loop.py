"""The draft loop over a model that checks its KV cache, through acceptance, rejection, missed orders and exhaustion."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import VOCABULARY, PagedModel, continuation

from minedraft_core.ledger import Context, DraftLedger
from minedraft_core.types import Draft, DraftBatch, DraftItem, Sampling
from minedraft_core.vllm.cpu import draft_loop
from minedraft_core.vllm.cpu.contexts import DraftContexts, OutOfSyncError
from minedraft_core.vllm.cpu.draft_loop import DraftLoop
from minedraft_core.vllm.cpu.noise import Draw, SeedStream

pytestmark = pytest.mark.usefixtures("single_thread")

BLOCK = 4


def loop_of(num_blocks=200, max_context=500):
    model = PagedModel(num_blocks, BLOCK)
    return DraftLoop(model, DraftContexts(num_blocks, BLOCK, max_context)), model


def one(loop, tokens, base=0, limit=3, name="a", superseded=frozenset()):
    return loop.answer(DraftBatch(1, limit, [DraftItem(name, base, list(tokens[base:]), limit)]), superseded).tokens[0]


def test_drafts_are_the_greedy_continuation_in_the_order_asked():
    loop, _ = loop_of()
    contexts = {"a": [1, 2, 3, 4, 5, 6], "b": [9], "c": [7, 7]}
    batch = DraftBatch(5, 4, [DraftItem(name, 0, tokens, 4) for name, tokens in contexts.items()])
    result = loop.answer(batch)
    assert result.round == 5
    assert result.request_ids == list(contexts)
    assert result.tokens == [continuation(tokens, 4) for tokens in contexts.values()]
    assert result.logprobs is None
    assert result.distributions is None
    assert result.span.start_us <= result.span.end_us


def test_each_request_gets_as_many_drafts_as_its_limit():
    loop, model = loop_of()
    limits = {"a": 3, "b": 0, "c": 1, "d": 2}
    batch = DraftBatch(1, 4, [DraftItem(name, 0, [1, 2, 3], limit) for name, limit in limits.items()])
    assert loop.answer(batch).tokens == [continuation([1, 2, 3], limit) for limit in limits.values()]
    assert [len(queries) for queries in model.passes] == [3, 3, 2, 1], "nobody is run further than asked"


def drawn(prompt, output, count, sampling):
    """The continuation of a sampling request: the model's state and the draw that belongs to the place decide."""
    stream, context, tokens = SeedStream(sampling.seed), [*prompt, *output], []
    for index in range(len(output), len(output) + count):
        tokens.append(PagedModel.token([*context, *tokens], Draw(sampling.temperature, stream.at(index))))
    return tokens


def test_a_sampling_request_is_drawn_for_with_the_noise_of_each_place():
    loop, _ = loop_of()
    prompt, sampling = [1, 2, 3, 4], Sampling(0.7, 99, 4)
    order = DraftBatch(1, 3, [DraftItem("a", 0, prompt, 3, sampling), DraftItem("b", 0, [5, 6], 3)])
    assert loop.answer(order).tokens == [drawn(prompt, [], 3, sampling), continuation([5, 6], 3)]
    output = [7, 8, 9]
    later = DraftBatch(2, 3, [DraftItem("a", 4, output, 3, sampling)])
    assert loop.answer(later).tokens == [drawn(prompt, output, 3, sampling)]
    loop.forget(["a"])
    anew = DraftBatch(3, 3, [DraftItem("a", 0, [*prompt, *output], 3, sampling)])
    assert loop.answer(anew).tokens == [drawn(prompt, output, 3, sampling)], "a drafter started anew draws the same"


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_after_k_accepted_drafts_two_tokens_are_run_and_no_more(accepted):
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    drafts = one(loop, context)
    longer = [*context, *drafts[:accepted], 500]
    model.passes.clear()
    assert one(loop, longer, base=len(context)) == continuation(longer, 3)
    assert model.passes == [[(2, len(longer) - 2)], [(1, len(longer))], [(1, len(longer) + 1)]]


def test_a_missed_order_is_caught_up_in_one_go():
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    drafts = one(loop, context)
    longer = [*context, drafts[0], *range(600, 609)]
    model.passes.clear()
    assert one(loop, longer, base=len(context)) == continuation(longer, 3)
    assert model.passes[0] == [(len(longer) - 2 - 6, 6)], "what the cache holds is kept"


def test_long_contexts_are_caught_up_in_passes_of_bounded_size(monkeypatch):
    monkeypatch.setattr(draft_loop, "_TOKENS_A_PASS", 10)
    loop, model = loop_of()
    contexts = {"a": list(range(17)), "b": list(range(50, 60)), "c": [1, 2], "d": list(range(30))}
    result = loop.answer(DraftBatch(1, 1, [DraftItem(name, 0, tokens, 1) for name, tokens in contexts.items()]))
    assert result.tokens == [continuation(tokens, 1) for tokens in contexts.values()]
    sizes = [sum(count for count, _ in queries) for queries in model.passes[:-1]]
    assert sizes == [10, 10, 10, 10, 10, 1]


def test_a_superseded_request_is_brought_up_to_date_without_a_draft():
    loop, model = loop_of()
    context = [1, 2, 3, 4]
    assert one(loop, context, superseded=frozenset("a")) == []
    assert model.passes == []
    assert one(loop, [*context, 5], base=4) == continuation([1, 2, 3, 4, 5], 3)


def test_superseding_does_not_lose_accepted_entries():
    loop, model = loop_of()
    context = [1, 2, 3, 4]
    drafts = one(loop, context)
    longer = [*context, *drafts[:2], 77]
    assert one(loop, longer, base=4, superseded=frozenset("a")) == []
    model.passes.clear()
    longest = [*longer, 78]
    assert one(loop, longest, base=len(longer)) == continuation(longest, 3)
    assert model.passes[0] == [(2, 6)]


def test_a_full_cache_leaves_rows_empty_until_a_request_ends():
    loop, _ = loop_of(num_blocks=4)
    assert one(loop, [1] * 6, name="a") == continuation([1] * 6, 3)
    assert one(loop, [2] * 3, name="b") == []
    loop.forget(["a"])
    assert one(loop, [2] * 4, base=3, name="b") == continuation([2] * 4, 3)
    assert one(loop, [3], name="c") == continuation([3], 3)


def test_a_context_at_the_models_end_gets_no_draft():
    loop, _ = loop_of(max_context=10)
    assert one(loop, [1] * 7) == continuation([1] * 7, 3)
    assert one(loop, [1] * 8, base=7) == []
    assert one(loop, [1] * 8, base=8, limit=2) == continuation([1] * 8, 2)


def test_an_order_that_does_not_fit_what_is_known_is_refused():
    loop, _ = loop_of()
    one(loop, [1, 2])
    with pytest.raises(OutOfSyncError):
        one(loop, [1, 2, 3, 4, 5], base=4)


def ask(loop, tokens, base=0, limit=3, ahead=4, name="a"):
    return loop.answer(DraftBatch(1, limit, [DraftItem(name, base, list(tokens[base:]), limit)], ahead))


def counted(lookahead):
    return lookahead.hits, lookahead.misses, lookahead.discarded


def test_a_draft_made_ahead_is_ready_at_once_where_the_target_goes_along():
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    first = ask(loop, context)
    assert first.lookahead is None
    model.passes.clear()
    assert [loop.look_ahead() for _ in range(5)] == [True] * 4 + [False]
    assert model.passes == [[(1, len(context) + place)] for place in range(2, 6)], "each pass runs the last token of the chain"
    model.passes.clear()
    longer = [*context, *continuation(context, 4)]
    answer = ask(loop, longer, base=len(context))
    assert answer.tokens == [continuation(longer, 3)]
    assert model.passes == []
    assert counted(answer.lookahead) == (1, 0, 0)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_draft_begun_ahead_is_finished(done):
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    ask(loop, context)
    for _ in range(done):
        loop.look_ahead()
    model.passes.clear()
    longer = [*context, *continuation(context, 4)]
    answer = ask(loop, longer, base=len(context))
    assert answer.tokens == [continuation(longer, 3)]
    assert len(model.passes) == 3 - (done - 1)
    assert counted(answer.lookahead) == (1, 0, 0)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_draft_made_ahead_is_discarded_where_the_target_leaves_it(accepted):
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    drafts = ask(loop, context).tokens[0]
    while loop.look_ahead():
        pass
    model.passes.clear()
    longer = [*context, *drafts[:accepted], 500]
    answer = ask(loop, longer, base=len(context))
    assert answer.tokens == [continuation(longer, 3)]
    assert model.passes == [[(2, len(longer) - 2)], [(1, len(longer))], [(1, len(longer) + 1)]]
    assert counted(answer.lookahead) == (0, 1, 4)


def test_drafts_that_were_not_verified_are_the_beginning_of_the_next():
    loop, model = loop_of()
    context = [1, 2, 3, 4, 5]
    drafts = ask(loop, context, limit=6, ahead=0).tokens[0]
    model.passes.clear()
    longer = [*context, *drafts[:3]]
    answer = ask(loop, longer, base=len(context), limit=6, ahead=0)
    assert answer.tokens == [continuation(longer, 6)]
    assert model.passes == [[(1, len(longer) + place)] for place in (2, 3, 4)]
    assert answer.lookahead is None


def test_only_those_asked_for_are_drafted_ahead_and_none_that_ended():
    loop, model = loop_of()
    ask(loop, [1, 2], name="a")
    ask(loop, [3, 4], name="b", ahead=0)
    ask(loop, [5, 6], name="c")
    loop.forget(["c"])
    model.passes.clear()
    assert loop.look_ahead()
    assert model.passes == [[(1, 4)]]
    loop.forget(["a"])
    assert not loop.look_ahead()
    assert counted(ask(loop, [9], name="d").lookahead) == (0, 1, 1)


def test_a_new_order_without_lookahead_ends_it():
    loop, _ = loop_of()
    ask(loop, [1, 2])
    loop.look_ahead()
    ask(loop, [1, 2, 500], base=2, ahead=0)
    assert not loop.look_ahead()


def test_without_room_nothing_is_drafted_ahead():
    loop, _ = loop_of(max_context=10)
    assert ask(loop, [1] * 6).tokens == [continuation([1] * 6, 3)]
    assert not loop.look_ahead()


def test_a_sampling_request_is_drawn_for_ahead_with_the_noise_of_each_place():
    loop, model = loop_of()
    prompt, sampling = [1, 2, 3, 4], Sampling(0.7, 99, 4)
    loop.answer(DraftBatch(1, 3, [DraftItem("a", 0, prompt, 3, sampling)], 4))
    while loop.look_ahead():
        pass
    model.passes.clear()
    output = drawn(prompt, [], 4, sampling)
    answer = loop.answer(DraftBatch(2, 3, [DraftItem("a", 4, output, 3, sampling)], 4))
    assert answer.tokens == [drawn(prompt, output, 3, sampling)]
    assert model.passes == []


def test_log_probabilities_come_with_their_tokens():
    loop, model = loop_of()
    model.scored = True
    first = ask(loop, [1, 2, 3])
    assert first.logprobs == [[-float(token) for token in first.tokens[0]]]
    loop.look_ahead()
    loop.look_ahead()
    longer = [1, 2, 3, *continuation([1, 2, 3], 4)]
    second = ask(loop, longer, base=3)
    assert second.tokens == [continuation(longer, 3)]
    assert second.logprobs == [[-float(token) for token in second.tokens[0]]]


class Engine:
    """Plays the target: delivers tokens, orders through a real ledger, and knows what each draft must be."""

    def __init__(self, data, loop):
        self._data, self._loop, self._ledger = data, loop, DraftLedger()
        self._contexts, self._drafts = {}, {}
        self._created = 0

    def step(self):
        draw = self._data.draw
        for name in list(self._contexts):
            match draw(st.sampled_from(["deliver"] * 5 + ["idle", "end", "preempt"])):
                case "deliver":
                    self._deliver(name)
                case "idle":
                    continue
                case fate:
                    if self._ledger.forget(name):
                        self._loop.forget([name])
                    self._drafts.pop(name, None)
                    if fate == "end":
                        del self._contexts[name]
        if len(self._contexts) < 4 and draw(st.booleans()):
            self._created += 1
            self._contexts[f"r{self._created}"] = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
        self._order()

    def _deliver(self, name):
        drafts = self._drafts.pop(name, Draft([])).tokens
        accepted = self._data.draw(st.integers(0, len(drafts)))
        own = self._data.draw(st.sampled_from([[500], [501], continuation([*self._contexts[name], *drafts[:accepted]], 1)]))
        self._contexts[name] = [*self._contexts[name], *drafts[:accepted], *own]

    def _order(self):
        draw = self._data.draw
        chosen = [name for name in self._contexts if draw(st.integers(0, 3))]
        if not chosen:
            return
        limits = {name: draw(st.integers(0, 4)) for name in chosen}
        batch = self._ledger.order({name: Context(self._contexts[name], limits[name]) for name in chosen}, 4, draw(st.sampled_from([0, 5])))
        superseded = frozenset(name for name in chosen if draw(st.integers(0, 5)) == 0)
        result = self._loop.answer(batch, superseded)
        assert result.request_ids == chosen
        for name, row in zip(chosen, result.tokens, strict=True):
            expected = [] if name in superseded else continuation(self._contexts[name], limits[name])
            assert row == expected
        self._drafts.update(self._ledger.settle(result)[0])
        for _ in range(draw(st.integers(0, 6))):
            self._loop.look_ahead()


@settings(max_examples=100)
@given(st.data())
def test_any_course_of_events_gives_the_drafts_of_the_true_context(data):
    loop, _ = loop_of()
    engine = Engine(data, loop)
    for _ in range(data.draw(st.integers(1, 14))):
        engine.step()
