"""The `llm` command with this server's models in its list."""

from __future__ import annotations

import json

from harness import KEY, MODEL, SCRATCH, URL, check, command, main

HOME = SCRATCH / "llm"
HOME.mkdir(exist_ok=True)
# JSON is YAML.
(HOME / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {"model_id": "here", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "here", "supports_schema": True},
            {"model_id": "here-text", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "here", "completion": True},
        ]
    )
)
(HOME / "keys.json").write_text(json.dumps({"here": KEY}))


def llm(*arguments: str) -> str:
    return command("llm", *arguments, LLM_USER_PATH=str(HOME)).strip()


@check
def models_are_listed() -> None:
    assert "here-text" in llm("models")


@check
def a_stream_equals_the_whole() -> None:
    options = ("-m", "here", "Name a colour.", "-o", "max_tokens", "8", "-o", "temperature", "0")
    assert llm(*options) == llm(*options, "--no-stream") != ""


@check
def a_system_prompt() -> None:
    assert llm("-m", "here", "-s", "Be brief.", "Name a bird.", "-o", "max_tokens", "8")


@check
def a_conversation_goes_on() -> None:
    llm("-m", "here", "My name is Ada.", "-o", "max_tokens", "8")
    assert llm("-c", "What is my name?", "-o", "max_tokens", "8")


@check
def a_schema() -> None:
    assert set(json.loads(llm("-m", "here", "--schema", "wet bool", "Is water wet?", "-o", "max_tokens", "32"))) == {"wet"}


@check
def text_completion() -> None:
    assert llm("-m", "here-text", "Once upon a time", "-o", "max_tokens", "8")


main()
