"""The pipeline behind HTTP: this product's server, and vLLM's own with our scheduler and worker, on a GPU."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from minedraft_core.bench.prompts import read_prompts
from minedraft_core.vllm.args import draft_model_speculation, runs_on_cpu
from tests.gpu.check.basics import CPU, FAST, TIE, pipeline
from tests.gpu.check.findings import attempt, figure, say
from tests.starter import started

PROMPTS, TOKENS, START_SECONDS, END_SECONDS = 16, 64, 300.0, 30.0
GPU = "minedraft_core.vllm.gpu"


def stage_serve(arguments) -> None:
    common = CPU if runs_on_cpu() else ("--gpu-memory-utilization", str(arguments.memory), "--compilation-config", FAST)
    common = (*common, "--max-model-len", "1024", *arguments.flags)
    own = {"model": arguments.draft, "num_speculative_tokens": arguments.k, "is_parallel": True}
    device = arguments.devices[0]
    ours = (sys.executable, "-m", "server.cli", "serve", "--model", arguments.target, *common)
    place = () if device is None else ("--drafter-device", str(device))
    servers = {"plain": ours, "minedraft serve": (*ours, "--speculative-config", json.dumps(own), *place)}
    if not runs_on_cpu():
        additional = {"minedraft": {"speculative": {"is_parallel": True}, "drafter": {"device": device}}}
        speculation = draft_model_speculation(pipeline(arguments, arguments.draft, "parallel", device))
        classes = ("--scheduler-cls", f"{GPU}.scheduler.MineDraftAsyncScheduler", "--worker-cls", f"{GPU}.worker.MineDraftWorker")
        configs = ("--speculative-config", json.dumps(speculation), "--additional-config", json.dumps(additional))
        vllm = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.target)
        servers["vllm serve"] = (*vllm, *classes, *configs, *common)
    plain: list[dict] = []
    for name, command in servers.items():
        with attempt(name), _serving(name, command) as address:
            found = _texts(address, arguments.target)
            if name == "plain":
                plain = found
                continue
            _compare(name, found, plain)
            _streamed(name, address, arguments.target)
            _metrics(name, address)


@contextmanager
def _serving(name: str, command: tuple[str, ...]):
    """The address of a server that answers, ended with SIGTERM."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, started(command, Path(folder) / "log", START_SECONDS) as (address, process):
        say(None, f"{name}: started in {time.monotonic() - began:.0f} s")
        yield address
        process.terminate()
        code = process.wait(END_SECONDS)
        say(code in (0, -signal.SIGTERM), f"{name}: ended with {code} when told to")


def _ask(address: str, body: dict):
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def _body(target: str, prompt: str) -> dict:
    return {"model": target, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def _texts(address: str, target: str) -> list[dict]:
    """Tokens as text and their most likely rivals, as OpenAI's log-probabilities, of some prompts at once."""

    def one(prompt: str) -> dict:
        with _ask(address, {**_body(target, prompt), "logprobs": 5}) as answer:
            return json.load(answer)["choices"][0]["logprobs"]

    with ThreadPoolExecutor(PROMPTS) as pool:
        return list(pool.map(one, read_prompts()[:PROMPTS]))


def _compare(name: str, found: list[dict], plain: list[dict]) -> None:
    """Whether texts are those of plain decoding, or part where the target found both tokens about as likely."""
    gaps = []
    for ours, theirs in zip(found, plain, strict=True):
        at = next((at for at, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)) if a != b), None)
        if at is not None:
            likely = theirs["top_logprobs"][at]
            gaps.append(round(abs(likely.get(ours["tokens"][at], -99.0) - likely[theirs["tokens"][at]]), 3))
    same = len(plain) - len(gaps)
    say(bool(plain) and all(gap <= TIE for gap in gaps), f"{name}: {same} of {len(plain)} texts identical, others part at gaps {gaps}")
    figure(server=name, identical=same, gaps=gaps)


def _streamed(name: str, address: str, target: str) -> None:
    """Whether a streamed text is the one that comes whole."""
    body = _body(target, read_prompts()[0])
    with _ask(address, body) as answer:
        whole = json.load(answer)["choices"][0]["text"]
    with _ask(address, {**body, "stream": True}) as answer:
        events = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n\n") if line.startswith(b"data: ")]
    text = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
    say(events[-1] == b"[DONE]" and text == whole, f"{name}: {len(events) - 1} events, the text of one answer")


def _metrics(name: str, address: str) -> None:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = ("minedraft_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    counts = {one: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(one)) for one in names}
    found = {one: count for one, count in counts.items() if any(line.startswith(one) for line in lines)}
    say(len(set(found.values())) == 1 and min(found.values()) > 0, f"{name}: drafts accepted by its metrics {found}")
