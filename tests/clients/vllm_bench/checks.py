"""vLLM's serving benchmark, as a module of the server's own environment."""

from __future__ import annotations

import json
from typing import Any

from harness import FOLDER, KEY, MODEL, SCRATCH, URL, check, command, main

PROGRAM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main;"
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def benchmark(backend: str, endpoint: str) -> dict[str, Any]:
    name = f"vllm-{backend}.json"
    command(
        "python", "-c", PROGRAM, "--backend", backend, "--base-url", URL, "--endpoint", endpoint, "--model", MODEL, "--tokenizer", FOLDER,
        "--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6", "--max-concurrency", "3",
        "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(SCRATCH), "--result-filename", name,
        OPENAI_API_KEY=KEY,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((SCRATCH / name).read_text())
    return found


@check
def completions() -> None:
    found = benchmark("openai", "/v1/completions")
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)


@check
def chat() -> None:
    found = benchmark("openai-chat", "/v1/chat/completions")
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)


main()
