"""The command on real engines, with settings as small as they get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from minedraft_core.bench.cli import bench_app
from minedraft_core.embedded import prepare

SMALL = "--max-tokens 24 --repeats 1 --warmup 0 --max-model-len 512 --max-num-seqs 32 --enforce-eager --kv-cache-memory-bytes 1G"
RUNNER = CliRunner()
PER_BATCH_SIZE = "--num-speculative-tokens-per-batch-size"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parallel_and_lookahead_beside_off_on_a_replay(tmp_path: Path) -> None:
    models = prepare(progress=False)
    file, prompts = tmp_path / "rows.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Count to ten."}\n{"turns": ["Name three rivers."]}\n')
    options = ["--model", str(models.target), "--draft", str(models.draft), "--prompts", str(prompts), "--json", str(file)]
    arguments = [
        "engine",
        *options,
        "--modes",
        "off,parallel,pearl",
        "--concurrency",
        "2",
        "--acceptance",
        "1",
        "--dtype",
        "float32",
        *SMALL.split(),
    ]
    # A process of its own: vLLM's client leaves a ZeroMQ context open until its process ends.
    command = [sys.executable, "-c", "from minedraft_core.bench.cli import bench_app; bench_app()", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    off, all_cores, parallel, pearl = msgspec.json.decode(file.read_bytes())["rows"]
    assert [off["mode"], all_cores["mode"], parallel["mode"]] == ["off", "off-all-cores", "parallel"]
    assert pearl["mode"] == "pearl"
    # Every token is right, so the target always goes along the drafter's own tokens.
    assert pearl["lookahead_hits"] > 0.9
    assert 0.0 < pearl["hidden_share"] <= 1.0
    assert all(row["tokens_per_second"] > 0 and row["verify_ms"] > 0 for row in (off, all_cores, parallel))
    assert off["acceptance_length"] is None
    assert parallel["acceptance"] == "replayed p=1"
    # The embedded drafter alone is accepted far less often.
    assert parallel["acceptance_length"] > 3.0
    assert 0.0 < parallel["hidden_share"] <= 1.0
    assert "replayed p=1" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "fast"], "--modes: 'fast' is not possible"),
        (["--concurrency", "one"], "--concurrency: 'one'"),
        (["--modes", "parallel", "--acceptance", "0.5"], "put off first"),
        (["--modes", "sequential", "--draft", ""], "--draft"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--concurrency", "8", "--max-num-seqs", "4"], "--max-num-seqs: 4 cannot run 8 requests"),
        (["--speculative-config", "{}"], "--speculative-config is set by MineDraft"),
        (["--json", "/nowhere/rows.json"], "/nowhere/rows.json"),
        (["--json", "/"], "Is a directory"),
        (["--drafter-compiled", "--drafter-fused", "layers"], "--drafter-compiled and --drafter-fused: for GPUs; remove this"),
        (["--drafter-weights", "fp8"], "--drafter-weights: for GPUs"),
        (["--method", "eagle3"], "--method: for GPUs"),
        (["--acceptance-length", "2"], "--acceptance-length is for GPUs; on CPU give --acceptance"),
        (["--prompt-tokens", "9", "--prompts", "prompts.jsonl"], "--prompt-tokens makes the prompts: leave --prompts out"),
        (["--prompt-tokens", "2000"], "--max-model-len: 2048 tokens do not hold a prompt of 2000 and --max-tokens 64"),
        (["--max-tokens", "2048"], "--max-model-len: 2048 tokens do not hold a prompt of 1 and --max-tokens 2048"),
        *[
            (["--modes", "sequential-by-batch", PER_BATCH_SIZE, rows], f"error: {PER_BATCH_SIZE}{message}")
            for rows, message in (
                ("[[1,8", " is not valid JSON"),
                ("[" * 100_000, " is not valid JSON: it is nested too deeply"),
                (f"[[1, {'9' * 5_000}, 2]]", " is not valid JSON"),
                ("[[1, 8]]", ": 'num_speculative_tokens_per_batch_size' cannot have the row [1, 8]"),
                ("[[1, 8, 5]]", ": 'num_speculative_tokens_per_batch_size' asks for 5 tokens"),
                ("null", " is for modes that end in -by-batch"),
            )
        ],
    ],
)
def test_what_cannot_be_done_is_refused_before_an_engine_starts(tmp_path: Path, options: list[str], message: str) -> None:
    result = RUNNER.invoke(bench_app, ["engine", "--model", str(tmp_path), "--draft", "owner/draft", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_rows_are_not_written_over_the_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Count to ten."}\n')
    options = [
        "--model",
        str(tmp_path),
        "--draft",
        "owner/draft",
        "--prompts",
        str(prompts),
        "--json",
        f"{tmp_path}/../{tmp_path.name}/prompts.jsonl",
    ]
    result = RUNNER.invoke(bench_app, ["engine", *options])
    assert (result.exit_code, "is the file of --prompts and would be written over" in result.output) == (2, True)
    assert prompts.read_text() == '{"prompt": "Count to ten."}\n'
