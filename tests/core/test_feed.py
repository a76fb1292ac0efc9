"""The feed over a real socket: order, loss and its count, and a writer that never waits."""

import threading
import time

import pytest
from core_doubles import step_record

from minedraft_core import feed as feed_module
from minedraft_core.feed import FeedMessage, FeedReader, FeedWriter, NoFeed
from minedraft_core.types import DrafterRecord, DraftRecord, Mode, ModeRecord, RequestRecord

SLOWEST_PUSH = 2.0


def numbered(number):
    return RequestRecord(str(number), number, 0, 0, 0, 0, "stop")


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path / 'feed'}"


def test_every_kind_of_record_arrives_as_it_was(address):
    records = (
        step_record(),
        RequestRecord("a", 1, 2, 3, 4, 5, "length"),
        DraftRecord(7, 1, 2, 1, 3, [3, 2]),
        DrafterRecord(up=False, restarted=True, reason="hang", message="no answer"),
        ModeRecord(Mode.SEQUENTIAL, 4),
    )
    received = []
    reader = FeedReader(address, [received.append])
    reader.start()
    writer = FeedWriter(address)
    writer.push(records)
    writer.close()
    wait_for(lambda: received)
    reader.close()
    assert received == [FeedMessage(0, list(records))]


def test_messages_keep_their_order_and_reach_every_sink_once(address):
    first, second = [], []
    writer = FeedWriter(address)
    for number in range(500):
        writer.push([numbered(number)])
    reader = FeedReader(address, [first.append, second.append])
    reader.start()
    for number in range(500, 1_000):
        writer.push([numbered(number)])
    writer.close()
    wait_for(lambda: len(second) == 1_000)
    reader.close()
    assert [message.records[0].start_us for message in first] == list(range(1_000))
    assert first == second


def test_closing_the_reader_takes_in_what_has_arrived(address):
    received = []
    release = threading.Event()

    def sink(message):
        release.wait(10.0)
        received.append(message)

    reader = FeedReader(address, [sink])
    reader.start()
    writer = FeedWriter(address)
    for number in range(20):
        writer.push([numbered(number)])
    writer.close()
    threading.Timer(0.1, release.set).start()
    reader.close()
    assert len(received) == 20


@pytest.mark.timeout(30)
def test_without_a_reader_the_queue_fills_and_what_is_lost_is_counted(address):
    writer, longest = FeedWriter(address), 0.0
    pushed = 12_000
    for number in range(pushed):
        begin = time.monotonic()
        writer.push([numbered(number), numbered(number)])
        longest = max(longest, time.monotonic() - begin)
    assert longest < SLOWEST_PUSH
    received = []
    reader = FeedReader(address, [received.append])
    reader.start()
    wait_for(lambda: len(received) >= 10_000)
    writer.push([numbered(pushed)])
    wait_for(lambda: received[-1].records[0].start_us == pushed)
    writer.close()
    reader.close()
    delivered = sum(len(message.records) for message in received) - 1
    assert 0 < sum(message.dropped for message in received) == 2 * pushed - delivered
    numbers = [message.records[0].start_us for message in received]
    assert numbers[:-1] == list(range(len(numbers) - 1)), "the oldest are kept"


@pytest.mark.timeout(30)
def test_a_slow_reader_costs_records_not_time(address, monkeypatch):
    monkeypatch.setattr(feed_module, "_QUEUED_MESSAGES", 4)
    received, release = [], threading.Event()

    def slow(message):
        release.wait(20.0)
        received.append(message)

    reader = FeedReader(address, [slow])
    reader.start()
    writer, longest, pushed = FeedWriter(address), 0.0, 0
    for _ in range(3_000):
        begin = time.monotonic()
        writer.push([numbered(pushed), *[step_record()] * 20])
        longest = max(longest, time.monotonic() - begin)
        pushed += 1
    assert longest < SLOWEST_PUSH
    release.set()
    wait_for(lambda: received and received[-1].records[0].start_us < pushed)
    deadline = time.monotonic() + 10.0
    while received[-1].records[0].start_us < 3_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        writer.push([numbered(pushed), *[step_record()] * 20])
        pushed += 1
    writer.close()
    reader.close()
    last = received[-1]
    numbers = [message.records[0].start_us for message in received]
    assert numbers == sorted(set(numbers))
    assert 0 < sum(message.dropped for message in received) == 21 * (last.records[0].start_us + 1 - len(received))


def test_a_writer_without_a_reader_closes_in_time(address):
    writer = FeedWriter(address)
    writer.push([numbered(1)])
    begin = time.monotonic()
    writer.close()
    assert time.monotonic() - begin < 3.0


def test_no_feed_takes_everything():
    feed = NoFeed()
    feed.push([numbered(1)])
    feed.close()
