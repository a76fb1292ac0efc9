"""Lives of requests on vLLM's own bookkeeping kernels and those of EAGLE jobs, all by Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.gpu.eagle_lives`. The target's hidden states tell its context, the head's own tell which row they
come from; the head's KV cache is a mapping of slots to what was read. So a wrong token, hidden state, position, slot or block fails, and
so does a hidden state of the head's own where the target's is known.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch

from tests.gpu.lives import BLOCK, BUCKET, COLUMNS, MAX_LEN, SLOTS, VOCAB, K, World, following, integers, lives  # isort: skip

from minedraft_core.vllm.gpu.eagle.kernels import carry, first_rows, shifted  # isort: skip
from minedraft_core.vllm.gpu.kernels import HEADER, Verified, next_inputs, pack, row_width  # isort: skip

LENGTH, COLUMN = K + 1, HEADER + COLUMNS
State = tuple[float, ...]


def seen(context: list[int]) -> State:
    """The target's hidden state of the last token."""
    return (1.0, float(sum(context) % 89), float(following(context)), float(len(context) - 1))


def own(token: int, position: int, read: State) -> State:
    """The head's, of a row."""
    return (2.0, float(token), float(position), float(sum(read) % 83))


class EagleWorld(World):
    """A head beside the target. A cache entry is (token, position, hidden state) as they were read."""

    def remember(self, name: str, tokens: list[int]) -> None:
        """A cached block is one whose next token is cached, too: the rest of it is not known here."""
        context = self.text(name)
        for position, (_, token) in enumerate(pairwise(context[: len(tokens) + 1])):
            self.cache[self._slot(name, position)] = (token, position, seen(context[: position + 1]))

    def _pack(self, verified: Verified, table: torch.Tensor) -> torch.Tensor:
        packed = integers(BUCKET, row_width(COLUMNS + LENGTH))
        pack(packed, verified, torch.zeros(SLOTS), integers(SLOTS, dtype=torch.int64), table)
        return packed

    def _respond(self, ran: SimpleNamespace) -> torch.Tensor:
        contexts: dict[str, list[int]] = {}
        states = torch.zeros(len(ran.owners) + 2, 4)
        for row, (name, token, position) in enumerate(zip(ran.owners, ran.ids.tolist(), ran.positions, strict=True)):
            context = contexts.setdefault(name, self.tokens[self.slots[name], :position].tolist())
            context.append(token)
            states[row] = torch.tensor(seen(context))
        batch: Verified = ran.verified
        starts, sampled = batch.query_start_loc, (batch.num_sampled, batch.num_rejected, batch.last_sampled)
        if ran.prompts:
            ids = shifted(ran.ids, starts, batch.idx_mapping, *sampled, self.next_prefill)
            ends = {name: int(starts[row + 1] - batch.num_rejected[row]) for row, name in enumerate(ran.names)}
            for row, (token, position, name) in enumerate(zip(ids.tolist(), ran.positions, ran.owners, strict=True)):
                if row < ends[name]:
                    self.cache[self._slot(name, position)] = (token, position, tuple(states[row].tolist()))
        hidden = torch.full((BUCKET, LENGTH, 4), -1.0)
        sources = (states[:, :1].contiguous(), states[:, 1:].contiguous())
        carry(ran.packed, COLUMN, hidden, sources, batch)
        return self._draft_from(ran, hidden)

    def _draft_from(self, ran: SimpleNamespace, hidden: torch.Tensor) -> torch.Tensor:
        drafts = integers(BUCKET, K, dtype=torch.int64)
        read = [tuple(state) for state in hidden.flatten(0, 1).tolist()]
        for step in range(K):
            rows = 1 if step else LENGTH
            ids, positions = integers(BUCKET * rows), integers(BUCKET * rows, dtype=torch.int64)
            slots, seq_lens = integers(BUCKET * rows, dtype=torch.int64), integers(BUCKET)
            if step:
                next_inputs(ran.packed, drafts, step, ids, positions, slots, seq_lens, VOCAB, BLOCK, MAX_LEN)
            else:
                state = torch.zeros(BUCKET), integers(BUCKET, dtype=torch.int64)
                first_rows(ran.packed, COLUMN, LENGTH, ids, positions, slots, seq_lens, *state, VOCAB, BLOCK, MAX_LEN)
            inputs = list(zip(ids.tolist(), positions.tolist(), read, strict=True))
            self.cache.update({slot: row for slot, row in zip(slots.tolist(), inputs, strict=True) if slot >= 0})
            read = [own(*inputs[(row + 1) * rows - 1]) for row in range(BUCKET)]
            for row, name in enumerate(ran.names):
                if ran.verified.num_sampled[row]:
                    context = self.text(name) + drafts[row, :step].tolist()
                    self._check(name, context, int(seq_lens[row]))
                    drafts[row, step] = self.guess(context)
        return drafts

    def _check(self, name: str, context: list[int], length: int) -> None:
        """The cache of a request whose last tokens may be drafts, before one more is drafted."""
        assert length == len(context) - 1, name
        known = len(self.text(name)) - 1
        before: State = ()
        for position in range(length):
            state = seen(context[: position + 1]) if position < known else before
            assert self.cache[self._slot(name, position)] == (context[position + 1], position, state), (name, position)
            before = own(context[position + 1], position, state)


if __name__ == "__main__":
    assert SLOTS > BUCKET
    lives(EagleWorld())
    lives(EagleWorld(room=4))
    lives(EagleWorld(room=2))
