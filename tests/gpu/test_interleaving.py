"""The lookahead engine on two devices whose streams run in any order that events allow, with the host two passes ahead.

What is enqueued is kept in queues, one a stream, and a random choice of them goes on. So a buffer that is filled anew too early, a missing
event, or a draft taken before its logits shows as a wrong draft or logit at the end of some pass. Memory that the host lets go of is used
anew by the target's next pass, as CUDA's allocator does, unless another stream was named for it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from minedraft_core.vllm.gpu import chains, draws, lookahead, word_kernels
from minedraft_core.vllm.gpu.chain_kernels import MARK
from minedraft_core.vllm.gpu.engine import RING, DraftEngine, Shape
from minedraft_core.vllm.gpu.jobs import DraftJob
from minedraft_core.vllm.gpu.lookahead import LookaheadEngine
from tests.gpu.quiet_cuda import quieten

TARGET, DRAFTER = torch.device("cpu", 0), torch.device("cpu", 1)
K, SLOTS, VOCAB, BLOCK, MAX_LEN = 3, 4, 40, 16, 256
LONGEST = 16  # operations of a verification, at most
AHEAD = 2  # passes that the host has enqueued and the target has not ended
WRONG = 17  # the drafter is wrong after every token that this divides


def following(token: int) -> int:
    return (token + 1) % VOCAB


def guess(token: int) -> int:
    return (token + 1 + (token % WRONG == 0)) % VOCAB


class Machine:
    """Streams and what they have to do."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.streams: list[Stream] = []
        self.recording = False
        self.on_target: set[int] = set()
        self.held: list[torch.Tensor] = []
        self.current = {0: Stream(self), 1: Stream(self)}

    def stream_of(self, tensor: torch.Tensor) -> Stream:
        return self.current[int(tensor.untyped_storage().data_ptr() not in self.on_target)]

    @contextmanager
    def enqueueing(self) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def run(self, steps: int | None = None) -> None:
        """Let random streams go on: so many times, or until nothing is left to do."""
        while steps is None or steps > 0:
            ready = [stream for stream in self.streams if stream.ops]
            if not ready:
                return
            moved = [stream for stream in self.choose.sample(ready, len(ready)) if stream.advance()]
            assert moved, "every stream waits"
            steps = None if steps is None else steps - 1


class Stream:
    """Operations in order. One that returns False is tried again later."""

    def __init__(self, machine: Machine) -> None:
        self.ops: deque[Callable[[], object]] = deque()
        machine.streams.append(self)

    def advance(self) -> bool:
        if not self.ops or self.ops[0]() is False:
            return False
        self.ops.popleft()
        return True

    def wait_event(self, event: Event) -> None:
        wanted = event.recorded
        self.ops.append(lambda: event.reached >= wanted)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """How often it was recorded, and how many of these were reached."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        stream.ops.append(self._reach)

    def _reach(self) -> None:
        self.reached += 1


class TableModel:
    """Guesses from the last token alone; the logits are one-hot."""

    device, vocab_size, building = DRAFTER, VOCAB, nullcontext

    def bind_cache(self, *_sizes: int) -> None:
        pass

    def hidden(self, ids: torch.Tensor, *_inputs: Any, planned: bool) -> torch.Tensor:
        return ids[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([guess(int(token)) for token in hidden[:, 0]]), VOCAB).float()


class Engine(LookaheadEngine):
    """Replays steps in the place of graphs."""

    machine: Machine

    def _captured(self, run: Any, pool: Any) -> Any:
        class Graph:
            replay = staticmethod(run)

        return Graph()

    def _warm_up(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    quieten(monkeypatch)
    made = Machine(request.param)
    order: dict[str, Any] = {"device": lambda *_args: nullcontext()}

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        device = chosen.device
        before, made.current[device] = made.current[device], chosen
        yield
        made.current[device] = before

    def new_stream(device: torch.device) -> Stream:
        created = Stream(made)
        created.device = device.index
        return created

    order |= {"stream": stream, "Stream": new_stream, "Event": Event, "current_stream": lambda device: made.current[device.index]}
    for name, fake in order.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    copy, index_copy = torch.Tensor.copy_, torch.Tensor.index_copy_

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not made.recording:
            return copy(self, source)
        there, here = made.stream_of(source), made.stream_of(self)
        if there is not here:
            there.wait_stream(here)
        there.ops.append(lambda: copy(self, source) is not None)
        if there is not here:
            here.wait_stream(there)
        return self

    def index_copied(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not made.recording:
            return index_copy(self, dim, index, source)
        made.stream_of(self).ops.append(lambda: index_copy(self, dim, index, source) is not None)
        return self

    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _stream: made.held.append(tensor))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "index_copy_", index_copied)
    for name in ("settle", "step", "publish", "gather"):
        _defer(monkeypatch, made, name)
    monkeypatch.setattr(draws, "gumbel_sample", _draw)
    monkeypatch.setattr(lookahead, "take", lambda *args: _take(made, *args))
    monkeypatch.setattr(lookahead, "certain_where_late", lambda *_args: None)
    return made


def _defer(monkeypatch: pytest.MonkeyPatch, machine: Machine, name: str) -> None:
    original = getattr(chains.DraftChains, name)

    def enqueue(self: chains.DraftChains, *args: Any, **options: Any) -> None:
        if machine.recording:
            machine.current[1].ops.append(lambda: original(self, *args, **options))
        else:
            original(self, *args, **options)

    monkeypatch.setattr(chains.DraftChains, name, enqueue)


def _draw(
    logits: torch.Tensor, idx: torch.Tensor, *_state: Any, logits_cache: torch.Tensor, logits_cache_col: torch.Tensor, **_options: Any
):
    kept = torch.nonzero(idx >= 0).flatten()
    logits_cache[idx[kept].long(), logits_cache_col[kept]] = logits[kept]
    return logits.argmax(dim=-1)


def _take(machine: Machine, words: torch.Tensor, tokens: torch.Tensor, late: torch.Tensor, number: int, _patience: int) -> None:
    missing = torch.zeros_like(late)

    def look() -> bool:
        word_kernels.take_reference(words, tokens, missing, number)
        return not int(missing)

    machine.current[0].ops.append(look)


class Target:
    """Verifies drafts and packs the outcome, all on the device; checks at the end of each pass what it took."""

    def __init__(self, machine: Machine, engine: Engine, logits: torch.Tensor, *, sampled: bool) -> None:
        self._machine, self._engine, self._logits, self._sampled = machine, engine, logits, sampled
        self.drafts = torch.zeros(SLOTS, K, dtype=torch.int64)
        self.last = {slot: (10 * slot + 1, 10 * slot + 2, 4 + slot) for slot in range(SLOTS)}
        self.follows = dict.fromkeys(range(SLOTS), False)
        self.accepted: list[int] = []
        self.passes = 0

    def enqueue_pass(self, number: int, before: DraftJob | None, slots: list[int]) -> DraftJob:
        """Land the drafts of the job before, verify them, pack, and start the next job."""
        main = self._machine.current[0]
        job = DraftJob(number, number % RING, frozenset(), torch.tensor(slots), len(slots), sampled=self._sampled)
        if before is not None:
            tokens, landed = self._engine.land(before), before.idx.tolist()
            main.ops.append(lambda: self._accept(before, tokens))
            if not any(tensor is before.idx for tensor in self._machine.held):
                main.ops.append(lambda: before.idx.copy_(job.idx) is not None)
            main.ops.extend([lambda: True] * self._machine.choose.randint(0, LONGEST))
            main.ops.append(lambda: self._verify(landed))
        rows = self._engine.rows(job.slot, job.num_reqs)
        main.ops.append(lambda: self._pack(rows, slots))
        self._engine.start(job, None, drafts=K)
        return job

    def _accept(self, job: DraftJob, tokens: torch.Tensor) -> None:
        self.drafts[job.idx] = tokens

    def _verify(self, slots: list[int]) -> None:
        for slot in slots:
            _, token, position = self.last[slot]
            expected = [guess(token)]
            while len(expected) < K:
                expected.append(guess(expected[-1]))
            assert self.drafts[slot].tolist() == expected
            if self._sampled:
                assert self._logits[slot].argmax(dim=-1).tolist() == expected
            got = [token]
            for draft in expected:
                got.append(following(got[-1]))
                if draft != got[-1]:
                    break
            else:
                got.append(following(got[-1]))
            self.last[slot] = (got[-2], got[-1], position + len(got) - 1)
            self.follows[slot] = got[1 : 1 + K] == expected
            self.accepted.append(len(got) - 2)
        self.passes += 1

    def _pack(self, rows: torch.Tensor, slots: list[int]) -> None:
        rows.zero_()
        rows[:, 2] = 1
        for row, slot in enumerate(slots):
            rows[row, :4] = torch.tensor([*self.last[slot], 1], dtype=torch.int32)
            rows[row, MARK] = slot + 1 if self.follows[slot] else -slot - 1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("machine", range(8), indirect=True)
def test_every_order_gives_the_same_drafts(machine: Machine, *, sampled: bool) -> None:
    logits = torch.zeros(SLOTS, K, VOCAB)
    engine = Engine(TableModel(), TARGET, logits, use_fp64=False)
    engine.allocate(Shape(SLOTS, K, -(-MAX_LEN // BLOCK), BLOCK, MAX_LEN), 64)
    engine.capture()
    machine.run()
    on_target = (engine._packs, engine._landing, engine._staging, engine._draft_logits, engine._tokens)
    machine.on_target = {tensor.untyped_storage().data_ptr() for tensor in on_target}
    target = Target(machine, engine, logits, sampled=sampled)
    job: DraftJob | None = None
    for number in range(40):
        with machine.enqueueing():
            engine.pace(machine.choose.randint(0, K + 1))
            job = target.enqueue_pass(number, job, machine.choose.sample(range(SLOTS), SLOTS))
        machine.run(machine.choose.randint(0, 60))
        while number - target.passes >= AHEAD:
            machine.run(1)
    machine.run()
    assert isinstance(engine, DraftEngine)
    assert int(engine._log.tallies[:40, 0].sum()) > 10
    assert 0 < sum(target.accepted) < K * len(target.accepted)
