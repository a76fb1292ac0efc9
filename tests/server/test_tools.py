from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import chat, chat_refused, chat_stream, said

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = {"name": "look_up", "arguments": {"word": "fox"}}
SECOND = {"name": "look_up", "arguments": {"word": "dog"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}}
    for name in ("look_up", "other")
]
NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest_asyncio.fixture(loop_scope="session")
async def tooled(fake: FakeEngine, start: Start) -> httpx.AsyncClient:
    return (await start(enable_auto_tool_choice=True, tool_call_parser="hermes")).client


@pytest.fixture(params=[1, 3, 50], ids=lambda count: f"{count} tokens a step")
def steps(fake: FakeEngine, request: pytest.FixtureRequest) -> None:
    fake.tokens_per_step = request.param


def calls(*called: dict[str, Any], before: str = "") -> str:
    return f"say {before}" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in called)


def streamed_calls(chunks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            names[call["index"]] = names.get(call["index"], "") + (call["function"].get("name") or "")
            arguments[call["index"]] = arguments.get(call["index"], "") + (call["function"].get("arguments") or "")
    return [(names[index], json.loads(arguments[index])) for index in sorted(names)]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("called", [[CALL], [CALL, SECOND]])
async def test_calls(tooled: httpx.AsyncClient, called: list[dict[str, Any]]) -> None:
    body = await chat(tooled, calls(*called), tools=TOOLS)
    message = ChatCompletion.model_validate(body, strict=True).choices[0].message
    expected = [(call["name"], call["arguments"]) for call in called]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()] == expected
    assert not message.content
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    chunks = await chat_stream(tooled, calls(*called), tools=TOOLS)
    assert streamed_calls(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert said(chunks) == ""


@pytest.mark.usefixtures("steps")
async def test_text_before_a_call(tooled: httpx.AsyncClient) -> None:
    body = await chat(tooled, calls(CALL, before="Let me see. "), tools=TOOLS)
    assert body["choices"][0]["message"]["content"].strip() == "Let me see."
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    chunks = await chat_stream(tooled, calls(CALL, before="Let me see. "), tools=TOOLS)
    assert said(chunks).strip() == "Let me see."
    assert streamed_calls(chunks) == [("look_up", {"word": "fox"})]


@pytest.mark.usefixtures("steps")
async def test_one_call_at_most(tooled: httpx.AsyncClient) -> None:
    body = await chat(tooled, calls(CALL, SECOND), tools=TOOLS, parallel_tool_calls=False)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert len(streamed_calls(await chat_stream(tooled, calls(CALL, SECOND), tools=TOOLS, parallel_tool_calls=False))) == 1


async def test_plain_answers_stay_plain(tooled: httpx.AsyncClient) -> None:
    body = await chat(tooled, "say nothing to call", tools=TOOLS)
    assert body["choices"][0]["message"]["content"] == "nothing to call"
    assert "tool_calls" not in body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert said(await chat_stream(tooled, "say nothing to call", tools=TOOLS)) == "nothing to call"


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_forced_calls_bring_a_grammar(fake: FakeEngine, tooled: httpx.AsyncClient, choice: Any, reason: str) -> None:
    body = await chat(tooled, calls(CALL), tools=TOOLS, tool_choice=choice)
    assert fake.seen[-1].params.structured_outputs is not None
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", {"word": "fox"})
    assert body["choices"][0]["finish_reason"] == reason
    chunks = await chat_stream(tooled, calls(CALL), tools=TOOLS, tool_choice=choice)
    assert streamed_calls(chunks) == [("look_up", {"word": "fox"})]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("count", [1, 2])
async def test_each_choice_has_its_own_calls(tooled: httpx.AsyncClient, count: int) -> None:
    body = await chat(tooled, calls(CALL), tools=TOOLS, n=count)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
    assert len(set(ids)) == count


async def test_calls_and_their_results_are_read_again(fake: FakeEngine, tooled: httpx.AsyncClient) -> None:
    call = (await chat(tooled, calls(CALL), tools=TOOLS))["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": None, "tool_calls": call["tool_calls"]},
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "an animal"},
    ]
    body = await chat(tooled, messages=messages, tools=TOOLS, max_tokens=2, return_token_ids=True)
    assert fake.tokenizer.decode(body["prompt_token_ids"]).endswith("<|assistant|><|tool|>an animal<|assistant|>")


async def test_without_a_parser_tools_are_only_shown_where_none_may_be_called(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await chat(client, calls(CALL), tools=TOOLS, tool_choice="none", return_token_ids=True)
    assert fake.tokenizer.decode(body["prompt_token_ids"]).startswith("<|tools|>look_up other ")
    assert body["choices"][0]["message"]["content"].startswith("<tool_call>")
    for choice in (None, "auto", "required", NAMED):
        error = await chat_refused(client, 400, tools=TOOLS, tool_choice=choice)
        assert "--tool-call-parser" in error["message"]


async def test_a_choice_of_none_hides_tools_if_told(fake: FakeEngine, start: Start) -> None:
    running = await start(enable_auto_tool_choice=True, tool_call_parser="hermes", exclude_tools_when_tool_choice_none=True)
    body = await chat(running.client, tools=TOOLS, tool_choice="none", return_token_ids=True)
    assert "<|tools|>" not in fake.tokenizer.decode(body["prompt_token_ids"])


@pytest_asyncio.fixture(loop_scope="session")
async def thinking(fake: FakeEngine, start: Start) -> AsyncIterator[httpx.AsyncClient]:
    fake.vllm_config.structured_outputs_config.reasoning_parser = "deepseek_r1"
    fake.script = lambda *_: "<think>I wonder.</think>It is so.<|endoftext|>"
    yield (await start()).client


@pytest.mark.usefixtures("steps")
async def test_reasoning_is_kept_apart(thinking: httpx.AsyncClient) -> None:
    body = await chat(thinking)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I wonder.", "It is so.")
    assert 0 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] < body["usage"]["completion_tokens"]
    chunks = await chat_stream(thinking, stream_options={"include_usage": True})
    assert (said(chunks, key="reasoning"), said(chunks)) == ("I wonder.", "It is so.")
    assert chunks[-1]["usage"] == body["usage"]


async def test_hidden_reasoning_does_not_come_out_by_the_tokens(thinking: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    body = await chat(thinking, **request)
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is so.", "refusal": None}
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    text = json.dumps(await chat_stream(thinking, **request))
    assert "wonder" not in text
    assert 'logprobs": {' not in text
