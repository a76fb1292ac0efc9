"""Load tests against a server whose latencies are known: what is reported is right."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from loadtest.figures import Spread
from loadtest.results import read_results
from loadtest.sample import Outcome
from minedraft_core.config import ConfigError
from tests.loadtest.running import command_of, known_server, run_load_test
from tests.server.test_tls import pair  # noqa: F401 - a fixture

PERCENTS = [50, 90, 95, 99]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def near(found: Spread | None, wanted_ms: list[float]) -> None:
    """The reported percentiles and mean are those of the known times within 5 %."""
    assert found is not None
    assert found.count == len(wanted_ms)
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(np.percentile(wanted_ms, PERCENTS).tolist(), rel=0.05)
    assert found.mean == pytest.approx(np.mean(wanted_ms), rel=0.05)


def test_a_closed_loop_reports_the_known_times_everywhere(tmp_path: Path) -> None:
    with known_server(tmp_path, "--ttft-ms", "300:1500", "--gap-ms", "100:300") as server:
        limits = ["--slo-ttft-ms", "1200", "--slo-tpot-ms", "250", "--slo-share", "0.9", "--gpus", "5"]
        ran = run_load_test(server.url, tmp_path, "-u", "48", "-r", "50", "-t", "8s", "--max-tokens", "4:12", *limits)
        told = server.told
    figures = ran.results.figures
    assert (figures.failed, figures.cut) == (0, 0)
    assert figures.completion_tokens == sum(request["tokens"] for request in told)
    near(figures.ttft_ms, [request["ttft"] * 1000 for request in told])
    near(figures.tpot_ms, [request["gap"] * 1000 for request in told])
    near(figures.e2e_ms, [request["e2e"] * 1000 for request in told])
    near(figures.itl_ms, [request["gap"] * 1000 for request in told for _ in range(int(request["tokens"]) - 1)])
    near(figures.request_tokens_per_second, [request["tokens"] / request["e2e"] for request in told])

    begin, end = min(sample.begin for sample in ran.samples), max(sample.begin + sample.end for sample in ran.samples)
    assert figures.tokens_per_second == pytest.approx(figures.completion_tokens / (end - begin))
    kept = {"ttft": [request["ttft"] <= 1.2 for request in told], "tpot": [request["gap"] <= 0.25 for request in told]}
    kept["all"] = [all(both) for both in zip(kept["ttft"], kept["tpot"], strict=True)]
    for name, verdicts in kept.items():
        assert figures.slo[name] == pytest.approx(np.mean(verdicts), abs=0.02)
    assert figures.goodput.requests_per_second_per_gpu == pytest.approx(sum(kept["all"]) / (end - begin) / 5, rel=0.05)
    assert ran.code == 1
    assert "requests kept every limit, 90.0% have to" in ran.log

    rows, page = ran.rows, (tmp_path / "locust.html").read_text()
    for kind, wanted in (
        ("TTFT", [request["ttft"] * 1000 for request in told]),
        ("TPOT", [request["gap"] * 1000 for request in told]),
        ("ITL", [request["gap"] * 1000 for request in told]),
        ("POST", [request["e2e"] * 1000 for request in told]),
        ("tokens/s", [request["tokens"] / request["e2e"] for request in told]),
    ):
        row = rows[kind, COMPLETIONS]
        assert int(row["Request Count"]) == ran.entries[kind, COMPLETIONS]["num_requests"] == len(told)
        assert float(row["Median Response Time"]) == pytest.approx(np.percentile(wanted, 50), rel=0.05)
        # Locust writes percentiles as whole numbers.
        assert float(row["95%"]) == pytest.approx(np.percentile(wanted, 95), rel=0.05, abs=1)
        assert float(row["Average Response Time"]) == pytest.approx(np.mean(wanted), rel=0.05)
        assert f'"{kind}"' in page
    for name, verdicts in (("ttft <= 1200 ms", kept["ttft"]), ("tpot <= 250 ms", kept["tpot"]), ("all", kept["all"])):
        assert int(rows["SLO", name]["Failure Count"]) == pytest.approx(len(told) - sum(verdicts), abs=0.02 * len(told))


def test_an_open_loop_keeps_its_rate_while_the_server_lags_and_clients_leave(tmp_path: Path) -> None:
    # Requests last far longer than the time between them: a closed loop of two users would manage three a second.
    with known_server(tmp_path, "--ttft-ms", "400:500", "--gap-ms", "15:30", "--tokens-per-event", "3") as server:
        flags = ["--arrivals", "poisson", "--rate", "10", "--endpoint", "both", "--abort-share", "0.2", "--abort-after", "4"]
        ran = run_load_test(server.url, tmp_path, "-u", "2", "-r", "50", "-t", "10s", "--max-tokens", "90", *flags)
        told, leavers = server.told, server.leavers
    figures = ran.results.figures
    sent = figures.done + figures.aborted
    assert ran.code == 0
    assert sent == len(told)
    # 200 are expected; the standard deviation of a Poisson process is 14.
    assert 150 <= sent <= 250
    assert figures.aborted == leavers
    assert figures.aborted / sent == pytest.approx(0.2, abs=0.09)
    begins = sorted(sample.begin for sample in ran.samples)
    gaps = np.diff(begins)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.25)
    assert figures.tokens_per_delivery == 3
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.p50 == pytest.approx(450, rel=0.05)
    assert figures.tpot_ms is not None
    assert figures.itl_ms is not None
    # Thirty deliveries of three tokens: 29 gaps for 89 tokens after the first.
    assert figures.tpot_ms.mean == pytest.approx(figures.itl_ms.mean * 29 / 89, rel=0.02)
    assert int(ran.rows["POST", COMPLETIONS]["Request Count"]) + int(ran.rows["POST", CHAT]["Request Count"]) == figures.done
    assert int(ran.rows["ABORT", COMPLETIONS]["Request Count"]) + int(ran.rows["ABORT", CHAT]["Request Count"]) == leavers


def test_stages_and_what_begins_in_the_warm_up_is_left_out(tmp_path: Path) -> None:
    with known_server(tmp_path, "--ttft-ms", "50", "--gap-ms", "10") as server:
        ran = run_load_test(server.url, tmp_path, "--stages", "1:4,5:4", "--warmup", "3", "--max-tokens", "15", "--label", "two stages")
        told = server.told
    begins = [sample.begin for sample in ran.samples]
    assert ran.code == 0
    assert ran.results.label == "two stages"
    assert ran.results.users == 5
    # One user sends five requests a second: about fifteen in the warm-up, five and then a hundred after it.
    assert len(told) - len(begins) == pytest.approx(15, abs=5)
    assert int(ran.rows["TTFT", COMPLETIONS]["Request Count"]) == len(begins)
    late = [begin for begin in begins if begin > max(begins) - 3]
    assert len(late) == pytest.approx(75, rel=0.2)
    early = [begin for begin in begins if begin < min(begins) + 0.8]
    assert len(early) == pytest.approx(4, abs=2)


def test_failures_are_counted_named_and_judged(tmp_path: Path) -> None:
    with known_server(tmp_path, "--ttft-ms", "20", "--gap-ms", "5", "--fail-every", "4", "--break-every", "7") as server:
        ran = run_load_test(server.url, tmp_path, "-u", "3", "-t", "4s", "--max-tokens", "5", "--endpoint", "chat", "--slo-ttft-ms", "1000")
        forgiven = tmp_path / "forgiven"
        forgiven.mkdir()
        allowed = run_load_test(
            server.url, forgiven, "-u", "1", "-t", "2s", "--max-tokens", "5", "--max-error-share", "1", "--slo-share", "0"
        )
    figures = ran.results.figures
    assert ran.code == 1
    assert "of the requests failed, 0.0% may" in ran.log
    failed = [sample for sample in ran.samples if sample.outcome is Outcome.FAILED]
    assert figures.failed == len(failed) > 10
    assert {"HTTP 503: no room"} < set(figures.errors)
    assert len(figures.errors) == 2
    assert figures.slo["all"] == pytest.approx(figures.done / (figures.done + figures.failed))
    assert allowed.code == 0


def test_a_killed_test_leaves_no_results_of_an_earlier_one(tmp_path: Path) -> None:
    results, samples = tmp_path / "results.json", tmp_path / "samples.jsonl"
    results.write_text("earlier")
    samples.write_text("earlier")
    with known_server(tmp_path, "--ttft-ms", "10", "--gap-ms", "5") as server:
        refused = run_load_test(server.url, tmp_path, "--max-tokens", "9:3")
        unanswered = run_load_test("http://127.0.0.1:9", tmp_path)
        assert (refused.code, unanswered.code) == (2, 2)
        assert results.read_text() == samples.read_text() == "earlier"
        with subprocess.Popen(command_of(server.url, tmp_path, "-u", "1", "-t", "60s", "--max-tokens", "5")) as running:
            while not server.told_file.exists() or not server.told:
                assert running.poll() is None
                time.sleep(0.1)
            running.kill()
    assert results.read_text() == samples.read_text() == ""
    with pytest.raises(ConfigError, match="holds no results of a load test"):
        read_results(results)


def test_keys_and_certificates(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    certificate, key = pair
    secret = tmp_path / "keys"
    secret.write_text("sesame\nother\n")
    flags = ["-u", "1", "-t", "1s", "--max-tokens", "5"]
    quick = ["--ttft-ms", "10", "--gap-ms", "5"]
    with known_server(tmp_path, *quick, "--key", "sesame", "--certificate", str(certificate), "--certificate-key", str(key)) as server:
        url = server.url.replace("http:", "https:") + "/v1/"
        keyed = ["--api-key-file", str(secret)]
        assert run_load_test(url, tmp_path, *flags, *keyed, SSL_CERT_FILE=str(certificate)).code == 0
        assert run_load_test(url, tmp_path, *flags, "--insecure", OPENAI_API_KEY="sesame").code == 0
        unknown = run_load_test(url, tmp_path, *flags, *keyed)
        unkeyed = run_load_test(url, tmp_path, *flags, "--insecure")
    assert unknown.code == unkeyed.code == 2
    assert "CERTIFICATE_VERIFY_FAILED" in unknown.log
    assert "HTTP 401: a key is needed" in unkeyed.log
    assert "sesame" not in (tmp_path / "results.json").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "somewhere"], "--host: 'somewhere' is no address"),
        (["--host", "http://127.0.0.1:9"], "--host: the server does not answer"),
        (["--prompts", "/no/such/file"], "--prompts: /no/such/file cannot be read"),
        (["--prompts", ""], "--prompts: . cannot be read: Is a directory"),
        (["--max-tokens", "9:3"], "--max-tokens: '9:3' is not possible"),
        (["--max-tokens", "1000000000000"], "--max-tokens: '1000000000000' is not possible"),
        (["--input-tokens", "many"], "--input-tokens: 'many' is no length"),
        (["--input-tokens", ""], "--input-tokens: '' is no length"),
        (["--input-tokens", "1000000000000"], "give 1 <= MIN <= MAX <= 10000000"),
        (["--stages", "5"], "--stages: '5' names no stages"),
        (["--stages", ""], "--stages: '' names no stages"),
        (["--stages", "0:5,0:3"], "users have to be 0 or more, and 1 or more once"),
        (["--stages", "1:5,2:5", "--warmup", "10"], "--warmup: the test ends after 10 s, so no request would count"),
        (["--run-time", "5", "--warmup", "6"], "--warmup: the test ends after 5 s"),
        (["--run-time", "0"], "--run-time: 0 would be no limit"),
        (["--users", "0"], "--users: a test needs 1 or more"),
        (["--users=-1"], "--users: a test needs 1 or more"),
        (["--model", ""], "--model: a name cannot be empty"),
        (["--max-tokens", "7", "--abort-share", "0.5"], "--abort-after: no answer has 8 events with tokens, since --max-tokens is 7"),
        (["--stages", "5:10", "--run-time", "3"], "leave --run-time out"),
        (["--extra-body", '{"stream": false}'], "the load test itself sets stream"),
        (["--extra-body", "[]"], "is no JSON object"),
        (["--extra-body", '{"top_p": NaN}'], "is no JSON"),
        (["--extra-body", '{"n": 2}'], "n cannot be measured: the times of a request are those of one output"),
        (["--host", "http://[::1"], "--host: 'http://[::1' is no address"),
        (["--host", "http://127.0.0.1:port"], "--host: 'http://127.0.0.1:port' is no address"),
        (["--host", "http://a..b"], "--host: 'http://a..b' is no address"),
        (["--host", "http://user:secret@127.0.0.1"], "--host: an address holds no user and password"),
        (["--stages", "5:10", "--users", "3"], "leave --users out"),
        (["--rate", "3"], "--rate needs --arrivals poisson"),
        (["--abort-after", "3"], "--abort-after needs --abort-share"),
        (["--slo-share", "0.9"], "--slo-share needs a limit"),
        (["--input-tokens", "9", "--prompts", "p.jsonl"], "--input-tokens makes the prompts: leave --prompts out"),
        (["--results", "same.json", "--samples", "./same.json"], "the second would replace the first"),
        (["--api-key", "schlüssel"], "--api-key: a key has letters, digits and signs of ASCII alone"),
        (["--slo-share", "2"], "argument --slo-share: 2 is not possible; give a number from 0 to 1"),
        (["--gpus", "-1"], "argument --gpus: -1 is not possible"),
        (["--abort-share", "0.5", "--abort-after", "0"], "--abort-after: 0 is not possible"),
        (["--api-key-file", "/no/such/key"], "--api-key-file: /no/such/key cannot be read"),
        (["--results", "/no/such/folder/r.json"], "error: /no/such/folder/r.json: No such file or directory"),
        (["--results", "/"], "error: /: Is a directory"),
        (["--processes", "2"], "one process measures"),
        (["--warm-up", "3"], "Did you mean '--warmup'?"),
    ],
)
def test_a_flag_that_is_no_good_ends_with_code_2_and_says_why(flags: list[str], message: str, tmp_path: Path) -> None:
    with known_server(tmp_path) as server:
        ran = run_load_test(server.url, tmp_path, *flags)
    assert ran.code == 2
    assert message in ran.log
    assert "Traceback" not in ran.log


@pytest.mark.parametrize(("given", "output"), [("--prompts", "--results"), ("--api-key-file", "--samples")])
def test_what_is_read_is_not_written_over(given: str, output: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"prompt":"Why?"}\n')
    with known_server(tmp_path) as server:
        ran = run_load_test(server.url, tmp_path, given, str(file), output, str(file), "--run-time", "1", "--users", "1")
    assert (ran.code, "one names a file that is read, which it would replace" in ran.log) == (2, True)
    assert file.read_text() == '{"prompt":"Why?"}\n'


@pytest.mark.slow
def test_one_core_reads_256_streams(tmp_path: Path) -> None:
    """256 streams of 50 tokens a second each, on one core: 12,800 a second, and the times are right."""
    cores = sorted(os.sched_getaffinity(0))
    with known_server(tmp_path, "--ttft-ms", "200:1000", "--gap-ms", "20", core=cores[-1]) as server:
        ran = run_load_test(server.url, tmp_path, "-u", "256", "-r", "100", "-t", "15s", "--max-tokens", "200", core=cores[0])
        told = server.told
    figures = ran.results.figures
    assert figures.failed == 0
    assert figures.done == len(told)
    assert figures.tpot_ms is not None
    assert figures.e2e_ms is not None
    assert [figures.tpot_ms.mean, figures.tpot_ms.p50, figures.tpot_ms.p90] == pytest.approx([20, 20, 20], rel=0.05)
    wanted = np.percentile([request["e2e"] * 1000 for request in told], [50, 90, 95, 99])
    assert [figures.e2e_ms.p50, figures.e2e_ms.p90, figures.e2e_ms.p95, figures.e2e_ms.p99] == pytest.approx(wanted.tolist(), rel=0.05)
    assert ran.results.warnings == []
