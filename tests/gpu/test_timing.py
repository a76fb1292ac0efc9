"""Device stamps on the host's clock."""

from __future__ import annotations

from minedraft_core.vllm.gpu.timing import DeviceClock, DraftTimes, JobTicket, PassTicket, PassTimer, PassTimes

SECOND = 1_000_000_000


def test_the_offset_is_the_least_of_recent_probes() -> None:
    clock = DeviceClock()
    for launched, latency in ((0, 9_000), (100, 4_000), (200, 50_000)):
        clock.add(launched, launched + 7 * SECOND + latency)
    assert clock.offset_ns == 7 * SECOND + 4_000
    assert clock.host_us(7 * SECOND + 4_000 + 25_000) == 25


def test_old_probes_are_forgotten() -> None:
    clock = DeviceClock()
    clock.add(0, 1_000)
    clock.add(6 * SECOND, 6 * SECOND + 9_000)
    assert clock.offset_ns == 9_000


class Timer:
    """Stamps by index, in microseconds."""

    def __init__(self, stamps: dict[int, int]) -> None:
        self._stamps = stamps

    def host_us(self, index: int) -> int | None:
        return self._stamps.get(index)


def read(target: dict[int, int], drafter: dict[int, int], ticket: PassTicket) -> PassTimes | None:
    return PassTimer(Timer(target), Timer(drafter)).read(ticket)  # type: ignore[arg-type]


def test_a_pass_has_its_gap_its_wait_and_its_jobs() -> None:
    ticket = PassTicket(3, (JobTicket(5, 2, 4), JobTicket(6, 1)))
    target = {PassTicket(2, ()).packed: 90, ticket.reached: 95, ticket.begin: 110, ticket.end: 400}
    drafter = {10: 20, 11: 80, 12: 81}
    expected = PassTimes(start_us=110, end_us=400, gap_us=20, wait_us=15, drafts=(DraftTimes(5, 20, 80, 2, 4),))
    assert read(target, drafter, ticket) == expected


def test_the_first_pass_has_no_gap_and_a_missing_stamp_leaves_none() -> None:
    ticket = PassTicket(0, ())
    stamps = {ticket.reached: 5, ticket.begin: 6, ticket.end: 9}
    times = read(stamps, {}, ticket)
    assert times is not None
    assert times.gap_us is None
    assert read({ticket.reached: 5, ticket.begin: 6}, {}, ticket) is None
