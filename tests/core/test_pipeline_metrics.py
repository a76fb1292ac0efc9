"""The metrics: names at zero from the start, and every figure of a scripted run against one computed apart."""

import re
import shutil
import subprocess
import threading

import pytest
from core_doubles import Clock, step_record
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from minedraft_core.feed import FeedMessage
from minedraft_core.metrics import PipelineMetrics, ServiceLevels
from minedraft_core.types import DrafterRecord, DraftRecord, LookaheadRecord, Mode, ModeRecord, RequestRecord

HISTOGRAMS = (
    "minedraft_draft_step_duration_seconds",
    "minedraft_verify_step_duration_seconds",
    "minedraft_verify_gap_seconds",
    "minedraft_drafter_wait_seconds",
    "minedraft_accepted_tokens_per_draft",
    "minedraft_inter_token_latency_seconds",
)
PLAIN = (
    "minedraft_draft_busy_seconds_total",
    "minedraft_draft_hidden_seconds_total",
    "minedraft_draft_exposed_seconds_total",
    "minedraft_draft_tokens_total",
    "minedraft_verified_tokens_total",
    "minedraft_accepted_tokens_total",
    "minedraft_drafter_restarts_total",
    "minedraft_generation_tokens_total",
    "minedraft_goodput_requests_total",
    "minedraft_goodput_tokens_total",
    "minedraft_feed_dropped_total",
    "minedraft_num_speculative_tokens",
    "minedraft_drafter_up",
    "minedraft_overlap_ratio",
    "minedraft_verification_success_ratio",
    "minedraft_lookahead_discarded_tokens_total",
)
LABELLED = {
    "minedraft_draft_tokens_dropped_total": [{"reason": reason} for reason in ("tetris", "late", "fault", "grammar")],
    "minedraft_lookahead_total": [{"result": "hit"}, {"result": "miss"}],
    "minedraft_drafter_fallback_steps_total": [{"reason": "late"}, {"reason": "down"}],
    "minedraft_requests_finished_total": [{"reason": reason} for reason in ("stop", "length", "abort", "error")],
    "minedraft_slo_requests_total": [
        {"slo": slo, "result": result} for slo in ("ttft", "tpot", "e2e", "all") for result in ("met", "missed")
    ],
    "minedraft_mode": [{"mode": mode} for mode in ("off", "sequential", "parallel", "pearl")],
    "minedraft_sub_batch_requests": [{"side": "A"}, {"side": "B"}],
}
POSITIONS = ("minedraft_draft_tokens_per_position_total", "minedraft_accepted_tokens_per_position_total")


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, {key: str(label) for key, label in labels.items()})


def make(levels=ServiceLevels(), max_tokens=4, clock=None):  # noqa: B008 - frozen
    return PipelineMetrics(levels, max_tokens, clock or Clock())


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_every_name_is_there_at_zero(max_tokens):
    metrics = make(max_tokens=max_tokens)
    for name in HISTOGRAMS:
        assert value(metrics, f"{name}_count") == value(metrics, f"{name}_sum") == 0.0, name
        assert value(metrics, f"{name}_bucket", le="+Inf") == 0.0, name
    for name in PLAIN:
        assert value(metrics, name) == 0.0, name
    for name, label_sets in LABELLED.items():
        for labels in label_sets:
            assert value(metrics, name, **labels) == 0.0, (name, labels)
    for name in POSITIONS:
        for position in range(max_tokens):
            assert value(metrics, name, position=position) == 0.0
        assert value(metrics, name, position=max_tokens) is None


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_shows_as_the_only_one_in_force(mode):
    metrics = make()
    metrics.observe(ModeRecord(Mode.PARALLEL, 2))
    metrics.observe(ModeRecord(mode, 3))
    assert {name: value(metrics, "minedraft_mode", mode=name) for name in ("off", "sequential", "parallel", "pearl")} == {
        name: float(name == mode.value) for name in ("off", "sequential", "parallel", "pearl")
    }
    assert value(metrics, "minedraft_num_speculative_tokens") == 3.0


def exposition(metrics):
    return generate_latest(metrics.registry).decode()


def test_names_keep_the_conventions():
    for family in make().registry.collect():
        assert re.fullmatch(r"minedraft_[a-z0-9]+(_[a-z0-9]+)*", family.name), family.name
        assert family.documentation.endswith("."), family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_exposition():
    result = subprocess.run(["promtool", "check", "metrics"], input=exposition(make()), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


STEPS = [
    step_record(
        measured_target_time=0.5, gap_us=None, drafter_wait_us=None, fallback_reason=None, drafts=[(4, 4), (4, 0), (2, 1)], dropped={}
    ),
    step_record(
        measured_target_time=0.25,
        gap_us=30,
        drafter_wait_us=2_000,
        fallback_reason="late",
        drafts=[(3, 2), (0, 0)],
        dropped={"late": 4, "grammar": 1},
        side_requests=(3, 1),
    ),
    step_record(
        measured_target_time=0.125,
        gap_us=70,
        drafter_wait_us=0,
        fallback_reason="down",
        drafts=[],
        dropped={"fault": 6},
        side_requests=(1, 0),
    ),
]


def test_steps_add_up():
    metrics = make()
    for step in STEPS:
        metrics.observe(step)
    assert value(metrics, "minedraft_verify_step_duration_seconds_count") == 3
    assert value(metrics, "minedraft_verify_step_duration_seconds_sum") == pytest.approx(0.875)
    assert value(metrics, "minedraft_verify_gap_seconds_count") == 2
    assert value(metrics, "minedraft_verify_gap_seconds_sum") == pytest.approx(100e-6)
    assert value(metrics, "minedraft_drafter_wait_seconds_count") == 2
    assert value(metrics, "minedraft_drafter_wait_seconds_sum") == pytest.approx(2e-3)
    assert value(metrics, "minedraft_verified_tokens_total") == 3 * 7
    assert value(metrics, "minedraft_accepted_tokens_total") == 3 * 3
    assert value(metrics, "minedraft_generation_tokens_total") == 3 * 5
    assert value(metrics, "minedraft_accepted_tokens_per_draft_count") == 4, "a request without a draft is no draft"
    assert value(metrics, "minedraft_accepted_tokens_per_draft_sum") == 4 + 0 + 1 + 2
    assert [value(metrics, "minedraft_accepted_tokens_per_draft_bucket", le=f"{length}.0") for length in range(5)] == [1, 2, 3, 3, 4]
    assert [value(metrics, POSITIONS[0], position=position) for position in range(4)] == [4, 4, 3, 2]
    assert [value(metrics, POSITIONS[1], position=position) for position in range(4)] == [3, 2, 1, 1]
    dropped = {
        reason: value(metrics, "minedraft_draft_tokens_dropped_total", reason=reason) for reason in ("tetris", "late", "fault", "grammar")
    }
    assert dropped == {"tetris": 0, "late": 4, "fault": 6, "grammar": 1}
    assert value(metrics, "minedraft_drafter_fallback_steps_total", reason="late") == 1
    assert value(metrics, "minedraft_drafter_fallback_steps_total", reason="down") == 1
    assert (value(metrics, "minedraft_sub_batch_requests", side="A"), value(metrics, "minedraft_sub_batch_requests", side="B")) == (1, 0)


def test_drafting_time_is_hidden_or_exposed():
    metrics = make()
    for record in (DraftRecord(1, 0, 2_000_000, 1_500_000, 3, [3, 2, 2]), DraftRecord(2, 0, 500_000, 0, 1, [1])):
        metrics.observe(record)
    assert value(metrics, "minedraft_draft_step_duration_seconds_count") == 2
    assert value(metrics, "minedraft_draft_step_duration_seconds_sum") == pytest.approx(2.5)
    assert value(metrics, "minedraft_draft_busy_seconds_total") == pytest.approx(2.5)
    assert value(metrics, "minedraft_draft_hidden_seconds_total") == pytest.approx(1.5)
    assert value(metrics, "minedraft_draft_exposed_seconds_total") == pytest.approx(1.0)
    assert value(metrics, "minedraft_draft_tokens_total") == 8
    assert value(metrics, "minedraft_overlap_ratio") == pytest.approx(0.6)


def test_drafting_ahead_is_drafting_time_and_its_fate_is_counted():
    metrics = make()
    metrics.observe(DraftRecord(1, 0, 1_000_000, 0, 3, [3, 2]))
    metrics.observe(LookaheadRecord(1_000_000, 4_000_000, 2_000_000, hits=2, misses=1, discarded=5))
    assert value(metrics, "minedraft_lookahead_total", result="hit") == 2
    assert value(metrics, "minedraft_lookahead_total", result="miss") == 1
    assert value(metrics, "minedraft_lookahead_discarded_tokens_total") == 5
    assert value(metrics, "minedraft_draft_busy_seconds_total") == pytest.approx(4.0)
    assert value(metrics, "minedraft_draft_hidden_seconds_total") == pytest.approx(2.0)
    assert value(metrics, "minedraft_draft_exposed_seconds_total") == pytest.approx(2.0)
    assert value(metrics, "minedraft_overlap_ratio") == pytest.approx(0.5)
    assert value(metrics, "minedraft_draft_step_duration_seconds_count") == 1
    assert value(metrics, "minedraft_draft_tokens_total") == 5


def test_the_verification_success_ratio_is_that_of_the_last_minute():
    clock = Clock()
    metrics = make(clock=clock)
    metrics.observe(step_record(verify_len=8, accepted_num=2))
    clock.now += 40.0
    metrics.observe(step_record(verify_len=2, accepted_num=2))
    metrics.observe(step_record(verify_len=0, accepted_num=0))
    assert value(metrics, "minedraft_verification_success_ratio") == pytest.approx(0.4)
    clock.now += 30.0
    assert value(metrics, "minedraft_verification_success_ratio") == 1.0


def test_the_overlap_ratio_is_that_of_the_last_minute():
    clock = Clock()
    metrics = make(clock=clock)
    metrics.observe(DraftRecord(1, 0, 100, 100, 1, [1]))
    clock.now += 40.0
    metrics.observe(DraftRecord(2, 0, 300, 0, 1, [1]))
    assert value(metrics, "minedraft_overlap_ratio") == pytest.approx(0.25)
    clock.now += 20.0
    assert value(metrics, "minedraft_overlap_ratio") == pytest.approx(0.25), "a minute old still counts"
    clock.now += 0.1
    assert value(metrics, "minedraft_overlap_ratio") == 0.0
    metrics.observe(DraftRecord(3, 0, 100, 80, 1, [1]))
    assert value(metrics, "minedraft_overlap_ratio") == pytest.approx(0.2)
    clock.now += 61.0
    assert value(metrics, "minedraft_overlap_ratio") == 0.0
    assert value(metrics, "minedraft_draft_busy_seconds_total") == pytest.approx(500e-6), "the counters keep everything"


def test_the_drafters_health_and_restarts():
    metrics = make()
    history = [
        (DrafterRecord(up=True, restarted=False, reason="loaded"), 1, 0),
        (DrafterRecord(up=False, restarted=False, reason="died", message="code -9"), 0, 0),
        (DrafterRecord(up=True, restarted=True, reason="loaded"), 1, 1),
        (DrafterRecord(up=False, restarted=False, reason="hang"), 0, 1),
        (DrafterRecord(up=True, restarted=True, reason="loaded"), 1, 2),
    ]
    for record, up, restarts in history:
        metrics.observe(record)
        assert (value(metrics, "minedraft_drafter_up"), value(metrics, "minedraft_drafter_restarts_total")) == (up, restarts)


def test_lost_records_are_counted_from_the_senders_running_count():
    metrics = make()
    for dropped, total in ((0, 0), (5, 5), (0, 5), (7, 12)):
        metrics(FeedMessage(dropped, []))
        assert value(metrics, "minedraft_feed_dropped_total") == total


def test_a_message_brings_all_its_records():
    metrics = make()
    metrics(FeedMessage(0, [STEPS[0], STEPS[1], DraftRecord(1, 0, 10, 0, 1, [2]), ModeRecord(Mode.OFF, 0)]))
    assert value(metrics, "minedraft_verify_step_duration_seconds_count") == 2
    assert value(metrics, "minedraft_draft_tokens_total") == 2
    assert value(metrics, "minedraft_mode", mode="off") == 1


def request(first=1.0, end=3.0, tokens=5, reason="stop"):
    """A request that started at 0 s; times in seconds."""
    return RequestRecord("r", 0, round(first * 1e6), round(end * 1e6), 10, tokens, reason)


@pytest.mark.parametrize(
    ("levels", "record", "expected"),
    [
        pytest.param(ServiceLevels(), request(), (True, True, True), id="no limits"),
        pytest.param(ServiceLevels(1.0, 0.5, 3.0), request(), (True, True, True), id="all at their limits"),
        pytest.param(ServiceLevels(0.99, 0.5, 3.0), request(), (False, True, True), id="first token late"),
        pytest.param(ServiceLevels(1.0, 0.49, 3.0), request(), (True, False, True), id="tokens slow"),
        pytest.param(ServiceLevels(1.0, 0.5, 2.99), request(), (True, True, False), id="end late"),
        pytest.param(ServiceLevels(tpot=0.5), request(first=9.0, end=11.0), (True, True, True), id="one limit only"),
        pytest.param(ServiceLevels(1.0, 0.0, 1.0), request(first=1.0, end=1.0, tokens=1), (True, True, True), id="one token"),
        pytest.param(ServiceLevels(), request(first=0.0, end=2.0, tokens=0), (False, False, False), id="no token, no limits"),
        pytest.param(ServiceLevels(5.0, 5.0, 5.0), request(first=0.0, end=2.0, tokens=0), (False, False, False), id="no token"),
    ],
)
def test_service_level_verdicts(levels, record, expected):
    verdicts = dict(zip(("ttft", "tpot", "e2e"), expected, strict=True))
    assert levels.verdicts(record) == {**verdicts, "all": all(expected)}
    metrics = make(levels)
    metrics.observe(record)
    for slo, met in {**verdicts, "all": all(expected)}.items():
        assert value(metrics, "minedraft_slo_requests_total", slo=slo, result="met") == met
        assert value(metrics, "minedraft_slo_requests_total", slo=slo, result="missed") == (not met)
    assert value(metrics, "minedraft_goodput_requests_total") == all(expected)
    assert value(metrics, "minedraft_goodput_tokens_total") == record.gen_len * all(expected)
    assert value(metrics, "minedraft_requests_finished_total", reason="stop") == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_and_failed_requests_have_no_verdict(reason):
    metrics = make(ServiceLevels(0.1, 0.1, 0.1))
    metrics.observe(request(reason=reason))
    assert value(metrics, "minedraft_requests_finished_total", reason=reason) == 1
    for labels in LABELLED["minedraft_slo_requests_total"]:
        assert value(metrics, "minedraft_slo_requests_total", **labels) == 0
    assert value(metrics, "minedraft_goodput_requests_total") == 0


pairs = st.lists(st.integers(0, 4).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=6)


@given(st.lists(pairs, max_size=5))
def test_the_histogram_and_the_positions_tell_the_same(steps):
    metrics = make()
    for drafts in steps:
        metrics.observe(step_record(drafts=drafts))
    every = [pair for drafts in steps for pair in drafts]
    assert value(metrics, "minedraft_accepted_tokens_per_draft_sum") == sum(accepted for _, accepted in every)
    assert value(metrics, "minedraft_accepted_tokens_per_draft_count") == sum(drafted > 0 for drafted, _ in every)
    assert sum(value(metrics, POSITIONS[0], position=position) for position in range(4)) == sum(drafted for drafted, _ in every)
    assert sum(value(metrics, POSITIONS[1], position=position) for position in range(4)) == sum(accepted for _, accepted in every)


def test_reading_while_records_come_in():
    metrics, errors, stop = make(clock=lambda: 0.0), [], threading.Event()

    def read():
        try:
            while not stop.is_set():
                exposition(metrics)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    messages = 400
    for number in range(messages):
        metrics(FeedMessage(0, [STEPS[number % 3], DraftRecord(number, 0, 10, 5, 1, [1]), request()]))
    stop.set()
    reader.join(30.0)
    assert not errors
    assert value(metrics, "minedraft_draft_tokens_total") == messages
    assert value(metrics, "minedraft_verify_step_duration_seconds_count") == messages


def test_the_time_between_tokens_counts_each_token():
    metrics = make()
    metrics.observe(request(first=1.0, end=3.0, tokens=5))
    metrics.observe(request(first=1.0, end=2.0, tokens=1))
    metrics.observe(request(first=0.0, end=0.02, tokens=11))
    metrics.observe(request(tokens=9, reason="abort"))
    name = "minedraft_inter_token_latency_seconds"
    assert value(metrics, f"{name}_count") == 14
    assert value(metrics, f"{name}_sum") == pytest.approx(2.02)
    buckets = {limit: metrics.registry.get_sample_value(f"{name}_bucket", {"le": limit}) for limit in ("0.001", "0.002", "0.25", "0.5")}
    assert buckets == {"0.001": 0, "0.002": 10, "0.25": 10, "0.5": 14}
