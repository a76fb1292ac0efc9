"""What a session runs, writes, skips and says, with an engine that decodes by rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from minedraft_core.config import ConfigError
from minedraft_core.experiments.grid import Session, cells_of, sessions_of
from minedraft_core.experiments.runner import Surroundings, pipeline_of, run_session
from minedraft_core.report.reading import read_traces
from minedraft_core.types import Mode
from tests.experiments.samples import Starter, surroundings, variant


def sessions(around: Surroundings) -> list[Session]:
    return sessions_of(cells_of(around.variant), on_cpu=around.on_cpu)


def run_all(around: Surroundings, starter: Starter) -> list[str | None]:
    return [run_session(session, around, starter, lambda line: None) for session in sessions(around)]


def test_every_cell_gets_a_trace_with_a_header_for_each_measured_run(tmp_path: Path) -> None:
    around, starter = surroundings(tmp_path, variant()), Starter()
    assert run_all(around, starter) == [None, None]
    traces = read_traces(around.store.all_traces())
    assert len(traces) == len(cells_of(around.variant)) == 10
    for trace in traces:
        assert len(trace.runs) == 2
        assert [len(run.requests) for run in trace.runs] == [2, 2]
        assert trace.header.experiment == "experiment_0"
        assert trace.header.provenance == {"commit": "1234", "requests": 2}
    assert len(starter.of("start")) == 2
    assert len(starter.of("run")) == 10 * 3
    assert {entry[1] for entry in starter.of("run")} == {2, 4}
    assert not list(around.store.traces.glob("*.partial"))


def test_modes_and_draft_tokens_are_ordered_before_each_cell(tmp_path: Path) -> None:
    starter = Starter()
    run_all(surroundings(tmp_path, variant()), starter)
    assert starter.of("mode") == [("mode", mode, k) for mode in (Mode.SEQUENTIAL, Mode.PARALLEL) for k in (1, 3) for _ in (1, 2)]


def test_finished_cells_are_skipped_and_the_rest_is_run(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant())
    run_all(around, Starter())
    again = Starter()
    run_all(around, again)
    assert again.log == []
    lost = next(path for path in around.store.all_traces() if "c004-parallel-draft-k3" in path.name)
    lost.unlink()
    run_all(around, again)
    assert [entry[0] for entry in again.log] == ["start", "mode", "run", "run", "run", "end"]
    assert lost.exists()


def test_an_interrupted_cell_is_not_taken_for_finished(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant())

    def interrupt(line: str) -> None:
        if "run 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_session(sessions(around)[0], around, Starter(), interrupt)
    assert around.store.all_traces() == []
    run_all(around, Starter())
    assert len(around.store.all_traces()) == 10


def test_a_trace_made_with_other_settings_is_not_reused(tmp_path: Path) -> None:
    run_all(surroundings(tmp_path, variant()), Starter())
    changed = surroundings(tmp_path, variant(max_tokens=5))
    with pytest.raises(ConfigError, match=r"made with other settings \(max_tokens 4 is now 5\): remove it, or name another --out"):
        run_all(changed, Starter())


def test_a_trace_of_other_prompts_is_not_reused(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant())
    run_all(around, Starter())
    changed = replace(around, prompts={"questions": ["a", "bc"]})
    with pytest.raises(ConfigError, match=r"made with other settings \(prompts_sha256 '\w+' is now '\w+'\)"):
        run_all(changed, Starter())


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe\n", b"[1]\n", b'{"a":' * 100_000])
def test_what_is_no_trace_is_not_taken_for_one(tmp_path: Path, content: bytes) -> None:
    around = surroundings(tmp_path, variant())
    run_all(around, Starter())
    around.store.all_traces()[0].write_bytes(content)
    with pytest.raises(ConfigError, match=r"is no trace of an experiment .*: remove it, or name another --out"):
        run_all(around, Starter())


def test_a_folder_is_one_runs_own(tmp_path: Path) -> None:
    store = surroundings(tmp_path / "run", variant()).store
    refused = pytest.raises(ConfigError, match=r"another run writes to .*: wait until it has ended, or name another --out")
    with store.held(), refused, store.held():
        pass
    with store.held():
        pass


def test_a_refused_arm_is_written_down_and_the_others_go_on(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant())
    assert run_all(around, Starter("sequential")) == [None, "no sequential here"]
    refused = [trace for trace in read_traces(around.store.all_traces()) if trace.header.refused]
    assert {(trace.header.refused, trace.runs) for trace in refused} == {("no sequential here", ())}
    arms = [(trace.header.arm, trace.header.k, trace.header.load) for trace in refused]
    assert arms == [(mode, k, load) for mode in ("sequential", "parallel") for k in (1, 3) for load in (2, 4)]
    assert run_all(around, Starter()) == [None, None]
    assert not any(trace.header.refused for trace in read_traces(around.store.all_traces()))


def test_what_the_product_refuses_is_its_own_reason(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant(pairs=[{"target": "target", "draft": "draft", "method": "no-such-method"}]))
    reasons = run_all(around, Starter())
    assert reasons[0] is None
    assert reasons[1] is not None
    assert "'method' cannot be 'no-such-method'" in reasons[1]


def test_warm_up_once_warms_an_engine_and_not_each_cell(tmp_path: Path) -> None:
    starter = Starter()
    run_all(surroundings(tmp_path, variant(warmup_once=True)), starter)
    assert len(starter.of("run")) == 10 * 2 + 2


def test_samples_of_a_prompt_are_requests_with_seeds_of_their_own(tmp_path: Path) -> None:
    starter = Starter()
    run_all(surroundings(tmp_path, variant(n=[3], modes=["off"])), starter)
    _, _, lengths, seeds, temperatures = starter.of("run")[0]
    # The third text is too long for the dataset.
    assert lengths == [1, 1, 1, 2, 2, 2]
    assert seeds == [0, 1, 2, 3, 4, 5]
    assert temperatures == {0.8}


def test_prompts_that_do_not_fit_are_refused_with_what_would(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant(datasets=[{"name": "questions", "min_tokens": 20}]))
    assert "questions: no prompt has 20 to 28 tokens" in (run_all(around, Starter())[0] or "")


def test_what_plain_decoding_wrote_is_replayed(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant(pairs=[{"target": "maker/target", "draft": "draft", "acceptance": 0.75}], n=[1, 2], prompts=3))
    starter = Starter()
    run_all(around, starter)
    recording = around.recording("maker/target")
    assert recording.parent.parent == tmp_path
    written = [[[1], [1] * 4], [[2, 2], [2] * 4], [[3] * 3, [3] * 4]]
    assert json.loads(recording.read_text()) == [*written, *(pair for pair in written for _ in (1, 2))]
    config = starter.of("start")[1][2]
    assert (config.drafter.replay, config.drafter.replay_acceptance) == (str(recording), 0.75)
    other = replace(around, prompts={"questions": ["a", "bb", "ccc", "dddd"]})
    assert other.recording("maker/target") != recording, "what other requests got is not replayed"
    header = msgspec.json.decode(next(path for path in around.store.all_traces() if "parallel" in path.name).read_bytes().splitlines()[0])
    assert header["acceptance"] == "replayed p=0.75"


def test_the_configuration_of_each_kind_of_engine(tmp_path: Path) -> None:
    around = surroundings(tmp_path, variant(modes=["off", "pearl"], extra=[2]))
    off, pearl, tetris = (pipeline_of(session, around) for session in sessions(around))
    assert (off.speculative.mode, off.target_cores) == (Mode.OFF, (0, 1))
    assert (pearl.speculative.mode, pearl.target_cores, pearl.drafter.cores) == (Mode.PEARL, (0,), (1,))
    assert (tetris.speculative.tetris, tetris.speculative.tetris_extra_proposals, tetris.speculative.tetris_capacity) == (True, 2, 0)


def test_on_gpus_the_drafter_is_beside_the_target_only_in_sequential(tmp_path: Path) -> None:
    pairs = [{"target": "shape:t", "draft": "shape:d", "acceptance": 0.5}]
    around = surroundings(tmp_path, variant(modes=["sequential", "parallel"], k=[2], pairs=pairs, tensor_parallel=4))
    sequential, parallel = (pipeline_of(session, around) for session in sessions(around))
    assert (sequential.drafter.device, parallel.drafter.device) == (0, None)
    assert parallel.drafter.synthetic_acceptance == 0.5
    assert parallel.drafter.replay is None


def test_vllms_own_speculation_is_refused_on_cpu_before_anything_is_prepared(tmp_path: Path) -> None:
    def prepare(session: Session) -> tuple[str, str | None]:
        raise AssertionError(session)

    around, starter = replace(surroundings(tmp_path, variant(modes=["native"])), models=prepare), Starter()
    assert set(run_all(around, starter)) == {"native: vLLM's own speculative decoding is compared on GPUs only"}
    assert starter.of("start") == []
