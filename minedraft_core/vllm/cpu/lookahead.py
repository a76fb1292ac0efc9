"""What became of the tokens that the draft process drafted ahead."""

from __future__ import annotations

from minedraft_core.types import Lookahead, Span


class LookaheadTally:
    """Counts between two answers."""

    def __init__(self) -> None:
        self._hits, self._misses, self._discarded = 0, 0, 0
        self._span: Span | None = None

    def settle(self, tokens: int, *, hit: bool) -> None:
        """A request for which so many tokens were drafted ahead went on: along them, or not."""
        self._hits += hit
        self._misses += not hit
        self._discarded += 0 if hit else tokens

    def work(self, span: Span) -> None:
        """A pass over requests that are drafted ahead for."""
        self._span = span if self._span is None else Span(self._span.start_us, span.end_us)

    def take(self) -> Lookahead | None:
        """What was counted since the last call; None where nothing was drafted ahead and nothing became of it."""
        if self._span is None and not self._hits and not self._misses:
            return None
        taken = Lookahead(self._hits, self._misses, self._discarded, self._span or Span(0, 0))
        self._hits, self._misses, self._discarded, self._span = 0, 0, 0, None
        return taken
