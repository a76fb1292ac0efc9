"""The trace file: one line a step or request, with exactly the agreed keys."""

import json

import pytest
from core_doubles import step_record

from minedraft_core.feed import FeedMessage
from minedraft_core.trace import TraceWriter
from minedraft_core.types import DrafterRecord, DraftRecord, Mode, ModeRecord, RequestRecord

STEP_KEYS = [
    *("type", "step", "start_us", "end_us", "mode", "side", "is_prompt_run", "is_parallelised", "batched_requests", "preempted_requests"),
    *("batched_token_num", "proposed_len", "verify_len", "accepted_num", "generated_num"),
    *("measured_draft_time", "measured_target_time", "measured_overhead_time", "gap_us"),
    *("num_speculative_tokens", "drafter_wait_us", "drafts"),
]
REQUEST_KEYS = ["type", "request_id", "start_us", "first_token_us", "end_us", "prompt_len", "gen_len", "finish_reason", "scheduled_us"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_scripted_run_leaves_the_agreed_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    writer(FeedMessage(0, [ModeRecord(Mode.PARALLEL, 4), step_record(step=1)]))
    writer(FeedMessage(0, [DraftRecord(1, 1, 2, 1, 2, [2]), DrafterRecord(up=True, restarted=False, reason="loaded")]))
    writer(FeedMessage(3, [step_record(step=2, side=-1, gap_us=17), RequestRecord('r"1', 1, 0, 9, 12, 0, "abort", 2)]))
    written = lines(path)
    writer.close()
    assert lines(path) == written
    assert [line["type"] for line in written] == ["step", "drafted", "step", "request"]
    assert written.pop(1) == {
        "type": "drafted",
        "round": 1,
        "start_us": 1,
        "end_us": 2,
        "hidden_us": 1,
        "batched_requests": 2,
        "drafted_per_position": [2],
    }
    assert list(written[0]) == list(written[1]) == STEP_KEYS
    assert list(written[2]) == REQUEST_KEYS
    assert written[0] == {
        "type": "step",
        "step": 1,
        "start_us": 10,
        "end_us": 30,
        "mode": "parallel",
        "side": 0,
        "is_prompt_run": False,
        "is_parallelised": True,
        "batched_requests": 2,
        "preempted_requests": 0,
        "batched_token_num": 10,
        "proposed_len": 8,
        "verify_len": 7,
        "accepted_num": 3,
        "generated_num": 5,
        "measured_draft_time": 0.25,
        "measured_target_time": 0.5,
        "measured_overhead_time": 0.125,
        "gap_us": None,
        "num_speculative_tokens": 4,
        "drafter_wait_us": 40,
        "drafts": [[4, 3], [3, 0]],
    }
    assert (written[1]["step"], written[1]["side"], written[1]["gap_us"]) == (2, -1, 17)
    assert written[2] == {
        "type": "request",
        "request_id": 'r"1',
        "start_us": 1,
        "first_token_us": 0,
        "end_us": 9,
        "prompt_len": 12,
        "gen_len": 0,
        "finish_reason": "abort",
        "scheduled_us": 2,
    }


def test_a_second_run_appends(tmp_path):
    path = tmp_path / "trace.jsonl"
    for step in (1, 2):
        writer = TraceWriter(path)
        writer(FeedMessage(0, [step_record(step=step)]))
        writer.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TraceWriter(tmp_path / "no" / "trace.jsonl")


def test_half_a_line_of_a_killed_writer_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "trace.jsonl"
    for before, after in ((b"", 0), (b'{"type":"st', 1), (b'{"type":"x"}\n', 1)):
        path.write_bytes(before)
        writer = TraceWriter(path)
        writer(FeedMessage(0, [step_record(step=1)]))
        writer.close()
        found = path.read_bytes().splitlines()
        assert len(found) == after + 1
        assert json.loads(found[-1])["step"] == 1
