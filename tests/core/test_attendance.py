"""A drafter is looked after while the engine loop rests; the clock is a real one here."""

import threading
import time

import pytest
from core_doubles import ScriptedDrafter
from supervisor_bench import DIED, VOCABULARY

from minedraft_core.attendance import AttendedDrafting
from minedraft_core.config import DrafterConfig
from minedraft_core.drafter import DrafterError
from minedraft_core.ledger import Context
from minedraft_core.supervisor import DraftSupervisor

CONFIG = DrafterConfig(start_timeout=5.0, answer_timeout=5.0, restart_backoff=0.05, restart_backoff_max=0.1)


class Attended:
    """A supervised drafter with its attendant; every drafter launched, every record and the thread that gave it."""

    def __init__(self, interval=0.01):
        self.drafters, self.records, self.threads = [], [], []
        supervisor = DraftSupervisor(self._launch, CONFIG, VOCABULARY, self._report)
        supervisor.start()
        self.drafting = AttendedDrafting(supervisor, interval)

    def _launch(self):
        self.drafters.append(ScriptedDrafter(StillClock()))
        return self.drafters[-1]

    def _report(self, record):
        self.records.append(record)
        self.threads.append(threading.current_thread().name)


class StillClock:
    now = 0.0


@pytest.fixture
def attended():
    found = Attended()
    yield found
    found.drafting.close()


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_death_is_noticed_and_mended_without_a_request(attended):
    attended.drafters[0].faults["collect"] = DIED
    until(lambda: len(attended.records) == 3)
    assert [(record.up, record.restarted) for record in attended.records] == [(True, False), (False, False), (True, True)]
    assert attended.threads == ["MainThread", "drafter-attendance", "drafter-attendance"]
    assert attended.drafters[0].closed == 1
    attended.drafting.order({"a": Context([1, 2], 9)}, 3)
    assert attended.drafting.gather(["a"]).drafts["a"].tokens == [3, 4, 5]


def test_faults_in_a_row_pause_longer(attended):
    attended.drafters[0].faults["collect"] = DrafterError("failed", "out of memory")
    until(lambda: len(attended.drafters) == 2)
    attended.drafters[1].faults["ready"] = attended.drafters[1].faults["collect"] = DIED
    until(lambda: len(attended.drafters) == 3)
    down = [record for record in attended.records if not record.up]
    assert [record.reason for record in down] == ["failed", "died"]


def test_answers_that_come_in_between_are_kept(attended):
    attended.drafting.order({"a": Context([1], 9)}, 3)
    drafter = attended.drafters[0]
    until(lambda: not drafter._due)
    gathered = attended.drafting.gather(["a"])
    assert gathered.drafts["a"].tokens == [1, 2, 3]
    assert [answer.round for answer in gathered.answers] == [1]


def test_the_engine_loop_and_the_attendant_take_turns():
    attended = Attended(interval=0.0)
    inside, overlaps = threading.Lock(), []

    def guarded(method):
        def call(*arguments):
            if not inside.acquire(blocking=False):
                overlaps.append(method.__name__)
                return method(*arguments)
            try:
                time.sleep(0.0005)
                return method(*arguments)
            finally:
                inside.release()

        return call

    drafter = attended.drafters[0]
    drafter.collect, drafter.start, drafter.forget = guarded(drafter.collect), guarded(drafter.start), guarded(drafter.forget)
    tokens = [1]
    for _ in range(50):
        attended.drafting.order({"a": Context(list(tokens), 9)}, 3)
        assert "a" in attended.drafting.gather(["a"]).drafts
        tokens.append(1)
    attended.drafting.forget("a")
    attended.drafting.close()
    assert overlaps == []
    assert len(drafter.waits) > 50


def test_closing_ends_the_thread_and_nothing_is_launched_after_it():
    attended = Attended()
    attended.drafting.close()
    assert "drafter-attendance" not in [thread.name for thread in threading.enumerate()]
    time.sleep(0.2)
    assert len(attended.drafters) == 1
    assert attended.drafters[0].closed == 1
