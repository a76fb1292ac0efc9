"""Files become traces: this product's, those of a server, and those of the original plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from minedraft_core.config import ConfigError
from minedraft_core.report.reading import read_traces
from minedraft_core.types import Mode
from tests.report.samples import header, original, run_lines, write

NAME = "input=256_ShareGPT_Qwen3-32B_Qwen3-1.7B_16_True_parallel=True_k=4_t=2_n=1_c=0_warmup=1_runs=3.jsonl"


def test_every_header_begins_a_run(tmp_path: Path) -> None:
    (trace,) = read_traces([write(tmp_path / "arm.jsonl", header(gpus=5), run_lines(), run_lines(500))])
    assert (trace.name, trace.header.gpus, trace.header.arm) == ("arm", 5, "sequential")
    assert [len(run.steps) for run in trace.runs] == [4, 4]
    assert [len(run.requests) for run in trace.runs] == [2, 2]
    assert [len(run.drafted) for run in trace.runs] == [3, 3]
    assert trace.remarks == ()


def test_a_servers_trace_has_no_header_and_says_what_it_can(tmp_path: Path) -> None:
    (trace,) = read_traces([write(tmp_path / "served.jsonl", None, run_lines(mode=Mode.PARALLEL))])
    assert (trace.header.arm, trace.header.load, trace.header.draft) == ("parallel", 4, None)
    assert len(trace.runs) == 1
    assert "models, number of draft tokens and GPUs are not known" in trace.remarks[0]


def test_a_refused_arm_has_no_run(tmp_path: Path) -> None:
    (trace,) = read_traces([write(tmp_path / "arm.jsonl", header(refused="not here"))])
    assert trace.header.refused == "not here"
    assert trace.runs == ()


def test_a_line_that_is_cut_off_at_the_end_is_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "arm.jsonl", header(), run_lines())
    path.write_bytes(path.read_bytes()[:-9])
    (trace,) = read_traces([path])
    assert len(trace.runs[0].requests) == 1
    assert trace.remarks == ("1 line is cut off and left out",)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_a_killed_writer_left_in_the_middle_is_left_out_and_said(tmp_path: Path, end: bytes) -> None:
    path = write(tmp_path / "arm.jsonl", header(), run_lines())
    path.write_bytes(path.read_bytes()[:-9] + end + run_lines(500))
    (trace,) = read_traces([path])
    # The line that was begun anew in the same line cannot be told from the half one.
    assert len(trace.runs[0].steps) == (8 if end else 7)
    assert trace.remarks == ("1 line is cut off and left out",)


def test_a_bundle_that_is_cut_off_at_the_end_is_left_out_and_said(tmp_path: Path) -> None:
    path = original(tmp_path / "plugin.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    (trace,) = read_traces([path])
    assert len(trace.runs) == 1
    assert "its last run is cut off and left out" in trace.remarks


def test_fields_that_an_older_trace_lacks_are_none(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"type":"step","start_us":1,"end_us":9,"later":7}\n{"type":"request","start_us":1,"end_us":9}\n')
    (trace,) = read_traces([path])
    assert trace.runs[0].steps[0].drafts is None
    assert trace.runs[0].requests[0].first_token_us is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello\n", "line 1 of"),
        (b"hello", "line 1 of"),
        (b'{"type":"step","start_u', "holds no whole step, request or head of a run"),
        (b'{"type":"drafted","start_us":1,"end_us":2}\n', "holds no whole step, request or head of a run"),
        (b'{"type":"step","start_us":1,"end_us":NaN}\n', "line 1 of .* is no line of a trace"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "line 1 of"),
        (b'{"type":"step","start_us":9,"end_us":2}\n', "line 1 of .* ends before it begins"),
        (b'{"traces":[{"type":"Step","start_us":9,"end_us":2}]}\n', "line 1 of .* ends before it begins"),
        (b'{"type":"request","start_us":1,"end_us":2,"gen_len":-3}\n', "line 1 of .*gen_len"),
        (b'{"type":"run","arm":"off","target":"t","load":1,"gpus":-1}\n', "line 1 of .*gpus"),
        (b'{"type":"step","start_us":1,"end_us":2}\n{"type":"stop"}\n', "line 2 of"),
        (b'{"type":"step","start_us":1,"end_us":2,"drafts":[[1000000000000,1]]}\n', "line 1 of .*drafts"),
        (b'{"type":"step","start_us":"soon","end_us":2}\n', "line 1 of"),
        (b'{"metadata":{},"traces":[{"start_us":1}]}\n', "line 1 of .* is no bundle"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_traces([path])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file"):
        read_traces([tmp_path / "gone.jsonl"])


def test_several_arms_in_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    first, second = write(tmp_path / "a", header(), run_lines()), write(tmp_path / "b", header(arm="parallel"), run_lines())
    path.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(ConfigError, match="several arms"):
        read_traces([path])


def test_a_file_of_the_original_plugin_is_known_by_its_name(tmp_path: Path) -> None:
    (trace,) = read_traces([original(tmp_path / NAME, bundles=4)])
    head = trace.header
    assert (head.arm, head.target, head.draft, head.k, head.extra, head.n) == ("parallel-tetris", "Qwen3-32B", "Qwen3-1.7B", 4, 2, 1)
    assert (head.dataset, head.load, head.gpus) == ("ShareGPT", 32, 5)
    assert len(trace.runs) == 3, "the run to warm up is left out"
    assert any("4 steps and requests have no end" in remark for remark in trace.remarks)


def test_time_to_first_token_of_the_original_is_the_end_of_its_prompt_pass(tmp_path: Path) -> None:
    (trace,) = read_traces([original(tmp_path / "renamed.jsonl", bundles=1)])
    first, second = trace.runs[0].requests
    assert first.first_token_us == second.first_token_us == 40_000
    assert first.in_passes_us == 40_000 + 26_000 + 25_000
    assert second.in_passes_us == 40_000 + 26_000
    assert (trace.header.arm, trace.header.load) == ("parallel", 4)
    assert trace.runs[0].steps[1].preempted_requests == 1
    assert any("does not say what it was measured with" in remark for remark in trace.remarks)
