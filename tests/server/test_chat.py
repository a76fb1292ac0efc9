from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine
from tests.server.sse import chat, chat_refused, chat_stream, complete, said, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_response_is_openais(client: httpx.AsyncClient) -> None:
    body = await chat(client, max_completion_tokens=5, temperature=0, ignore_eos=True)
    answer = ChatCompletion.model_validate(body, strict=True)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "served"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, answer.usage.prompt_tokens + 5)


async def test_stream_equals_whole(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"max_completion_tokens": 20, "temperature": 0}
    whole = await chat(client, **request)
    chunks = await chat_stream(client, **request, stream_options={"include_usage": True})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert said(chunks) == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole["choices"][0]["finish_reason"]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_being_asked_streams_hold_no_usage(client: httpx.AsyncClient) -> None:
    assert all("usage" not in chunk for chunk in await chat_stream(client, max_tokens=4))


async def test_the_template_makes_the_prompt(client: httpx.AsyncClient, engine: Any) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = await chat(client, messages=messages, return_token_ids=True, max_tokens=1)
    assert engine.get_tokenizer().decode(body["prompt_token_ids"]) == "<|system|>Be kind.<|user|>Hi<|assistant|>"
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    assert len(body["choices"][0]["token_ids"]) == 1


async def test_a_conversation_continues_as_its_template_does(client: httpx.AsyncClient) -> None:
    request: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    rendered = await complete(client, prompt="<|user|>hello<|assistant|>", add_special_tokens=False, **request)
    assert (await chat(client, **request))["choices"][0]["message"]["content"] == rendered["choices"][0]["text"]


async def test_template_kwargs(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    body = await chat(client, chat_template_kwargs={"shout": "LOUD"}, return_token_ids=True)
    assert "<|LOUD|>" in fake.tokenizer.decode(body["prompt_token_ids"])


async def test_defaults_of_template_kwargs(fake: FakeEngine, start: Start) -> None:
    client = (await start(default_chat_template_kwargs={"shout": "LOUD"})).client
    body = await chat(client, return_token_ids=True)
    assert "<|LOUD|>" in fake.tokenizer.decode(body["prompt_token_ids"])
    body = await chat(client, chat_template_kwargs={"shout": "low"}, return_token_ids=True)
    assert "<|low|>" in fake.tokenizer.decode(body["prompt_token_ids"])


async def test_a_request_may_bring_a_template_only_where_it_is_trusted(fake: FakeEngine, start: Start) -> None:
    template = "{{ messages[0].content }}!"
    error = await chat_refused((await start()).client, 400, chat_template=template)
    assert "--trust-request-chat-template" in error["message"]
    body = await chat((await start(trust_request_chat_template=True)).client, chat_template=template, return_token_ids=True)
    assert fake.tokenizer.decode(body["prompt_token_ids"]) == "hello!"


async def test_the_last_message_can_be_continued_and_echoed(client: httpx.AsyncClient, engine: Any) -> None:
    messages = [{"role": "user", "content": "say what"}, {"role": "assistant", "content": "the quick"}]
    request: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    plain = await chat(client, **request)
    assert engine.get_tokenizer().decode(plain["prompt_token_ids"]).endswith("<|assistant|>the quick")
    text = "the quick" + plain["choices"][0]["message"]["content"]
    assert (await chat(client, **request, echo=True))["choices"][0]["message"]["content"] == text
    assert said(await chat_stream(client, **request, echo=True)) == text


async def test_max_completion_tokens_wins_and_the_context_is_the_default(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    await chat(client, max_tokens=9, max_completion_tokens=3)
    body = await chat(client, max_tokens=9)
    await chat(client)
    room = fake.model_config.max_model_len - body["usage"]["prompt_tokens"]
    assert [request.params.max_tokens for request in fake.seen] == [3, 9, room]


@pytest.mark.parametrize(("keep", "limit", "length"), [(7, 4, 7), (-1, 100, 412), (-1, None, 511)])
async def test_long_conversations_can_be_cut(client: httpx.AsyncClient, keep: int, limit: int | None, length: int) -> None:
    body = await chat(client, "the quick " * 600, truncate_prompt_tokens=keep, max_tokens=limit, return_token_ids=True)
    assert len(body["prompt_token_ids"]) == length


@pytest.mark.parametrize("temperature", [0, 1])
async def test_n_choices(client: httpx.AsyncClient, temperature: float) -> None:
    request: dict[str, Any] = {"n": 3, "max_tokens": 6, "temperature": temperature, "seed": 5, "ignore_eos": True}
    whole = await chat(client, **request)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 18
    chunks = await chat_stream(client, **request)
    for choice in whole["choices"]:
        assert said(chunks, choice["index"]) == choice["message"]["content"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_nothing_follows_a_stop_string(fake: FakeEngine, client: httpx.AsyncClient, streamed: bool) -> None:
    fake.tokens_per_step = 7
    request: dict[str, Any] = {"stop": "STOP", "logprobs": True, "return_token_ids": True, "max_tokens": 40}
    if streamed:
        chunks = await chat_stream(client, "say one two STOP three four", **request, stream_options={"include_usage": True})
        parts = [chunk["choices"][0] for chunk in chunks[:-1]]
        text, usage, last = said(chunks), chunks[-1]["usage"], parts[-1]
        ids = [token for part in parts for token in part.get("token_ids", [])]
        tokens = [entry["token"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    else:
        body = await chat(client, "say one two STOP three four", **request)
        last = body["choices"][0]
        text, usage, ids = last["message"]["content"], body["usage"], last["token_ids"]
        tokens = [entry["token"] for entry in last["logprobs"]["content"]]
    assert text == "one two "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")
    assert "".join(tokens) == fake.tokenizer.decode(ids)
    assert "three" not in "".join(tokens)
    assert usage["completion_tokens"] == len(ids) == len(tokens)


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs(client: httpx.AsyncClient, streamed: bool) -> None:
    request: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3, "skip_special_tokens": False}
    body = await chat(client, **request)
    text, content = body["choices"][0]["message"]["content"], body["choices"][0]["logprobs"]["content"]
    if streamed:
        chunks = await chat_stream(client, **request)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        content = [entry for part in parts if part is not None for entry in part["content"]]
        assert said(chunks) == text
    assert len(content) == body["usage"]["completion_tokens"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= 0


async def test_without_alternatives_logprobs_name_the_token_alone(client: httpx.AsyncClient) -> None:
    body = await chat(client, max_tokens=2, logprobs=True, ignore_eos=True)
    assert [entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_bytes_of_split_characters_make_the_text(client: httpx.AsyncClient, fake: FakeEngine) -> None:
    fake.tokens_per_step = 1
    chunks = await chat_stream(client, "say a 🦊 b", logprobs=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    content = [entry for part in parts if part is not None for entry in part["content"]]
    assert said(chunks) == "a 🦊 b"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode().startswith("a 🦊 b")


NULLABLE = (
    "n temperature top_p stop stream stream_options tools tool_choice logprobs top_logprobs seed logit_bias response_format max_tokens"
    " max_completion_tokens user parallel_tool_calls reasoning_effort chat_template_kwargs presence_penalty frequency_penalty"
)


@pytest.mark.parametrize("field", NULLABLE.split())
async def test_null_is_the_default(client: httpx.AsyncClient, field: str) -> None:
    body = await chat(client, **{"max_tokens": 2, field: None})
    assert len(body["choices"]) == 1


async def test_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "store": True, "metadata": {}}
    response = await client.post("/v1/chat/completions", json=request)
    assert response.status_code == 200
    assert response.headers["X-MineDraft-Ignored-Fields"] == "store, metadata"


@pytest.mark.parametrize("constraint", ["response_format", "structured_outputs"])
async def test_constraints_reach_the_engine(fake: FakeEngine, client: httpx.AsyncClient, constraint: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        "structured_outputs": {"json": schema},
    }
    await chat(client, **{constraint: fields[constraint]}, max_tokens=2)
    params = fake.seen[-1].params.structured_outputs
    assert params is not None
    assert params.json == schema
    await chat(client, response_format={"type": "json_object"}, max_tokens=2)
    assert fake.seen[-1].params.structured_outputs.json_object is True
    await chat(client, response_format={"type": "text"}, max_tokens=2)
    assert fake.seen[-1].params.structured_outputs is None


def deep_call() -> dict[str, Any]:
    """A tool call whose arguments nest deeper than Python's JSON decoder goes."""
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "nothing", "x": 1}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [deep_call()]}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"chat_template": "{{ x"}, None),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_bad_fields(client: httpx.AsyncClient, fields: dict[str, Any], param: str | None, streamed: bool) -> None:
    error = await chat_refused(client, 400, **({"stream": True} if streamed and "stream_options" not in fields else {}), **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    assert (await chat_refused(client, 404, model="other"))["code"] == "model_not_found"


async def test_chats_are_watched_like_completions(fake: FakeEngine, start: Start) -> None:
    records: list[Any] = []
    running = await start(report=records.append)
    await chat(running.client, n=2, max_tokens=4, ignore_eos=True)
    await chat_stream(running.client, "say hi")
    assert [(record.gen_len, record.finish_reason) for record in records[:2]] == [(4, "length")] * 2
    assert records[2].finish_reason == "stop"
    assert records[2].request_id.startswith("chatcmpl-")


async def test_a_client_that_leaves_ends_its_chat(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.step_seconds = 0.01
    request = {"messages": [{"role": "user", "content": "go"}], "stream": True, "n": 2}
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        await anext(response.aiter_lines())
    await until(lambda: fake.unfinished == 0)
    assert fake.aborted == 2


async def test_a_failure_in_a_stream_is_an_event(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.step_seconds = 0.01
    request = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        lines = response.aiter_lines()
        await anext(lines)
        fake.fail()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert rest[-1] == "data: [DONE]"
