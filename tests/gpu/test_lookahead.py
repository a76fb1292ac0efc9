"""The lookahead engine on CPU, in the order in which it enqueues: what is drafted when, what lands, and the law of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from minedraft_core.acceptance import accept_probabilistic
from minedraft_core.types import Lookahead, Span
from minedraft_core.vllm.gpu import draws, pearl
from minedraft_core.vllm.gpu.chain_kernels import MARK, mark_reference
from minedraft_core.vllm.gpu.engine import RING, Shape
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.kernels import row_width
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from minedraft_core.vllm.gpu.timing import JobTicket
from tests.gpu.quiet_cuda import TableModel, counting, quieten

CPU = torch.device("cpu")
K, BLOCK, MAX_LEN = 3, 16, 512


class Step:
    """What replays in the place of a captured graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Engine(LookaheadEngine):
    """Notes what it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.done: list[str] = []
        self.published: list[list[bool]] = []

    def _captured(self, run: Any, pool: Any) -> Step:
        _, width = run.args

        def noted() -> None:
            self.done.append("first" if width == 2 else "next")
            run()

        return Step(noted)

    def _publish(self, job: DraftJob) -> None:
        super()._publish(job)
        self.done.append("publish")
        self.published.append((self._landing[job.slot, : job.num_reqs, 0] > 0).tolist())


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    quieten(monkeypatch)
    monkeypatch.setattr(pearl, "mark", mark_reference)


def made(model: TableModel, slots: int, *, logits: torch.Tensor | None = None) -> Engine:
    engine = Engine(model, CPU, logits, use_fp64=False)
    engine.allocate(Shape(slots, K, -(-MAX_LEN // BLOCK), BLOCK, MAX_LEN), 64)
    engine.capture()
    engine.done.clear()
    engine.published.clear()
    return engine


def order(engine: Engine, number: int, rows: dict[int, tuple[int, int, int, bool]], *, sampled: bool = False) -> DraftJob:
    """A job for slot: (token before, last token, its position, whether its chain may go on)."""
    job = DraftJob(number, number % RING, frozenset(), torch.tensor(list(rows)), len(rows), sampled)
    packed = engine.rows(job.slot, job.num_reqs)
    packed.zero_()
    packed[:, 2] = 1
    for row, (slot, (before, token, position, follows)) in enumerate(rows.items()):
        packed[row, :4] = torch.tensor([before, token, position, 1], dtype=torch.int32)
        packed[row, MARK] = slot + 1 if follows else -slot - 1
        packed.view(torch.float32)[row, 4] = float(sampled)
        packed.view(torch.int64)[row, 3] = slot
    engine.start(job, None, drafts=K)
    return job


def test_a_hit_is_published_before_anything_is_drafted() -> None:
    engine = made(counting(), 2)
    engine.pace(K + 1)
    job = order(engine, 0, {1: (4, 5, 10, False)})
    assert engine.land(job).tolist() == [[6, 7, 8]]
    assert engine.done == ["first", "next", "next", "publish", *["next"] * (K + 1)]
    engine.done.clear()
    job = order(engine, 1, {1: (8, 9, 14, True)})
    assert engine.done[:2] == ["publish", "first"]
    assert engine.published[1:] == [[True], [True]]
    assert engine.land(job).tolist() == [[10, 11, 12]]
    job = order(engine, 2, {1: (12, 13, 18, True)})
    assert engine.published[3:] == [[True], [True]], "the k steps after a hit drafted ahead"


def test_with_fewer_steps_ahead_the_rest_is_drafted_first() -> None:
    engine = made(counting(), 2)
    engine.pace(2)
    order(engine, 0, {0: (4, 5, 10, False)})
    engine.done.clear()
    job = order(engine, 1, {0: (8, 9, 14, True)})
    assert engine.done[:5] == ["first", "next", "publish", "next", "publish"]
    assert engine.published[1] == [True]
    assert engine.land(job).tolist() == [[10, 11, 12]]


@pytest.mark.parametrize(
    "after", [(8, 9, 14, False), (8, 30, 14, True), (6, 30, 12, False)], ids=["rejected or fresh", "another token", "short"]
)
def test_a_miss_is_drafted_anew_and_counted(after: tuple[int, int, int, bool]) -> None:
    engine = made(counting(), 2)
    engine.pace(K + 1)
    order(engine, 0, {1: (4, 5, 10, False)})
    job = order(engine, 1, {1: after})
    assert engine.published[1:] == [[False], [True]]
    assert engine.land(job).tolist() == [[after[1] + step for step in (1, 2, 3)]]
    timer = engine.timer
    span = Span(timer.host_us(JobTicket(0, 1).end), 1)
    assert engine._log.read(JobTicket(1, 1)) == Lookahead(0, 1, K + 1, span)


def test_a_batch_goes_on_early_only_where_all_hit() -> None:
    engine = made(counting(), 4)
    engine.pace(K + 1)
    order(engine, 0, {3: (4, 5, 10, False), 0: (20, 21, 30, False)})
    job = order(engine, 1, {0: (24, 25, 34, True), 3: (5, 40, 11, False)})
    assert engine.published[1] == [True, False]
    assert engine.land(job).tolist() == [[26, 27, 28], [41, 42, 43]]
    assert engine._log.tallies[1, :3].tolist() == [1, 1, K + 1]
    job = order(engine, 2, {3: (43, 44, 15, True), 0: (28, 29, 38, True)})
    assert engine.published[3] == [True, True]
    assert engine.land(job).tolist() == [[45, 46, 47], [30, 31, 32]]


def test_without_steps_ahead_it_drafts_as_ever() -> None:
    engine = made(counting(), 2)
    order(engine, 0, {0: (4, 5, 10, False)})
    assert engine.done == ["first", "next", "next", "publish"]
    job = order(engine, 1, {0: (8, 9, 14, True)})
    assert engine.done[4:] == ["first", "next", "next", "publish"]
    assert engine.land(job).tolist() == [[10, 11, 12]]
    assert engine._log.read(JobTicket(1, 1)) is None


def test_hits_without_steps_ahead_are_told_at_their_time() -> None:
    """The k steps after a hit draft ahead, too, where the engine has none to make after a draft."""
    engine = made(counting(), 2)
    engine.pace(K + 1)
    order(engine, 0, {0: (4, 5, 10, False)})
    engine.pace(0)
    order(engine, 1, {0: (8, 9, 14, True)})
    order(engine, 2, {0: (12, 13, 18, True)})
    ended = engine.timer.host_us(JobTicket(1, 1).end)
    assert ended is not None
    assert engine._log.read(JobTicket(2, 1)) == Lookahead(1, 0, 0, Span(ended, ended))


def test_where_logits_go_is_kept_until_they_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target forgets a job once it has its words, while the last publication is under way: CUDA must not give the memory away."""
    monkeypatch.setattr(draws, "gumbel_sample", lambda logits, *_args, **_options: logits.argmax(dim=-1))
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _stream: kept.append(tensor))
    engine = made(counting(), 4, logits=torch.zeros(4, K, 50))
    order(engine, 0, {2: (4, 5, 10, False)})
    assert kept == []
    job = order(engine, 1, {2: (4, 5, 10, False)}, sampled=True)
    assert len(kept) == 1
    assert kept[0] is job.idx


def test_drafts_that_do_not_come_are_certain_and_give_the_drafter_up() -> None:
    logits = torch.zeros(4, K, 50)
    engine = made(counting(), 4, logits=logits)
    job = order(engine, 0, {2: (4, 5, 10, False)})
    engine._landing.zero_()
    job = DraftJob(0, 0, frozenset(), job.idx, 1, sampled=True)
    assert engine.land(job).tolist() == [[0, 0, 0]]
    assert torch.softmax(logits[2], dim=-1)[:, 0].tolist() == [1.0] * K
    with pytest.raises(RuntimeError, match="did not come"):
        order(engine, 1, {2: (4, 5, 10, False)})


def test_marks_need_all_accepted_and_no_prompt() -> None:
    rows = torch.zeros(3, row_width(4), dtype=torch.int32)
    proposer = SimpleNamespace(
        _states=SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=torch.tensor([9, 9, 5, 9], dtype=torch.int32)),
            prefill_len=SimpleNamespace(gpu=torch.tensor([5, 5, 5, 5], dtype=torch.int32)),
        )
    )
    batch = SimpleNamespace(idx_mapping=torch.tensor([3, 0, 2]))
    mark_reference(
        rows, batch.idx_mapping, torch.tensor([0, 1, 0]), proposer._states.num_computed_tokens.gpu, proposer._states.prefill_len.gpu
    )
    assert rows[:, MARK].tolist() == [4, -1, -3]


def test_the_law_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains drawn ahead, verified by speculative sampling with the logits that landed: every transition is the target's."""
    generator = torch.Generator().manual_seed(3)
    vocabulary, slots, rounds = 4, 256, 60
    target = torch.softmax(1.5 * torch.randn(vocabulary, vocabulary, generator=generator), dim=-1)
    draft = target.log() + 0.7 * torch.randn(vocabulary, vocabulary, generator=generator)
    noise = -torch.empty(slots, MAX_LEN, vocabulary).exponential_(generator=generator).log()

    def draw(logits, idx, temperature, seeds, positions, *, logits_cache, logits_cache_col, **_options):
        kept = torch.nonzero(idx >= 0).flatten()
        logits_cache[idx[kept].long(), logits_cache_col[kept]] = logits[kept]
        drawn = logits.argmax(dim=-1)
        drawn[kept] = (logits[kept] + noise[seeds[idx[kept].long()], positions[kept]]).argmax(dim=-1)
        return drawn

    monkeypatch.setattr(draws, "gumbel_sample", draw)
    logits = torch.zeros(slots, K, vocabulary)
    engine = made(TableModel(draft), slots, logits=logits)
    tokens = torch.zeros(slots, 2, dtype=torch.int64)
    positions = torch.full((slots,), 4)
    follows = torch.zeros(slots, dtype=torch.bool)
    seen = torch.zeros(vocabulary, vocabulary)
    pairs = torch.zeros(vocabulary, vocabulary, vocabulary)
    hits = 0
    for number in range(rounds):
        engine.pace(int(torch.randint(0, K + 2, (1,), generator=generator)))
        shuffled = torch.randperm(slots, generator=generator).tolist()
        rows = {slot: (*tokens[slot].tolist(), int(positions[slot]), bool(follows[slot])) for slot in shuffled}
        job = order(engine, number, rows, sampled=True)
        idx = job.idx
        drafts = engine.land(job)
        last = tokens[idx, 1]
        laws = torch.stack([target[last], *(target[drafts[:, step]] for step in range(K))], dim=1)
        delivered = accept_probabilistic(
            laws,
            drafts,
            torch.softmax(logits[idx], dim=-1),
            torch.rand(slots, K, generator=generator),
            torch.empty(slots, K + 1, vocabulary).exponential_(generator=generator),
        )
        for row, slot in enumerate(idx.tolist()):
            got = [token for token in delivered[row].tolist() if token >= 0]
            text = [*tokens[slot].tolist(), *got]
            for at in range(2, len(text)):
                seen[text[at - 1], text[at]] += 1
                pairs[text[at - 2], text[at - 1], text[at]] += 1
            tokens[slot] = torch.tensor(text[-2:])
            positions[slot] += len(got)
            follows[slot] = len(got) == K + 1
        hits += engine._log.tallies[number, 0]
    assert hits > 100
    for last in range(vocabulary):
        assert chisquare(seen[last], seen[last].sum() * target[last]).pvalue > 1e-3, last
        for before in range(vocabulary):
            count = pairs[before, last]
            if count.sum() > 500:
                assert chisquare(count, count.sum() * target[last]).pvalue > 1e-4, (before, last)
