"""Requests generated from /openapi.json: no 5xx, and every response as it is described."""

from __future__ import annotations

from pathlib import Path

from harness import KEY, URL, check, command, main

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
COMMON = (
    "--header", f"Authorization: Bearer {KEY}",
    "--checks", ",".join(CHECKS),
    "--generation-deterministic", "--workers", "1", "--request-timeout", "60", "--suppress-health-check", "all",
)  # fmt: skip


def run(*arguments: str) -> None:
    command(
        "schemathesis", "run", f"{URL}/openapi.json", *COMMON, *arguments, SCHEMATHESIS_HOOKS="hooks", PYTHONPATH=str(Path(__file__).parent)
    )


@check
def whatever_the_description_allows_and_forbids() -> None:
    run("--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-examples", "30")


main()
