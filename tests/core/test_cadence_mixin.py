"""The cadence over a scheduler's running requests, without a scheduler's weight: the mixin on a base that only records."""

from types import SimpleNamespace

import pytest

from minedraft_core.sides import cadence_of
from minedraft_core.types import Mode
from minedraft_core.vllm.scheduler import CadenceMixin


class Base:
    """What the mixin asks of vLLM's scheduler."""

    def __init__(self):
        self.requests, self.calls = {}, []

    @property
    def running(self):
        return list(self.requests.values())

    def _update_after_schedule(self, scheduler_output):
        self.calls.append("update")

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        self.calls.append(("preempt", timestamp, drop_stale_output))
        request.next_decode_eligible_step = 5

    def _free_request(self, request, delay_free_blocks=False):
        self.calls.append(("free", delay_free_blocks))
        del self.requests[request.request_id]
        return {"free": True}, None


class Scheduler(CadenceMixin, Base):
    """The mixin over the base."""

    def __init__(self, mode):
        super().__init__()
        self.cadence = cadence_of(mode)

    def add(self, *names, prefill_chunk=False):
        for name in names:
            self.requests[name] = SimpleNamespace(request_id=name, next_decode_eligible_step=0, is_prefill_chunk=prefill_chunk)

    def step(self):
        """The names scheduled; as in vLLM a request is scheduled once the step has reached its eligible step."""
        self.begin_turn()
        names = [name for name, request in self.requests.items() if request.next_decode_eligible_step <= 1_000_000]
        self._update_after_schedule(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)))
        return set(names)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SEQUENTIAL, Mode.PEARL])
def test_one_side_schedules_everyone(mode):
    scheduler = Scheduler(mode)
    scheduler.add("a", "b", "c")
    assert [scheduler.step() for _ in range(3)] == [{"a", "b", "c"}] * 3


def test_two_sides_are_scheduled_in_turn_and_newcomers_at_once():
    scheduler = Scheduler(Mode.PARALLEL)
    scheduler.add("a", "b", "c", "d")
    assert scheduler.step() == {"a", "b", "c", "d"}, "prefill waits for no turn"
    first, second = scheduler.step(), scheduler.step()
    assert len(first) == len(second) == 2
    assert first | second == {"a", "b", "c", "d"}
    scheduler.add("e")
    assert scheduler.step() == first | {"e"}
    assert "e" in scheduler.cadence
    assert scheduler.step() | scheduler.step() == {"a", "b", "c", "d", "e"}


def test_a_request_takes_part_after_its_last_prefill_chunk():
    scheduler = Scheduler(Mode.PARALLEL)
    scheduler.add("a", prefill_chunk=True)
    assert scheduler.step() == {"a"}
    assert "a" not in scheduler.cadence
    scheduler.requests["a"].is_prefill_chunk = False
    assert scheduler.step() == {"a"}
    assert "a" in scheduler.cadence


def test_a_preempted_request_leaves_and_is_eligible_at_once():
    scheduler = Scheduler(Mode.PARALLEL)
    scheduler.add("a", "b")
    scheduler.step()
    request = scheduler.requests["a"]
    scheduler._preempt_request(request, 1.5, drop_stale_output=True)
    assert scheduler.calls[-1] == ("preempt", 1.5, True)
    assert request.next_decode_eligible_step == 0
    assert "a" not in scheduler.cadence
    assert "a" in scheduler.step()


def test_a_finished_request_leaves_and_the_rest_goes_on():
    scheduler = Scheduler(Mode.PARALLEL)
    scheduler.add("a", "b")
    scheduler.step()
    assert scheduler._free_request(scheduler.requests["a"], delay_free_blocks=True) == ({"free": True}, None)
    assert scheduler.calls[-1] == ("free", True)
    assert "a" not in scheduler.cadence
    assert [scheduler.step() for _ in range(3)] == [{"b"}] * 3
