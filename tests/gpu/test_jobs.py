"""When jobs land."""

from __future__ import annotations

from minedraft_core.vllm.gpu.jobs import DraftJob, PendingJobs


def job(number: int, *request_ids: str) -> DraftJob:
    return DraftJob(number, number % 4, frozenset(request_ids), None, len(request_ids), sampled=False)


def test_jobs_land_in_order_up_to_the_one_that_is_needed() -> None:
    pending = PendingJobs(4)
    jobs = [job(0, "a", "b"), job(1, "c"), job(2, "a"), job(3, "d")]
    for each in jobs:
        pending.add(each)
    assert pending.due(["x"]) == []
    assert pending.due(["c", "x"]) == jobs[:2]
    assert pending.due(["a"]) == [jobs[2]]
    assert pending.due(["a", "b", "c"]) == []
    assert pending.due(["d"]) == [jobs[3]]


def test_a_full_ring_makes_room_for_one() -> None:
    pending = PendingJobs(2)
    assert pending.overdue() == []
    first, second = job(0, "a"), job(1, "b")
    pending.add(first)
    assert pending.overdue() == []
    pending.add(second)
    assert pending.overdue() == [first]
    assert pending.due(["b"]) == [second]
