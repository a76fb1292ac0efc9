"""GuideLLM: one request at a time, and several streams at once."""

from __future__ import annotations

import json
from typing import Any

from harness import FOLDER, KEY, MODEL, SCRATCH, URL, check, command, main


def benchmark(request_format: str, profile: str) -> dict[str, Any]:
    out = SCRATCH / f"{request_format.strip('/').replace('/', '-')}.json"
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "api_key": KEY, "request_format": request_format}
    command(
        "guidellm", "run", "--disable-console", "--backend", json.dumps(backend), "--profile", profile,
        "--constraint", "kind=max_requests,count=4", "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": FOLDER}),
        "--output", json.dumps({"kind": "json", "path": str(out)}),
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    (found,) = json.loads(out.read_text())["benchmarks"]
    result: dict[str, Any] = found
    return result


def check_requests(found: dict[str, Any]) -> None:
    requests = found["requests"]
    assert len(requests["successful"]) == 4, requests["errored"]
    assert not requests["errored"]
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8, request["output_metrics"]


@check
def completions_one_by_one() -> None:
    check_requests(benchmark("/v1/completions", "kind=synchronous"))


@check
def chats_at_once() -> None:
    check_requests(benchmark("/v1/chat/completions", "kind=concurrent,streams=2"))


main()
