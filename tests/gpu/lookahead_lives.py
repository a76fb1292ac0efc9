"""The lives of `lives.py` with a drafter that goes ahead: `TRITON_INTERPRET=1 python -m tests.gpu.lookahead_lives`.

Chains, marks and words run as they do on a GPU, by Triton's interpreter. The drafter is a function of what lies in its KV cache, so a chain
that goes on where it should not, or from the wrong place, gives drafts that `lives.py` finds wrong.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from tests.gpu.lives import BLOCK, BUCKET, MAX_LEN, SLOTS, VOCAB, K, World, integers, lives

# isort: split
from minedraft_core.vllm.gpu.chain_kernels import TALLIES, mark
from minedraft_core.vllm.gpu.chains import FIRST, NEXT, ChainShape, DraftChains
from minedraft_core.vllm.gpu.word_kernels import take


class CacheModel:
    """A draft model whose KV cache is the world's: what it says after a token depends on what lies before it."""

    device = torch.device("cpu")
    vocab_size = VOCAB

    def __init__(self, world: World) -> None:
        self._world = world
        self.ran = 0

    def hidden(self, ids, positions, slots, starts, seq_lens, table, max_query_len, max_seq_len, *, planned):
        for token, position, slot in zip(ids.tolist(), positions.tolist(), slots.tolist(), strict=True):
            if slot >= 0:
                self._world.cache[slot] = (token, position)
                self.ran += 1
        said = torch.zeros(ids.shape[0], 1)
        for row, length in enumerate(seq_lens.tolist()):
            last = int(starts[row + 1]) - 1
            if slots[last] >= 0:
                said[last] = self._world.guess(self._world.context(table[row].tolist(), length))
        return said

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class LookaheadWorld(World):
    """A world whose drafter goes `paces` steps ahead, another number each time."""

    def __init__(self, seed: int, wrong_every: int, paces: tuple[int, ...] = tuple(range(K + 2))) -> None:
        super().__init__(wrong_every=wrong_every)
        self.model = CacheModel(self)
        self._chains = DraftChains(self.model, ChainShape(SLOTS, K, BLOCK, MAX_LEN), None, use_fp64=False)
        self._tallies = integers(1, TALLIES, dtype=torch.int64)
        self._chance, self._paces = random.Random(seed), paces
        self._steps_before = self._number = 0
        self.hits = self.misses = self.discarded = self.early = 0

    def _pack(self, verified, table):
        packed = super()._pack(verified, table)
        mark(packed, verified.idx_mapping, verified.num_rejected, self.computed, self.prefill)
        return packed

    def _draft(self, packed: torch.Tensor) -> torch.Tensor:
        self._chains.settle(packed, self._tallies, 0)
        hits, misses, discarded, _ = self._tallies[0].tolist()
        valid = packed[:, 3] > 0
        early = K + 1 - self._steps_before
        words, drafts = integers(BUCKET, K, dtype=torch.int64), integers(BUCKET, K, dtype=torch.int64)
        seen = None
        for step in range(K):
            if step == early:
                self._chains.publish(words, self._number)
                seen = words.clone()
            self._chains.step(packed, NEXT if step else FIRST, sampled=False)
        self._chains.publish(words, self._number)
        late = integers(1)
        take(words, drafts, late, self._number, 5)
        assert int(late) == 0
        if seen is not None:
            ready = valid & (seen != 0).all(dim=1)
            assert torch.equal(seen[ready], words[ready])
            self.early += int(ready.sum())
        self._steps_before = self._chance.choice(self._paces)
        for _ in range(self._steps_before):
            self._chains.step(packed, NEXT, sampled=False)
        assert int((self._chains._last - self._chains._base).max()) <= 2 * K + 1, "the target has blocks for no more"
        self.hits, self.misses, self.discarded = self.hits + hits, self.misses + misses, self.discarded + discarded
        self._number += 1
        return drafts


def alone(wrong_every: int) -> LookaheadWorld:
    """One request whose drafter always goes as far as it may: chains get as long as they can be."""
    world = LookaheadWorld(0, wrong_every, (K + 1,))
    world.add("a", 2, [5, 6, 7], list(range(1, 21)))
    world.step(a=(3, 0))
    for _ in range(12):
        world.step(a=(1, K))
    for drafts in (0, K, 0, 0, 1, K):
        world.step(a=(1, drafts))
    return world


def main() -> None:
    """Lives with several paces, with drafters that are right more and less often; then requests alone."""
    found = SimpleNamespace(hits=0, misses=0, discarded=0, early=0)
    for seed, wrong_every in enumerate((5, 9, 13, 1000)):
        world = LookaheadWorld(seed, wrong_every)
        lives(world)
        for name in vars(found):
            setattr(found, name, getattr(found, name) + getattr(world, name))
    assert found.hits > 5, found
    assert found.misses > 5, found
    assert found.discarded > found.misses, found
    assert found.early > 5, found
    sure, doubtful = alone(1000), alone(9)
    assert (sure.hits, sure.misses, sure.early) == (18, 0, 18), vars(sure)
    assert sure.model.ran <= len(sure.text("a")) + 2 * K + 2 * 19, "what was drafted ahead is not drafted again"
    assert min(doubtful.hits, doubtful.misses) > 1
    assert doubtful.hits + doubtful.misses == 18


if __name__ == "__main__":
    main()
