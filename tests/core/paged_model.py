"""A deterministic language model over a paged KV cache that notices every entry which is missing, stale or another request's."""

from __future__ import annotations

from minedraft_core.vllm.cpu.query import Chosen

VOCABULARY = 1009
_SEED = 7


def _extend(state, token):
    return hash((state, token)) & 0xFFFFFFFFFFFF


def _choose(state, draw):
    return (state if draw is None else hash((state, draw))) % VOCABULARY


def continuation(context, count):
    """What greedy decoding gives after a context."""
    state = _SEED
    for token in context:
        state = _extend(state, token)
    tokens = []
    for _ in range(count):
        tokens.append(state % VOCABULARY)
        state = _extend(state, tokens[-1])
    return tokens


class PagedModel:
    """The next token depends on the prefix as the cache holds it, so wrong bookkeeping shows as a wrong token or an error."""

    scored = False

    def __init__(self, num_blocks, block_size):
        self._num_blocks, self._block_size = num_blocks, block_size
        self._entries = {}
        self.passes = []

    @staticmethod
    def token(context, draw):
        """What follows a context, drawn."""
        state = _SEED
        for token in context:
            state = _extend(state, token)
        return _choose(state, draw)

    def run(self, queries):
        self.choose(queries, [None] * len(queries))

    def choose(self, queries, draws):
        self.passes.append([(len(query.tokens), query.start) for query in queries])
        owners = [block for query in queries for block in query.blocks]
        assert len(owners) == len(set(owners)), "two requests share a block"
        assert all(0 < block < self._num_blocks for block in owners), "block 0 is for padding"
        chosen = []
        for query, draw in zip(queries, draws, strict=True):
            assert query.tokens
            state = self._read(query)
            for position, token in enumerate(query.tokens, start=query.start):
                before, state = state, _extend(state, token)
                self._entries[self._slot(query, position)] = before, state
            chosen.append(_choose(state, draw))
        return Chosen(chosen, [-float(token) for token in chosen] if self.scored else [])

    def _slot(self, query, position):
        return query.blocks[position // self._block_size], position % self._block_size

    def _read(self, query):
        state = _SEED
        for position in range(query.start):
            assert self._slot(query, position) in self._entries, f"position {position} was never written"
            before, after = self._entries[self._slot(query, position)]
            assert before == state, f"position {position} belongs to another context"
            state = after
        return state
