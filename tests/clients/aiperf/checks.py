"""NVIDIA's aiperf, on both endpoints, streaming and not."""

from __future__ import annotations

import json
from typing import Any

from harness import FOLDER, KEY, MODEL, SCRATCH, URL, check, command, main


def profile(endpoint_type: str, *arguments: str) -> dict[str, Any]:
    out = SCRATCH / f"aiperf-{endpoint_type}{len(arguments)}"
    command(
        "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", endpoint_type, "--tokenizer", FOLDER, "--api-key", KEY,
        "--request-count", "6", "--concurrency", "3", "--isl", "16", "--osl", "8", "--extra-inputs", "ignore_eos:true",
        "--artifact-dir", str(out), "--ui", "none", "--use-server-token-count", *arguments,
    )  # fmt: skip
    (written,) = out.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(written.read_text())
    assert found["request_count"]["avg"] == 6
    assert found["output_sequence_length"]["avg"] == 8
    return found


@check
def chat_streams() -> None:
    found = profile("chat", "--streaming")
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0


@check
def chats() -> None:
    assert profile("chat")["request_latency"]["avg"] > 0


@check
def completion_streams() -> None:
    assert profile("completions", "--streaming")["time_to_first_token"]["avg"] > 0


main()
