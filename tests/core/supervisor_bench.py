"""A supervisor over a scripted drafter and a clock moved by hand."""

from __future__ import annotations

import msgspec
from core_doubles import Clock, ScriptedDrafter

from minedraft_core.config import DrafterConfig
from minedraft_core.drafter import DrafterError
from minedraft_core.ledger import Context
from minedraft_core.supervisor import DraftSupervisor
from minedraft_core.types import Draft

CONFIG = DrafterConfig(start_timeout=20.0, answer_timeout=10.0, restart_backoff=1.0, restart_backoff_max=8.0)
DIED = DrafterError("died", "the draft process ended with code -9")
VOCABULARY = 100


class Bench:
    """A supervisor, its clock, every drafter it launched and every record it gave."""

    def __init__(self, *scripts, config=CONFIG):
        """`scripts` are the settings of the drafters launched in turn, the last one for all that follow; a fault is a failed launch."""
        self.clock, self.records, self.drafters, self.launches = Clock(), [], [], 0
        self._scripts = scripts or ({},)
        self.supervisor = DraftSupervisor(self._launch, config, VOCABULARY, self.records.append, self.clock)

    def _launch(self):
        script = self._scripts[min(self.launches, len(self._scripts) - 1)]
        self.launches += 1
        if isinstance(script, DrafterError):
            raise script
        self.drafters.append(ScriptedDrafter(self.clock, **script))
        return self.drafters[-1]

    def started(self):
        self.supervisor.start()
        return self.supervisor

    def order(self, **contexts):
        self.supervisor.order({name: Context(tokens, 9) for name, tokens in contexts.items()}, 3)


def expected_drafts(tokens, count=3):
    return Draft([(sum(tokens) + step) % 100 for step in range(count)])


def spoil(**changes):
    """An edit that replaces fields of an answer; callables get the answer."""
    return lambda answer: msgspec.structs.replace(answer, **{key: value(answer) for key, value in changes.items()})
